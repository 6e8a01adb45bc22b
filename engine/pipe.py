"""Runs an object in a separate process and calls it over one pipe.

If that process ends (a fault in a native library, too little memory, kill -9), this process keeps
running: every pending call and stream raises EngineDied, and `restart` starts a fresh process. No
caller is left waiting for a dead process. The two processes share only the pipe, no lock and no
queue, and each sees the pipe close as soon as the other has ended. Idle threads block.

A message is `(kind, number, body)`. The number identifies the call or stream that the message
belongs to; it is 0 for messages that belong to none. The body is pickled separately, so that a
value that cannot be read fails only one call.

    kind     body                  meaning
    ------   -------------------   ------------------------------------------------------------
    to the process
    call     name, args, kwargs    run this method of the object: `result` or `error` follows
    stream   name, args, kwargs    run one that returns a Stream: `items`, then `end` or `error`
    stop                           call Stream.stop() of that stream, also before it began
    close                          call Stream.close(): nobody reads its items any more
    quit                           close the object, if it has a method `close`, and end
    from the process
    result   value                 the value that the method returned
    error    Failure               the exception of the method or of the stream
    items    list of items         a batch (Stream.batches)
    end                            the stream has ended
    state    value                 the object called publish(value)

Messages keep their order: a state that was published before an item was put arrives before it.
Calls do not wait for each other: a pool of threads runs them, and every stream has its own thread
that opens and forwards it.

    in the app                                in the process
    caller -> Link: writer  --- pipe -->  Server: reader -> pool that runs calls
    caller <- Link: reader  <-- pipe ---  pool, threads of streams, publish
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
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from threading import Event, Lock, Thread
from types import FrameType
from typing import Any, Literal

from engine.errors import EngineDied, StrataError, first_line
from engine.process import LARGE, death, give_back_freed
from engine.streams import Stream

Kind = Literal[
    "call", "stream", "stop", "close", "quit", "result", "error", "items", "end", "state"
]
"""The kinds of messages; the table above explains them."""
Failure = tuple[str, str, bytes]
"""An exception in transit: its text, where it was raised, and itself. The last two may be empty."""
Make = Callable[..., object]
"""Creates the object in the other process. The function is pickled by its name and called with the
keyword `publish`, a function that sends a value to `on_state`."""

PROTOCOL = 5
CALLS = 16
"""Calls that run at once; further ones wait until one of them ends."""
GRACE = 2.0
"""Seconds that a process has to end by itself before it is killed."""
FAREWELL = 15.0
"""Seconds that the app has to end after a SIGTERM to the process; it ends by that signal then."""
SPAWN = multiprocessing.get_context("spawn")
CHILDREN = Lock()
"""Held while a process is started, killed or reaped. Starting a process also reaps others that have
ended, and the id of a reaped process may already belong to another one."""


class Process:
    """The object that `make` creates in a separate process, which starts at once.

    `on_state(value)` is called for each published value. It must be quick and must not use this
    object, because nothing else is received in the meantime. `on_death(reason)` is called once for
    each process that ended unexpectedly, after all pending calls and streams have raised
    EngineDied. Calls of it never overlap; it may take long, and may call `restart`.
    """

    def __init__(
        self,
        make: Make,
        on_state: Callable[[Any], None] = lambda value: None,
        on_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._make, self._on_state, self._on_death = make, on_state, on_death
        self._closed = False
        self._starting, self._notifying = Lock(), Lock()
        self._link = Link(make, on_state, self._on_end)

    @property
    def pid(self) -> int:
        """The id of the process, even if it has ended."""
        return self._link.pid

    @property
    def alive(self) -> bool:
        """Whether the process exists. It may be starting, or hang."""
        return self._link.died is None

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the object. Raises what it raises, or EngineDied.

        An exception that cannot be pickled, or whose module is not imported here, is raised as a
        StrataError with its type and its text: no library is loaded for it.
        """
        return self._link.call(name, args, kwargs)

    def stream(self, name: str, /, *args: Any, **kwargs: Any) -> Stream[Any]:
        """Call a method that returns a Stream. Raises EngineDied without a process.

        Items arrive in the batches that the process sent. An exception of the method is raised at
        the end.
        """
        return self._link.stream(name, args, kwargs)

    def restart(self) -> None:
        """Start a fresh process. An old one that still runs is killed, without calling
        `on_death`."""
        with self._starting:
            if self._closed:
                raise EngineDied("The engine was closed.")
            self._link.leave("The engine was restarted. Please try again.")
            self._link = Link(self._make, self._on_state, self._on_end)

    def kill(self, reason: str) -> None:
        """End a process that hangs. Pending calls and streams in it end with EngineDied(reason)."""
        self._link.kill(reason)

    def close(self) -> None:
        """End the process, by force if it does not end by itself. It cannot be restarted."""
        with self._starting:
            self._closed = True
            self._link.leave("The engine was closed.", GRACE)

    def _on_end(self, reason: str) -> None:
        with self._notifying:
            if not self._closed:
                self._on_death(reason)


