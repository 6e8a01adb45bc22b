// Maps the text of Markdown to its source. The content of a block is a list of lines without
// indents and markers. Its `spans` are pairs [offset in the content, offset in the source], one for
// each contiguous part. They are recorded where markdown-it extracts the content, so nothing has to
// be searched for, and stored in `token.meta`.
const LINE_BREAKS = /^[ \t\n]*/;

function blockState(State) {
  return class extends State {
    // Call the original for each line, so that each result ends where its line ends.
    getLines(from, to, indent, last) {
      this.spans = from < to ? [] : [[0, 0]];
      let text = "";
      for (let line = from; line < to; line += 1) {
        const whole = line + 1 < to || last;
        const part = super.getLines(line, line + 1, indent, whole);
        const end = Math.min(this.eMarks[line] + (whole ? 1 : 0), this.src.length);
        this.spans.push([text.length, end - part.length]);
        text += part;
      }
      this.cut = text;
      const { cutting } = this;
      if (cutting && !cutting.meta) cutting.meta = { spans: this.spans };
      this.cutting = null;
      return text;
    }

    push(type, tag, nesting) {
      const token = super.push(type, tag, nesting);
      const before = this.tokens[this.tokens.length - 2];
      // The content of code is extracted after its token is made, all other content before.
      if (type === "fence" || type === "code_block") this.cutting = token;
      if (type === "inline" && before.type === "heading_open" && before.markup[0] === "#") {
        const line = this.line - 1;
        const marks = this.bMarks[line] + this.tShift[line] + before.markup.length;
        token.meta = { spans: [[0, this.skipSpaces(marks)]] };
      } else if (type === "inline" && before.tag !== "th" && before.tag !== "td") {
        const blank = LINE_BREAKS.exec(this.cut)[0].length;
        token.meta = { spans: shifted(this.spans, blank) };
      } else if (type === "table_close") {
        for (let at = this.tokens.length - 1; this.tokens[at].type !== "table_open"; at -= 1) {
          if (this.tokens[at].type === "tr_open") this.row(at);
        }
      }
      return token;
    }

    // The cells of a row of a table, in which an escaped pipe has lost its backslash.
    row(at) {
      const line = this.tokens[at].map[0];
      const begin = this.bMarks[line] + this.tShift[line];
      const raw = this.src.slice(begin, this.eMarks[line]);
      const text = raw.trim();
      const start = begin + raw.indexOf(text);
      const cells = cellsOf(text);
      if (cells.length && cells[0].text === "") cells.shift();
      if (cells.length && cells[cells.length - 1].text === "") cells.pop();
      for (let next = at + 1; this.tokens[next].type !== "tr_close"; next += 1) {
        if (this.tokens[next].type !== "inline") continue;
        const cell = cells.shift() || { text: "", spans: [[0, 0]] };
        const blank = cell.text.length - cell.text.trimStart().length;
        const spans = cell.spans.map(([offset, source]) => [offset, start + source]);
        this.tokens[next].meta = { spans: shifted(spans, blank) };
      }
    }
  };
}

function cellsOf(row) {
  const cells = [];
  let cell = { text: "", spans: [[0, 0]] };
  for (let at = 0; at < row.length; at += 1) {
    if (row[at] === "\\" && row[at + 1] === "|") {
      cell.spans.push([cell.text.length, at + 1]);
      cell.text += "|";
      at += 1;
    } else if (row[at] === "|") {
      cells.push(cell);
      cell = { text: "", spans: [[0, at + 1]] };
    } else cell.text += row[at];
  }
  return [...cells, cell];
}

// The spans of a content without its first characters.
function shifted(spans, by) {
  const first = spanOf(spans, by);
  const rest = spans.slice(first + 1).map(([offset, source]) => [offset - by, source]);
  return [[0, spans[first][1] + by - spans[first][0]], ...rest];
}

// The index of the last span that begins at or before an offset; 0 before the first.
function spanOf(spans, offset) {
  let low = 0;
  let high = spans.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (spans[middle][0] > offset) high = middle - 1;
    else low = middle;
  }
  return low;
}

