"""Recorded answers: made with a local model, and replayed to count what drafters would achieve.

With sample-and-match verification a drafted token is accepted exactly when it is the token that the
target emits next. So a replay of a model's answers counts the tokens that a live run would have
accepted, without the model. Each line of a traces file is {"prompt", "output", "split"}: answers of
the split "train" fill the model tier, answers of other models (--statistics) fill the statistics
tier, and answers of the split "test" are replayed. The model tier learns each replayed answer
afterwards, as in use.

With `--record` a local model answers questions first, plainly, each from an empty cache and with a
seed of its own: --seed for the first question, the next number for the next one. Such traces hold
tokens instead of texts, and the sampler settings, so the drafters of a replay know the noise, as in
use. Hierarchy drafting by probability alone is replayed as well, and the statistics are the
project's own for the model's tokenizer.
"""

import argparse
import json
import lzma
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from tqdm import tqdm

from assets import ASSETS
from bench.harness import Add, Measurement, Setup
from bench.report import Record, show_rows
from engine.backends.base import Tokenizer
from engine.constraint import Constraint
from engine.decode import draft
from engine.drafting.base import Drafter, NgramTable
from engine.drafting.budget import Budget
from engine.drafting.databases import Databases
from engine.errors import SettingError
from engine.methods import METHODS, PLAIN, method_named
from engine.models.loaders import tokenizer as load_tokenizer
from engine.runs import run as decoded
from engine.settings import Drafting, Sampling
from engine.tree import Tree
from storage.statistics import StatisticsTable, find_table
from storage.statistics_build import build

TRAIN, TEST, PAST = "train", "test", "past"
BUDGET = 256 << 20
BLIND = "by probability"
"""Takes the place of a method: hierarchy drafting that does not know the noise."""
TEMPLATE = "USER: {} ASSISTANT:"
UNREADABLE = (
    *(OSError, EOFError, lzma.LZMAError, SettingError),
    *(ValueError, KeyError, TypeError, AttributeError, RecursionError),
)
"""The errors of reading a file that is missing, not JSON, or JSON of another form."""
COLUMNS = {
    "drafter": "{title}",
    "nodes": "{nodes:.1f}",
    "tok/forward": "{tokens_per_forward:.3f}",
    "expected": "{expected:.3f}",
    "draft ms": "{draft_ms:.3f}",
}


class Replay(Measurement):
    """Tokens per forward on recorded answers: a drafter proposes, the recorded text decides."""

    groups = ("model", "prompts", "sampling", "replay")

    def add_options(self, add: Add) -> None:
        add("--traces", type=Path, required=True, help="recorded answers (JSON lines)")
        add("--record", action="store_true", help="first let the model answer, into --traces")
        add("--vocabulary", help="GGUF or tokenizer folder, for texts")
        add("--statistics", type=Path, nargs="*", default=[], help="others' answers, for texts")
        add("--template", default=TEMPLATE, help="how a prompt reads; {} is the prompt")

    def record(self, options: argparse.Namespace) -> Record:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            if options.record:
                write_recordings(options, stack)
            material = read(options, Path(folder))
            if isinstance(material.table, StatisticsTable):
                stack.callback(material.table.close)
            test = [r for r in material.recordings if r.split == TEST][: options.limit or None]
            if not test:
                raise SettingError(f"No line of {str(options.traces)!r} has the split {TEST!r}.")
            drawn = any(recording.sampling is not None for recording in test)
            results = measure(material, test, contestants(options.nodes, options.peers, drawn))
        return {
            "traces": options.traces.name,
            "answers": len(test),
            "others": len(material.others),
            "methods": {title: count.figures() for title, count in results.items()},
        }

    def show(self, record: Record) -> None:
        source = f"; statistics from {record['others']} answers of other models to other prompts"
        print(
            f"{record['traces']}: {record['answers']} answers{source if record['others'] else ''}\n"
        )
        show_rows([{"title": title, **f} for title, f in record["methods"].items()], COLUMNS)


# recordings


