// The growing answer. New tokens are drawn a few times a second, without reading sizes or
// positions. If drawing takes long, it is done less often, so that it takes at most a tenth of the
// time.
//
// `trigger("over")` asks the server for the final state of an answer. The server replies with the
// conversation as it is, so a page that the stream does not reach shows the answer once it is over.
const SHOWN_MS = 120;
const HIDDEN_MS = 500;
const LEGEND_MS = 500;
const AGAIN_MS = 500;
const LATER_MS = 3000;
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
      token: stream.token, run: newRun(), turn: null, reading: null, sources: [],
      over: false, seen: false,
    };
    connect(live);
  }
  live.turn = null;
  schedule();
}

function leave() {
  letGo(live);
  live = null;
}

function letGo(mine) {
  if (mine.reading) mine.reading.abort();
  mine.reading = null;
}

// A hidden tab closes the stream, and fetches the rest when it is visible again. If messages wait
// for the end of the answer, the tab keeps the stream, because it must then send the next message.
function rests() {
  return document.hidden && !document.querySelector(".waits > *");
}

document.addEventListener("visibilitychange", () => {
  if (!live || live.over) return;
  if (rests()) letGo(live);
  else if (!live.reading) connect(live);
});

// After a lost connection, the stream continues after the tokens that have arrived.
async function connect(mine) {
  mine.reading = null;
  if (rests()) return;
  const reading = mine.reading = new AbortController();
  const { signal } = reading;
  const asking = setInterval(() => askForEnd(mine), LATER_MS);
  let arrives = false;
  const address = "/stream/" + mine.token + "?from=" + mine.run.texts.length;
  const answer = await fetch(address, { signal }).catch(() => null);
  if (answer && answer.ok) {
    await read(answer.body, (kind, data, at) => {
      if (mine.reading !== reading) return;
      clearInterval(asking);
      arrives = true;
      hear(mine, kind, data, at);
    });
  }
  clearInterval(asking);
  if (mine.reading !== reading) return;
  if (!arrives) askForEnd(mine);
  const again = () => mine.reading === reading && connect(mine);
  setTimeout(again, arrives ? AGAIN_MS : LATER_MS);
}

// Reads server-sent events until the stream ends or breaks off, and passes on the name and data of
// each, with the last id.
async function read(body, hearEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let id = 0;
  for (;;) {
    const { value, done } = await reader.read().catch(() => ({ done: true }));
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const found = { event: "", data: null };
      for (const line of event.split("\n")) {
        const at = line.indexOf(":");
        found[line.slice(0, at)] = line.slice(at + 1);
      }
      if (found.id) id = Number(found.id);
      if (found.data !== null) hearEvent(found.event, JSON.parse(found.data), id);
    }
  }
}

function askForEnd(mine) {
  trigger("over", { token: mine.token, drawn: mine.run.texts.length });
}

// Handle an event of the stream. `at` is the number of tokens sent, this event included.
function hear(mine, kind, data, at) {
  if (mine !== live || mine.over) return;
  if (kind === "") {
    const count = data.reduce((sum, group) => sum + group[3].length, 0);
    if (take(mine.run, data, at - count, mine.sources)) schedule();
    else mine.reading.abort(); // Events were lost: the next connection brings them.
  } else if (kind === "sources") {
    mine.sources = data.sources;
    mine.thought = data.thought || mine.thought;
    if (mine.turn) mine.turn.about.thought = mine.thought;
    learn(data.names);
  } else if (kind === "figures") {
    document.dispatchEvent(new CustomEvent("strata:figures", { detail: data }));
  } else if (kind === "waiting") {
    page.line = data;
    trigger("waiting", {});
  } else if (kind === "end") {
    mine.over = true;
    letGo(mine);
    frame();
    drawLegend();
    askForEnd(mine);
  }
}

function schedule() {
  if (waiting) return;
  waiting = true;
  const every = Math.max(document.hidden ? HIDDEN_MS : SHOWN_MS, SHARE * tookMs);
  const next = () => (document.hidden ? frame() : requestAnimationFrame(frame));
  const early = drawnAt + every - performance.now();
  if (early > 0) setTimeout(next, early);
  else next();
}

function frame() {
  waiting = false;
  if (!live || !live.run.texts.length) return;
  drawnAt = performance.now();
  if (!live.turn) {
    live.turn = begin("live:" + live.token, "assistant", live.run);
    grows(live.turn, true);
    tell(live.turn, { thought: live.thought });
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

// Report the time from the click that sent the message to the frame after its first token was
// drawn.
function tellFirst() {
  if (sentAt === null) return;
  const seconds = (performance.now() - sentAt) / 1000;
  sentAt = null;
  document.dispatchEvent(new CustomEvent("strata:first", { detail: { seconds } }));
}

// Values that events of the page read: the line that says how many requests come first.
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

// What a value brings beside its turns: the answer that grows, changes of other pages, the question
// about a call, and an Undo.
const watchTurns = watchPages(() => trigger("look", {}), () => !live || live.over);
extra = (value) => {
  follow(value.stream);
  watchTurns(value.watch);
  ask(value.asking);
  if ("undo" in value) offer(value.undo);
};