// A text of the content as parts [text, offset in the source], as few as possible.
function pieces(spans, text, offset) {
  const found = [];
  let at = spanOf(spans, offset);
  for (let done = 0; done < text.length; at += 1) {
    const [begin, source] = spans[at];
    const next = at + 1 < spans.length ? spans[at + 1][0] : Infinity;
    const end = Math.min(text.length, next - offset);
    const before = found[found.length - 1];
    const place = source + offset + done - begin;
    if (before && before[1] + before[0].length === place) before[0] += text.slice(done, end);
    else if (end > done) found.push([text.slice(done, end), place]);
    done = Math.max(done, end);
  }
  return found;
}

// Within a content, `meta.at` is the offset at which the text of a token begins.
function inlineState(State) {
  return class extends State {
    pushPending() {
      const token = super.pushPending();
      token.meta = { at: this.pendingAt };
      return token;
    }

    push(type, tag, nesting) {
      const token = super.push(type, tag, nesting);
      token.meta = { began: this.began };
      return token;
    }

    // CommonMark knows where emphasis begins and ends by the spaces beside punctuation. Scripts
    // without spaces between words have none there, and models also write **Note:**text. Nothing
    // ends behind an opening bracket: f(**a) and f(**b) are code.
    scanDelims(start, splitsWords) {
      const found = super.scanDelims(start, splitsWords);
      if (!splitsWords) return found;
      const before = characterBefore(this.src, start);
      const after = characterAt(this.src, start + found.length);
      const beside = unspaced(before) || unspaced(after);
      const bold = this.src[start] === "*" && found.length === 2 && LETTER.test(after);
      found.can_open ||= beside && after.trim() !== "";
      found.can_close ||= (beside || bold && !OPENING.test(before)) && before.trim() !== "";
      return found;
    }
  };
}

const LETTER = /\p{L}/u;
const OPENING = /[\p{Ps}\p{Pi}]/u;
const UNSPACED = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Hangul}\p{sc=Bopomofo}\u3001-\u303f\u30fb\u30fc\uff01-\uffee]/u;

// Whether a character belongs to a script whose words or punctuation stand without spaces.
const unspaced = (character) => UNSPACED.test(character);

function characterAt(text, at) {
  return at < text.length ? String.fromCodePoint(text.codePointAt(at)) : "";
}

function characterBefore(text, at) {
  if (at <= 0) return "";
  const pair = at > 1 && /[\udc00-\udfff]/.test(text[at - 1]);
  return characterAt(text, at - (pair ? 2 : 1));
}

// Models write <br> for a line break, most often in cells. No other HTML is read.
const BREAK = /<br\s*\/?>/iy;

function lineBreak(state, silent) {
  BREAK.lastIndex = state.pos;
  const found = BREAK.exec(state.src);
  if (!found) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
}

// The first rule. It never matches; it records where each step of the state begins.
function beginsHere(state, silent) {
  spend();
  if (silent) return false;
  state.began = state.pos;
  if (!state.pending) state.pendingAt = state.pos;
  return false;
}

// Record where each piece of text begins, before emphasis marks are paired and emptied.
function placed(state) {
  let began = -1;
  let offset = 0;
  for (const token of state.tokens) {
    const { meta } = token;
    if (meta && meta.at === undefined) {
      if (meta.began !== began) offset = 0;
      began = meta.began;
      meta.at = began + offset + lead(token, state.src);
      if (token.type === "text") offset += token.content.length;
    }
  }
}

// How many characters of the source precede the text that a token shows.
function lead(token, src) {
  const { type, markup, content, meta } = token;
  if (type === "text_special") return token.info === "escape" && content !== markup ? 1 : 0;
  if (type === "text" && src[meta.began] === "<") return 1; // a link in angle brackets
  if (type === "image") return 2;
  if (type !== "code_inline") return 0;
  const begin = meta.began + markup.length;
  const there = src.slice(begin, begin + content.length).replaceAll("\n", " ");
  return markup.length + (there === content ? 0 : 1);
}
