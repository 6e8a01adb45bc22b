"""Models that compute a long text in another way than a short one: their switches change no word.

The reference is the library's own generate(), on a model of its own.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.backends.transformers import TransformersBackend
from engine.decode import never
from engine.drafting.databases import Databases
from engine.methods import METHODS
from engine.prompt import Chat
from engine.settings import Generation, Sampling
from engine.tree import Tree
from engine.types import Message, Prefill, Step
from tests.support.backends import (
    GREEDY,
    KINDS,
    SMALL,
    WIDE,
    gap,
    load,
    prompt_of,
    save_model,
    tree_of,
    wrong_at,
)
from tests.support.lossless import Adversary, assert_lossless, events_of, ids, tokens_of
from tests.support.replies import reply

pytestmark = pytest.mark.model
SWITCH = 64
FACTORS = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "original_max_position_embeddings": SWITCH,
    "factor": 4.0,
}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-long": (
        "Phi3Config",
        {**SMALL, "intermediate_size": 64, "max_position_embeddings": 256,
         "original_max_position_embeddings": SWITCH, "rope_parameters": FACTORS},
    ),
    "llama-long": (
        "LlamaConfig", {**WIDE, "max_position_embeddings": 256, "rope_parameters": FACTORS},
    ),
    "gemma3-long": (
        "Gemma3TextConfig",
        {**WIDE, "sliding_window": 8, "max_position_embeddings": 256,
         "layer_types": ["sliding_attention", "full_attention"],
         "rope_parameters": {
             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
             "full_attention": FACTORS,
         }},
    ),
    "llama-dynamic": (
        "LlamaConfig",
        {**WIDE, "max_position_embeddings": 96,
         "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
}  # fmt: skip
"""The library starts again at the switch with the first, and goes on with the next two: one has
factors for each kind of layer."""
SIZES = (30, 50, 61, 63, 64, 65, 66, 90)
"""Prompts before, at and beyond the switch; answers of 30 tokens cross it from most of them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The folder and the backend of each kind."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for kind, settings in LONG.items():
            patch.setitem(KINDS, kind, settings)
            folder = save_model(kind, tmp_path_factory.mktemp(kind))
            found[kind] = folder, load(folder)
    return found


