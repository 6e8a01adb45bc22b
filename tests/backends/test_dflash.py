"""DFlash heads on transformers: one forward computes what the definition says for all places, a
head that does not fit is named, and it is found beside its model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.backends.transformers import TransformersBackend
from engine.decode import never
from engine.drafting.databases import Databases
from engine.errors import ModelError
from engine.methods import method_named
from engine.models.loaders import load, need
from engine.models.torch_heads import given_head, kinds_of
from engine.settings import Generation, Runtime, Sampling
from engine.tree import Tree
from engine.types import HEAD
from tests.backends.test_eagle3 import TEXT, linked, loaded, written
from tests.conftest import EMBEDDED
from tests.support.dflash_files import (
    HIDDEN,
    KV_HEADS,
    LAYERS,
    PLACES,
    SIZE,
    TARGET_LAYERS,
    Definition,
    config,
    numbers,
)
from tests.support.gguf_files import value_of
from tests.support.lossless import assert_lossless, events_of
from training.gguf import write_head

pytestmark = pytest.mark.model
GREEDY = Sampling(temperature=0)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
FORMS: dict[str, tuple[bool, dict[str, Any]]] = {
    "first": (False, {}),
    "sliding": (False, SLIDING),
    "causal": (False, {"is_causal": True}),
    "second": (True, SLIDING | {"is_causal": False}),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_forward_computes_the_definition_for_all_places(form: str, tmp_path: Path) -> None:
    second, more = FORMS[form]
    settings, tensors = config(second, **more), numbers(1, second)
    backend = loaded(written(tmp_path, settings, tensors))
    model = AutoModelForCausalLM.from_pretrained(str(EMBEDDED), dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    states = torch.cat([found[each + 1][0] for each in TARGET_LAYERS], dim=-1)
    embedding = model.get_input_embeddings().weight.detach()
    definition = Definition(settings, tensors, states, embedding)
    head: Any = backend.head
    head.listen(True)
    # The keys of a text that grows are kept; those of the block before are not.
    for end in (len(TEXT) - 5, len(TEXT) - 1, len(TEXT)):
        text = TEXT[:end]
        backend.prefill(text, never)
        logits, places = definition.logits(text)
        guess, token = head.start(text, GREEDY, never), text[-1]
        for depth in range(PLACES - 1):
            wanted = definition.after(logits[depth], places[depth], token)
            tokens = range(6144) if guess.tokens is None else guess.tokens.tolist()
            found = dict(zip(tokens, guess.logits.tolist(), strict=True))
            most = max(map(abs, wanted.values()))
            assert found.keys() == wanted.keys()
            assert all(abs(found[each] - wanted[each]) < 1e-3 * most for each in wanted)
            token = guess.likeliest(2)[1][0]
            if depth < PLACES - 2:
                (guess,) = head.extend([0], [token])
        head.forget()


def test_a_block_is_one_forward_and_further_places_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = loaded(written(tmp_path, config(True), numbers(1, True)))
    head: Any = backend.head
    head.listen(True)
    backend.prefill(TEXT, never)
    root = head.start(TEXT, GREEDY, never)
    monkeypatch.setattr(head, "weights", None)
    guesses = [root.after(depth, 7) for depth in range(1, PLACES)]
    assert guesses[-1] is None and len({id(each) for each in guesses}) == PLACES - 1
    assert root.after(2, 7) is guesses[1], "computed once"
    one, other = (root.after(1, token).logits for token in (7, 900))
    assert np.abs(one - other).max() > 1e-3, "the token before a place counts"


def test_each_decided_row_is_read_once(tmp_path: Path) -> None:
    backend = loaded(written(tmp_path, config(), numbers(1)))
    head: Any = backend.head
    head.listen(True)
    backend.prefill(TEXT, never)
    read: list[int] = []
    network = head.weights.head
    network.register_forward_pre_hook(lambda _, given: read.append(given[1].shape[1]))
    for token in (None, 7, 8, 9):
        if token is not None:
            backend.score(Tree(backend.cached[-1]), GREEDY)
            backend.accept(())
        tokens = [*backend.cached, 5]
        if token != 8:
            head.start(tokens, GREEDY, never)
            head.forget()
    assert read == [len(TEXT) - 1, 1, 2]


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> TransformersBackend:
    backend = loaded(written(tmp_path_factory.mktemp("head"), config(True), numbers(2, True)))
    backend.info = replace(backend.info, eos_ids=frozenset())  # so that no answer is short
    return backend


@pytest.mark.soak(stay=4)
@pytest.mark.parametrize("method", ["head", "hd+head", "auto", "head@3"])
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(0.7, seed=3),
        Sampling(0.8, min_p=0.05, seed=4),
        Sampling(1.0, top_k=40, top_p=0.9, seed=5),
    ],
    ids=["greedy", "warm", "min-p", "top-k and top-p"],
)
def test_the_text_is_that_of_plain_decoding(
    second: TransformersBackend, method: str, sampling: Sampling
) -> None:
    """The guesses of random weights are nearly all wrong."""
    wanted, chosen, texts = Generation(sampling, max_tokens=60), method_named(method), []
    for name in ("plain", method):
        backend, known = second.open(), Databases()
        head: Any = backend.head
        head.listen(name == method)
        drafters = method_named(name).drafters(known, None, sampling, target=backend)
        texts.append(events_of(backend, TEXT, wanted, drafters, chosen.drafting))
        backend.close()
    assert_lossless(*texts)
    assert len(texts[0]) == 60
    assert sum(step.proposed.get(HEAD, 0) for step in texts[1]) > 20


Change = Callable[[dict[str, Any], dict[str, Any]], object]


def own(**values: Any) -> Change:
    return lambda settings, _: settings["dflash_config"].update(values)


WRONG: dict[str, tuple[Change, str]] = {
    "width": (
        lambda settings, _: settings.update(hidden_size=128),
        "made for states of 128 numbers, and the model has 256",
    ),
    "vocabulary": (
        lambda settings, _: settings.update(vocab_size=32000),
        "made for a vocabulary of 32,000 tokens, and the model has 6,144",
    ),
    "weights": (
        lambda settings, _: settings.update(strata_target="0123"),
        "trained for other weights of this model",
    ),
    "layers": (own(target_layer_ids=[1, 7]), "target_layer_ids are [1, 7], and the model has"),
    "no layers": (own(target_layer_ids=None), "its target_layer_ids are []"),
    "mask": (own(mask_token_id=6144), "mask_token_id is 6144, which the model does not have"),
    "no mask": (own(mask_token_id=None), "mask_token_id is None"),
    "block": (own(block_size=1), "block_size is 1"),
    "kinds": (
        lambda settings, _: settings.update(layer_types=["sliding_attention"] * 2),
        "['sliding_attention', 'sliding_attention'] with a window of 0",
    ),
    "selector": (own(selector_top_k=0), "'selector_top_k': 0, 'selector_rank': 6"),
    "group": (own(conv_group_size=7), "conv_group_size of 7 does not divide 256"),
    "missing": (lambda _, tensors: tensors.pop("fc.weight"), "its tensor fc.weight has the shape"),
    "unknown": (
        lambda _, tensors: tensors.update(gate=tensors["norm.weight"] + 0),
        "its tensor gate has the shape (256,), expected was none",
    ),
    "first": (
        lambda settings, _: settings.update(architectures=["DFlashDraftModel"]),
        "expected was none",
    ),
    "damaged": (
        lambda _, tensors: tensors["norm.weight"].fill_(float("nan")),
        "its guesses are no numbers",
    ),
}


def refused(backend: Any, folder: Path, target: str = str(EMBEDDED)) -> str:
    with pytest.raises(ModelError) as raised:
        given_head(backend.open(), folder, target)
    return str(raised.value)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_head_that_does_not_fit_is_named(
    wrong: str, embedded: TransformersBackend, tmp_path: Path
) -> None:
    change, words = WRONG[wrong]
    settings, tensors = config(True), numbers(1, True)
    change(settings, tensors)
    text = refused(embedded, written(tmp_path, settings, tensors))
    assert words in text and "DFlash head" in text and str(tmp_path) in text
    assert "load the model without one" in text


def test_a_damaged_file_is_named(embedded: TransformersBackend, tmp_path: Path) -> None:
    written(tmp_path, config(), numbers(1))
    (tmp_path / "a.safetensors").write_bytes(b"12345678" * 9)
    assert "DFlash head" in refused(embedded, tmp_path)
    (tmp_path / "a.safetensors").unlink()
    assert "the folder holds config.json. Give a folder" in refused(embedded, tmp_path)


def test_a_head_is_found_in_the_folder_of_its_model(tmp_path: Path) -> None:
    model, tensors = linked(tmp_path / "model"), numbers(4)
    head = written(model / "head", config(), tensors)
    backend = load(str(model), Runtime(dtype="float32"))
    info = backend.info.head
    assert info is not None and backend.head is not None
    assert (info.name, info.depth, info.at_once, info.drafts) == ("DFlash", 5, 5, True)
    assert info.parameters == sum(each.numel() for each in tensors.values())
    alone, both = (need(str(model), Runtime(head=wanted)) for wanted in ("off", "auto"))
    assert both.weights - alone.weights == 4 * info.parameters
    # A hidden state of each token, and a key and a value in each layer.
    assert both.cache - alone.cache == 4 * backend.info.context_length * (
        HIDDEN + 2 * LAYERS * KV_HEADS * SIZE
    )
    written(head, config(vocab_size=99), tensors)
    unfit = load(str(model), Runtime(dtype="float32"))
    assert unfit.head is None and unfit.info.head is not None
    assert "vocabulary of 99 tokens" in unfit.info.head.note and not unfit.info.head.drafts


def test_the_kind_of_a_head_is_told_by_what_its_config_has(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text, wanted in {
        '{"model_type": "gemma4_assistant", "architectures": null}': {"gemma4_assistant"},
        '{"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}': {
            "qwen3",
            "DFlashDraftModel",
        },
        "[]": set(),
        "{": set(),
    }.items():
        file.write_text(text, encoding="utf-8")
        assert kinds_of(tmp_path) == wanted


# In llama.cpp.


@pytest.mark.gguf
@pytest.mark.parametrize("form", ["first", "second", "second, without convolutions"])
def test_a_block_is_guessed_the_same_in_both_formats(
    form: str, gguf_files: dict[str, Path], tmp_path: Path
) -> None:
    """Behind texts that grow and go back."""
    second = form != "first"
    settings, tensors = config(second, is_causal=False), numbers(3, second)
    if second:
        settings["dflash_config"]["selector_top_k"] = 12
    if "without" in form:
        settings["dflash_config"] |= {"conv_kernel_size": 0, "conv_group_size": 0}
        tensors = {name: each for name, each in tensors.items() if "_conv." not in name}
    folder, file = written(tmp_path / "head", settings, tensors), tmp_path / "x.gguf"
    write_head(folder, EMBEDDED, file)
    one: Any = loaded(folder)
    other: Any = load(str(gguf_files["target-F16"]), Runtime(threads=1, head=str(file)))
    same = ("name", "depth", "at_once", "branches")
    assert all(getattr(one.info.head, each) == getattr(other.info.head, each) for each in same)
    more = other.info.head.parameters - one.info.head.parameters
    assert more == (LAYERS * 2 * 4 * HIDDEN if "without" in form else 0), "some that do nothing"
    for text in (TEXT[:20], TEXT[:21], TEXT[:40], TEXT[:30], [*TEXT[:25], 7, 8]):
        firsts = []
        for backend in (one, other):
            backend.head.listen(True)
            backend.prefill(text, never)
            firsts.append(backend.head.start(text, GREEDY, never))
        left, right = firsts
        for depth in range(1, PLACES):
            for token, chance in left.likeliest(3):
                assert right.probability(token) == pytest.approx(chance, rel=0.1, abs=0.01)
            token = left.likeliest(2)[-1][0]
            left, right = (each.after(depth, token) for each in firsts)
        assert left is right is None
        one.head.forget()
        other.head.forget()
    one.close()


@pytest.mark.gguf
def test_more_candidates_than_llama_cpp_has_room_for_are_left_out(tmp_path: Path) -> None:
    folder = written(tmp_path / "head", config(True, is_causal=False), numbers(1, True))
    write_head(folder, EMBEDDED, tmp_path / "x.gguf")
    assert value_of(tmp_path / "x.gguf", "dflash.selector_top_k") == 15
    assert 15 * 16 <= HIDDEN < 16 * 17


@pytest.mark.gguf
@pytest.mark.parametrize("form", ["sliding", "convolutions alone"])
def test_what_llama_cpp_does_not_compute_is_not_written(form: str, tmp_path: Path) -> None:
    second = form != "sliding"
    settings, tensors = config(second, **({} if second else SLIDING)), numbers(1, second)
    if second:
        settings["dflash_config"] |= {"selector_rank": 0, "selector_top_k": 0}
        tensors = {name: each for name, each in tensors.items() if "selector" not in name}
    folder = written(tmp_path / "head", settings, tensors)
    with pytest.raises(ModelError, match="cannot be written for llama.cpp"):
        write_head(folder, EMBEDDED, tmp_path / "x.gguf")
