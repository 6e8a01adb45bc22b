// The answer under way. What is new is drawn once a frame, a few times a second, and nothing of the
// layout is read for it. Where drawing takes long, it is done less often: it may take a tenth of
// the time.
//
// `trigger` asks the server: "over" for what an answer left behind, "fallback" where the stream
// does not come through: events then come by the queue, in `value.events`.
const SHOWN_MS = 120;
const HIDDEN_MS = 500;
const LEGEND_MS = 500;
const PATIENCE_MS = 3000;
const SHARE = 10;
let waiting = false;
let drawnAt = -HIDDEN_MS;
let tookMs = 0;
let legendAt = -LEGEND_MS;
let sentAt = null;

function follow(stream) {
  if (live && (!stream || live.token !== stream.token)) leave();
  if (!stream) return;
  if (!live) {
    live = {
      token: stream.token, run: newRun(), turn: null, source: null, sources: [], next: 0,
      over: false, late: 0, seen: false,
    };
    connect(live);
  }
  live.turn = null;
  schedule();
}

function leave() {
  clearTimeout(live.late);
  if (live.source) live.source.close();
  live = null;
}

function connect(mine) {
  const source = new EventSource("/stream/" + mine.token + "?from=" + mine.run.texts.length);
  const told = (kind) => (event) => {
    clearTimeout(mine.late);
    hear(mine, kind, JSON.parse(event.data), Number(event.lastEventId));
  };
  mine.source = source;
  for (const kind of ["sources", "figures", "waiting", "end"]) {
    source.addEventListener(kind, told(kind));
  }
  source.onmessage = told("");
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) giveUp(mine);
    else expectNews(mine);
  };
  expectNews(mine);
}

function expectNews(mine) {
  clearTimeout(mine.late);
  mine.late = setTimeout(() => giveUp(mine), PATIENCE_MS);
}

// The stream does not come through: the queue does, if anything does.
function giveUp(mine) {
  if (mine !== live || mine.over) return;
  clearTimeout(mine.late);
  mine.source.close();
  mine.next = 0;
  trigger("fallback", { token: mine.token, drawn: mine.run.texts.length });
}

// One event, whichever way it came; behind it `at` tokens have been told.
function hear(mine, kind, data, at) {
  if (mine !== live || mine.over) return;
  if (kind === "") {
    const count = data.reduce((sum, group) => sum + group[3].length, 0);
    if (take(mine.run, data, at - count, mine.sources)) schedule();
    else giveUp(mine);
  } else if (kind === "sources") {
    mine.sources = data.sources;
    mine.thinking = mine.thinking || data.thinking;
    learn(data.names);
  } else if (kind === "figures") {
    document.dispatchEvent(new CustomEvent("strata:figures", { detail: data }));
  } else if (kind === "waiting") {
    page.line = data;
    trigger("waiting", {});
  } else if (kind === "end") {
    mine.over = true;
    mine.source.close();
    frame();
    drawLegend();
    trigger("over", { token: mine.token, drawn: mine.run.texts.length });
  }
}

function schedule() {
  if (waiting) return;
  waiting = true;
  const every = Math.max(document.hidden ? HIDDEN_MS : SHOWN_MS, SHARE * tookMs);
  const next = () => (document.hidden ? frame() : requestAnimationFrame(frame));
  setTimeout(next, Math.max(0, drawnAt + every - performance.now()));
}

function frame() {
  waiting = false;
  drawnAt = performance.now();
  if (!live || !live.run.texts.length) return;
  if (!live.turn) {
    live.turn = begin("live:" + live.token, "assistant", live.run);
    grows(live.turn, true);
    tell(live.turn, { thinking: live.thinking });
  }
  show(live.turn);
  dropFormer();
  stick();
  if (drawnAt >= legendAt + LEGEND_MS) {
    legendAt = drawnAt;
    drawLegend();
  }
  tookMs = performance.now() - drawnAt;
  if (!live.seen) {
    live.seen = true;
    requestAnimationFrame(tellFirst);
  }
}

// From the click that sent the message to the frame behind the one that drew its first token.
function tellFirst() {
  if (sentAt === null) return;
  const seconds = (performance.now() - sentAt) / 1000;
  sentAt = null;
  document.dispatchEvent(new CustomEvent("strata:first", { detail: { seconds } }));
}

// What a page's own events read: the line that says who comes first.
const page = { line: "" };
window.strata = page;
const sends = "[data-act=again], [data-act=on]";
document.addEventListener("strata:say", () => { sentAt = performance.now(); });
document.addEventListener("pointerdown", (event) => {
  if (event.target.closest(sends)) sentAt = performance.now();
}, true);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey) return;
  if (event.target.closest(sends)) sentAt = performance.now();
}, true);

// Events that came by the queue: each of them in one update at least.
function hearAll({ token, events }) {
  if (!live || live.token !== token) return;
  for (const [number, kind, data, at] of JSON.parse(events)) {
    if (live && number === live.next) {
      live.next += 1;
      hear(live, kind, data, at);
    }
  }
}
