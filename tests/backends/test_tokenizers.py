"""A tokenizer alone is that of the loaded model, and none of the model's weights is there."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.local import document_text
from engine.models.loaders import load, tokenizer
from engine.settings import Runtime
from engine.types import Document, Message
from tests.conftest import EMBEDDED

CHAT = (Message("user", "How are you?"), Message("assistant", "Well, 日本 and 🙂."))
TEXTS: list[Document] = ["A text,\n\nwith é and <|end|> in it.  ", CHAT, CHAT[:1]]


def check_same(alone: Any, loaded: Any) -> None:
    for name in ("name", "tokenizer_fingerprint", "vocabulary_size", "eos_ids"):
        assert getattr(alone.info, name) == getattr(loaded.info, name)
    for document in TEXTS:
        text = document_text(document, alone)
        assert text == document_text(document, loaded)
        assert alone.tokenize(text) == loaded.tokenize(text)


@pytest.mark.model
def test_a_folder_needs_no_weights(tmp_path: Path) -> None:
    bare = shutil.copytree(
        EMBEDDED, tmp_path / EMBEDDED.name, ignore=shutil.ignore_patterns("*.safetensors")
    )
    check_same(tokenizer(str(bare)), load(str(EMBEDDED), Runtime()))
    (bare / "generation_config.json").unlink(missing_ok=True)
    assert tokenizer(str(bare)).info.eos_ids
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer of .* could not be loaded.*complete"):
        tokenizer(str(bare))
    with pytest.raises(ModelError, match="does not exist"):
        tokenizer(str(tmp_path / "nowhere"))


@pytest.mark.gguf
def test_of_a_gguf_file_the_header_alone_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.models import gguf

    opened, asked = gguf.opened, list[bool]()

    def spied(*arguments: Any, weights: bool = True, **options: Any) -> Any:
        asked.append(weights)
        return opened(*arguments, weights=weights, **options)

    monkeypatch.setattr(gguf, "opened", spied)
    source = str(EMBEDDED.with_suffix(".gguf"))
    alone = tokenizer(source)
    assert asked == [False]
    check_same(alone, load(source, Runtime()))
    with pytest.raises(ModelError, match="no such file"):
        tokenizer("nowhere.gguf")
