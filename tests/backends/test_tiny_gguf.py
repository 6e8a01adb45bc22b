"""The random tiny files of tests/support/tiny_gguf.py: the library reads them, and they are tests.

A model that always says the same, whatever it read, would let any damage to its state pass.
"""

from pathlib import Path

import pytest

from engine.backends.check import difference
from tests.support.gguf_files import opened_gguf
from tests.support.lossless import events_of, generation, tokens_of
from tests.support.tiny_gguf import ARCHITECTURES, tiny

pytestmark = pytest.mark.gguf


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_said_depends_on_all_that_was_read(tmp_path: Path, name: str) -> None:
    from engine.backends.llamacpp import alone

    path = tiny(tmp_path, name)
    assert path.stat().st_size < 4 << 20
    backend = opened_gguf(path)
    prompt = backend.tokenize("The sky is blue.")
    said = [token.id for token in tokens_of(events_of(backend, prompt, generation(0.0, 0, 16)))]
    assert len(set(said)) > 4
    other = [prompt[1], *prompt[1:]]
    gap = difference(alone(backend, prompt), alone(backend, other))
    assert gap > 0.05, "the first of the tokens still matters behind the last"


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    import llama_cpp

    backend = opened_gguf(tiny(tmp_path, "qwen35", heads=1))
    assert llama_cpp.llama_model_n_layer_nextn(backend.model) == 1
