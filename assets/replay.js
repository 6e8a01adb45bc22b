// The replay of an answer, over the page, one step at a time with its draft tree.
// app/web/tabs/why.py sends the steps in pages, and the most recent pages are kept. Text becomes
// text nodes. The tree is a grid with a column for each depth and a row for each branch. The
// accepted path is the first row, so it reads as a sentence. Drawing reads no sizes or positions.
const view = element.querySelector(".replay-view");
const what = view.querySelector(".what");
const slider = view.querySelector("input");
const play = view.querySelector(".play");
const number = view.querySelector(".number");
const sofar = view.querySelector(".sofar");
const tree = view.querySelector(".tree");
const summary = view.querySelector(".summary");
const keymap = view.querySelector(".keymap");
const UNKNOWN = { title: "Unknown", kind: "k-target" };
const PLAY_MS = 900;
const PAGES = 8;
const TAIL = 1200; // characters of the answer that are shown before the step
const ACCEPTED = 5;
const REACHED = 6;
const names = new Map(Object.entries(props.names));
let run = "";
let total = 0;
let size = 1;
let at = 0;
let wanted = -1;
let timer = 0;
let pages = new Map();

function take(page) {
  if (!page || !page.run) return;
  const begins = page.at !== null && page.at !== undefined;
  if (!begins && page.run !== run) return;
  if (begins && page.run !== run) pages = new Map();
  ({ run, total, size } = page);
  for (const [source, name] of Object.entries(page.names || {})) names.set(source, name);
  pages.delete(page.first);
  pages.set(page.first, page);
  if (pages.size > PAGES) pages.delete(pages.keys().next().value);
  wanted = -1;
  what.textContent = page.model + " · " + page.method + " · " + plural(total, "step");
  slider.max = Math.max(0, total - 1);
  if (begins) {
    stop();
    go(page.at);
    if (!view.open) view.showModal();
    view.focus({ preventScroll: true });
  } else {
    draw();
  }
}

function go(step) {
  at = Math.max(0, Math.min(total - 1, step));
  slider.value = at;
  draw();
}

function draw() {
  number.textContent = total ? "Step " + (at + 1) + " of " + total : "No steps";
  slider.setAttribute("aria-valuetext", number.textContent);
  const first = Math.floor(at / size) * size;
  const page = pages.get(first);
  if (!page) {
    if (wanted !== first) trigger("wanted", { run, step: first });
    wanted = first;
    return;
  }
  const step = page.steps.find((each) => each.step === at);
  if (step) show(page, step);
  else blank();
}

function blank() {
  for (const part of [sofar, tree]) part.replaceChildren();
  summary.textContent = "Nothing is stored for this step.";
  tree.setAttribute("aria-label", summary.textContent);
}

function show(page, step) {
  let before = page.lead;
  for (const each of page.steps) {
    if (each.step >= step.step) break;
    before += each.tokens.map(([text]) => text).join("");
  }
  const cut = page.cut || before.length > TAIL;
  sofar.replaceChildren((cut ? "… " : "") + before.slice(-TAIL));
  for (const [text, source, percent] of step.tokens) sofar.append(word(text, source, percent));
  sofar.scrollTop = 1e9;
  tree.replaceChildren();
  if (step.guesses && step.guesses.length) drawTree(step);
  summary.textContent = inWords(step);
  tree.setAttribute("aria-label", alternative(step));
  tree.hidden = !step.guesses || !step.guesses.length;
  drawKeymap(step);
}

function look(source) {
  return names.get(source) || UNKNOWN;
}

function paint(node, source) {
  const name = look(source);
  node.classList.add("tok", name.kind);
  if (name.colour) node.style.setProperty("--k", name.colour);
  return node;
}

function word(text, source, percent) {
  const node = paint(document.createElement("b"), source);
  node.textContent = text;
  node.title = look(source).title + (percent ? ", probability " + chance(percent) : "");
  return node;
}

function chance(percent) {
  return percent === 1 ? "at most 1 %" : percent + " %";
}

function visible(text) {
  if (typeof text === "number") return "#" + text;
  const shown = text.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
  return shown.trim() === "" ? shown.replace(/ /g, "␣") || "∅" : shown.trim();
}

// The row of each guess in the grid. The first child continues the row of its parent; an accepted
// child comes first.
function placed(guesses) {
  const children = guesses.map(() => []);
  const roots = [];
  guesses.forEach((guess, i) => (guess[1] ? children[guess[1] - 1] : roots).push(i));
  const places = [];
  let last = 0;
  const visit = (all, depth, row) => {
    const order = [...all].sort((a, b) => guesses[b][ACCEPTED] - guesses[a][ACCEPTED] || a - b);
    order.forEach((i, nth) => {
      const mine = nth ? last += 1 : row;
      places[i] = { depth, row: mine, from: row, branch: nth > 0 };
      visit(children[i], depth + 1, mine);
    });
  };
  visit(roots, 0, 0);
  return places;
}

