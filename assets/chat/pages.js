// Several pages can show the same conversation or list of conversations, and all stay up to date.
// Each page knows the `revision`, which grows with every change. A page that changed something
// notifies the other pages of its browser. Pages of other browsers ask the server every few seconds
// while they are visible. An outdated page loads the changes as soon as it is `free`.
const ASK_MS = 4000;

// Returns a function to call with each { token, revision } that the page receives, or with nothing.
function watchPages(look, free = () => true) {
  const channel = "BroadcastChannel" in window ? new BroadcastChannel("strata") : null;
  let watched = null;
  let timer = 0;

  function behind(token, revision) {
    if (!watched || token !== watched.token || revision <= watched.revision) return;
    watched.revision = revision; // So each revision is requested once.
    if (free()) look();
  }

  async function askAgain() {
    const { token } = watched;
    if (!document.hidden && free()) {
      try {
        const answer = await fetch("/revision/" + token);
        if (answer.ok) behind(token, Number(await answer.text()));
      } catch {
        // The server cannot be reached; Gradio shows that.
      }
    }
    if (watched && watched.token === token) {
      clearTimeout(timer);
      timer = setTimeout(askAgain, ASK_MS);
    }
  }

  if (channel) channel.onmessage = ({ data }) => behind(data.token, data.revision);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && watched) askAgain();
  });
  return (seen) => {
    const news = seen
      && (!watched || watched.token !== seen.token || watched.revision < seen.revision);
    watched = seen ? { ...seen } : null;
    if (news && channel) channel.postMessage(watched);
    clearTimeout(timer);
    if (watched) timer = setTimeout(askAgain, ASK_MS);
  };
}
