// Blocks of code: the language, a button that copies the code, and syntax colours beneath those of
// the sources. From the output of highlight.js, only text and class names are used.
const LONGEST_CODE = 20000; // characters that are highlighted
const PIECE = /[^]{0,999}\n|[^]{1,1000}/; // whole lines where they are shorter
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

// The name of a language that highlights another one piece by piece. The regular expressions of
// many languages take time quadratic in the length of the text, and nothing can interrupt them;
// between two pieces the time is checked. What a piece leaves open, such as a comment, continues in
// the next.
function inPieces(highlight, language) {
  const wanted = highlight.getLanguage(language);
  const name = highlight.listLanguages().find((each) => highlight.getLanguage(each) === wanted);
  const pieced = name + " in pieces";
  if (!highlight.getLanguage(pieced)) {
    const piece = { begin: PIECE, subLanguage: name, "on:begin": () => spend() };
    highlight.registerLanguage(pieced, () => ({ contains: [piece] }));
  }
  return pieced;
}

// The parts of a piece of code as [{ text, at }, class names].
function syntaxOf(code, language) {
  const plain = [[{ text: code, at: 0 }, ""]];
  if (!language || code.length > LONGEST_CODE) return plain;
  const highlight = library("highlight");
  if (!highlight || !highlight.getLanguage(language)) return plain;
  const box = document.createElement("template");
  const pieced = inPieces(highlight, language);
  box.innerHTML = highlight.highlight(code, { language: pieced, ignoreIllegals: true }).value;
  spend(); // highlight.js swallows errors that are thrown within it.
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
