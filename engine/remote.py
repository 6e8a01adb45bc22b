"""The engine in another process: the interface of engine/engine.py over a pipe (engine/pipe.py).

If that process ends, only its current work is lost. `on_death` is then called with the reason, once
for each process. `restart` starts another process, in which no model is loaded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, get_origin

from engine.engine import Engine, State
from engine.errors import EngineDied
from engine.loaded import NoModel
from engine.pipe import Process
from engine.streams import Stream

P = ParamSpec("P")
R = TypeVar("R")


def forwarded(
    method: Callable[Concatenate[Any, P], R], needs_process: bool = True
) -> Callable[Concatenate["Remote", P], R]:
    """A method of Engine that runs in the other process, with the same type.

    The annotation of the result shows whether it is a stream. Without a process the method raises
    EngineDied, or does nothing if it does not need one.
    """
    name, result = method.__name__, cast("object", method.__annotations__["return"])
    streams = get_origin(result) is Stream

    def forward(self: "Remote", /, *args: P.args, **kwargs: P.kwargs) -> R:
        send = self.process.stream if streams else self.process.call
        try:
            return cast("R", send(name, *args, **kwargs))
        except EngineDied:
            if needs_process:
                raise
            return cast("R", None)

    return forward


class Remote:
    """The engine that `make` creates in another process, which starts at once. `make` is pickled by
    its name. engine/engine.py documents the methods."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self.loaded = State()
        self.watch: Callable[[State], None] = lambda state: None
        self.notify: Callable[[str, str], None] = lambda owner, notice: None
        self.on_death: Callable[[str], None] = lambda reason: None
        self.process = Process(partial(served, make), self.published, self.died)

    generate = forwarded(Engine.generate)
    load = forwarded(Engine.load)
    load_drafts = forwarded(Engine.load_drafts)
    unload_drafts = forwarded(Engine.unload_drafts)
    measure_costs = forwarded(Engine.measure_costs)
    profile = forwarded(Engine.profile)
    trials = forwarded(Engine.trials)
    check = forwarded(Engine.check)
    measure = forwarded(Engine.measure)
    counts = forwarded(Engine.counts)
    texts = forwarded(Engine.texts)
    pieces = forwarded(Engine.pieces)
    tokens = forwarded(Engine.tokens)
    need = forwarded(Engine.need)
    room = forwarded(Engine.room)
    # A new process reads the statistics when it loads a model, and has nothing to forget.
    read_statistics = forwarded(Engine.read_statistics, needs_process=False)
    forget = forwarded(Engine.forget, needs_process=False)

    @property
    def state(self) -> State:
        return self.loaded if self.process.alive else without_model(self.loaded)

    def published(self, value: State | tuple[str, str]) -> None:
        if isinstance(value, State):
            self.follow(value)
        else:
            self.notify(*value)

    def follow(self, state: State) -> None:
        self.loaded = state
        self.watch(state)

    def died(self, reason: str) -> None:
        self.follow(without_model(self.loaded))
        self.on_death(reason)

    def restart(self) -> None:
        """Start a new process; the old one is ended if it still runs."""
        self.follow(without_model(self.loaded))
        self.process.restart()

    def kill(self, reason: str) -> None:
        """End a process that does not react. Its current work raises EngineDied(reason)."""
        self.process.kill(reason)

    def close(self) -> None:
        self.process.close()


def without_model(state: State) -> State:
    return State(NoModel(state.info).info)


def served(make: Callable[[], Engine], publish: Callable[[Any], None]) -> Engine:
    """The engine in its process, with its states and notices published."""
    engine = make()
    engine.watch = publish
    engine.notify = lambda owner, notice: publish((owner, notice))
    publish(engine.state)
    return engine
