"""Replaying recorded answers: what is counted is what a live run would have accepted."""

import json
import lzma
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.replay import (
    Count,
    Material,
    Recording,
    learn,
    measure,
    read_traces,
    replay,
)
from engine.decode import decode
from engine.drafting.base import Drafter, Learner
from engine.drafting.databases import Databases
from engine.errors import SettingError
from engine.methods import METHODS, Method, method_named
from engine.settings import Drafting, Generation, Sampling
from engine.types import TIERS, Message, Step
from tests.conftest import EMBEDDED
from tests.support.lossless import toy_table
from tests.support.tiers import Table
from tests.support.toy import END, VOCABULARY, ToyBackend
from tests.tools.conftest import Program

PROMPTS = ("once upon a time", "and then", "once more upon a time")
Live = tuple[Recording, list[Step]]


class Bytes(ToyBackend):
    """The toy's vocabulary, in which a text is its bytes."""

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())


def answer_of(prompt: str, sampling: Sampling) -> list[int]:
    events = decode(
        ToyBackend(), list(prompt.encode()), [], Generation(sampling, max_tokens=60), Drafting()
    )
    return [token.id for step in events if isinstance(step, Step) for token in step.tokens]


def live(drafters: Sequence[Drafter], drafting: Drafting, prompt: str, sampling: Sampling) -> Live:
    """A run on the toy, and its recording; it may not plan beyond its end, as a replay cannot."""
    tokens = list(prompt.encode())
    wanted = Generation(sampling, max_tokens=len(answer_of(prompt, sampling)))
    events = list(decode(ToyBackend(), tokens, drafters, wanted, drafting))
    steps = [event for event in events if isinstance(event, Step)]
    answer = [token.id for step in steps for token in step.tokens]
    return Recording(prompt, "test", tokens, answer, sampling), steps


def replayed(
    drafters: Sequence[Drafter], drafting: Drafting, recording: Recording
) -> tuple[int, int, int]:
    count = Count()
    replay(drafters, drafting, recording, VOCABULARY, count)
    assert count.seconds >= 0 and count.expected >= count.forwards
    return count.tokens, count.forwards, count.drafted


def compare(method: Method, known: bool = False) -> None:
    """Answer after answer, live and replayed, with databases that keep learning on both sides."""
    sides = [Databases(statistics=toy_table()) for _ in range(2)]
    for side in sides:
        method.drafters(side)
    saved = 0
    for (seed, temperature), prompt in product(enumerate((0.0, 0.7, 1.0, 1.5)), PROMPTS):
        sampling = Sampling(temperature, seed=seed)
        noise = sampling if known else None
        fresh, again = (method.drafters(side.next_conversation(), None, noise) for side in sides)
        recording, steps = live(fresh, method.drafting, prompt, sampling)
        drafted = sum(sum(step.proposed.values()) for step in steps)
        found = replayed(again, method.drafting, recording)
        assert found == (len(recording.answer), len(steps), drafted)
        saved += len(recording.answer) - len(steps)
    assert saved > 50, "where nothing is accepted, nothing is compared"


@pytest.mark.parametrize("tiers", [TIERS, ("context",), ("model",), ("statistics", "context")])
@pytest.mark.parametrize("known", [False, True], ids=["blind", "known"])
def test_a_replay_takes_the_forwards_of_the_live_run(tiers: tuple[str, ...], known: bool) -> None:
    drafting = Drafting(tiers=tiers, nodes=12, budget="fixed")
    compare(method_named("hd", drafting), known)


@pytest.mark.parametrize("name", ["hd-published", "rest", "lookup"])
def test_so_do_replays_of_the_peers(name: str) -> None:
    compare(METHODS[name])


def recordings(*answers: str, split: str = "test") -> list[Recording]:
    return [
        Recording(f"{split} {n}", split, list(b"tell me"), [*answer.encode(), END])
        for n, answer in enumerate(answers)
    ]


ENTRIES = [
    ("Prompt lookup", "lookup", METHODS["lookup"].drafting),
    ("Published", "hd-published", METHODS["hd-published"].drafting),
    ("Ours", "hd", Drafting(nodes=8, budget="fixed")),
    ("Model tier", "hd", Drafting(tiers=("model",), nodes=8, budget="fixed")),
]


def test_every_contestant_replays_every_answer_of_the_split() -> None:
    texts = recordings("the fox ran", "the dog slept", "the cow")
    found = measure(Material(texts, VOCABULARY, Table({})), ENTRIES)
    assert list(found) == [title for title, *_ in ENTRIES]
    for count in found.values():
        assert count.tokens == sum(len(r.answer) for r in texts)
        assert 0 < count.forwards <= count.tokens
        assert count.figures()["nodes"] == round(count.drafted / count.forwards, 2)
    assert measure(Material(texts[:1], VOCABULARY), ENTRIES, found) is found
    again = sum(len(r.answer) for r in [*texts, texts[0]])
    assert all(count.tokens == again for count in found.values()), "they are added up"
    assert set(Count().figures().values()) == {0.0}


