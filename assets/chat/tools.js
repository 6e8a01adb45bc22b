// Calls of tools: a result as a line that unfolds, and the question before a call runs. What a model
// or a tool wrote is text, in which characters that do not show are spelled out.
const asks = element.querySelector(".asks");
const DECISIONS = [["once", "Allow once"], ["always", "Always in this chat"], ["no", "No"]];
const RUNS_MS = 400; // how often a page looks whether a call still runs
let running = 0;
let shownCall = "";

function preformatted(text) {
  const node = document.createElement("pre");
  node.textContent = text;
  node.tabIndex = 0;
  return node;
}

function drawCalled({ box, text, about: { call } }) {
  if (!call) write(box, text);
  if (!call || box.childElementCount) return;
  const row = document.createElement("div");
  const line = document.createElement("details");
  const name = document.createElement("summary");
  const more = call.size - text.length;
  const counted = (count) => `${count.toLocaleString("en")} characters`;
  row.className = "attached";
  name.textContent = `Called ${call.name} · ${counted(call.size)}`;
  line.append(name, preformatted(call.arguments));
  line.append(preformatted(text + (more > 0 ? `\n… and ${counted(more)} more` : "")));
  row.append(line);
  box.append(row);
}

// Ask about the call that waits, or show that it runs.
function ask(asked) {
  const now = JSON.stringify(asked) || "";
  if (now === shownCall) return; // It may have the focus, and was read aloud.
  shownCall = now;
  clearInterval(running);
  asks.replaceChildren();
  if (!asked) return;
  if (asked.runs) running = setInterval(() => trigger("look", {}), RUNS_MS);
  const head = document.createElement("p");
  const name = document.createElement("b");
  name.textContent = asked.name;
  head.append(asked.runs ? "Running " : "The model wants to call ", name, ` of ${asked.server}`);
  asks.append(head, preformatted(asked.arguments));
  if (asked.problem) {
    const problem = document.createElement("p");
    problem.className = "problem";
    problem.textContent = asked.problem;
    asks.append(problem);
  }
  if (asked.runs || asked.exhausted) return;
  const row = document.createElement("div");
  row.className = "choices";
  for (const [choice, label] of DECISIONS) {
    const node = document.createElement("button");
    node.type = "button";
    node.textContent = label;
    node.onclick = () => trigger("act", { act: choice, message: asked.message, call: asked.call });
    row.append(node);
  }
  asks.append(row);
}
