// The token view: text becomes text nodes, never markup. All files of this folder are one scope, in
// the order that app/web/token_view.py names. Two sources: `props.value` (app/web/render.py) holds
// the stored turns, and names the stream of an answer that is under way; the stream
// (app/web/stream.py) then brings tokens, figures and the end. Both bring tokens in the same groups.
const legend = element.querySelector(".legend");
const list = element.querySelector(".turns");
const inspector = element.querySelector(".inspector");
const idle = inspector.textContent;
const UNKNOWN = { title: "Unknown", meaning: "an unknown source", kind: "k-target" };
const PLAIN = "target";
const LONGEST = 16; // tokens of the model's own in one span: a longer one is slow to lay out
const BOTTOM = 1e9;
const names = new Map(Object.entries(props.names));
const fixed = names.size;
let drawn = [];
let only = "";
let live = null;
let pinned = true;
let sticking = false;
