"""Models that an OpenAI-compatible server runs: their source is its address.

Nothing of them is on this machine, so nothing is downloaded and no memory is needed. No address is
contacted before a model is loaded.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.backends.base import Backend, Tokenizer
from engine.errors import ModelError
from engine.models.format import ModelFormat
from engine.models.memory import Need
from engine.servers.address import KIND, is_address, parsed
from engine.settings import Runtime

if TYPE_CHECKING:
    from engine.models.hub import Store


class Server(ModelFormat):
    """See engine/models/format.py."""

    kind = KIND
    ending = ""
    settings: tuple[str, ...] = ()
    sized_on_hub = False
    always_sized = True
    float32_on_cpu = False
    elsewhere = True

    def recognises(self, source: str) -> bool:
        return is_address(source)

    def check_library(self, source: str) -> None:
        """Its library is always there."""

    def name(self, source: str) -> str:
        try:
            address = parsed(source)
        except ModelError:
            return source
        return address.model or address.host

    def located(self, source: str) -> str | None:
        return source

    def weight_files(self, path: Path) -> Sequence[Path]:
        return ()

    def find(self, folder: str, names: Sequence[str]) -> Iterator[str]:
        return iter(())

    def repository(self, source: str) -> str:
        return source

    def hub_files(self, source: str, store: "Store", files: Collection[str]) -> Sequence[str]:
        return ()

    def on_hub(self, source: str) -> bool:
        return False

    def belongs(self, source: str, name: str) -> bool:
        return False

    def files(self, path: Path) -> Sequence[Path]:
        return ()

    def check_files(self, source: str, names: Collection[str], config: str) -> None:
        """There are none."""

    def load(self, source: str, runtime: Runtime) -> Backend:
        from engine.servers.served import ServedModel

        return ServedModel(parsed(source))

    def tokenizer(self, source: str, progress: Callable[[int, int], None]) -> Tokenizer:
        raise ModelError(
            f"The tokenizer of {source!r} is on a server, where it cannot be read. Name a folder, "
            "a file or a hub id that holds the same one."
        )

    def need(self, source: str, runtime: Runtime) -> Need:
        parsed(source)
        return Need(0, 0, 0)

    def device(self, runtime: Runtime) -> str:
        return "cpu"
