"""A transformers model written as GGUF is the same model."""

from pathlib import Path

import numpy as np
import pytest

from bench.__main__ import main
from tests.conftest import EMBEDDED

SMALL = EMBEDDED.with_name("small")


@pytest.mark.gguf
@pytest.mark.model
@pytest.mark.parametrize(("kind", "allowed"), [("F16", 0.05), ("F32", 1e-4), ("Q8_0", 0.5)])
def test_a_written_model_computes_what_the_original_computes(
    kind: str, allowed: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine.backends.llamacpp import alone
    from engine.models.loaders import load
    from engine.settings import Runtime, Sampling
    from engine.types import Message

    file = tmp_path / "written.gguf"
    assert main(["to-gguf", str(SMALL), str(file), "--type", kind]) == 0
    assert f"{file.stat().st_size:,} bytes, {kind}" in capsys.readouterr().out
    one, other = load(str(file), Runtime(threads=1)), load(str(SMALL), Runtime(dtype="float32"))
    assert one.info.dtype == kind
    assert one.info.tokenizer_fingerprint == other.info.tokenizer_fingerprint
    assert one.info.eos_ids == other.info.eos_ids
    assert one.info.sampling == other.info.sampling != Sampling()
    asked = [Message("user", "Why is the sky blue?")]
    assert one.render(asked) == other.render(asked)
    tokens = one.tokenize(one.render(asked))
    found, wanted = alone(one, tokens), other.alone(tokens)
    assert np.abs(found - wanted).max() < allowed < np.ptp(wanted)


@pytest.mark.gguf
def test_what_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "written.gguf")
    assert main(["to-gguf", str(SMALL), file, "--type", "Q9_9"]) == 2
    assert "no type 'Q9_9'" in capsys.readouterr().err
    assert not Path(file).exists()
