"""A tokenizer's name without its model: the one that the loaded model has."""

from pathlib import Path

import pytest

from app.arguments import EMBEDDED
from assets import ASSETS
from engine.backends.transformers_tokenizer import tokenizer_fingerprint
from engine.errors import ModelError
from storage.statistics import SUFFIX


def test_the_statistics_that_come_along_are_found_by_the_tokenizer_alone() -> None:
    assert (ASSETS / "statistics" / f"{tokenizer_fingerprint(str(EMBEDDED))}{SUFFIX}").is_file()


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"The tokenizer of .* cannot be read"):
        tokenizer_fingerprint(str(tmp_path))
