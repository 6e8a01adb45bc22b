"""The torch backend beside the contract: forwards counted, logits on a device, faults that loading
notices, texts and templates."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.base import Filled
from engine.backends.device_scores import DeviceScores
from engine.backends.transformers import TransformersBackend
from engine.decode import never
from engine.drafting.costs import LEAST, measure_costs
from engine.drafting.databases import Databases
from engine.errors import ModelError, PromptError
from engine.hsd.family import Family, check_vocabulary
from engine.methods import METHODS
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import Message
from tests.support.backends import (
    GREEDY,
    PLAIN,
    after,
    counted,
    gap,
    load,
    load_kind,
    prompt_of,
    save_model,
)
from tests.support.lossless import Adversary, assert_lossless, events_of, tokens_of

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama."""
    return save_model("llama-gqa", tmp_path_factory.mktemp("grouped"))


@pytest.mark.parametrize(
    ("new", "rows"), [(500, [599]), (3, [1, 1, 1])], ids=["all again", "one by one"]
)
def test_where_states_cannot_be_gone_on_from_the_cheaper_way_is_taken(
    subjects: Any, monkeypatch: pytest.MonkeyPatch, new: int, rows: list[int]
) -> None:
    backend, prompt = subjects(PLAIN).model.open(), prompt_of(100 + new, 160)
    backend.prefill(prompt[:100], never)
    found = counted(backend, monkeypatch)
    assert backend.prefill(prompt, never) == Filled(99 if new == 3 else 0, True) and found == rows
    assert gap(backend.score(Tree(prompt[-1]), GREEDY).row(0), backend.alone(prompt)) < 1e-3


