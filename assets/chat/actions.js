// The row below a message: buttons, which show their names under the pointer and with the focus;
// arrows between versions; counts; and remarks on an answer, a sentence (`note`) and a mark
// (`badge`).
const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  copy: "M9 9h11v11H9z M5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  again: "M20 11a8 8 0 1 0-2.3 6.3 M20 4v7h-7",
  on: "M5 5v14l9-7z M19 5v14",
  branch: "M6 3v12 M18 9a3 3 0 1 0 0-6 3 3 0 0 0 0 6 M6 21a3 3 0 1 0 0-6 3 3 0 0 0 0 6 M18 9a9 9 0 0 1-9 9",
  remove: "M4 7h16 M9 7V4h6v3 M6 7l1 13h10l1-13",
  prove: "M4 12l5 5L20 6",
  replay: "M4 6h5v5H4z M15 3h5v5h-5z M15 14h5v5h-5z M9 8.5h3v-3h3 M12 8.5v8h3",
  rewrite: "M4 6h16 M4 11h9 M4 16h6 M13 19l.8-3.2L19 10.6l2.4 2.4-5.2 5.2z",
  accept: "M4 12l5 5L20 6",
  save: "M12 4v11 M7 10l5 5 5-5 M5 20h14",
  before: "M15 5l-7 7 7 7",
  after: "M9 5l7 7-7 7",
};
const SAID = [
  ["copy", "Copy"], ["edit", "Edit"], ["again", "Answer"], ["branch", "Branch"],
  ["remove", "Delete"],
];
const ANSWERED = [
  ["copy", "Copy"], ["again", "Regenerate"], ["on", "Continue"], ["rewrite", "Rewrite"],
  ["branch", "Branch"], ["remove", "Delete"], ["prove", "Prove it"], ["replay", "Replay"],
];
const MEANINGS = {
  branch: "Branch: a new conversation up to here",
  on: "Continue where it stopped",
  rewrite: "Rewrite: attach this text to your next message, which says what to change",
  prove: "Prove it: decode it again, plainly and with drafts",
  replay: "Replay: what was guessed, step by step",
};
const PICTURES = new Set(["show", "copy-code"]); // buttons without room for their names
const COPIED_MS = 1500;

function button(act, label, icon = act) {
  const node = document.createElement("button");
  const drawing = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  node.type = "button";
  node.className = "act";
  node.dataset.act = act;
  node.title = MEANINGS[act] || label;
  node.setAttribute("aria-label", label);
  drawing.setAttribute("viewBox", "0 0 24 24");
  drawing.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[icon]);
  drawing.append(path);
  node.append(drawing);
  if (!PICTURES.has(act)) node.append(label);
  return node;
}

function footOf(turn) {
  if (turn.foot) return turn.foot;
  const part = (kind) => {
    const node = document.createElement("div");
    node.className = kind;
    return node;
  };
  const line = part("foot");
  const acts = part("acts");
  const made = { line, note: part("note"), versions: part("versions"), acts, badge: part("badge"),
    counted: part("counted") };
  acts.setAttribute("role", "group");
  const mine = Boolean(ROLES[turn.role]);
  acts.setAttribute("aria-label", mine ? "With this message" : "With this answer");
  for (const [act, label] of mine ? SAID : ANSWERED) {
    if (act !== "edit" || turn.role === "user") acts.append(button(act, label));
  }
  line.append(made.versions, acts, made.badge, made.counted);
  turn.frame.append(made.note, line);
  turn.foot = made;
  return made;
}

function drawFoot(turn) {
  const { note, versions, acts, badge, counted } = footOf(turn);
  const { about, run } = turn;
  write(note, about.note || "");
  write(badge, about.badge ? about.badge.text : "");
  badge.className = "badge " + (about.badge ? about.badge.kind : "");
  badge.title = (about.badge && about.badge.title) || "";
  drawVersions(versions, turn);
  drawRewrite(turn);
  drawQuotes(turn);
  const replay = acts.querySelector("[data-act=replay]");
  if (replay) replay.hidden = !about.run;
  const goesOn = acts.querySelector("[data-act=on]");
  if (goesOn) goesOn.hidden = !about.on;
  write(counted, run.texts.length ? countedIn(turn) : "");
}

function countedIn({ run, about }) {
  const found = thoughtOf(run.text, about.thought);
  const thought = found ? tokensIn(run, found.from, found.to) : 0;
  const counted = (count) => `${count.toLocaleString("en")} token${count === 1 ? "" : "s"}`;
  if (!found || found.none) return counted(run.texts.length);
  return `${counted(tokensIn(run, found.answer, run.text.length))}, and ${thought.toLocaleString("en")}`
    + " of thinking";
}

function drawVersions(box, turn) {
  const ids = turn.about.versions || [];
  box.hidden = ids.length < 2;
  if (box.hidden) return;
  const at = ids.indexOf(turn.key);
  const arrow = (label, icon, to) => {
    const node = button("show", label, icon);
    node.disabled = !ids[to];
    node.dataset.message = ids[to] || "";
    return node;
  };
  const where = document.createElement("span");
  where.textContent = `${at + 1} / ${ids.length}`;
  where.title = `Version ${at + 1} of ${ids.length}`;
  box.replaceChildren(
    arrow("Version before", "before", at - 1), where, arrow("Version after", "after", at + 1),
  );
}

// The text of an answer without its thinking.
function answerOf(turn) {
  const text = turn.box.raw();
  const found = ROLES[turn.role] ? null : thoughtOf(text, turn.about.thought);
  return found ? text.slice(found.answer).trim() : text;
}

async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers offer this clipboard only to pages that were loaded with encryption.
    const box = document.createElement("textarea");
    box.value = text;
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
    from.focus();
  }
  const label = from.getAttribute("aria-label");
  if (label === "Copied") return;
  const name = (label) => {
    from.setAttribute("aria-label", label);
    if (from.lastChild.nodeType === Node.TEXT_NODE) from.lastChild.data = label;
  };
  name("Copied");
  from.classList.add("done");
  setTimeout(() => {
    name(label);
    from.classList.remove("done");
  }, COPIED_MS);
}

list.addEventListener("click", (event) => {
  const node = event.target.closest("[data-act]");
  if (!node) return;
  const turn = drawn.find(({ frame }) => frame.contains(node));
  const { act, file, of } = node.dataset;
  if (act === "copy-code") copy(node.closest(".code").querySelector("pre").textContent, node);
  else if (act === "copy") copy(answerOf(turn), node);
  else if (act === "prove") trigger("prove", {});
  else if (act === "replay") trigger("replay", { run: turn.about.run, step: 0 });
  else if (act === "edit") edit(turn);
  else if (act === "rewrite") trigger("rewrite", { message: turn.key, file: Number(file || 0) });
  else if (act === "passage") showPassage(node.dataset);
  else if (act === "save") save(turn.about.rewrite);
  else trigger("act", { act, of, message: node.dataset.message || turn.key });
});

foot = drawFoot;