@pytest.mark.parametrize("title", ["Published", "Ours", "Model tier"])
def test_what_was_said_before_is_known_and_the_context_is_not(title: str) -> None:
    """The answers that come before fill the model tier, and so does each replayed answer."""
    entries = [entry for entry in ENTRIES if entry[0] == title]
    text = "a long and winding answer that nobody would guess at once"

    def forwards(times: int = 1, before: int = 0) -> int:
        train = recordings(*[text] * before, split="train")
        material = Material(recordings(*[text] * times), VOCABULARY, train=train)
        return measure(material, entries)[title].forwards

    alone = forwards()
    # One answer is little evidence to a method that weighs it, so there are several.
    assert forwards(before=9) < 0.9 * alone, "trained on the answer"
    assert forwards(times=10) < 0.9 * 10 * alone, "learned from the answers before"


@pytest.mark.parametrize("title", ["Published", "Ours"])
def test_an_earlier_conversation_is_learned_in_its_turn_and_not_counted(title: str) -> None:
    entries = [entry for entry in ENTRIES if entry[0] == title]
    said = recordings("a long and winding answer that nobody would guess at once", split="past")
    again = [replace(said[0], split="test")]

    def count(*texts: Recording) -> Count:
        return measure(Material(texts, VOCABULARY), entries)[title]

    alone, before, after = count(*again), count(*said * 9, *again), count(*again, *said * 9)
    assert alone.tokens == before.tokens == len(again[0].answer)
    assert before.forwards < 0.9 * alone.forwards == 0.9 * after.forwards


class Noting(Learner):
    """Drafts nothing, and notes what it is told."""

    def __init__(self) -> None:
        super().__init__(())
        self.told = list[tuple[str, list[int], int]]()

    def observe(self, tokens: Sequence[int], new: int) -> None:
        self.told.append(("observe", [*tokens], new))

    def finish(self, tokens: Sequence[int], new: int) -> None:
        self.told.append(("finish", [*tokens], new))


def test_an_earlier_conversation_is_told_as_a_run_tells_it() -> None:
    noting, recording = Noting(), Recording("1", "past", [1, 2], [3, 4, 5])
    learn([noting], recording)
    whole = [1, 2, 3, 4, 5]
    assert noting.told == [("observe", [1, 2], 2), ("observe", whole, 3), ("finish", whole, 3)]


def lines(*records: object) -> str:
    return "\n".join(json.dumps(record) for record in records)


GOOD = {"prompt": "hi", "output": "yes", "split": "test"}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.xz"])
def test_traces_are_read_as_the_model_would_read_them(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"traces{suffix}"
    text = lines(GOOD, {"prompt": "ho {}", "output": ""})
    path.write_bytes(lzma.compress(text.encode()) if suffix.endswith("xz") else text.encode())
    first, second = read_traces(path, Bytes(), "<{}>")
    assert first == Recording("hi", "test", [*b"<hi>"], [*b"yes", END])
    assert second == Recording("ho {}", "train", [*b"<ho {}>"], [END])


def test_every_answer_of_a_conversation_is_replayed_with_its_calls(tmp_path: Path) -> None:
    function = {"name": "look", "arguments": '{"at": "sea"}'}
    conversation = {
        "tools": [{"name": "look"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look."}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
            {"role": "tool", "content": "blue"},
            {"role": "assistant", "content": "It is blue."},
        ],
    }
    path = tmp_path / "agent.jsonl"
    path.write_text(lines(conversation))
    backend = Bytes()
    first, second = read_traces(path, backend, "{}")
    call = b'<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
    assert (first.split, first.answer) == ("test", [*call, END])
    assert second.answer == [*b"It is blue.", END]
    before = [
        Message("system", 'Tools: [{"name": "look"}]'),
        Message("user", "Look."),
        Message("assistant", call.decode()),
        Message("user", "<tool_response>\nblue\n</tool_response>"),
    ]
    assert first.prompt == backend.tokenize(backend.render(before[:2]))
    assert second.prompt == backend.tokenize(backend.render(before))


@pytest.mark.parametrize(
    "content",
    [
        lines({"messages": 7}), lines({"messages": [{"role": "assistant", "tool_calls": [1]}]}),
        None, "{", "7", "[]", "null", lines(GOOD, {"prompt": "hi"}), lines({"output": "x"}),
        lines({"prompt": "hi", "output": 7}), b"\xff\xfe", "\n",
    ],
    ids=str,
)  # fmt: skip
def test_traces_that_are_none_are_refused_with_their_name(
    tmp_path: Path, content: str | bytes | None
) -> None:
    path = tmp_path / "traces.jsonl"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    for file in (path, path.with_suffix(".jsonl.xz")):
        if content is not None:
            file.write_bytes(path.read_bytes())  # which is no xz file either
        with pytest.raises(SettingError, match="Each line must be a JSON object with") as caught:
            read_traces(file, Bytes(), "{}")
        assert repr(str(file)) in str(caught.value)


REPLAY = ("replay", "--vocabulary", EMBEDDED)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    story = "The fox ran to the river, and the river ran to the sea."
    path.write_text(
        lines(
            {"prompt": "a", "output": story, "split": "train"},
            {"prompt": "b", "output": f"Well. {story} {story}", "split": "test"},
            {"prompt": "c", "output": story, "split": "test"},
        )
    )
    return path


@pytest.mark.model
def test_a_replay_ends_in_one_json_line(traces: Path, tmp_path: Path, bench: Program) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(lines(*[{"prompt": "z", "output": "The sea was far away."}] * 3))
    run = (*REPLAY, "--traces", traces)
    report = bench.record(*run, "--statistics", other, "--nodes", "4", "16")
    assert report["answers"] == 2
    assert report["traces"] == "answers.jsonl" and str(tmp_path) not in str(report)
    ours = [report["methods"][f"Hierarchy drafting, {size}"] for size in (4, 16)]
    assert set(report["methods"]) >= {METHODS[name].title for name in ("lookup", "hd-published")}
    for figures in report["methods"].values():
        assert figures["tokens_per_forward"] > 1 and figures["nodes"] > 0
    assert ours[0]["nodes"] <= 4 < ours[1]["nodes"] <= 16
    report = bench.record(*run, "--nodes", "4", "--no-peers", "--limit", "1")
    assert report["answers"] == 1 and len(report["methods"]) == 1


@pytest.mark.model
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--traces", "/nowhere.jsonl"], "'/nowhere.jsonl'"),
        (["--statistics", "/nowhere.jsonl"], "'/nowhere.jsonl'"),
        (["--vocabulary", "/nowhere"], "'/nowhere'"),
        (["--nodes", "999"], "Max drafted tokens"),
    ],
)
def test_mistakes_end_with_status_2_and_a_message(
    traces: Path, arguments: list[str], words: str, bench: Program
) -> None:
    assert words in bench.refusal(*REPLAY, "--traces", traces, *arguments)


