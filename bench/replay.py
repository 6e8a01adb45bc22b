"""Tokens per forward on recorded answers: a drafter proposes, the recorded text decides.

With sample-and-match verification a drafted token is accepted exactly when it is the token that the
target says next, so replaying what a model said gives what a live run of it would have accepted,
without the model. Each line of a traces file is {"prompt", "output", "split"}: answers of the split
"train" fill the model tier, answers of other models (--statistics) the statistics tier, answers of
the split "test" are replayed, each learned by the model tier when it is over, as in use.

A file of `bench record` holds tokens and how they were drawn instead. Then the drafters know the
noise, as in use, hierarchy drafting by probability alone stands beside them, and the statistics are
those that come along for the model's tokenizer.
"""

import argparse
import json
import lzma
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np
from tqdm import tqdm

from assets import ASSETS
from bench import suffix
from bench.options import LLAMA_CPP, TRANSFORMERS, Record, kind_of
from engine.decode import draft
from engine.drafting.base import Drafter, NgramTable
from engine.drafting.budget import Budget
from engine.drafting.databases import Databases
from engine.errors import ModelError, SettingError
from engine.methods import METHODS, method_named
from engine.settings import Drafting, Sampling
from engine.tree import Tree
from storage.statistics import StatisticsTable, find_table
from storage.statistics_build import build

