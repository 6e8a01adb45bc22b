// The token view: text becomes text nodes, never markup, one span for a run of tokens. Two sources:
// `props.value` (app/web/messages.py) holds the stored turns, and names the stream of an answer that is
// under way; the stream (app/web/stream.py) then brings tokens, figures and the end. Both bring
// tokens in the same groups. What is new is drawn once a frame, 20 times a second at most, and
// nothing of the layout is read for it.
//
// `trigger` asks the server: "over" for what an answer left behind, "resend" where its idea of what
// is drawn here is wrong, "fallback" where the stream does not come through: events then come
// by the queue, in `value.events`. "markdown" and "waiting" stay within the page.
const legend = element.querySelector(".legend");
const list = element.querySelector(".turns");
const inspector = element.querySelector(".inspector");
const idle = inspector.textContent;
const UNKNOWN = { title: "Unknown", meaning: "an unknown source", kind: "k-target" };
const PLAIN = "target";
const LONGEST = 16; // tokens of the model's own in one span: a longer one is slow to lay out
const SHOWN_MS = 120;
const HIDDEN_MS = 500;
const LEGEND_MS = 500;
const PATIENCE_MS = 3000;
const BOTTOM = 1e9;
const names = new Map(Object.entries(props.names));
const fixed = names.size;
let drawn = [];
let only = "";
let live = null;
let pinned = true;
let sticking = false;
let waiting = false;
let drawnAt = -HIDDEN_MS;
let legendAt = -LEGEND_MS;
let sentAt = null;

// An answer's tokens, as columns, and how many of them are drawn into `box`.
function newRun() {
  return {
    texts: [], sources: [], matches: [], steps: [], percents: [],
    counts: new Map(), drawn: 0, last: null,
  };
}

// Take in groups that begin with token `from`; those that are known are skipped. False for a gap.
function take(run, groups, from, sources) {
  if (from > run.texts.length) return false;
  let at = from;
  let step = from ? run.steps[from - 1] : 0;
  for (const [number, match, steps, texts, percents] of groups) {
    step += steps;
    const source = sources[number];
    texts.forEach((text, i) => {
      if (at++ < run.texts.length) return;
      run.texts.push(text);
      run.sources.push(source);
      run.matches.push(match);
      run.steps.push(step);
      run.percents.push(percents[i]);
      run.counts.set(source, (run.counts.get(source) || 0) + 1);
    });
  }
  return true;
}

function describe(run, at) {
  const name = names.get(run.sources[at]) || UNKNOWN;
  const match = run.matches[at];
  const percent = run.percents[at];
  const parts = [
    name.title + ": " + name.meaning, "step " + (run.steps[at] + 1), "position " + (at + 1),
  ];
  if (match) parts.push("match of " + match + (match === 1 ? " token" : " tokens"));
  if (percent) parts.push("probability " + (percent === 1 ? "at most 1 %" : percent + " %"));
  return parts.join("  ·  ");
}

// The token under the pointer: one span holds several.
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
  let at = span.first;
  while (at < span.first + span.count - 1 && offset >= texts[at].length) {
    offset -= texts[at].length;
    at += 1;
  }
  return at;
}

function newSpan(run, at) {
  const node = document.createElement("span");
  const name = names.get(run.sources[at]) || UNKNOWN;
  node.className = "tok " + name.kind;
  if (name.colour) node.style.setProperty("--k", name.colour);
  Object.assign(node, { run, first: at, count: 0, source: run.sources[at] });
  dim(node);
  return node;
}

// Whether a token goes into the span before it: both of one step, or both the model's own.
function joins(span, run, at) {
  if (!span || span.source !== run.sources[at]) return false;
  return run.steps[at] === run.steps[at - 1] || (span.source === PLAIN && span.count < LONGEST);
}

function put(run, box) {
  const fresh = document.createDocumentFragment();
  while (run.drawn < run.texts.length) {
    const begun = joins(run.last, run, run.drawn);
    if (!begun) run.last = fresh.appendChild(newSpan(run, run.drawn));
    const span = run.last;
    let text = "";
    do {
      text += run.texts[run.drawn];
      run.drawn += 1;
      span.count += 1;
    } while (run.drawn < run.texts.length && joins(span, run, run.drawn));
    if (begun) span.firstChild.appendData(text);
    else span.textContent = text;
    if (!span.firstChild) span.append("");
  }
  box.appendChild(fresh);
}

function dim(node) {
  node.classList.toggle("dim", only !== "" && node.source !== only);
}

