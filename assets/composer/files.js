// Files that are sent with the message: chosen, dropped or pasted. The server reads them. A file
// that it cannot read stays in the list with the reason, until the user removes it.
const input = part("choose");
const READ_MS = 120000; // A PDF file may take 20 s, and those of other pages come first.
const reading = new Map();
let attached = 0;

function sized(bytes) {
  if (bytes < 1000) return bytes + " B";
  return bytes < 1e6 ? (bytes / 1e3).toFixed(0) + " kB" : (bytes / 1e6).toFixed(1) + " MB";
}

function described(file) {
  if (file.error) return file.error;
  if (file.reading) return file.name + (hurried ? " · reading, then it is sent" : " · reading");
  const tokens = file.tokens.toLocaleString("en-US") + (file.tokens === 1 ? " token" : " tokens");
  const length = `${sized(file.size)} · ${file.exact ? "" : "about "}${tokens}`;
  return [file.name, file.note, length].filter(Boolean).join(" · ");
}

// The line of each file. A click on its button is not lost if the file is read between pressing and
// releasing: the line stays, and the button, which may move then, keeps the pointer.
const lines = new Map();

function drawFiles() {
  part("files").hidden = !files.length;
  for (const [file, line] of lines) {
    if (files.includes(file)) continue;
    line.remove();
    lines.delete(file);
  }
  for (const file of files) {
    if (!lines.has(file)) lines.set(file, newLine());
    const line = lines.get(file);
    line.className = file.error ? "file bad" : "file";
    if (file.error) line.setAttribute("role", "alert");
    line.firstChild.textContent = described(file);
    line.lastChild.setAttribute("aria-label", "Remove " + file.name);
  }
  drawWaits();
}

function newLine() {
  const line = node("li", "file");
  const away = node("button", "away", "×");
  line.append(node("span", "words"), away);
  away.addEventListener("pointerdown", (event) => away.setPointerCapture(event.pointerId));
  away.addEventListener("click", () => takeAway(files.find((file) => lines.get(file) === line)));
  part("files").append(line);
  return line;
}

function takeAway(file) {
  files = files.filter((other) => other !== file);
  if (file.key) trigger("drop", { files: [file.key] });
  keep();
  drawFiles();
  ask();
  focusBox();
}

function replace(file, by) {
  if (!files.includes(file)) return;
  files = files.map((other) => (other === file ? by : other));
  lines.set(by, lines.get(file));
  lines.delete(file);
  keep();
  drawFiles();
  ask();
  hurried = hurried && !by.error;
  if (hurried) send();
}

// The server has read a file, or says why it could not.
async function readFile(file) {
  const { name } = file;
  const refused = (error) => ({ name, error });
  if (file.size > props.most) {
    return refused(
      `${name} has ${sized(file.size)}, and at most ${sized(props.most)} can be attached.`,
    );
  }
  try {
    const { path } = await upload(file);
    attached += 1;
    const number = attached;
    const answer = new Promise((then, fail) => {
      reading.set(number, then);
      setTimeout(fail, READ_MS);
    });
    trigger("attach", { number, name, path });
    const found = await answer;
    return found.error ? refused(found.error) : found.file;
  } catch {
    return refused(`${name} did not arrive, or was not read. Attach it again.`);
  }
}

async function attach(chosen) {
  const added = [...chosen].map((file) => ({ name: file.name, reading: true, file }));
  files = [...files, ...added];
  drawFiles();
  for (const each of added) replace(each, await readFile(each.file));
}

// A message that is edited in place accepts files too (assets/chat/editing.js).
listen("read-file", ({ file, then }) => { readFile(file).then(then); });

listen("attached", (found) => {
  const then = reading.get(found.number);
  reading.delete(found.number);
  if (then) then(found);
  else if (!found.number) add(found.file);
});

// A text of the conversation that is to be rewritten.
function add(file) {
  files = [...files, file];
  keep();
  drawFiles();
  ask();
  focusBox();
}

input.addEventListener("change", () => {
  attach(input.files);
  input.value = "";
});

const holdsFiles = (data) => Boolean(data) && [...data.types].includes("Files");
const inChat = (event) => event.target.closest && event.target.closest(".talk");

document.addEventListener("paste", (event) => {
  if (!inChat(event) || !event.clipboardData || !event.clipboardData.files.length) return;
  event.preventDefault();
  event.stopPropagation();
  attach(event.clipboardData.files);
}, true);

document.addEventListener("dragover", (event) => {
  const over = holdsFiles(event.dataTransfer) && Boolean(inChat(event));
  document.documentElement.toggleAttribute("data-dropping", over);
  if (over) event.preventDefault();
});
for (const end of ["dragleave", "dragend", "drop"]) {
  document.addEventListener(end, (event) => {
    if (end === "dragleave" && event.relatedTarget) return;
    document.documentElement.removeAttribute("data-dropping");
  });
}
document.addEventListener("drop", (event) => {
  if (!holdsFiles(event.dataTransfer) || !inChat(event)) return;
  event.preventDefault();
  attach(event.dataTransfer.files);
});
