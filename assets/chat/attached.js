// A message of the user: its files as lines that unfold, with a button to rewrite each, then its
// text.
function drawMessage({ box, text, about }) {
  const files = about.files || [];
  if (!files.length) {
    write(box, text);
    return;
  }
  if (box.childElementCount) return; // A message never changes; an edit makes another one.
  box.replaceChildren(...files.map((file, at) => {
    const row = document.createElement("div");
    const line = document.createElement("details");
    const rewrite = button("rewrite", "Rewrite");
    const name = document.createElement("summary");
    const content = document.createElement("pre");
    const more = file.size - file.text.length;
    const counted = (count) => count.toLocaleString("en") + " characters";
    row.className = "attached";
    rewrite.dataset.file = at;
    const what = [file.name, file.rewrite && "to be rewritten", counted(file.size)];
    name.textContent = what.filter(Boolean).join(" · ");
    content.textContent = file.text + (more > 0 ? `\n… and ${counted(more)} more` : "");
    content.tabIndex = 0;
    line.append(name, content);
    row.append(line, rewrite);
    return row;
  }), text);
}