class Link:
    """The app's end of the pipe to one process, with the pending calls and streams.

    A separate thread writes, so a caller of Stop never waits for a full pipe, and Ctrl-C in the
    main thread cannot cut a message in two.
    """

    def __init__(
        self, make: Make, on_state: Callable[[Any], None], on_death: Callable[[str], None]
    ) -> None:
        self._on_state, self._on_death = on_state, on_death
        self.died: str | None = None
        """The reason why the process ended, once it has: calls are then refused."""
        self.ended = Event()
        """Set once the process is reaped and its pipe closed."""
        self._reason = ""
        """The reason if the app ended the process."""
        self._leaving = self._reaped = False
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
        number = next(self._numbers)
        message, stream = pack("stream", number, (name, args, kwargs)), Incoming(self, number)
        with self._lock:
            self._check()
            self._streams[number] = stream
        self._outgoing.put(message)
        return stream

    def send(self, kind: Kind, number: int = 0, value: object = None) -> None:
        self._outgoing.put(pack(kind, number, value))

    def forget(self, number: int) -> None:
        if self._streams.pop(number, None) is not None:
            self.send("close", number)

    def kill(self, reason: str) -> None:
        self._reason = self._reason or reason
        with CHILDREN:
            if not self._reaped:
                self._process.kill()

    def leave(self, reason: str, grace: float = 0.0) -> None:
        """End the process without calling `on_death`; it has `grace` seconds to end by itself.

        Returns once the process and its pipe are gone.
        """
        with self._lock:
            self._leaving = self.died is None
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
            # This process cannot create the value: for example, its class is unknown here.
            stream.end(error)
            self.forget(number)

    def _end(self) -> None:
        """After the pipe was closed: reap the process, end what is pending, and close
        everything."""
        wait([self._process.sentinel], GRACE)
        reason = self._reap()
        with self._lock:
            self.died, leaving = reason, self._leaving
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
        if not leaving:
            self._on_death(reason)

    def _reap(self) -> str:
        """Reap the process, killing it if it lingers. Returns the reason why it ended."""
        with CHILDREN:
            self._process.kill()
            self._process.join()
            status, self._reaped = self._process.exitcode or 0, True
            with suppress(ValueError):  # Another thread has reaped it: its status is unknown.
                self._process.close()
        return self._reason or death(status)


RUNNING: set[Link] = set()


@atexit.register
def end_all() -> None:
    """No process outlives the app, and the interpreter does not wait for one that hangs."""
    for link in [*RUNNING]:
        link.leave("The app ended.")


class Incoming(Stream[Any]):
    """The app's end of a stream. The items of one message stay one batch."""

    def __init__(self, link: Link, number: int) -> None:
        super().__init__(pace=0.0, on_stop=partial(link.send, "stop", number))
        self._forget = partial(link.forget, number)

    def close(self) -> None:
        super().close()
        self._forget()


