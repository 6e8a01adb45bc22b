// The page as a whole: help, tour, simple mode, and layout. Two attributes of <html> describe the
// layout: `data-shelf` ("open" or "closed") if the conversations are in a drawer, and
// `data-figures` if the figures are reduced to one line ("line") or opened from it ("open").
const root = document.documentElement;
const MODE = "strata-mode";
const SEEN = "strata-tour";
const [sheet, card, scrim] = ["dialog", ".step", ".scrim"]
  .map((each) => element.querySelector(each));
const narrow = window.matchMedia("(max-width: 760px)");
const medium = window.matchMedia("(max-width: 1080px)");

function remembered(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // The browser stores nothing, so the defaults apply.
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // The choice then lasts until the page closes.
  }
}

// layout

function arrange() {
  const simple = root.dataset.mode === "simple";
  const drawer = simple || narrow.matches;
  const line = simple || medium.matches;
  root.toggleAttribute("data-narrow", narrow.matches);
  if (!drawer) delete root.dataset.shelf;
  else if (!root.dataset.shelf) root.dataset.shelf = "closed";
  if (!line) delete root.dataset.figures;
  else if (!root.dataset.figures) root.dataset.figures = "line";
  tell();
}

function tell() {
  const opened = [[".to-shelf", "shelf", "open"], [".to-figures", "figures", "open"]];
  for (const [selector, name, open] of opened) {
    const button = document.querySelector("#bar " + selector);
    if (button) button.setAttribute("aria-expanded", String(root.dataset[name] === open));
  }
  const list = document.querySelector(".list");
  const shut = root.dataset.shelf === "closed";
  if (list) list.inert = shut;
  scrim.hidden = root.dataset.shelf !== "open";
  const mode = document.querySelector("#mode");
  if (mode) mode.setAttribute("aria-pressed", String(root.dataset.mode === "simple"));
}

function openShelf(open) {
  if (!root.dataset.shelf) return;
  root.dataset.shelf = open ? "open" : "closed";
  tell();
}

function switchMode() {
  const simple = root.dataset.mode !== "simple";
  root.dataset.mode = simple ? "simple" : "full";
  remember(MODE, root.dataset.mode);
  if (simple) tabNamed("Chat").click();
  delete root.dataset.figures;
  arrange();
  fit();
}

// The chat fills the part of the window below the header and the tabs, and above an on-screen
// keyboard.
function fit() {
  const chat = document.querySelector(".chat");
  const view = window.visualViewport;
  root.style.setProperty("--seen", Math.round(view ? view.height : window.innerHeight) + "px");
  if (chat && chat.offsetParent) {
    const top = chat.getBoundingClientRect().top + window.scrollY;
    root.style.setProperty("--top", Math.round(top) + "px");
  }
  const switches = document.querySelector(".switches");
  if (switches) root.style.setProperty("--switches", Math.ceil(switches.offsetWidth) + "px");
}

// All tabs stand in one row, which scrolls if it is too narrow. Gradio would move tabs that do not
// fit into a menu, so the row gets the width that all of them need.
function widen() {
  const all = document.querySelectorAll("#tabs .visually-hidden button");
  const width = [...all].reduce((sum, tab) => sum + tab.getBoundingClientRect().width + 2, 24);
  if (root.style.getPropertyValue("--tabs") === width + "px") return;
  root.style.setProperty("--tabs", width + "px");
  window.dispatchEvent(new Event("resize"));
}

// Remove `aria-controls` from tabs without a panel, where Gradio leaves it empty.
function nameTabs() {
  for (const tab of document.querySelectorAll("#tabs [role=tab][aria-controls='']")) {
    tab.removeAttribute("aria-controls");
  }
}

function tabNamed(name) {
  return [...document.querySelectorAll("#tabs [role=tab]")]
    .find((tab) => tab.textContent.trim() === name);
}

// help

let before = null;

function openHelp() {
  if (sheet.open) return;
  before = document.activeElement;
  endTour();
  sheet.showModal();
  sheet.querySelector(".close").focus();
}

sheet.addEventListener("close", () => {
  if (before && before.isConnected) before.focus();
  before = null;
});
sheet.addEventListener("click", (event) => {
  if (event.target === sheet) sheet.close();
});

// tour: each step has a selector or a tab, a title and a text

const TOUR = [
  { at: "#race .keys", title: "Watch a race",
    text: "One prompt, decoded plainly and with guesses, played back side by side. The demonstration "
      + "model is far smaller than real ones, so race at the pace of a real model: the same weights, "
      + "padded to the cost of 0.5\u00a0B parameters, which say nearly the same." },
  { at: "#tokens .legend", title: "Where words come from",
    text: "Coloured words were guessed: from this chat, from past answers, from general text, or by "
      + "a built-in head. The others are the model's own. Point at a word, or tap it, to see more." },
  { at: "#figures", title: "How fast it is",
    text: "The figures follow each answer: tokens per second, the speedup, and how many tokens one "
      + "step of the model gave." },
  { at: "#prove, [data-act=prove]", title: "Prove it",
    text: "Guesses never change the text. Prove it decodes an answer again without them, and compares "
      + "the two word by word." },
  { at: "tab:Compare", title: "Compare",
    text: "One prompt, two ways to answer it, measured in turn on this machine." },
  { at: "tab:Models", title: "Models",
    text: "Load a model of your own here, or take one from the catalogue." },
];

