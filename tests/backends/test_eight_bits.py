"""Matrices of eight bits: how much is lost, and when they are taken."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest

pytestmark = pytest.mark.model


@pytest.mark.parametrize("shape", [(6, 64), (500, 256), (2048, 128), (3, 192)])
def test_a_rounded_matrix_gives_nearly_the_same(shape: tuple[int, int]) -> None:
    import torch

    from engine.heads.eight_bits import EightBits, bytes_of, linear

    made = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=made) * torch.rand((shape[0], 1), generator=made)
    weight[0] = 0.0
    states, bias = torch.randn(3, shape[1], generator=made), torch.randn(shape[0], generator=made)
    rounded = EightBits(weight)
    for more in ((), (bias,)):
        wanted, found = linear(states, weight, *more), linear(states, rounded, *more)
        assert found.dtype == torch.float32
        assert (found - wanted).norm() < 0.02 * wanted.norm()
    assert bytes_of(weight) == 4 * weight.numel()
    assert bytes_of(rounded) == weight.numel() + 2 * shape[0]


@pytest.mark.parametrize(("plain", "rounded", "wanted"), [(3.0, 1.0, True), (1.0, 3.0, False)])
def test_eight_bits_are_taken_where_they_were_faster(
    plain: float, rounded: float, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from engine.heads import eight_bits

    def clock() -> Iterator[float]:
        now = 0.0
        for takes in cycle((plain, rounded)):
            yield now
            now += takes
            yield now

    ticks = clock()
    monkeypatch.setattr(eight_bits, "perf_counter", lambda: next(ticks))
    assert eight_bits.faster([torch.ones(4, 64), torch.ones(8, 128)]) is wanted


def test_a_width_that_the_library_would_read_beyond_stays_as_it_is() -> None:
    import torch

    from engine.heads.eight_bits import EightBits, packed

    narrow = torch.ones(8, 40)
    assert packed(narrow) is narrow and isinstance(packed(torch.ones(8, 64)), EightBits)


def test_without_the_librarys_function_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from engine.heads import eight_bits

    def never(*_: Any) -> float:
        raise AssertionError("nothing to time")

    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    monkeypatch.setattr(eight_bits, "perf_counter", never)
    assert not eight_bits.faster([torch.ones(4, 8)])
