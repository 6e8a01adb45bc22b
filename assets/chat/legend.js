// The legend: the sources of the shown tokens, each with its share, and a filter. Sources without
// tokens are left out.
const whole = legend.querySelector(".whole");

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
  if (whole) whole.hidden = !total;
  for (const chip of legend.querySelectorAll(".chip")) {
    const count = counts.get(chip.source) || 0;
    chip.hidden = !count;
    if (chip.hidden && only === chip.source) choose(only);
    chip.lastChild.textContent = total ? Math.round((100 * count) / total) + " %" : "";
    chip.setAttribute("aria-pressed", String(only === chip.source));
  }
}

function addChip(source, name) {
  const chip = document.createElement("button");
  chip.className = "chip";
  chip.hidden = true;
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
