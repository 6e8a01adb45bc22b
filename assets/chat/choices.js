// How answers are shown: as Markdown or as the tokens of the raw text, and with or without the
// colours of their sources. The browser keeps both choices.
const CHOICES = "strata-view";
const switches = element.querySelector(".views");
const choices = { view: "formatted", colours: true, ...kept() };

function kept() {
  try {
    const { view, colours } = JSON.parse(localStorage.getItem(CHOICES)) || {};
    return { view: view === "tokens" ? view : "formatted", colours: colours !== false };
  } catch {
    return {}; // Nothing is kept, or something that we did not write.
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
  pinned = true;
  redraw(true);
});

raw = choices.view === "tokens";
drawChoices();
