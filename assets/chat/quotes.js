// The quotes of an answer, below it: where each of them stands in a file or in the result of a tool
// (app/service/quotes.py), with a button that shows the passage there.
function drawQuotes(turn) {
  const { quotes } = turn.about;
  if (turn.quotes) turn.quotes.remove();
  if (!quotes) return;
  turn.quotes = document.createElement("details");
  turn.quotes.className = "quotes";
  const title = document.createElement("summary");
  const rows = document.createElement("ul");
  title.textContent = quotes.title;
  rows.append(...quotes.rows.map((row) => {
    const node = document.createElement("li");
    const text = document.createElement("q");
    text.textContent = row.text;
    node.append(text, row.where ? passageButton(row) : "not found");
    node.classList.toggle("missing", !row.where);
    return node;
  }));
  turn.quotes.append(title, rows);
  turn.foot.note.before(turn.quotes);
}

function passageButton({ message, number, where, from, to }) {
  const node = document.createElement("button");
  node.type = "button";
  node.textContent = where;
  Object.assign(node.dataset, { act: "passage", message, number, from, to });
  return node;
}

// Unfold the text that holds a passage, and select the passage. Of a long text the page has only the
// beginning.
function showPassage({ message, number, from, to }) {
  const turn = drawn.find(({ key }) => key === message);
  const line = turn && turn.frame.querySelectorAll(".attached details")[number];
  if (!line) return;
  pin(false);
  line.open = true;
  const box = line.lastElementChild;
  if (from === "undefined") {
    line.scrollIntoView({ block: "nearest" });
    return;
  }
  const passage = document.createRange();
  passage.setStart(box.firstChild, Number(from));
  passage.setEnd(box.firstChild, Number(to));
  const selection = document.getSelection();
  selection.removeAllRanges();
  selection.addRange(passage);
  for (const outer of [box, list]) {
    const above = passage.getBoundingClientRect().top - outer.getBoundingClientRect().top;
    outer.scrollTop += above - outer.clientHeight / 3;
  }
}
