"""Gradio's clocks, stopped once nobody can see them, so that an open page costs nothing.

Gradio times each wait with a clock that asks the browser for the next frame in every frame. The
clock of a part that is removed while it waits is never stopped, the one of Gradio's own loading
sign among them, which is on every page: 60 frames a second, 2 to 5 % of a core, for as long as the
page is open. No event of ours shows a clock, and a page cannot reach those of Gradio.

But frames have numbers that count up, so it shows how many are asked for beside ours; and a clock
asks for the time in each frame, so for a few frames it is noted who does that. Where every frame
is a clock's, they are cancelled. Where anything else moves, it is tried again later.
"""

STOP_CLOCKS = """() => {
  const FRAMES = 10, QUIET_MS = 2000;
  let due = 0;
  const later = () => {
    clearTimeout(due);
    due = setTimeout(watch, QUIET_MS);
  };
  const watch = () => {
    const seen = [];
    let last = 0, clocks = 0;
    performance.now = () => {
      if (new Error().stack.includes("/statustracker")) clocks += 1;
      return Performance.prototype.now.call(performance);
    };
    const look = () => {
      const mine = requestAnimationFrame(look), others = mine - last - 1;
      seen.push(others === clocks ? others : -1);
      last = mine;
      clocks = 0;
      if (seen.length <= FRAMES) return;
      cancelAnimationFrame(mine);
      delete performance.now;
      if (seen.slice(1).some((count) => count !== others)) return later();
      for (let other = mine - others; other < mine; other++) cancelAnimationFrame(other);
    };
    requestAnimationFrame(look);
  };
  for (const kind of ["click", "keydown"]) document.addEventListener(kind, later);
  later();
}"""
"""Runs once in each page."""