# Recordings of our own, whose noise is known.


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    questions, path = folder / "questions.jsonl", folder / "answers.jsonl"
    told = [{"category": name, "turns": [f"Tell me of a {name}."]} for name in ("fox", "sea")]
    questions.write_text(lines(*told))
    sampler = ["--temperature", "0.9", "--min-p", "0.05", "--seed", "7"]
    options = ["--prompts", str(questions), "--max-new-tokens", "40", *sampler]
    run = ["replay", "--record", "--traces", str(path), "--nodes", "8", "--no-peers", *options]
    assert main(run) == 0
    return path


@pytest.mark.model
def test_a_recording_says_all_that_its_answer_was_drawn_with(recorded: Path, embedded: Any) -> None:
    records = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert [record["question"] for record in records] == ["fox 1", "sea 2"]
    for number, record in enumerate(records):
        sampling = Sampling.from_mapping(record["sampling"])
        assert sampling == Sampling(0.9, min_p=0.05, seed=7 + number)
        assert record["position"] == len(record["prompt"])
        assert record["vocabulary"] == embedded.info.vocabulary_size
        again = decode(embedded, record["prompt"], [], Generation(sampling, 40), Drafting())
        said = [token.id for step in again if isinstance(step, Step) for token in step.tokens]
        assert record["answer"] == said


@pytest.mark.model
def test_a_replay_of_recordings_knows_the_noise_and_stands_beside_one_that_does_not(
    recorded: Path, bench: Program
) -> None:
    report = bench.record("replay", "--traces", str(recorded), "--nodes", "8", "--no-peers")
    assert report["answers"] == 2
    titles = ["Hierarchy drafting by probability, 8", "Hierarchy drafting, 8"]
    assert list(report["methods"]) == titles
    blind, known = (report["methods"][title] for title in titles)
    assert blind != known and min(blind["tokens_per_forward"], known["tokens_per_forward"]) > 1


@pytest.mark.parametrize(
    "damage",
    [
        {"position": 3}, {"sampling": {"temperature": "hot"}}, {"sampling": None},
        {"prompt": 5}, {"vocabulary": "many"}, {"answer": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_recording_is_named(
    tmp_path: Path, damage: dict[str, object], bench: Program
) -> None:
    good = {
        "question": "fox 1", "split": "test", "prompt": [1, 2], "answer": [3], "position": 2,
        "sampling": {"temperature": 0.7}, "vocabulary": 9, "tokenizer": "x",
    }  # fmt: skip
    path = tmp_path / "answers.jsonl"
    path.write_text(lines({**good, **damage}))
    assert "answers.jsonl" in bench.refusal("replay", "--traces", str(path))
    path.write_text(lines(good))
    bench("replay", "--traces", path, "--nodes", "4", "--no-peers")


@pytest.mark.parametrize("content", [lines(GOOD), ""], ids=["texts", "nothing"])
def test_texts_need_a_vocabulary(tmp_path: Path, bench: Program, content: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(content)
    assert "--vocabulary" in bench.refusal("replay", "--traces", path)
