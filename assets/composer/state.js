// Where messages are written. The page owns what is being written: the text, its files, the messages
// that wait. The server is asked for what only it knows. All files of this folder are one scope, in
// the order that app/web/tabs/composer.py names.
//
// `trigger` asks the server: "say" for a message, "attach" for the text of a file, "drop" to forget
// files, "measure" for how full the context is, "cancel" to leave the edit mode. Its replies are values
// of hidden components, which arrive as events of the document ("strata:sent", ...). Of such values
// the last one counts, and none is needed that came before.
const part = (name) => element.querySelector("." + name);
const area = () => document.querySelector("#box textarea");
const here = { conversation: null, editing: null };
let files = []; // of the message that is written: { key, name, size, tokens, exact } or { error }
let ours = false; // we write into the box, and nobody types

function listen(name, act) {
  document.addEventListener("strata:" + name, (event) => {
    if (event.detail) act(event.detail);
  });
}

// Whether an answer grows in the conversation that is shown: then there is a Stop.
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

function node(name, kind, words = "") {
  const made = document.createElement(name);
  made.className = kind;
  made.textContent = words;
  if (name === "button") made.type = "button";
  return made;
}

function focusBox() {
  const box = area();
  if (box) box.focus();
}
