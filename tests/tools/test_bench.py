"""What all benchmarks share: error messages, prompts, figures, the JSON line, and the peers of
transformers models."""

import json
from argparse import Namespace
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import transformers_peers
from bench.harness import Setup
from bench.measure import (
    PEERS,
    Divergence,
    Reply,
    Result,
    add_gaps,
    answered,
    categories,
    divergences,
    measure,
    sampling_of,
    speed,
    summary,
    verdict,
)
from bench.prompts import PROMPTS, cut_prompt, random_prompts, read_prompts
from bench.report import times
from bench.transformers_peers import transformers_peer
from engine.drafting.costs import CostCurve
from engine.drafting.databases import Databases
from engine.errors import SettingError
from engine.methods import METHODS
from engine.prompt import Chat
from engine.sampling import gumbel
from engine.settings import Generation, Sampling
from engine.types import STATISTICS, TIERS
from tests.conftest import EMBEDDED
from tests.support.toy import ToyBackend
from tests.tools.conftest import Program

# The benchmark imports torch, so even its refusals belong to the marked tests.
pytestmark = pytest.mark.model

FIGURES = {
    "tokens_per_second",
    "speedup",
    "mean_acceptance_length",
    "acceptance_ratio",
    "draft_ms_per_step",
    "identical",
    "differing_answers",
    "forward_share",
    "over_best_peer",
}
CONDITIONS = {"date", "model", "parameters", "dtype", "device", "machine", "threads", "torch"}


ASK = ["--limit", "1", "--max-new-tokens", "12"]


@pytest.mark.soak(stay=8)
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["speed", "--methods", "plain,warp"], "'warp'"),
        (["speed", "--methods", ","], "at least one method"),
        (["speed", "--repeats", "0"], "'0' is no number from 1 on"),
        (["speed", "--skip", "999"], "Skipping 999"),
        (["speed", "--model", "some/model", "--methods", "assisted"], "the embedded model"),
        (["speed", "--methods", "plain,llama-cpp-python"], "does not run transformers models"),
        (["speed", "--prompts", "/nowhere/prompts.jsonl"], "'/nowhere/prompts.jsonl'"),
        (["speed", "--model", "/nowhere", "--methods", "plain"], "'/nowhere'"),
        (["speed", "--max-new-tokens", "32000"], "no room"),
        (["speed", "--methods", "plain,hsd:huge@2", "--profile-tokens", "6", *ASK], "'huge'"),
        (["stack", "--drafts", "a/small,b/small", *ASK], "whose last parts differ"),
        (["truth", "--prompts", "random"], "'random' is no file"),
        (["stack", "--model", str(EMBEDDED), *ASK], "with --drafts, whose last parts differ"),
        (["stack", "--drafts", "nowhere/small", *ASK], "nowhere/small"),
        (
            ["replay", "--record", "--traces", "/nowhere/it.jsonl"],
            "'/nowhere/it.jsonl' cannot be wr",
        ),
        (["curve", "--lengths", "1"], "no number from 2 on"),
        (["curve", "--lengths", "90000"], "too short"),
        (["inflate", "--size", "2b", "--output", "x"], "'2b'"),
        (["inflate", "--size", "0.1b", "--output", "x", "--bits", "1"], "invalid choice: 1"),
        (["inflate", "--size", "0.1b", "--output", "x", "--dtype", "auto"], "'auto'"),
        (["inflate", "--size", "0.1b", "--output", "x", "--model", "/nowhere"], "'/nowhere'"),
    ],
    ids=str,
)
def test_mistakes_end_with_status_2_and_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], words: str, bench: Program
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in bench.refusal(*command)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_answers_at_once_are_compared_with_plain_ones(bench: Program) -> None:
    short = ["--limit", "3", "--max-new-tokens", "16", "--repeats", "1", "--dtype", "float32"]
    report = bench.record("crowd", *short, "--at-once", "1,3")
    assert [row["at_once"] for row in report["rows"]] == [1, 3]
    assert report["rows"][0]["over_alone"] == 1.0
    for row in report["rows"]:
        assert row["over_plain"] == pytest.approx(row["drafted"] / row["plain"])
        assert row["different"] == 0 and row["told"] > 0 and row["tokens_per_forward"] >= 1


