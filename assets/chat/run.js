// The tokens of an answer, as columns. `text` is their joined text without carriage returns; the
// Markdown view counts positions in its characters. `ends[i]` is the offset at which token i ends.
function newRun() {
  return {
    texts: [], sources: [], matches: [], steps: [], percents: [], ends: [], text: "",
    counts: new Map(),
  };
}

// Add groups that begin with token `from`. Known tokens are skipped. Returns false if there is a
// gap.
function take(run, groups, from, sources) {
  if (from > run.texts.length) return false;
  let at = from;
  let step = from ? run.steps[from - 1] : 0;
  for (const [number, match, steps, texts, percents] of groups) {
    step += steps;
    const source = sources[number];
    texts.forEach((text, i) => {
      if (at++ < run.texts.length) return;
      run.texts.push(text);
      run.sources.push(source);
      run.matches.push(match);
      run.steps.push(step);
      run.percents.push(percents[i]);
      run.text += text.replaceAll("\r", "");
      run.ends.push(run.text.length);
      run.counts.set(source, (run.counts.get(source) || 0) + 1);
    });
  }
  return true;
}

function startOf(run, token) {
  return token ? run.ends[token - 1] : 0;
}

// The token that contains the character at an offset of the text. Empty tokens contain none.
function tokenAt(run, offset) {
  let low = 0;
  let high = run.ends.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.ends[middle] > offset) high = middle;
    else low = middle + 1;
  }
  return low;
}

function describe(run, at) {
  const name = names.get(run.sources[at]) || UNKNOWN;
  const match = run.matches[at];
  const percent = run.percents[at];
  const parts = [
    name.title + ": " + name.meaning, "step " + (run.steps[at] + 1), "position " + (at + 1),
  ];
  if (match) parts.push("match of " + match + (match === 1 ? " token" : match < 8 ? " tokens" : " or more tokens"));
  if (percent) parts.push("probability " + (percent === 1 ? "at most 1 %" : percent + " %"));
  return parts.join("  ·  ");
}
