"""The settings of drafting in vLLM's workers, and the store of what a server has learned.

The settings are plain values. vLLM takes them as `additional_config` under one name, so every
worker reads the same. Past answers and calibration are kept from one start to the next: all workers
read them when they start, before any worker writes. Only one worker writes, on a thread that does
not delay the steps.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.drafting.calibration import Calibration
from engine.errors import SettingError
from engine.types import STATISTICS, TIERS, CalibrationRow, Gram
from storage.database import Database
from storage.drafting import CalibrationStore
from storage.ngrams import ModelNgrams

NAME = "strata"
"""The name of these values in vLLM's configuration, and of the plug-in."""
FILE = "server.db"
"""The database in the data directory with what the server has learned."""
OFF = "off"
"""The value under NAME in a request's `vllm_xargs` that switches drafting off for it."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The databases that draft, and their sources.

    `statistics` is a file, "" for none. What is learned is stored in `folder`, if it is given,
    under the name `model`. A forward over `rows` rows takes twice the time of the smallest one;
    `drafted` is the fixed cost of any draft in a step, in rows.
    """

    databases: tuple[str, ...] = TIERS
    statistics: str = ""
    folder: str = ""
    model: str = ""
    rows: float = 256.0
    drafted: float = 0.0

    def __post_init__(self) -> None:
        unknown = sorted({*self.databases} - {*TIERS})
        if unknown or not self.databases:
            name = repr(unknown[0]) if unknown else "no database"
            raise SettingError(f"{name} cannot draft. Choose from: {', '.join(TIERS)}.")
        if not self.rows > 0 or not self.drafted >= 0:
            raise SettingError(
                f"A step cannot take {self.drafted} for drafts, nor twice the time at {self.rows} "
                "rows. Give a positive number of rows."
            )

    def values(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def learned(self) -> Path | None:
        return Path(self.folder) / FILE if self.folder else None

    @property
    def table(self) -> Path | None:
        """The path of the statistics, if they draft."""
        return Path(self.statistics) if self.statistics and STATISTICS in self.databases else None


def attached(additional: Mapping[str, Any] | None) -> Attached:
    """The settings in vLLM's `additional_config`; by default, everything that needs no file."""
    values = dict((additional or {}).get(NAME) or {})
    return Attached(**values | {"databases": tuple(values.get("databases", TIERS))})


OWNER = "server"
"""All clients of a server share what it has learned."""
MOST = 400_000
"""The most n-grams to keep, from some thousand answers. The rest is dropped at the next start."""
EVERY = 8
"""After how many answers the calibration is stored again."""


class Learned:
    """The store of one worker. `writes` says whether this worker stores what is learned."""

    def __init__(self, attached: Attached, writes: bool) -> None:
        self.attached, self.path = attached, attached.learned
        self.writes = writes and self.path is not None
        self.answers = 0
        self.database: Database | None = None
        self.thread = ThreadPoolExecutor(1, "strata-learned") if self.writes else None

    def load(self) -> tuple[list[Gram], list[CalibrationRow]]:
        """The n-grams of past answers, and the calibration."""
        if self.path is None:
            return [], []
        with closing(Database(self.path)) as database:
            grams = ModelNgrams(database, OWNER, self.attached.model).load()
            return grams, CalibrationStore(database, OWNER, self.attached.model).load()

    def prepare(self) -> None:
        """Create the file and drop the n-grams beyond MOST, before the workers start."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(Database(self.path)) as database:
                ModelNgrams(database, OWNER, self.attached.model).prune(MOST)

    def keep(self, grams: Iterable[tuple[int, ...]], calibration: Calibration) -> None:
        """Store what an answer taught, on the store's own thread."""
        if self.thread is not None:
            rows = calibration.rows() if self.answers % EVERY == 0 else []
            self.answers += 1
            self.thread.submit(self.save, list(grams), rows)

    def save(self, grams: list[tuple[int, ...]], rows: list[CalibrationRow]) -> None:
        if self.database is None:
            self.database = Database(self.path)
        ModelNgrams(self.database, OWNER, self.attached.model).learn(grams)
        if rows:
            CalibrationStore(self.database, OWNER, self.attached.model).save(rows)