class Server:
    """The other end of the pipe: the object, and the calls that run in its process.

    The main thread creates the object, because some libraries must be imported there. Earlier calls
    wait for it. If creating it fails, each of them raises that error.
    """

    def __init__(self, pipe: Connection, make: Make) -> None:
        self._pipe, self._make = pipe, make
        self._sending = Lock()
        self._object: Future[Any] = Future()
        self._streams: dict[int, Future[Stream[Any]]] = {}
        """Streams by number. A `stop` or `close` that arrives before the stream is open waits in
        its future."""
        self._pool = ThreadPoolExecutor(CALLS, "call")

    def run(self) -> None:
        reader = Thread(target=self._read, name="reader")
        reader.start()
        try:
            self._object.set_result(self._make(publish=self.publish))
        except BaseException as error:
            self._object.set_exception(error)
        reader.join()

    def publish(self, value: object) -> None:
        self._send(pack("state", 0, value))

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
                self._open(number, body)
            case "stop":
                self._once_open(number, lambda stream: stream.stop())
            case "close":
                self._once_open(number, lambda stream: stream.close())
            case "quit":
                Thread(target=self._quit).start()

    def _once_open(self, number: int, action: Callable[[Stream[Any]], None]) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.add_done_callback(lambda done: action(done.result()))

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
        """Open a stream on the thread that forwards it, so that a full pool of calls does not delay
        it. If no thread can be started, no stream was opened that would have to be closed."""
        self._streams[number] = Future()
        try:
            # In a list, so that a long body is freed as soon as it was read.
            args = number, [body]
            Thread(target=self._stream, args=args, name=f"stream-{number}").start()
        except RuntimeError as error:
            del self._streams[number]
            self._send(pack("error", number, pack_error(error)))

    def _stream(self, number: int, bodies: list[bytes]) -> None:
        large = len(bodies[0]) > LARGE
        stream: Any = None
        try:
            stream = self._run(bodies.pop())
            if not isinstance(stream, Stream):
                raise TypeError(f"this returns no Stream but a {type(stream).__name__}")
            self._streams[number].set_result(stream)
            for batch in stream.batches():
                self._send(pack("items", number, batch))
            message = pack("end", number)
        except BaseException as error:
            message = pack("error", number, pack_error(error))
        del self._streams[number]
        self._send(message)
        if large:
            stream = None
            give_back_freed()

    def _send(self, message: bytes) -> None:
        with self._sending, suppress(OSError):  # Without an app, _read ends this process.
            self._pipe.send_bytes(message)

    def _quit(self) -> None:
        try:
            if self._object.done() and not self._object.exception():
                getattr(self._object.result(), "close", lambda: None)()
        except BaseException:
            traceback.print_exc()
        os._exit(0)


def start(make: Make) -> tuple[SpawnProcess, Connection]:
    """A process that serves the object of `make`, and our end of the only pipe to it.

    Raises EngineDied if the system cannot start one.
    """
    ours, theirs = SPAWN.Pipe()
    # A daemon in the sense of multiprocessing: ended with the app in any case.
    process = SPAWN.Process(target=serve, args=(theirs, make), name="engine", daemon=True)
    try:
        with CHILDREN, signals_held_back():
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
        # The only copy left is that of the process, so the pipe closes when the process ends.
        theirs.close()
    return process, ours


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Start processes in this block with SIGINT and SIGTERM blocked, until `serve` handles them:
    both are sent to all processes of a terminal or of a service, but the app decides what ends."""
    if sys.platform == "win32":
        yield
        return
    # Starting a process also starts this tracker, which unblocks all signals; so start it first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_app(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM. If the app got it as well, it ends, and this process with it. If the app is
    still there after FAREWELL seconds, only this process was meant."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, terminate)
    signal.setitimer(signal.ITIMER_REAL, FAREWELL)


def terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


def serve(pipe: Connection, make: Make) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.signal(signal.SIGTERM, await_app)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        # A child process of a native library must not keep the pipe open after this one ends.
        os.set_inheritable(pipe.fileno(), False)
    if sys.stderr is not None:
        # Standard output belongs to the app: this process and its libraries write to the log.
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        faulthandler.enable()
    # Otherwise a crash of llama.cpp starts a debugger and waits for it.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    Server(pipe, make).run()


def messages(pipe: Connection) -> Iterator[tuple[Kind, int, bytes]]:
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        yield pickle.loads(message)


def pack(kind: Kind, number: int = 0, value: object = None) -> bytes:
    """Encode a message. Raises the exceptions of pickle for a value that cannot be pickled."""
    return pickle.dumps((kind, number, pickle.dumps(value, PROTOCOL)), PROTOCOL)


def pack_error(error: BaseException) -> Failure:
    """An exception in transit. The text of our own errors is complete without a traceback."""
    if isinstance(error, StrataError):
        text, trace = str(error), ""
    else:
        text = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
    data = b""
    with suppress(Exception):
        data = pickle.dumps(error, PROTOCOL)
    return text, trace, data


def unpack_error(text: str, trace: str, data: bytes) -> Exception:
    """The exception to raise here. One that would end this process, such as SystemExit, is
    replaced.

    Some exceptions can be pickled but not unpickled, because unpickling calls the class with the
    text of the exception.
    """
    try:
        found = OwnUnpickler(io.BytesIO(data)).load()
    except Exception:
        found = None
    error = found if isinstance(found, Exception) else StrataError(text)
    if trace:
        error.add_note(f"In the engine process:\n{trace}")
    return error


class OwnUnpickler(pickle.Unpickler):
    """Unpickles only classes whose modules are already imported: an error must not import its
    library."""

    def find_class(self, module: str, name: str, /) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(f"{module} is not imported")
        return super().find_class(module, name)
