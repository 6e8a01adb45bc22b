// Details of one token: the one under the pointer, the one that was tapped, or the one at the arrow
// keys' position. The line below the messages describes it. If the page has `explain`, a box at the
// word adds the reason why the token was fast. A tap shows the description in the box too, because
// on a phone the line is far away or hidden. A box that holds a link stays while the pointer is on
// its way to it or over it.
const DWELL_MS = 250;
const LEAVE_MS = 300;
const GAP = 6; // pixels between a word and its box
const wordBox = document.createElement("div");
wordBox.className = "word-box";
wordBox.setAttribute("role", "status");
wordBox.hidden = true;
list.after(wordBox);
let inspected = null;
let leaving = 0;

function inspect(span, token, tapped = false) {
  stay();
  const same = inspected && inspected.span === span && inspected.token === token;
  if (same && inspected.tapped === tapped) return;
  inspected = span && { span, token, tapped };
  wordBox.replaceChildren();
  wordBox.hidden = true;
  if (!span) {
    inspector.textContent = idle;
    return;
  }
  const words = describe(span.run, token);
  inspector.textContent = words;
  const mine = inspected;
  if (tapped) showAtWord(Object.assign(document.createElement("p"), { textContent: words }));
  else span.title = words;
  if (typeof explain === "function" && span.run.id) {
    setTimeout(() => { if (inspected === mine) tellMore(mine); }, tapped ? 0 : DWELL_MS);
  }
}

function stay() {
  clearTimeout(leaving);
  leaving = 0;
}

// The pointer has left the word or its box.
function pointerLeft({ pointerType }) {
  if (standing || pointerType === "touch") return;
  if (!wordBox.querySelector("button")) inspect(null);
  else leaving ||= setTimeout(() => inspect(null), LEAVE_MS);
}

async function tellMore(mine) {
  const { run } = mine.span;
  const reason = await explain(run.id, run.steps[mine.token], mine.token);
  if (reason && inspected === mine) showAtWord(reason);
}

function showAtWord(node) {
  wordBox.append(node);
  wordBox.classList.toggle("tapped", inspected.tapped);
  wordBox.hidden = false;
  placeAtWord();
}

// The box stands below its word, or above it if there is no room, and never leaves the messages.
function placeAtWord() {
  if (wordBox.hidden) return;
  const word = placeOf(inspected);
  const frame = list.getBoundingClientRect();
  const outside = !word || word.bottom < frame.top || word.top > frame.bottom;
  wordBox.style.visibility = outside ? "hidden" : "visible";
  if (outside) return;
  const below = frame.bottom - word.bottom - GAP;
  const above = word.top - frame.top - GAP;
  wordBox.style.maxWidth = frame.width + "px";
  wordBox.style.maxHeight = Math.max(below, above) + "px";
  const { width, height } = wordBox.getBoundingClientRect();
  const under = height <= below || below >= above;
  wordBox.style.top = (under ? word.bottom + GAP : word.top - GAP - height) + "px";
  wordBox.style.left = Math.max(frame.left, Math.min(word.left, frame.right - width)) + "px";
}

// The place of a token's first line on the screen.
function placeOf({ span, token }) {
  const { texts } = span.run;
  const text = span.firstChild;
  const before = texts.slice(span.first, token).join("").length - span.skip;
  if (!text || text.nodeType !== Node.TEXT_NODE) return span.getClientRects()[0];
  const part = document.createRange();
  part.setStart(text, Math.min(Math.max(0, before), text.length));
  part.setEnd(text, Math.min(Math.max(0, before + texts[token].length), text.length));
  return [...part.getClientRects()].find(({ width }) => width) || span.getClientRects()[0];
}

document.addEventListener("scroll", placeAtWord, { capture: true, passive: true });
window.addEventListener("resize", placeAtWord);

list.addEventListener("pointermove", (event) => {
  if (event.pointerType === "touch") return;
  const span = event.target.closest(".tok");
  if (span && span.run) inspect(span, pointed(span, event.clientX, event.clientY));
  else pointerLeft(event);
});
list.addEventListener("pointerleave", pointerLeft);
wordBox.addEventListener("pointerenter", stay);
wordBox.addEventListener("pointerleave", pointerLeft);
// The focus stays where it is, because the box closes when it moves.
wordBox.addEventListener("mousedown", (event) => event.preventDefault());

// A finger does not hover, so the box of a tapped word stays until another place is tapped.
let touching = false;
document.addEventListener("pointerdown", (event) => {
  touching = event.pointerType === "touch";
  const outside = !list.contains(event.target) && !wordBox.contains(event.target);
  if (inspected && inspected.tapped && outside) inspect(null);
}, true);
list.addEventListener("click", (event) => {
  if (!touching) return;
  const span = event.target.closest(".tok");
  if (!span || !span.run || event.target.closest("a, button, summary")) return inspect(null);
  const token = pointed(span, event.clientX, event.clientY);
  const again = inspected && inspected.span === span && inspected.token === token;
  if (again && inspected.tapped) inspect(null);
  else inspect(span, token, true);
});

// The keyboard: in a focused answer, the left and right arrows move from token to token, and Home
// and End to the first and the last token. Enter follows the link in the token's box.
const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
let standing = null;

function stand(span, token) {
  moveStanding(span, token);
  inspect(span, token);
}

function moveStanding(span, token) {
  if (standing) standing.span.classList.remove("at");
  standing = span && { span, token };
  if (span) span.classList.add("at");
}

// The next token in that direction, in this span or in its neighbour.
function beside(spans, { span, token }, by) {
  const next = token + by;
  if (next >= span.first && next < span.first + span.count) return { span, token: next };
  const other = spans[spans.indexOf(span) + Math.sign(by)];
  if (!other) return { span, token };
  return { span: other, token: by > 0 ? other.first : other.first + other.count - 1 };
}

list.addEventListener("keydown", (event) => {
  const by = STEPS[event.key];
  const box = event.target;
  const link = standing && box.classList.contains("answered") && wordBox.querySelector("button");
  if (event.key === "Enter" && link) link.click();
  if (!by || !box.classList.contains("answered")) return;
  const spans = [...box.querySelectorAll(".tok")].filter((span) => span.count);
  if (!spans.length) return;
  event.preventDefault();
  const begins = by === -Infinity || !standing || !spans.includes(standing.span);
  const last = spans[spans.length - 1];
  const place = by === Infinity ? { span: last, token: last.first + last.count - 1 }
    : begins ? { span: spans[0], token: spans[0].first } : beside(spans, standing, by);
  stand(place.span, place.token);
  place.span.scrollIntoView({ block: "nearest" });
});
// A tap on a button moves the focus before the click. If the box of a tapped word closed then, the
// button would move away from the finger, and the click would be lost.
list.addEventListener("focusout", () => {
  if (inspected && inspected.tapped) moveStanding(null);
  else stand(null);
});