function choose(source) {
  only = only === source ? "" : source;
  for (const node of list.querySelectorAll(".tok")) dim(node);
  drawLegend();
}

function drawLegend() {
  const counts = new Map();
  let total = 0;
  for (const { run } of drawn) {
    for (const [source, count] of run.counts) {
      counts.set(source, (counts.get(source) || 0) + count);
      total += count;
    }
  }
  [...legend.children].forEach((chip, at) => {
    const count = counts.get(chip.source) || 0;
    chip.hidden = at >= fixed && !count;
    if (chip.hidden && only === chip.source) choose(only);
    chip.lastChild.textContent = total ? Math.round((100 * count) / total) + " %" : "";
    chip.setAttribute("aria-pressed", String(only === chip.source));
  });
}

function addChip(source, name) {
  const chip = document.createElement("button");
  chip.className = "chip";
  chip.type = "button";
  chip.source = source;
  chip.dataset.source = source;
  chip.title = name.meaning + "; click to show only these";
  const swatch = document.createElement("span");
  swatch.className = "tok " + name.kind;
  if (name.colour) swatch.style.setProperty("--k", name.colour);
  swatch.textContent = name.title;
  const number = document.createElement("span");
  number.className = "number";
  chip.append(swatch, number);
  chip.onclick = () => choose(source);
  legend.appendChild(chip);
}

function learn(drafts) {
  for (const [source, name] of Object.entries(drafts || {})) {
    if (!names.has(source)) addChip(source, name);
    names.set(source, name);
  }
}

// turns

function begin(key, role, run) {
  const box = document.createElement("div");
  box.className = "turn " + (role === "user" ? "said" : "answered");
  list.insertBefore(box, sentinel);
  const turn = { key, box, run };
  Object.assign(run, { drawn: 0, last: null });
  drawn.push(turn);
  return turn;
}

function drop(from) {
  for (const turn of drawn.splice(from)) turn.box.remove();
}

// The stored turns, of which the first `kept` are drawn here already, up to the one `after`. Another
// conversation or another turn is looked at from its end.
function arrange({ kept = 0, after = "", turns = [], sources = [], adopt = "" }) {
  if (adopt && live && live.turn && live.turn === drawn[drawn.length - 1]) {
    live.turn.key = adopt;
    live.turn.box.classList.remove("growing");
  }
  if (kept > drawn.length || (kept && drawn[kept - 1].key !== after)) {
    trigger("resend", {});
    return false;
  }
  turns.forEach((turn, i) => {
    let there = drawn[kept + i];
    if (!there || there.key !== turn.key) {
      drop(kept + i);
      there = begin(turn.key, turn.role, newRun());
      if (!turn.groups) there.box.textContent = turn.text;
    }
    if (turn.groups && take(there.run, turn.groups, 0, sources)) put(there.run, there.box);
  });
  if (turns.length || kept < drawn.length) pinned = true;
  drop(kept + turns.length);
  return true;
}

// the answer under way

function follow(stream) {
  if (live && (!stream || live.token !== stream.token)) leave();
  if (!stream) return;
  if (!live) {
    live = {
      token: stream.token, run: newRun(), turn: null, source: null, sources: [], next: 0,
      over: false, late: 0, seen: false,
    };
    connect(live);
  }
  Object.assign(live, { shown: stream.shown, turn: null });
  schedule();
}

function leave() {
  clearTimeout(live.late);
  if (live.source) live.source.close();
  live = null;
}

function connect(mine) {
  const source = new EventSource("/stream/" + mine.token + "?from=" + mine.run.texts.length);
  const told = (kind) => (event) => {
    clearTimeout(mine.late);
    hear(mine, kind, JSON.parse(event.data), Number(event.lastEventId));
  };
  mine.source = source;
  for (const kind of ["sources", "figures", "waiting", "end"]) {
    source.addEventListener(kind, told(kind));
  }
  source.onmessage = told("");
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) giveUp(mine);
    else expectNews(mine);
  };
  expectNews(mine);
}

function expectNews(mine) {
  clearTimeout(mine.late);
  mine.late = setTimeout(() => giveUp(mine), PATIENCE_MS);
}

// The stream does not come through: the queue does, if anything does.
function giveUp(mine) {
  if (mine !== live || mine.over) return;
  clearTimeout(mine.late);
  mine.source.close();
  mine.next = 0;
  trigger("fallback", { token: mine.token, drawn: mine.run.texts.length });
}

