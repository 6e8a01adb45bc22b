"""Suffix decoding: the drafter around a cache that stands in for the package's."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench import replay
from engine.drafting.budget import Budget
from engine.settings import Drafting
from engine.tree import Tree


class Cache:
    """Proposes always the same tree, and writes down what it is told."""

    tree = ([7, 8, 9, 7], [-1, 0, 1, -1])

    def __init__(self, max_tree_depth: int) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start_request(self, request: int, prompt: list[int]) -> None:
        self.calls.append(("start", request, prompt))

    def add_active_response(self, request: int, tokens: list[int]) -> None:
        self.calls.append(("add", request, tokens))

    def stop_request(self, request: int) -> None:
        self.calls.append(("stop", request))

    def speculate(self, request: int, context: list[int], **options: Any) -> SimpleNamespace:
        self.calls.append(("speculate", request, context, options["max_spec_tokens"]))
        return SimpleNamespace(token_ids=self.tree[0], parents=self.tree[1])


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> replay.SuffixDrafter:
    """A drafter over the stand-in."""
    module: Any = ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = Cache
    monkeypatch.setitem(sys.modules, "arctic_inference", ModuleType("arctic_inference"))
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)
    return replay.SuffixDrafter()


def budget(depth: int) -> Budget:
    return Budget(Drafting(nodes=16, budget="fixed"), depth, 100)


def test_its_tree_becomes_ours_and_equal_paths_one_node(drafter: replay.SuffixDrafter) -> None:
    tree = Tree(1)
    drafter.grow(tree, [5, 1], budget(8))
    assert [tree.path(row) for row in range(1, len(tree) + 1)] == [(7,), (7, 8), (7, 8, 9)]
    assert drafter.cache.calls == [("speculate", 0, [5, 1], 16)]


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_is_drafted_deeper_than_the_answer_may_go(
    drafter: replay.SuffixDrafter, depth: int
) -> None:
    tree = Tree(1)
    drafter.grow(tree, [5, 1], budget(depth))
    assert max(tree.depths) == depth


def test_a_prompt_opens_a_request_and_the_end_of_the_answer_closes_it(
    drafter: replay.SuffixDrafter,
) -> None:
    drafter.observe([1, 2], 2)
    drafter.observe([1, 2, 3], 1)
    drafter.finish([1, 2, 3], 1)
    drafter.observe([4], 1)
    assert drafter.cache.calls == [
        ("start", 1, [1, 2]),
        ("add", 1, [3]),
        ("stop", 1),
        ("start", 2, [4]),
    ]
