"""What the user chose for an answer, as one value that a conversation can keep."""

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.methods import METHODS, Method, method_named
from engine.settings import Drafting, Generation, Sampling

SEEDS = 2**31
"""Fresh seeds stay below this: a browser holds every such number exactly."""


@dataclass(frozen=True, slots=True)
class Preferences:
    """How to sample, how to draft, and whether each answer gets a seed of its own."""

    generation: Generation = Generation()
    method: str = "hd"
    drafting: Drafting = METHODS["hd"].drafting
    fresh_seed: bool = True

    def chosen(self) -> Method:
        """The method with its budget; raises SettingError for an unknown one."""
        return method_named(self.method, self.drafting)

    def with_method(self, method: str) -> "Preferences":
        """The same with another method."""
        return replace(self, method=method)

    def seeded(self) -> Generation:
        """The generation settings of the next answer, with its own seed if so chosen."""
        if not self.fresh_seed:
            return self.generation
        sampling = replace(self.generation.sampling, seed=secrets.randbelow(SEEDS))
        return replace(self.generation, sampling=sampling)

    def mapping(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Preferences":
        """From stored JSON values; raises SettingError for what is out of range or unknown."""
        generation = dict(values.get("generation") or {})
        generation["sampling"] = Sampling.from_mapping(generation.get("sampling") or {})
        generation["stop"] = tuple(generation.get("stop") or ())
        drafting = dict(values.get("drafting") or {})
        if "budget" not in drafting:
            # Kept before budgets were measured: these limited what every machine drafts.
            drafting.pop("nodes", None)
            drafting.pop("threshold", None)
        if "tiers" in drafting:
            drafting["tiers"] = tuple(drafting["tiers"])
        return cls(
            Generation.from_mapping(generation),
            str(values.get("method", "hd")),
            Drafting.from_mapping(drafting),
            bool(values.get("fresh_seed", True)),
        )
