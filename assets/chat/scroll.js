// A list that is scrolled to its end stays at the end while it grows; a list that the user scrolled
// up stays where it is. Scrolls by this script are recognised by their frame: their event comes
// before the next frame is drawn. The browser also scrolls when text becomes shorter; the end is
// then still in view.
const NEAR = 2; // pixels below the end that rounding may leave
const sentinel = document.createElement("div");
sentinel.className = "sentinel";
list.append(sentinel);
new IntersectionObserver(
  (seen) => pin(seen[seen.length - 1].isIntersecting),
  { root: list, rootMargin: "0px 0px 32px 0px" },
).observe(sentinel);
// Observes the list and each message (turns.js), because the row below an answer may appear late.
const sizes = new ResizeObserver(stick);
sizes.observe(list);
list.addEventListener("scroll", () => {
  if (sticking || !pinned) return;
  pin(list.scrollHeight - list.clientHeight - list.scrollTop <= NEAR);
});

// A pinned list must not use the browser's scroll anchoring, which would hold a message in place.
function pin(whether) {
  pinned = whether;
  list.classList.toggle("pinned", whether);
}

function stick() {
  if (!pinned) return;
  list.scrollTop = BOTTOM;
  sticking = true;
  requestAnimationFrame(() => { sticking = false; });
}
