"""Answers of models, decoded by the engine as in the chat: to be read, or to be learned from."""

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random

from tqdm import tqdm

from bench.harness import Add, Command
from bench.prompts import read_prompts
from engine.backends.base import Backend
from engine.errors import SettingError
from engine.methods import PLAIN
from engine.models.loaders import load
from engine.prompt import Chat
from engine.runs import run as decoded
from engine.settings import Generation, Runtime, Sampling
from engine.types import Message, Run
from training.prepare import REGULAR, Document, Turn, read

PROMPTS = Path(__file__).with_name("prompts.jsonl")
PERIOD, TIMES, LEAST = 32, 3, 24
"""A loop is the same tokens, at most PERIOD, at least TIMES times in a row, and LEAST tokens long
or longer."""


class Samples(Command):
    """Answers of models to the same questions side by side, and whether any of them loops."""

    def add_options(self, add: Add) -> None:
        add("models", nargs="+", type=Path, help="folders or GGUF files")
        add("--prompts", type=Path, default=PROMPTS, help="JSON lines with 'turns'")
        add("--temperature", type=float, default=0.7)
        add("--min-p", type=float, default=0.0)
        seeds = "answers to each question; the first ones are shown"
        add("--seeds", type=int, default=1, help=seeds)
        add("--max-new-tokens", type=int, default=200)
        add("--threads", type=int, default=0, help="0: as many as there are cores")

    def run(self, options: argparse.Namespace) -> None:
        prompts = [text for _, text in read_prompts(options.prompts, limit=0)]
        if min(options.seeds, options.max_new_tokens) < 1:
            raise SettingError("Ask for at least one seed and one token.")
        samplings = [
            Sampling(temperature=options.temperature, min_p=options.min_p, seed=seed)
            for seed in range(options.seeds)
        ]
        found: dict[str, list[list[Run]]] = {}
        for name, path in labelled(options.models).items():
            backend = load(str(path), Runtime(dtype="float32", threads=options.threads))
            found[name] = [
                [answered(backend, prompt, each, options.max_new_tokens) for each in samplings]
                for prompt in tqdm(prompts, desc=name, leave=False)
            ]
        print(
            f"Temperature {options.temperature:g}, min-p {options.min_p:g}, seed 0, at most "
            f"{options.max_new_tokens} tokens.\n"
        )
        for number, prompt in enumerate(prompts):
            print(f"**{prompt}**\n")
            for name, answers in found.items():
                print(f"- *{name}*: {shown(answers[number][0])}")
            print()
        for name, answers in found.items():
            every = [each for own in answers for each in own]
            print(
                f"{name}: {len(every)} answers, {sum(each.finish == 'eos' for each in every)} "
                f"ended by themselves, {sum(map(loops, every))} in loops, "
                f"{sum(map(length, every)) / len(every):.0f} tokens on average."
            )


def answered(backend: Backend, prompt: str, sampling: Sampling, longest: int) -> Run:
    return replied(backend, [Message("user", prompt)], sampling, longest)


def replied(backend: Backend, messages: Sequence[Message], sampling: Sampling, longest: int) -> Run:
    """A model's answer to the last question of a chat."""
    prompt = Chat(backend).prompt(messages)
    return decoded(backend, prompt, PLAIN, (), Generation(sampling, max_tokens=longest))


def text_of(answer: Run) -> str:
    return "".join(token.text for token in answer.tokens)


def length(answer: Run) -> int:
    """The tokens without the one that ends the turn."""
    return len(answer.tokens) - (answer.finish == "eos")


def loops(answer: Run) -> bool:
    return longest_loop([token.id for token in answer.tokens][: length(answer)]) > 0


def shown(answer: Run) -> str:
    text = " / ".join(line.strip() for line in text_of(answer).splitlines() if line.strip())
    ending = "" if answer.finish == "eos" else " [...]"
    return text + ending + (" **(loops)**" if loops(answer) else "")


def longest_loop(tokens: Sequence[int]) -> int:
    """The length of the longest part that only repeats itself, 0 where there is no loop."""
    longest = 0
    for period in range(1, PERIOD + 1):
        run = 0
        for at in range(period, len(tokens)):
            run = run + 1 if tokens[at] == tokens[at - period] else 0
            # The first of the repeated parts counts as well.
            if run + period >= max(LEAST, TIMES * period):
                longest = max(longest, run + period)
    return longest


# names of models


def label(folder: Path) -> str:
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}"


def labelled(folders: Sequence[Path]) -> dict[str, Path]:
    """Models by their labels. Raises SettingError if two have the same label."""
    models = {label(folder): folder for folder in folders}
    if len(models) < len(folders):
        raise SettingError(
            f"Two of {', '.join(map(str, folders))} are called the same. Rename a folder or the "
            "one that it is in."
        )
    return models


# answers to learn from


LONGEST = 1200
"""Bytes of the longest question, chat before it included."""


class Answers(Command):
    """Texts to train a draft head on: what a model itself answers to the questions of chats.

    A head drafts its target's answers, so it learns most from those. Each chat is cut at random
    before one of its answers, and the model answers instead. The file has the form that `training
    prepare` reads. Held-out chats stay held out, because that depends only on how a chat begins.
    """

    def add_options(self, add: Add) -> None:
        add("model", type=Path, help="the folder or GGUF file of the model that answers")
        add("texts", nargs="+", type=Path, help="JSON lines, also xz-compressed")
        add("--output", required=True, type=Path, help="the JSON lines to write")
        add("--source", default="answers", help="what these texts are called")
        add("--limit", type=int, default=10_000, help="questions, taken at random")
        add("--temperatures", type=float, nargs="+", default=[0.7, 1.0], help="taken in turn")
        add("--tokens", type=int, default=256, help="of an answer, at most")
        add("--longest", type=int, default=LONGEST, help="bytes of a question and its chat")
        add("--leave-out", nargs="*", default=list(REGULAR), metavar="SOURCE")
        add("--seed", type=int, default=0)
        add("--threads", type=int, default=0, help="0: as many as there are cores")

    def run(self, options: argparse.Namespace) -> None:
        if min(options.limit, options.tokens, options.longest) < 1:
            raise SettingError("Ask for at least one question and one token.")
        backend = load(str(options.model), Runtime(dtype="float32", threads=options.threads))
        left_out = set(options.leave_out)
        chats = [d for d in read(options.texts) if not d.held and d.source not in left_out]
        chosen = islice(questions(chats, options.longest, Random(options.seed)), options.limit)
        number = written = 0
        with options.output.open("w", encoding="utf-8") as file:
            for number, messages in enumerate(tqdm(chosen, unit=" answers"), start=1):
                temperature = options.temperatures[number % len(options.temperatures)]
                sampling = Sampling(temperature=temperature, seed=options.seed + number)
                chat = [Message(each["role"], each["content"]) for each in messages]
                answer = replied(backend, chat, sampling, options.tokens)
                reply = Turn(role="assistant", content=text_of(answer))
                file.write(Document(source=options.source, messages=(*messages, reply)).line)
                file.flush()
                written += length(answer)
        print(f"{number:,} answers of {written:,} tokens: {options.output}")


def questions(chats: list[Document], longest: int, random: Random) -> Iterator[tuple[Turn, ...]]:
    """Chats in random order, each cut before one of its answers. Chats longer than `longest` bytes
    are skipped."""
    random.shuffle(chats)
    for chat in chats:
        ends = [at for at, each in enumerate(chat.messages) if at and each["role"] == "assistant"]
        if ends:
            messages = chat.messages[: random.choice(ends)]
            if sum(len(each["content"].encode()) for each in messages) <= longest:
                yield messages
