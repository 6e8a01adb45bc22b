// The list of conversations. app/web/tabs/conversations.py describes its value. Titles and hits
// become text nodes, never markup. `trigger` sends the chosen action to the server: "open", "pin",
// "rename", "folder", "title", "export" or "remove", each with the id of a conversation.
//
// One entry of the list takes the keyboard's focus (roving tabindex): arrows, Home and End move,
// Enter opens, F2 renames, Delete deletes, and the menu key opens a menu of further actions.
const rows = element.querySelector(".rows");
const empty = element.querySelector(".nothing");
const more = element.querySelector(".more");
const folders = element.querySelector("datalist");
const MENU = [
  ["pin", "Pin", "Unpin"],
  ["rename", "Rename"],
  ["title", "Suggest a title"],
  ["folder", "Move to folder"],
  ["export:json", "Export as JSON"],
  ["export:markdown", "Export as Markdown"],
  ["export:page", "Export as a page with colours"],
  ["remove", "Delete"],
];
let focused = "";
let menu = null;
let asking = false;
let late = false;

function make(tag, kind, text) {
  const node = document.createElement(tag);
  node.className = kind;
  if (text !== undefined) node.textContent = text;
  return node;
}

function entry(item, current) {
  const row = make("li", "entry" + (item.id === current ? " current" : ""));
  const open = make("button", "open");
  open.type = "button";
  open.dataset.id = item.id;
  open.tabIndex = -1;
  if (item.id === current) open.setAttribute("aria-current", "true");
  open.append(make("span", "title", item.title));
  if (item.hit) {
    const hit = make("span", "hit");
    hit.append(item.hit[0], make("mark", "", item.hit[1]), item.hit[2]);
    open.append(hit);
  }
  open.onclick = () => trigger("open", { id: item.id, message: item.message || "" });
  const dots = make("button", "dots", "⋯");
  dots.type = "button";
  dots.tabIndex = -1;
  dots.setAttribute("aria-label", "More for " + item.title);
  dots.setAttribute("aria-haspopup", "menu");
  dots.onclick = () => (menu && menu.row === row ? close(true) : unfold(row, item));
  row.append(open, dots);
  Object.assign(row, { item });
  return row;
}

const watchList = watchPages(() => trigger("look", {}));

// While a menu or a text box is open, the list is not drawn. It is drawn when they close.
function draw() {
  watchList((props.value || {}).watch);
  late = Boolean(menu || asking);
  if (late) return;
  const value = props.value || {};
  const had = rows.contains(document.activeElement);
  rows.replaceChildren();
  for (const { name, items } of value.groups || []) {
    const group = make("section", "group");
    if (name) group.append(make("h2", "", name));
    const list = make("ul", "");
    if (name) list.setAttribute("aria-label", name);
    list.append(...items.map((item) => entry(item, value.current)));
    group.append(list);
    rows.append(group);
  }
  empty.textContent = value.empty || "";
  empty.hidden = !value.empty;
  more.textContent = value.more || "";
  more.hidden = !value.more;
  folders.replaceChildren(...(value.folders || []).map((name) => {
    const option = make("option", "");
    option.value = name;
    return option;
  }));
  const all = buttons();
  const here = all.find((button) => button.dataset.id === focused)
    || all.find((button) => button.hasAttribute("aria-current")) || all[0];
  if (here) {
    here.tabIndex = 0;
    if (had) here.focus({ preventScroll: true });
  }
}

function buttons() {
  return [...rows.querySelectorAll(".open")];
}

function move(to) {
  for (const button of buttons()) button.tabIndex = button === to ? 0 : -1;
  focused = to.dataset.id;
  to.focus();
  to.scrollIntoView({ block: "nearest" });
}

// further actions

