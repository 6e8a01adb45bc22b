// An answer in JSON as a tree, folded below its text. It is read from the text, not from parsed
// values: keys keep their order, numbers all their digits, and no key that stands twice is lost.
const JSON_WORDS = /"[^"\\]*(?:\\.[^"\\]*)*"|[{}[\]]|[^\s"{}[\],:]+/g;
const MOST_KIDS = 500; // of one object or list that are drawn

// The object or list in a text, as { key, word, kids }; null for any other text.
function jsonIn(text) {
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  const all = { kids: [] };
  const open = [all];
  let key = null;
  for (const [word] of text.matchAll(JSON_WORDS)) {
    const within = open[open.length - 1];
    if (word === "}" || word === "]") open.pop();
    else if (within.word === "{" && key === null) key = JSON.parse(word);
    else {
      const kid = { key: within.word === "[" ? within.kids.length : key, word, kids: null };
      within.kids.push(kid);
      key = null;
      if (word === "{" || word === "[") open.push(Object.assign(kid, { kids: [] }));
    }
  }
  return all.kids[0].kids && all.kids[0];
}

function drawTree(turn, found) {
  if (!found && turn.tree) turn.tree.remove();
  if (!found) turn.tree = null;
  else if (!turn.tree) {
    turn.tree = branchOf({ ...found, key: "Tree" });
    turn.tree.classList.add("tree");
    turn.box.append(turn.tree);
  }
}

// What is inside is drawn when it is opened.
function branchOf({ key, word, kids }) {
  const box = document.createElement("details");
  const head = document.createElement("summary");
  const unit = word === "{" ? "field" : "item";
  const count = `${kids.length.toLocaleString("en")} ${unit}${kids.length === 1 ? "" : "s"}`;
  head.append(labelled("key", key), labelled("count", count));
  box.append(head);
  box.addEventListener("toggle", () => box.append(kidsOf(kids)), { once: true });
  return box;
}

function kidsOf(kids) {
  const box = document.createElement("ul");
  for (const kid of kids.slice(0, MOST_KIDS)) {
    const line = document.createElement("li");
    if (kid.kids) line.append(branchOf(kid));
    else {
      const text = kid.word.startsWith('"');
      const value = labelled(text ? "text" : "value", text ? JSON.parse(kid.word) : kid.word);
      line.append(labelled("key", kid.key), value);
    }
    box.append(line);
  }
  if (kids.length > MOST_KIDS) {
    const rest = document.createElement("li");
    const more = (kids.length - MOST_KIDS).toLocaleString("en");
    rest.append(labelled("count", `… and ${more} more, which stand in the text`));
    box.append(rest);
  }
  return box;
}

function labelled(kind, text) {
  const node = document.createElement("span");
  node.className = kind;
  node.textContent = text;
  return node;
}
