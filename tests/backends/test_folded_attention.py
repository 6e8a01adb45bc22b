"""Folded attention: the library's results for every form of a call, and no copy of the cache."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from engine.backends import folded_attention
from engine.backends.folded_attention import FOLDED, LIBRARY, attend, unfolded
from engine.decode import never
from engine.tree import Tree
from tests.support.backends import GREEDY, KINDS, load, prompt_of, save_model

pytestmark = pytest.mark.model
HEADS = ((4, 2), (6, 2), (5, 1), (9, 3), (4, 4))
"""Query heads and key heads."""


def call(
    heads: int,
    shared: int,
    rows: int,
    cached: int,
    masked: str,
    batch: int = 1,
    dtype: str = "float32",
    device: str = "cpu",
    mask_heads: int = 1,
) -> tuple[Any, ...]:
    """Arguments of an attention function; `masked` is the form of the mask, "" for none."""
    torch.manual_seed(heads + 31 * rows + cached)
    kind, tokens = getattr(torch, dtype), cached + rows
    query = torch.randn(batch, rows, heads, 8, dtype=kind).transpose(1, 2)
    key, value = (torch.randn(batch, shared, tokens, 8, dtype=kind) for _ in range(2))
    mask: Any = None
    if masked:
        seen = torch.rand(batch, mask_heads, rows, tokens) > 0.3
        seen[..., 0] = True
        mask = seen
        if masked == "added":
            mask = torch.zeros(seen.shape, dtype=kind).masked_fill(~seen, torch.finfo(kind).min)
    module = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True)
    return module, *(each.to(device) for each in (query, key, value)), mask


def both(arguments: Sequence[Any], **others: Any) -> tuple[Any, Any]:
    """What the library's attention makes of a call, and what this one makes of it."""
    return sdpa_attention_forward(*arguments, **others)[0], attend(*arguments, **others)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masked", ["added", "seen"])
@pytest.mark.parametrize(("heads", "shared"), HEADS)
def test_any_groups_give_what_the_library_gives(
    heads: int, shared: int, masked: str, dtype: str
) -> None:
    """Plain steps, trees and prompts, also several sequences at a time, and long caches."""
    for rows, cached, batch in ((1, 0, 1), (1, 30, 2), (8, 700, 3), (32, 2000, 1), (200, 300, 1)):
        arguments = call(heads, shared, rows, cached, masked, batch, dtype)
        library, folded = both(arguments, scaling=0.3)
        assert folded.shape == library.shape and folded.is_contiguous()
        allowed = 1e-5 if dtype == "float32" else 0.02
        assert float((library - folded).abs().max()) < allowed, (rows, cached, batch)


