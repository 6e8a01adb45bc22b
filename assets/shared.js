// One connection for all tabs of this browser. A browser opens at most six connections to a server,
// and each tab needs two that stay open: Gradio's heartbeat, and one for a running answer or event.
// One connection, shared by all tabs, carries them (app/web/shared.py).
//
// This file is used on both sides. In a page it replaces `fetch` for these streams only. In the
// shared worker it holds the connection. If a browser has no shared workers, or the connection
// cannot be made, the page opens each stream directly.
//
// A page posts { number, path } to open a stream, { number } to close it, and {} when it closes.
// The worker posts { number, kind, value }: "begin" with a status, "part" with a text, "end",
// "broken" if the connection was lost, and "direct" if the page must open the stream itself.
const STREAMS = /^\/(?:stream\/|gradio_api\/(?:queue\/data$|heartbeat\/))/;
const JOIN = "/gradio_api/queue/join";
const QUEUE = /^\/gradio_api\/queue\/data\?/;
const COMPLETED = /^data: ?\{"msg":"process_completed","event_id":"([^"]+)"/;
const CLOSE = /^data: ?\{"msg":"close_stream"/;
const PATIENCE_MS = 3000;
const HELD_MS = 60000;

// The events of a stream, as texts.
async function* events(reader) {
  let rest = "";
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    rest += read.value;
    for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
      yield rest.slice(0, end + 2);
    }
  }
  if (rest) yield rest;
}

function share() {
  const direct = window.fetch.bind(window);
  const encoder = new TextEncoder();
  const worker = window.SharedWorker && new SharedWorker(document.currentScript.src);
  const open = new Map(); // the handlers of each stream, by kind of message
  const asked = new Set(); // events in the queue that have not ended
  const ended = new Set(); // events that ended before the page knew that they were accepted
  let joining = 0; // requests for an event that the server has not answered yet
  let closed = null; // resolved once Gradio's client knows that the queue's stream was closed
  let usable = Boolean(worker);
  let last = 0;

  // The server closes the queue's stream after the last event. Gradio's client opens a new stream
  // for its next event only if it knows this when the event was accepted. If it learned this later,
  // it would wait for the event on a closed stream. So a stream that closes while an event is being
  // requested is opened again without the client's knowledge. If a stream closed before, the answer
  // to the request is held back until the client knows.
  async function join(input, init) {
    joining += 1;
    try {
      const answer = await direct(input, init);
      if (answer.ok) {
        const { event_id: event } = await answer.clone().json();
        if (!ended.delete(event)) asked.add(event);
      }
      await closed;
      return answer;
    } finally {
      joining -= 1;
    }
  }

  function closes(text) {
    const [, event] = COMPLETED.exec(text) || [];
    if (event && !asked.delete(event)) ended.add(event);
    return CLOSE.test(text);
  }

  function carried(request, path) {
    return new Promise((resolve, reject) => {
      let number = 0;
      let body = null;
      let reader = null; // of a stream that the page has opened directly
      const begin = () => {
        number = ++last;
        if (!usable) return kinds.direct();
        open.set(number, kinds);
        worker.port.postMessage({ number, path });
      };
      const fail = (error) => (body ? body.error(error) : reject(error));
      const leave = () => {
        if (open.delete(number)) worker.port.postMessage({ number });
        else if (reader) reader.cancel().catch(() => {});
      };
      const kinds = {
        direct: async () => {
          const mine = number;
          try {
            const answer = await direct(request);
            reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
            kinds.begin(answer.status);
            for await (const text of events(reader)) {
              kinds.part(text);
              if (number !== mine) return; // opened again
            }
            kinds.end();
          } catch (error) {
            if (number === mine) fail(error);
          }
        },
        begin: (status) => {
          if (body) return; // opened again
          const stream = new ReadableStream({
            start: (controller) => { body = controller; },
            cancel: leave,
          });
          const headers = { "content-type": "text/event-stream" };
          resolve(new Response(stream, { status, headers }));
        },
        part: (text) => {
          if (QUEUE.test(path) && closes(text)) {
            if (joining || asked.size) {
              open.delete(number);
              return begin();
            }
            // The client aborts its request when it has read this.
            closed = new Promise((known) => request.signal.addEventListener("abort", known));
          }
          body.enqueue(encoder.encode(text));
        },
        end: () => body.close(),
        broken: () => fail(new TypeError("The connection was lost.")),
        lost: () => (body ? kinds.broken() : kinds.direct()),
      };
      request.signal.addEventListener("abort", () => {
        if (!open.has(number)) return;
        leave();
        fail(request.signal.reason);
      });
      begin();
    });
  }

  window.fetch = (input, init) => {
    const url = new URL(input.url || input, location.href);
    if (url.origin !== location.origin) return direct(input, init);
    if (url.pathname === JOIN) return join(input, init);
    if (!STREAMS.test(url.pathname)) return direct(input, init);
    return carried(new Request(input, init), url.pathname + url.search);
  };
  if (!worker) return;
  worker.port.onmessage = ({ data: { number, kind, value } }) => {
    const stream = open.get(number);
    if (!stream) return;
    if (kind !== "begin" && kind !== "part") open.delete(number);
    stream[kind](value);
  };
  worker.onerror = () => {
    usable = false;
    for (const stream of open.values()) stream.lost();
    open.clear();
  };
  window.addEventListener("pagehide", () => worker.port.postMessage({}));
  // A page that comes back from the browser's memory has lost its streams.
  window.addEventListener("pageshow", (event) => event.persisted && location.reload());
}

