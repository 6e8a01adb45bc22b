"""Gradio's account of what waits for an event, not kept.

A page of Gradio notes for each component what the last event that concerns it is doing: waiting,
working, done. It forgets none, and at each change of any event it looks every one of them up in
the tree of all components. An answer took ten million calls of functions for that, most of what
the page did. It is for signs of progress, and no event of ours shows one (app/web/wiring.py). So
nothing is noted. Errors are told by other means. Where a version of Gradio keeps no such account,
nothing is replaced.
"""

KEEP_NO_STATUS = """async () => {
  const scripts = performance.getEntriesByType("resource").map(({ name }) => name);
  const script = scripts.find((name) => /\\/statustracker-[^/]+\\.js$/.test(name));
  const parts = script ? Object.values(await import(script)) : [];
  const found = parts.find((part) => part && part.LoadingStatus);
  if (found) found.LoadingStatus.prototype.update = () => {};
}"""
"""Runs once in each page."""
