// Maths in Markdown: $...$ and \(...\) in a line, $$...$$ and \[...\] as a block or in a line. A
// dollar opens maths only where no space follows it and no word character stands before it, and
// closes it only where no space stands before it and no digit follows: $5 and $10 are prices.
const LONGEST_LINE = 1500; // characters of maths in a line
const LONGEST_MATHS = 8000;
const SPACE = /\s/;
const WORD = /[\p{L}\p{N}]/u;
const PROSE = /^\d[\d.,]*\s+\p{L}{2,}/u; // "5 apples and ..."
const BLOCKS = { $$: "$$", "\\[": "\\]" };
const LINES = { $$: "$$", "\\[": "\\]", "\\(": "\\)" };

function mathsBlock(state, from, to, silent) {
  if (state.sCount[from] - state.blkIndent >= 4) return false;
  const begin = state.bMarks[from] + state.tShift[from];
  const close = BLOCKS[state.src.slice(begin, begin + 2)];
  if (!close) return false;
  for (let line = from; line < to && (line === from || !state.isEmpty(line)); line += 1) {
    if (line > from && state.sCount[line] < state.blkIndent) return false;
    const first = line === from ? begin + 2 : state.bMarks[line] + state.tShift[line];
    const end = state.src.slice(first, state.eMarks[line]).trimEnd();
    const at = end.indexOf(close);
    if (at >= 0 && at + 2 !== end.length) return false;
    if (at < 0) continue;
    if (silent) return true;
    const content = state.getLines(from, line + 1, state.blkIndent, false);
    const tex = content.trim().slice(2, -2);
    if (!tex.trim()) return false;
    state.line = line + 1;
    const token = state.push("maths_block", "", 0);
    token.map = [from, line + 1];
    token.content = tex;
    token.meta = { from: begin, to: first + end.length };
    return true;
  }
  return false;
}

function mathsInLine(state, silent) {
  const { src, pos } = state;
  const mark = src.slice(pos, pos + 2);
  const found = LINES[mark] ? enclosed(state, mark) : src[pos] === "$" ? dollars(state) : null;
  if (!found) return false;
  if (!silent) {
    const token = state.push("maths_line", "", 0);
    token.content = src.slice(found.from, found.to);
    token.markup = LINES[mark] ? mark : "$";
    token.meta = { at: pos, length: found.end - pos };
  }
  state.pos = found.end;
  return true;
}

function enclosed(state, mark) {
  const from = state.pos + 2;
  const limit = Math.min(state.posMax, from + LONGEST_LINE);
  const at = state.src.slice(from, limit).indexOf(LINES[mark]);
  if (at < 0 || !state.src.slice(from, from + at).trim()) return null;
  return { from, to: from + at, end: from + at + 2 };
}

function dollars(state) {
  const { src, pos } = state;
  const from = pos + 1;
  if (pos && WORD.test(src[pos - 1])) return null;
  if (from >= state.posMax || SPACE.test(src[from]) || src[from] === "$") return null;
  const limit = Math.min(state.posMax, from + LONGEST_LINE);
  for (let at = from; at < limit; at += 1) {
    if (src[at] === "\\") at += 1;
    else if (src[at] === "\n" && src[at + 1] === "\n") return null;
    else if (src[at] === "$") {
      if (SPACE.test(src[at - 1]) || /\d/.test(src[at + 1] || "")) return null;
      return PROSE.test(src.slice(from, at)) ? null : { from, to: at, end: at + 1 };
    }
  }
  return null;
}

// Draw a formula into a box; its source, where that is no maths or what draws maths is not there yet.
function drawMaths(box, tex, display) {
  const katex = tex.length <= LONGEST_MATHS ? library("katex") : null;
  if (katex) {
    try {
      katex.render(tex, box, {
        displayMode: display, throwOnError: true, trust: false, strict: "ignore", maxSize: 40,
        maxExpand: 300,
      });
      return;
    } catch (error) {
      box.title = "This formula cannot be drawn: " + String(error.message || error).slice(0, 200);
    }
  }
  const code = document.createElement("code");
  code.textContent = tex;
  box.replaceChildren(code);
}
