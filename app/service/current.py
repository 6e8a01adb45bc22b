"""The model in use, or the first one that is to come: what it is called, and what its tokens say.

What is known of a model goes when it goes. So `follow` is called with every new state of the
engine.
"""

from collections.abc import Sequence
from pathlib import Path

from engine.backends.base import BackendInfo
from engine.engine import Engine, State
from engine.loaded import NO_MODEL_INFO, NoModel
from storage.statistics import StatisticsTable, open_table


class Current:
    """See the module's docstring. `plain` is how fast plain decoding was when it was last measured.

    `folders` are where statistics files lie, one per tokenizer; `coming` is what is known of the
    first model before it is there.
    """

    def __init__(
        self, engine: Engine, folders: Sequence[Path] = (), coming: BackendInfo = NO_MODEL_INFO
    ) -> None:
        self.engine, self.folders, self.coming = engine, folders, NoModel(coming).info
        self.state = engine.state
        self.plain = self.state.plain
        self.table: tuple[str, StatisticsTable | None] | None = None

    def follow(self, state: State) -> None:
        """Another model is there, or other draft models are."""
        if state.plain != self.state.plain:
            self.plain = state.plain
        self.table = None
        self.state = state

    @property
    def info(self) -> BackendInfo:
        """The loaded model, or the first one that is to come."""
        state = self.engine.state
        return state.info if state.there or state.info.fingerprint else self.coming

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens of the loaded model."""
        return self.engine.texts([tokens])[0]

    def look_again(self) -> None:
        """There may be other statistics now."""
        self.table = None

    @property
    def statistics(self) -> StatisticsTable | None:
        """The statistics for the loaded model's tokenizer, to look into."""
        tokenizer = self.info.tokenizer_fingerprint
        if self.table is None or self.table[0] != tokenizer:
            self.table = tokenizer, open_table(self.folders, tokenizer, lambda problem: None)
        return self.table[1]
