"""What is asked in a measurement: questions of a file, or tokens drawn at random."""

import argparse
import json
from collections import Counter
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

from bench.options import LLAMA_CPP, RANDOM, TRANSFORMERS
from engine.backends.base import Backend
from engine.errors import PromptError, SettingError
from engine.prompt import Chat
from engine.questions import in_turn
from engine.types import Message

RANDOM_PROMPTS, RANDOM_TOKENS, RANDOM_SEED = 8, 200, 0


def questions_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """What `prepared` makes prompts of; none where they are random. Read before any load."""
    if options.prompts == RANDOM:
        return []
    return read_prompts(Path(options.prompts), options.limit, options.skip)


def read_prompts(path: Path, limit: int, skip: int = 0) -> list[tuple[str, str]]:
    """(category, first turn) of each question; a limit takes from all categories in turn.

    The first `skip` questions of every category are left out, to measure on held-out ones.
    """
    found: list[tuple[str, str]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            found.append((str(record.get("category", "all")), str(record["turns"][0])))
        longest = max(Counter(category for category, _ in found).values())
    except (OSError, RecursionError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise SettingError(
            f"The prompts in {str(path)!r} cannot be read ({error}). Each line must be a JSON "
            'object with "turns", a list of texts.'
        ) from error
    if skip >= longest:
        raise SettingError(
            f"Skipping {skip} leaves none: no category has more than {longest} prompts."
        )
    return in_turn(found, itemgetter(0), limit, skip)


def random_prompts(backend: Backend, limit: int, skip: int = 0) -> list[list[int]]:
    """Prompts of tokens drawn evenly, the same each time: a text in which nothing is to be found.

    Neither special tokens nor others that were added to the vocabulary are drawn.
    """
    size = min(len(backend.vocabulary()), backend.info.vocabulary_size)
    usable = sorted(set(range(size)) - backend.info.eos_ids - added_tokens(backend))
    draw = Random(RANDOM_SEED)
    count = skip + (limit or RANDOM_PROMPTS)
    return [draw.choices(usable, k=RANDOM_TOKENS) for _ in range(count)][skip:]


def added_tokens(backend: Any) -> set[int]:
    """The tokens that are no pieces of text, as each kind of vocabulary marks them. A backend is
    asked for what its own kind alone has."""
    if backend.info.kind == TRANSFORMERS:
        return {*backend.tokenizer.all_special_ids, *backend.tokenizer.added_tokens_decoder}
    if backend.info.kind == LLAMA_CPP:
        # Imported here, as it may be missing where the model is none of its own.
        from llama_cpp import LLAMA_TOKEN_ATTR_BYTE, LLAMA_TOKEN_ATTR_NORMAL

        text = LLAMA_TOKEN_ATTR_BYTE | LLAMA_TOKEN_ATTR_NORMAL
        size = backend.info.vocabulary_size
        return {token for token in range(size) if not backend.tokens.attributes(token) & text}
    return set()


def cut_prompt(chat: Chat, text: str, room: int) -> list[int]:
    """The prompt tokens of a question, its text cut at the end until it has `room` tokens."""
    while True:
        tokens = chat.prompt([Message("user", text)], known=())
        if len(tokens) <= room:
            return tokens
        text = text[: int(len(text) * room / len(tokens)) - 1]
        if not text.strip():
            raise PromptError(f"There is no room for a question in {room} tokens.")


def prepared(
    backend: Backend, options: argparse.Namespace, questions: list[tuple[str, str]]
) -> list[tuple[str, list[int]]]:
    """(category, tokens) of each prompt, cut so that an answer fits behind it."""
    room = backend.info.context_length - options.max_new_tokens - 1
    chat = Chat(backend)
    if options.prompts != RANDOM:
        return [(category, cut_prompt(chat, text, room)) for category, text in questions]
    if room < 1:
        raise PromptError(f"There is no room for a prompt in {room} tokens.")
    drawn = random_prompts(backend, options.limit, options.skip)
    return [(RANDOM, tokens[:room]) for tokens in drawn]