def test_a_plain_step_without_a_mask_sees_all() -> None:
    library, folded = both(call(6, 2, 1, 50, ""))
    assert float((library - folded).abs().max()) < 1e-6


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a prompt without a mask": ({"rows": 9, "cached": 0, "masked": ""}, {"is_causal": True}),
    "masks of their own for heads": ({"mask_heads": 6}, {}),
    "dropout": ({}, {"dropout": 0.1}),
    "a bias of positions": ({}, {"position_bias": True}),
    "another device": ({"device": "meta"}, {}),
    "heads that are not grouped": ({"shared": 6}, {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_the_fold_does_not_know_is_left_to_the_library(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, others = FORMS[form]
    arguments = call(
        **{"heads": 6, "shared": 2, "rows": 4, "cached": 5, "masked": "added", **changes}
    )
    if "position_bias" in others:
        others = {"position_bias": torch.randn(1, 6, 4, 9)}
    asked = []

    def library(*given: Any, **named: Any) -> tuple[Any, None]:
        asked.append((given, named))
        return given[1], None

    monkeypatch.setattr(folded_attention, "sdpa_attention_forward", library)
    result = folded_attention.attend(*arguments, **others)
    assert len(asked) == 1 and result == (arguments[1], None)
    given, named = asked[0]
    assert all(one is other for one, other in zip(given, arguments, strict=True))
    assert all(named[name] is value for name, value in others.items())


def test_a_soft_cap_is_refused_as_the_library_refuses_it() -> None:
    with pytest.raises(ValueError, match="softcap"):
        attend(*call(4, 2, 3, 3, "added"), softcap=30.0)


def largest_made(backend: Any, nodes: int) -> int:
    """The numbers in the largest tensor that a forward over a tree makes anew."""
    sizes = [0]

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            made = func(*args, **(kwargs or {}))
            known = {place(each) for each in args if isinstance(each, torch.Tensor)}
            if isinstance(made, torch.Tensor) and place(made) not in known:
                sizes.append(made.numel())
            return made

    def place(tensor: Any) -> int:
        return int(tensor.untyped_storage().data_ptr())

    prompt = backend.cached
    tree = Tree(5)
    for node in range(nodes):
        tree.add(node // 2, node % 100, "check")
    assert len(prompt) > 1000
    with Counting():
        backend.score(tree, GREEDY)
    backend.accept([])
    return max(sizes)


@pytest.mark.parametrize("nodes", [0, 1, 7, 31])
def test_the_cache_is_not_copied(nodes: int, tmp_path: Path) -> None:
    """Behind a long text nothing as large as a layer's keys is made, in plain steps and in trees.

    The library repeats keys and values for each tree, which shows that the count can fail.
    """
    sizes = {"vocab_size": 160, "max_position_embeddings": 2048, "hidden_size": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    backend = load(save_model("llama-gqa", tmp_path, **sizes, **heads))
    assert backend.model.config._attn_implementation == FOLDED
    backend.prefill(prompt_of(1501, 160), never)
    keys = 1500 * 4 * 64
    assert largest_made(backend, nodes) < keys
    with unfolded(backend.model):
        assert nodes == 0 or largest_made(backend, nodes) >= 4 * keys


GROUPED = ["llama-gqa", "qwen3", "mistral-window", "gemma3-mixed", "qwen3-next"]


@pytest.mark.parametrize("kind", [*KINDS, "qwen3-next"])
def test_logits_are_those_of_the_librarys_attention(kind: str, subjects: Any) -> None:
    """Of plain steps and trees, before and beyond a window; where heads are grouped, folded."""
    subject = subjects(kind)
    backend = subject.model.open()
    folds = backend.model.config._attn_implementation == FOLDED
    assert folds or kind not in GROUPED
    for size in (1, 6, 60):
        prompt = subject.prompt(size)
        tree = subject.tree(backend, prompt[-1], size)

        def rows(prompt: list[int] = prompt, tree: Tree = tree) -> np.ndarray:
            backend.reset()
            backend.prefill(prompt, never)
            scores = backend.score(tree, GREEDY)
            return np.array([scores.row(row).copy() for row in range(len(tree) + 1)])

        mine = rows()
        with unfolded(backend.model):
            assert float(np.abs(mine - rows()).max()) < 1e-4, size
    assert (backend.model.config._attn_implementation == FOLDED) is folds


@pytest.mark.parametrize("fault", ["wrong", "broken"])
def test_a_model_that_a_fold_gets_wrong_or_breaks_keeps_the_librarys_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def faulty(module: Any, query: Any, *others: Any, **named: Any) -> tuple[Any, None]:
        if fault == "broken":
            raise RuntimeError("no such kernel")
        return attend(module, query.flip(1), *others, **named)

    folder = save_model("llama-gqa", tmp_path)
    monkeypatch.setitem(AttentionInterface._global_mapping, FOLDED, faulty)
    backend = load(folder)
    assert backend.model.config._attn_implementation == LIBRARY
    assert backend.info.can_tree and not backend.info.note
    prompt = prompt_of(20, 160)
    backend.prefill(prompt, never)
    row = backend.score(Tree(prompt[-1]), GREEDY).row(0)
    assert float(np.abs(row - backend.alone(prompt)).max()) < 1e-3
