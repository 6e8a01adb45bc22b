() => {
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
}