def write_recordings(options: argparse.Namespace, stack: ExitStack) -> None:
    """Write a local model's answers, with their seeds and sampler settings, to the traces file."""
    try:
        lines = stack.enter_context(options.traces.open("w", encoding="utf-8"))
    except OSError as error:
        raise SettingError(
            f"The file {str(options.traces)!r} cannot be written ({error.strerror}). Choose "
            "another place."
        ) from error
    setup = Setup.of(options, stack)
    info, first = setup.backend.info, setup.generation.sampling
    for number, (category, prompt) in enumerate(tqdm(setup.prompts, desc="Answers", leave=False)):
        sampling = replace(first, seed=first.seed + number)
        generation = replace(setup.generation, sampling=sampling)
        answer = decoded(setup.backend, prompt, PLAIN, (), generation)
        record = {
            "question": f"{category} {number + 1}",
            "split": TEST,
            "prompt": prompt,
            "answer": [token.id for token in answer.tokens],
            "position": len(prompt),
            "sampling": asdict(sampling),
            "vocabulary": info.vocabulary_size,
            "tokenizer": info.tokenizer_fingerprint,
        }
        lines.write(json.dumps(record) + "\n")
    lines.flush()


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded answer, its end token included, the prompt as the model reads it, and how it was
    drawn, if that is known. `constraint` makes the format that it was to have, if any."""

    question: str
    split: str
    prompt: list[int]
    answer: list[int]
    sampling: Sampling | None = None
    constraint: Callable[[], Constraint] | None = None

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.answer]


@dataclass(frozen=True, slots=True)
class Material:
    """The recordings to replay, the size of their vocabulary, and their statistics, which may be
    made of `others`, the answers of other models."""

    recordings: Sequence[Recording]
    vocabulary: int
    table: NgramTable | None = None
    others: Sequence[Recording] = ()


def read(options: argparse.Namespace, folder: Path) -> Material:
    """The material to replay; texts are tokenized first. Statistics are made in `folder`."""
    with reading(options.traces):
        records = read_lines(options.traces)
        if records and "answer" in records[0]:
            return drawn_material(records)
    if options.vocabulary is None:
        raise SettingError(
            f"The traces in {str(options.traces)!r} are texts. Say with --vocabulary what tokens "
            "they are made of."
        )
    tokenizer = load_tokenizer(options.vocabulary)
    recordings = read_traces(options.traces, tokenizer, options.template)
    replayed = {r.question for r in recordings if r.split == TEST}
    others = [
        recording
        for path in options.statistics
        for recording in read_traces(path, tokenizer, options.template)
        if recording.question not in replayed
    ]
    size = tokenizer.info.vocabulary_size
    return Material(recordings, size, statistics_of(others, size, folder), others)


def read_traces(path: Path, tokenizer: Tokenizer, template: str) -> list[Recording]:
    with reading(path):
        return [
            Recording(
                record["prompt"],
                record.get("split", TRAIN),
                tokenizer.tokenize(template.replace("{}", record["prompt"])),
                [*tokenizer.tokenize(record["output"]), min(tokenizer.info.eos_ids)],
            )
            for record in tqdm(read_lines(path), desc=path.name, leave=False)
        ]


def drawn_material(records: Sequence[Record]) -> Material:
    """The recordings of a local model, with the project's statistics for that model."""
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
        raise ValueError("an answer does not follow its prompt directly")
    table = find_table(str(records[0]["tokenizer"]), ASSETS / "statistics")
    return Material(found, int(records[0]["vocabulary"]), table)


def read_lines(path: Path) -> list[Record]:
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise SettingError if what is read of a file in this block cannot be used."""
    try:
        yield
    except UNREADABLE as error:
        raise SettingError(
            f"The traces in {str(path)!r} cannot be read ({error!r}). Each line must be a JSON "
            'object with "prompt", "output" and "split", or one that `python -m bench replay '
            "--record` wrote."
        ) from error


def statistics_of(
    recordings: Sequence[Recording], vocabulary: int, folder: Path
) -> StatisticsTable | None:
    """A statistics file of answers, made and opened as in use."""
    if not recordings:
        return None
    documents = [np.array(r.prompt[-3:] + r.answer, dtype=np.uint32) for r in recordings]
    path = folder / "replay.statistics.db"
    build(documents, path, "replay", vocabulary, "Recorded answers", BUDGET, fewest=1)
    return StatisticsTable(path)


# replaying


@dataclass(slots=True)
class Count:
    """The totals of a drafter over some recordings."""

    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    expected: float = 0.0
    seconds: float = 0.0

    def add(self, other: "Count") -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def figures(self) -> dict[str, float]:
        """Ratios over the forwards counted. `expected` is what the drafter itself predicted."""
        forwards = self.forwards or 1
        return {
            "tokens_per_forward": round(self.tokens / forwards, 4),
            "expected": round(self.expected / forwards, 4),
            "nodes": round(self.drafted / forwards, 2),
            "draft_ms": round(1e3 * self.seconds / forwards, 4),
        }


def recorded_tokens(tree: Tree, remaining: Sequence[int]) -> list[int]:
    """The tokens that one forward emits if the target's next tokens are the recorded ones."""
    return tree.walk(lambda row: remaining[tree.depths[row]])[1]


