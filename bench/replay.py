"""Recorded answers: made with a local model, and replayed to count what drafters would achieve.

With sample-and-match verification a drafted token is accepted exactly when it is the token that the
target emits next. So a replay of a model's answers counts the tokens that a live run would have
accepted, without the model. Each line of a traces file is {"prompt", "output", "split"}: answers of
the split "train" fill the model tier, answers of other models (--statistics) fill the statistics
tier, and answers of the split "test" are replayed. The model tier learns each replayed answer
afterwards, as in use.

A line may also be a conversation, {"messages", "tools"} in OpenAI's form, such as an agent leaves
it. Each message of the assistant is then an answer to those before it, and calls of tools are
written as Hermes and Qwen write them.

With `--record` a local model answers questions first, plainly, each from an empty cache and with a
seed of its own: --seed for the first question, the next number for the next one. Such traces hold
tokens instead of texts, and the sampler settings, so the drafters of a replay know the noise, as in
use. Hierarchy drafting by probability alone is replayed as well, and the statistics are the
project's own for the model's tokenizer.
"""

import argparse
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
from tqdm import tqdm

from bench.harness import Add, Measurement, Setup, own_statistics
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
from engine.types import Message
from storage.statistics import StatisticsTable
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

    groups = ("model", "prompts", "temperature", "sampling", "replay")

    def add_options(self, add: Add) -> None:
        add("--traces", type=Path, required=True, help="recorded answers (JSON lines)")
        add("--record", action="store_true", help="first let the model answer, into --traces")
        add("--vocabulary", help="GGUF or tokenizer folder, for texts")
        add("--statistics", type=Path, nargs="*", default=[], help="others' answers, for texts")
        add("--template", default=TEMPLATE, help="how a prompt reads; {} is the prompt")

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        if options.record:
            write_recordings(options, stack)
        material, others = read(options, stack)
        if not material.test:
            raise SettingError(f"No line of {str(options.traces)!r} has the split {TEST!r}.")
        drawn = any(recording.sampling is not None for recording in material.test)
        results = measure(material, contestants(options.nodes, options.peers, drawn))
        return {
            "traces": options.traces.name,
            "answers": len(material.test),
            "others": others,
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
    """The recordings to replay, the size of their vocabulary, their statistics, and the recordings
    that fill the model tier before."""

    test: Sequence[Recording]
    vocabulary: int
    table: NgramTable | None = None
    train: Sequence[Recording] = ()


def read(options: argparse.Namespace, stack: ExitStack) -> tuple[Material, int]:
    """The material to replay, and the number of other models' answers in its statistics."""
    others: list[Recording] = []
    with reading(options.traces):
        records = read_lines(options.traces)
        drawn = bool(records) and "answer" in records[0]
        if drawn:
            recordings = [drawn_recording(record) for record in records]
            size = int(records[0]["vocabulary"])
            table = own_statistics(str(records[0]["tokenizer"]), stack)
    if not drawn:
        if options.vocabulary is None:
            raise SettingError(
                f"The traces in {str(options.traces)!r} are texts. Say with --vocabulary what "
                "tokens they are made of."
            )
        tokenizer = load_tokenizer(options.vocabulary)
        size = tokenizer.info.vocabulary_size
        recordings = read_traces(options.traces, tokenizer, options.template)
        replayed = {recording.question for recording in recordings if recording.split == TEST}
        for path in options.statistics:
            found = read_traces(path, tokenizer, options.template)
            others += [recording for recording in found if recording.question not in replayed]
        table = statistics_of(others, size, stack)
    test = [recording for recording in recordings if recording.split == TEST]
    train = [recording for recording in recordings if recording.split == TRAIN]
    return Material(test[: options.limit or None], size, table, train), len(others)


def read_traces(path: Path, tokenizer: Tokenizer, template: str) -> list[Recording]:
    found: list[Recording] = []
    with reading(path):
        for number, record in enumerate(tqdm(read_lines(path), desc=path.name, leave=False)):
            if "messages" in record:
                found += turns(f"{path.name} {number + 1}", record, tokenizer)
                continue
            prompt = tokenizer.tokenize(template.replace("{}", record["prompt"]))
            answer = [*tokenizer.tokenize(record["output"]), min(tokenizer.info.eos_ids)]
            found.append(Recording(record["prompt"], record.get("split", TRAIN), prompt, answer))
    return found


def turns(name: str, record: Record, tokenizer: Tokenizer) -> Iterator[Recording]:
    """The answers of a conversation, each after all that was said before it."""
    messages: list[Message] = []
    if record.get("tools"):
        messages.append(Message("system", f"Tools: {json.dumps(record['tools'])}"))
    for each in record["messages"]:
        role, text = each["role"], text_of(each)
        if role == "assistant":
            prompt = tokenizer.tokenize(tokenizer.render(messages))
            answer = tokenizer.tokenize(tokenizer.special.literal(text))
            ended = [*answer, min(tokenizer.info.eos_ids)]
            yield Recording(name, record.get("split", TEST), prompt, ended)
        messages.append(Message("user" if role == "tool" else role, text))


def text_of(message: Record) -> str:
    """A message with its calls, as one text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content)
    if message["role"] == "tool":
        return f"<tool_response>\n{content}\n</tool_response>"
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    written = [
        f'<tool_call>\n{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}'
        "\n</tool_call>"
        for call in calls
    ]
    return "\n".join(filter(None, (content, *written)))


def drawn_recording(record: Record) -> Recording:
    """What `write_recordings` wrote. Raises one of UNREADABLE."""
    if record["position"] != len(record["prompt"]):
        raise ValueError("an answer does not follow its prompt directly")
    return Recording(
        str(record["question"]),
        str(record["split"]),
        [int(token) for token in record["prompt"]],
        [int(token) for token in record["answer"]],
        Sampling.from_mapping(record["sampling"]),
    )


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
            'object with "prompt", "output" and "split", or with "messages", or one that `python '
            "-m bench replay --record` wrote."
        ) from error


def statistics_of(
    recordings: Sequence[Recording], vocabulary: int, stack: ExitStack
) -> StatisticsTable | None:
    if not recordings:
        return None
    documents = [np.array(r.prompt[-3:] + r.answer, dtype=np.uint32) for r in recordings]
    path = Path(stack.enter_context(TemporaryDirectory()), "replay.statistics.db")
    build(documents, path, "replay", vocabulary, "Recorded answers", BUDGET, fewest=1)
    table = StatisticsTable(path)
    stack.callback(table.close)
    return table


# replaying


@dataclass(slots=True)
class Count:
    """The totals of a drafter over some recordings."""

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
    entries: Iterable[tuple[str, str, Drafting]],
    results: dict[str, Count] | None = None,
) -> dict[str, Count]:
    """Replay recordings with every contestant, each on databases of its own, and add to the counts
    of `results`. Recordings of the split "past" are learned in their turn, and not counted."""
    results = {} if results is None else results
    for title, name, drafting in entries:
        count = results.setdefault(title, Count())
        method = method_named("hd" if name == BLIND else name, drafting)
        databases = Databases(statistics=material.table)
        for recording in material.train:
            learn([databases.next_conversation().learner()], recording)
        method.drafters(databases)  # what all conversations share is made here, once
        for recording in tqdm(material.test, desc=title, leave=False):
            sampling = None if name == BLIND else recording.sampling
            constraint = None if recording.constraint is None else recording.constraint()
            fresh = databases.next_conversation()
            drafters = method.drafters(fresh, sampling=sampling, constraint=constraint)
            if recording.split == PAST:
                learn(drafters, recording)
            else:
                replay(drafters, drafting, recording, material.vocabulary, count, constraint)
    return results
