// How full the context is. The page asks the server when the user stops typing, with one request at
// a time, and never while an answer grows; the last figures then stay.
const PAUSE_MS = 400;
const PER_MS = 500; // characters that make the pause a millisecond longer
const gauge = part("gauge");
let asking = null;
let later = 0;
let stale = false;

// Whether a text is too long to be sent, which is then said at once.
function tooLong(text) {
  if (text.length <= props.longest) return false;
  const counted = (count) => count.toLocaleString("en-US");
  part("drops").hidden = false;
  part("drops").textContent = `This message has ${counted(text.length)} characters, and at most `
    + `${counted(props.longest)} can be sent. Shorten it.`;
  return true;
}

function ask() {
  clearTimeout(later);
  const { text } = edited || { text: area() ? area().value : "" };
  if (tooLong(text)) return;
  const { length } = text;
  later = setTimeout(measure, PAUSE_MS + length / PER_MS);
}

function measure() {
  if (asking) {
    stale = true;
    return;
  }
  if (busy() || sending || !area()) return; // It is requested when the answer has ended.
  const { text, files: attached } = written();
  const nothing = !here.conversation && !text.trim() && !attached.length;
  if (nothing) {
    drawGauge({ tokens: 0, room: 0 });
    return;
  }
  number += 1;
  const mine = number;
  asking = mine;
  setTimeout(() => filled({ number: mine }), LATE_MS);
  trigger("measure", {
    number, conversation: here.conversation,
    ...(edited || { text, files: attached.map((file) => file.key) }),
  });
}

function drawGauge({ tokens, room, context, dropped, fits }) {
  const counted = (count) => count.toLocaleString("en-US");
  const percent = room ? Math.min(100, Math.round((100 * tokens) / room)) : 0;
  const label = room
    ? `Context: ${counted(tokens)} of ${counted(room)} tokens. ${counted(context - room)} more are kept `
      + "for the answer."
    : "Context: empty";
  gauge.firstElementChild.style.width = percent + "%";
  gauge.dataset.fill = percent >= 100 ? "over" : percent >= 80 ? "near" : "";
  gauge.setAttribute("aria-valuenow", percent);
  gauge.setAttribute("aria-valuetext", label);
  gauge.querySelector(".tip").textContent = label;
  const drops = part("drops");
  drops.hidden = !room || (fits && !dropped);
  drops.textContent = drops.hidden ? "" : fits
    ? `The context is full. The model will not read the ${dropped === 1
      ? "oldest message" : counted(dropped) + " oldest messages"} of this conversation.`
    : `This message is too long: ${counted(tokens)} tokens, where ${counted(room)} fit. Shorten it.`;
}

// The figures, or none if they are not known or did not come in time.
function filled(found) {
  if (found.number !== asking) return;
  asking = null;
  if (found.room) drawGauge(found);
  if (stale) {
    stale = false;
    ask();
  }
}

listen("filled", filled);
