// What was deleted can be had back: a notice with Undo stays for some seconds.
const OFFERED_MS = 12000;
const offers = element.querySelector(".offers");
let offered = 0;

function offer(undo) {
  clearTimeout(offered);
  offers.replaceChildren();
  if (!undo) return;
  const words = document.createElement("span");
  const take = document.createElement("button");
  words.textContent = undo.words;
  take.type = "button";
  take.textContent = "Undo";
  take.dataset.act = "undo";
  take.onclick = () => {
    offers.replaceChildren();
    trigger("act", { act: "undo", message: undo.token });
  };
  offers.append(words, take);
  offered = setTimeout(() => offers.replaceChildren(), OFFERED_MS);
}

extra = (value) => {
  follow(value.stream);
  watchPages(value.watch);
  if ("undo" in value) offer(value.undo);
};
// The parser is there before the first answer is: it comes once the page has nothing else to do.
const spare = window.requestIdleCallback || ((call) => setTimeout(call, 1000));
spare(() => { if (!raw) markdown(); });