def generated(folder: Path, prompt: Sequence[int], most: int, ends: Sequence[int]) -> list[int]:
    """What the library's own greedy decoding says, in a model that nothing else has used."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            do_sample=False,
            max_new_tokens=most,
            eos_token_id=list(ends),
            pad_token_id=0,
        )
    return [int(token) for token in found[0, len(prompt) :]]


def run(backend: Any, prompt: Sequence[int], wanted: Generation, kind: str = "plain") -> Any:
    """An answer with a kind of drafts; "truth" drafts the plain answer, mixed with wrong ones."""
    if kind == "plain":
        return events_of(backend, prompt, wanted)
    if kind == "hd":
        return events_of(backend, prompt, wanted, METHODS["hd"].drafters(Databases()))
    plain = events_of(backend.open(), prompt, wanted)
    truth = [*prompt, *ids(plain)]
    deep = Adversary(lambda tokens: [tuple(truth[len(tokens) : len(tokens) + 40])], obedient=False)
    drafters = [deep] if kind == "deep" else [wrong_at(truth, 160, branches=True)]
    return events_of(backend, prompt, wanted, drafters)


def test_what_the_library_does_at_the_switch_is_found_out(models: Any) -> None:
    found = {kind: (b.rotary.switches, b.restarts) for kind, (_, b) in models.items()}
    assert found == {
        "phi3-long": ([SWITCH], True),
        "llama-long": ([SWITCH], False),
        "gemma3-long": ([SWITCH], False),
        "llama-dynamic": ([], False),
    }
    assert all(b.info.can_tree and not b.info.note for _, b in models.values())


@pytest.mark.parametrize("kind", LONG)
def test_plain_decoding_says_what_the_library_generates(models: Any, kind: str) -> None:
    folder, backend = models[kind]
    crossed = 0
    for size in SIZES:
        prompt, most = prompt_of(size, 160), min(30, 96 - size)
        said = ids(run(backend.open(), prompt, Generation(GREEDY, max_tokens=most)))
        assert said == generated(folder, prompt, most, sorted(backend.info.eos_ids)), size
        crossed += size <= SWITCH < size + len(said) - 1
    assert crossed >= 3


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize("drafts", ["hd", "truth", "deep"])
@pytest.mark.parametrize("kind", LONG)
def test_accelerated_answers_are_the_plain_ones_across_the_switch(
    models: Any, kind: str, drafts: str
) -> None:
    """With one cache for all of them, which holds what the one before has left."""
    _, backend = models[kind]
    fast, crossed, accepted = backend.open(), 0, 0
    for number, size in enumerate(SIZES):
        prompt = prompt_of(size, 160)
        for temperature in (0.0, 0.7, 1.0):
            wanted = Generation(Sampling(temperature, seed=number), max_tokens=30)
            plain = run(backend.open(), prompt, wanted)
            steps = run(fast, prompt, wanted, drafts)
            assert_lossless(plain, steps)
            crossed += size <= SWITCH < size + len(ids(plain)) - 1
            accepted += sum(sum(step.accepted.values()) for step in steps)
    assert crossed >= 6 and accepted > 30


@pytest.mark.parametrize("kind", LONG)
def test_later_turns_across_the_switch(models: Any, kind: str) -> None:
    """The cache of the last turn is used as far as a text of the new length can use it."""
    folder, backend = models[kind]
    caches = {"plain": backend.open(), "hd": backend.open(), "truth": backend.open()}
    text, reused = prompt_of(20, 160), list[int]()
    for turn in range(4):
        wanted = Generation(GREEDY, max_tokens=8)
        said = {name: ids(run(cache, text, wanted, name)) for name, cache in caches.items()}
        assert said["hd"] == said["truth"] == said["plain"]
        assert said["plain"] == generated(folder, text, 8, sorted(backend.info.eos_ids))
        text = [*text, *said["plain"], *prompt_of(7 + turn, 160)]
        before = len(caches["plain"].cached)
        filled = caches["plain"].prefill(text, never)
        reused.append(filled.reused == before)
        assert filled.complete and filled.reused in (0, before)
    switches = [] if kind == "llama-dynamic" else [False]
    assert reused.count(False) == len(switches), "read anew at the switch alone"


@pytest.mark.parametrize("kind", ["phi3-long", "llama-long", "gemma3-long"])
def test_a_cache_of_the_other_side_is_not_used(models: Any, kind: str) -> None:
    _, backend = models[kind]
    long, short = prompt_of(100, 160), [*prompt_of(31, 160)[:30], 7]
    for before, after in ((long, short), (short, [*short[:30], *long[30:]])):
        other = backend.open()
        other.prefill(before, never)
        assert other.prefill(after, never).reused == 0
        assert gap(other.score(Tree(after[-1]), GREEDY).row(0), other.alone(after)) < 1e-3
    one = backend.open()
    one.prefill(long, never)
    other = [*long[:80], 9, 8]
    assert one.prefill(other, never).reused == 80, "on one side it is used"
    assert gap(one.score(Tree(8), GREEDY).row(0), one.alone(other)) < 1e-3


@pytest.mark.parametrize("kind", ["phi3-long", "llama-long", "gemma3-long"])
def test_what_a_forward_across_the_switch_has_left_is_not_used(models: Any, kind: str) -> None:
    """Draft models may make one: the worst of it is a bad draft."""
    other, prompt = models[kind][1].open(), prompt_of(62, 160)
    other.prefill(prompt, never)
    tree = Tree(prompt[-1])
    path = [tree.add(0, 5, ""), tree.add(1, 6, ""), tree.add(2, 7, "")]
    other.score(tree, GREEDY)
    other.accept(path[:1])
    again = [*prompt, 5]
    assert other.prefill(again, never).reused == 0
    assert gap(other.score(Tree(5), GREEDY).row(0), other.alone(again)) < 1e-3


@pytest.mark.parametrize("kind", ["phi3-long", "llama-long", "gemma3-long"])
@pytest.mark.parametrize("size", [60, 63, 64, 65, 66, 200])
def test_a_prompt_is_read_as_in_one_forward(
    models: Any, monkeypatch: pytest.MonkeyPatch, kind: str, size: int
) -> None:
    """In chunks, the first of which lie before the switch."""
    _, backend = models[kind]
    monkeypatch.setattr("engine.backends.transformers.PREFILL_CHUNK", 20)
    other, prompt = backend.open(), prompt_of(size, 160)
    filled = other.prefill(prompt, never)
    assert filled.limit == (SWITCH if kind == "phi3-long" and size <= SWITCH else None)
    limit = other.depth_limit(size)
    assert limit == (SWITCH - size if size <= SWITCH else None)
    tree = tree_of(prompt[-1]).within(None, limit)
    scores = other.score(tree, GREEDY)
    for row in range(len(tree) + 1):
        chain = [*prompt, *tree.path(row)]
        assert gap(scores.row(row), backend.alone(chain)) < 1e-3, row


def test_dynamic_factors_stay_the_first_ones_within_the_context(models: Any) -> None:
    """The library keeps the factors of the longest text that it ever saw."""
    _, backend = models["llama-dynamic"]
    (module,) = [m for m in backend.model.modules() if hasattr(m, "rope_type")]
    assert backend.info.context_length == 96
    before = module.inv_freq.clone()
    wanted = Generation(Sampling(0.7), max_tokens=500)
    steps = run(backend.open(), prompt_of(80, 160), wanted, "deep")
    assert steps[-1].finish in ("context", "eos")
    assert (module.inv_freq == before).all()


def test_the_second_turn_of_a_chat_beyond_the_switch(models: Any) -> None:
    _, backend = models["phi3-long"]
    texts = []
    for name in ("plain", "hd"):
        chat, messages, events = Chat(backend.open()), [], list[Any]()
        drafters = METHODS[name].drafters(Databases())
        for words in ("hello there, you", "and again", "and more"):
            messages.append(Message("user", words))
            wanted = Generation(Sampling(0.7, seed=3), max_tokens=20)
            drafting = METHODS[name].drafting
            said = list(reply(chat, chat.prompt(messages), drafters, wanted, drafting))
            events += [event for event in said if isinstance(event, Prefill)]
            steps = [event for event in said if isinstance(event, Step)]
            messages.append(Message("assistant", "".join(t.text for t in tokens_of(steps))))
        texts.append([message.content for message in messages])
        assert [event.reused > 0 for event in events] != [False] * 3
        assert events[0].tokens <= SWITCH < events[-1].tokens
    assert texts[0] == texts[1]


# The check at load goes beyond what a few tokens show.


def broken(*_: Any) -> Any:
    """Hides nothing."""
    return None


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral-window", {"sliding_window": 40}),
        ("gemma2-mixed", {"sliding_window": 40}),
        ("llama4-chunks", {"attention_chunk_size": 40}),
    ],
)
def test_the_check_goes_beyond_what_layers_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, Any]
) -> None:
    folder = save_model(kind, tmp_path, **changes)
    assert load(folder).info.can_tree
    monkeypatch.setattr(TransformersBackend, "far", broken)
    info = load(folder).info
    assert not info.can_tree and "decodes plainly: its tree forward is off by" in info.note


def test_the_check_goes_beyond_the_switch(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reading the tokens before it."""
    folder, _ = models["phi3-long"]
    rows = list[int]()
    forward = TransformersBackend.forward

    def counted(backend: Any, tokens: Sequence[int], *rest: Any, **named: Any) -> Any:
        rows.append(len(tokens))
        return forward(backend, tokens, *rest, **named)

    monkeypatch.setattr(TransformersBackend, "forward", counted)
    assert load(folder).info.can_tree and sum(rows) < SWITCH
    monkeypatch.setattr(
        "engine.backends.transformers.with_last", lambda positions, length: positions
    )
    monkeypatch.setattr("engine.backends.transformers.without_last", lambda *given: given[-1])
    assert "decodes plainly: its tree forward is off by" in load(folder).info.note


