// Sending. The page sends one message at a time. A message that is written while an answer grows
// waits in a visible list, and is sent when the answer has ended by itself. After Stop it waits for
// a click. A message for a new conversation waits there until the page has its settings, because
// they are sent with it.
const LATE_MS = 20000;
let number = 0;
let sending = null; // { number, message, waited }
let waits = []; // { text, files }
let held = true; // waiting messages are sent only by a click
let born = false; // the message that is being sent begins a conversation
let answering = false;
let hurried = false; // to be sent as soon as its files are read
let coming = null; // a timer, while the settings of a new conversation have not arrived

function written() {
  return { text: area().value, files: files.filter((file) => file.key) };
}

function expect() {
  clearTimeout(coming);
  coming = setTimeout(arrived, LATE_MS);
}

function arrived() {
  clearTimeout(coming);
  coming = null;
  drawWaits();
}

function send() {
  const message = written();
  if (tooLong(message.text)) return;
  hurried = files.some((file) => file.reading);
  if (hurried) {
    drawFiles(); // The message is sent when they are read; the list shows this.
    return;
  }
  if (!busy() && !sending && coming === null) {
    say(message, false);
    return;
  }
  if (!message.text.trim() && !message.files.length) return;
  queue(message);
  files = [];
  write("");
  keep();
  drawFiles();
}

function queue(message) {
  held = false;
  waits.push(message);
  changedWaits();
}

function say(message, waited) {
  number += 1;
  const mine = number;
  sending = { number, message, waited };
  held = false;
  born = here.conversation === null;
  document.dispatchEvent(new CustomEvent("strata:say"));
  setTimeout(() => answered({ number: mine, ok: false }), LATE_MS);
  trigger("say", {
    number, text: message.text, files: message.files.map((file) => file.key),
    conversation: here.conversation,
  });
  drawWaits();
}

// The message was accepted; or refused, and its text stays; or another page has begun an answer,
// and the message waits here for the end of that answer.
function answered({ number: which, ok, waits: toWait }) {
  if (!sending || sending.number !== which) return;
  const { message, waited } = sending;
  sending = null;
  if (toWait) {
    if (!waited) waits.push(message);
    setTimeout(sendNext, 300); // The answer may have ended before the page knew of it.
  } else if (!ok) {
    held = true;
    born = false;
  } else if (waited) {
    waits = waits.filter((other) => other !== message);
  }
  if ((ok || toWait) && !waited) {
    const sent = new Set(message.files.map((file) => file.key));
    files = files.filter((file) => !sent.has(file.key));
    if (area().value === message.text) write("");
    keep();
    drawFiles();
  }
  changedWaits();
}

// An answer begins or ends, or another conversation is shown.
function follow() {
  const now = busy();
  if (answering && !now) {
    ask();
    // The page may have left the conversation, and the event that says so comes first.
    setTimeout(sendNext, 300);
  }
  answering = now;
  drawWaits();
}

function sendNext() {
  if (!held && !sending && !busy() && coming === null && waits.length) say(waits[0], true);
}

function changedWaits() {
  saveWaits(here.conversation, waits);
  drawWaits();
}

function drawWaits() {
  const list = part("waits");
  const now = busy() || Boolean(sending);
  part("waiting").hidden = !waits.length;
  part("waiting").firstElementChild.textContent = now && !held
    ? "Sent when the answer has ended:" : "Not sent yet:";
  list.replaceChildren(...waits.map((message, at) => {
    const names = message.files.map((file) => file.name).join(", ");
    const label = [message.text.trim(), names].filter(Boolean).join(" · ");
    const line = node("li", "wait");
    const go = node("button", "go", "Send now");
    const away = node("button", "away", "Remove");
    line.append(node("span", "words", label));
    go.hidden = now || coming !== null || at > 0;
    go.addEventListener("click", () => say(message, true));
    away.setAttribute("aria-label", "Remove: " + label.slice(0, 60));
    away.addEventListener("click", () => {
      waits = waits.filter((other) => other !== message);
      changedWaits();
      focusBox();
    });
    line.append(go, away);
    return line;
  }));
  const text = area() ? area().value.trim() : "";
  document.documentElement.toggleAttribute("data-queues", busy() && Boolean(text || files.length));
}

listen("sent", answered);
listen("ready", () => {
  arrived();
  sendNext();
});
document.addEventListener("strata:preset", expect);
