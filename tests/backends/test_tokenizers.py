"""A tokenizer alone is that of the loaded model, and none of the model's weights is there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from engine.backends.base import TokenizerInfo
from engine.backends.transformers_tokenizer import TransformersTokenizer
from engine.errors import ModelError
from engine.local import document_text
from engine.models import load_llamacpp
from engine.models.loaders import load, tokenizer
from engine.settings import Runtime
from engine.types import Document, Message
from tests.conftest import EMBEDDED, ROOT
from tests.support.gguf_files import opened_gguf, tiny_gguf
from tests.support.hub import Hub, serving

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


FROM_HUB = """
import sys
from engine.models.loaders import tokenizer
print(tokenizer(sys.argv[1]).info.tokenizer_fingerprint)
"""


@pytest.mark.soak
@pytest.mark.model
def test_from_the_hub_no_weights_are_downloaded(tmp_path: Path) -> None:
    """In a process of its own, as the hub's address is read when its client is imported."""
    files = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file()}
    with serving(Hub({"someone/tiny": files})) as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", FROM_HUB, "someone/tiny"],
            cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert done.stdout.strip() == tokenizer(str(EMBEDDED)).info.tokenizer_fingerprint, done
        assert any("tokenizer.json" in line for line in hub.asked)
        assert not any(".safetensors" in line for line in hub.asked)


@pytest.mark.gguf
def test_of_a_gguf_file_the_header_alone_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, asked = load_llamacpp.opened, list[bool]()

    def spied(*arguments: Any, weights: bool = True, **options: Any) -> Any:
        asked.append(weights)
        return opened(*arguments, weights=weights, **options)

    monkeypatch.setattr(load_llamacpp, "opened", spied)
    source = str(EMBEDDED.with_suffix(".gguf"))
    alone = tokenizer(source)
    assert asked == [False]
    check_same(alone, load(source, Runtime()))
    with pytest.raises(ModelError, match="no such file"):
        tokenizer("nowhere.gguf")


WORDS = "Hi 👩‍🚀 日本語 — ok 😊.\n  <|end|> a"


def check_pieces(tokenizer: Any, text: str = WORDS) -> None:
    pieces = [tokenizer.piece(token) for token in tokenizer.tokenize(text)]
    assert b"".join(pieces) == text.encode() and any(len(piece) > 1 for piece in pieces)


@pytest.mark.model
def test_the_bytes_of_tokens_are_those_of_the_text(tmp_path: Path) -> None:
    check_pieces(tokenizer(str(EMBEDDED)))
    check_pieces(opened_gguf(tiny_gguf(tmp_path / "x.gguf")), "Hi there, you")


@pytest.mark.model
def test_the_bytes_of_a_vocabulary_of_pieces_are_those_of_the_text() -> None:
    """As Llama 2's: a space before a word belongs to it, and unknown letters are bytes."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Hithero", "▁H", "▁Hi"]
    words = {name: number for number, name in enumerate(names)}
    made = Tokenizer(
        models.BPE(words, [("▁", "H"), ("▁H", "i")], byte_fallback=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")
    info = TokenizerInfo("pieces", "", len(names), frozenset())
    alone = TransformersTokenizer(wrapped, info)
    tokens = alone.tokenize("Hi there 😊 Hi")
    assert alone.detokenize(tokens) == "Hi there 😊 Hi"
    assert b"".join(map(alone.piece, tokens)) == " Hi there 😊 Hi".encode()
    assert alone.piece(words["▁Hi"]) == b" Hi" and alone.piece(words["<s>"]) == b"<s>"
    assert alone.piece(words["<0xF0>"]) == b"\xf0" and alone.piece(9_999) == b""
