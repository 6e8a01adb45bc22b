"""What a page costs: the program in a browser, compared with the same answers without a page.

Starts the program on a fresh data directory, opens its page in headless Chromium, and requests an
answer to each prompt twice, in rotated order: on the page, and through a session of this process
without a page. While the page streams, the processor times of its processes are counted, and until
it has settled also the bytes that reach it. A long conversation shows the costs of a long page,
some quiet seconds those of an idle page, and some visits those of opening a page that is in the
browser's cache. All processes share this machine, so run nothing else on it.
"""

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import psutil

from app.service.preferences import Preferences
from app.service.session import Session
from assets import ASSETS
from bench.harness import Add, Measurement, at_least, source_of
from bench.report import Record, now, table
from engine.compare import rotated
from engine.errors import SettingError
from engine.local import Local
from engine.machine import processor
from engine.methods import METHODS
from engine.remote import Remote
from engine.settings import Generation, Runtime, Sampling
from storage.conversations import Conversations
from storage.database import Database
from storage.statistics import open_table
from storage.traces import Traces

if TYPE_CHECKING:  # it may be missing
    from playwright.sync_api import Browser, BrowserContext, Page

OWNER = "local"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--mute-audio"]
PATIENCE_MS = 180_000
SETTLE_SECONDS, IDLE_SECONDS = 12.0, 10.0
AFTER_SECONDS = 1.5
"""Costs of an answer are counted until this long after its end, to include the redrawn list."""
SCRIPT = """delete window.SharedWorker;
window.long_tasks = [];
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) window.long_tasks.push(task.duration);
}).observe({ type: "longtask", buffered: true });
window.first_tokens = [];
document.addEventListener("strata:first", (event) => {
  window.first_tokens.push(event.detail.seconds);
});
const look = new MutationObserver(() => {
  const box = document.querySelector("#box textarea");
  if (!box || box.disabled) return;
  window.usable = performance.now();
  look.disconnect();
});
look.observe(document, { childList: true, subtree: true });"""
"""Runs in every page: it requests streams itself, so that their bytes can be counted, and notes
tasks above 50 ms, the seconds from Send to a first token, and when the composer accepts input."""
PAINTED = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
PROMPTS = (
    ("Write a story about a fox who learns to read, then tell it again in other words.", 40),
    ("Tell me everything about a garden through the four seasons.", 46),
)
"""Questions and seeds that the embedded model answers with 400 to 490 tokens."""
LONG, WRITTEN = "A long conversation", "Page {}"
"""Titles of the conversations that are opened."""


class Bar(NamedTuple):
    """A figure of a report, and its target: at least (or at most) `limit`, if there is one."""

    figure: str
    words: str
    limit: float | None = None
    least: bool = False
    shown: str = "{:.2f}"

    def row(self, value: float) -> tuple[str, str, str, str]:
        shown = self.shown.format(value)
        if self.limit is None:
            return self.words, shown, "", ""
        met = value >= self.limit if self.least else value <= self.limit
        target = f"at {'least' if self.least else 'most'} {self.shown.format(self.limit)}"
        return self.words, shown, target, "met" if met else "MISSED"


BARS = (
    Bar("speed_ratio", "engine speed with the page, over without one", 0.92, least=True),
    Bar("renderer_share", "renderer while streaming, of a core", 0.15),
    Bar("server_share", "server while streaming, of a core", 0.05),
    Bar("first_seconds", "seconds from Send to the first token drawn", 0.12, shown="{:.3f}"),
    Bar("bytes_per_token", "bytes received per token", 60, shown="{:,.0f}"),
    Bar("long_tasks", "tasks above 50 ms at length", 0, shown="{:.0f}"),
    Bar("idle_share", "server and engine at rest, of a core", 0.01, shown="{:.4f}"),
    Bar("start_seconds", "seconds from the command to a page that is drawn", 3),
    Bar("paint_seconds", "seconds to the first paint of a page seen before", 0.5),
    Bar("usable_seconds", "seconds until its composer can be used", 1.5),
    Bar("visit_bytes", "bytes received for it", 400_000, shown="{:,.0f}"),
    Bar("page_tokens_per_second", "tokens per second with the page", shown="{:.0f}"),
    Bar("alone_tokens_per_second", "tokens per second without", shown="{:.0f}"),
    Bar("wall_ratio", "whole answers, from the key to the last word, over without"),
    Bar("answer_seconds", "seconds of an answer"),
    Bar("renderer_seconds", "seconds of the renderer for it"),
    Bar("server_seconds", "seconds of the server for it"),
    Bar("stream_bytes_per_token", "bytes of its tokens, each", shown="{:,.0f}"),
    Bar("bytes_around", "bytes other than tokens", shown="{:,.0f}"),
    Bar("longest_task_ms", "the longest task at length, ms", shown="{:.0f}"),
)


