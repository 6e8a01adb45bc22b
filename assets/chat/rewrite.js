// What an answer changed in the text that it rewrites (app/service/rewriting.py), beside the answer,
// with a button that accepts the new text: as a version of the answer that it rewrites, or as a file.
const CHANGED = { removed: "del", added: "ins" };
const COMPARED = {
  none: "Nothing was changed.",
  long: "The texts are too long to compare.",
};

function drawRewrite(turn) {
  const { rewrite } = turn.about;
  turn.frame.classList.toggle("rewritten", Boolean(rewrite));
  if (turn.changes) turn.changes.remove();
  if (!rewrite) return;
  turn.changes = document.createElement("section");
  const words = document.createElement("div");
  turn.changes.className = "changes";
  turn.changes.setAttribute("aria-label", "What changed");
  words.className = "words";
  words.tabIndex = 0;
  words.append(...changed(rewrite.changes));
  turn.changes.append(words, accepts(rewrite));
  turn.box.after(turn.changes);
}

function changed(changes) {
  if (!changes || !changes.length) return [changes ? COMPARED.none : COMPARED.long];
  return changes.map(([kind, text]) => {
    if (!CHANGED[kind]) return text;
    const node = document.createElement(CHANGED[kind]);
    node.textContent = text;
    return node;
  });
}

function accepts({ original, name }) {
  if (!original) return button("save", "Save as " + name);
  const accept = button("accept", "Use as a new version");
  accept.dataset.of = original;
  return accept;
}

function save({ name, text }) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
