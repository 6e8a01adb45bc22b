"""The peers of GGUF models: which can run, and that they say the same."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.harness import SHORT, kind_of, source_of
from bench.llama_peers import LlamaPeer
from bench.measure import PEERS, divergences
from bench.prompts import cut_prompt
from bench.report import LLAMA_CPP, TRANSFORMERS
from bench.speed import DEFAULTS, Speed, checked_methods
from engine.decode import decode
from engine.errors import SettingError
from engine.methods import METHODS
from engine.models.gguf import ATTENTION, context_parameters
from engine.models.loaders import load, name_of
from engine.prompt import Chat
from engine.settings import Generation, Runtime, Sampling
from engine.types import Step
from tests.tools.conftest import Program

NEAR = 0.05
"""Logits that part a near-tie, which other processors may round otherwise."""
QUESTIONS = ("Tell me a story about a fox.", "What is the sun?")


def options(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    Speed().add_arguments(parser)
    return parser.parse_args(arguments)


# Which methods can run: nothing is loaded for that.


def test_a_source_tells_the_kind_and_the_name_of_its_model() -> None:
    assert kind_of("embedded") == kind_of("some/model") == kind_of("folder") == TRANSFORMERS
    assert kind_of("embedded-gguf") == kind_of("x/y.GGUF") == LLAMA_CPP
    assert kind_of("some/model:file.gguf") == LLAMA_CPP
    assert all(Path(source_of(name)).exists() for name in SHORT)
    names = {name_of(source) for source in ("a/small", "b/small.gguf", "some/repo:c/small.gguf")}
    assert names == {"small"} and name_of("small.q8_0.gguf") == "small.q8_0"


def test_peers_that_need_more_are_left_out() -> None:
    names = checked_methods(options("--model", "some/model"))
    absent = ("assisted", "llama.cpp")
    assert names == [name for name in DEFAULTS[TRANSFORMERS] if name not in absent]
    assert "assisted" in checked_methods(options())
    assert "llama.cpp" in checked_methods(options("--gguf", "x.gguf"))
    with pytest.raises(SettingError, match="--gguf"):
        checked_methods(options("--methods", "plain,llama.cpp"))


@pytest.mark.parametrize(
    ("model", "method", "own"),
    [
        *(("x.gguf", name, LLAMA_CPP) for name in PEERS[TRANSFORMERS]),
        *(("embedded", name, TRANSFORMERS) for name in PEERS[LLAMA_CPP]),
    ],
)
def test_peers_of_the_other_kind_of_model_are_refused(model: str, method: str, own: str) -> None:
    with pytest.raises(SettingError) as raised:
        checked_methods(options("--model", model, "--methods", f"plain,{method}"))
    assert f"{method!r} does not run {own} models" in str(raised.value)
    assert ", ".join(PEERS[own]) in str(raised.value)


# The peers themselves, on the embedded GGUF file.

SAMPLERS = [Sampling(0.0), Sampling(0.7, seed=3), Sampling(1.1, top_k=50, top_p=0.9, min_p=0.01)]


@pytest.fixture(scope="module")
def gguf() -> Iterator[Any]:
    """The embedded GGUF target as the peers are to run it, on one thread."""
    source = source_of("embedded-gguf")
    runtime = Runtime(threads=1, context_length=1024, batch_size=32, cache_type="f16")
    yield SimpleNamespace(backend=load(source, runtime), source=source, runtime=runtime)


def peer_of(gguf: Any) -> Any:
    return closing(LlamaPeer(gguf.backend, gguf.source, gguf.runtime))


def prompts_of(gguf: Any, texts: Sequence[str] = QUESTIONS) -> list[list[int]]:
    return [cut_prompt(Chat(gguf.backend), text, 900) for text in texts]


def plain_answer(gguf: Any, prompt: Sequence[int], generation: Generation) -> list[int]:
    events = decode(gguf.backend, prompt, (), generation, METHODS["plain"].drafting)
    return [token.id for event in events if isinstance(event, Step) for token in event.tokens]


def check_same(
    gguf: Any, prompt: Sequence[int], plain: list[int], other: list[int], sampling: Sampling
) -> None:
    """The same answer, up to a near-tie."""
    for found in divergences(gguf.backend, [prompt], [plain], [other], sampling):
        assert found.gap is not None and abs(found.gap) < NEAR


@pytest.mark.gguf
def test_the_peers_get_our_settings(gguf: Any) -> None:
    ours = context_parameters(gguf.backend.model, gguf.runtime)
    with peer_of(gguf) as peer:
        parameters: Any = peer.llama.context_params
        assert (parameters.n_ctx, parameters.n_threads, parameters.n_threads_batch) == (1024, 1, 1)
        assert parameters.n_batch == parameters.n_ubatch == ours.n_batch
        assert parameters.type_k == parameters.type_v == 1, "float16"
        assert parameters.flash_attn_type == (ours.flash_attn_type != ATTENTION["off"])


@pytest.mark.soak(stay=2)
@pytest.mark.gguf
@pytest.mark.parametrize("sampling", SAMPLERS, ids=lambda sampling: str(sampling.temperature))
def test_llama_cpp_python_says_what_plain_decoding_says(gguf: Any, sampling: Sampling) -> None:
    wanted = Generation(sampling, max_tokens=48)
    # Beyond one batch.
    long = [*prompts_of(gguf)[0][:-2], *(40 + at % 90 for at in range(300)), 1, 4]
    assert len(long) > context_parameters(gguf.backend.model, gguf.runtime).n_batch
    with peer_of(gguf) as peer:
        for prompt in (*prompts_of(gguf), long):
            plain = plain_answer(gguf, prompt, wanted)
            first, again = (peer.answer(prompt, wanted) for _ in range(2))
            assert first.tokens == again.tokens and first.forwards == again.forwards
            check_same(gguf, prompt, plain, first.tokens, sampling)
            assert first.decode_seconds > 0 and first.seconds > 0
            assert first.forwards == len(first.tokens) <= 48
            ended = first.tokens[-1] in gguf.backend.info.eos_ids
            assert ended or len(first.tokens) == 48
        one = peer.answer(prompt, Generation(sampling, max_tokens=1))
        assert len(one.tokens) == one.forwards == 1 and one.decode_seconds == one.seconds


@pytest.fixture
def asked(tmp_path: Path) -> str:
    """A file with the questions."""
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [text]}) for text in QUESTIONS))
    return str(path)


@pytest.mark.gguf
def test_the_speed_of_a_gguf_file_with_its_peers_ends_in_one_json_line(
    asked: str, bench: Program
) -> None:
    methods = ["plain", "llama-cpp-python", "hd-published", "hd"]
    report = bench.record(
        *("speed", "--model", "embedded-gguf", "--prompts", asked, "--max-new-tokens", "12"),
        *("--threads", "1", "--context-length", "1024", "--batch-size", "32"),
        *("--methods", ",".join(methods)),
    )
    assert (report["kind"], report["dtype"], report["threads"]) == (LLAMA_CPP, "Q8_0", 1)
    assert report["llama-cpp-python"] and "torch" not in report and report["statistics"] is True
    assert (report["context_length"], report["batch_size"]) == (1024, 32)
    figures = report["methods"]
    assert list(figures) == methods and len(report["forward_ms"]) > 5
    for name in methods:
        assert figures[name]["identical"] or figures[name]["largest_gap"] < NEAR
    best = figures["hd-published"]["tokens_per_second"]
    assert figures["hd"]["over_best_peer"] == figures["hd"]["tokens_per_second"] / best


@pytest.mark.soak
@pytest.mark.gguf
@pytest.mark.model
def test_a_file_of_the_same_weights_is_decoded_next_to_a_model(
    asked: str, gguf_files: dict[str, Path], bench: Program
) -> None:
    report = bench.record(
        *("speed", "--prompts", asked, "--max-new-tokens", "12", "--threads", "1"),
        *("--dtype", "float32", "--gguf", str(gguf_files["target-F32"])),
        *("--methods", "plain,llama.cpp,hd"),
    )
    figures = report["methods"]
    assert list(figures) == ["plain", "llama.cpp", "hd"]
    other = figures["llama.cpp"]
    assert other["identical"] or other["largest_gap"] < NEAR
    fastest = max(figures[name]["tokens_per_second"] for name in ("plain", "llama.cpp"))
    assert figures["hd"]["speedup"] == pytest.approx(figures["hd"]["tokens_per_second"] / fastest)


@pytest.mark.soak
@pytest.mark.gguf
@pytest.mark.model
def test_a_stack_mixes_both_kinds_of_models(asked: str, bench: Program) -> None:
    folder, file = (
        SHORT["embedded"].with_name("small"),
        SHORT["embedded-gguf"].with_name("mid.gguf"),
    )
    record = bench.record(
        *("speed", "--model", "embedded-gguf", "--drafts", f"{folder},{file}", "--prompts", asked),
        *("--methods", "plain,hsd:small@2/mid@3", "--max-new-tokens", "8", "--threads", "1"),
        *("--profile-tokens", "6", "--limit", "1"),
    )
    assert record["drafts"] == ["small", "mid"]