@pytest.mark.parametrize("kind", ["mistral-window", "llama4-chunks"])
def test_the_longer_check_is_left_out_where_it_would_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    name = "sliding_window" if kind == "mistral-window" else "attention_chunk_size"
    folder = save_model(kind, tmp_path, **{name: 40})
    monkeypatch.setattr("engine.backends.check.LITTLE", {"cpu": 100.0})
    monkeypatch.setattr("engine.backends.transformers.TransformersBackend.far", broken)
    assert load(folder).info.can_tree


def test_where_rows_are_taken_for_positions_chains_are_verified(tmp_path: Path) -> None:
    settings = {"attn_temperature_tuning": True, "floor_scale": 32, "attn_scale": 3.0}
    folder = save_model("llama4-chunks", tmp_path, **settings)
    backend = load(folder)
    assert backend.info.leaves == 1 and "one guess per token is checked" in backend.info.note
    prompt = prompt_of(25, 160)
    for temperature in (0.0, 0.7, 1.0):
        wanted = Generation(Sampling(temperature, seed=2), max_tokens=30)
        plain = events_of(backend.open(), prompt, wanted)
        truth = [*prompt, *ids(plain)]
        fast = events_of(backend, prompt, wanted, [wrong_at(truth, 160, branches=True)])
        assert_lossless(plain, fast)
    longer = save_model("llama4-chunks", tmp_path / "longer", **{**settings, "floor_scale": 65})
    context = load(longer, context_length=64)
    assert context.info.leaves is None and not context.info.note, "it never matters there"