@pytest.mark.soak
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_two_prompts_end_in_one_json_line(temperature: str, bench: Program) -> None:
    where = ["--threads", "1", "--dtype", "float32", "--device", "cpu"]
    short = ["--limit", "2", "--max-new-tokens", "24", "--temperature", temperature]
    report = bench.record("speed", *short, *where)
    assert set(report) >= CONDITIONS
    assert report["prompts"] == 2 and report["max_new_tokens"] == 24
    assert report["statistics"] is True and report["assistant"] == "small"
    methods = report["methods"]
    curve = list(report["forward_ms"].values())
    assert min(curve) > 0 and len(curve) > 5
    assert list(methods) == [
        "plain", "generate", "prompt-lookup", "assisted", "rest", "hd-published", "lookup", "hd",
    ]  # fmt: skip
    for name, figures in methods.items():
        assert name in ("generate", "prompt-lookup", "assisted") or set(figures) >= FIGURES
        assert figures["identical"] is True and figures["unsteady_answers"] == 0
    assert methods["generate"]["mean_acceptance_length"] == 1.0
    assert len(report["categories"]) == 2
    assert all(set(speedups) == set(methods) for speedups in report["categories"].values())
    lookups = (methods[name]["mean_acceptance_length"] for name in ("lookup", "prompt-lookup"))
    assert len(set(lookups)) == 1, "the same drafts, so the same forwards"


def test_a_limit_takes_from_all_categories_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), ("c", "5"), ("c", "6")]
    path.write_text(
        "\n".join(json.dumps({"category": name, "turns": [text]}) for name, text in rows)
    )
    assert [text for _, text in read_prompts(path, 0)] == ["1", "4", "5", "2", "6", "3"]
    assert [text for _, text in read_prompts(path, 4)] == ["1", "4", "5", "2"]
    assert [text for _, text in read_prompts(path, 0, skip=1)] == ["2", "6", "3"]
    assert [text for _, text in read_prompts(path, 1, skip=2)] == ["3"]
    with pytest.raises(SettingError, match="no category has more than 3"):
        read_prompts(path, 0, skip=3)
    shipped = read_prompts(PROMPTS, 0)
    assert len(shipped) == len(set(shipped)) > 9 and all(text.strip() for _, text in shipped)


def took(seconds: float, forwards: int = 5, token: int = 1) -> list[Any]:
    return [Result("a", [Reply([token] * 10, seconds, seconds, forwards)])]


def test_the_arithmetic_of_a_summary() -> None:
    one, other = [1] * 10, [2] * 30
    plain = [Result("a", [Reply(one, 2.0, 1.0, 0)]), Result("b", [Reply(other, 2.0, 1.0, 0)])]
    slow = [Reply(one, seconds, 0.5, 0) for seconds in (1.0, 9.0, 1.0)]
    fast = [Result("a", slow), Result("b", [Reply(other, 1.0, 0.5, 0)])]
    assert speed(plain) == 10.0 and speed(plain, decode_only=True) == 20.0
    figures = summary("fast", {"plain": plain, "fast": fast})
    assert figures["speedup"] == figures["decode_speedup"] == 2.0
    assert figures["identical"] is True and figures["speedup_quartiles"] == [2.0, 2.0, 2.0]
    fast[1].replies[0] = Reply([*other[:29], 3], 1.0, 0.5, 0)
    figures = summary("fast", {"plain": plain, "fast": fast})
    assert figures["identical"] is False and figures["differing_answers"] == 1
    assert figures["over_best_peer"] is None
    assert "forward_share" not in figures, "there were no steps to look at"


