// Makes the children of a box match a plan. Unchanged nodes stay, with the selection and the scroll
// position, so a growing answer changes only where it grows.
function patch(box, plan, first = box.firstChild) {
  let node = first;
  for (const kid of plan) {
    const next = node && node.nextSibling;
    spend(1);
    if (node && node.plan && alike(node.plan, kid)) update(node, kid);
    else {
      const fresh = built(kid);
      if (node) node.replaceWith(fresh);
      else box.append(fresh);
    }
    node = next;
  }
  while (node) {
    const next = node.nextSibling;
    node.remove();
    node = next;
  }
}

function alike(before, after) {
  if (after.tag) {
    return before.tag === after.tag && before.kind === after.kind
      && JSON.stringify(before.set) === JSON.stringify(after.set);
  }
  if (after.tex !== undefined) {
    return before.tex === after.tex && before.display === after.display
      && before.ready === Boolean(window.katex) && mixOf(before.kids) === mixOf(after.kids);
  }
  if (after.button) return before.button === after.button;
  return before.text !== undefined && before.run === after.run && before.first === after.first
    && before.skip === after.skip;
}

function update(node, kid) {
  if (kid.tag) patch(node, kid.kids);
  else if (kid.text !== undefined && node.plan.text !== kid.text) {
    const text = kid.run ? node.firstChild : node;
    if (kid.text.startsWith(text.data)) text.appendData(kid.text.slice(text.data.length));
    else text.data = kid.text;
  }
  if (kid.run) node.count = kid.count;
  if (kid.tex !== undefined) {
    Object.assign(kid, { ready: node.plan.ready, nodes: node.plan.nodes });
    spend(kid.nodes);
  }
  node.plan = kid;
}

function built(kid) {
  let node;
  if (kid.tag) {
    node = document.createElement(kid.tag);
    if (kid.kind) node.className = kid.kind;
    for (const [name, value] of Object.entries(kid.set || {})) node.setAttribute(name, value);
    patch(node, kid.kids);
  } else if (kid.tex !== undefined) node = builtFormula(kid);
  else if (kid.button) node = button("copy-code", kid.button, kid.icon);
  else if (kid.run) {
    node = newSpan(kid.run, kid.first, kid.skip);
    node.count = kid.count;
    node.append(kid.text);
  } else node = document.createTextNode(kid.text);
  node.plan = kid;
  return node;
}

// A formula is one node. The line under it shows the colours of its tokens, in proportion.
function builtFormula(kid) {
  const box = document.createElement(kid.display ? "div" : "span");
  const inner = document.createElement("span");
  box.className = kid.display ? "maths display" : "maths";
  kid.ready = Boolean(window.katex);
  drawMaths(inner, kid.tex, kid.display);
  kid.nodes = inner.getElementsByTagName("*").length;
  spend(kid.nodes);
  const [first] = kid.kids;
  if (first && first.run) {
    const last = kid.kids[kid.kids.length - 1];
    const span = newSpan(first.run, first.first, first.skip);
    span.className = "tok mixed";
    span.count = last.first + last.count - first.first;
    span.style.setProperty("--mix", mixOf(kid.kids));
    span.append(inner);
    box.append(span);
  } else box.append(inner);
  return box;
}

function mixOf(kids) {
  const whole = kids.reduce((sum, kid) => sum + kid.text.length, 0);
  let at = 0;
  const stops = kids.filter((kid) => kid.run).map((kid) => {
    const source = kid.run.sources[kid.first];
    const name = names.get(source) || UNKNOWN;
    const colour = source === PLAIN ? "transparent" : name.colour || `var(--s-${source})`;
    const from = (100 * at) / whole;
    at += kid.text.length;
    return `${colour} ${from.toFixed(1)}% ${((100 * at) / whole).toFixed(1)}%`;
  });
  return stops.length ? `linear-gradient(90deg, ${stops.join(", ")})` : "none";
}
