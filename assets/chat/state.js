// The token view. Text becomes text nodes, never markup. All files of this folder share one scope,
// in the order that app/web/token_view.py names. Data comes from two sources. `props.value`
// (app/web/render.py) holds the stored turns and names the stream of a growing answer. That stream
// (app/web/stream.py) sends tokens, figures and the end. Both send tokens in the same groups.
const legend = element.querySelector(".legend");
const list = element.querySelector(".turns");
const inspector = element.querySelector(".inspector");
const idle = matchMedia("(hover: none)").matches
  ? inspector.textContent.replace("Point at", "Tap") : inspector.textContent;
inspector.textContent = idle;
const UNKNOWN = { title: "Unknown", meaning: "an unknown source", kind: "k-target" };
const PLAIN = "target";
const LONGEST = 16; // tokens of the model's own in one span: a longer one is slow to lay out
const BOTTOM = 1e9;
const names = new Map(Object.entries(props.names));
let drawn = [];
let only = "";
let live = null;
let pinned = true;
let sticking = false;
