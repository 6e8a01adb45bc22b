// The live figures. app/web/metrics_panel.py explains each value. Values are written into the
// template as text, never as markup. They arrive as `props.value`; while an answer grows, they
// arrive as "strata:figures" events, whose ribbon holds only new steps. Nothing here reads sizes or
// positions, because each such read would force a layout.
const DASH = "–";
const LATEST = 64;
const CELL = 6;
const [speed, speedup, acceptance, first] = [...element.querySelectorAll(".figure")].map((box) => ({
  box,
  value: box.querySelector("b").firstChild,
  note: box.querySelector("small").firstChild,
}));
const shares = element.querySelector(".shares");
const sourceRows = element.querySelector(".sources tbody");
const levelRows = element.querySelector(".levels tbody");
const times = [...element.querySelectorAll(".times i")];
const stages = [...element.querySelectorAll(".stages b")].map((node) => node.firstChild);
const ribbon = element.querySelector(".ribbon");
const served = element.querySelector(".served");
const saved = element.querySelector(".saved");
const ended = element.querySelector(".ended");
const rows = [...sourceRows.rows].map((row, at) => slots(row, shares.children[at]));
const fixed = rows.length;
const levels = [];
let drafts = [];
let live = false;

// Whether a server gave the answer. The times of its steps are then not known.
let remote = false;

// How many steps of the run the ribbon has shown.
let shown = 0;

// When the page showed the first token of each run, in seconds since the click, by the run's `k`.
const seen = new Map();
let run = 0;
let since = 0;
let unclaimed = null;

function write(text, words) {
  if (text.data !== words) text.data = words;
}

function writeAll(texts, words) {
  texts.forEach((text, at) => write(text, words[at]));
}

function count(number) {
  return number.toLocaleString("en-US");
}

function duration(microseconds) {
  if (microseconds >= 1e6) return (microseconds / 1e6).toFixed(2) + " s";
  if (microseconds >= 1e3) return (microseconds / 1e3).toFixed(microseconds < 1e4 ? 1 : 0) + " ms";
  return Math.round(microseconds) + " µs";
}

function hide(node, whether) {
  if (node.hidden !== whether) node.hidden = whether;
}

// The texts of a row after its name, and its part of the bar.
function slots(row, part) {
  const texts = [...row.querySelectorAll("td:not(:first-child) > *")].map((place) => place.firstChild);
  return { row, part, title: row.cells[0].textContent, texts };
}

function node(name, words, kind = "") {
  const made = document.createElement(name);
  made.className = kind;
  made.appendChild(document.createTextNode(words));
  return made;
}

// A row for a draft model, whose name is that of a folder.
function draftRow([title, colour, kind], columns) {
  const row = document.createElement("tr");
  const name = node("span", title, "tok " + kind);
  name.title = title;
  name.style.setProperty("--k", colour);
  row.insertCell().append(name);
  for (let at = 1; at < columns; at += 1) row.insertCell().append(node("span", DASH));
  row.cells[2].append(node("em", " "));
  return row;
}

function drawDrafts(found) {
  if (JSON.stringify(found) === JSON.stringify(drafts)) return;
  drafts = found;
  for (const old of rows.splice(fixed)) {
    old.row.remove();
    old.part.remove();
  }
  for (const draft of found) {
    const part = shares.appendChild(document.createElement("i"));
    part.style.setProperty("--k", draft[1]);
    rows.push(slots(sourceRows.appendChild(draftRow(draft, 4)), part));
  }
  for (const old of levels.splice(0)) old.row.remove();
}

// Two counts, and their ratio.
function rated(accepted, drafted) {
  if (!drafted) return [DASH, ""];
  const percent = Math.round((100 * accepted) / drafted);
  return [`${count(accepted)} / ${count(drafted)}`, ` ${percent} %`];
}

function drawSources(found) {
  rows.forEach((row, at) => {
    const [share, accepted, drafted, spent] = found[at] || [];
    const known = share !== undefined;
    const alone = known && accepted === undefined;
    const percent = known ? share + " %" : DASH;
    const rest = [...rated(accepted, drafted), spent === undefined ? DASH : duration(spent)];
    writeAll(row.texts, [percent, ...(alone ? ["", "", ""] : rest)]);
    row.part.style.flexGrow = share || 0;
    const title = row.title + " " + percent;
    if (row.part.title !== title) row.part.title = title;
  });
}