class Work(NamedTuple):
    renderer: float
    server: float
    engine: float

    def since(self, before: "Work") -> "Work":
        return Work(*(now - then for now, then in zip(self, before, strict=True)))


class Wire:
    """The bytes of responses, headers included, as the browser's events report them."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.bytes = Counter[str]()

    def requested(self, event: Record) -> None:
        self.addresses[event["requestId"]] = event["request"]["url"]

    def response_began(self, event: Record) -> None:
        self.bytes[event["requestId"]] = int(event["response"]["encodedDataLength"])

    def data_received(self, event: Record) -> None:
        self.bytes[event["requestId"]] += int(event["encodedDataLength"])

    def finished(self, event: Record) -> None:
        """The whole response arrived: 0 bytes if it was in the browser's cache."""
        self.bytes[event["requestId"]] = int(event["encodedDataLength"])

    def received(self, stream: bool) -> int:
        found = self.bytes.items()
        return sum(n for name, n in found if ("/stream/" in self.addresses.get(name, "")) is stream)


@contextmanager
def listening(page: "Page") -> Iterator[Wire]:
    wire, session = Wire(), page.context.new_cdp_session(page)
    session.on("Network.requestWillBeSent", wire.requested)
    session.on("Network.responseReceived", wire.response_began)
    session.on("Network.dataReceived", wire.data_received)
    session.on("Network.loadingFinished", wire.finished)
    session.send("Network.enable")
    yield wire
    session.detach()


class PageCost(Measurement):
    """What a page costs: the program in a browser, against the same answers with no page."""

    def add_options(self, add: Add) -> None:
        add("--model", default="embedded", help="a short name, a folder or *.gguf")
        add("--threads", type=int, default=1, help="of the engine")
        count = at_least(1)
        add("--tokens", type=count, default=512, help="the longest answer")
        add("--repeats", type=count, default=2, help="prompts that are answered both ways")
        add("--starts", type=count, default=3, help="starts that are timed")
        add("--length", type=count, default=4000, help="tokens of the long conversation")

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        record = {
            "date": now(),
            "model": options.model,
            "threads": options.threads,
            "machine": processor(),
            "most_tokens": options.tokens,
            "length": options.length,
        }
        source, runtime = source_of(options.model), Runtime(threads=options.threads)
        browser = stack.enter_context(chromium())
        place = stack.enter_context(TemporaryDirectory())
        folders = [Path(place, f"start-{number}") for number in range(options.starts)]
        record |= medians([started(browser, options, folder) for folder in folders])
        program = stack.enter_context(running(source, options.threads, Path(place, "page")))
        database = stack.enter_context(Database(Path(place, "page", "strata.db")))
        statistics = [ASSETS / "statistics"]
        session = stack.enter_context(loaded(Path(place, "alone.db"), source, runtime, statistics))
        return record | measured(browser, program, database, session, options)

    def show(self, record: Record) -> None:
        print(
            f"{record['model']}, {record['threads']} threads, {record['machine']}, "
            f"{record['date'][:10]}; answers of {', '.join(map(str, record['tokens']))} tokens\n"
        )
        rows = (bar.row(record[bar.figure]) for bar in BARS)
        table(("figure", "measured", "wanted", ""), rows)