function unfold(row, item) {
  close(false);
  const box = make("div", "menu");
  box.setAttribute("role", "menu");
  for (const [act, name, other] of MENU) {
    const choice = make("button", "", other && item.pinned ? other : name);
    choice.type = "button";
    choice.setAttribute("role", "menuitem");
    choice.tabIndex = -1;
    choice.onclick = () => { close(true); perform(act, row, item); };
    box.append(choice);
  }
  row.append(box);
  row.querySelector(".dots").setAttribute("aria-expanded", "true");
  menu = { row, box };
  // Place the menu relative to the window, so that nothing clips it: below its entry, or above the
  // entry if there is no room.
  const from = row.querySelector(".dots").getBoundingClientRect();
  const { width, height } = box.getBoundingClientRect();
  const below = from.bottom + 2 + height <= window.innerHeight;
  box.style.left = Math.max(4, from.right - width) + "px";
  box.style.top = Math.max(4, below ? from.bottom + 2 : from.top - height - 2) + "px";
  box.firstChild.focus();
}

function close(back) {
  if (!menu) return;
  const { row, box } = menu;
  menu = null;
  box.remove();
  row.querySelector(".dots").removeAttribute("aria-expanded");
  if (back) row.querySelector(".open").focus();
  setTimeout(() => late && draw());
}

function perform(act, row, item) {
  const [name, kind] = act.split(":");
  if (name === "rename") ask(row, "Title", item.title, 200, (text) => {
    if (text) trigger("rename", { id: item.id, title: text });
  });
  else if (name === "folder") ask(row, "Folder, empty for none", item.folder, 60, (text) => {
    trigger("folder", { id: item.id, folder: text });
  });
  else trigger(name, { id: item.id, kind: kind || "", pinned: !item.pinned });
}

// A text box in place of the entry. Enter saves, Escape cancels.
function ask(row, label, before, longest, then) {
  const box = make("input", "line");
  Object.assign(box, { value: before, maxLength: longest, placeholder: label });
  box.setAttribute("aria-label", label);
  if (label.startsWith("Folder")) box.setAttribute("list", folders.id);
  asking = true;
  let open = true;
  const end = (keep) => {
    if (!open) return;
    open = asking = false;
    box.remove();
    row.classList.remove("asking");
    row.querySelector(".open").focus();
    if (keep) then(box.value.trim());
    setTimeout(() => late && draw());
  };
  box.onkeydown = (event) => {
    event.stopPropagation();
    if (event.key === "Enter" && !event.isComposing) end(true);
    if (event.key === "Escape") end(false);
  };
  box.onblur = () => end(box.value.trim() !== before);
  row.classList.add("asking");
  row.append(box);
  box.focus();
  box.select();
}

rows.addEventListener("keydown", (event) => {
  if (menu) {
    const choices = [...menu.box.children];
    const at = choices.indexOf(document.activeElement);
    const steps = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: choices.length - 1 };
    if (event.key in steps) {
      choices[(steps[event.key] + choices.length) % choices.length].focus();
    } else if (event.key === "Escape" || event.key === "Tab") close(true);
    else return;
    event.preventDefault();
    event.stopPropagation();
    return;
  }
  const all = buttons();
  const at = all.indexOf(event.target);
  if (at < 0) return;
  const { item } = event.target.parentNode;
  const steps = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 };
  if (event.key in steps) {
    move(all[Math.min(all.length - 1, Math.max(0, steps[event.key]))]);
  } else if (event.key === "F2") perform("rename", event.target.parentNode, item);
  else if (event.key === "Delete") perform("remove", event.target.parentNode, item);
  else if (event.key === "ContextMenu" || (event.key === "F10" && event.shiftKey)) {
    unfold(event.target.parentNode, item);
  } else return;
  event.preventDefault();
});
// Escape empties the search first, and has no other effect then.
document.addEventListener("keydown", (event) => {
  const box = event.target;
  if (event.key !== "Escape" || event.isComposing || !box.closest || !box.closest("#search")) return;
  if (!box.value) return;
  event.preventDefault();
  box.value = "";
  box.dispatchEvent(new Event("input", { bubbles: true }));
}, true);
rows.addEventListener("focusin", (event) => {
  if (event.target.dataset.id) focused = event.target.dataset.id;
});
document.addEventListener("scroll", () => close(false), true);
document.addEventListener("pointerdown", (event) => {
  if (menu && !menu.row.contains(event.target)) close(false);
});
document.addEventListener("strata:open", ({ detail: { id } }) => {
  trigger("open", { id, message: "" });
});
watch("value", draw);
draw();
