// Libraries are fetched when an answer needs them, from this server only, below `props.vendor`.
// `library(name)` returns the library, or null while it is being loaded. Turns that were drawn
// without it are drawn again once it is loaded or has failed to load.
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
