"""The embedded model's head as it is, and with random weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.decode import never
from engine.drafting.head import HeadTier
from engine.drafting.head_record import HeadRecord
from engine.settings import Sampling
from engine.tree import Tree
from tests.conftest import EMBEDDED
from tests.support.heads import loaded

STEPS = 160
HARD = [1, *(3 + 37 * at % 240 for at in range(24))]


def record_of(backend: Any, sampling: Sampling, prompt: list[int]) -> HeadRecord:
    """The record of a head that is asked before every token of an answer."""
    record, tokens, tier = HeadRecord(), list(prompt), HeadTier(sampling, noisy=False)
    backend.head.listen(True)
    backend.prefill(tokens, never)
    for _ in range(STEPS):
        suffix = tuple(tokens[-4:])
        guess = backend.head.start(tokens, sampling, never)
        tier.clear()
        tier.add(suffix, guess, 0, len(tokens))
        backend.head.forget()
        token = backend.score(Tree(tokens[-1]), sampling).choose(0)
        backend.accept(())
        claimed = tier.claim(suffix)
        assert claimed is not None
        record.add(claimed[1], claimed[0] == token)
        tokens.append(token)
    return record


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_of_random_weights_is_broken(temperature: float, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED, folder)
    [path] = (folder / "head").glob("*.safetensors")
    random, found = torch.Generator().manual_seed(1), load_file(path)
    for name, values in found.items():
        if values.ndim == 2:
            noise = torch.randn(values.shape, generator=random) * values.float().std()
            found[name] = noise.to(values.dtype)
    save_file(found, path, metadata={"format": "pt"})
    backend = loaded(folder)
    record = record_of(backend, Sampling(temperature, seed=3), backend.tokenize("Tell a story."))
    assert record.broken, record


@pytest.mark.grid(1)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("hard", [False, True])
def test_the_head_itself_is_not(embedded: Any, hard: bool, temperature: float) -> None:
    """Neither on a text of random tokens, which neither head nor model can foresee."""
    prompt = HARD if hard else embedded.tokenize("Tell a story.")
    backend = embedded.open()
    record = record_of(backend, Sampling(temperature, seed=3), prompt)
    backend.close()
    assert not record.broken and not record.suspect, record
