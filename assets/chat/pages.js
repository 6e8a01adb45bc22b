// Pages that show one conversation show the same. Each knows its `revision`, which grows with every
// change. A page that changed something tells the other pages of its browser; those of other
// browsers ask now and then, while somebody looks. A page that is behind looks again.
const ASK_MS = 4000;
const channel = "BroadcastChannel" in window ? new BroadcastChannel("strata") : null;
let watched = null; // { token, revision }
let asking = 0;

function watchPages(seen) {
  const news = seen && (!watched || watched.token !== seen.token || watched.revision < seen.revision);
  watched = seen || null;
  if (news && channel) channel.postMessage(watched);
  clearTimeout(asking);
  if (watched) asking = setTimeout(askAgain, ASK_MS);
}

function behind(token, revision) {
  if (!watched || token !== watched.token || revision <= watched.revision) return;
  watched.revision = revision; // Asked for once.
  if (!live || live.over) trigger("look", {});
}

async function askAgain() {
  const { token } = watched;
  if (!document.hidden && (!live || live.over)) {
    try {
      const answer = await fetch("/revision/" + token);
      if (answer.ok) behind(token, Number(await answer.text()));
    } catch {
      // The server is away; Gradio says so.
    }
  }
  if (watched && watched.token === token) {
    clearTimeout(asking);
    asking = setTimeout(askAgain, ASK_MS);
  }
}

if (channel) channel.onmessage = ({ data }) => behind(data.token, data.revision);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && watched) askAgain();
});
