"""The kernels of captured forwards against the same sums in float64.

Triton's interpreter computes them where there is no GPU. tests/backends/conftest.py leaves this
file out where there is no Triton, as on a Mac.
"""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def kernels() -> Any:
    from engine.backends import kernels

    return kernels


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape: int, seed: int = 0) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device())


def off(found: Any, wanted: Any) -> float:
    """The error as a share of what was wanted."""
    return float((found.double() - wanted).norm() / wanted.norm())


def reference(queries: Any, keys: Any, values: Any, table: Any, visible: Any, scale: float) -> Any:
    """Row by row, over the tokens that it sees, in float64."""
    import torch

    starts, lengths, places = table.tolist()
    _, heads, rows, size = queries.shape
    group, out = heads // keys.shape[1], torch.zeros(1, rows, heads, size, dtype=torch.float64)
    for row in range(rows):
        start, length, place = starts[row], lengths[row], places[row]
        seen = [*range(start, start + length)]
        for other in range(rows):
            if starts[other] == start and (
                places[other] <= place if visible is None else visible[row, other]
            ):
                seen.append(start + length + places[other])
        for head in range(heads):
            key, value = (each[0, head // group, seen].double().cpu() for each in (keys, values))
            weights = (key @ queries[0, head, row].double().cpu() * scale).softmax(0)
            out[0, row, head] = weights @ value
    return out.to(queries.device)


CASES = {
    "one row, nothing cached": (4, 4, 16, [(0, 0, 1)]),
    "one row, a long text": (4, 1, 32, [(0, 300, 1)]),
    "a tree, groups of heads": (8, 2, 16, [(0, 130, 7)]),
    "a tree as long as a block": (2, 2, 16, [(0, 64, 33)]),
    "two sequences": (4, 2, 16, [(0, 20, 5), (100, 71, 3)]),
}


def case(name: str) -> tuple[Any, ...]:
    """Queries, keys, values and the table of the rows; a case lists (start, length, rows)."""
    import torch

    heads, shared, size, sequences = CASES[name]
    table = [(start, length, place) for start, length, count in sequences for place in range(count)]
    pool = 64 + max(start + length + count for start, length, count in sequences)
    queries = drawn(1, len(table), heads, size).transpose(1, 2)
    keys, values = drawn(1, shared, pool, size, seed=1), drawn(1, shared, pool, size, seed=2)
    return queries, keys, values, torch.tensor(table).T.contiguous().to(device())


@pytest.mark.soak(stay=4)
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_row_attends_to_its_text_and_its_ancestors(kernels: Any, name: str, prompt: bool) -> None:
    import torch

    queries, keys, values, table = case(name)
    rows = queries.shape[2]
    visible = None
    if not prompt:
        drawn_rows = drawn(rows, rows) < 0.4
        of_one = table[0][:, None] == table[0]
        visible = (
            (drawn_rows.tril() | torch.eye(rows, dtype=torch.bool).to(device())) & of_one
        ).long()
    found = kernels.tree_attention(queries, keys, values, *table, visible, 0.3)
    assert off(found, reference(queries, keys, values, table, visible, 0.3)) < 1e-5


def test_nothing_else_is_read(kernels: Any) -> None:
    """Neither rows of the pool that a row does not see, nor rows that were not drafted."""
    import torch

    queries, keys, values, table = case("a tree, groups of heads")
    visible = torch.eye(7, dtype=torch.int64).to(device())
    wanted = kernels.tree_attention(queries, keys, values, *table, visible, 0.3)
    keys[:, :, 137:], values[:, :, 137:] = 1e4, 1e4
    assert torch.equal(kernels.tree_attention(queries, keys, values, *table, visible, 0.3), wanted)


def test_norm_gate_and_rotation_are_the_librarys(kernels: Any) -> None:
    import torch
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    states = drawn(1, 5, 96)
    norm = LlamaRMSNorm(96, 1e-5).to(device())
    norm.requires_grad_(False)
    norm.weight.data = drawn(96)
    assert off(kernels.rms_norm(states, norm.weight, 1e-5), norm(states).double()) < 1e-6
    both = drawn(1, 5, 3000)
    gates, ups = both[..., :1500], both[..., 1500:]
    wanted = (torch.nn.functional.silu(gates) * ups).double()
    assert off(kernels.silu_times(gates, ups), wanted) < 1e-6
    queries, keys = (drawn(1, 5, heads, 32).transpose(1, 2) for heads in (4, 2))
    cos, sin = drawn(1, 5, 32, seed=3), drawn(1, 5, 32, seed=4)
    for found, known in zip(
        kernels.rotate(queries, keys, cos, sin),
        apply_rotary_pos_emb(queries, keys, cos, sin),
        strict=True,
    ):
        assert found.shape == known.shape and off(found, known.double()) < 1e-6