def test_which_states_are_gone_on_from_with_several_tokens_is_measured(subjects: Any) -> None:
    for kind, resumes in (("llama-gqa", True), ("mamba", True), ("mamba2", True), (PLAIN, False)):
        assert subjects(kind).model.resumes is resumes
    backend, prompt = subjects(PLAIN).model.open(), prompt_of(60, 160)
    backend.resumes = True
    backend.prefill(prompt[:30], never)
    assert gap(after(backend, prompt), backend.alone(prompt)) > 0.1, (
        "one that says so wrongly would be noticed"
    )


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(0.7, seed=3), Sampling(1.0, 40, 0.9, 0.02, 4)]
)
def test_logits_that_stay_on_a_device_give_the_same_answer(
    embedded: Any, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the device is the host; what is copied of the logits is little all the same."""
    wanted, prompt, rows = Generation(sampling, max_tokens=40), prompt_of(30), list[int]()
    host = embedded.open()
    assert not host.on_device
    plain = events_of(host, prompt, wanted)
    device = embedded.open()
    device.on_device = True
    real = DeviceScores.row
    monkeypatch.setattr(
        DeviceScores, "row", lambda scores, row: (rows.append(row), real(scores, row))[1]
    )
    truth = [*prompt, *(token.id for token in tokens_of(plain))]
    drafter = Adversary(lambda tokens: [tuple(truth[len(tokens) : len(tokens) + 5]), (7, 8)])
    for drafters in ([], [drafter]):
        assert_lossless(plain, events_of(device, prompt, wanted, drafters))
    assert len(rows) < 8, "a whole row is rarely needed"


def test_the_embedded_models_are_one_family(embedded: Any, embedded_drafts: Any) -> None:
    models = [*embedded_drafts.values(), embedded]
    sizes = [model.info.parameters for model in models]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] / 4
    for model in models:
        info, names = model.info, model.vocabulary()
        assert info.memory_bytes == 4 * info.parameters and info.tokenizer_type == "BPE"
        assert len({*names}) == len(names) <= info.vocabulary_size
        assert names[model.tokenize("<|end|>")[0]] == "<|end|>"
        assert names == embedded.vocabulary()
        check_vocabulary(embedded, model)
    family = Family(embedded, dict(reversed(embedded_drafts.items())))
    assert [*family.drafts] == ["small", "mid"]


def test_a_model_with_another_tokenizer_is_refused(embedded: Any, subjects: Any) -> None:
    other = subjects("llama-gqa").model
    with pytest.raises(ModelError) as caught:
        Family(embedded, {"other": other})
    text = str(caught.value)
    assert "its tokenizer is WordLevel, not BPE; it has 100 tokens, not" in text
    assert "the first token that differs is 0: '<pad>', not " in text


def test_a_model_that_decodes_plainly_does_not_draft(embedded: Any, subjects: Any) -> None:
    assert "cannot be rolled back, so it decodes plainly." in subjects(PLAIN).model.info.note
    with pytest.raises(ModelError, match="other cannot draft: mamba models keep a state"):
        Family(embedded, {"other": subjects(PLAIN).model})


def test_forwards_on_a_gpu_are_waited_for(embedded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time of a forward would count as that of sampling."""
    backend, waits = embedded.open(), list[str]()
    backend.prefill([5, 6], never)
    logits = SimpleNamespace(is_cuda=True, device="cuda:0")
    monkeypatch.setattr(backend, "forward", lambda *tokens, **named: logits)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    backend.score(Tree(6), GREEDY)
    assert waits == ["cuda:0"]


def test_a_model_that_decodes_wrongly_even_with_its_own_cache_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that the forward does not take would be ignored, and every answer be nonsense."""
    reset = TransformersBackend.reset

    def misnamed(backend: Any) -> None:
        backend.cache_name = "past_key_values"
        reset(backend)

    monkeypatch.setattr(TransformersBackend, "reset", misnamed)
    with pytest.raises(ModelError, match="decoding with its cache is off by"):
        load_kind(PLAIN, tmp_path)


def test_a_deprecation_warning_makes_no_model_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an error it is reported as what it is; usually it is only a warning."""
    forward = TransformersBackend.forward

    def warned(backend: Any, *arguments: Any, **named: Any) -> Any:
        warnings.warn("`cache` has another name now", FutureWarning, stacklevel=2)
        return forward(backend, *arguments, **named)

    monkeypatch.setattr(TransformersBackend, "forward", warned)
    with pytest.raises(FutureWarning, match="another name"):
        load_kind("llama-gqa", tmp_path)
    with pytest.warns(FutureWarning, match="another name"):
        assert load_kind("llama-gqa", tmp_path).info.can_tree


def broken_mask(*arguments: Any) -> np.ndarray:
    """Every row sees every other one."""
    parents = arguments[0]
    return np.ones((len(parents), len(parents)), dtype=bool)


def test_a_model_whose_tree_check_fails_decodes_plainly_and_says_so(
    grouped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = load(grouped)
    monkeypatch.setattr("engine.backends.transformers.ancestors", broken_mask)
    backend = load(grouped)
    assert good.info.can_tree and not backend.info.can_tree
    assert "tree forward is off by" in backend.info.note and "plainly" in backend.info.note
    prompt, wanted = prompt_of(20, 160), Generation(Sampling(0.7), max_tokens=20)
    drafters = METHODS["hd"].drafters(Databases())
    steps = events_of(backend, prompt, wanted, drafters)
    assert all(len(step.tokens) == 1 and not step.proposed for step in steps)
    assert_lossless(events_of(good, prompt, wanted), steps)


@pytest.mark.parametrize("kind", ["llama-gqa", "gemma2-mixed"])
def test_bfloat16_runs(kind: str, tmp_path: Path) -> None:
    backend = load(save_model(kind, tmp_path), dtype="bfloat16")
    assert backend.info.dtype == "bfloat16"
    prompt, wanted = prompt_of(20, 160), Generation(Sampling(0.7, seed=1), max_tokens=20)
    steps = events_of(backend, prompt, wanted, METHODS["hd"].drafters(Databases()))
    tokens = tokens_of(steps)
    assert tokens and all(0.0 <= token.probability <= 1.0 for token in tokens)
    assert backend.cache.layers[0].keys.dtype == backend.model.dtype or not backend.info.can_tree


@pytest.mark.soak
def test_every_end_token_ends_an_answer(tmp_path: Path) -> None:
    folder = save_model("llama-gqa", tmp_path, eos_token_id=[2, 60, 61])
    backend = load(folder)
    assert backend.info.eos_ids >= {2, 60, 61}
    ends = set()
    for seed in range(40):
        wanted = Generation(Sampling(2.0, seed=seed), max_tokens=100)
        steps = events_of(backend, prompt_of(5, 160), wanted)
        last = tokens_of(steps)[-1]
        assert (steps[-1].finish == "eos") == (last.id in backend.info.eos_ids)
        ends.add(last.id)
    assert len(ends & {2, 60, 61}) > 1


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (None, "<s>System: be kind\n\nUser: hi\n\nAssistant:"),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
            "{% endif %}{{ m.role }}={{ m.content }};{% endfor %}",
            "user=be kind\n\nhi;",
        ),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", None),
    ],
)
def test_templates_with_and_without_a_place_for_a_system_prompt(
    subjects: Any, monkeypatch: pytest.MonkeyPatch, template: str | None, wanted: str | None
) -> None:
    """One that refuses the conversation, or would run code, is an error."""
    backend = subjects("llama-gqa").model
    monkeypatch.setattr(backend.tokenizer, "chat_template", template)
    messages = [Message("system", "be kind"), Message("user", "hi")]
    if wanted is None:
        with pytest.raises(PromptError, match="chat template"):
            backend.render(messages)
    else:
        assert backend.render(messages) == wanted


# What forwards cost.


def test_a_real_model_is_measured_and_left_usable(embedded: Any) -> None:
    backend = TransformersBackend(embedded.model, embedded.tokenizer, embedded.info)
    curve = measure_costs(backend, (0, 7, 63), seconds=0.1)
    assert curve.points[63] > curve.points[0] > 0
    wanted = Generation(Sampling(0.8, seed=3), max_tokens=12)
    prompt = backend.tokenize("And now for something else")
    after = events_of(backend, prompt, wanted, [], Drafting(), costs=curve)
    embedded.reset()
    assert_lossless(events_of(embedded, prompt, wanted), after)


def test_a_real_model_is_timed_behind_a_long_text_that_nobody_reads(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TransformersBackend(embedded.model, embedded.tokenizer, embedded.info)
    read, behind = list[int](), list[int]()
    reading, score = TransformersBackend.read, TransformersBackend.score

    def noting_read(self: Any, chunk: Any) -> None:
        read.append(len(chunk))
        reading(self, chunk)

    def noting_score(self: Any, *given: Any) -> Any:
        assert self.cache.length == len(self.cached)
        behind.append(len(self.cached))
        return score(self, *given)

    monkeypatch.setattr(TransformersBackend, "read", noting_read)
    monkeypatch.setattr(TransformersBackend, "score", noting_score)
    curve = measure_costs(backend, (0, 7), seconds=0.01)
    assert sum(read) == min(behind) == 255
    assert LEAST < max(behind) < backend.info.context_length - 7
    assert backend.bytes == 0, "what it took is freed"
    assert min(curve.growth.token, curve.growth.row) >= 0
