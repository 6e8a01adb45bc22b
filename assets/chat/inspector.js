// The line that tells what is known of one token: the one under the pointer, or the one that the
// arrow keys stand on. What there is to say beyond that, `explain` knows where it is part of the page.
const DWELL_MS = 250;
const EXPLAINED = 400; // characters of an explanation
let inspected = null;

function inspect(span, token) {
  if (inspected && inspected.span === span && inspected.token === token) return;
  inspected = span && { span, token };
  if (!span) {
    inspector.textContent = idle;
    return;
  }
  span.title = describe(span.run, token);
  inspector.textContent = span.title;
  const mine = inspected;
  if (typeof explain === "function" && span.run.id) {
    setTimeout(() => { if (inspected === mine) tellMore(mine); }, DWELL_MS);
  }
}

async function tellMore(mine) {
  const { run } = mine.span;
  const said = await explain(run.id, run.steps[mine.token], mine.token);
  if (!said || inspected !== mine) return;
  if (said instanceof Node) inspector.append(" ", said);
  else inspector.append("  ·  " + String(said).slice(0, EXPLAINED));
}

list.addEventListener("mousemove", (event) => {
  const span = event.target.closest(".tok");
  if (span && span.run) inspect(span, pointed(span, event.clientX, event.clientY));
  else if (!standing) inspect(null);
});
list.addEventListener("mouseleave", () => { if (!standing) inspect(null); });

// The keyboard: within an answer that has the focus, the left and right arrows go from token to
// token, Home and End to the first and the last.
const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
let standing = null;

function stand(span, token) {
  if (standing) standing.span.classList.remove("at");
  standing = span && { span, token };
  if (span) span.classList.add("at");
  inspect(span, token);
}

// The next place in that direction: a token of this span, or of the one beside it.
function beside(spans, { span, token }, by) {
  const next = token + by;
  if (next >= span.first && next < span.first + span.count) return { span, token: next };
  const other = spans[spans.indexOf(span) + Math.sign(by)];
  if (!other) return { span, token };
  return { span: other, token: by > 0 ? other.first : other.first + other.count - 1 };
}

list.addEventListener("keydown", (event) => {
  const by = STEPS[event.key];
  const box = event.target;
  if (!by || !box.classList.contains("answered")) return;
  const spans = [...box.querySelectorAll(".tok")].filter((span) => span.count);
  if (!spans.length) return;
  event.preventDefault();
  const begins = by === -Infinity || !standing || !spans.includes(standing.span);
  const last = spans[spans.length - 1];
  const place = by === Infinity ? { span: last, token: last.first + last.count - 1 }
    : begins ? { span: spans[0], token: spans[0].first } : beside(spans, standing, by);
  stand(place.span, place.token);
  place.span.scrollIntoView({ block: "nearest" });
});
list.addEventListener("focusout", () => stand(null));
