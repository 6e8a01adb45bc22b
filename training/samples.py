"""Answers of models to the same questions side by side, and whether any of them runs in a loop.

They are decoded by the engine, as in the chat.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from bench.prompts import read_prompts
from engine.backends.base import Backend
from engine.decode import decode
from engine.errors import SettingError
from engine.methods import PLAIN
from engine.models.loaders import load
from engine.prompt import Chat
from engine.settings import Generation, Runtime, Sampling
from engine.types import Message, Step
from training.labels import labelled

PROMPTS = Path(__file__).with_name("prompts.jsonl")
PERIOD, TIMES, LEAST = 32, 3, 24
"""A loop says the same, of at most PERIOD tokens, TIMES times in a row and over LEAST tokens."""


@dataclass(frozen=True)
class Answer:
    """What a model said. `tokens` are without the one that ends the turn; `ended` says whether it
    came."""

    text: str
    tokens: list[int]
    ended: bool

    @property
    def loops(self) -> bool:
        """Whether it says the same again and again."""
        return longest_loop(self.tokens) > 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `training samples`."""
    add = parser.add_argument
    add("models", nargs="+", type=Path, help="folders or GGUF files")
    add("--prompts", type=Path, default=PROMPTS, help="JSON lines with 'turns'")
    add("--temperature", type=float, default=0.7)
    add("--min-p", type=float, default=0.0)
    add("--seeds", type=int, default=1, help="answers to each question; the first ones are shown")
    add("--max-new-tokens", type=int, default=200)
    add("--threads", type=int, default=0, help="0: as many as there are cores")


def run(options: argparse.Namespace) -> None:
    """Print all answers as Markdown, and how many end and how many loop."""
    prompts = [text for _, text in read_prompts(options.prompts, limit=0)]
    if min(options.seeds, options.max_new_tokens) < 1:
        raise SettingError("Ask for at least one seed and one token.")
    samplings = [
        Sampling(temperature=options.temperature, min_p=options.min_p, seed=seed)
        for seed in range(options.seeds)
    ]
    said: dict[str, list[list[Answer]]] = {}
    for name, path in labelled(options.models).items():
        backend = load(str(path), Runtime(dtype="float32", threads=options.threads))
        said[name] = [
            [answered(backend, prompt, each, options.max_new_tokens) for each in samplings]
            for prompt in tqdm(prompts, desc=name, leave=False)
        ]
    print(
        f"Temperature {options.temperature:g}, min-p {options.min_p:g}, seed 0, at most "
        f"{options.max_new_tokens} tokens.\n"
    )
    for number, prompt in enumerate(prompts):
        print(f"**{prompt}**\n")
        for name, answers in said.items():
            print(f"- *{name}*: {shown(answers[number][0])}")
        print()
    for name, answers in said.items():
        every = [each for own in answers for each in own]
        print(
            f"{name}: {len(every)} answers, {sum(each.ended for each in every)} ended by "
            f"themselves, {sum(each.loops for each in every)} in loops, "
            f"{sum(len(each.tokens) for each in every) / len(every):.0f} tokens on average."
        )


def answered(backend: Backend, prompt: str, sampling: Sampling, tokens: int) -> Answer:
    """What a model says to one question."""
    return replied(backend, [Message("user", prompt)], sampling, tokens)


def replied(
    backend: Backend, messages: Sequence[Message], sampling: Sampling, tokens: int
) -> Answer:
    """What a model says to the last question of a chat."""
    generation = Generation(sampling, max_tokens=tokens)
    text, said, ended = "", list[int](), False
    asked = Chat(backend).prompt(messages)
    for event in decode(backend, asked, (), generation, PLAIN.drafting):
        if isinstance(event, Step):
            text += "".join(token.text for token in event.tokens)
            said += [token.id for token in event.tokens if token.id not in backend.info.eos_ids]
            ended = event.finish == "eos"
    return Answer(text, said, ended)


def shown(answer: Answer) -> str:
    """An answer in one line of a list."""
    text = " / ".join(line.strip() for line in answer.text.splitlines() if line.strip())
    return text + ("" if answer.ended else " [...]") + (" **(loops)**" if answer.loops else "")


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
