// Points of charts that can be opened: their `customdata` begins with "run" or "step" and says which
// (app/web/charts.py). A click on one is told to the server as the event of that name. A chart is
// listened to when the pointer enters it, as it may have been drawn anew since.
const tab = element.closest('[role="tabpanel"]') || document.body;

function opened({ points }) {
  const found = points.length && points[0].customdata;
  if (Array.isArray(found) && ["run", "step"].includes(found[0])) {
    trigger(found[0], { value: found[1] });
  }
}

tab.addEventListener("pointerover", (event) => {
  const chart = event.target.closest?.(".js-plotly-plot");
  if (!chart?.on || chart.contains(event.relatedTarget)) return;
  chart.removeAllListeners("plotly_click");
  chart.on("plotly_click", opened);
});
