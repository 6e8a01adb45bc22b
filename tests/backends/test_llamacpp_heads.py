"""Heads of GGUF models: they are found, guess as the library alone would, and change no text."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import llama_cpp
import numpy as np
import pytest

from engine.backends.base import Backend
from engine.decode import never
from engine.drafting.base import Drafter, FailSafeDrafter
from engine.drafting.databases import Databases
from engine.errors import ModelError
from engine.heads import llamacpp
from engine.methods import method_named
from engine.models import probe
from engine.models.formats import Gguf
from engine.models.gguf_files import is_model
from engine.models.loaders import load, need
from engine.models.probe import probe_of
from engine.sampling import Floats
from engine.settings import Drafting, Runtime, Sampling
from engine.types import HEAD, Step
from tests.support.gguf_files import opened_gguf, rewritten, tiny_gguf
from tests.support.head_files import (
    assistant_gguf,
    dflash_gguf,
    eagle3_gguf,
    llama_gguf,
    model_with_head,
    opened_head,
)
from tests.support.lossless import (
    Adversary,
    assert_lossless,
    events_of,
    garbage,
    generation,
    tokens_of,
)

pytestmark = pytest.mark.gguf
STEPS = 48
PROMPT = tuple(range(40, 70))
BESIDE = ("EAGLE-3", "assistant")
"""Heads in files of their own: one with a cache of its own, one that reads the model's."""
BLOCKS = ("DFlash", "DFlash2")
"""Those that guess several tokens at once, the second one with a selector."""
KINDS = (*BESIDE, *BLOCKS, "MTP", "MTP, marks")
"""The last two are in the file of a model that keeps a state: it goes back by snapshots of that, or
reads again behind marks."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: model_with_head(kind, tmp_path_factory.mktemp("heads")) for kind in KINDS}


@pytest.fixture(scope="module")
def models(files: dict[str, Path]) -> dict[str, Any]:
    return {kind: opened_head(kind, path) for kind, path in files.items()}


@pytest.fixture(params=KINDS)
def backend(models: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    model = models[request.param]
    model.reset()
    yield model
    model.head.listen(False)


def plain(
    backend: Any, temperature: float, seed: int, prompt: Sequence[int] = PROMPT
) -> list[Step]:
    backend.reset()
    return events_of(backend, prompt, generation(temperature, seed, STEPS))


def drafters(backend: Backend, name: str, temperature: float, seed: int) -> list[Drafter]:
    sampling = Sampling(temperature=temperature, seed=seed)
    return method_named(name).drafters(Databases(), sampling=sampling, target=backend)


def by_head(steps: Sequence[Step]) -> int:
    """How many tokens the head had right."""
    return sum(step.accepted.get(HEAD, 0) for step in steps)


# What is found.


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_found_and_told(
    files: dict[str, Path], models: dict[str, Any], kind: str
) -> None:
    info = models[kind].info.head
    assert info.drafts and not info.note
    assert (info.depth, info.at_once) == ((5, 5) if kind in BLOCKS else (8, 1))
    assert info.branches == (kind in (*BESIDE, *BLOCKS)), "as its model verifies them, or chains"
    assert info.name == {"EAGLE-3": "EAGLE-3", **dict.fromkeys(BLOCKS, "DFlash")}.get(kind, "MTP")
    if kind in (*BESIDE, *BLOCKS):
        assert info.parameters > 10_000 and info.memory_bytes >= 4 * info.parameters
    else:
        assert info.memory_bytes == 0, "they are among the model's"
        assert (models[kind].snapshots == 0) == (kind == "MTP, marks")
    assert info.fingerprint not in ("", models[kind].info.fingerprint)


def test_a_head_given_by_hand_is_the_one_found_beside_the_model(
    files: dict[str, Path], models: dict[str, Any], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere.gguf"
    elsewhere.write_bytes(files["EAGLE-3"].with_name("eagle3-attending.gguf").read_bytes())
    model = opened_gguf(files["EAGLE-3"], head=str(elsewhere))
    assert model.info.head == models["EAGLE-3"].info.head


@pytest.mark.parametrize("known", [None, 200])
def test_an_eagle3_head_that_shares_the_output_or_says_a_part_of_the_tokens(
    models: dict[str, Any], tmp_path: Path, known: int | None
) -> None:
    eagle3_gguf(tmp_path, known=known, own=known is not None)
    model, other = opened_gguf(llama_gguf(tmp_path)), models["EAGLE-3"]
    here, there = alone(model, PROMPT), alone(other, PROMPT)
    if known is None:
        assert same(here, there)
    else:
        assert np.allclose(here[0][:known], there[0][:known], atol=2e-3)
        assert np.all(here[0][known:] == -np.inf)
    fast = events_of(model, PROMPT, generation(0.7, 1, STEPS), drafters(model, "hd+head", 0.7, 1))
    assert_lossless(plain(other, 0.7, 1), fast)
    assert by_head(fast) > 5


def test_a_model_without_a_head_or_that_is_to_have_none_has_none(
    files: dict[str, Path], tmp_path: Path
) -> None:
    for model in (
        opened_gguf(tiny_gguf(tmp_path / "tiny.gguf")),
        opened_gguf(files["EAGLE-3"], head="off"),
    ):
        assert model.head is None and model.info.head is None


# The text.


def test_a_head_that_fails_is_told_and_the_next_answer_has_it_again(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, notices = plain(backend, 0.7, 1), list[str]()
    shared, count = backend.head.shared, 0

    def failing(code: int) -> None:
        nonlocal count
        count += 1
        if count > 9:
            raise ModelError("The head failed.")

    for times, expected in ((1, 1), (0, 0)):
        with monkeypatch.context() as patched:
            if times:
                patched.setattr(shared, "check", failing)
            backend.reset()
            guarded = [
                FailSafeDrafter(each, notices.append)
                for each in drafters(backend, "head@3", 0.7, 1)
            ]
            fast = events_of(backend, PROMPT, generation(0.7, 1, STEPS), guarded)
        assert_lossless(slow, fast)
        assert by_head(fast) > 0 and len(notices) == expected
        notices.clear()


# The guesses.


def guesses(backend: Any, tokens: Sequence[int], ahead: int = 3) -> list[Floats]:
    """The logits of a head behind a text and behind the tokens that it finds likeliest there."""
    guess = backend.head.start(tokens, Sampling(), never)
    found = [guess.logits]
    for _ in range(ahead - 1):
        [guess] = backend.head.extend([0], [guess.likeliest(1)[0][0]])
        found.append(guess.logits)
    backend.head.forget()
    return found


def alone(backend: Any, tokens: Sequence[int]) -> list[Floats]:
    """The same of a model that reads the text from nothing, whose head takes row after row."""
    rows, backend.head.shared.rows = backend.head.shared.rows, 1
    try:
        backend.reset()
        backend.head.listen(True)
        backend.prefill(tokens, never)
        return guesses(backend, tokens)
    finally:
        backend.head.shared.rows = rows


def same(one: list[Floats], other: list[Floats]) -> bool:
    return all(np.allclose(*pair, atol=2e-3) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_guesses_as_one_that_reads_all_anew(
    files: dict[str, Path], models: dict[str, Any], kind: str
) -> None:
    """After prompts in chunks, rejections, edits, and answers of branches."""
    backend, other = models[kind], opened_head(kind, files[kind])
    backend.reset()
    text = list(PROMPT)
    for turn in range(3):
        wrong = [Adversary(garbage), *drafters(backend, "head@3", 0.7, turn)]
        steps = events_of(backend, text, generation(0.7, turn, STEPS), wrong, Drafting(nodes=60))
        text += [token.id for token in tokens_of(steps)]
        backend.head.listen(True)
        backend.prefill(text, never)
        here = guesses(backend, text)
        assert same(here, alone(other, text))
        assert not same(here, alone(other, [*text[:-2], 5, text[-1]])), "what came before matters"
        text = [*text[: len(text) - turn], *range(50, 140)]


def test_tokens_that_are_read_once_more_change_nothing(backend: Any) -> None:
    """A model that keeps a state reads some again where it could not go back to their end."""
    events_of(backend, PROMPT, generation(0.7, 1, 9), drafters(backend, "head@2", 0.7, 1))
    head = backend.head
    head.listen(True)
    before = head.begin, head.fed, head.first, head.states.tolist()
    head.take(head.known - 2, head.states[:2])
    assert before == (head.begin, head.fed, head.first, head.states.tolist())


@pytest.mark.parametrize("kind", BESIDE)
def test_branches_are_guessed_as_chains_are(models: dict[str, Any], kind: str) -> None:
    """Whichever nodes go on, and however many of them."""
    backend = models[kind]
    backend.reset()
    head, paths = backend.head, [(0, 5), (0, 6), (0, 7), (1, 8), (0, 9), (1, 9), (1, 5), (0, 4)]
    head.listen(True)
    backend.prefill(PROMPT, never)
    head.start(PROMPT, Sampling(), never)
    first = head.extend([0] * 8, [10, 11, 12, 13, 14, 15, 16, 17])
    second = head.extend([3, 3, 0, 7, 3], [20, 21, 22, 23, 24])
    third = head.extend([parent for parent, _ in paths], [token for _, token in paths])
    head.forget()

    def chained(*tokens: int) -> Floats:
        head.start(PROMPT, Sampling(), never)
        [*_, last] = [head.extend([0], [token])[0] for token in tokens]
        head.forget()
        return last.logits

    behind = {0: (13, 20), 1: (13, 21)}
    expected = [chained(number) for number in range(10, 18)]
    expected += [chained(*path) for path in ((13, 20), (13, 21), (10, 22), (17, 23), (13, 24))]
    expected += [chained(*behind[parent], token) for parent, token in paths]
    assert same([guess.logits for guess in (*first, *second, *third)], expected)
    assert not same([first[0].logits], [first[1].logits])


def test_what_a_head_takes_for_a_conversation_is_told(backend: Any) -> None:
    events_of(backend, PROMPT, generation(0.7, 1, 9), drafters(backend, "head@2", 0.7, 1))
    here, head = backend.bytes, backend.head.bytes
    assert 0 < head < here
    other = backend.open()
    events_of(other, PROMPT, generation(0.7, 1, 9))
    assert backend.bytes == pytest.approx(here, rel=0.5)
    other.close()
    backend.close()
    assert backend.bytes == other.bytes == 0


def test_nothing_is_captured_for_who_does_not_ask(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain(backend, 0.0, 0)
    assert not backend.head.shared.capturing
    calls = []
    monkeypatch.setattr(backend.head.shared, "captured", calls.append)
    plain(backend, 0.0, 0)
    assert calls == []


# What cannot be used.


@pytest.mark.parametrize("kind", ["EAGLE-3", "MTP"])
@pytest.mark.parametrize("name", ["llama_set_embeddings_layer_inp", "llama_model_n_layer_nextn"])
def test_a_library_without_the_bindings_is_told_and_all_else_works(
    files: dict[str, Path],
    models: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
) -> None:
    slow = plain(models[kind], 0.7, 1)
    if name in llamacpp.SYMBOLS:
        missing = f"{name}_hidden"
        known = dict(llamacpp.SYMBOLS)
        known[missing] = known.pop(name)
        monkeypatch.setattr(llamacpp, "SYMBOLS", known)
    else:
        missing = name
        monkeypatch.delattr(llama_cpp, name)
    probe_of.cache_clear()
    model = opened_gguf(files[kind])
    assert model.head is None and not model.info.head.drafts
    assert f"lacks {missing}; 0.3.36 has it" in model.info.head.note
    fast = events_of(
        model, PROMPT, generation(0.7, 1, STEPS), method_named("hd").drafters(Databases())
    )
    assert_lossless(slow, fast)
    with pytest.raises(ModelError, match=missing):
        opened_gguf(files[kind], head=str(files["EAGLE-3"].with_name("eagle3-attending.gguf")))
    probe_of.cache_clear()


Change = Callable[[Path], Path]
UNFIT: dict[str, tuple[Change, str]] = {
    "width": (lambda folder: eagle3_gguf(folder, hidden=32), "states of 32 numbers"),
    "layers": (lambda folder: eagle3_gguf(folder, layers=(0, 1, 9)), "layers [0, 1, 9]"),
    "behind": (lambda folder: eagle3_gguf(folder, layers=(0, 1, 3)), "states of llama"),
    "kind": (assistant_gguf, "kind gemma4-assistant"),
    "layers of a block head": (
        lambda folder: dflash_gguf(folder, target_layers=[1, 9]), "layers [1, 9]"
    ),
    "DSpark": (
        lambda folder: dflash_gguf(folder, sample_from_anchor=False), "it is a DSpark head"
    ),
    "no block": (lambda folder: dflash_gguf(folder, block_size=1), "it guesses blocks of 1"),
    "no mask": (
        lambda folder: rewritten(
            dflash_gguf(folder, name="source.bin"),
            folder / "dflash-other.gguf",
            {"tokenizer.ggml.mask_token_id": None},
        ),
        "names no mask token",
    ),
    "tokens": (
        lambda folder: rewritten(
            eagle3_gguf(folder, name="source.bin"),
            folder / "eagle3-other.gguf",
            {"tokenizer.ggml.tokens": [f"t{number}" for number in range(260)]},
        ),
        "another vocabulary",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    make, reason = UNFIT[name]
    head = make(tmp_path)
    path = llama_gguf(tmp_path)
    found = opened_gguf(path)
    assert found.head is None and reason in found.info.head.note and not found.info.head.drafts
    with pytest.raises(ModelError) as caught:
        opened_gguf(path, head=str(head))
    assert reason in str(caught.value) and str(head) in str(caught.value)


def test_a_head_file_that_is_damaged_or_not_there(tmp_path: Path) -> None:
    path = llama_gguf(tmp_path)
    head = eagle3_gguf(tmp_path)
    head.write_bytes(head.read_bytes()[:3000])
    told = opened_gguf(path).info.head
    assert told.name == "EAGLE-3" and "cannot be read" in told.note
    head.unlink()
    (tmp_path / "a.txt").write_text("words")
    for name, words in {
        "none.gguf": "there is no such file or folder",
        "": "eagle3-*.gguf, dflash-*.gguf), and the folder holds a.txt, attending.gguf",
        "a.txt": "it is no GGUF file",
        "attending.gguf": "it is a model without prediction layers of the kind llama",
    }.items():
        given = str(tmp_path / name)
        with pytest.raises(ModelError) as caught:
            opened_gguf(path, head=given)
        assert words in str(caught.value) and given in str(caught.value)


def test_a_head_that_ends_the_process_costs_nothing_but_itself(
    files: dict[str, Path], models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that tries files dies over it, and tries the file again without it."""
    asked: list[str] = []
    real = probe.run

    def dying(module: str, path: str, settings: str, seconds: float) -> Any:
        asked.append(json.loads(settings)["head"])
        if asked[-1] != "off":
            return CompletedProcess([], -6, b"", b"")
        return real(module, path, settings, seconds=seconds)

    monkeypatch.setattr(probe, "run", dying)
    slow = plain(models["MTP"], 0.7, 1)
    model: Any = load(str(files["MTP"]), Runtime(threads=1, context_length=256))
    assert asked == ["auto", "off"]
    assert model.head is None and "gave up" in model.info.head.note
    assert_lossless(slow, plain(model, 0.7, 1))


# Memory, and which files are models.


def test_the_memory_of_a_head_is_counted_before_it_is_loaded(
    files: dict[str, Path], models: dict[str, Any]
) -> None:
    for kind in (*BESIDE, *BLOCKS, "MTP"):
        path = str(files[kind])
        whole, without = need(path, Runtime()), need(path, Runtime(head="off"))
        assert whole.weights - without.weights == models[kind].info.head.memory_bytes
        states = 512 * 64 * {"EAGLE-3": 3, **dict.fromkeys(BLOCKS, 2)}.get(kind, 1) * 4
        assert whole.cache - without.cache > 2 * states, "its own cache, and states of a prompt"


def test_files_of_heads_are_no_models(tmp_path: Path) -> None:
    head, model = eagle3_gguf(tmp_path), llama_gguf(tmp_path)
    assert is_model(str(model)) and not is_model(str(head))
    with pytest.raises(ModelError, match="holds the head of a model"):
        Gguf().check_files(str(head), (), "")
