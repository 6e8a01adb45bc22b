"""Suffix decoding as a drafter: arctic-inference's cache, where that package is installed.

The peer that is nearest in kind (arXiv 2411.04975): suffix trees over the prompt and over past
answers, the longest match speaks, its tree grows by counted frequencies. Not a requirement of the
project: `pip install --no-deps arctic-inference` compiles it in a few minutes.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from engine.drafting.budget import Budget
from engine.tree import Tree
from engine.types import Work

PACKAGE = "arctic_inference"
DEPTH = 64
FACTOR = 16.0
"""Nodes per matched token, at most. The package's own default of 1 drafts less and accepts less."""


def installed() -> bool:
    """Whether the package can be imported."""
    return find_spec(PACKAGE) is not None


class SuffixDrafter:
    """Drafts from the suffix trees of one request and of all answers before it."""

    name = "suffix"

    def __init__(self) -> None:
        module: Any = import_module(f"{PACKAGE}.suffix_decoding")
        self.cache = module.SuffixDecodingCache(max_tree_depth=DEPTH)
        self.requests = 0

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """A prompt opens a request; decided tokens are added to it."""
        if new == len(tokens):
            self.requests += 1
            self.cache.start_request(self.requests, list(tokens))
        else:
            self.cache.add_active_response(self.requests, list(tokens[len(tokens) - new :]))

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """The request is over; the cache keeps its answer."""
        self.cache.stop_request(self.requests)

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """What the cache proposes for the last tokens, as a tree."""
        draft = self.cache.speculate(
            self.requests,
            list(tokens[-DEPTH:]),
            max_spec_tokens=budget.nodes,
            max_spec_factor=FACTOR,
            min_token_prob=0.0,
            use_tree_spec=True,
        )
        rows: list[int] = []
        for token, parent in zip(draft.token_ids, draft.parents, strict=True):
            above = rows[parent] if parent >= 0 else 0
            deep = above < 0 or tree.depths[above] >= budget.depth
            rows.append(-1 if deep else tree.add(above, token, self.name))
        return {}
