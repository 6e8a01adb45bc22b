"""An object in a process of its own, used from here through one pipe.

Whatever ends that process (a fault in a native library, too little memory, kill -9) ends nothing
here: what was under way raises EngineDied, and `restart` starts a fresh process. Nobody can be left
waiting for a dead process. The two share the pipe and nothing else, no lock and no queue, and each
sees the end of the pipe as soon as the other is gone. All threads block while there is nothing to
do.

A message is `(kind, number, body)`. The number says which call or stream it is about; for messages
about none it is 0. The body is pickled apart, so that a value that cannot be read fails one call.

    kind     body                  meaning
    ------   -------------------   ------------------------------------------------------------
    to the process
    call     name, args, kwargs    run this method of the object: `result` or `error` follows
    stream   name, args, kwargs    run one that returns a Stream: `items`, then `end` or `error`
    stop                           Stream.stop() of that stream, also before it began
    close                          Stream.close(): nobody reads its items any more
    reply    value                 Stream.reply(value): the answer to the item that asked
    quit                           close the object, if it has a method `close`, and end
    from the process
    result   value                 what the method returned
    error    Failure               what it raised, or what the stream ended with
    items    list of items         a batch: at most one every PACE seconds per stream
    end                            the stream has ended
    state    value                 the object called publish(value)
    dying    reason                it ends now, for a reason that it knows

Messages keep their order: a state that was published before an item was put arrives before it.
Answers do not wait for each other: a pool of threads runs the calls, and every stream has a thread
that forwards it.

    in the app                                in the process
    caller -> Link: writer  --- pipe -->  Server: reader -> pool that runs calls
    caller <- Link: reader  <-- pipe ---  pool, forwarding threads, publish
"""

import atexit
import faulthandler
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Literal

from engine import process as this_process
from engine.errors import EngineDied, StrataError, first_line
from engine.process import death
from engine.streams import Stream

Kind = Literal[
    "call",
    "stream",
    "stop",
    "close",
    "reply",
    "quit",
    "result",
    "error",
    "items",
    "end",
    "state",
    "dying",
]
"""Of messages; the table above says what they mean."""
Failure = tuple[str, str, bytes]
"""An exception that travels: its words, where it was raised, itself. The last two may be empty."""
Make = Callable[..., object]
"""Makes the object, in the other process: pickled by its name, called with the keyword `publish`, a
function that sends a value to `Process.state`."""

PROTOCOL = 5
CALLS = 16
"""Calls that run at once; further ones wait until one of them ends."""
GRACE = 2.0
"""Seconds that a process gets to end by itself before it is killed."""
SPAWN = multiprocessing.get_context("spawn")
CHILDREN = Lock()
"""Held while a process is started, killed or buried. Starting one also buries others that ended,
and the id of a buried one may be somebody else's by now."""


