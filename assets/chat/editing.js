// A message is edited in place: its bubble becomes a text box with its files, and "+" adds files.
// Sending it makes another version; Esc and Cancel leave everything unchanged. The event
// "strata:editing" tells the composer what is edited, because it shows how full the context would
// be.
const LATE_EDIT_MS = 20000;
let edits = 0;
let opened = null; // the turn whose text box was used last

function tellEdit(turn) {
  opened = turn;
  const detail = turn && { message: turn.key, ...editedBy(turn.editor) };
  document.dispatchEvent(new CustomEvent("strata:editing", { detail }));
  if (turn) turn.editor.long = detail.long; // The composer has measured it.
}

// The content of an editor: its text, which files of the message stay, and the keys of added files.
function editedBy({ box, files }) {
  return {
    text: box.value,
    kept: files.filter(({ at }) => at !== undefined).map(({ at }) => at),
    files: files.filter(({ key }) => key).map(({ key }) => key),
  };
}

function edit(turn) {
  if (!turn.editor) openEditor(turn);
  turn.editor.box.focus();
  turn.frame.scrollIntoView({ block: "nearest" });
}

function openEditor(turn) {
  const form = document.createElement("form");
  const list = document.createElement("ul");
  const box = document.createElement("textarea");
  const ends = document.createElement("div");
  const chooser = document.createElement("input");
  const [add, cancel, send] = [["add", "+"], ["cancel", "Cancel"], ["send", "Send"]].map(
    ([name, label]) => {
      const made = document.createElement("button");
      made.type = name === "send" ? "submit" : "button";
      made.className = name;
      made.textContent = label;
      return made;
    },
  );
  add.setAttribute("aria-label", "Attach files");
  Object.assign(chooser, { type: "file", multiple: true, hidden: true });
  form.className = "editor";
  list.className = "files";
  list.setAttribute("aria-label", "Attached files");
  box.value = turn.text;
  box.rows = 1 + turn.text.split("\n").length;
  box.setAttribute("aria-label", "Edit your message");
  box.setAttribute("enterkeyhint", "send");
  ends.className = "ends";
  ends.append(add, cancel, send);
  form.append(list, box, ends, chooser);
  const files = (turn.about.files || []).map(({ name }, at) => ({ name, at }));
  turn.editor = { form, list, box, send, sent: 0, files, lines: new Map() };
  drawEdited(turn);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    revise(turn);
  });
  box.addEventListener("input", () => tellEdit(turn));
  box.addEventListener("keydown", (event) => editorKey(event, turn));
  cancel.addEventListener("click", () => closeEditor(turn));
  add.addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    addFiles(turn, [...chooser.files]);
    chooser.value = "";
  });
  turn.frame.classList.add("edited");
  turn.frame.insertBefore(form, turn.box.nextSibling);
  tellEdit(turn);
}

function addFiles(turn, chosen) {
  for (const file of chosen) {
    const waiting = { name: file.name, reading: true };
    const then = (found) => changeFiles(turn, (each) => (each === waiting ? found : each));
    if (turn.editor) turn.editor.files.push(waiting);
    document.dispatchEvent(new CustomEvent("strata:read-file", { detail: { file, then } }));
  }
  changeFiles(turn, (each) => each);
}

// Replace each file of an editor by the result of `by`, or remove it if that is null. The line of a
// file stays while it is read, and its button keeps a pointer that presses it, so no click is lost.
function changeFiles(turn, by) {
  if (!turn.editor) return;
  const { lines } = turn.editor;
  turn.editor.files = turn.editor.files.map((file) => {
    const found = by(file);
    const line = lines.get(file);
    if (found === file || !line) return found;
    lines.delete(file);
    if (found) lines.set(found, line);
    else line.remove();
    return found;
  }).filter(Boolean);
  drawEdited(turn);
  tellEdit(turn);
}

function drawEdited(turn) {
  const { list, files, lines, send } = turn.editor;
  list.hidden = !files.length;
  send.disabled = files.some(({ reading, error }) => reading || error);
  for (const file of files) {
    if (!lines.has(file)) lines.set(file, newEditedLine(turn));
    const line = lines.get(file);
    line.className = file.error ? "file bad" : "file";
    if (file.error) line.setAttribute("role", "alert");
    line.firstChild.data = file.error || file.name + (file.reading ? " · reading" : "");
    line.lastChild.setAttribute("aria-label", "Remove " + file.name);
  }
}

function newEditedLine(turn) {
  const { list, lines } = turn.editor;
  const line = document.createElement("li");
  const away = document.createElement("button");
  away.type = "button";
  away.textContent = "×";
  away.addEventListener("pointerdown", (event) => away.setPointerCapture(event.pointerId));
  away.addEventListener("click", () => {
    changeFiles(turn, (file) => (lines.get(file) === line ? null : file));
    turn.editor.box.focus();
  });
  line.append(document.createTextNode(""), away);
  list.append(line);
  return line;
}

// While an input method composes a word, Enter belongs to that method.
function editorKey(event, turn) {
  const composes = event.isComposing || event.keyCode === 229;
  const plain = !event.shiftKey && !event.altKey && !event.ctrlKey && !event.metaKey;
  if (composes) return;
  if (event.key === "Enter" && plain) revise(turn);
  else if (event.key === "Escape") closeEditor(turn);
  else return;
  event.preventDefault();
}

function closeEditor(turn) {
  turn.editor.form.remove();
  turn.editor = null;
  turn.frame.classList.remove("edited");
  if (opened === turn) tellEdit(null);
  const button = turn.frame.querySelector("[data-act=edit]");
  if (button && turn.frame.isConnected) button.focus();
}

function revise(turn) {
  const { editor } = turn;
  if (editor.sent || editor.send.disabled || editor.long) return;
  edits += 1;
  const number = edits;
  editor.sent = number;
  editor.send.disabled = true;
  document.dispatchEvent(new CustomEvent("strata:say"));
  setTimeout(() => revised({ number, ok: false }), LATE_EDIT_MS);
  trigger("revise", { number, message: turn.key, ...editedBy(editor) });
}

// The edit was accepted, and the conversation shows it; or it was refused, and the editor stays
// open.
function revised({ number, ok }) {
  const turn = drawn.find(({ editor }) => editor && editor.sent === number);
  if (ok && opened && opened.editor && opened.editor.sent === number) tellEdit(null);
  if (!turn) return;
  if (ok) closeEditor(turn);
  else {
    turn.editor.sent = 0;
    drawEdited(turn);
  }
}

document.addEventListener("strata:revised", ({ detail }) => { if (detail) revised(detail); });
