"""The engine in another process: the interface of engine/engine.py over a pipe (engine/pipe.py).

If that process ends, only its current work is lost. `on_death` is then called with the reason, once
for each process. `restart` starts another process, in which no model is loaded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, get_origin

from engine.engine import Engine, State
from engine.errors import EngineDied
from engine.loaded import NoModel
from engine.pipe import Process
from engine.streams import Stream

UNNEEDED = ("read_statistics", "forget")
"""Methods that do nothing without a process: a new one reads the statistics when it loads a model,
and has nothing to forget."""


class Remote:
    """The engine that `make` creates in another process, which starts at once. `make` is pickled by
    its name. All methods of Engine run in that process."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self.loaded = State()
        self.watch: Callable[[State], None] = lambda state: None
        self.notify: Callable[[str, str], None] = lambda owner, notice: None
        self.on_death: Callable[[str], None] = lambda reason: None
        self.process = Process(partial(served, make), self.published, self.died)

    def __getattr__(self, name: str) -> Any:
        """A method of Engine. The annotation of its result shows whether it is a stream. Without a
        process it raises EngineDied, unless it is not needed then."""
        if name.startswith("_") or name not in vars(Engine):
            raise AttributeError(name)
        streams = get_origin(vars(Engine)[name].__annotations__["return"]) is Stream
        send = self.process.stream if streams else self.process.call

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return send(name, *args, **kwargs)
            except EngineDied:
                if name not in UNNEEDED:
                    raise

        return forward

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
        self.follow(without_model(self.loaded))
        self.process.restart()

    def kill(self, reason: str) -> None:
        self.process.kill(reason)

    def close(self) -> None:
        self.process.close()


def without_model(state: State) -> State:
    return State(NoModel(state.info).info)


def served(make: Callable[[], Engine], publish: Callable[[Any], None]) -> Engine:
    engine = make()
    engine.watch = publish
    engine.notify = lambda owner, notice: publish((owner, notice))
    publish(engine.state)
    return engine
