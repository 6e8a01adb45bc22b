// Whoever looks at the end goes on looking at it; who scrolls up is left in peace. A scroll of our
// own is told apart by its frame: its event comes before the next frame is drawn. Nothing of the
// layout is read.
const sentinel = document.createElement("div");
sentinel.className = "sentinel";
list.append(sentinel);
new IntersectionObserver(
  (seen) => { pinned = seen[seen.length - 1].isIntersecting; },
  { root: list, rootMargin: "0px 0px 32px 0px" },
).observe(sentinel);
new ResizeObserver(stick).observe(list);
list.addEventListener("scroll", () => { if (!sticking) pinned = false; });

function stick() {
  if (!pinned) return;
  list.scrollTop = BOTTOM;
  sticking = true;
  requestAnimationFrame(() => { sticking = false; });
}
