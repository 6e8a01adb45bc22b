// The token view: one text node per token, never markup. `props.names` says what the sources are
// called; `props.value` (app/render.py) holds either all turns, or the tail of the answer under
// way, which overlaps what was sent before, so that an update may be skipped without a gap.
const legend = element.querySelector(".legend");
const list = element.querySelector(".turns");
const inspector = element.querySelector(".inspector");
const idle = inspector.textContent;
let drawn = [];

function describe(token) {
  const [text, source, match, step, position, probability] = token;
  const name = props.names[source] || { title: source, meaning: "drafted by a smaller model" };
  const parts = [name.title + ": " + name.meaning, "step " + (step + 1), "position " + position];
  if (match) parts.push("match of " + match + (match === 1 ? " token" : " tokens"));
  if (probability) parts.push("probability " + (100 * probability).toFixed(1) + " %");
  return parts.join("  ·  ");
}

function span(token) {
  const node = document.createElement("span");
  const name = props.names[token[1]];
  node.className = "tok " + (name ? name.kind : "k-draft");
  node.textContent = token[0];
  node.title = describe(token);
  node.token = token;
  return node;
}

function begin(key, role) {
  const box = document.createElement("div");
  box.className = "turn " + (role === "user" ? "said" : "answered");
  list.appendChild(box);
  const state = { key, box, count: 0, text: null, sources: {} };
  drawn.push(state);
  return state;
}

function clear(state) {
  state.box.textContent = "";
  Object.assign(state, { count: 0, text: null, sources: {} });
}

function append(state, tokens) {
  const fresh = document.createDocumentFragment();
  for (const token of tokens) {
    fresh.appendChild(span(token));
    state.sources[token[1]] = (state.sources[token[1]] || 0) + 1;
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
  const counts = {};
  let total = 0;
  for (const state of drawn) {
    for (const [source, count] of Object.entries(state.sources)) {
      counts[source] = (counts[source] || 0) + count;
      total += count;
    }
  }
  for (const chip of legend.children) {
    const source = chip.dataset.source;
    const share = total ? Math.round((100 * (counts[source] || 0)) / total) + " %" : "";
    chip.lastChild.textContent = share;
    chip.setAttribute("aria-pressed", String(list.dataset.only === source));
  }
}

function makeLegend() {
  for (const [source, name] of Object.entries(props.names)) {
    const chip = document.createElement("button");
    chip.className = "chip";
    chip.type = "button";
    chip.dataset.source = source;
    chip.title = name.meaning + " (click to see these alone)";
    const swatch = document.createElement("span");
    swatch.className = "tok " + name.kind;
    swatch.textContent = name.title;
    const number = document.createElement("span");
    number.className = "number";
    chip.append(swatch, number);
    chip.onclick = () => {
      list.dataset.only = list.dataset.only === source ? "" : source;
      drawLegend();
    };
    legend.appendChild(chip);
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
  const near = list.scrollHeight - list.scrollTop - list.clientHeight < 120;
  if (value.growing) grow(value.growing);
  else drawAll(value.turns || []);
  drawLegend();
  if (near || !value.growing) list.scrollTop = list.scrollHeight;
}

list.addEventListener("mouseover", (event) => {
  inspector.textContent = event.target.token ? describe(event.target.token) : idle;
});
list.addEventListener("mouseleave", () => { inspector.textContent = idle; });
makeLegend();
watch("value", draw);
draw();
