// Turns Markdown into a plan of the nodes to draw: elements { tag, kind, set, kids }, texts in one
// span { text, run, first, skip, count }, and formulas { tex, display }. A plan is plain data;
// patch.js makes the page match it.
const SAFE_LINK = /^(?:https?:\/\/|mailto:)/i;
const LEVELS = 2; // the page has headings of its own above those of an answer
const DEEPEST = 40; // text that is nested deeper is shown unformatted
const UNFORMATTED = "Shown as it is written: formatting it would hold up the page.";
let parser = null;

function markdown() {
  if (parser) return parser;
  const make = library("markdown");
  if (!make) return null;
  const md = make({ html: false, linkify: false, typographer: false, maxNesting: DEEPEST });
  md.disable(["reference", "text_join", "fragments_join"]);
  md.validateLink = (link) => SAFE_LINK.test(link);
  md.normalizeLinkText = (link) => link;
  md.block.State = blockState(md.block.State);
  md.inline.State = inlineState(md.inline.State);
  md.block.ruler.before("fence", "maths", mathsBlock, {
    alt: ["paragraph", "reference", "blockquote", "list"],
  });
  md.inline.ruler.before("text", "begins", beginsHere);
  md.inline.ruler.before("escape", "maths", mathsInLine);
  md.inline.ruler.before("autolink", "break", lineBreak);
  md.inline.ruler2.before("balance_pairs", "placed", placed);
  parser = md;
  return parser;
}

// The blocks of a text: [{ from: the offset of its first line, kids }], or `null` if it is nested
// too deeply. `base` is the offset of the text in the run's text.
function blocksOf(run, text, base) {
  const lines = lineStarts(text);
  const found = [];
  const open = [];
  let kids = null;
  const place = (token) => {
    if (open.length) return;
    found.push({ from: base + lines[token.map[0]], kids: [] });
    kids = found[found.length - 1].kids;
  };
  const tokens = markdown().parse(text, {});
  if (tokens.some((token) => token.level >= DEEPEST - 1)) return null;
  for (const token of tokens) {
    spend();
    if (token.nesting >= 0 && token.map) place(token);
    if (token.nesting > 0) {
      const made = token.hidden ? { kids } : elementOf(token);
      if (!token.hidden) kids.push(made.outer || made);
      open.push(kids);
      kids = made.kids;
    } else if (token.nesting < 0) kids = open.pop();
    else if (token.type === "inline") kids.push(...inlinePlan(run, token.children, token.meta, base));
    else kids.push(leafOf(run, token, text, base));
  }
  return found;
}

// An unformatted text, with a note unless the parser is still being loaded.
function asWritten(run, text, base, note = true) {
  const written = make("p", spansOf(run, text, base), "unformatted");
  return note ? [make("p", [{ text: UNFORMATTED }], "as-written"), written] : [written];
}

function lineStarts(text) {
  const found = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) found.push(at + 1);
  return found;
}

function make(tag, kids = [], kind = "", set = null) {
  return { tag, kind, set, kids };
}

function elementOf(token) {
  const { tag, type } = token;
  if (type === "heading_open") {
    return make("h" + Math.min(6, Number(tag[1]) + LEVELS), [], tag);
  }
  if (type === "ordered_list_open") return make(tag, [], "", { start: token.attrGet("start") ?? 1 });
  const made = make(tag);
  const align = (token.attrGet("style") || "").replace("text-align:", "");
  if (align) made.kind = align;
  if (tag === "th") made.set = { scope: "col" };
  // A wide table scrolls on its own.
  if (tag === "table") made.outer = make("div", [made], "wide", { tabindex: 0 });
  return made;
}

function leafOf(run, token, text, base) {
  if (token.type === "hr") return make("hr");
  if (token.type === "maths_block") {
    const { from, to } = token.meta;
    return formula(run, token.content, true, base + from, base + to);
  }
  return codePlan(run, token, base);
}

// The content of a paragraph, a heading or a cell. `spans` map it to the source.
function inlinePlan(run, tokens, { spans }, base) {
  const open = [];
  let kids = [];
  const text = (token, offset = token.meta.at) => {
    for (const [part, at] of pieces(spans, token.content, offset)) put(part, at);
  };
  const put = (part, at, whole = false) => kids.push(...spansOf(run, part, base + at, whole));
  const where = (offset) => pieces(spans, " ", offset)[0][1];
  for (const token of tokens || []) {
    spend();
    if (token.nesting > 0) {
      const deep = open.length >= DEEPEST;
      const made = token.tag === "a" ? anchor(token.attrGet("href")) : make(token.tag);
      if (!deep) kids.push(made);
      open.push(kids);
      if (!deep) kids = made.kids;
    } else if (token.nesting < 0) kids = open.pop();
    else if (token.type === "text_special") {
      put(token.content, where(token.meta.at), token.info === "entity");
    } else if (token.type === "code_inline") {
      const outside = kids;
      kids = [];
      text(token);
      outside.push(make("code", kids));
      kids = outside;
    } else if (token.type === "image") {
      const inner = { spans: shifted(spans, token.meta.at) };
      const alt = inlinePlan(run, token.children, inner, base);
      kids.push(...(inLink(tokens, token) ? alt : [anchor(token.attrGet("src"), alt)]));
    } else if (token.type === "maths_line") {
      const from = where(token.meta.at);
      const to = where(token.meta.at + token.meta.length - 1) + 1;
      const display = token.markup === "$$" || token.markup === "\\[";
      kids.push(formula(run, token.content, display, base + from, base + to));
    } else if (token.tag === "br") kids.push(make("br"));
    else if (token.content) text(token);
  }
  return kids;
}

function inLink(tokens, image) {
  let depth = 0;
  for (const token of tokens) {
    if (token === image) return depth > 0;
    if (token.tag === "a") depth += token.nesting;
  }
  return false;
}

function anchor(href, kids = []) {
  return make("a", kids, "", { href, target: "_blank", rel: "noopener noreferrer" });
}

function formula(run, tex, display, from, to) {
  const kids = spansOf(run, run.text.slice(from, to), from);
  return { tex, display, kids };
}

// A text at an offset of the run's text, as the spans of its tokens. A `whole` text, such as an
// entity, is drawn differently from its source and has a single position.
function spansOf(run, text, from, whole = false) {
  if (!run.texts.length) return [{ text }];
  const found = [];
  let token = tokenAt(run, from);
  for (let done = 0; done < text.length;) {
    const first = token;
    let end = Math.min(text.length, run.ends[token] - from);
    if (whole) end = text.length;
    token += 1;
    while (end < text.length && token < run.ends.length && joins(run, token, token - first)) {
      end = Math.min(text.length, run.ends[token] - from);
      token += 1;
    }
    if (token >= run.ends.length) end = text.length;
    const skip = from + done - startOf(run, first);
    if (end > done) {
      found.push({ text: text.slice(done, end), run, first, skip, count: token - first });
    }
    done = Math.max(done, end);
  }
  return found;
}
