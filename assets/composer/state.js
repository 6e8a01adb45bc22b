// The composer. The page owns the unsent message: its text, its files, and the messages that wait.
// All files of this folder share one scope, in the order that app/web/tabs/composer.py names.
//
// `trigger` sends requests to the server: "say" sends a message, "attach" reads a file, "drop"
// forgets files, "measure" asks how full the context is. Replies are values of hidden components,
// which arrive as events of the document ("strata:sent", ...). Only the last value counts, and
// earlier ones are not needed.
const part = (name) => element.querySelector("." + name);
const area = () => document.querySelector("#box textarea");
const here = { conversation: null };
let edited = null; // the message that is edited in its place (assets/chat/editing.js)
let files = []; // files of the unsent message: { key, name, size, tokens, exact } or { error }
let ours = false; // whether the script, not the user, writes into the box

function listen(name, act) {
  document.addEventListener("strata:" + name, (event) => {
    if (event.detail) act(event.detail);
  });
}

// Whether an answer grows in the shown conversation, so that there is a Stop button.
function busy() {
  const stop = document.querySelector("#stop");
  return Boolean(stop) && !stop.matches(".hide, .hidden");
}

function write(text) {
  const box = area();
  if (!box || box.value === text) return;
  ours = true;
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true }));
  ours = false;
}

function node(name, kind, text = "") {
  const made = document.createElement(name);
  made.className = kind;
  made.textContent = text;
  if (name === "button") made.type = "button";
  return made;
}

function focusBox() {
  const box = area();
  if (box) box.focus();
}
