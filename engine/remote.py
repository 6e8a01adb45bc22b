"""The engine in a process of its own: the door of engine/engine.py over a pipe (engine/pipe.py).

Whatever ends that process costs what was under way in it, and no more. `on_death` is told the
reason, once for each process; `restart` starts another one, in which no model is loaded.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from engine.engine import Engine, Event, Load, Loading, Request, Share, State
from engine.errors import EngineDied
from engine.hsd.profile import Profile
from engine.hsd.trials import Trial
from engine.loaded import NoModel
from engine.models.memory import Need
from engine.pipe import Process
from engine.prompt import Size
from engine.queue import Waiting
from engine.settings import Drafting, Runtime, Sampling
from engine.streams import Stream
from engine.types import Document, Message


class Remote:
    """The engine that `make` makes, in another process, which starts at once. `make` is pickled by
    its name. See engine/engine.py for what the methods do."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self.loaded = State()
        self.watch: Callable[[State], None] = lambda state: None
        self.on_death: Callable[[str], None] = lambda reason: None
        self.process = Process(partial(served, make), self.follow, self.died)

    @property
    def state(self) -> State:
        return self.loaded if self.process.alive else gone(self.loaded)

    def follow(self, state: State) -> None:
        """The engine has loaded something."""
        self.loaded = state
        self.watch(state)

    def died(self, reason: str) -> None:
        """The process is gone, and with it all that was loaded."""
        self.follow(gone(self.loaded))
        self.on_death(reason)

    def restart(self) -> None:
        """Start a fresh process; the old one ends if it still runs."""
        self.follow(gone(self.loaded))
        self.process.restart()

    def kill(self, reason: str) -> None:
        """End a process that does not react. What is under way raises EngineDied(reason)."""
        self.process.kill(reason)

    def close(self) -> None:
        self.process.close()

    def generate(self, request: Request) -> Stream[Event]:
        return self.process.stream("generate", request)

    def load(self, wanted: Load) -> Stream[Loading]:
        return self.process.stream("load", wanted)

    def load_drafts(self, wanted: Sequence[tuple[str, str]]) -> Stream[Loading]:
        return self.process.stream("load_drafts", wanted)

    def unload_drafts(self) -> Stream[Loading]:
        return self.process.stream("unload_drafts")

    def measure_costs(self) -> Stream[Loading]:
        return self.process.stream("measure_costs")

    def profile(
        self, sampling: Sampling, texts: Sequence[str], tokens: int
    ) -> Stream[Waiting | Share | Profile]:
        return self.process.stream("profile", sampling, texts, tokens)

    def trials(
        self,
        profile: Profile,
        sampling: Sampling,
        drafting: Drafting,
        chosen: str,
        texts: Sequence[str],
        tokens: int,
    ) -> Stream[Waiting | Share | list[Trial]]:
        given = profile, sampling, drafting, chosen, texts, tokens
        return self.process.stream("trials", *given)

    def check(self, text: str) -> None:
        self.process.call("check", text)

    def measure(self, messages: Sequence[Message]) -> Size:
        return cast("Size", self.process.call("measure", messages))

    def counts(self, texts: Sequence[str]) -> list[int]:
        return cast("list[int]", self.process.call("counts", texts))

    def check_turn(self, owner: str) -> None:
        self.process.call("check_turn", owner)

    def texts(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        return cast("list[str]", self.process.call("texts", tokens))

    def tokens(self, documents: Sequence[Document], tokenizer: str) -> list[list[int]]:
        return cast("list[list[int]]", self.process.call("tokens", documents, tokenizer))

    def read_statistics(self) -> None:
        with suppress(EngineDied):  # The next one looks for them when it loads the model.
            self.process.call("read_statistics")

    def need(self, source: str, runtime: Runtime) -> Need:
        return cast("Need", self.process.call("need", source, runtime))

    def device(self, source: str, runtime: Runtime) -> str:
        return str(self.process.call("device", source, runtime))

    def free(self, device: str) -> int:
        return int(self.process.call("free", device))

    def forget(self, owner: str, conversation: str | None = None, past: bool = False) -> None:
        with suppress(EngineDied):  # What is gone has forgotten everything.
            self.process.call("forget", owner, conversation, past)


def gone(state: State) -> State:
    """What is left of it when the process has ended."""
    return State(NoModel(state.info).info)


def served(make: Callable[[], Engine], publish: Callable[[Any], None]) -> Engine:
    """The engine in its process, with its states published."""
    engine = make()
    engine.watch = publish
    publish(engine.state)
    return engine
