// A turn as Markdown, drawn while it grows. A top-level block is final once another one begins in a
// complete line. Final blocks are kept, and only the text after them is parsed and drawn again. At
// the end all of it is parsed once more, so a finished answer does not depend on how it arrived.
//
// Stored turns are formatted from the newest to the oldest, a few milliseconds at a time.
const SLICE_MS = 12;
const LONGEST_TEXT = 200000; // characters; a longer turn is shown as it is written
const later = new Set();
let raw = false;

// Draw a part of a text into `page.box`. `page` remembers which blocks are final, and whether
// formatting takes too long; if so, it is not tried again while the text grows.
function drawPart(run, page, text, from, to, over) {
  const begins = !page.fresh || page.from !== from || over;
  const before = page.written;
  if (begins) Object.assign(page, { from, at: from, last: null, fresh: true, written: false });
  if (!markdown()) patch(page.box, asWritten(run, text.slice(from, to), from, false));
  else {
    page.written ||= to - from > LONGEST_TEXT
      || !limited(() => drawBlocks(run, page, text, to, over));
    if (page.written) {
      if (!before) page.box.replaceChildren(); // Part of it may already be drawn.
      patch(page.box, asWritten(run, text.slice(from, to), from));
    }
  }
  if (over) page.fresh = false;
}

function drawBlocks(run, page, text, to, over) {
  const blocks = blocksOf(run, text.slice(page.at, to), page.at);
  if (!blocks) return false;
  const plan = blocks.flatMap((block) => block.kids);
  patch(page.box, plan, page.last ? page.last.nextSibling : page.box.firstChild);
  if (!over) settle(page, blocks, text.lastIndexOf("\n", to - 1));
  return true;
}

// Blocks before the last one that begins in a complete line are final.
function settle(page, blocks, complete) {
  let open = blocks.length - 1;
  while (open > 0 && blocks[open].from > complete) open -= 1;
  if (open <= 0) return;
  const nodes = blocks.slice(0, open).reduce((sum, block) => sum + block.kids.length, 0);
  let node = page.last ? page.last.nextSibling : page.box.firstChild;
  for (let step = 1; step < nodes && node; step += 1) node = node.nextSibling;
  if (node) Object.assign(page, { last: node, at: blocks[open].from });
}

function drawFormatted(turn) {
  const { run, box } = turn;
  const text = run.texts.length ? run.text : turn.text.replaceAll("\r", "");
  if (!turn.page) {
    box.replaceChildren();
    const inside = document.createElement("div");
    inside.className = "formatted";
    box.append(inside);
    turn.page = { box: inside };
  }
  const found = thoughtOf(text, turn.about.thought);
  if (found && !found.none) drawThought(turn, text, found);
  else if (turn.thought) {
    turn.thought.box.remove();
    turn.thought = null;
  }
  // Calls of tools stand in the folded results, and in the view of the tokens.
  const end = turn.growing ? text.length : turn.about.calls ?? text.length;
  const from = found ? found.answer : 0;
  const tree = turn.about.json && !turn.growing ? jsonIn(text.slice(from, end)) : null;
  if (tree) {
    patch(turn.page.box, asWritten(run, text.slice(from, end), from, false));
    turn.page.fresh = false;
  } else drawPart(run, turn.page, text, from, end, !turn.growing);
  drawTree(turn, tree);
}

function drawBody(turn) {
  if (turn.role === "user") drawMessage(turn);
  else if (turn.role === "tool") drawCalled(turn);
  else if (raw && turn.run.texts.length) putTokens(turn);
  else if (turn.growing) drawFormatted(turn);
  else {
    later.add(turn);
    if (later.size === 1) setTimeout(drawLater);
  }
}

function drawLater() {
  // Without the parser the turns would be drawn twice. When it arrives, `redraw` draws them.
  if (!library("markdown") && !failed.has("markdown")) return later.clear();
  const until = performance.now() + SLICE_MS;
  for (const turn of [...later].reverse()) {
    later.delete(turn);
    drawFormatted(turn);
    foot(turn);
    if (performance.now() > until) break;
  }
  stick();
  if (later.size) setTimeout(drawLater);
}

function clearBody(turn) {
  later.delete(turn);
  if (standing && turn.box.contains(standing.span)) stand(null);
}

// Draw everything again, because another view was chosen or a library was loaded.
function redraw(empty = false) {
  for (const turn of drawn) {
    if (ROLES[turn.role]) continue;
    if (empty) {
      clearBody(turn);
      Object.assign(turn, { drawn: 0, last: null, page: null, thought: null, tree: null });
      turn.box.replaceChildren();
    } else if (turn.page) turn.page.fresh = false;
    show(turn);
  }
  stick();
}

body = { draw: drawBody, clear: clearBody };

// Load the parser when the page is idle, so that it is ready before the first answer.
const spare = window.requestIdleCallback || ((call) => setTimeout(call, 1000));
spare(() => { if (!raw) markdown(); });
