// The thinking of a model, before its answer. The program finds it (engine/thinking.py) and sends
// where it begins and ends, and where the answer begins: [from, to, answer], null for what is not
// known yet.

// The positions of the thinking and the answer: { from, to, answer, over }; null without thinking.
function thoughtOf(text, thought) {
  if (!thought) return null;
  const [from, to, answer] = thought.map((at) => Math.min(at ?? text.length, text.length));
  const over = thought[1] !== null && thought[1] <= text.length;
  return over && !text.slice(from, to).trim() ? { from, to: from, answer, over, none: true }
    : { from, to, answer, over };
}

// How many tokens begin in a part of the text.
function tokensIn(run, from, to) {
  return to > from ? firstFrom(run, to) - firstFrom(run, from) : 0;
}

function firstFrom(run, offset) {
  if (!run.ends.length || offset >= run.text.length) return run.ends.length;
  const token = tokenAt(run, offset);
  return startOf(run, token) < offset ? token + 1 : token;
}

function seconds(ms) {
  return ms < 10000 ? (ms / 1000).toFixed(1) + " s" : Math.round(ms / 1000) + " s";
}

// The folded box with the thinking of a turn. Its content is drawn when it is opened.
function thoughtBox(turn) {
  if (turn.thought) return turn.thought;
  const box = document.createElement("details");
  const head = document.createElement("summary");
  const inside = document.createElement("div");
  box.className = "thought";
  inside.className = "formatted";
  box.append(head, inside);
  box.addEventListener("toggle", () => show(turn));
  turn.thought = { box, head, page: { box: inside } };
  turn.box.prepend(box);
  return turn.thought;
}

function drawThought(turn, text, found) {
  const { box, head, page: inside } = thoughtBox(turn);
  const { run } = turn;
  const mine = live && live.turn === turn ? live : null;
  if (mine && mine.thinkingSince === undefined) mine.thinkingSince = performance.now();
  if (mine && found.over && mine.thoughtMs === undefined) {
    turn.thoughtMs = mine.thoughtMs = performance.now() - mine.thinkingSince;
  }
  const count = tokensIn(run, found.from, found.to);
  const length = run.texts.length ? `${count.toLocaleString("en")} token${count === 1 ? "" : "s"}` : "";
  const time = turn.thoughtMs ? `, ${seconds(turn.thoughtMs)}` : "";
  const done = found.over || !turn.growing;
  write(head, done ? `Thought${length && " for " + length}${time}` : `Thinking … ${length}`);
  box.classList.toggle("going", !done);
  if (box.open) drawPart(run, inside, text, found.from, found.to, done);
}