function hold() {
  const streams = new Map(); // { port, theirs, posted, begun, asked }, by our numbers
  let last = 0;
  let source = null;
  let name = null; // the name of the connection, once it is open
  let heldUntil = 0; // until then no connection is tried, because a proxy holds its data back
  let waiting = [];

  const tell = ({ port, theirs }, kind, value) => port.postMessage({ number: theirs, kind, value });
  const settle = (there) => waiting.splice(0).forEach((then) => then(there));

  function lose() {
    name = null;
    for (const [number, stream] of streams) {
      if (!stream.posted) continue;
      streams.delete(number);
      tell(stream, "broken"); // Parts of the stream may be lost with the connection.
    }
    settle(false);
  }

  // A promise of whether there is a connection.
  function connected() {
    if (name) return Promise.resolve(true);
    if (Date.now() < heldUntil) return Promise.resolve(false);
    if (!source) connect();
    return new Promise((then) => waiting.push(then));
  }

  function connect() {
    const mine = source = new EventSource("/shared");
    const late = setTimeout(() => {
      if (source !== mine || name) return;
      heldUntil = Date.now() + HELD_MS;
      mine.close();
      source = null;
      settle(false);
    }, PATIENCE_MS);
    mine.onmessage = ({ data }) => {
      const said = JSON.parse(data);
      if (typeof said === "string") {
        clearTimeout(late);
        name = said;
        settle(true);
      } else hear(...said);
    };
    mine.onerror = () => {
      if (mine.readyState === EventSource.CLOSED && source === mine) source = null;
      lose();
    };
  }

  function hear(number, value) {
    const stream = streams.get(number);
    if (!stream) return;
    if (value === null) {
      streams.delete(number);
      tell(stream, "end");
    } else if (stream.begun) tell(stream, "part", value);
    else {
      stream.begun = true;
      tell(stream, "begin", value);
    }
  }

  function ask(body) {
    return fetch("/shared/" + name, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
    });
  }

  async function open(number, path) {
    let taken = false;
    let kind = "direct";
    try {
      if (await connected() && streams.has(number)) {
        streams.get(number).posted = true;
        taken = (await ask({ number, path })).ok;
      }
    } catch {
      kind = "broken";
    }
    const stream = streams.get(number);
    if (taken || !stream || stream.begun) return;
    streams.delete(number);
    tell(stream, kind);
  }

  // A stream is closed only after the request that opens it was answered.
  async function close(number) {
    const { asked } = streams.get(number);
    streams.delete(number);
    await asked;
    if (name) ask({ number }).catch(() => {});
  }

  self.onconnect = ({ ports: [port] }) => {
    const leave = (theirs) => {
      for (const [number, stream] of streams) {
        const meant = theirs === undefined || stream.theirs === theirs;
        if (stream.port === port && meant) close(number);
      }
    };
    port.onmessage = ({ data: { number: theirs, path } }) => {
      if (!path) return leave(theirs);
      const number = ++last;
      const stream = { port, theirs, posted: false, begun: false, asked: null };
      streams.set(number, stream);
      stream.asked = open(number, path);
    };
    // The tab crashed. Browsers without this event keep its streams until the last tab closes.
    port.onclose = () => leave();
  };
}

if (self.SharedWorkerGlobalScope) hold();
else share();
