"""What a page costs: the program in a browser, against the same answers with no page.

Starts the program on a fresh data directory, opens its page in headless Chromium, and asks for an
answer to each prompt twice, in rotated order: on the page, and in a process of its own where nobody
looks on. Both take the tokens per second of decoding from the run that was stored. While the page
streams, the times of its processes are counted, and until it has settled the bytes that reach it,
headers included. A long conversation shows what a page does at length, some quiet seconds what it
does at rest, and some visits what a page takes that the browser has seen before. Each figure stands
beside its bar. An answer costs something at its ends as well, which is most of a short or a fast
one, so costs are told per answer, too. All processes share this machine: leave it to them alone.
"""

import argparse
import multiprocessing
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from app.service.preferences import Preferences
from app.service.session import Session
from assets import ASSETS
from bench.options import (
    Record,
    add_save_argument,
    check_save,
    print_record,
    source_of,
)
from engine.errors import SettingError
from engine.local import Local
from engine.methods import METHODS
from engine.remote import Remote
from engine.settings import Generation, Runtime, Sampling
from storage.conversations import Conversations
from storage.database import Database
from storage.statistics import open_table
from storage.traces import Trace, Traces

if TYPE_CHECKING:  # it may be missing
    from playwright.sync_api import Browser, BrowserContext, Page

ROOT = ASSETS.parent
OWNER = "local"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--mute-audio"]
PATIENCE_MS = 180_000
SETTLE_SECONDS, IDLE_SECONDS = 12.0, 10.0
AFTER_SECONDS = 1.5
"""What an answer costs is counted for so long behind its end: the list is drawn anew then."""
LONG_TASKS = """window.long_tasks = [];
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) window.long_tasks.push(task.duration);
}).observe({ type: "longtask", buffered: true });"""
"""The browser reports every task above 50 ms."""
USABLE = """window.usable = 0;
const look = new MutationObserver(() => {
  const box = document.querySelector("#box textarea");
  if (!box || box.disabled) return;
  window.usable = performance.now();
  look.disconnect();
});
look.observe(document, { childList: true, subtree: true });"""
"""Notes when the composer takes words."""
PAINTED = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
PROMPTS = (
    ("Write a story about a fox who learns to read, then tell it again in other words.", 40),
    ("Tell me everything about a garden through the four seasons.", 46),
    (
        "Tell a long story about a lost key and the girl who looks for it in every room of an old "
        "house.",
        42,
    ),
    (
        "Write the diary of a traveller who crosses the mountains in ten days, one entry for each "
        "day.",
        30,
    ),
)
"""Questions with seeds to which the embedded model says 400 to 490 tokens."""
MOST_LONG = 3
"""Answers that are asked for in the long conversation."""
LONG, WRITTEN = "A long conversation", "Page {}"
"""Titles of the conversations that are opened."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure may be: at least or at most this much."""

    words: str
    wanted: float
    least: bool = False
    shown: str = "{:.2f}"

    def line(self, value: float) -> str:
        """One row of the table."""
        limit = ("at least " if self.least else "at most ") + self.shown.format(self.wanted)
        verdict = "met" if self.met(value) else "MISSED"
        return f"  {self.words:<56}{self.shown.format(value):>10}   {limit:<18}{verdict}"

    def met(self, value: float) -> bool:
        """Whether the figure passes."""
        return value >= self.wanted if self.least else value <= self.wanted


BARS = {
    "speed_ratio": Bar("engine speed with the page, over without one", 0.92, least=True),
    "renderer_share": Bar("renderer while streaming, of a core", 0.15),
    "server_share": Bar("server while streaming, of a core", 0.05),
    "bytes_per_token": Bar("bytes received per token", 60, shown="{:,.0f}"),
    "long_tasks": Bar("tasks above 50 ms at length", 0, shown="{:.0f}"),
    "idle_share": Bar("server and engine at rest, of a core", 0.01, shown="{:.4f}"),
    "start_seconds": Bar("seconds from the command to a page that is drawn", 3),
    "paint_seconds": Bar("seconds to the first paint of a page seen before", 0.5),
    "usable_seconds": Bar("seconds until its composer can be used", 1.5),
    "visit_bytes": Bar("bytes received for it", 400_000, shown="{:,.0f}"),
}