function drawTree({ guesses }) {
  placed(guesses).forEach(({ depth, row, from, branch }, i) => {
    const [text, , source, match, percent, accepted, reached] = guesses[i];
    const column = 2 * depth + 1;
    const line = document.createElement("i");
    line.className = branch ? "branch" : "line";
    line.style.gridColumn = column;
    line.style.gridRow = (branch ? from + 1 : row + 1) + " / " + (row + 2);
    const node = paint(document.createElement("span"), source);
    node.classList.add("node", accepted ? "kept" : reached ? "rejected" : "unseen");
    node.style.gridColumn = column + 1;
    node.style.gridRow = row + 1;
    node.textContent = visible(text);
    node.title = about(source, match, percent, accepted, reached);
    tree.append(line, node);
  });
}

function about(source, match, percent, accepted, reached) {
  const parts = [look(source).title];
  parts.push(accepted ? "accepted" : reached ? "rejected" : "not checked, as an earlier guess was wrong");
  if (match) parts.push("match of " + (match < 8 ? plural(match, "token") : match + " or more tokens"));
  if (percent) parts.push("the model gave it " + chance(percent));
  return parts.join("  ·  ");
}

function counts({ guesses }) {
  const kept = guesses.filter((guess) => guess[ACCEPTED]).length;
  const wrong = guesses.filter((guess) => guess[REACHED] && !guess[ACCEPTED]).length;
  return { kept, wrong, unseen: guesses.length - kept - wrong };
}

function inWords(step) {
  const parts = [];
  if (!step.guesses) {
    parts.push("What was guessed was not recorded: this answer was made by an earlier version");
  } else if (!step.guesses.length) {
    parts.push("Nothing was guessed: a plain step");
  } else {
    const { kept, wrong, unseen } = counts(step);
    parts.push("Guessed " + step.guesses.length + ", accepted " + kept + ", rejected " + wrong
      + (unseen ? ", not checked " + unseen : ""));
  }
  parts.push("the model wrote " + plural(step.tokens.length, "token"));
  const [draft, verify, sample, other] = step.times;
  parts.push("took " + duration(draft + verify + sample + other) + " (drafting " + duration(draft)
    + ", the model's forward " + duration(verify) + ")");
  if (step.plain !== null) parts.push("plain decoding would have taken " + duration(step.plain));
  return parts.join(" · ") + ".";
}

function alternative(step) {
  if (!step.guesses || !step.guesses.length) return inWords(step);
  const list = (all) => all.map((guess) => "“" + visible(guess[0]) + "”").join(" ") || "none";
  const kept = step.guesses.filter((guess) => guess[ACCEPTED]);
  const wrong = step.guesses.filter((guess) => guess[REACHED] && !guess[ACCEPTED]);
  return "Guesses. Accepted: " + list(kept) + ". Rejected: " + list(wrong) + ".";
}

function drawKeymap({ guesses }) {
  const sources = [...new Set((guesses || []).map((guess) => guess[2]))];
  keymap.replaceChildren(...sources.map((source) => {
    const line = document.createElement("li");
    const name = paint(document.createElement("span"), source);
    name.textContent = look(source).title;
    line.append(name);
    return line;
  }));
}

function plural(count, of) {
  return count + " " + of + (count === 1 ? "" : "s");
}

function duration(micro) {
  if (micro >= 1e6) return (micro / 1e6).toFixed(2) + " s";
  return micro >= 1000 ? (micro / 1000).toFixed(1) + " ms" : Math.round(micro) + " µs";
}

function stop() {
  clearInterval(timer);
  timer = 0;
  play.textContent = "Play";
  play.setAttribute("aria-label", "Play");
}

function tick() {
  if (at >= total - 1) stop();
  else if (pages.has(Math.floor(at / size) * size)) go(at + 1);
}

play.onclick = () => {
  if (timer) {
    stop();
    return;
  }
  if (at >= total - 1) go(0);
  timer = setInterval(tick, PLAY_MS);
  play.textContent = "Pause";
  play.setAttribute("aria-label", "Pause");
};
view.querySelector(".back").onclick = () => { stop(); go(at - 1); };
view.querySelector(".on").onclick = () => { stop(); go(at + 1); };
slider.oninput = () => { stop(); go(Number(slider.value)); };
view.querySelector(".close").onclick = () => view.close();
view.addEventListener("close", stop);
view.addEventListener("click", (event) => { if (event.target === view) view.close(); });
view.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.target === slider) return;
  event.preventDefault();
  stop();
  go(at + by);
});
watch("value", () => take(props.value));
take(props.value);
