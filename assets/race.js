// The race: two recordings side by side, each at the pace at which it was recorded. Text becomes
// text nodes. app/web/tabs/race.py says what a value holds.
const race = element.querySelector(".race");
const watchIt = race.querySelector(".watch");
const stopIt = race.querySelector(".stop");
const line = race.querySelector(".line");
const lanes = race.querySelector(".lanes");
const asked = race.querySelector(".asked");
const outcome = race.querySelector(".told");
const tracks = [...race.querySelectorAll("article")].map((box) => ({
  box,
  name: box.querySelector("h3 span"),
  clock: box.querySelector("output"),
  bar: box.querySelector(".bar i"),
  words: box.querySelector(".words"),
}));
const calm = matchMedia("(prefers-reduced-motion: reduce)");
let frame = 0;
let running = false;
let stopped = false;

function busy(now) {
  running = now;
  stopIt.hidden = !now;
  watchIt.hidden = now;
}

function take(value) {
  if (!value || !value.state || (stopped && value.state !== "idle")) return;
  if (value.state === "over") begin(value);
  else if (value.state === "idle") idle(stopped ? "Stopped." : "");
  else {
    busy(true);
    const count = value.tokens ? " … " + value.tokens + " tokens" : " …";
    line.textContent = value.state === "waiting" ? "Waiting for the model …"
      : value.state === "plain" ? "Recording plain decoding" + count
        : "Recording with guessing" + count;
  }
}

function idle(words) {
  cancelAnimationFrame(frame);
  busy(false);
  line.textContent = words;
}

function begin(value) {
  asked.textContent = "“" + value.asked + "”";
  lanes.hidden = false;
  outcome.textContent = "";
  value.lanes.forEach((lane, i) => {
    const track = tracks[i];
    track.name.textContent = lane.name;
    track.words.textContent = "";
    track.next = 0;
    track.shown = 0;
    track.bar.style.width = "0";
  });
  line.textContent = "At the pace at which it was recorded";
  const start = performance.now();
  const play = () => {
    const now = calm.matches ? Infinity : (performance.now() - start) / 1000;
    const over = value.lanes.map((lane, i) => advance(lane, tracks[i], now));
    if (over.every(Boolean)) {
      outcome.textContent = value.told;
      watchIt.textContent = "Watch another race";
      idle("");
    } else {
      frame = requestAnimationFrame(play);
    }
  };
  play();
}

// Draw what a lane has said by then; whether that is all.
function advance(lane, track, now) {
  while (track.next < lane.steps.length && lane.steps[track.next][0] <= 1000 * now) {
    const [, texts, sources] = lane.steps[track.next];
    texts.forEach((text, i) => track.words.append(word(text, sources[i])));
    track.shown += texts.length;
    track.next += 1;
  }
  const over = now >= lane.seconds;
  track.clock.textContent = Math.min(now, lane.seconds).toFixed(2) + " s";
  track.bar.style.width = (100 * track.shown) / Math.max(1, lane.tokens) + "%";
  track.box.classList.toggle("over", over);
  return over;
}

function word(text, source) {
  const name = props.names[source] || { kind: "k-target" };
  const node = document.createElement("span");
  node.className = "tok " + name.kind;
  node.textContent = text;
  return node;
}

watchIt.onclick = () => {
  if (running) return;
  busy(true);
  stopped = false;
  line.textContent = "Recording …";
  lanes.hidden = true;
  trigger("watch", {});
};
stopIt.onclick = () => {
  stopped = true;
  trigger("end", {});
  idle("Stopped.");
};
watch("value", () => take(props.value));