@dataclass(slots=True)
class Shares:
    """Processor time of the program and its page, in seconds, or in cores over a time."""

    renderer: float
    server: float
    engine: float

    def since(self, before: "Shares", seconds: float) -> "Shares":
        """What was taken of a core since then."""
        return Shares(
            *(
                (getattr(self, name) - getattr(before, name)) / seconds
                for name in ("renderer", "server", "engine")
            )
        )


@dataclass(slots=True)
class Streamed:
    """One answer on the page."""

    tokens: int
    speed: float
    seconds: float
    shares: Shares
    work: Shares
    """Seconds of processor time, until the page has settled."""
    streamed: int
    """Bytes of the answer's own stream."""
    around: int
    """Bytes of all else: what is sent at its ends."""
    long_tasks: list[float] = field(default_factory=list)

    @property
    def received(self) -> int:
        """All bytes that came."""
        return self.streamed + self.around


@dataclass(frozen=True, slots=True)
class Visit:
    """A page that the browser has seen before, opened once more: seconds, and bytes received."""

    painted: float
    usable: float
    received: int


class Wire:
    """The bytes of responses, headers included, as the browser tells of them in its events."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.bytes = Counter[str]()

    def asked(self, event: Record) -> None:
        """A request began."""
        self.addresses[event["requestId"]] = event["request"]["url"]

    def begun(self, event: Record) -> None:
        """The headers of its response are there."""
        self.bytes[event["requestId"]] = int(event["response"]["encodedDataLength"])

    def more(self, event: Record) -> None:
        """More of it came."""
        self.bytes[event["requestId"]] += int(event["encodedDataLength"])

    def ended(self, event: Record) -> None:
        """All of it came; none, where it was in the browser's cache."""
        self.bytes[event["requestId"]] = int(event["encodedDataLength"])

    def received(self, stream: bool) -> int:
        """The bytes of streams of answers, or of all other responses."""
        found = self.bytes.items()
        return sum(n for name, n in found if ("/stream/" in self.addresses.get(name, "")) is stream)


