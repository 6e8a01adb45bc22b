"""Rotary embeddings whose factors depend on how long a text is.

Most models turn a key by its position alone. With "longrope" (Phi-3 and Phi-4 of 128k) a text that
is longer than the model was first trained for has other factors, at all of its positions. The
library goes by the largest position of one forward. So a text must be read with its length known,
a cache serves texts of one side of the switch only, and no forward may reach across it.

"dynamic" factors change with every token beyond `max_position_embeddings`. They need nothing here:
that is the longest context a model is loaded with.
"""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Rotary:
    """The rotary embeddings of one model that depend on the length, mostly none.

    `switches` are the lengths beyond which a text has other factors, the smallest first.
    """

    def __init__(self, model: Any) -> None:
        self.modules: list[torch.nn.Module] = []
        found: set[int] = set()
        for module in model.modules():
            lengths = switches_of(module)
            self.modules += [module] if lengths else []
            found |= lengths
        self.switches = sorted(found)

    def regime(self, length: int) -> int:
        """Which factors a text of that length has: 0 for the first ones."""
        return bisect_left(self.switches, length)

    def switch(self, length: int) -> int | None:
        """The longest text with the factors of this one; None where longer ones have no others."""
        at = self.regime(length)
        return self.switches[at] if at < len(self.switches) else None

    @contextmanager
    def reading(self, length: int) -> Iterator[None]:
        """While it is entered, every forward is of a part of a text of that length."""

        def lengthen(
            module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if "position_ids" in named:
                return given, {**named, "position_ids": with_last(named["position_ids"], length)}
            states, positions, *rest = given
            return (states, with_last(positions, length), *rest), named

        hooks = [
            hook
            for module in self.modules
            for hook in (
                module.register_forward_pre_hook(lengthen, with_kwargs=True),
                module.register_forward_hook(without_last),
            )
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def switches_of(module: torch.nn.Module) -> set[int]:
    """The lengths at which the factors of one module change; none for most kinds of module."""
    kinds = getattr(module, "rope_type", None)
    if not isinstance(kinds, dict):
        kinds = {None: kinds}
    found = set()
    for layer, kind in kinds.items():
        if kind == "longrope":
            config: Any = module.config
            own = config.rope_parameters if layer is None else config.rope_parameters[layer]
            found.add(int(own["original_max_position_embeddings"]))
    return found


def with_last(positions: torch.Tensor, length: int) -> torch.Tensor:
    """The positions, shape (..., tokens), and behind them the last one of a text."""
    last = positions.new_full((*positions.shape[:-1], 1), length - 1)
    return torch.cat([positions, last], dim=-1)


def without_last(module: torch.nn.Module, given: Any, angles: Any) -> Any:
    """What a module says of all positions but the last; shapes (..., tokens, size)."""
    if isinstance(angles, tuple):
        return tuple(each[..., :-1, :] for each in angles)
    return angles[..., :-1, :]
