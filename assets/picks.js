// Clicks on points of charts. The `customdata` of such a point begins with "run" or "step" and the
// id or number (app/web/charts.py). A click sends the event of that name to the server. Listeners
// are added when the pointer enters a chart, because the chart may have been redrawn.
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
