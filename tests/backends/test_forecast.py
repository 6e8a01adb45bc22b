"""What the header of a GGUF file and config.json tell, against what loading them finds."""

import json
from pathlib import Path

import llama_cpp
import pytest
import transformers

from app.service.catalogue import STATES
from engine.backends.llamacpp_states import MOST
from engine.models.formats import format_of
from engine.models.gguf import branches, opened
from engine.models.gguf_files import forecast_of
from engine.models.loaders import load
from engine.models.memory import DraftingForecast
from engine.models.memory import forecast_of as forecast_of_config
from engine.models.probe import SNAPSHOTS
from engine.settings import Runtime
from tests.support.head_files import assistant_gguf, gemma4_gguf, qwen35_gguf
from tests.support.tiny_gguf import ARCHITECTURES, tiny
from tests.support.tiny_hybrids import FAMILIES


@pytest.mark.soak(stay=4)
@pytest.mark.gguf
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chains_are_told_of_models_that_cannot_branch(tmp_path: Path, architecture: str) -> None:
    path = tiny(tmp_path, architecture)
    model, context = opened(path, Runtime(), fast=False, weights=False)
    forecast = forecast_of(path)
    assert forecast is not None and forecast.chains is not branches(model)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


@pytest.mark.gguf
def test_heads_in_a_file_and_beside_it_are_told(tmp_path: Path) -> None:
    inside = format_of("a.gguf").need(str(qwen35_gguf(tmp_path)), Runtime()).forecast
    assert inside == DraftingForecast(chains=True, head="MTP, in its file")
    assistant_gguf(tmp_path)
    beside = format_of("a.gguf").need(str(gemma4_gguf(tmp_path)), Runtime()).forecast
    assert beside == DraftingForecast(head="in the file mtp-gemma.gguf")


@pytest.mark.gguf
def test_a_loaded_model_says_how_deep_its_chains_are(tmp_path: Path) -> None:
    info = load(str(qwen35_gguf(tmp_path)), Runtime(context_length=256)).info
    assert info.leaves == 1 and info.depth and info.head is not None


def test_the_catalogue_counts_the_states_that_loading_keeps() -> None:
    assert STATES == 1 + SNAPSHOTS + MOST


@pytest.mark.model
@pytest.mark.parametrize("family", FAMILIES)
def test_chains_are_told_of_every_family_that_keeps_a_state(family: str, tmp_path: Path) -> None:
    name, settings = FAMILIES[family]
    getattr(transformers, name)(**settings).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert forecast_of_config(config, tmp_path).chains
