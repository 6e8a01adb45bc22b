// Formatting a message must not block the page. It may take FORMAT_MS of script time and create
// MOST_NODES nodes, which the browser then lays out. A script cannot be interrupted from outside,
// so all formatting code calls `spend` regularly: for each step of the parser, each node, each
// formula and each piece of code. A message that exceeds the limits is shown unformatted.
const FORMAT_MS = 600;
const MOST_NODES = 25000;
let budget = null;

class TooMuch extends Error {}

function spend(nodes = 0) {
  if (!budget) return;
  budget.nodes += nodes;
  if (budget.nodes > MOST_NODES || performance.now() > budget.until) throw new TooMuch();
}

// The result of `work`, or null if it exceeds the limits.
function limited(work) {
  budget = { nodes: 0, until: performance.now() + FORMAT_MS };
  try {
    return work();
  } catch (error) {
    if (error instanceof TooMuch) return null;
    throw error;
  } finally {
    budget = null;
  }
}
