// Libraries that are fetched once an answer needs them, from this server alone: `props.vendor` is
// where. `library(name)` is the loaded one, or null while it is on its way; what is drawn without
// it is drawn again when it is there, or cannot be had.
const LIBRARIES = {
  markdown: { files: ["markdown-it/markdown-it.umd.min.js"], there: () => window.markdownit },
  highlight: { files: ["highlight/highlight.min.js"], there: () => window.hljs },
  katex: { files: ["katex/katex.min.css", "katex/katex.min.js"], there: () => window.katex },
};
const asked = new Set();
const failed = new Set();

function library(name) {
  const { files, there } = LIBRARIES[name];
  if (there()) return there();
  if (!asked.has(name)) {
    asked.add(name);
    const done = Promise.all(files.map(fetched)).catch(() => failed.add(name));
    done.then(() => redraw());
  }
  return null;
}

function fetched(file) {
  const style = file.endsWith(".css");
  const node = document.createElement(style ? "link" : "script");
  const address = props.vendor + "/" + file;
  if (style) Object.assign(node, { rel: "stylesheet", href: address });
  else node.src = address;
  return new Promise((done, failed) => {
    node.onload = done;
    node.onerror = failed;
    document.head.append(node);
  });
}
