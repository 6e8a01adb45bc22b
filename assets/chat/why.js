// Why a token was fast: what else was guessed in its place, and where it was copied from. The page
// requests this once for each token (app/web/tabs/why.py), and the reply is a "strata:why" event.
// Its text becomes text nodes. The place from which a token was copied is highlighted for as long
// as the explanation is shown.
const ASKED_MS = 5000;
const ASKED = 200; // tokens whose answers are remembered
const LISTED = 4; // rejected guesses that are named
const COPIED = "copied-from";
const whys = new Map();
const marks = window.CSS && CSS.highlights && window.Highlight ? CSS.highlights : null;
let marked = null;

// The explanation of a token of the stored run, as a node for the box at the word; null if there is
// none. `token` is its index in the answer, `step` the index of the step that emitted it.
function explain(run, step, token) {
  const key = JSON.stringify([run, step, token]);
  if (!whys.has(key)) {
    if (whys.size >= ASKED) whys.delete(whys.keys().next().value);
    const request = {};
    request.reply = new Promise((resolve) => { request.resolve = resolve; });
    whys.set(key, request);
    setTimeout(() => {
      request.resolve(null);
      if (!request.known) whys.delete(key);
    }, ASKED_MS);
    trigger("explain", { run, step, token });
  }
  return whys.get(key).reply.then((reply) => reply && explanation(reply));
}

document.addEventListener("strata:why", ({ detail }) => {
  const request = detail && whys.get(JSON.stringify([detail.run, detail.step, detail.token]));
  if (!request) return;
  request.known = true;
  request.resolve(detail);
});

function explanation(reply) {
  const node = document.createElement("span");
  node.className = "why";
  if (!reply.recorded) {
    node.append("What was guessed here was not recorded.");
    return node;
  }
  const [kept] = reply.accepted || [];
  if (kept && kept.place) {
    node.append(...copiedFrom(kept.place, reply.run));
    highlight(kept.place, node);
  } else if (kept) {
    node.append(...evidence(kept));
  } else if (!reply.rejected) {
    node.append("Nothing was guessed here. ");
  }
  if (reply.rejected) node.append(...rejections(reply.rejected));
  if (reply.unseen) {
    node.append(reply.unseen === 1 ? "1 more guess" : reply.unseen + " more guesses",
      " of this step followed a wrong one, so the model did not check further there. ");
  }
  return node;
}

function copiedFrom(place, run) {
  const words = document.createElement("q");
  const mark = document.createElement("mark");
  mark.textContent = oneLine(place.copied);
  words.append(oneLine(place.before), mark, oneLine(place.after));
  const turn = drawn.find(({ key }) => key === place.key);
  const where = !turn ? "above" : turn.role === "user" ? "your message"
    : turn.run.id === run ? "this answer" : "an earlier answer";
  return ["Copied from " + where + ": ", words, " "];
}

function evidence(kept) {
  if (kept.conversation) return ["Copied from the conversation ", linkTo(kept), ". "];
  if (kept.source === "prediction") return ["Copied from the text that is rewritten. "];
  if (kept.times) {
    return ["It followed these words " + kept.times + " times out of " + kept.of
      + " in answers so far. "];
  }
  if (kept.share) {
    const percent = Math.max(1, Math.round(100 * kept.share));
    return ["It follows these words in " + percent + " % of the cases in large texts. "];
  }
  return kept.place === null ? ["The place it was copied from is not shown any more. "] : [];
}

// Opens a conversation of the list (assets/list.js).
function linkTo({ conversation, title }) {
  const link = document.createElement("button");
  link.type = "button";
  link.textContent = oneLine(title);
  link.title = "Open this conversation";
  link.addEventListener("click", () => {
    inspect(null);
    document.dispatchEvent(new CustomEvent("strata:open", { detail: { id: conversation } }));
  });
  return link;
}

function rejections(guesses) {
  const parts = [guesses.length === 1 ? "Rejected guess: " : "Rejected guesses: "];
  guesses.slice(0, LISTED).forEach((guess, at) => {
    const name = names.get(guess.source) || UNKNOWN;
    const word = document.createElement("s");
    word.className = "tok " + name.kind;
    if (name.colour) word.style.setProperty("--k", name.colour);
    word.textContent = visible(guess.text === null ? "token " + guess.id : guess.text);
    const known = guess.percent ? ", the model gave it "
      + (guess.percent === 1 ? "at most 1 %" : guess.percent + " %") : "";
    parts.push(at ? ", " : "", word, " (" + name.title + known + ")");
  });
  if (guesses.length > LISTED) parts.push(" and " + (guesses.length - LISTED) + " more");
  return [...parts, ". "];
}

function oneLine(text) {
  return text.replace(/\s+/g, " ");
}

// A text with visible spaces.
function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ $/, "␣") || "∅";
}

// Highlight a place of the conversation, if it is drawn, until `node` is removed.
function highlight(place, node) {
  if (!marks) return;
  const turn = drawn.find(({ key }) => key === place.key);
  const ranges = !turn ? []
    : place.first >= 0 ? tokenRanges(turn, place.first, place.last) : textRanges(turn.box, place);
  marked = ranges.length ? node : null;
  if (marked) marks.set(COPIED, new Highlight(...ranges));
}

new MutationObserver(() => {
  if (!marked || wordBox.contains(marked)) return;
  // The caller puts the node into the box right after this.
  const mine = marked;
  requestAnimationFrame(() => {
    if (marked !== mine || wordBox.contains(mine)) return;
    marked = null;
    marks.delete(COPIED);
  });
}).observe(wordBox, { childList: true });

// The characters of some tokens, by the spans that contain them.
function tokenRanges(turn, first, last) {
  const { run, box } = turn;
  const begin = startOf(run, first);
  const end = run.ends[last];
  const ranges = [];
  for (const span of box.querySelectorAll(".tok")) {
    const text = span.firstChild;
    if (span.run !== run || !text || text.nodeType !== Node.TEXT_NODE) continue;
    const start = startOf(run, span.first) + span.skip;
    const from = Math.max(0, begin - start);
    const to = Math.min(text.length, end - start);
    if (from < to) ranges.push(rangeOf(text, from, text, to));
  }
  return ranges;
}

// The length of a text in code points, as the server counts it.
function textRanges(box, place) {
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  const text = nodes.map((node) => node.data).join("");
  let start = [...text].slice(0, place.start).join("").length;
  if (!text.startsWith(place.copied, start)) start = text.lastIndexOf(place.copied);
  if (start < 0) return [];
  const [from, left] = nodeAt(nodes, start);
  const [to, right] = nodeAt(nodes, start + place.copied.length - 1);
  return [rangeOf(from, left, to, right + 1)];
}

function nodeAt(nodes, offset) {
  for (const node of nodes) {
    if (offset < node.length) return [node, offset];
    offset -= node.length;
  }
  const last = nodes[nodes.length - 1];
  return [last, last.length - 1];
}

function rangeOf(from, left, to, right) {
  const range = document.createRange();
  range.setStart(from, left);
  range.setEnd(to, right);
  return range;
}
