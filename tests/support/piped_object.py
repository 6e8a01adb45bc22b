"""The object that tests/processes/test_pipe.py runs in a process of its own. It imports little."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from engine import pipe
from engine.errors import ModelError
from engine.streams import Stream
from engine.types import Step, Token


class Two(Exception):
    """Can be written and not read: made of two values, it says one text."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} number {number}")


def only_in(pid: int) -> str:
    if os.getpid() != pid:
        raise LookupError("not to be read here")
    return "read"


class OnlyHere:
    """A value that can be written, and read only in the process that made it."""

    def __reduce__(self) -> tuple[Callable[[int], str], tuple[int]]:
        return only_in, (os.getpid(),)


class LockedError(Exception):
    """Cannot be written."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.lock = threading.Lock()


def step(index: int) -> Step:
    tokens = tuple(
        Token(1000 + place, index * 3 + place, "statistics", 2, " token", 0.25)
        for place in range(3)
    )
    counts = {"context": 5, "model": 3, "statistics": 8}
    return Step(index, tokens, counts, counts, ((8, 3), (8, 2)), 0.1, 0.2, 0.3, 0.4, counts)


class Worker:
    """Does what it is told, and fails in every way there is."""

    def __init__(self, publish: Callable[[object], None]) -> None:
        self.publish = publish
        self.released = threading.Event()
        self.blocked = threading.Semaphore(0)
        publish("made")

    # Calls.

    def echo(self, value: Any) -> Any:
        return value

    def add(self, one: int, *, other: int = 1) -> int:
        return one + other

    def say(self, value: object) -> None:
        self.publish(value)

    def fail(self, error: BaseException) -> None:
        raise error

    def fail_with(self, kind: str) -> None:
        if kind == "library":
            import wave

            raise wave.Error("a header that nobody understands")
        errors: dict[str, BaseException] = {
            "two": Two("mistake", 7),
            "locked": LockedError("with a lock"),
            "exit": SystemExit(3),
            "interrupt": KeyboardInterrupt(),
            "unreadable": ValueError(OnlyHere()),
        }
        raise errors[kind]

    def locked(self) -> Any:
        return threading.Lock()

    def only_here(self) -> OnlyHere:
        return OnlyHere()

    def block(self) -> str:
        """Takes until `release`."""
        self.blocked.release()
        self.released.wait()
        return "released"

    def await_blocked(self, count: int) -> None:
        for _ in range(count):
            self.blocked.acquire()

    def release(self) -> None:
        self.released.set()

    def release_soon(self) -> Stream[str]:
        """The same as a stream, which comes through where no call does."""
        self.released.set()
        return self._work(lambda stream: stream.put("released"))

    def modules(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if name in sys.modules}

    def threads(self) -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    def start_no_streams(self) -> None:
        """Behave as a system that starts no further thread."""

        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith("stream-"):
                raise RuntimeError("can't start new thread")
            start(thread)

        start = threading.Thread.start
        threading.Thread.start = refuse  # type: ignore[method-assign]

    def shout(self) -> None:
        print("printed")
        os.write(1, b"written\n")

    def die(self, how: str) -> None:
        if how == "exit":
            os._exit(7)
        if how == "fault":
            ctypes.string_at(0)
        pipe.FAREWELL = 0.001  # as if the app had stayed for all of it
        os.kill(os.getpid(), signal.Signals[how])
        time.sleep(3600)

    # Streams.

    def numbers(self, count: int) -> Stream[int]:
        return self._work(lambda stream: [stream.put(number) for number in range(count)])

    def states(self, count: int) -> Stream[int]:
        def work(stream: Stream[int]) -> None:
            for number in range(count):
                self.publish(number)
                stream.put(number)

        return self._work(work)

    def until_stopped(self) -> Stream[str]:
        """One item at once, a last one after Stop."""

        def work(stream: Stream[str]) -> None:
            stream.put("first")
            stream.stopped.wait()
            stream.put("last")

        return self._work(work)

    def late(self) -> Stream[str]:
        """Returns the stream after `release`, and says whether it was stopped by then."""
        self.block()
        stream: Stream[str] = Stream()

        def work() -> None:
            stopped = stream.stopped.wait(60)
            stream.put("stopped" if stopped else "not stopped")
            stream.end()

        threading.Thread(target=work).start()
        return stream

    def broken(self, good: int) -> Stream[int]:
        def work(stream: Stream[int]) -> None:
            stream.put_all(range(good))
            raise ModelError("the model broke")

        return self._work(work)

    def bad_item(self, item: str) -> Stream[Any]:
        """A good one, and after it was seen one that cannot be written, or not read there."""

        def work(stream: Stream[Any]) -> None:
            stream.put("good")
            self.block()
            stream.put(threading.Lock() if item == "unwritable" else OnlyHere())
            stream.stopped.wait()

        return self._work(work)

    def huge(self, size: int) -> Stream[bytes]:
        return self._work(lambda stream: stream.put(bytes(size)))

    def no_stream(self) -> int:
        return 1

    def endless(self) -> Stream[int]:
        def work(stream: Stream[int]) -> None:
            number = 0
            while not stream.stopped.wait(0.001):
                stream.put(number)
                number += 1

        return self._work(work)

    def _work(self, work: Callable[[Stream[Any]], object]) -> Stream[Any]:
        stream: Stream[Any] = Stream()

        def run() -> None:
            try:
                work(stream)
            except Exception as error:
                stream.end(error)
            else:
                stream.end()

        threading.Thread(target=run, name="producer").start()
        return stream


class Faulty:
    def __init__(self, publish: object) -> None:
        raise ModelError("no such model")


class Slow(Worker):
    def __init__(self, publish: Callable[[object], None]) -> None:
        publish("making")
        threading.Event().wait()


class Polite(Worker):
    """Leaves a file when it is closed."""

    def __init__(self, file: str, publish: Callable[[object], None]) -> None:
        super().__init__(publish)
        self.file = file

    def close(self) -> None:
        with open(self.file, "w") as file:
            file.write("closed")


class Stubborn(Worker):
    def close(self) -> None:
        threading.Event().wait()


class Patient(Worker):
    """Gives the app an hour to end after a SIGTERM."""

    def __init__(self, publish: Callable[[object], None]) -> None:
        pipe.FAREWELL = 3600.0
        super().__init__(publish)
