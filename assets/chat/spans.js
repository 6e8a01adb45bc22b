// Spans of tokens, for the raw text and the Markdown view. A span holds tokens of one source: those
// of one step, or a few of the model's own, because a node for each token would be slow. `first` is
// its first token, `skip` how many characters of that token precede the span, `count` its tokens.

// Whether a token can be added to a span of `count` tokens that ends right before it.
function joins(run, at, count) {
  const source = run.sources[at];
  if (run.sources[at - 1] !== source) return false;
  return run.steps[at] === run.steps[at - 1] || (source === PLAIN && count < LONGEST);
}

function newSpan(run, first, skip = 0) {
  const node = document.createElement("span");
  const name = names.get(run.sources[first]) || UNKNOWN;
  node.className = "tok " + name.kind;
  if (name.colour) node.style.setProperty("--k", name.colour);
  Object.assign(node, { run, first, skip, count: 0, source: run.sources[first] });
  dim(node);
  return node;
}

// Draw the new tokens of a turn.
function putTokens(turn) {
  const { run, box } = turn;
  const fresh = document.createDocumentFragment();
  while (turn.drawn < run.texts.length) {
    const begun = turn.last && joins(run, turn.drawn, turn.last.count);
    if (!begun) turn.last = fresh.appendChild(newSpan(run, turn.drawn));
    const span = turn.last;
    let text = "";
    do {
      text += run.texts[turn.drawn];
      turn.drawn += 1;
      span.count += 1;
    } while (turn.drawn < run.texts.length && joins(run, turn.drawn, span.count));
    if (begun) span.firstChild.appendData(text);
    else span.textContent = text;
    if (!span.firstChild) span.append("");
  }
  box.appendChild(fresh);
}

// The token under the pointer.
function pointed(span, x, y) {
  const text = span.firstChild;
  const caret = document.caretPositionFromPoint
    ? document.caretPositionFromPoint(x, y) : document.caretRangeFromPoint(x, y);
  const inside = caret && (caret.offsetNode || caret.startContainer) === text;
  let offset = inside ? (caret.offset ?? caret.startOffset) : 0;
  if (offset) {
    const before = document.createRange();
    before.setStart(text, offset - 1);
    before.setEnd(text, offset);
    if (x < before.getBoundingClientRect().right) offset -= 1;
  }
  const { texts } = span.run;
  offset += span.skip;
  let at = span.first;
  while (at < span.first + span.count - 1 && offset >= texts[at].length) {
    offset -= texts[at].length;
    at += 1;
  }
  return at;
}
