// Unsent text, by conversation. It survives a reload and a switch to another conversation. Waiting
// messages belong to this page only, so that no two pages send the same one.
const DRAFTS = "strata-drafts";
const WAITS = "strata-waits";
const LONGEST = 100000; // characters of a draft
const MOST = 50; // drafts
const TOTAL = 1000000; // characters of all drafts

function read(store, name) {
  try {
    return JSON.parse(store.getItem(name)) || {};
  } catch {
    return {}; // Another program wrote this entry.
  }
}

function store(where, name, value) {
  try {
    where.setItem(name, JSON.stringify(value));
  } catch {
    // The browser's storage is full or disabled.
  }
}

const keyOf = (conversation) => conversation || "new";

function saveDraft(conversation, text) {
  const drafts = read(localStorage, DRAFTS);
  const kept = files.filter((file) => file.key);
  delete drafts[keyOf(conversation)];
  const written = text.trim() || kept.length;
  if (written && text.length <= LONGEST) drafts[keyOf(conversation)] = { text, files: kept };
  const all = Object.entries(drafts).slice(-MOST);
  let size = all.reduce((sum, [, draft]) => sum + String(draft.text).length, 0);
  while (size > TOTAL) size -= String(all.shift()[1].text).length;
  store(localStorage, DRAFTS, Object.fromEntries(all));
}

function keep() {
  if (area()) saveDraft(here.conversation, area().value);
}

function showDraft() {
  const draft = read(localStorage, DRAFTS)[keyOf(here.conversation)] || {};
  files = Array.isArray(draft.files) ? draft.files : [];
  write(typeof draft.text === "string" ? draft.text : "");
  drawFiles();
}

function saveWaits(conversation, messages) {
  const all = read(sessionStorage, WAITS);
  if (messages.length) all[keyOf(conversation)] = messages;
  else delete all[keyOf(conversation)];
  store(sessionStorage, WAITS, all);
}

function savedWaits(conversation) {
  const found = read(sessionStorage, WAITS)[keyOf(conversation)];
  return Array.isArray(found) ? found : [];
}
