// The turns of a conversation: what was said and answered, each in a box of its own. How a box is
// filled, and what stands below it, are `body` and `foot`: the chat gives others (formatted.js,
// actions.js) than the plain list of tokens here.
let body = {
  draw: (turn) => (turn.run.texts.length ? putTokens(turn) : write(turn.box, turn.said)),
  clear: () => {},
};
let foot = () => {};

function write(box, text) {
  if (box.textContent !== text) box.textContent = text;
}

function begin(key, role, run) {
  const frame = document.createElement("article");
  const box = document.createElement("div");
  const mine = role === "user";
  frame.className = mine ? "message mine" : "message";
  frame.setAttribute("aria-label", mine ? "You" : "Answer");
  box.className = "turn " + (mine ? "said" : "answered");
  if (!mine) box.tabIndex = 0;
  frame.append(box);
  list.insertBefore(frame, sentinel);
  const turn = { key, role, frame, box, run, said: "", about: {}, drawn: 0, last: null };
  box.raw = () => (run.texts.length ? run.texts.join("") : turn.said);
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
  turn.frame.remove();
}

// An answer that is gone on with stays as it was until its stream has brought it again.
let former = [];

function dropFormer() {
  former.splice(0).forEach(remove);
}

// Draw what is new of a turn.
function show(turn) {
  body.draw(turn);
  foot(turn);
}

// The stored turns, of which the first `kept` are drawn here already, up to the one `after`. Another
// conversation or another turn is looked at from its end. `adopt` is the answer that was drawn while
// it grew, as it is stored now.
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
  if (anew || kept + turns.length < drawn.length) pinned = true;
  turns.forEach((turn, i) => {
    let there = drawn[kept + i];
    if (!there || there.key !== turn.key) {
      drop(kept + i);
      there = begin(turn.key, turn.role, newRun());
    }
    if (turn.groups) take(there.run, turn.groups, 0, sources);
    else there.said = turn.text;
    tell(there, turn);
    show(there);
  });
  if (stream && stream.on && !(live && live.token === stream.token)) {
    former = drawn.splice(kept + turns.length);
    for (const turn of former) grows(turn, true);
  } else drop(kept + turns.length);
  return true;
}

// What is known of a turn. That its template has begun its thinking is known while it grows.
function tell(turn, about) {
  turn.about = { thinking: turn.about.thinking, ...about };
  turn.run.id = about.run || "";
}