NODES = (8, 16, 32, 64)
FIRST = 25
BUDGET = 256 << 20
SUFFIX, SUFFIX_ALL = SUFFIXES = ("suffix", "suffix-all")
BLIND = "by probability"
"""In the place of a method: hierarchy drafting that does not know the noise."""
TEMPLATE = "USER: {} ASSISTANT:"
MISSHAPEN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading raises that is no JSON, or JSON of another form."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded answer, its end token included, and the prompt as the model reads it.

    `sampling` is how it was drawn, None where that is not known.
    """

    question: str
    split: str
    prompt: list[int]
    answer: list[int]
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class Material:
    """Recordings of a model with a vocabulary of that size, and the statistics for it, which may be
    made of `others`."""

    recordings: list[Recording]
    vocabulary: int
    table: StatisticsTable | None
    others: Sequence[Recording] = ()


@dataclass(slots=True)
class Count:
    """What a drafter came to on some recordings."""

    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    expected: float = 0.0
    seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        """Ratios over the forwards counted. `expected` is what the drafter itself predicted."""
        forwards = self.forwards or 1
        return {
            "tokens_per_forward": round(self.tokens / forwards, 4),
            "expected": round(self.expected / forwards, 4),
            "nodes": round(self.drafted / forwards, 2),
            "draft_ms": round(1e3 * self.seconds / forwards, 4),
        }


@dataclass(slots=True)
class Result:
    """The first recordings, and all of them."""

    first: Count = field(default_factory=Count)
    all: Count = field(default_factory=Count)


class Vocabulary(Protocol):
    """What replaying needs of a tokenizer."""

    size: int
    bos: Sequence[int]
    eos: int

    def encode(self, text: str) -> list[int]:
        """Token ids, no special ones added."""


class GgufVocabulary:
    """The tokenizer of a GGUF file, its weights left out."""

    def __init__(self, path: Path) -> None:
        try:  # one of the two libraries is enough, so each is imported by who needs it
            from llama_cpp import Llama
        except ImportError as error:
            raise ModelError(
                f"Reading the vocabulary {str(path)!r} needs llama-cpp-python, which is not "
                "installed. Install it, or give the folder of a tokenizer."
            ) from error
        try:
            self.model = Llama(str(path), vocab_only=True, verbose=False)
        except ValueError as error:
            raise ModelError(
                f"The vocabulary {str(path)!r} could not be read ({error}). Give a GGUF file."
            ) from error
        self.size = self.model.n_vocab()
        self.bos: Sequence[int] = [self.model.token_bos()]
        self.eos = self.model.token_eos()

    def encode(self, text: str) -> list[int]:
        return list(self.model.tokenize(text.encode(), add_bos=False, special=False))


class FolderVocabulary:
    """The tokenizer in a folder, as the transformers library loads it."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer  # late, as it takes seconds

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"The vocabulary {str(path)!r} could not be read ({error}). Give a GGUF file or "
                "the folder of a tokenizer."
            ) from error
        self.size = len(self.tokenizer)
        bos = self.tokenizer.bos_token_id
        self.bos: Sequence[int] = [] if bos is None else [bos]
        self.eos: int = self.tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench replay`."""
    parser.add_argument("--traces", type=Path, required=True, help="recorded answers (JSON lines)")
    parser.add_argument("--vocabulary", type=Path, help="GGUF or tokenizer folder, for texts")
    parser.add_argument(
        "--statistics", type=Path, nargs="*", default=[], help="other models' answers, for texts"
    )
    parser.add_argument("--nodes", type=int, nargs="*", default=list(NODES))
    parser.add_argument("--limit", type=int, default=0, help="replay so many, 0 for all")
    parser.add_argument("--split", default="test", help="the split to replay")
    parser.add_argument("--tiers", default=",".join(Drafting().tiers))
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--template", default=TEMPLATE, help="how a prompt reads; {} is the prompt")


VOCABULARIES: dict[str, Callable[[Path], Vocabulary]] = {
    LLAMA_CPP: GgufVocabulary,
    TRANSFORMERS: FolderVocabulary,
}
"""What reads a vocabulary, by the kind of its model."""


def read_traces(path: Path, vocabulary: Vocabulary, template: str) -> list[Recording]:
    """The recordings of a file, tokenized."""
    try:
        return [
            Recording(
                record["prompt"],
                record.get("split", "train"),
                [*vocabulary.bos, *vocabulary.encode(template.replace("{}", record["prompt"]))],
                [*vocabulary.encode(record["output"]), vocabulary.eos],
            )
            for record in tqdm(read_lines(path), desc=path.name, leave=False)
        ]
    except (OSError, EOFError, lzma.LZMAError, *MISSHAPEN) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> SettingError:
    """What is wrong with a file that holds no recordings."""
    return SettingError(
        f"The traces in {str(path)!r} cannot be read ({error!r}). Each line must be a JSON object "
        'with "prompt", "output" and "split", or one that `python -m bench record` wrote.'
    )


def read_lines(path: Path) -> list[Record]:
    """The JSON objects of a file, which may be compressed."""
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_drawn(path: Path) -> Material | None:
    """The recordings of `bench record`, with the statistics that come along for their model; None
    where a file holds texts."""
    try:
        records = read_lines(path)
        if not records or "answer" not in records[0]:
            return None
        found = [
            Recording(
                str(record["question"]),
                str(record["split"]),
                [int(token) for token in record["prompt"]],
                [int(token) for token in record["answer"]],
                Sampling.from_mapping(record["sampling"]),
            )
            for record in records
        ]
        if any(record["position"] != len(record["prompt"]) for record in records):
            raise ValueError("an answer does not stand right behind its prompt")
        table = find_table(str(records[0]["tokenizer"]), ASSETS / "statistics")
        return Material(found, int(records[0]["vocabulary"]), table)
    except (OSError, EOFError, lzma.LZMAError, SettingError, *MISSHAPEN) as error:
        raise unreadable(path, error) from error


def statistics_of(
    recordings: Iterable[Recording], vocabulary: Vocabulary, folder: Path
) -> StatisticsTable | None:
    """A statistics file of answers, made and opened as in use."""
    documents = [np.array(r.prompt[-3:] + r.answer, dtype=np.uint32) for r in recordings]
    if not documents:
        return None
    path = folder / "replay.statistics.db"
    build(documents, path, "replay", vocabulary.size, "Recorded answers", BUDGET, fewest=1)
    return StatisticsTable(path)


def recorded(text: Sequence[int], at: int, tree: Tree) -> Callable[[int], int]:
    """What the target said after each row of a tree whose first nodes stand at `at`."""
    return lambda row: text[at + tree.depths[row]]


def replay(
    drafters: Sequence[Drafter],
    drafting: Drafting,
    recording: Recording,
    vocabulary: int,
    counts: Sequence[Count],
) -> None:
    """Replay one answer, step by step as the decode loop takes them."""
    tokens, answer = list(recording.prompt), recording.answer
    end = len(tokens) + len(answer)
    text = [*tokens, *answer]
    for drafter in drafters:
        drafter.observe(tokens, len(tokens))
    while len(tokens) < end:
        at = len(tokens)
        budget = Budget(drafting, end - at - 1, vocabulary)
        clock = perf_counter()
        tree, _ = draft(drafters, tokens, budget)
        spent = perf_counter() - clock
        _, emitted = tree.walk(recorded(text, at, tree))
        tokens += emitted
        clock = perf_counter()
        for drafter in drafters:
            drafter.observe(tokens, len(emitted))
        spent += perf_counter() - clock
        for count in counts:
            count.tokens += len(emitted)
            count.forwards += 1
            count.drafted += len(tree)
            count.expected += budget.expected
            count.seconds += spent
    for drafter in drafters:
        drafter.finish(tokens, len(answer))


def contestants(
    nodes: Sequence[int], tiers: Sequence[str], peers: bool, drawn: bool = False
) -> Iterator[tuple[str, str, Drafting]]:
    """(title, method, drafting) of everything that is replayed; `drawn` with a noise that is
    known."""
    if peers:
        for name in ("lookup", "hd-published"):
            yield METHODS[name].title, name, METHODS[name].drafting
    for size in nodes if peers and suffix.installed() else ():
        fixed = Drafting(nodes=size, budget="fixed")
        yield f"Suffix decoding, {size}", SUFFIX, fixed
        yield f"Suffix decoding, others too, {size}", SUFFIX_ALL, fixed
    for size in nodes:
        drafting = Drafting(tiers=tuple(tiers), nodes=size, budget="fixed")
        if drawn:
            yield f"Hierarchy drafting {BLIND}, {size}", BLIND, drafting
        yield f"Hierarchy drafting, {size}", "hd", drafting


def measure(
    recordings: Sequence[Recording],
    table: NgramTable | None,
    vocabulary: int,
    split: str,
    limit: int,
    entries: Iterable[tuple[str, str, Drafting]],
    others: Sequence[Recording] = (),
) -> dict[str, Result]:
    """Every contestant over the recordings of the split, with databases of its own."""
    train = [r for r in recordings if r.split == "train" and split != "train"]
    test = [r for r in recordings if r.split == split][: limit or None]
    results: dict[str, Result] = {}
    for title, name, drafting in entries:
        known = [*others, *train] if name == SUFFIX_ALL else train
        drafters = suffix_drafters(known) if name in SUFFIXES else our_drafters(table, train, name)
        result = results[title] = Result()
        for number, recording in enumerate(tqdm(test, desc=title, leave=False)):
            counts = [result.all, result.first] if number < FIRST else [result.all]
            replay(drafters(drafting, recording), drafting, recording, vocabulary, counts)
    return results


def our_drafters(
    table: NgramTable | None, train: Sequence[Recording], name: str
) -> Callable[[Drafting, Recording], list[Drafter]]:
    """One of our methods: a new conversation at every call, past answers in the model tier."""
    name, blind = ("hd", True) if name == BLIND else (name, False)
    databases = Databases(statistics=table)
    for recording in train:
        databases.learned.finish([*recording.prompt, *recording.answer], len(recording.answer))
    method_named(name).drafters(databases)  # what all conversations share is made here, once

    def drafters(drafting: Drafting, recording: Recording) -> list[Drafter]:
        sampling = None if blind else recording.sampling
        fresh = databases.next_conversation()
        return method_named(name, drafting).drafters(fresh, sampling=sampling)

    return drafters


def suffix_drafters(
    train: Sequence[Recording],
) -> Callable[[Drafting, Recording], list[Drafter]]:
    """Suffix decoding whose cache holds past answers."""
    drafter = suffix.SuffixDrafter()
    for recording in train:
        drafter.observe(recording.prompt, len(recording.prompt))
        tokens = [*recording.prompt, *recording.answer]
        drafter.observe(tokens, len(recording.answer))
        drafter.finish(tokens, len(recording.answer))
    return lambda drafting, recording: [drafter]


def run(options: argparse.Namespace) -> None:
    """Replay and print."""
    if options.limit < 0 or min(options.nodes, default=0) < 0:
        raise SettingError("Give no negative limit and no negative number of nodes.")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        material = read(options, Path(folder))
        if material.table is not None:
            stack.callback(material.table.close)
        recordings, split = material.recordings, options.split
        replayed = {recording.question for recording in recordings if recording.split == split}
        if not replayed:
            raise SettingError(
                f"Nothing to replay: no line of {str(options.traces)!r} has the split {split!r}. "
                "Name another with --split."
            )
        tiers = [name.strip() for name in options.tiers.split(",") if name.strip()]
        drawn = any(recording.sampling is not None for recording in recordings)
        entries = contestants(options.nodes, tiers, options.peers, drawn)
        size, others = material.vocabulary, material.others
        results = measure(recordings, material.table, size, split, options.limit, entries, others)
    report(options, results, len(replayed), len(others))


def read(options: argparse.Namespace, folder: Path) -> Material:
    """What there is to replay: recordings of tokens bring all they need, texts are tokenized.

    Statistics of texts are made in `folder`.
    """
    drawn = read_drawn(options.traces)
    if drawn is not None:
        return drawn
    if options.vocabulary is None:
        raise SettingError(
            f"The traces in {str(options.traces)!r} are texts. Say with --vocabulary what tokens "
            "they are made of."
        )
    vocabulary = VOCABULARIES[kind_of(str(options.vocabulary))](options.vocabulary)
    recordings = read_traces(options.traces, vocabulary, options.template)
    replayed = {r.question for r in recordings if r.split == options.split}
    others = [
        recording
        for path in options.statistics
        for recording in read_traces(path, vocabulary, options.template)
        if recording.question not in replayed
    ]
    table = statistics_of(others, vocabulary, folder)
    return Material(recordings, vocabulary.size, table, others)


def report(
    options: argparse.Namespace, results: dict[str, Result], replayed: int, others: int
) -> None:
    """Print the table and the JSON line."""
    count = min(replayed, options.limit or replayed)
    source = f"; statistics from {others} answers of other models to other prompts"
    print(
        f"{options.traces.name}, split {options.split}: {count} answers{source if others else ''}"
    )
    heads = ("nodes", f"first {FIRST}", f"all {count}", "expected", "draft ms")
    print(f"\n{'drafter':44}" + "".join(f"{head:>11}" for head in heads))
    figures: Record = {}
    for title, result in results.items():
        first, all_ = result.first.figures(), result.all.figures()
        figures[title] = {"first": first, "all": all_}
        print(
            f"{title:44}{all_['nodes']:11.1f}{first['tokens_per_forward']:11.3f}"
            f"{all_['tokens_per_forward']:11.3f}{all_['expected']:11.3f}{all_['draft_ms']:11.3f}"
        )
    summary = {"bench": "replay", "traces": options.traces.name, "split": options.split}
    print(json.dumps(summary | {"answers": count, "methods": figures}))
