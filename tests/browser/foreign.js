// What a page may try on a server that is not its own. Returns the names of what succeeded: texts
// that could be read, connections that opened. What only writes leaves its traces with the server.
// An attempt is given up after `patience` milliseconds; `only` names those to make, if not all.
async ({ base, patience = 2000, only = null }) => {
  const got = [];
  const late = () => new Promise((done) => setTimeout(done, patience));
  let open = new AbortController();
  const tried = async (name, attempt) => {
    if (only && !only.includes(name)) return;
    try {
      if (await Promise.race([attempt(), late()])) got.push(name);
    } catch (error) { /* refused, as it should be */ }
    open.abort();
    open = new AbortController();
  };
  // What is refused loads as well: as a page that says so.
  const loaded = (frame, act) => new Promise((done) => {
    frame.onload = done;
    act();
  });
  const ask = (path, options) => fetch(base + path, { signal: open.signal, ...options });
  const read = async (path, options) => {
    const reply = await ask(path, options);
    return reply.ok && (await reply.text()).length > 0;
  };
  const json = { method: "POST", headers: { "Content-Type": "application/json" } };
  const api = "/gradio_api/";
  const paths = ["/", "/config", "/?deep_link=x", "/theme.css", "/robots.txt", "/manifest.json",
    ...["info", "info?all_endpoints=true", "app_id", "token", "startup-events", "queue/status",
      "deep_link?session_hash=x", "user", "openapi.json"].map((name) => api + name)];
  for (const path of paths) {
    await tried("read " + path, () => read(path));
    await tried("read as a user " + path, () => read(path, { credentials: "include" }));
  }
  await tried("conversations", async () => {
    const found = async () =>
      JSON.parse((await (await ask("/")).text()).match(/gradio_config = (.*?);<\/script>/s)[1]);
    const config = window.gradio_config || (await found());
    const kinds = new Map(config.components.map((part) => [part.id, part]));
    const empty = { state: null, textbox: "", browserstate: {}, radio: null };
    const list = config.components.find((part) => part.props.elem_id === "conversations").id;
    const event = config.dependencies.find(
      (one) => one.outputs.includes(list) && one.outputs.length === 1);
    const data = event.inputs.map((id) => empty[kinds.get(id).type]);
    // A session of its own: Gradio forgets what waits for one whose connection was given up before.
    const session = "foreign" + Math.random().toString(36).slice(2);
    const body = JSON.stringify({ data, fn_index: event.id, session_hash: session });
    await ask(api + "queue/join", { ...json, body });
    const said = await (await ask(api + "queue/data?session_hash=" + session)).text();
    return said.includes("process_completed");
  });
  for (const mode of ["cors", "no-cors"]) {
    for (const path of ["upload", "queue/join", "cancel", "reset", "component_server"]) {
      const form = new FormData();
      form.append("files", new File(["foreign words"], "foreign-" + mode + ".txt"));
      await tried("send " + path, () => read(api + path, { method: "POST", mode, body: form }));
      const body = JSON.stringify({ data: [], fn_index: 0, session_hash: "foreign" });
      await tried("send text " + path, () => read(api + path, { method: "POST", mode, body }));
    }
  }
  await tried("send a file by form", async () => {
    // A frame that gets its name later is not found by it: the form would open a window.
    const frame = document.createElement("iframe");
    frame.name = "target of " + base;
    document.body.appendChild(frame);
    const form = document.body.appendChild(document.createElement("form"));
    Object.assign(form, { method: "POST", enctype: "multipart/form-data" });
    form.target = frame.name;
    form.action = base + api + "upload";
    const input = form.appendChild(document.createElement("input"));
    Object.assign(input, { type: "file", name: "files" });
    const files = new DataTransfer();
    files.items.add(new File(["foreign words"], "foreign-form.txt"));
    input.files = files.files;
    await loaded(frame, () => form.submit());
    return (frame.contentDocument.body.innerText || "").includes("foreign-form");
  });
  for (const [tag, path] of [["script", "/static/js/none.js"], ["img", "/favicon.ico"],
    ["img", "/logout"], ["img", api + "heartbeat/foreign"]]) {
    await tried(tag + " " + path, () => new Promise((done, failed) => {
      const node = document.createElement(tag);
      Object.assign(node, { onload: () => done(true), onerror: failed, src: base + path });
      document.body.appendChild(node);
    }));
  }
  await tried("heartbeat", () => new Promise((done, failed) => {
    const events = new EventSource(base + api + "heartbeat/foreign");
    open.signal.onabort = () => events.close();
    Object.assign(events, { onmessage: () => done(true), onerror: failed });
  }));
  await tried("websocket", () => new Promise((done, failed) => {
    const socket = new WebSocket(base.replace("http", "ws") + "/queue/join");
    Object.assign(socket, { onopen: () => done(true), onerror: failed });
  }));
  await tried("frame", async () => {
    const frame = document.body.appendChild(document.createElement("iframe"));
    await loaded(frame, () => { frame.src = base + "/"; });
    return frame.contentDocument.documentElement.outerHTML.includes("gradio_config");
  });
  return got;
}
