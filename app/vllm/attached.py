"""What drafts in vLLM's workers, as the command says it: plain values, as vLLM hands them on.

vLLM takes them as `additional_config` under one name. Every worker reads the same.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import SettingError
from engine.types import STATISTICS, TIERS

NAME = "strata"
"""Under which these values stand in the configuration, and that of the plug-in."""
FILE = "server.db"
"""In the data directory: what the server has learned."""
OFF = "off"
"""What a request says under NAME, in `vllm_xargs`, so that nothing is drafted for it."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The databases that draft, and what they are made from.

    `statistics` is a file, "" for none. What is learned is kept in `folder`, if there is one, under
    the name `model`. A forward over `rows` rows takes twice the time of the smallest; `drafted` is
    what any draft adds to a step, in those.
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
            said = repr(unknown[0]) if unknown else "no database"
            raise SettingError(f"{said} cannot draft. Choose from: {', '.join(TIERS)}.")
        if not self.rows > 0 or not self.drafted >= 0:
            raise SettingError(
                f"A step cannot take {self.drafted} for drafts, nor twice the time at {self.rows} "
                "rows. Give a positive number of rows."
            )

    def values(self) -> dict[str, Any]:
        """As JSON can hold them."""
        return asdict(self)

    @property
    def learned(self) -> Path | None:
        """Where what is learned is kept."""
        return Path(self.folder) / FILE if self.folder else None

    @property
    def table(self) -> Path | None:
        """The statistics, where these are to draft."""
        return Path(self.statistics) if self.statistics and STATISTICS in self.databases else None


def attached(additional: Mapping[str, Any] | None) -> Attached:
    """What vLLM's `additional_config` says; without a word all that needs no file."""
    values = dict((additional or {}).get(NAME) or {})
    if "databases" in values:
        values["databases"] = tuple(values["databases"])
    return Attached(**values)
