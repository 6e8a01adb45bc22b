"""One forward over the rows of several sequences of a model, for more answers per second.

Reading the weights takes most of the time of a forward over few rows, so the rows of further
sequences cost little. Norms, products and gates get the rows of all sequences behind each other.
Only the cache and attention know which rows belong together: `JointCache` gives the keys and values
of each sequence to its own cache, and returns them apart, and attention (folded_attention.py) goes
over one sequence after the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from engine.backends.caches import TreeCache, TreeLayer


class Apart(list[torch.Tensor]):
    """Keys or values of several sequences, each of shape (1, heads, tokens, size). The last `rows`
    tokens of each are in this forward."""

    def __init__(self, states: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        super().__init__(states)
        self.rows = rows


class JointLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of several caches, which take so many rows each."""

    def __init__(self, layers: Sequence[TreeLayer], counts: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers, self.counts = layers, list(counts)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the caches begin by themselves."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        parts = (torch.split(states, self.counts, dim=2) for states in (key_states, value_states))
        found = [layer.update(*new) for layer, *new in zip(self.layers, *parts, strict=True)]
        keys, values = zip(*found, strict=True)
        return Apart(keys, self.counts), Apart(values, self.counts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max(layer.get_seq_length() for layer in self.layers)

    def get_max_length(self) -> int:
        return min(layer.get_max_length() for layer in self.layers)


class JointCache(Cache):
    """The caches of several sequences in one forward, in which they get so many rows each."""

    def __init__(self, caches: Sequence[TreeCache], counts: Sequence[int]) -> None:
        rows = zip(*(cache.tree_layers for cache in caches), strict=True)
        super().__init__(layers=[JointLayer(layers, counts) for layers in rows])


def joint_mask(masks: Sequence[Any]) -> Any:
    """The masks of several sequences, each of shape (1, 1, rows, tokens), below each other; the
    shorter ones are continued. If they are given by kind of layer, so is the result."""
    if isinstance(masks[0], dict):
        return {kind: joint_mask([each[kind] for each in masks]) for kind in masks[0]}
    tokens = max(mask.shape[3] for mask in masks)
    padded = [torch.nn.functional.pad(mask, (0, tokens - mask.shape[3])) for mask in masks]
    return torch.cat(padded, dim=2)