function drawLevels(found) {
  hide(levelRows.closest("section"), !found.length);
  while (levels.length > found.length) levels.pop().row.remove();
  found.forEach(([at, forwards, accepted, drafted], i) => {
    if (!levels[i] || levels[i].title !== drafts[at][0]) {
      const row = draftRow(drafts[at], 3);
      if (levels[i]) levels[i].row.replaceWith(row);
      else levelRows.appendChild(row);
      levels[i] = slots(row);
    }
    const rate = drafted ? rated(accepted, drafted) : ["drafts alone", ""];
    writeAll(levels[i].texts, [count(forwards), ...rate]);
  });
}

function drawStages(found) {
  times.forEach((part, at) => {
    part.style.flexGrow = found[at] || 0;
    write(stages[at], found.length ? duration(found[at]) : DASH);
  });
}

function column(step, letters) {
  const made = document.createElement("b");
  const count = letters.length;
  const cells = [...letters.toLowerCase()].map((letter, at) => {
    const { part } = rows[letter.charCodeAt(0) - 97] || rows[rows.length - 1];
    const colour = part.style.getPropertyValue("--k");
    const [from, to] = [at * CELL, at * CELL + CELL - 1];
    return `${colour} ${from}px ${to}px, transparent ${to}px ${to + 1}px`;
  });
  made.style.height = count * CELL - 1 + "px";
  made.style.background = `linear-gradient(to top, ${cells.join(", ")})`;
  made.title = `step ${step + 1}: ${count} ${count === 1 ? "token" : "tokens"}`;
  return made;
}

// Draw only the steps that are not shown yet. After a gap, the ribbon starts again.
function drawRibbon([start, letters]) {
  const steps = letters.match(/[A-Z][a-z]*/g) || [];
  const known = shown - start;
  if (known < 0) ribbon.replaceChildren();
  const from = Math.max(0, known);
  ribbon.append(...steps.slice(from).map((step, at) => column(start + from + at, step)));
  while (ribbon.childElementCount > LATEST) ribbon.firstElementChild.remove();
  shown = Math.max(shown, start + steps.length);
}

function drawFirst() {
  const model = run ? duration(run) : DASH;
  const here = seen.get(run);
  write(first.value, here === undefined ? model : duration(1e6 * here));
  const where = remote ? "from the server" : "in the model";
  write(first.note, here === undefined ? where : `on screen; ${where} ${model}`);
}

function follow(key) {
  if (key === run) return;
  run = key;
  shown = 0;
  ribbon.replaceChildren();
  since = performance.now();
  if (run && unclaimed !== null) {
    seen.set(run, unclaimed);
    unclaimed = null;
  }
}

function draw(values) {
  const [pace, gain, accepted, decoding, plain] = values.h || [DASH, DASH, DASH, DASH];
  write(speed.value, pace);
  write(speed.note, plain ? `tokens/s while writing; plain: ${plain}` : "tokens/s while writing");
  const header = values.p && document.querySelector("#header .pace");
  if (header) header.textContent = values.p;
  write(speedup.value, gain);
  write(speedup.note, values.n || "of the whole answer");
  const alone = decoding === DASH ? "" : "decoding alone " + decoding;
  if (speedup.box.title !== alone) speedup.box.title = alone;
  write(acceptance.value, accepted);
  remote = values.v !== undefined;
  hide(ribbon.closest("section").previousElementSibling, remote);
  follow(values.k || 0);
  drawFirst();
  drawDrafts(values.d || []);
  drawSources(values.s || []);
  drawLevels(values.l || []);
  drawStages(values.g || []);
  drawRibbon(values.r || [0, ""]);
  hide(served, !values.v);
  write(served.firstChild, values.v || " ");
  hide(saved, !values.w);
  write(saved.firstChild, values.w || " ");
  hide(ended, !values.e);
  write(ended.firstChild, values.e || " ");
}

// Listen to an event of the document for as long as the panel is on the page.
function listen(name, act) {
  document.addEventListener(name, function heard(event) {
    if (element.isConnected) act(event.detail);
    else document.removeEventListener(name, heard);
  });
}

listen("strata:figures", (values) => {
  // Gradio skips a value that equals the stored one, so the stored one must differ from the next.
  if (!live) props.value = values;
  live = true;
  draw(values);
});
listen("strata:first", ({ seconds }) => {
  // The time belongs to the shown run if that began after the click, and else to the next run.
  if (run && since > performance.now() - 1e3 * seconds) seen.set(run, seconds);
  else unclaimed = seconds;
  drawFirst();
});
watch("value", () => {
  live = false;
  draw(props.value || {});
});
draw(props.value || {});