def test_peers_and_methods_without_an_accepted_draft_in_a_summary() -> None:
    results = {"plain": took(4.0), "prompt-lookup": took(2.0, token=2), "hd-published": took(1.0)}
    results["hd"] = took(0.5)
    peer = summary("prompt-lookup", results)
    assert summary("hd", results)["over_best_peer"] == 2.0 and peer["over_best_peer"] == 0.5
    assert peer["identical"] is False and peer["mean_acceptance_length"] == 2.0
    results = {"plain": took(2.0, 10), "hd": took(1.0, 10), "model": took(4.0, 10)}
    results["lookup"] = took(1.0, 5)
    found = {name: summary(name, results)["speedup"] for name in results}
    assert found == {"plain": 1.0, "hd": None, "model": 0.5, "lookup": 2.0}
    assert summary("hd", results)["decode_speedup"] is None
    assert dict(categories(results)) == {"a": found}
    assert [times(ratio) for ratio in found.values()] == ["1.00x", "-", "0.50x", "2.00x"]
    results["generate"] = took(1.6, 10)
    found = {name: summary(name, results)["speedup"] for name in results}
    assert found["plain"] == 0.8 and found["lookup"] == 1.6, "the faster one without drafts counts"


def test_random_prompts_are_always_the_same_and_hold_no_special_tokens(embedded: Any) -> None:
    prompts = random_prompts(embedded, 0)
    assert prompts == random_prompts(embedded, 8) and len(prompts) == 8
    assert random_prompts(embedded, 3, skip=2) == prompts[2:5]
    assert all(len(prompt) == 200 for prompt in prompts) and prompts[0] != prompts[1]
    drawn = {token for prompt in prompts for token in prompt}
    assert not drawn & {*embedded.tokenizer.all_special_ids, *embedded.info.eos_ids}
    assert max(drawn) < embedded.info.vocabulary_size and len(drawn) > 1000


def questions(backend: Any) -> list[list[int]]:
    texts = ("Tell me a story about a fox.", "Write a list of ten short words.")
    return [cut_prompt(Chat(backend), text, 999) for text in texts]


def answer(backend: Any, method: Any, prompt: list[int], wanted: Generation) -> Any:
    return Result("a", [answered(backend, method, Databases(), prompt, wanted)])


SAMPLERS = [
    Sampling(0.0),
    Sampling(0.7, seed=2),
    Sampling(1.2, top_k=40, top_p=0.9, min_p=0.02, seed=6),
]


@pytest.mark.soak
@pytest.mark.parametrize("sampling", SAMPLERS, ids=lambda sampling: str(sampling.temperature))
def test_the_library_says_what_plain_decoding_says(embedded: Any, sampling: Sampling) -> None:
    peers = [transformers_peer(name, embedded) for name in PEERS["transformers"]]
    drafts = peers[2].settings["assistant_model"]
    assert (drafts.dtype, drafts.device) == (embedded.model.dtype, embedded.model.device)
    assert drafts.num_parameters() < embedded.info.parameters / 4
    wanted, ends = Generation(sampling, max_tokens=48), set()
    for prompt in questions(embedded):
        plain = answer(embedded, METHODS["plain"], prompt, wanted)
        assert plain.forwards == len(plain.tokens) > 5
        ends.add(plain.tokens[-1] in embedded.info.eos_ids)
        forwards = {}
        for peer in peers:
            theirs = answer(embedded, peer, prompt, wanted)
            assert theirs.tokens == plain.tokens
            assert theirs.seconds(False) > 0 and theirs.seconds(True) > 0
            forwards[peer.name] = theirs.forwards
        assert forwards["generate"] == plain.forwards
        assert forwards["assisted"] < plain.forwards
        assert forwards["prompt-lookup"] < plain.forwards + (sampling.temperature > 0)
        lookup = answer(embedded, METHODS["lookup"], prompt, wanted)
        assert lookup.forwards == forwards["prompt-lookup"], "the same drafts at every step"
    if not sampling.temperature:
        assert ends == {True, False}, "an answer that ends by itself, one that is cut"


