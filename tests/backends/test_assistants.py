"""Gemma 4's assistant on transformers: it guesses as the library computes it, one that does not fit
is told, and answers stay what they were."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from engine.backends.caches import cache_argument
from engine.backends.transformers import TransformersBackend
from engine.decode import never
from engine.errors import ModelError
from engine.heads.assistant import sharing
from engine.models.loaders import need
from engine.settings import Runtime
from tests.support.heads import SAMPLINGS, loaded
from tests.support.predicting import WINDOW, save_assistant, save_gemma
from tests.support.tiny_hybrids import save_hybrid

pytestmark = pytest.mark.model

TEXT = [1, *(3 + 37 * at % 6000 for at in range(2 * WINDOW))]
"""Longer than the window."""
LAYERS = {0: (2, 3), 2: (0, 1)}
"""The last layers that keep keys, with a window and without one, by how many share them."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A model for each number of layers that share keys, with its assistant."""
    made = {}
    for shared in LAYERS:
        made[shared] = save_gemma(tmp_path_factory.mktemp("gemma"), shared)
        save_assistant(made[shared] / "head")
    return made


@pytest.fixture(scope="module")
def backends(folders: dict[int, Path]) -> dict[int, TransformersBackend]:
    return {shared: loaded(folder) for shared, folder in folders.items()}


def laws(folder: Path, shared: int, text: Sequence[int], path: Sequence[int]) -> list[Any]:
    """What may follow a text and each token of a path behind it, by the library alone: a row at a
    time, all at the place of the text's last token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with sharing():
        assistant = AutoModelForCausalLM.from_pretrained(folder / "head", dtype=torch.float32)
    cache, found = DynamicCache(), []
    with torch.no_grad():
        named = {cache_argument(model.model.forward): cache}
        states = model.model(torch.tensor([list(text[:-1])]), **named)
        state = states.last_hidden_state[:, -1:]
        keys = {
            kind: (cache.layers[at].keys, cache.layers[at].values)
            for kind, at in zip(
                ("sliding_attention", "full_attention"), LAYERS[shared], strict=True
            )
        }
        for token in (text[-1], *path):
            embedded = model.get_input_embeddings()(torch.tensor([[token]]))
            said = assistant(
                inputs_embeds=torch.cat([embedded, state], dim=-1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=keys,
            )
            state = said.last_hidden_state
            found.append(said.logits[0, 0].numpy())
    return found


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("length", [12, len(TEXT)])
@pytest.mark.parametrize("shared", LAYERS)
def test_an_assistant_guesses_as_the_library_does(
    shared: int, length: int, folders: dict[int, Path], backends: dict[int, TransformersBackend]
) -> None:
    backend, text = backends[shared].open(), TEXT[:length]
    head = backend.head
    head.listen(True)
    backend.prefill(text, never)
    root: Any = head.start(text, SAMPLINGS[0], never)
    one: Any = head.extend([0, 0], [7, 900])
    two: Any = head.extend([1, 0, 1], [5, 33, 8])
    for path, guesses in {
        (7, 33): (root, one[0], two[1]),
        (900, 5): (root, one[1], two[0]),
        (900, 8): (root, one[1], two[2]),
    }.items():
        wanted = laws(folders[shared], shared, text, path)
        for guess, logits in zip(guesses, wanted, strict=True):
            assert np.abs(guess.logits - logits).max() < 1e-4 * np.abs(logits).max()
    backend.close()


def test_an_assistant_is_found_counted_and_left_out(
    folders: dict[int, Path], backends: dict[int, TransformersBackend], tmp_path: Path
) -> None:
    folder, info = folders[2], backends[2].info.head
    assert info is not None and info.drafts
    assert (info.name, info.depth, info.branches) == ("MTP", 8, True)
    with_it, alone = (need(str(folder), Runtime(head=each)) for each in ("auto", "off"))
    assert with_it.weights - alone.weights == info.memory_bytes == 4 * info.parameters
    assert with_it.cache > alone.cache
    assert loaded(folder, head="off").info.head is None
    given = save_assistant(tmp_path / "other")
    assert loaded(folder, head=str(given)).info.head == info


def test_an_assistant_that_does_not_fit_is_told(folders: dict[int, Path], tmp_path: Path) -> None:
    wide = save_assistant(tmp_path / "wide", width=64)
    small = save_assistant(tmp_path / "small", vocab_size=500)
    heads = save_assistant(tmp_path / "heads", global_head_dim=16)
    other = save_hybrid("lfm2", tmp_path / "other")
    fitting = folders[2] / "head"
    for model, head, words in (
        (folders[2], wide, "reads states of 64 numbers, and the model has 32"),
        (folders[2], small, "vocabulary of 500 tokens, and the model has 6,144"),
        (folders[2], heads, "cannot be used"),
        (other, fitting, "reads the cache of a Gemma 4, and the model is a lfm2"),
    ):
        with pytest.raises(ModelError) as raised:
            loaded(model, head=str(head))
        assert words in str(raised.value) and str(head) in str(raised.value)
