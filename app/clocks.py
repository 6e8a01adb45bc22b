"""Gradio's clocks, stopped once nobody can see them, so that an open page costs nothing.

Gradio times each wait with a clock that asks the browser for the next frame in every frame. The
clock of a part that is removed while it waits is never stopped, the one of Gradio's own loading
sign among them, which is on every page: 60 frames a second, 2 to 5 % of a core, for as long as the
page is open. No event of ours shows a clock, and a page cannot reach those of Gradio.

But frames have numbers that count up. So some time after something was done on the page it shows
how many are asked for beside ours. What asks for one in each of many frames in a row, while nothing
is under way, is such clocks, and is cancelled. Whatever else moves does not do so for that long.
"""

STOP_CLOCKS = """() => {
  const FRAMES = 60, QUIET_MS = 2000;
  let due = 0;
  const later = () => {
    clearTimeout(due);
    due = setTimeout(watch, QUIET_MS);
  };
  const working = () =>
    [...document.querySelectorAll("button.stop")].some((button) => button.checkVisibility());
  const watch = () => {
    if (working()) return later();
    const counts = [];
    let last = 0;
    const look = () => {
      const mine = requestAnimationFrame(look);
      counts.push(mine - last - 1);
      last = mine;
      if (counts.length <= FRAMES) return;
      cancelAnimationFrame(mine);
      const others = counts.pop();
      if (working() || counts.slice(1).some((count) => count !== others)) return later();
      for (let other = mine - others; other < mine; other++) cancelAnimationFrame(other);
    };
    requestAnimationFrame(look);
  };
  for (const kind of ["click", "keydown"]) document.addEventListener(kind, later);
  later();
}"""
"""Runs once in each page."""