// One event, whichever way it came; behind it `at` tokens have been told.
function hear(mine, kind, data, at) {
  if (mine !== live || mine.over) return;
  if (kind === "") {
    const count = data.reduce((sum, group) => sum + group[3].length, 0);
    if (take(mine.run, data, at - count, mine.sources)) schedule();
    else giveUp(mine);
  } else if (kind === "sources") {
    mine.sources = data.sources;
    learn(data.names);
  } else if (kind === "figures") {
    document.dispatchEvent(new CustomEvent("strata:figures", { detail: data }));
  } else if (kind === "waiting") {
    page.line = data;
    trigger("waiting", {});
  } else if (kind === "end") {
    mine.over = true;
    mine.source.close();
    frame();
    drawLegend();
    trigger("over", { token: mine.token, drawn: mine.run.texts.length });
  }
}

// drawing

function schedule() {
  if (waiting) return;
  waiting = true;
  const every = document.hidden || (live && !live.shown) ? HIDDEN_MS : SHOWN_MS;
  const next = () => (document.hidden ? frame() : requestAnimationFrame(frame));
  setTimeout(next, Math.max(0, drawnAt + every - performance.now()));
}

function frame() {
  waiting = false;
  drawnAt = performance.now();
  if (!live || !live.run.texts.length) return;
  if (live.shown) {
    if (!live.turn) {
      live.turn = begin("live:" + live.token, "assistant", live.run);
      live.turn.box.classList.add("growing");
    }
    put(live.run, live.turn.box);
    stick();
    if (drawnAt >= legendAt + LEGEND_MS) {
      legendAt = drawnAt;
      drawLegend();
    }
  } else {
    trigger("markdown", {});
  }
  if (!live.seen) {
    live.seen = true;
    requestAnimationFrame(tellFirst);
  }
}

// From the click that sent the message to the frame behind the one that drew its first token.
function tellFirst() {
  if (sentAt === null) return;
  const seconds = (performance.now() - sentAt) / 1000;
  sentAt = null;
  document.dispatchEvent(new CustomEvent("strata:first", { detail: { seconds } }));
}

// Whoever looks at the end goes on looking at it; who scrolls up is left in peace. A scroll of our
// own is told apart by its frame: its event comes before the next frame is drawn.
const sentinel = document.createElement("div");
sentinel.className = "sentinel";
list.append(sentinel);
new IntersectionObserver(
  (seen) => { pinned = seen[seen.length - 1].isIntersecting; },
  { root: list, rootMargin: "0px 0px 32px 0px" },
).observe(sentinel);
new ResizeObserver(stick).observe(list);
list.addEventListener("scroll", () => { if (!sticking) pinned = false; });

function stick() {
  if (!pinned) return;
  list.scrollTop = BOTTOM;
  sticking = true;
  requestAnimationFrame(() => { sticking = false; });
}

function draw() {
  const value = props.value || {};
  if (value.events) {
    if (!live || live.token !== value.token) return;
    for (const [number, kind, data, at] of JSON.parse(value.events)) {
      if (live && number === live.next) {
        live.next += 1;
        hear(live, kind, data, at);
      }
    }
    return;
  }
  learn(value.names);
  if (!arrange(value)) return;
  follow(value.stream);
  drawLegend();
  stick();
}

// What the page's own events put into the Markdown view and into the line below.
const page = {
  line: "",
  markdown(shown) {
    const before = shown.length && shown[shown.length - 1].role === "assistant"
      ? shown.slice(0, -1) : shown;
    if (!live || !live.run.texts.length) return shown;
    const content = [{ type: "text", text: live.run.texts.join("") }];
    return [...before, { role: "assistant", metadata: null, content, options: null }];
  },
};

if (props.live) {
  window.strata = page;
  const sends = "#send, #again, .examples button";
  document.addEventListener("pointerdown", (event) => {
    if (event.target.closest(sends)) sentAt = performance.now();
  }, true);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    if (event.target.closest("#box, " + sends)) sentAt = performance.now();
  }, true);
}

list.addEventListener("mousemove", (event) => {
  const span = event.target;
  if (!span.run) {
    inspector.textContent = idle;
    return;
  }
  span.title = describe(span.run, pointed(span, event.clientX, event.clientY));
  inspector.textContent = span.title;
});
list.addEventListener("mouseleave", () => { inspector.textContent = idle; });
for (const [source, name] of names) addChip(source, name);
watch("value", draw);
draw();
