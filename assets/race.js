// The race: two recordings side by side, each at the pace at which it was recorded. Text becomes
// text nodes. app/web/tabs/welcome.py describes the value.
const race = element.querySelector(".race");
const watchIt = race.querySelector(".watch");
const paceIt = race.querySelector(".pace");
const about = race.querySelector(".about");
const stopIt = race.querySelector(".stop");
const line = race.querySelector(".line");
const lanes = race.querySelector(".lanes");
const prompt = race.querySelector(".prompt");
const outcome = race.querySelector(".outcome");
const tracks = [...race.querySelectorAll("article")].map((box) => ({
  box,
  name: box.querySelector("h3 span"),
  clock: box.querySelector("output"),
  bar: box.querySelector(".bar i"),
  text: box.querySelector(".text"),
}));
const calm = matchMedia("(prefers-reduced-motion: reduce)");
let frame = 0;
let running = false;
let stopped = false;
let atPace = false; // Whether the last race was one of the padded model.
let anyway = false; // Whether the page has shown that the loaded model gains nothing.

function busy(now) {
  running = now;
  stopIt.hidden = !now;
  watchIt.hidden = now;
  paceIt.hidden = about.hidden = now || !props.pace;
}

about.textContent = props.pace;
busy(false);

function take(value) {
  if (!value || !value.state || (stopped && value.state !== "idle")) return;
  if (value.state === "over") begin(value);
  else if (value.state === "none") none(value);
  else if (value.state === "idle") idle(stopped ? "Stopped." : "");
  else {
    busy(true);
    const count = value.tokens ? " … " + value.tokens + " tokens" : " …";
    line.textContent = value.state === "waiting" ? "Waiting for the model …"
      : value.state === "making" ? value.text
      : value.state === "plain" ? "Recording plain decoding" + count
        : "Recording with guessing" + count;
  }
}

function idle(text) {
  cancelAnimationFrame(frame);
  busy(false);
  line.textContent = text;
}

// There is no gain to show with this model. Say why, and offer to show the race anyway.
function none(value) {
  idle(value.outcome);
  anyway = !atPace;
  watchIt.textContent = atPace ? "Watch a race" : "Race anyway";
}

function begin(value) {
  prompt.textContent = "“" + value.prompt + "”";
  lanes.hidden = false;
  outcome.textContent = "";
  value.lanes.forEach((lane, i) => {
    const track = tracks[i];
    track.name.textContent = lane.name;
    track.text.textContent = "";
    track.next = 0;
    track.shown = 0;
    track.bar.style.width = "0";
  });
  line.textContent = "At the pace at which it was recorded";
  lanes.scrollIntoView({ block: "nearest" });
  const start = performance.now();
  const play = () => {
    const now = calm.matches ? Infinity : (performance.now() - start) / 1000;
    const over = value.lanes.map((lane, i) => advance(lane, tracks[i], now));
    if (over.every(Boolean)) {
      outcome.textContent = value.outcome;
      anyway = false;
      watchIt.textContent = "Watch another race";
      idle("");
      outcome.scrollIntoView({ block: "nearest" });
    } else {
      frame = requestAnimationFrame(play);
    }
  };
  play();
}

// Draw the words of a lane up to that time. Returns whether they are all.
function advance(lane, track, now) {
  while (track.next < lane.steps.length && lane.steps[track.next][0] <= 1000 * now) {
    const [, texts, sources] = lane.steps[track.next];
    texts.forEach((text, i) => track.text.append(word(text, sources[i])));
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

function ask(wanted) {
  if (running) return;
  busy(true);
  stopped = false;
  atPace = wanted.padded;
  line.textContent = "Recording …";
  lanes.hidden = true;
  trigger("watch", wanted);
}

watchIt.onclick = () => ask({ padded: false, anyway });
paceIt.onclick = () => ask({ padded: true, anyway: false });
stopIt.onclick = () => {
  stopped = true;
  trigger("end", {});
  idle("Stopped.");
};
watch("value", () => take(props.value));
