"""What config.json tells of the chains of a model, against what loading it finds."""

import json
from pathlib import Path

import pytest

from engine.models.outlook import of_config
from engine.models.state_memory import CHAIN
from tests.support.tiny_hybrids import FAMILIES, save_hybrid

pytestmark = pytest.mark.model


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_are_told_of_every_family_that_keeps_a_state(family: str, tmp_path: Path) -> None:
    import transformers

    name, settings = FAMILIES[family]
    getattr(transformers, name)(**settings).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert of_config(config, tmp_path).chains


def test_a_loaded_model_says_how_deep_its_chains_are(tmp_path: Path) -> None:
    from engine.models.load_transformers import load_transformers

    info = load_transformers(str(save_hybrid("lfm2", tmp_path)), "cpu").info
    assert (info.can_tree, info.leaves, info.depth) == (True, 1, CHAIN)
