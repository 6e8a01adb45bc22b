// The token view: one text node per token, never markup. `props.value` holds the turns
// (app/render.py), `props.names` what the sources are called. Answers only grow while they
// stream, so a known turn gets its new tokens appended and nothing is drawn twice.
const legend = element.querySelector(".legend");
const list = element.querySelector(".turns");
const inspector = element.querySelector(".inspector");
const drawn = new Map();
const idle = inspector.textContent;

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

function makeTurn(turn) {
  const box = document.createElement("div");
  box.className = "turn " + (turn.role === "user" ? "said" : "answered");
  list.appendChild(box);
  return { box, count: 0, text: null };
}

function fill(state, turn) {
  if (!turn.tokens) {
    if (state.text !== turn.text) state.box.textContent = state.text = turn.text;
    return;
  }
  if (state.count > turn.tokens.length || state.text !== null) {
    state.box.textContent = "";
    state.count = 0;
    state.text = null;
  }
  const fresh = document.createDocumentFragment();
  for (const token of turn.tokens.slice(state.count)) fresh.appendChild(span(token));
  state.box.appendChild(fresh);
  state.count = turn.tokens.length;
}

function drawLegend(turns) {
  const counts = {};
  let total = 0;
  for (const turn of turns) {
    for (const token of turn.tokens || []) {
      counts[token[1]] = (counts[token[1]] || 0) + 1;
      total += 1;
    }
  }
  const chosen = list.dataset.only || "";
  legend.textContent = "";
  for (const source of Object.keys(props.names)) {
    const chip = document.createElement("button");
    const share = total ? Math.round((100 * (counts[source] || 0)) / total) : 0;
    chip.className = "chip";
    chip.type = "button";
    chip.setAttribute("aria-pressed", String(chosen === source));
    chip.title = props.names[source].meaning + " (click to see these alone)";
    const swatch = document.createElement("span");
    swatch.className = "tok " + props.names[source].kind;
    swatch.textContent = props.names[source].title;
    const number = document.createElement("span");
    number.className = "number";
    number.textContent = total ? share + " %" : "";
    chip.append(swatch, number);
    chip.onclick = () => {
      list.dataset.only = list.dataset.only === source ? "" : source;
      drawLegend(turns);
    };
    legend.appendChild(chip);
  }
}

function draw() {
  const turns = (props.value && props.value.turns) || [];
  const near = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
  const keys = turns.map((turn) => turn.key);
  const known = [...drawn.keys()];
  const stale = known.some((key, at) => key !== keys[at]);
  if (stale) {
    list.textContent = "";
    drawn.clear();
  }
  for (const turn of turns) {
    if (!drawn.has(turn.key)) drawn.set(turn.key, makeTurn(turn));
    fill(drawn.get(turn.key), turn);
  }
  drawLegend(turns);
  if (near || stale) list.scrollTop = list.scrollHeight;
}

list.addEventListener("mouseover", (event) => {
  const token = event.target.token;
  inspector.textContent = token ? describe(token) : idle;
});
list.addEventListener("mouseleave", () => { inspector.textContent = idle; });
watch("value", draw);
draw();