def test_the_library_chooses_no_more_often_than_plain_decoding(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer is not to pay for more choices than ours."""
    choices: list[int] = []
    real = transformers_peers.chosen_first

    def counted(logits: Any, sampling: Sampling, position: int) -> Any:
        choices.append(position)
        return real(logits, sampling, position)

    monkeypatch.setattr(transformers_peers, "chosen_first", counted)
    wanted = Generation(Sampling(0.4, seed=1), max_tokens=40)
    for name in ("generate", "prompt-lookup"):
        peer = transformers_peer(name, embedded)
        for prompt in questions(embedded):
            choices.clear()
            said = len(peer.answer(prompt, wanted).tokens)
            # Prompt lookup may draft, and be right, beyond the length limit.
            assert said <= len(choices) <= said + 10 * (said == 40) * (name == "prompt-lookup")


def test_the_library_follows_our_settings_and_not_the_makers(
    embedded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = questions(embedded)[0]
    plain = answer(embedded, METHODS["plain"], prompt, Generation(Sampling(0.0), max_tokens=24))
    config = embedded.model.generation_config
    monkeypatch.setattr(config, "repetition_penalty", 1.8)
    monkeypatch.setattr(config, "eos_token_id", plain.tokens[4])
    peer = transformers_peer("generate", embedded)
    theirs = answer(embedded, peer, prompt, Generation(Sampling(0.0), max_tokens=24))
    assert theirs.tokens == plain.tokens


@pytest.mark.soak
def test_a_method_learns_from_an_answer_once_and_after_its_repeats(embedded: Any) -> None:
    names = ("hd", "model", "hd-published", "lookup")
    methods: dict[str, Any] = {name: METHODS[name] for name in names}
    methods["generate"] = transformers_peer("generate", embedded)
    assert {name for name in names if methods[name].adaptive} == {"hd", "model"}
    databases = {name: Databases() for name in methods}
    prompts = [("a", prompt) for prompt in questions(embedded)]
    curve, wanted = CostCurve({0: 0.005, 63: 0.005}), Generation(Sampling(0.0), max_tokens=24)
    setup = Setup(Namespace(repeats=2), embedded, prompts * 2, wanted, ExitStack())
    results = measure(setup, databases, methods, curve)
    assert curve.points == {0: 0.005, 63: 0.005}, "each method corrects a copy"
    for own in results.values():
        assert [len(result.replies) for result in own] == [2] * 4
        assert all(one.tokens == two.tokens for one, two in (r.replies for r in own))
        assert [result.tokens for result in own[2:]] == [result.tokens for result in own[:2]]
    documents = {
        name: max((count for _, count in databases[name].learned.grams()), default=0)
        for name in names
    }
    assert documents == {"hd": 2, "model": 2, "hd-published": 0, "lookup": 0}
    learned: Any = databases["hd-published"].published["model"]
    assert max(learned.grams.values()) == 2
    for name in ("hd-published", "model"):
        forwards = [result.forwards for result in results[name]]
        assert sum(forwards[2:]) < sum(forwards[:2]), "the second time it has been said before"
    assert databases["hd"].calibration.rows() and not databases["hd-published"].calibration.rows()


def test_every_prompt_has_a_seed_of_its_own() -> None:
    """The same random numbers in all answers would make a few of them no sample."""
    toy, wanted = ToyBackend(), Generation(Sampling(0.9, seed=5), max_tokens=24)
    with ExitStack() as stack:
        setup = Setup(Namespace(repeats=2), toy, [("a", [97, 98, 99])] * 2, wanted, stack)
        results = measure(setup, {"plain": Databases()}, {"plain": METHODS["plain"]})["plain"]
    first, second = ([reply.tokens for reply in result.replies] for result in results)
    assert first[0] == first[1] and second[0] == second[1] and first[0] != second[0]


@pytest.mark.soak
def test_no_method_finds_what_another_looked_up(embedded: Any) -> None:
    names = ("plain", "rest", "hd", "lookup")
    methods: dict[str, Any] = {name: METHODS[name] for name in names}
    methods["generate"] = transformers_peer("generate", embedded)
    with ExitStack() as stack:
        setup = Setup(Namespace(), embedded, [], Generation(), stack)
        databases = setup.databases(methods)
        tables = {name: own.statistics for name, own in databases.items()}
        assert tables["rest"] is not tables["hd"]
        asks = {name for name in names if STATISTICS in METHODS[name].drafting.tiers}
        assert {name for name, table in tables.items() if table is not None} == asks
        assert asks == {"rest", "hd"} and TIERS[-1] == STATISTICS


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_altered_answer_is_found_and_its_gap_measured(temperature: float) -> None:
    toy, sampling, at = ToyBackend(), Sampling(temperature, seed=3), 5
    prompts = [[97, 98, 99], [99, 98, 97]]
    wanted = Generation(sampling, max_tokens=16)
    plain = [
        answer(
            toy, METHODS["plain"], prompt, replace(wanted, sampling=sampling_of(sampling, number))
        ).tokens
        for number, prompt in enumerate(prompts)
    ]
    altered = list(plain[1])
    altered[at] = (altered[at] + 1) % toy.info.vocabulary_size
    assert divergences(toy, prompts, plain, plain, sampling) == []
    (parting,) = divergences(toy, prompts, plain, [plain[0], altered], sampling)
    assert (parting.prompt, parting.position) == (1, at)
    short = divergences(toy, prompts, plain, [plain[0][:4], altered], sampling)
    assert short == [Divergence(0, 4, None), parting]
    logits = toy.logits(tuple([*prompts[1], *plain[1][:at]][-2:]))
    if temperature:
        logits = logits + temperature * gumbel(4, len(prompts[1]) + at, range(logits.size))
    assert parting.gap == pytest.approx(logits[plain[1][at]] - logits[altered[at]], abs=1e-3)
    assert parting.gap is not None and parting.gap > 0, "plain decoding chose the highest"


def test_the_report_says_how_near_a_tie_a_difference_is(embedded: Any) -> None:
    prompts = questions(embedded)
    wanted = Generation(Sampling(0.0), max_tokens=8)
    plain = [answer(embedded, METHODS["plain"], prompt, wanted) for prompt in prompts]
    other = [deepcopy(result) for result in plain]
    results = {"plain": plain, "hd": other}
    named = [("a", prompt) for prompt in prompts]
    setup = Setup(Namespace(), embedded, named, wanted, ExitStack())
    for change, words in (
        ([], "yes"),
        ([(other[0].tokens[3] + 1) % 99], "NO: 1 differ, gap at most "),
        ([other[0].tokens[3]], "NO: 1 differ, lengths differ"),
    ):
        if change:
            other[0].tokens[3:] = change
        figures = {name: summary(name, results) for name in results}
        add_gaps(setup, figures, results)
        assert verdict(figures["hd"]).startswith(words) and verdict(figures["plain"]) == "yes"
        json.dumps(figures, allow_nan=False)
    assert figures["hd"]["divergences"] == [{"prompt": 0, "position": 4, "gap": None}]


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_any_backend_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, temperature: str, bench: Program
) -> None:
    monkeypatch.setattr("bench.harness.load_model", lambda name, options: ToyBackend())
    methods = ["plain", "hd-published", "lookup", "hd"]
    short = ("--limit", "2", "--max-new-tokens", "40", "--temperature", temperature)
    for extra in ((), ("--prompts", "random")):
        *table, line = bench("speed", *short, *extra, "--methods", ",".join(methods))
        report = json.loads(line)
        assert (report["model"], report["kind"]) == ("toy", "toy") and report["prompts"] == 2
        assert list(report["methods"]) == methods
        assert any(row.startswith("ms of a forward by drafted nodes: 0: ") for row in table)
        assert report["forward_ms"]
        assert all(figures["identical"] for figures in report["methods"].values())
    assert report["prompt_file"] == "random"
