"""What the user chose for an answer, as one value that a conversation can keep."""

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from engine.errors import SettingError
from engine.methods import USUAL, Method, method_named
from engine.settings import Drafting, Generation, Sampling, shortened

DEFAULT_TOKENS = 256
"""How long an answer may be unless something else is said."""
SEEDS = 2**31
"""Fresh seeds stay below this: a browser holds every such number exactly."""


@dataclass(frozen=True, slots=True)
class Preferences:
    """How to sample, how to draft, whether each answer gets a seed of its own, and whether it is
    checked in the background."""

    generation: Generation = Generation()
    method: str = USUAL.name
    drafting: Drafting = USUAL.drafting
    fresh_seed: bool = True
    check: bool = False

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
        """From stored JSON values, which may come from anywhere; raises SettingError for what is
        out of range, of another type or unknown."""
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise SettingError(
                    f"There is no setting named {shortened(name)}. The settings are: "
                    f"{', '.join(known)}."
                )
        generation = mapping_of(values, "generation")
        sampling = Sampling.from_mapping(mapping_of(generation, "sampling"))
        drafting = mapping_of(values, "drafting")
        if "budget" not in drafting:
            # Kept before budgets were measured: these limited what every machine drafts.
            drafting.pop("nodes", None)
            drafting.pop("threshold", None)
        method, fresh = values.get("method", cls().method), values.get("fresh_seed", True)
        check = values.get("check", False)
        if not isinstance(method, str) or not isinstance(fresh, bool):
            raise SettingError(
                f"The method {shortened(method)} with the fresh seed {shortened(fresh)} cannot be "
                "used. Give the name of a method, and true or false."
            )
        if not isinstance(check, bool):
            raise SettingError(
                f"Checking in the background cannot be {shortened(check)}. Give true or false."
            )
        found = cls(
            Generation.from_mapping({**generation, "sampling": sampling}),
            method,
            Drafting.from_mapping(drafting),
            fresh,
            check,
        )
        found.chosen()
        return found

    @classmethod
    def usable(cls, values: Mapping[str, Any]) -> tuple["Preferences", str]:
        """The same; where they cannot be used the usual preferences, and why, for a notice."""
        try:
            return cls.from_mapping(values), ""
        except SettingError as error:
            return cls(), str(error)


def mapping_of(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of the group of settings called `name`; empty where there is none."""
    group = values.get(name, {})
    if not isinstance(group, Mapping):
        raise SettingError(
            f"The settings {name!r} cannot be {shortened(group)}. Give names and values."
        )
    return dict(group)