class Process:
    """The object that `make` makes in a process of its own, which starts at once.

    `on_state(value)` is called for each published value; it must be quick and must not use this
    object, as nothing else arrives meanwhile. `on_death(reason)` is called once for each process
    that ended unasked, when everything that was under way has got its EngineDied; never twice at
    the same time. It may take long and may `restart`.
    """

    def __init__(
        self,
        make: Make,
        on_state: Callable[[Any], None] | None = None,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self.state: Any = None
        """The last value that was published, by this process or the one before."""
        self._make, self._on_state, self._on_death = make, on_state, on_death
        self._closed = False
        self._starting, self._telling = Lock(), Lock()
        self._link = Link(make, self._arrived, self._died)

    @property
    def pid(self) -> int:
        """The id of the process, also of one that has ended."""
        return self._link.pid

    @property
    def alive(self) -> bool:
        """Whether there is a process. It may be starting, or hang."""
        return self._link.died is None

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """What this method of the object returns. Raises what it raises, or EngineDied.

        An exception that cannot be pickled, or whose module is not imported here, is raised as a
        StrataError with its type and its words: no library is loaded for it.
        """
        return self._link.call(name, args, kwargs)

    def stream(self, name: str, /, *args: Any, **kwargs: Any) -> Stream[Any]:
        """The items of a method that returns a Stream. Raises EngineDied without a process.

        They come in the batches that the process sent. What the method raises comes at the end.
        """
        return self._link.stream(name, args, kwargs)

    def restart(self) -> None:
        """Start a fresh process; one that still runs is killed and `on_death` not called for it."""
        with self._starting:
            if self._closed:
                raise EngineDied("The engine was closed.")
            self._link.leave("The engine was started anew. Please try again.")
            self._link = Link(self._make, self._arrived, self._died)

    def kill(self, reason: str) -> None:
        """End a process that hangs. What is under way in it ends with EngineDied(reason)."""
        self._link.kill(reason)

    def close(self) -> None:
        """End the process, by force where it does not end by itself. There will be no other."""
        with self._starting:
            self._closed = True
            self._link.leave("The engine was closed.", GRACE)

    def _arrived(self, value: Any) -> None:
        self.state = value
        if self._on_state is not None:
            self._on_state(value)

    def _died(self, reason: str) -> None:
        with self._telling:
            if self._on_death is not None and not self._closed:
                self._on_death(reason)


class Link:
    """The app's end of the pipe to one process, with what is under way in it.

    A thread of its own writes. So nobody who says Stop waits for a full pipe, and Ctrl-C in the
    main thread cannot cut a message in two.
    """

    def __init__(
        self, make: Make, on_state: Callable[[Any], None], on_death: Callable[[str], None]
    ) -> None:
        self._on_state, self._on_death = on_state, on_death
        self.died: str | None = None
        """Why calls are refused."""
        self.ended = Event()
        """Nothing is left of the process."""
        self._reason = ""
        """Why it was ended from here."""
        self._asked = self._buried = False
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, Future[bytes]] = {}
        self._streams: dict[int, Incoming] = {}
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._process, self._pipe = start(make)
        self.pid = self._process.pid or 0
        self._writer = Thread(target=self._write, name="engine-writer", daemon=True)
        self._writer.start()
        RUNNING.add(self)
        Thread(target=self._read, name="engine-reader", daemon=True).start()

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Process.call."""
        number, future = next(self._numbers), Future[bytes]()
        message = pack("call", number, (name, args, kwargs))
        with self._lock:
            self._check()
            self._calls[number] = future
        self._outgoing.put(message)
        try:
            return pickle.loads(future.result())
        finally:
            self._calls.pop(number, None)

    def stream(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Stream[Any]:
        """See Process.stream."""
        number = next(self._numbers)
        message, stream = pack("stream", number, (name, args, kwargs)), Incoming(self, number)
        with self._lock:
            self._check()
            self._streams[number] = stream
        self._outgoing.put(message)
        return stream

    def send(self, kind: Kind, number: int = 0, value: object = None) -> None:
        """Send a message. Never waits; without a process nothing happens."""
        self._outgoing.put(pack(kind, number, value))

    def forget(self, number: int) -> None:
        """Nobody reads this stream any more."""
        if self._streams.pop(number, None) is not None:
            self.send("close", number)

    def kill(self, reason: str) -> None:
        """End the process, if it still runs; `reason` is told to whoever waits for it."""
        self._reason = self._reason or reason
        with CHILDREN:
            if not self._buried:
                self._process.kill()

    def leave(self, reason: str, grace: float = 0.0) -> None:
        """End the process without telling `on_death`; it is given `grace` seconds to do so itself.

        Returns when nothing is left of it.
        """
        with self._lock:
            self._asked = self.died is None
        if grace:
            self._reason = self._reason or reason
            self.send("quit")
            self.ended.wait(grace)
        self.kill(reason)
        self.ended.wait()

    def _check(self) -> None:
        if self.died is not None:
            raise EngineDied(self.died)

    def _write(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                self._pipe.send_bytes(message)
        except OSError:
            pass  # The reader sees that the process is gone, and finds out why.
        finally:
            self.kill("")

    def _read(self) -> None:
        try:
            for kind, number, body in messages(self._pipe):
                self._receive(kind, number, body)
        except BaseException:
            self.kill("The app failed to read what the engine process sent. Please try again.")
            raise
        finally:
            self._end()

    def _receive(self, kind: Kind, number: int, body: bytes) -> None:
        if kind == "state":
            self._on_state(pickle.loads(body))
        elif kind == "dying":
            self._reason = self._reason or pickle.loads(body)
        elif kind == "items":
            self._put(number, body)
        else:
            with self._lock:
                call, stream = self._calls.pop(number, None), self._streams.pop(number, None)
            error = unpack_error(*pickle.loads(body)) if kind == "error" else None
            if stream is not None:
                stream.end(error)
            elif call is not None and error is not None:
                call.set_exception(error)
            elif call is not None:
                call.set_result(body)

    def _put(self, number: int, body: bytes) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        try:
            stream.put_all(pickle.loads(body))
        except Exception as error:
            # A value that this process cannot make: its class is not to be found, for example.
            stream.end(error)
            self.forget(number)

    def _end(self) -> None:
        """The pipe has ended: bury the process, tell everybody, and leave nothing open."""
        wait([self._process.sentinel], GRACE)
        reason = self._bury()
        with self._lock:
            self.died, asked = reason, self._asked
            calls, streams = [*self._calls.values()], [*self._streams.values()]
            self._calls.clear()
            self._streams.clear()
        for call in calls:
            call.set_exception(EngineDied(reason))
        for stream in streams:
            stream.end(EngineDied(reason))
        self._outgoing.put(None)
        self._writer.join()
        self._pipe.close()
        RUNNING.discard(self)
        self.ended.set()
        if not asked:
            self._on_death(reason)

    def _bury(self) -> str:
        """Why the process ended. One that lingers is killed; from here on there is none to kill."""
        with CHILDREN:
            self._process.kill()
            self._process.join()
            status, self._buried = self._process.exitcode or 0, True
            with suppress(ValueError):  # Somebody else took its status: then it is not known here.
                self._process.close()
        return self._reason or death(status)


RUNNING: set[Link] = set()


@atexit.register
def end_all() -> None:
    """No process outlives the app, and the interpreter does not wait for one that hangs."""
    for link in [*RUNNING]:
        link.leave("The app ended.")


class Incoming(Stream[Any]):
    """The app's end of a stream. What the process sent in one message stays one batch."""

    def __init__(self, link: Link, number: int) -> None:
        super().__init__(pace=0.0)
        self._link, self._number = link, number

    def stop(self) -> None:
        """See Stream.stop."""
        if not self.stopped.is_set():
            super().stop()
            self._link.send("stop", self._number)

    def close(self) -> None:
        """See Stream.close."""
        super().close()
        self._link.forget(self._number)

    def reply(self, value: Any) -> None:
        """See Stream.reply; the question is open in the other process."""
        self._link.send("reply", self._number, value)


