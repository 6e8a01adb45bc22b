// The turns of a conversation: messages and answers, each in its own box. `body` fills a box, and
// `foot` draws the row below it. This file draws plain tokens; the chat replaces both
// (formatted.js, actions.js).
let body = {
  draw: (turn) => (turn.run.texts.length ? putTokens(turn) : write(turn.box, turn.text)),
  clear: () => {},
};
let foot = () => {};

function write(box, text) {
  if (box.textContent !== text) box.textContent = text;
}

const ROLES = { user: ["You", "said"], tool: ["Tool", "called"] };

function begin(key, role, run) {
  const frame = document.createElement("article");
  const box = document.createElement("div");
  const [who, kind] = ROLES[role] || ["Answer", "answered"];
  frame.className = role === "user" ? "message mine" : "message";
  frame.setAttribute("aria-label", who);
  box.className = "turn " + kind;
  if (kind === "answered") box.tabIndex = 0;
  frame.append(box);
  list.insertBefore(frame, sentinel);
  sizes.observe(frame);
  const turn = { key, role, frame, box, run, text: "", about: {}, drawn: 0, last: null };
  box.raw = () => (run.texts.length ? run.texts.join("") : turn.text);
  drawn.push(turn);
  return turn;
}

function grows(turn, growing) {
  turn.growing = growing;
  turn.frame.classList.toggle("growing", growing);
  turn.box.classList.toggle("growing", growing);
}

function drop(from) {
  drawn.splice(from).forEach(remove);
}

function remove(turn) {
  body.clear(turn);
  if (turn.editor && opened === turn) tellEdit(null);
  sizes.unobserve(turn.frame);
  turn.frame.remove();
}

// A continued answer stays as it was until its stream has sent it again.
let former = [];

function dropFormer() {
  former.splice(0).forEach(remove);
}

// Draw the new part of a turn.
function show(turn) {
  body.draw(turn);
  foot(turn);
}

// Draw the stored turns. The first `kept` are already drawn here, up to and including `after`. If
// another conversation or turn appears, the list scrolls to the end. `adopt` describes the stored
// form of the answer that was drawn while it grew.
function arrange({ kept = 0, after = "", turns = [], sources = [], adopt = null, stream = null }) {
  dropFormer();
  if (adopt && live && live.turn && live.turn === drawn[drawn.length - 1]) {
    const { turn } = live;
    turn.key = adopt.key;
    grows(turn, false);
    tell(turn, adopt);
    show(turn);
  }
  if (kept > drawn.length || (kept && drawn[kept - 1].key !== after)) {
    trigger("resend", {});
    return false;
  }
  const anew = turns.some((turn, i) => !drawn[kept + i] || drawn[kept + i].key !== turn.key);
  if (anew || kept + turns.length < drawn.length) pin(true);
  turns.forEach((turn, i) => {
    let there = drawn[kept + i];
    if (!there || there.key !== turn.key) {
      drop(kept + i);
      there = begin(turn.key, turn.role, newRun());
    }
    if (turn.groups) take(there.run, turn.groups, 0, sources);
    else there.text = turn.text;
    tell(there, turn);
    show(there);
  });
  if (stream && stream.on && !(live && live.token === stream.token)) {
    former = drawn.splice(kept + turns.length);
    for (const turn of former) grows(turn, true);
  } else drop(kept + turns.length);
  return true;
}

// Set the details of a turn. Where its thinking is remains known from its stream.
function tell(turn, about) {
  turn.about = { thought: turn.about.thought, ...about };
  turn.run.id = about.run || "";
}
