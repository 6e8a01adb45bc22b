// Connects everything once all components of the composer are on the page.
const opening = new MutationObserver(begin);
let begun = false;

// The server says which conversation is open.
function place({ conversation }) {
  const first = !begun;
  const moved = first || conversation !== here.conversation;
  const made = moved && born;
  here.conversation = conversation;
  document.documentElement.dataset.conversation = conversation || "";
  if (made) {
    saveDraft(null, "");
    saveWaits(null, []);
    changedWaits();
    keep();
  } else if (moved) {
    waits = savedWaits(conversation);
    held = !busy();
  }
  if (moved) born = false;
  if (moved && !made) {
    hurried = false;
    const typed = first && area() && area().value;
    if (typed) keep();
    else showDraft();
  }
  begun = true;
  drawWaits();
  ask();
}

// What is written from now on is for the new conversation, though the server has yet to show it.
function beginNew() {
  expect();
  place({ conversation: null });
}

function begin() {
  const row = document.querySelector(".composer");
  if (!row || !area() || !("opened" in document.documentElement.dataset)) return;
  opening.disconnect();
  area().setAttribute("enterkeyhint", "send");
  area().setAttribute("aria-label", "Message");
  document.querySelector("#attach").setAttribute("aria-label", "Attach files");
  document.querySelector("#attach").title = "Attach files: text, code, tables, PDF";
  new MutationObserver(follow).observe(row, { childList: true, subtree: true, attributes: true });
  follow();
  if (begun) return;
  begun = true;
  if (!area().value) showDraft();
  waits = savedWaits(here.conversation);
  drawWaits();
  if (area().value) ask();
}

document.addEventListener("input", (event) => {
  if (event.target !== area()) return;
  if (!ours) keep();
  drawWaits();
  ask();
});
document.addEventListener("click", (event) => {
  const on = (selector) => event.target.closest(selector);
  if (on("#send, #queue")) send();
  else if (on("#attach")) input.click();
  else if (on("#stop")) held = true;
  else if (on(".examples button")) {
    const message = { text: on("button").textContent.trim(), files: [] };
    if (coming !== null) queue(message);
    else if (!busy() && !sending) say(message, false);
  } else if (on("#new")) beginNew();
}, true);
listen("place", place);
document.addEventListener("strata:editing", ({ detail }) => {
  edited = detail;
  if (edited) edited.long = tooLong(edited.text);
  ask();
});
opening.observe(document.documentElement, { attributes: true, childList: true, subtree: true });
begin();