@contextmanager
def listening(page: "Page") -> Iterator[Wire]:
    """What reaches a page."""
    wire, session = Wire(), page.context.new_cdp_session(page)
    session.on("Network.requestWillBeSent", wire.asked)
    session.on("Network.responseReceived", wire.begun)
    session.on("Network.dataReceived", wire.more)
    session.on("Network.loadingFinished", wire.ended)
    session.send("Network.enable")
    yield wire
    session.detach()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench page`."""
    add = parser.add_argument
    add("--model", default="embedded", help="a short name, a folder or *.gguf (default: embedded)")
    add("--threads", type=int, default=1, help="of the engine")
    add("--tokens", type=int, default=512, help="the longest answer")
    add("--repeats", type=int, default=4, help="prompts that are answered both ways")
    add("--starts", type=int, default=3, help="starts that are timed")
    add("--length", type=int, default=4000, help="tokens of the long conversation")
    add_save_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    if min(options.repeats, options.starts, options.tokens, options.length) < 1:
        raise SettingError("Give at least one repeat, start and token.")
    check_save(options.save)
    record = {
        "bench": "page",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": options.model,
        "threads": options.threads,
        "machine": platform.machine(),
        "most_tokens": options.tokens,
        "length": options.length,
    }
    with chromium() as browser, TemporaryDirectory() as place:
        record |= starts(browser, options, Path(place))
        with Program(options, Path(place) / "page") as program:
            record |= measured(browser, program, options, Path(place) / "alone")
    show(record)
    print_record(record, options.save)


@contextmanager
def chromium() -> Iterator["Browser"]:
    """The browser of this system. Raises SettingError where something of it is missing."""
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


class Program:
    """The running program, and what its processes take. `url` is where it is served."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "app.py", "--no-browser", "--port", "0"]
        command += ["--model", source_of(options.model), "--threads", str(options.threads)]
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [*command, "--data-dir", str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> "Program":
        assert self.process.stdout is not None
        said = (re.search(r"ready at (http\S+)", line) for line in self.process.stdout)
        try:
            self.url = next(found[1] for found in said if found)
        except StopIteration:
            raise SettingError(
                "The program ended before its page was there. Start it alone."
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def taken(self) -> Shares:
        """Seconds so far: of all pages of our browser, of the program, of its own children."""
        ours = psutil.Process()
        server = psutil.Process(self.process.pid)
        engine = set(server.children(recursive=True))
        others = set(ours.children(recursive=True)) - engine - {server}
        pages = [process for process in others if "--type=renderer" in words_of(process)]
        return Shares(*(sum(map(seconds_of, each)) for each in (pages, [server], engine)))


def words_of(process: psutil.Process) -> list[str]:
    """The command line of a process; nothing of one that has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def seconds_of(process: psutil.Process) -> float:
    """Processor time of a process; none of one that has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def starts(browser: "Browser", options: argparse.Namespace, place: Path) -> Record:
    """Medians over several starts: to the first reply, to a page that is drawn, to the model."""
    replies, drawn, loaded, work = [], [], [], []
    for number in range(options.starts):
        with Program(options, place / f"start-{number}") as program:
            reply(program.url)
            replies.append(time.perf_counter() - program.began)
            work.append(program.taken().server)
            page = browser.new_page()
            page.goto(program.url)
            page.wait_for_selector("#box textarea", timeout=PATIENCE_MS)
            drawn.append(time.perf_counter() - program.began)
            wait_for_model(page)
            loaded.append(time.perf_counter() - program.began)
            page.close()
    return {
        "reply_seconds": median(replies),
        "reply_processor_seconds": median(work),
        "start_seconds": median(drawn),
        "model_seconds": median(loaded),
    }


def reply(url: str) -> None:
    """Wait until the page is answered with."""
    while True:
        try:
            with urlopen(url, timeout=10) as found:
                found.read()
            return
        except (URLError, ConnectionError):
            time.sleep(0.02)


def wait_for_model(page: "Page") -> None:
    """Until the page shows what it says of a loaded model."""
    page.locator("#header .facts", has_text="context").wait_for(timeout=PATIENCE_MS)


def measured(
    browser: "Browser", program: Program, options: argparse.Namespace, alone: Path
) -> Record:
    """All that is measured with one program: answers in both ways, long ones, and rest."""
    asked = asked_of(options)
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.add_init_script(LONG_TASKS)
    with Database(program.folder / "strata.db") as database, Alone(alone, options) as other:
        write(database, options, asked)
        page.goto(program.url)
        wait_for_model(page)
        visits = [visit(context, program) for _ in range(options.starts)]
        answers: list[Streamed] = []
        alike: list[tuple[float, float]] = []
        for number, (text, _) in enumerate(asked):
            title = WRITTEN.format(number)
            if number % 2:
                alike.append(other.answer(title, text))
            answers.append(stream(page, program, database, title, text))
            if not number % 2:
                alike.append(other.answer(title, text))
        lengthen(database, options)
        page.reload()
        wait_for_model(page)
        long = [stream(page, program, database, LONG, text) for text, _ in PROMPTS[:MOST_LONG]]
        rest = at_rest(program)
    context.close()
    return figures(answers, alike, long, rest) | visited(visits)


def asked_of(options: argparse.Namespace) -> list[tuple[str, int]]:
    """The questions that are answered both ways, with their seeds."""
    return [PROMPTS[number % len(PROMPTS)] for number in range(options.repeats)]


def write(
    database: Database, options: argparse.Namespace, asked: Sequence[tuple[str, int]]
) -> None:
    """A conversation for each question, whose answer is drawn with the question's seed."""
    store = Conversations(database, OWNER)
    for number, (_, seed) in enumerate(asked):
        fresh(store, WRITTEN.format(number), options.tokens, seed)


def lengthen(database: Database, options: argparse.Namespace) -> None:
    """A conversation of so many tokens of answers, made of the answers that there are."""
    store = Conversations(database, OWNER)
    stored = [message for found in store.list() for message in store.messages(found.id)]
    told = cycle([message for message in stored if message.role == "assistant"])
    long, length = fresh(store, LONG, options.tokens, 0), 0
    while length < options.length:
        answer = next(told)
        pieces = answer.pieces or ()
        length += max(1, len(pieces))
        store.append(long, "user", "Go on.")
        store.append(long, "assistant", answer.content, pieces=pieces)


def fresh(store: Conversations, title: str, tokens: int, seed: int) -> str:
    """A conversation whose answers are drawn with that seed; returns its id."""
    found = store.create(title)
    generation = Generation(Sampling(0.8, min_p=0.05, seed=seed), tokens)
    settings = {"generation": asdict(generation), "fresh_seed": False, "method": "hd"}
    settings["drafting"] = asdict(METHODS["hd"].drafting)
    store.set_settings(found.id, settings)
    return found.id


def stream(page: "Page", program: Program, database: Database, title: str, text: str) -> Streamed:
    """Ask on the page, in the conversation of that title, and count until the answer ends."""
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
        shares = program.taken().since(before, seconds)
        page.wait_for_timeout(1000 * AFTER_SECONDS)
        work = program.taken().since(before, 1)
    done = last_run(database)
    return Streamed(
        tokens=done.emitted_tokens,
        speed=speed(done),
        seconds=seconds,
        shares=shares,
        work=work,
        streamed=wire.received(stream=True),
        around=wire.received(stream=False),
        long_tasks=page.evaluate("() => window.long_tasks"),
    )


def visit(context: "BrowserContext", program: Program) -> Visit:
    """Open the page once more, in a browser that has seen it."""
    page = context.new_page()
    page.add_init_script(USABLE)
    with listening(page) as wire:
        page.goto(program.url)
        wait_for_model(page)
        page.wait_for_timeout(1000 * AFTER_SECONDS)
    painted, usable = page.evaluate(PAINTED), page.evaluate("() => window.usable")
    page.close()
    return Visit(painted / 1000, usable / 1000, wire.received(stream=False))


def visited(visits: Sequence[Visit]) -> Record:
    """Medians over some visits."""
    return {
        "paint_seconds": median(each.painted for each in visits),
        "usable_seconds": median(each.usable for each in visits),
        "visit_bytes": median(each.received for each in visits),
    }


def last_run(database: Database) -> Trace:
    """The answer that was stored last."""
    return Traces(database, OWNER).history(1)[0]


def speed(done: Trace) -> float:
    """Tokens per second of decoding."""
    return done.emitted_tokens / done.decode_seconds


def at_rest(program: Program) -> Shares:
    """What an open page takes when nothing is done."""
    time.sleep(SETTLE_SECONDS)
    before = program.taken()
    time.sleep(IDLE_SECONDS)
    return program.taken().since(before, IDLE_SECONDS)


class Alone:
    """The same model in a process of its own, with conversations of its own and no page."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        arguments = (there, folder, source_of(options.model), options.threads)
        self.process = context.Process(target=answer_alone, args=arguments)

    def __enter__(self) -> "Alone":
        self.process.start()
        self.database = Database(self.folder / "strata.db")
        write(self.database, self.options, asked_of(self.options))
        self.pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.send(None)
        self.process.join(20)
        self.database.close()

    def answer(self, title: str, text: str) -> tuple[float, float]:
        """The tokens per second of an answer that nobody looks at, and the seconds it took."""
        store = Conversations(self.database, OWNER)
        conversation = next(found.id for found in store.list() if found.title == title)
        store.append(conversation, "user", text)
        began = time.perf_counter()
        self.pipe.send(conversation)
        self.pipe.recv()
        seconds = time.perf_counter() - began
        return speed(last_run(self.database)), seconds


def answer_alone(pipe: Connection, folder: Path, source: str, threads: int) -> None:
    """The process of `Alone`: answers conversations as the program does, without serving a page."""
    engine = Remote(partial(Local, partial(open_table, [ASSETS / "statistics"])))
    with closing(engine), Database(folder / "strata.db") as database:
        session = Session(engine, database, folders=[ASSETS / "statistics"])
        for _ in session.models.start(source, Runtime(threads=threads)):
            pass
        pipe.send("ready")
        while conversation := pipe.recv():
            settings = session.chat.conversations(OWNER).get(conversation).settings
            preferences = Preferences.from_mapping(settings)
            for _ in session.answering.answer(OWNER, conversation, preferences):
                pass
            pipe.send("answered")


def figures(
    answers: Sequence[Streamed],
    alone: Sequence[tuple[float, float]],
    long: Sequence[Streamed],
    rest: Shares,
) -> Record:
    """Medians over the answers; of those at length, the longest. `alone` are the tokens per second
    of the same answers without a page, and the seconds they took."""
    pairs = list(zip(answers, alone, strict=True))
    tasks = [task for answer in long for task in answer.long_tasks]
    longest = max(long, key=lambda answer: answer.tokens)
    return {
        "tokens": [answer.tokens for answer in answers],
        "page_tokens_per_second": median(answer.speed for answer in answers),
        "alone_tokens_per_second": median(speed for speed, _ in alone),
        "speed_ratio": median(answer.speed / speed for answer, (speed, _) in pairs),
        "wall_ratio": median(seconds / answer.seconds for answer, (_, seconds) in pairs),
        "renderer_share": median(answer.shares.renderer for answer in answers),
        "server_share": median(answer.shares.server for answer in answers),
        "engine_share": median(answer.shares.engine for answer in answers),
        "bytes_per_token": median(answer.received / answer.tokens for answer in answers),
        "stream_bytes_per_token": median(answer.streamed / answer.tokens for answer in answers),
        "bytes_around": median(answer.around for answer in answers),
        "answer_seconds": median(answer.seconds for answer in answers),
        "renderer_seconds": median(answer.work.renderer for answer in answers),
        "server_seconds": median(answer.work.server for answer in answers),
        "long_tokens": longest.tokens,
        "long_tasks": len(tasks),
        "longest_task_ms": max(tasks, default=0.0),
        "long_bytes_per_token": longest.received / longest.tokens,
        "long_renderer_share": longest.shares.renderer,
        "long_tokens_per_second": longest.speed,
        "idle_share": rest.server + rest.engine,
        "idle_renderer_share": rest.renderer,
    }


def show(record: Record) -> None:
    """Each figure beside its bar, then what explains them."""
    print(
        f"{record['model']}, {record['threads']} threads, {record['machine']}, "
        f"{record['date'][:10]}; answers of {', '.join(map(str, record['tokens']))} tokens\n"
    )
    for name, bar in BARS.items():
        print(bar.line(record[name]))
    print(
        f"\n  tokens per second: {record['page_tokens_per_second']:.0f} with the page, "
        f"{record['alone_tokens_per_second']:.0f} without, "
        f"{record['long_tokens_per_second']:.0f} at length"
        "\n  whole answers, from the key to the last word on the screen: "
        f"{record['wall_ratio']:.2f}x of the speed without a page"
        f"\n  engine processes {record['engine_share']:.2f} of a core"
        + (" (it is in the server's)" if record["engine_share"] < 0.1 else "")
        + f"\n  an answer of {record['answer_seconds']:.2f} s: "
        f"{record['renderer_seconds']:.2f} s of the renderer, {record['server_seconds']:.2f} s of "
        f"the server, {record['stream_bytes_per_token']:.0f} bytes a token and "
        f"{record['bytes_around']:,.0f} bytes beside them"
        f"\n  at length: longest task {record['longest_task_ms']:.0f} ms, renderer "
        f"{record['long_renderer_share']:.2f}, {record['long_bytes_per_token']:,.0f} bytes a token"
        f"\n  at rest: renderer {record['idle_renderer_share']:.4f} of a core"
        f"\n  start: first reply after {record['reply_seconds']:.2f} s and "
        f"{record['reply_processor_seconds']:.2f} s of processor time, model after "
        f"{record['model_seconds']:.2f} s"
    )
