// After a deletion, a notice with an Undo button stays for some seconds.
const OFFERED_MS = 12000;
const offers = element.querySelector(".offers");
let offered = 0;

function offer(undo) {
  clearTimeout(offered);
  offers.replaceChildren();
  if (!undo) return;
  const label = document.createElement("span");
  const take = document.createElement("button");
  label.textContent = undo.text;
  take.type = "button";
  take.textContent = "Undo";
  take.dataset.act = "undo";
  take.onclick = () => {
    offers.replaceChildren();
    trigger("act", { act: "undo", message: undo.token });
  };
  offers.append(label, take);
  offered = setTimeout(() => offers.replaceChildren(), OFFERED_MS);
}
