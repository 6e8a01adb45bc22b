element.addEventListener("change", ({ target }) => {
  const { value } = target;
  target.value = target.dataset.loaded; // The chosen model is shown once it is loaded.
  trigger("pick", { source: value });
});
// Listen to both events: the header is redrawn while a model loads, perhaps during a click.
for (const kind of ["pointerdown", "click"]) {
  element.addEventListener(kind, ({ target }) => {
    if (target.matches(".stop-loading")) trigger("stop", {});
  });
}
