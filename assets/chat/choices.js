// How answers are shown: as Markdown or as raw tokens, with or without the colours of their
// sources. The browser remembers both choices.
const CHOICES = "strata-view";
const switches = element.querySelector(".views");
const choices = { view: "formatted", colours: true, ...kept() };

function kept() {
  try {
    const { view, colours } = JSON.parse(localStorage.getItem(CHOICES)) || {};
    return { view: view === "tokens" ? view : "formatted", colours: colours !== false };
  } catch {
    return {}; // Nothing is stored, or something that this page did not write.
  }
}

function drawChoices() {
  for (const node of switches.children) {
    const { view } = node.dataset;
    const chosen = view ? choices.view === view : choices.colours;
    node.setAttribute("aria-pressed", String(chosen));
  }
  element.classList.toggle("plain", !choices.colours);
}

switches.addEventListener("click", (event) => {
  const node = event.target.closest("button");
  if (!node) return;
  const { view } = node.dataset;
  if (view) choices.view = view;
  else choices.colours = !choices.colours;
  localStorage.setItem(CHOICES, JSON.stringify(choices));
  drawChoices();
  if (!view || raw === (view === "tokens")) return;
  raw = view === "tokens";
  pin(true);
  redraw(true);
});

raw = choices.view === "tokens";
drawChoices();
