"""Answers of a local model with their seeds and sampler settings, for `bench replay` to replay.

Each question is answered by plain decoding, from nothing, with a seed of its own: --seed for the
first one, the next number for the next. One line of JSON per answer holds the tokens of prompt and
answer, the position of the first answer token, and how it was drawn. So a replay knows the noise
that the answer was drawn with, which recordings of other programs never tell.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from bench.options import (
    Record,
    add_model_arguments,
    add_prompt_arguments,
    add_sampling_arguments,
    check_save,
    conditions,
    generation_of,
    headline,
    load_model,
)
from bench.prompts import prepared, questions_of
from engine.backends.base import Backend
from engine.errors import SettingError
from engine.methods import PLAIN
from engine.runs import run as decoded
from engine.settings import Generation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench record`."""
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    add_sampling_arguments(parser)
    add = parser.add_argument
    add("--to", type=Path, required=True, metavar="FILE", help="the file of recordings to write")


def run(options: argparse.Namespace) -> None:
    """Record, and say what was recorded."""
    if min(options.limit, options.skip, options.threads) < 0:
        raise SettingError("Give no negative limit, skip or threads.")
    generation = generation_of(options)
    questions = questions_of(options)
    check_save(options.to)
    backend = load_model(options.model, options)
    prompts = prepared(backend, options, questions)
    tokens = 0
    with options.to.open("w", encoding="utf-8") as lines:
        for record in recorded(backend, prompts, generation):
            lines.write(json.dumps(record) + "\n")
            tokens += len(record["answer"])
    print(headline(conditions(backend, options)))
    print(f"{len(prompts)} answers, {tokens} tokens, T={options.temperature:g}: {options.to}")


def recorded(
    backend: Backend, prompts: Sequence[tuple[str, list[int]]], generation: Generation
) -> Iterator[Record]:
    """One answer after the other, each with what a replay of it must know."""
    for number, (category, prompt) in enumerate(tqdm(prompts, desc="Answers", leave=False)):
        sampling = replace(generation.sampling, seed=generation.sampling.seed + number)
        answer = decoded(backend, prompt, PLAIN, (), replace(generation, sampling=sampling))
        yield {
            "question": f"{category} {number + 1}",
            "split": "test",
            "prompt": prompt,
            "answer": [token.id for token in answer.tokens],
            "position": len(prompt),
            "sampling": asdict(sampling),
            "vocabulary": backend.info.vocabulary_size,
            "tokenizer": backend.info.tokenizer_fingerprint,
        }
