"""An object in a process of its own: everything arrives, everything can die, and nothing hangs.

Whoever waits here waits LONG at most. A test that hangs ends the process that runs the tests.
"""

import ast
import faulthandler
import gc
import operator
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import errors, pipe
from engine.errors import EngineDied, ModelError, StrataError
from engine.pipe import Make, Process
from tests.conftest import ROOT
from tests.support.piped_object import Faulty, OnlyHere, Polite, Slow, Stubborn, Worker, step

LONG = 60.0


class Kept(Process):
    """A Process that remembers what it was told, and that does not outlive its test."""

    def __init__(self, make: Make = Worker) -> None:
        self.states: list[Any] = []
        self.deaths: list[str] = []
        super().__init__(make, self.states.append, self.deaths.append)


@pytest.fixture(scope="module")
def terminal(pytestconfig: pytest.Config) -> Iterator[int]:
    """What pytest does not capture."""
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        descriptor = os.dup(2)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(autouse=True)
def no_hang(terminal: int) -> Iterator[None]:
    faulthandler.dump_traceback_later(2 * LONG, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def worker() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.close()


def beside(work: Callable[[], Any]) -> Future[Any]:
    """What a thread beside the test finds out."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def eventually(fact: Callable[[], bool]) -> bool:
    """Whether it becomes true in time."""
    end = time.monotonic() + LONG
    while not fact():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def gone(pid: int) -> bool:
    """Whether a process has ended; whoever inherited it may not have buried it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def freeze(pid: int) -> None:
    """Make a process hang, in a way that only kill -9 ends."""
    os.kill(pid, signal.SIGSTOP)
    assert eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def works(kept: Process) -> bool:
    return kept.call("add", 1, other=2) == 3 and list(kept.stream("numbers", 3)) == [0, 1, 2]


# Calls.


def test_calls_give_back_what_the_methods_do(worker: Kept) -> None:
    assert worker.call("add", 1) == 2 and worker.call("add", 1, other=2) == 3
    assert worker.call("echo", [step(1), {"a": (None, b"b")}]) == [step(1), {"a": (None, b"b")}]
    assert worker.call("echo", bytes(5_000_000)) == bytes(5_000_000)
    assert worker.pid != os.getpid() and worker.alive


def test_an_object_that_cannot_be_made_says_so_in_every_call() -> None:
    kept = Kept(Faulty)
    for _ in range(2):
        with pytest.raises(ModelError, match="no such model"):
            kept.call("add", 1)
    with pytest.raises(ModelError, match="no such model"):
        list(kept.stream("numbers", 3))
    kept.close()
    assert kept.deaths == []


def test_the_process_imports_no_library_by_itself(worker: Kept) -> None:
    heavy = ["torch", "transformers", "llama_cpp", "gradio", "numpy", "sqlite3", "pytest", "app"]
    assert worker.call("modules", [*heavy, "engine.streams"]) == {"engine.streams"}


# Exceptions.


def subclasses(kind: type[Exception]) -> list[type[Exception]]:
    return [kind, *(deeper for below in kind.__subclasses__() for deeper in subclasses(below))]


def test_every_error_of_ours_arrives_as_it_is(worker: Kept) -> None:
    assert errors.Busy in subclasses(StrataError)
    tree = ast.parse(Path(errors.__file__).read_text(encoding="utf-8"))
    assert len([node for node in tree.body if isinstance(node, ast.ClassDef)]) >= 7
    for kind in subclasses(StrataError):
        with pytest.raises(StrataError) as raised:
            worker.call("fail", kind("what happened, and what to do"))
        assert type(raised.value) is kind, "errors of ours must survive pickling"
        assert str(raised.value) == "what happened, and what to do"
        assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("error", [ValueError("a", 1), KeyError("b"), FileNotFoundError(2, "c")])
def test_other_errors_arrive_with_type_arguments_and_trace(worker: Kept, error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        worker.call("fail", error)
    assert raised.value.args == error.args
    assert "piped_object.py" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("two", "Two: mistake number 7"),
        ("locked", "LockedError: with a lock"),
        ("unreadable", "ValueError: "),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("library", "wave.Error: a header that nobody understands"),
    ],
)
def test_errors_that_cannot_travel_arrive_in_words(
    worker: Kept, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with pytest.raises(StrataError) as raised:
        worker.call("fail_with", kind)
    assert type(raised.value) is StrataError and words in str(raised.value)
    assert "fail_with" in raised.value.__notes__[0]
    assert "wave" not in sys.modules, "an error loads no library"
    assert works(worker)


def test_values_that_cannot_travel_fail_one_call(worker: Kept) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        worker.call("echo", lambda: None)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        worker.stream("numbers", threading.Lock())
    with pytest.raises(TypeError, match="pickle"):
        worker.call("locked")
    with pytest.raises(LookupError, match="not to be read here"):
        worker.call("only_here")
    with pytest.raises(LookupError, match="not to be read here"):
        worker.call("echo", OnlyHere())
    with pytest.raises(LookupError, match="not to be read here"):
        list(worker.stream("numbers", OnlyHere()))
    with pytest.raises(AttributeError, match="nothing_such"):
        worker.call("nothing_such")
    with pytest.raises(TypeError):
        worker.call("add")
    assert works(worker) and not worker._link._calls and not worker._link._streams


# Streams.


def test_a_fast_producer_loses_nothing_and_sends_few_messages(
    worker: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: Counter[str] = Counter()
    receive = pipe.Link._receive

    def counted(link: pipe.Link, kind: pipe.Kind, number: int, body: bytes) -> None:
        kinds[kind] += 1
        receive(link, kind, number, body)

    worker.call("echo", None)
    monkeypatch.setattr(pipe.Link, "_receive", counted)
    assert list(worker.stream("numbers", 10_000)) == list(range(10_000))
    assert kinds["end"] == 1 and 1 <= kinds["items"] < 1_000
    assert set(kinds) == {"items", "end"}


def test_slow_calls_hold_up_no_stream(worker: Kept) -> None:
    """As many as run at once, and one more that waits for them."""
    slow = [beside(lambda: worker.call("block")) for _ in range(pipe.CALLS + 1)]
    worker_is_full = beside(lambda: eventually(lambda: len(worker._link._calls) > pipe.CALLS))
    assert worker_is_full.result(LONG)
    assert beside(lambda: list(worker.stream("numbers", 3))).result(LONG) == [0, 1, 2]
    stream = worker.stream("until_stopped")
    assert beside(lambda: next(stream)).result(LONG) == "first"
    stream.stop()
    assert beside(lambda: list(stream)).result(LONG) == ["last"]
    assert list(worker.stream("release_soon")) == ["released"]
    assert [call.result(LONG) for call in slow] == ["released"] * (pipe.CALLS + 1)


def test_a_stream_without_a_thread_was_never_opened(worker: Kept) -> None:
    """So nothing works for a consumer that was told that it failed."""
    worker.call("start_no_streams")
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(worker.stream("endless"))
    assert "producer" not in worker.call("threads")
    assert worker.call("add", 1) == 2 and not worker._link._streams


def test_stop_before_the_stream_began(worker: Kept) -> None:
    stream = worker.stream("late")
    worker.call("await_blocked", 1)
    stream.stop()
    stream.stop()
    worker.call("release")
    assert list(stream) == ["stopped"]


def stream_threads(worker: Kept) -> list[str]:
    return [name for name in worker.call("threads") if name.startswith("stream-")]


@pytest.mark.parametrize("leave", ["close", "generator", "with"])
def test_a_consumer_that_leaves_frees_the_threads_of_the_process(worker: Kept, leave: str) -> None:
    stream = worker.stream("endless")
    batches = stream.batches()
    next(batches)
    assert len(stream_threads(worker)) == 1
    if leave == "close":
        stream.close()
    elif leave == "generator":
        batches.close()  # type: ignore[attr-defined]
    else:
        with stream:
            pass
    assert eventually(lambda: not stream_threads(worker))
    assert list(stream) == [] and not worker._link._streams


def test_what_a_stream_fails_with_comes_after_its_items(worker: Kept) -> None:
    got = []
    with pytest.raises(ModelError, match="the model broke"):
        for item in worker.stream("broken", 5):
            got.append(item)
    assert got == [0, 1, 2, 3, 4] and works(worker)


@pytest.mark.parametrize("item", ["unwritable", "unreadable"])
def test_an_item_that_cannot_travel_ends_its_stream(worker: Kept, item: str) -> None:
    stream = worker.stream("bad_item", item)
    assert next(stream) == "good"
    worker.call("await_blocked", 1)
    worker.call("release")
    with pytest.raises((TypeError, LookupError)):
        next(stream)
    assert eventually(lambda: not stream_threads(worker)) and works(worker)


def test_a_method_that_returns_no_stream_says_so(worker: Kept) -> None:
    with pytest.raises(TypeError, match="no Stream but a int"):
        list(worker.stream("no_stream"))
    with pytest.raises(TypeError, match="pickle"):
        worker.call("numbers", 3)


# State.


def test_a_state_arrives_before_the_items_that_were_put_after_it(worker: Kept) -> None:
    for number, item in enumerate(worker.stream("states", 2_000)):
        assert item == number
        assert worker.states[-1] >= item


def test_a_callback_that_fails_ends_the_process_and_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    error = ZeroDivisionError("a mistake of the app")

    def fail(value: object) -> None:
        if value == "bad":
            raise error

    one = Process(Worker, on_state=fail)
    with pytest.raises(EngineDied, match="failed to read"):
        one.call("say", "bad")
    assert eventually(lambda: seen == [error])
    one.close()


# Death.


def test_the_ways_to_die_have_names(worker: Kept) -> None:
    ways = {
        "SIGKILL": r"SIGKILL.*memory",
        "SIGSEGV": r"SIGSEGV.*native library",
        "SIGTERM": "SIGTERM",
        "exit": "status 7",
        "fault": r"SIGSEGV.*native library",
        "SIGABRT": r"SIGABRT.*native library",
    }
    for how, words in ways.items():
        with pytest.raises(EngineDied, match=words):
            worker.call("die", how)
        assert not worker.alive and gone(worker.pid)
        for _ in range(2):
            with pytest.raises(EngineDied, match=words):
                worker.call("add", 1)
            with pytest.raises(EngineDied, match=words):
                worker.stream("numbers", 1)
        worker.restart()
        assert works(worker) and worker.alive
    assert eventually(lambda: len(worker.deaths) == len(ways))


def use_call(worker: Kept) -> list[Future[Any]]:
    return [beside(lambda: worker.call("block")) for _ in range(3)]


def use_stream(worker: Kept) -> list[Future[Any]]:
    streams = [worker.stream("endless") for _ in range(2)]
    return [beside(partial(list, stream.batches())) for stream in streams]


def use_large_batch(worker: Kept) -> list[Future[Any]]:
    return [beside(partial(list, worker.stream("huge", 50_000_000)))]


def use_large_argument(worker: Kept) -> list[Future[Any]]:
    return [beside(lambda: worker.call("echo", bytes(50_000_000)))]


def use_nothing(worker: Kept) -> list[Future[Any]]:
    return []


USES = [use_call, use_stream, use_large_batch, use_large_argument, use_nothing]
ENDING_USES = (use_large_batch, use_large_argument)
"""These may have ended by themselves when the process is killed."""


@pytest.mark.soak(stay=3)
@pytest.mark.parametrize("moment", range(20))
def test_killed_at_any_moment(worker: Kept, moment: int) -> None:
    """Each use four times: killed as it starts, while it starts, and soon after it works."""
    use, when = USES[moment % len(USES)], moment // len(USES)
    if when:
        assert works(worker)
    pid = worker.pid
    waiting = use(worker)
    time.sleep((0.0, 0.02, 0.05, 0.1)[when] * random.Random(moment).random())
    os.kill(pid, signal.SIGKILL)
    for future in waiting:
        error = future.exception(LONG)
        assert isinstance(error, EngineDied) or (error is None and use in ENDING_USES)
    with pytest.raises(EngineDied, match="SIGKILL"):
        worker.call("block")
    assert eventually(lambda: len(worker.deaths) == 1) and "SIGKILL" in worker.deaths[0]
    worker.restart()
    assert works(worker) and worker.pid != pid and len(worker.deaths) == 1


def test_what_arrived_before_the_death_can_still_be_read(worker: Kept) -> None:
    stream = worker.stream("until_stopped")
    assert eventually(lambda: not stream._queue.empty())
    os.kill(worker.pid, signal.SIGKILL)
    assert eventually(lambda: not worker.alive)
    assert next(stream) == "first"
    with pytest.raises(EngineDied):
        next(stream)
    assert list(stream) == []


def test_a_death_may_be_answered_with_a_restart() -> None:
    """Deaths are told one after the other, also when the fresh process dies meanwhile."""
    inside, deaths = threading.Semaphore(), list[str]()

    def again(reason: str) -> None:
        assert inside.acquire(blocking=False), "two at once"
        deaths.append(reason)
        one.restart()
        if len(deaths) < 4:
            with pytest.raises(EngineDied):
                one.call("die", "exit")
            assert one._link.ended.wait(LONG)
            time.sleep(0.1)  # Time for a second one to come in, if it could.
        inside.release()

    one = Process(Worker, on_death=again)
    with pytest.raises(EngineDied):
        one.call("die", "SIGKILL")
    assert eventually(lambda: len(deaths) == 4 and one.alive)
    assert works(one)
    assert "SIGKILL" in deaths[0] and all("status 7" in reason for reason in deaths[1:])
    one.close()
    assert len(deaths) == 4, "closing is no death"


def test_a_process_that_hangs_can_be_killed_with_a_reason(worker: Kept) -> None:
    stream = worker.stream("endless")
    next(stream)
    call = beside(lambda: worker.call("block"))
    worker.call("await_blocked", 1)
    freeze(worker.pid)
    worker.kill("It did not stop within ten seconds.")
    with pytest.raises(EngineDied, match=r"^It did not stop within ten seconds\.$"):
        list(stream)
    with pytest.raises(EngineDied, match="ten seconds"):
        call.result(LONG)
    assert eventually(lambda: worker.deaths == ["It did not stop within ten seconds."])
    worker.kill("twice")
    worker.restart()
    assert works(worker)


def test_a_process_that_hangs_with_a_full_pipe_holds_up_no_one(worker: Kept) -> None:
    stream = worker.stream("until_stopped")
    assert next(stream) == "first"
    freeze(worker.pid)
    calls = [beside(lambda: worker.call("echo", bytes(5_000_000))) for _ in range(3)]
    assert eventually(lambda: len(worker._link._calls) == 3)
    beside(stream.stop).result(LONG)
    beside(stream.close).result(LONG)
    pid = worker.pid
    worker.restart()
    for call in calls:
        with pytest.raises(EngineDied, match="restarted"):
            call.result(LONG)
    assert gone(pid) and works(worker) and worker.deaths == []


def test_a_system_that_starts_no_process_says_so(
    worker: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    assert works(worker)
    with monkeypatch.context() as patched:
        patched.setattr("multiprocessing.popen_spawn_posix.util.spawnv_passfds", refuse)
        with pytest.raises(EngineDied, match="could not be started: .*memory"):
            worker.restart()
        with pytest.raises(EngineDied, match="could not be started"):
            Process(Worker)
        with pytest.raises(EngineDied, match="restarted"):
            worker.call("add", 1)
    worker.restart()
    assert works(worker)


# The end.


def test_close_lets_the_object_close(tmp_path: Path) -> None:
    kept = Kept(partial(Polite, str(tmp_path / "closed")))
    kept.call("add", 1)
    stream, pid = kept.stream("endless"), kept.pid
    kept.close()
    kept.close()
    assert (tmp_path / "closed").read_text() == "closed"
    assert gone(pid) and kept.deaths == []
    for refused in (lambda: kept.call("add", 1), kept.restart, lambda: list(stream)):
        with pytest.raises(EngineDied, match="closed"):
            refused()


@pytest.mark.parametrize("how", ["stubborn", "stopped", "making"])
def test_close_does_not_wait_for_ever(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "GRACE", 0.1)
    kept = Kept({"stubborn": Stubborn, "stopped": Worker, "making": Slow}[how])
    assert eventually(lambda: bool(kept.states))
    if how == "stopped":
        freeze(kept.pid)
    beside(kept.close).result(LONG)
    assert gone(kept.pid)


def ours(process: psutil.Process) -> tuple[int, int, int]:
    """Processes, descriptors and threads."""
    names = [thread.name for thread in threading.enumerate()]
    threads = len([name for name in names if name.startswith("engine-")])
    return len(process.children(recursive=True)), process.num_fds(), threads


def no_more(now: tuple[int, int, int], before: tuple[int, int, int]) -> bool:
    """Whether nothing was added. What others had opened may be closed by now."""
    return all(map(operator.le, now, before))


def test_starting_and_closing_leaves_nothing(worker: Kept) -> None:
    me = psutil.Process()
    assert works(worker)
    gc.collect()  # What earlier tests left does not end meanwhile.
    before = ours(me)
    for end in ("close", "kill", "restart", "unused") * 2:
        kept = Kept()
        if end != "unused":
            list(kept.stream("numbers", 3))
        if end == "kill":
            os.kill(kept.pid, signal.SIGKILL)
        elif end == "restart":
            kept.restart()
        kept.close()
        with pytest.raises((pickle.PicklingError, AttributeError)):
            Process(lambda publish: None)
    assert eventually(lambda: no_more(ours(me), before)), (ours(me), before)
    assert {worker._link} == pipe.RUNNING


# Programs around it. What they print is what happened.

SCRIPT = """
import os, psutil, signal, sys, time
sys.path[:0] = [{root!r}]
from engine.pipe import Process
from tests.support.piped_object import Patient, Slow, Stubborn, Worker
print("main runs as", __name__, file=sys.stderr, flush=True)

def main():
{body}

if __name__ == "__main__":
    main()
"""


def program(folder: Path, body: str) -> subprocess.Popen[str]:
    """A script with this body in a session of its own, so that its group can get signals."""
    file = folder / "script.py"
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    file.write_text(SCRIPT.format(root=str(ROOT), body=lines))
    return subprocess.Popen(
        [sys.executable, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=folder,
    )


def finish(started: subprocess.Popen[str]) -> tuple[list[str], str]:
    """The lines it printed, and its errors; it must end by itself."""
    try:
        out, err = started.communicate(timeout=LONG)
    finally:
        started.kill()
    return out.split("\n")[:-1], err


def test_a_plain_script_is_not_run_twice_and_its_output_is_its_own(tmp_path: Path) -> None:
    body = """
one = Process(Worker)
print(one.call("add", 1))
one.call("shout")
print(list(one.stream("numbers", 3)))
one.close()
"""
    started = program(tmp_path, body)
    lines, err = finish(started)
    assert lines == ["2", "[0, 1, 2]"] and started.returncode == 0
    said = ["main runs as __main__", "main runs as __mp_main__", "printed", "written"]
    assert err.splitlines() == said


def test_a_process_that_the_app_starts_runs_little_of_its_entry() -> None:
    """Python runs app.py there too, under another name."""
    code = (
        "import runpy, sys\n"
        "runpy.run_path('app.py', run_name='__mp_main__')\n"
        "print(sorted({'gradio', 'torch', 'sqlite3', 'app.web.server'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("made", ["Worker", "Slow"])
def test_an_app_that_is_killed_leaves_no_process(tmp_path: Path, made: str) -> None:
    """Whatever that one does: a call, a stream, or still making the object."""
    body = f"""
states = []
one = Process({made}, states.append)
while not states:
    time.sleep(0.01)
stream = one.stream("endless")
print(one.pid, flush=True)
one.call("block")
"""
    started = program(tmp_path, body)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    assert not gone(pid)
    started.kill()
    assert eventually(lambda: gone(pid))
    finish(started)


@pytest.mark.parametrize("left", ["running", "hanging", "stubborn"])
def test_an_app_that_forgets_to_close_ends_all_the_same(tmp_path: Path, left: str) -> None:
    body = f"""
one = Process({"Stubborn" if left == "stubborn" else "Worker"})
print(one.call("add", 1), one.pid, flush=True)
stream = one.stream("endless")
if {left == "hanging"}:
    os.kill(one.pid, signal.SIGSTOP)
    while psutil.Process(one.pid).status() != "stopped":
        time.sleep(0.01)
"""
    started = program(tmp_path, body)
    (line,), err = finish(started)
    assert line.startswith("2 ") and started.returncode == 0
    assert gone(int(line.split()[1]))
    assert err.splitlines() == ["main runs as __main__", "main runs as __mp_main__"]


def test_an_interrupt_is_for_the_app_alone(tmp_path: Path) -> None:
    """Also while the process starts: it is born with the interrupt held back."""
    body = """
signal.signal(signal.SIGINT, lambda *_: None)
for delay in range(8):
    one = Process(Worker)
    for _ in range(8):
        os.killpg(0, signal.SIGINT)
        time.sleep(delay / 500)
    assert one.call("add", 1) == 2
    one.close()
signal.signal(signal.SIGINT, signal.default_int_handler)
one = Process(Worker)
one.call("add", 1)
try:
    stream = one.stream("endless")
    print("interrupt me", flush=True)
    for item in stream:
        pass
except KeyboardInterrupt:
    print("interrupted", one.call("add", 2))
    one.close()
"""
    started = program(tmp_path, body)
    assert started.stdout is not None
    assert started.stdout.readline() == "interrupt me\n"
    os.killpg(started.pid, signal.SIGINT)
    lines, err = finish(started)
    assert lines == ["interrupted 3"] and "Traceback" not in err


@pytest.mark.parametrize("moment", ["starting", "working", "beforehand"])
def test_a_termination_of_all_is_for_the_app_to_handle(tmp_path: Path, moment: str) -> None:
    """The process works until the app ends, and then ends with it."""
    body = f"""
signal.signal(signal.SIGTERM, lambda *_: None)
deaths = []
one = Process(Patient, on_death=deaths.append)
if {moment != "starting"}:
    stream = one.stream("endless")
    assert next(stream) == 0
if {moment == "beforehand"}:
    os.killpg(0, signal.SIGTERM)
    assert one.call("add", 1) == 2 and next(stream) == 1 and not deaths
signal.signal(signal.SIGTERM, signal.SIG_DFL)
print(one.pid, flush=True)
one.call("block")
"""
    started = program(tmp_path, body)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    os.killpg(started.pid, signal.SIGTERM)
    assert started.wait(LONG) == -signal.SIGTERM and eventually(lambda: gone(pid))
    _, err = finish(started)
    assert {"main runs as __main__"} <= set(err.splitlines())
    assert set(err.splitlines()) <= {"main runs as __main__", "main runs as __mp_main__"}