class Server:
    """The other end: the object, and what runs in its process.

    The main thread makes the object, as libraries like to be imported there. Calls that come
    before it is made wait for it. Where making it fails, each of them raises that error.
    """

    def __init__(self, pipe: Connection, make: Make) -> None:
        self._pipe, self._make = pipe, make
        self._sending = Lock()
        self._object: Future[Any] = Future()
        self._streams: dict[int, Future[Stream[Any]]] = {}
        """Streams by number; what is asked of one before its method returned it comes then."""
        self._pool = ThreadPoolExecutor(CALLS, "call")

    def run(self) -> None:
        """Serve until the app is gone or says quit; never returns."""
        reader = Thread(target=self._read, name="reader")
        reader.start()
        try:
            self._object.set_result(self._make(publish=self.publish))
        except BaseException as error:
            self._object.set_exception(error)
        reader.join()

    def publish(self, value: object) -> None:
        """Send a value to Process.state."""
        self._send(pack("state", 0, value))

    def end(self, reason: str) -> None:
        """End this process, and tell the app why."""
        self._send(pack("dying", 0, reason))
        os._exit(1)

    def _read(self) -> None:
        try:
            for kind, number, body in messages(self._pipe):
                self._receive(kind, number, body)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # The app is gone: end, whatever the other threads do.

    def _receive(self, kind: Kind, number: int, body: bytes) -> None:
        match kind:
            case "call":
                self._pool.submit(self._call, number, body)
            case "stream":
                self._streams[number] = Future()
                self._pool.submit(self._open, number, body)
            case "stop":
                self._tell(number, lambda stream: stream.stop())
            case "close":
                self._tell(number, lambda stream: stream.close())
            case "reply":
                self._reply(number, body)
            case "quit":
                Thread(target=self._quit).start()

    def _tell(self, number: int, what: Callable[[Stream[Any]], None]) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.add_done_callback(lambda done: what(done.result()))

    def _reply(self, number: int, body: bytes) -> None:
        try:
            value = pickle.loads(body)
        except Exception as error:
            self._send(pack("error", number, pack_error(error)))
            self._tell(number, lambda stream: stream.close())
        else:
            self._tell(number, lambda stream: stream.reply(value))

    def _run(self, body: bytes) -> Any:
        name, args, kwargs = pickle.loads(body)
        return getattr(self._object.result(), name)(*args, **kwargs)

    def _call(self, number: int, body: bytes) -> None:
        try:
            message = pack("result", number, self._run(body))
        except BaseException as error:
            message = pack("error", number, pack_error(error))
        self._send(message)

    def _open(self, number: int, body: bytes) -> None:
        try:
            stream = self._run(body)
            if not isinstance(stream, Stream):
                raise TypeError(f"this returns no Stream but a {type(stream).__name__}")
            self._streams[number].set_result(stream)
            Thread(target=self._forward, args=(number, stream), name=f"stream-{number}").start()
        except BaseException as error:
            del self._streams[number]
            self._send(pack("error", number, pack_error(error)))

    def _forward(self, number: int, stream: Stream[Any]) -> None:
        try:
            for batch in stream.batches():
                self._send(pack("items", number, batch))
            message = pack("end", number)
        except BaseException as error:
            message = pack("error", number, pack_error(error))
        del self._streams[number]
        self._send(message)

    def _send(self, message: bytes) -> None:
        with self._sending, suppress(OSError):  # Without an app nobody needs it: _read ends us.
            self._pipe.send_bytes(message)

    def _quit(self) -> None:
        try:
            if self._object.done() and not self._object.exception():
                getattr(self._object.result(), "close", lambda: None)()
        except BaseException:
            traceback.print_exc()
        os._exit(0)


