// Blocks of code: their language, a button that copies them, and colours of the syntax under those
// of the sources. What is highlighted is read from highlight.js as text and class names.
const LONGEST_CODE = 20000; // characters that are highlighted
const LANGUAGE = /^[\w+#.-]{1,30}/;
const SYNTAX = /^(?:hljs-[\w-]+|[a-z]+_)$/;

function codePlan(run, token, base) {
  const { spans } = token.meta;
  const language = (LANGUAGE.exec((token.info || "").trim()) || [""])[0];
  const kids = [];
  for (const [part, kind] of syntaxOf(token.content, language)) {
    const at = part.at;
    for (const [text, from] of pieces(spans, part.text, at)) {
      const made = spansOf(run, text, base + from);
      kids.push(...(kind ? [make("span", made, kind)] : made));
    }
  }
  const code = make("code", kids);
  const head = make("div", [{ button: "Copy code", icon: "copy" }], "code-head", {
    "data-language": language || "text",
  });
  return make("div", [head, make("pre", [code], "", { tabindex: 0 })], "code");
}

// The parts of a code as [{ text, at }, class names].
function syntaxOf(code, language) {
  const plain = [[{ text: code, at: 0 }, ""]];
  if (!language || code.length > LONGEST_CODE) return plain;
  const highlight = library("highlight");
  if (!highlight || !highlight.getLanguage(language)) return plain;
  const box = document.createElement("template");
  box.innerHTML = highlight.highlight(code, { language, ignoreIllegals: true }).value;
  const found = [];
  let at = 0;
  const walk = (node, kinds) => {
    for (const child of node.childNodes) {
      if (child.nodeType === Node.TEXT_NODE) {
        found.push([{ text: child.data, at }, kinds.join(" ")]);
        at += child.data.length;
      } else walk(child, [...kinds, ...[...child.classList].filter((name) => SYNTAX.test(name))]);
    }
  };
  walk(box.content, []);
  return at === code.length ? found : plain;
}