let at = -1;
let lit = null;

function light(target) {
  if (lit) lit.classList.remove("lit");
  lit = target;
  if (lit) lit.classList.add("lit");
}

function shown(node) {
  return Boolean(node) && node.getClientRects().length > 0;
}

function targetOf({ at: where }) {
  if (where.startsWith("tab:")) return tabNamed(where.slice(4));
  return [...document.querySelectorAll(where)].findLast(shown);
}

function go(to) {
  const steps = TOUR.filter((step) => shown(targetOf(step)));
  const step = steps[to];
  if (!step) {
    endTour();
    return;
  }
  const begins = at < 0;
  at = to;
  const target = targetOf(step);
  light(target);
  target.scrollIntoView({ block: "nearest", inline: "nearest" });
  card.querySelector("h2").textContent = step.title;
  card.querySelector("p").textContent = step.text;
  card.querySelector("small").textContent = `${to + 1} of ${steps.length}`;
  card.querySelector(".next").textContent = to + 1 < steps.length ? "Next" : "Done";
  card.hidden = false;
  const place = target.getBoundingClientRect();
  const { width, height } = card.getBoundingClientRect();
  const inside = (value, most) => Math.max(10, Math.min(value, most - 10));
  const beside = place.left - width - 14;
  const under = place.bottom + 12;
  const tall = place.height > 0.4 * window.innerHeight;
  const left = tall && beside > 10 ? beside : place.left;
  const fits = under + height < window.innerHeight;
  const top = tall ? place.top + 20 : fits ? under : place.top - height - 12;
  card.style.left = inside(left, window.innerWidth - width) + "px";
  card.style.top = inside(top, window.innerHeight - height) + "px";
  if (begins) before = document.activeElement;
  card.querySelector(".next").focus();
}

// The tour is offered once, on the first screen.
function offerTour(wanted) {
  root.toggleAttribute("data-offers", wanted);
  if (!wanted) remember(SEEN, "seen");
}

function startTour() {
  offerTour(false);
  if (sheet.open) sheet.close();
  tabNamed("Chat").click();
  go(0);
}

function endTour() {
  if (at < 0) return;
  const focused = card.contains(document.activeElement);
  at = -1;
  light(null);
  card.hidden = true;
  if (focused && before && before.isConnected) before.focus();
  before = null;
}

// events of the user

document.addEventListener("click", (event) => {
  const on = (selector) => event.target.closest && event.target.closest(selector);
  const tab = on("#tabs [role=tab]");
  if (tab) {
    endTour();
    tab.scrollIntoView({ block: "nearest", inline: "center" });
  }
  if (on("#to-help")) openHelp();
  else if (on("#mode")) switchMode();
  else if (on(".to-tour")) startTour();
  else if (on(".no-tour")) offerTour(false);
  else if (on("#guide .close")) sheet.close();
  else if (on("#guide .next")) go(at + 1);
  else if (on("#guide .skip")) endTour();
  else if (on("#bar .to-shelf")) openShelf(root.dataset.shelf !== "open");
  else if (on("#guide .scrim")) openShelf(false);
  else if (on("#bar .to-figures")) {
    root.dataset.figures = root.dataset.figures === "open" ? "line" : "open";
    tell();
  } else if (on("#new, #conversations .open")) openShelf(false);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  const open = at >= 0 || root.dataset.shelf === "open";
  if (!open) return;
  event.preventDefault();
  event.stopImmediatePropagation();
  endTour();
  if (root.dataset.shelf === "open") {
    openShelf(false);
    document.querySelector("#bar .to-shelf").focus();
  }
}, true);
document.addEventListener("strata:help", openHelp);
document.addEventListener("strata:shelf", () => openShelf(true));

function begin() {
  if (!document.querySelector(".chat") || !document.querySelector("#bar")) return false;
  arrange();
  fit();
  widen();
  nameTabs();
  for (const change of [narrow, medium]) change.addEventListener("change", arrange);
  for (const view of [window, window.visualViewport]) {
    if (view) view.addEventListener("resize", fit);
  }
  new ResizeObserver(fit).observe(document.querySelector("#top"));
  const tabs = document.querySelector("#tabs .tab-wrapper");
  new MutationObserver(() => { widen(); nameTabs(); }).observe(
    tabs, { childList: true, subtree: true, attributes: true, attributeFilter: ["aria-controls"] },
  );
  if (!remembered(SEEN)) offerTour(true);
  return true;
}

root.dataset.mode = remembered(MODE) === "simple" ? "simple" : "full";
if (!begin()) {
  const coming = new MutationObserver(() => { if (begin()) coming.disconnect(); });
  coming.observe(document.body, { childList: true, subtree: true });
}
