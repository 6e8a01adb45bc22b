"""Answers that quote long prompts, with the library's attention and with the folded one.

The answers are given: every forward is a real one, and what it chooses is overridden. So any model
will do, and both ways say the same text. Half of an answer and more is quoted from a prompt of
6,000 to 7,500 tokens, which is where drafts come from. The prompt is not read, as forwards take as
long over zeros. "before" has the library's attention and one cost curve for all lengths, "now" has
the folded one and c(n, length). They take turns.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from tqdm import tqdm

from bench.options import Record
from engine.backends.base import Scores
from engine.backends.folded_attention import fold, unfold
from engine.backends.scores import LogitScores
from engine.backends.transformers import TransformersBackend
from engine.decode import decode
from engine.drafting.costs import CostCurve, forward_seconds
from engine.drafting.databases import Databases
from engine.methods import METHODS
from engine.sampling import Floats
from engine.settings import Generation, Sampling
from engine.tree import Tree
from engine.types import Step

BEFORE, NOW = "before", "now"
TEXTS = Path(__file__).parent.parent / "docs"
SHORTEST, LONGEST = 6000, 7500
OWN, QUOTED = 24, 40
"""Tokens of an answer's own, and then of a quotation, in turn."""


class Given:
    """Scores of a forward whose choices are those of a text. `places` is where in the text the
    token after each row is."""

    def __init__(self, scores: Scores, text: Sequence[int], places: Sequence[int]) -> None:
        self.scores, self.text, self.places = scores, text, places

    def choose(self, row: int) -> int:
        place = self.places[row]
        return self.text[place] if place < len(self.text) else 0

    def distribution(self, row: int) -> Floats:
        return self.scores.distribution(row)

    def probability(self, row: int, token: int) -> float:
        return self.scores.probability(row, token)

    def known(self, row: int, token: int) -> float:
        return self.scores.known(row, token)

    def likeliest(self, row: int, count: int) -> list[tuple[int, float]]:
        return self.scores.likeliest(row, count)


class Quoting(TransformersBackend):
    """A model that is made to say a text."""

    text: Sequence[int] = ()

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        start = len(self.cached) + 1
        given = Given(super().score(tree, sampling), self.text, [start + d for d in tree.depths])
        return given  # type: ignore[return-value]


class OfAllLengths(CostCurve):
    """One curve for texts of any length."""

    def reach(self, length: int, unread: int = 0) -> None:
        """Nothing depends on it."""


def documents(backend: TransformersBackend) -> list[int]:
    """This project's documents."""
    texts = (file.read_text("utf-8") for file in sorted(TEXTS.glob("*.md")))
    ends = backend.info.eos_ids
    return [token for text in texts for token in backend.tokenize(text) if token not in ends]


def quoting(text: Sequence[int], tokens: int, draw: Random) -> tuple[list[int], list[int]]:
    """A part of a text as the prompt, and an answer that quotes it and the rest in turn."""
    length = draw.randint(SHORTEST, LONGEST)
    start = draw.randrange(len(text) - length)
    prompt, rest = text[start : start + length], [*text[:start], *text[start + length :]]
    answer = list[int]()
    while len(answer) < tokens:
        own, quoted = draw.randrange(len(rest) - OWN), draw.randrange(length - QUOTED)
        answer += [*rest[own : own + OWN], *prompt[quoted : quoted + QUOTED]]
    return list(prompt), answer[:tokens]


def quotes(backend: TransformersBackend, curve: CostCurve, tokens: int, answers: int) -> Record:
    """Tokens per second and per forward of answers of so many tokens, before and now."""
    draw, model = Random(0), Quoting(backend.model, backend.tokenizer, backend.info)
    found: dict[str, list[list[Step]]] = {BEFORE: [], NOW: []}
    curves = {BEFORE: OfAllLengths(curve.points), NOW: curve.fresh()}
    text = documents(backend)
    for number in tqdm(range(answers), desc="Answers", leave=False):
        prompt, answer = quoting(text, tokens, draw)
        model.text = [*prompt, *answer]
        forward_seconds(model, prompt[:9], 0)
        model.stretch(prompt[:-1])
        for name in (BEFORE, NOW) if number % 2 else (NOW, BEFORE):
            (fold if name == NOW else unfold)(model.model)
            found[name].append(answered(model, prompt, tokens, curves[name]))
    fold(model.model)
    return {name: figures(runs) for name, runs in found.items()}


def answered(model: Quoting, prompt: list[int], tokens: int, curve: CostCurve) -> list[Step]:
    """The steps of one answer."""
    method, generation = METHODS["hd"], Generation(Sampling(temperature=0.0), max_tokens=tokens)
    drafters = method.drafters(Databases())
    events = decode(model, prompt, drafters, generation, method.drafting, costs=curve)
    return [event for event in events if isinstance(event, Step)]


def figures(runs: Sequence[Sequence[Step]]) -> Record:
    """The figures of all answers of one way."""
    steps = [step for run in runs for step in run]
    tokens = sum(len(step.tokens) for step in steps)
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / sum(step.seconds for step in steps),
        "tokens_per_forward": tokens / len(steps),
        "nodes": sum(sum(step.proposed.values()) for step in steps) / len(steps),
    }
