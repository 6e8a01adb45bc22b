// The token view: one text node per token, never markup. `props.names` says what the sources are
// called; `props.value` (app/render.py) holds all turns, the tail of the answer under way, or both;
// the tail overlaps what was sent before, so that an update may be skipped without a gap. Draft
// models come with the tokens that they drafted: `value.names`, each with its colour.
const legend = element.querySelector(".legend");
const list = element.querySelector(".turns");
const inspector = element.querySelector(".inspector");
const idle = inspector.textContent;
const UNKNOWN = { title: "Unknown", meaning: "from an unknown source", kind: "k-target" };
const names = new Map(Object.entries(props.names));
const fixed = names.size;
let drawn = [];
let only = "";

function describe(token) {
  const [text, source, match, step, position, probability] = token;
  const name = names.get(source) || UNKNOWN;
  const parts = [name.title + ": " + name.meaning, "step " + (step + 1), "position " + position];
  if (match) parts.push("match of " + match + (match === 1 ? " token" : " tokens"));
  if (probability) parts.push("probability " + (100 * probability).toFixed(1) + " %");
  return parts.join("  ·  ");
}

function span(token) {
  const node = document.createElement("span");
  const name = names.get(token[1]) || UNKNOWN;
  node.className = "tok " + name.kind;
  if (name.colour) node.style.setProperty("--k", name.colour);
  node.textContent = token[0];
  node.title = describe(token);
  node.token = token;
  dim(node);
  return node;
}

function dim(node) {
  node.classList.toggle("dim", only !== "" && node.token[1] !== only);
}

function choose(source) {
  only = only === source ? "" : source;
  for (const node of list.querySelectorAll(".tok")) dim(node);
  drawLegend();
}

function begin(key, role) {
  const box = document.createElement("div");
  box.className = "turn " + (role === "user" ? "said" : "answered");
  list.appendChild(box);
  const state = { key, box, count: 0, text: null, sources: new Map() };
  drawn.push(state);
  return state;
}

function clear(state) {
  state.box.textContent = "";
  Object.assign(state, { count: 0, text: null, sources: new Map() });
}

function append(state, tokens) {
  const fresh = document.createDocumentFragment();
  for (const token of tokens) {
    fresh.appendChild(span(token));
    state.sources.set(token[1], (state.sources.get(token[1]) || 0) + 1);
  }
  state.box.appendChild(fresh);
  state.count += tokens.length;
}

function fill(state, turn) {
  if (!turn.tokens) {
    if (state.text !== turn.text) {
      clear(state);
      state.box.textContent = state.text = turn.text;
    }
    return;
  }
  if (state.count > turn.tokens.length || state.text !== null) clear(state);
  append(state, turn.tokens.slice(state.count));
}

function drawLegend() {
  const counts = new Map();
  let total = 0;
  for (const state of drawn) {
    for (const [source, count] of state.sources) {
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
  chip.title = name.meaning + " (click to see these alone)";
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

function drawAll(turns) {
  let same = 0;
  while (same < drawn.length && same < turns.length && drawn[same].key === turns[same].key) same += 1;
  if (same === turns.length - 1 && same < drawn.length && drawn[same].key === "growing") {
    drawn[same].key = turns[same].key;
    same += 1;
  }
  for (const state of drawn.splice(same)) state.box.remove();
  turns.forEach((turn, at) => fill(drawn[at] || begin(turn.key, turn.role), turn));
}

function grow(tail) {
  let state = drawn[drawn.length - 1];
  if (!state || state.key !== "growing") state = begin("growing", "assistant");
  if (tail.from === 0 && state.count > tail.tokens.length) clear(state);
  if (tail.from <= state.count) append(state, tail.tokens.slice(state.count - tail.from));
}

function draw() {
  const value = props.value || {};
  learn(value.names);
  const near = list.scrollHeight - list.scrollTop - list.clientHeight < 120;
  if (value.turns || !value.growing) drawAll(value.turns || []);
  if (value.growing) grow(value.growing);
  drawLegend();
  if (near || !value.growing) list.scrollTop = list.scrollHeight;
}

list.addEventListener("mouseover", (event) => {
  inspector.textContent = event.target.token ? describe(event.target.token) : idle;
});
list.addEventListener("mouseleave", () => { inspector.textContent = idle; });
for (const [source, name] of names) addChip(source, name);
watch("value", draw);
draw();
