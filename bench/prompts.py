"""The prompts of a measurement: questions of a file, or tokens drawn at random."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from engine.backends.base import Backend
from engine.errors import PromptError, SettingError
from engine.prompt import Chat
from engine.questions import in_turn, read
from engine.types import Message

PROMPTS = Path(__file__).with_name("prompts.jsonl")
RANDOM = "random"
"""Given instead of a file of prompts: tokens drawn at random."""
RANDOM_PROMPTS, RANDOM_TOKENS, RANDOM_SEED = 8, 200, 0


def read_prompts(path: Path, limit: int, skip: int = 0) -> list[tuple[str, str]]:
    """(category, first turn) of each question; a limit takes from all categories in turn.

    The first `skip` questions of every category are left out, to measure on held-out ones.
    """
    found = read(path)
    longest = max(Counter(question.category for question in found).values())
    if skip >= longest:
        raise SettingError(
            f"Skipping {skip} leaves none: no category has more than {longest} prompts."
        )
    chosen = in_turn(found, lambda question: question.category, limit, skip)
    return [(question.category, question.text) for question in chosen]


def random_prompts(backend: Backend, limit: int, skip: int = 0) -> list[list[int]]:
    """Prompts of drawn tokens, none of them special, always the same: texts without regularity."""
    size = min(len(backend.vocabulary()), backend.info.vocabulary_size)
    usable = sorted(set(range(size)) - backend.info.eos_ids - backend.special.known)
    draw = Random(RANDOM_SEED)
    count = skip + (limit or RANDOM_PROMPTS)
    return [draw.choices(usable, k=RANDOM_TOKENS) for _ in range(count)][skip:]


def cut_prompt(chat: Chat, text: str, room: int) -> list[int]:
    return cut_text(lambda text: chat.prompt([Message("user", text)], known=()), text, room)


def cut_text(tokens_of: Callable[[str], list[int]], text: str, room: int) -> list[int]:
    """The tokens of a text, cut at the end until there are `room`. Raises PromptError."""
    while True:
        tokens = tokens_of(text)
        if len(tokens) <= room:
            return tokens
        text = text[: int(len(text) * room / len(tokens)) - 1]
        if not text.strip():
            raise PromptError(f"There is no room for a question in {room} tokens.")