def replay(
    drafters: Sequence[Drafter],
    drafting: Drafting,
    recording: Recording,
    vocabulary: int,
    count: Count,
    constraint: Constraint | None = None,
) -> None:
    """Replay one answer, step by step as the decode loop takes them."""
    tokens, text = list(recording.prompt), recording.text
    for drafter in drafters:
        drafter.observe(tokens, len(tokens))
    while len(tokens) < len(text):
        remaining = text[len(tokens) :]
        budget = Budget(drafting, len(remaining) - 1, vocabulary)
        clock = perf_counter()
        if constraint is not None:
            constraint.look(tokens)
        tree, _ = draft(drafters, tokens, budget)
        if constraint is not None:
            tree = constraint.pruned(tree)
        count.seconds += perf_counter() - clock
        emitted = recorded_tokens(tree, remaining)
        tokens += emitted
        if constraint is not None and len(tokens) < len(text):
            constraint.advance(emitted)
        clock = perf_counter()
        for drafter in drafters:
            drafter.observe(tokens, len(emitted))
        count.seconds += perf_counter() - clock
        count.tokens += len(emitted)
        count.forwards += 1
        count.drafted += len(tree)
        count.expected += budget.expected
    for drafter in drafters:
        drafter.finish(tokens, len(recording.answer))


def learn(drafters: Sequence[Drafter], recording: Recording) -> None:
    """Let the drafters of a conversation learn it at once."""
    for drafter in drafters:
        drafter.observe(recording.prompt, len(recording.prompt))
        drafter.observe(recording.text, len(recording.answer))
        drafter.finish(recording.text, len(recording.answer))


def contestants(
    nodes: Sequence[int], peers: bool, drawn: bool = False
) -> Iterator[tuple[str, str, Drafting]]:
    """(title, method, drafting) of all contestants; `drawn` adds those that know the noise."""
    if peers:
        for name in ("lookup", "hd-published"):
            yield METHODS[name].title, name, METHODS[name].drafting
    for size in nodes:
        drafting = Drafting(nodes=size, budget="fixed")
        if drawn:
            yield f"Hierarchy drafting {BLIND}, {size}", BLIND, drafting
        yield f"Hierarchy drafting, {size}", "hd", drafting


def measure(
    material: Material,
    test: Sequence[Recording],
    entries: Iterable[tuple[str, str, Drafting]],
) -> dict[str, Count]:
    """Replay recordings with every contestant, each on databases of its own. Those of the split
    "past" are learned in their turn, and not counted."""
    train = [recording for recording in material.recordings if recording.split == TRAIN]
    results: dict[str, Count] = {}
    for title, name, drafting in entries:
        make = our_drafters(material, train, name)
        count = results[title] = Count()
        for recording in tqdm(test, desc=title, leave=False):
            constraint = recording.constraint() if recording.constraint is not None else None
            drafters = make(drafting, recording, constraint)
            if recording.split == PAST:
                learn(drafters, recording)
            else:
                given = drafters, drafting, recording, material.vocabulary, count
                replay(*given, constraint)
    return results


def our_drafters(
    material: Material, train: Sequence[Recording], name: str
) -> Callable[[Drafting, Recording, Constraint | None], Sequence[Drafter]]:
    method = "hd" if name == BLIND else name
    databases = Databases(statistics=material.table)
    for recording in train:
        learn([databases.next_conversation().learner()], recording)
    method_named(method).drafters(databases)  # what all conversations share is made here, once

    def drafters(
        drafting: Drafting, recording: Recording, constraint: Constraint | None
    ) -> Sequence[Drafter]:
        sampling = None if name == BLIND else recording.sampling
        fresh = databases.next_conversation()
        chosen = method_named(method, drafting)
        return chosen.drafters(fresh, sampling=sampling, constraint=constraint)

    return drafters
