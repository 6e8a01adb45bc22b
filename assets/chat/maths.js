// Maths in Markdown: $...$ and \(...\) in a line, $$...$$ and \[...\] as a block or in a line, and
// environments such as \begin{align} as a block. A dollar opens maths only if no space follows it and
// no word character precedes it, except for scripts without spaces between words. It closes maths
// only if no space precedes it and no digit follows it, because $5 and $10 are prices.
const LONGEST_LINE = 1500; // characters of maths in a line
const LONGEST_MATHS = 8000;
// KaTeX's output for a formula is nested several times as deep as the formula, and Chromium stops
// at a few hundred levels. The output for a large formula takes long to lay out.
const DEEPEST_MATHS = 50;
const LARGEST_MATHS = 4000; // parts of the parsed formula
// A formula that defines commands can become much longer when these are expanded.
const LONGEST_DEFINING = 500;
const DEFINES = /\\(?:[egx]?def|(?:re)?newcommand|providecommand|let|futurelet)(?![a-zA-Z])/;
const SPACE = /\s/;
const WORD = /[\p{L}\p{N}]/u;
const PROSE = /^\d[\d.,]*\s+\p{L}{2,}/u; // "5 apples and ..."
const BLOCKS = { $$: "$$", "\\[": "\\]" };
const ENVIRONMENT = /\\begin(\{(?:equation|align|alignat|gather)\*?\})/y;
const LINES = { $$: "$$", "\\[": "\\]", "\\(": "\\)" };

// The parser tries this rule at every block and at every line of a paragraph.
function mathsBlock(state, from, to, silent) {
  spend();
  if (state.sCount[from] - state.blkIndent >= 4) return false;
  const begin = state.bMarks[from] + state.tShift[from];
  ENVIRONMENT.lastIndex = begin;
  const environment = ENVIRONMENT.exec(state.src);
  const open = environment ? environment[0] : state.src.slice(begin, begin + 2);
  const close = environment ? "\\end" + environment[1] : BLOCKS[open];
  if (!close) return false;
  for (let line = from; line < to && (line === from || !state.isEmpty(line)); line += 1) {
    if (line > from && state.sCount[line] < state.blkIndent) return false;
    spend();
    const first = line === from ? begin + open.length : state.bMarks[line] + state.tShift[line];
    const end = state.src.slice(first, state.eMarks[line]).trimEnd();
    const at = end.indexOf(close);
    if (at >= 0 && at + close.length !== end.length) return false;
    if (at < 0) continue;
    if (silent) return true;
    const content = state.getLines(from, line + 1, state.blkIndent, false).trim();
    const tex = content.slice(open.length, -close.length);
    if (!tex.trim()) return false;
    state.line = line + 1;
    const token = state.push("maths_block", "", 0);
    token.map = [from, line + 1];
    token.content = environment ? content : tex;
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
  if (pos && WORD.test(src[pos - 1]) && !unspaced(characterBefore(src, pos))) return null;
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

// Why a formula is not given to KaTeX; "" if it is.
function refusal(tex) {
  if (tex.length > LONGEST_MATHS) return `it has more than ${LONGEST_MATHS} characters`;
  if (tex.length > LONGEST_DEFINING && DEFINES.test(tex)) {
    return `it defines commands and has more than ${LONGEST_DEFINING} characters`;
  }
  return "";
}

// Why a parsed formula is not drawn; "" if it is. Every part counts as a level, except for a group
// that is the argument of another part.
function tooLarge(tree) {
  const open = [{ part: tree, depth: 0, grouped: false }];
  for (let parts = 0; open.length; parts += 1) {
    const { part, depth, grouped } = open.pop();
    if (depth > DEEPEST_MATHS) return `it is nested more than ${DEEPEST_MATHS} deep`;
    if (parts > LARGEST_MATHS) return `it has more than ${LARGEST_MATHS} parts`;
    const group = part.type === "ordgroup";
    const counts = part.type !== undefined && (!group || grouped);
    for (const [name, inside] of Object.entries(part)) {
      if (name === "loc" || inside === null || typeof inside !== "object") continue;
      open.push({
        part: inside, depth: depth + (counts ? 1 : 0), grouped: part.type === undefined ? grouped : group,
      });
    }
  }
  return "";
}

// Draw a formula into a box. Its source is shown if it is invalid, too large, or KaTeX is not
// loaded.
function drawMaths(box, tex, display) {
  let why = refusal(tex);
  const katex = why ? null : library("katex");
  if (katex) {
    const options = {
      displayMode: display, throwOnError: true, trust: false, strict: "ignore", maxSize: 40,
      maxExpand: 300,
    };
    try {
      why = tooLarge(katex.__parse(tex, options));
      if (!why) {
        katex.render(tex, box, options);
        return;
      }
    } catch (error) {
      why = String(error.message || error).slice(0, 200);
    }
  }
  if (why) box.title = "This formula cannot be drawn: " + why;
  const code = document.createElement("code");
  code.textContent = tex;
  box.replaceChildren(code);
}