def start(make: Make) -> tuple[SpawnProcess, Connection]:
    """A process that serves what `make` makes, and our end of the only pipe to it.

    Raises EngineDied where the system cannot start one.
    """
    ours, theirs = SPAWN.Pipe()
    # A daemon in the sense of multiprocessing: ended with the app in any case.
    process = SPAWN.Process(target=serve, args=(theirs, make), name="engine", daemon=True)
    try:
        with CHILDREN, interrupts_held_back():
            process.start()
    except OSError as error:
        ours.close()
        raise EngineDied(
            f"The engine process could not be started: {first_line(error)}. "
            "Close other programs and try again."
        ) from error
    except BaseException:
        ours.close()
        raise
    finally:
        # Its own copy is the only one left, so the pipe ends when the process does.
        theirs.close()
    return process, ours


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """A process started here begins with SIGINT held back. `serve` then ignores it: Ctrl-C goes to
    all processes of a terminal, and the app decides what it means."""
    if sys.platform == "win32":
        yield
        return
    # Part of starting a process; starting it lets all signals through again, so it comes first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(pipe: Connection, make: Make) -> None:
    """The whole life of the other process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        # A process that a native library starts must not keep the pipe open after our end.
        os.set_inheritable(pipe.fileno(), False)
    if sys.stderr is not None:
        # The output of the app is its own. Ours, and that of libraries, goes to the log.
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        faulthandler.enable()
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # It would start a debugger, and wait for it.
    server = Server(pipe, make)
    this_process.ENDING.append(server.end)
    server.run()


def messages(pipe: Connection) -> Iterator[tuple[Kind, int, bytes]]:
    """What arrives, until the other process is gone."""
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        yield pickle.loads(message)


def pack(kind: Kind, number: int = 0, value: object = None) -> bytes:
    """A message. Raises what pickle raises for a value that cannot travel."""
    return pickle.dumps((kind, number, pickle.dumps(value, PROTOCOL)), PROTOCOL)


def pack_error(error: BaseException) -> Failure:
    """An exception as it travels. The errors of ours say all in their words and need no trace."""
    if isinstance(error, StrataError):
        words, trace = str(error), ""
    else:
        words = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps(error, PROTOCOL)
    except Exception:
        data = b""
    return words, trace, data


def unpack_error(words: str, trace: str, data: bytes) -> Exception:
    """The exception to raise here. What would end this process, as SystemExit, is not raised.

    Many can be written but not read: reading one calls its class with the words that it says.
    """
    try:
        found = Known(io.BytesIO(data)).load()
    except Exception:
        found = None
    error = found if isinstance(found, Exception) else StrataError(words)
    if trace:
        error.add_note(f"In the engine process:\n{trace}")
    return error


class Known(pickle.Unpickler):
    """Reads values of classes that are here already: an error must not import its library."""

    def find_class(self, module: str, name: str, /) -> Any:
        """See pickle.Unpickler."""
        if module not in sys.modules:
            raise pickle.UnpicklingError(f"{module} is not imported")
        return super().find_class(module, name)
