"""What a peer is: a decoder of another program, which answers a prompt as ours does.

Each program has a module of its own, which says how it is called; bench/peers.py knows them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.sampling import Floats, choose
from engine.settings import Generation, Sampling

GENERATE, PROMPT_LOOKUP, ASSISTED = "generate", "prompt-lookup", "assisted"
LLAMA, LLAMA_LOOKUP = "llama-cpp-python", "llama-lookup-python"
LOOKUP, SERVER = PROGRAMS = ("llama-lookup", "llama-server")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of a peer: its tokens, the end token included, and the seconds from prompt to end.

    `decode_seconds` leave out what the prompt took (see `paced`). Where a program hands out `text`
    alone, `tokens` are what the tokenizer makes of it, and `emitted` is how many there really were.
    """

    tokens: list[int]
    seconds: float
    decode_seconds: float
    forwards: int
    text: str | None = None
    emitted: int = 0


class Peer(Protocol):
    """A decoder that is not ours."""

    name: str

    def answer(self, prompt: Sequence[int], generation: Generation) -> Reply:
        """Answer a prompt from an empty cache."""


def chosen_first(logits: Floats, sampling: Sampling, position: int) -> tuple[int, Floats]:
    """The token that our sampler chooses above temperature 0, and scores that are highest for it.

    The others keep their logits, divided by the temperature: who asks how sure the choice is gets
    nearly the model's own answer.
    """
    token = choose(logits, sampling, position)
    scores = logits / np.float32(sampling.temperature)
    scores[token] = np.nextafter(scores.max(), np.float32(np.inf))
    return token, scores


def paced(seconds: float, behind: float, tokens: int, first: int = 1) -> float:
    """The time of all tokens at the pace of those behind the first forward, which took `behind`.

    The first one, which gives `first` tokens, reads the prompt as well, and our decode time leaves
    that out. An answer of one forward has nothing else to go by than all its `seconds`.
    """
    return behind * tokens / (tokens - first) if tokens > first else seconds