@contextmanager
def loaded(
    file: Path, source: str, runtime: Runtime, folders: Sequence[Path] = ()
) -> Iterator[Session]:
    """A session with its own database and a loaded model in a separate process."""
    engine = Remote(partial(Local, partial(open_table, [ASSETS / "statistics"])))
    with closing(engine), Database(file) as database:
        session = Session(engine, database, folders=folders)
        for _ in session.models.start(source, runtime):
            pass
        yield session


def medians(rows: Sequence[Mapping[str, float]]) -> Record:
    return {name: median(row[name] for row in rows) for name in rows[0]}


@contextmanager
def chromium() -> Iterator["Browser"]:
    """The browser of this system. Raises SettingError if a part of it is missing."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise SettingError(
            "Playwright is not installed, which drives the browser. Install what the tests need: "
            "make setup-dev."
        ) from error
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise SettingError("There is no Chromium on the PATH. Install the package chromium.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


class Program(NamedTuple):
    """The running program, the address of its page, and when its command was started."""

    process: psutil.Popen
    url: str
    began: float

    def taken(self) -> Work:
        engine = set(self.process.children(recursive=True))
        others = set(psutil.Process().children(recursive=True)) - engine
        pages = seconds_of(others, "--type=renderer")
        return Work(pages, seconds_of([self.process]), seconds_of(engine))


def seconds_of(processes: Iterable[psutil.Process], word: str = "") -> float:
    """The processor time of those processes that still run and have this word in their command."""
    seconds = 0.0
    for process in processes:
        with suppress(psutil.Error):
            if not word or word in process.cmdline():
                times = process.cpu_times()
                seconds += times.user + times.system
    return seconds


@contextmanager
def running(source: str, threads: int, folder: Path) -> Iterator[Program]:
    command = [sys.executable, "app.py", "--no-browser", "--port", "0", "--data-dir", str(folder)]
    command += ["--model", source, "--threads", str(threads)]
    began, pipe, silent = time.perf_counter(), subprocess.PIPE, subprocess.DEVNULL
    with psutil.Popen(command, cwd=ASSETS.parent, stdout=pipe, stderr=silent, text=True) as process:
        try:
            found = (re.search(r"ready at (http\S+)", line) for line in process.stdout)
            url = next((match[1] for match in found if match), None)
            if url is None:
                raise SettingError("The program ended before its page was there. Start it alone.")
            yield Program(process, url, began)
        finally:
            process.terminate()


def started(browser: "Browser", options: argparse.Namespace, folder: Path) -> Record:
    with running(source_of(options.model), options.threads, folder) as program:
        page = browser.new_page()
        page.goto(program.url)
        page.wait_for_selector("#box textarea", timeout=PATIENCE_MS)
        seconds = time.perf_counter() - program.began
        page.close()
    return {"start_seconds": seconds}


def wait_for_model(page: "Page") -> None:
    page.locator("#header .facts", has_text="context").wait_for(timeout=PATIENCE_MS)


def measured(
    browser: "Browser",
    program: Program,
    database: Database,
    session: Session,
    options: argparse.Namespace,
) -> Record:
    prompts = list(islice(cycle(PROMPTS), options.repeats))
    titles = [WRITTEN.format(number) for number in range(options.repeats)]
    store = Conversations(database, OWNER)
    for title, (_, seed) in zip(titles, prompts, strict=True):
        store.set_settings(store.create(title).id, drawn(options.tokens, seed).mapping())
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(SCRIPT)
    page = context.new_page()
    page.goto(program.url)
    wait_for_model(page)
    visits = [visit(context, program) for _ in range(options.starts)]
    answers = []
    for number, (title, (text, seed)) in enumerate(zip(titles, prompts, strict=True)):
        answer: Record = {}
        on_page = partial(stream, page, program, database, title, text)
        unseen = partial(alone, session, drawn(options.tokens, seed), text)
        for way in rotated([on_page, unseen], number):
            answer |= way()
        answers.append(answer | ratios(answer))
    lengthen(store, options.tokens, options.length)
    page.reload()
    wait_for_model(page)
    long = [stream(page, program, database, LONG, text) for text, _ in PROMPTS]
    time.sleep(SETTLE_SECONDS)
    before = program.taken()
    time.sleep(IDLE_SECONDS)
    rest = program.taken().since(before)
    context.close()
    return {
        **medians(answers),
        **medians(visits),
        "tokens": [answer["tokens"] for answer in answers],
        "long_tokens": max(answer["tokens"] for answer in long),
        "long_tasks": sum(answer["long_tasks"] for answer in long),
        "longest_task_ms": max(answer["longest_task_ms"] for answer in long),
        "idle_share": (rest.server + rest.engine) / IDLE_SECONDS,
    }


def drawn(tokens: int, seed: int) -> Preferences:
    generation = Generation(Sampling(0.8, min_p=0.05, seed=seed), tokens)
    return Preferences(generation, "hd", METHODS["hd"].drafting, fresh_seed=False)


def lengthen(store: Conversations, tokens: int, length: int) -> None:
    """Store a conversation of `length` tokens of answers, copied from the existing answers."""
    stored = [message for found in store.list() for message in store.messages(found.id)]
    answers = cycle([message for message in stored if message.role == "assistant"])
    long = store.create(LONG).id
    store.set_settings(long, drawn(tokens, 0).mapping())
    while length > 0:
        answer = next(answers)
        pieces = answer.pieces or ()
        length -= max(1, len(pieces))
        store.append(long, "user", "Go on.")
        store.append(long, "assistant", answer.content, pieces=pieces)


def stream(page: "Page", program: Program, database: Database, title: str, text: str) -> Record:
    """The costs of an answer on the page while it streams, and until the page has settled."""
    page.locator("#conversations .title", has_text=title).first.click()
    page.wait_for_timeout(3000)
    page.evaluate("() => { window.long_tasks = [] }")
    page.fill("#box textarea", text)
    with listening(page) as wire:
        before, began = program.taken(), time.perf_counter()
        page.press("#box textarea", "Enter")
        page.wait_for_selector("#stop", state="visible")
        page.wait_for_selector("#send", state="visible")
        seconds = time.perf_counter() - began
        streaming = program.taken().since(before)
        page.wait_for_timeout(1000 * AFTER_SECONDS)
        work = program.taken().since(before)
    tokens, speed = last_run(database)
    tasks = page.evaluate("() => window.long_tasks")
    streamed, around = wire.received(stream=True), wire.received(stream=False)
    return {
        "tokens": tokens,
        "page_tokens_per_second": speed,
        "answer_seconds": seconds,
        "renderer_share": streaming.renderer / seconds,
        "server_share": streaming.server / seconds,
        "renderer_seconds": work.renderer,
        "server_seconds": work.server,
        "first_seconds": page.evaluate("() => window.first_tokens.at(-1)"),
        "bytes_per_token": (streamed + around) / tokens,
        "stream_bytes_per_token": streamed / tokens,
        "bytes_around": around,
        "long_tasks": len(tasks),
        "longest_task_ms": max(tasks, default=0.0),
    }


def alone(session: Session, preferences: Preferences, text: str) -> Record:
    conversation = session.chat.say(OWNER, None, text)
    began = time.perf_counter()
    for _ in session.answering.answer(OWNER, conversation, preferences):
        pass
    seconds = time.perf_counter() - began
    return {
        "alone_tokens_per_second": last_run(session.database)[1],
        "alone_seconds": seconds,
    }


def ratios(answer: Record) -> Record:
    return {
        "speed_ratio": answer["page_tokens_per_second"] / answer["alone_tokens_per_second"],
        "wall_ratio": answer["alone_seconds"] / answer["answer_seconds"],
    }


def last_run(database: Database) -> tuple[int, float]:
    (run,) = Traces(database, OWNER).history(1)
    return run.emitted_tokens, run.emitted_tokens / run.decode_seconds


def visit(context: "BrowserContext", program: Program) -> Record:
    """The costs of opening a page that is in the browser's cache."""
    page = context.new_page()
    with listening(page) as wire:
        page.goto(program.url)
        wait_for_model(page)
        page.wait_for_timeout(1000 * AFTER_SECONDS)
    painted, usable = page.evaluate(PAINTED), page.evaluate("() => window.usable")
    page.close()
    return {
        "paint_seconds": painted / 1000,
        "usable_seconds": usable / 1000,
        "visit_bytes": wire.received(stream=False),
    }
