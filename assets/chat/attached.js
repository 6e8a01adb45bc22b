// A message of the user: its files as lines that unfold, then its text.
function drawMessage({ box, text, about }) {
  const files = about.files || [];
  if (!files.length) {
    write(box, text);
    return;
  }
  if (box.childElementCount) return; // A message never changes; an edit makes another one.
  box.replaceChildren(...files.map((file) => {
    const line = document.createElement("details");
    const name = document.createElement("summary");
    const content = document.createElement("pre");
    const more = file.size - file.text.length;
    const counted = (count) => count.toLocaleString("en") + " characters";
    line.className = "attached";
    name.textContent = `${file.name} · ${counted(file.size)}`;
    content.textContent = file.text + (more > 0 ? `\n… and ${counted(more)} more` : "");
    content.tabIndex = 0;
    line.append(name, content);
    return line;
  }), text);
}
