"""What a model itself answers to the questions of some chats: texts to train a draft head on.

A head drafts what its target says, so it learns most from that. Each chat is cut before one of its
answers, by chance, and the model answers instead, decoded by the engine. The file has the form that
`training prepare` reads. What is held out stays so: that depends on how a chat begins, which is not
changed.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from tqdm import tqdm

from engine.errors import SettingError
from engine.models.loaders import load
from engine.settings import Runtime, Sampling
from engine.types import Message
from training.acceptance import REGULAR
from training.documents import Document, read
from training.samples import replied

LONGEST = 1200
"""Bytes of the longest question, chat before it included."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `training answers`."""
    add = parser.add_argument
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


def run(options: argparse.Namespace) -> None:
    """Write a chat per question; one that was stopped has those so far."""
    if min(options.limit, options.tokens, options.longest) < 1:
        raise SettingError("Ask for at least one question and one token.")
    backend = load(str(options.model), Runtime(dtype="float32", threads=options.threads))
    left_out = set(options.leave_out)
    chats = [d for d in read(options.texts) if not d.held and d.source not in left_out]
    asked = islice(questions(chats, options.longest, Random(options.seed)), options.limit)
    number = written = 0
    with options.output.open("w", encoding="utf-8") as file:
        for number, messages in enumerate(tqdm(asked, unit=" answers"), start=1):
            temperature = options.temperatures[number % len(options.temperatures)]
            sampling = Sampling(temperature=temperature, seed=options.seed + number)
            said = [Message(each["role"], each["content"]) for each in messages]
            answer = replied(backend, said, sampling, options.tokens)
            reply = {"role": "assistant", "content": answer.text}
            record = Document(options.source, (*messages, reply)).record
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            written += len(answer.tokens)
    print(f"{number:,} answers of {written:,} tokens: {options.output}")


def questions(
    chats: list[Document], longest: int, random: Random
) -> Iterator[tuple[dict[str, str], ...]]:
    """Chats in random order, each cut before one of its answers; short ones alone."""
    random.shuffle(chats)
    for chat in chats:
        ends = [at for at, each in enumerate(chat.messages) if at and each["role"] == "assistant"]
        if ends:
            messages = chat.messages[: random.choice(ends)]
            if sum(len(each["content"].encode()) for each in messages) <= longest:
                yield messages
