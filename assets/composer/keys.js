// The keyboard. While an input method composes a word, Enter belongs to that method.
const FIELDS = "input, textarea, select, [contenteditable=true]";

function showChat() {
  const tab = [...document.querySelectorAll("[role=tab]")]
    .find((each) => each.textContent.trim() === "Chat");
  if (tab && tab.getAttribute("aria-selected") !== "true") tab.click();
}

function pressed(selector) {
  const found = document.querySelector(selector);
  if (found) found.click();
}

function findConversation() {
  showChat();
  document.dispatchEvent(new CustomEvent("strata:shelf"));
  requestAnimationFrame(() => {
    const search = document.querySelector("#search input, #search textarea");
    if (!search) return;
    search.focus();
    search.select();
  });
}

function newChat() {
  showChat();
  pressed("#new");
  focusBox();
}

function escape(event) {
  if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (!busy()) return;
  pressed("#stop");
  event.preventDefault();
}

function editLast() {
  const buttons = document.querySelectorAll("#tokens [data-act=edit]");
  if (buttons.length) buttons[buttons.length - 1].click();
}

function inBox(event) {
  const plain = !event.shiftKey && !event.altKey && !event.ctrlKey && !event.metaKey;
  const composes = event.isComposing || event.keyCode === 229;
  if (event.key === "Enter") {
    event.stopPropagation(); // Otherwise Gradio's own box would react too.
    if (!plain || composes) return;
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && plain && !area().value && !files.length) {
    event.preventDefault();
    editLast();
  }
}

document.addEventListener("keydown", (event) => {
  const target = event.target instanceof Element ? event.target : document.body;
  const command = event.ctrlKey || event.metaKey;
  const letter = event.key.toLowerCase();
  if (document.querySelector("dialog[open]")) return;
  if (target === area()) inBox(event);
  if (command && !event.shiftKey && !event.altKey && letter === "k") {
    event.preventDefault();
    findConversation();
  } else if (command && event.shiftKey && letter === "o") {
    event.preventDefault();
    newChat();
  } else if (event.key === "?" && !command && !target.closest(FIELDS)) {
    event.preventDefault();
    document.dispatchEvent(new CustomEvent("strata:help"));
  }
}, true);
document.addEventListener("keydown", (event) => {
  const composes = event.isComposing || event.keyCode === 229;
  if (event.key === "Escape" && !composes && inChat(event)) escape(event);
  else if (event.key === "Escape" && event.target === document.body) escape(event);
});
