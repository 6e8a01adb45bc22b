"""The toy, its drafters and its databases, as the tests of losslessness use them."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import permutations

import pytest

from engine.backends.base import Backend, Filled, LogitScores
from engine.decode import decode, never
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.costs import CostCurve
from engine.drafting.databases import Databases
from engine.hsd.family import Family
from engine.hsd.profile import ModelProfile, Pair, Profile, Rounds
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree, graft
from engine.types import RULES, TIERS, Followers, Step, Token, Work
from tests.support.toy import VOCABULARY, ToyBackend, deviating

ORDERS = [order for size in (1, 2, 3) for order in permutations(TIERS, size)]
TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
CUTS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
]
PROMPT = tuple(b"<once upon a time> once")


def events_of(
    backend: Backend,
    prompt: Sequence[int],
    generation: Generation,
    drafters: Sequence[Drafter] = (),
    drafting: Drafting | None = None,
    cancelled: Callable[[], bool] = never,
    costs: CostCurve | None = None,
) -> list[Step]:
    drafting = drafting or Drafting()
    events = list(decode(backend, prompt, drafters, generation, drafting, cancelled, costs))
    return [event for event in events if isinstance(event, Step)]


def tokens_of(steps: Sequence[Step]) -> list[Token]:
    return [token for step in steps for token in step.tokens]


def assert_lossless(plain: Sequence[Step], fast: Sequence[Step]) -> None:
    """Equal ids, positions, texts and ends; the probabilities up to what rounding may change."""
    left, right = tokens_of(plain), tokens_of(fast)
    assert [token.id for token in right] == [token.id for token in left]
    assert [token.position for token in right] == [token.position for token in left]
    assert [token.text for token in right] == [token.text for token in left]
    assert fast[-1].finish == plain[-1].finish
    values = [token.probability for token in left]
    assert [token.probability for token in right] == pytest.approx(values, rel=1e-3, abs=1e-6)


def ids(steps: Sequence[Step]) -> list[int]:
    return [token.id for token in tokens_of(steps)]


def accepted(steps: Sequence[Step]) -> int:
    return sum(sum(step.accepted.values()) for step in steps)


class Counts:
    """A table of texts in memory, made the slow and obvious way."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.behind: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for text in texts:
            for at in range(1, len(text)):
                for size in range(1, min(3, at) + 1):
                    self.behind[tuple(text[at - size : at])][text[at]] += 1
        self.followers = {
            key: Followers(found.total(), len(found), dict(found.most_common()))
            for key, found in self.behind.items()
        }
        said = Counter(token for text in texts for token in text)
        self.often = Followers(said.total(), len(said), dict(said.most_common()))

    def look_up(self, key: Sequence[int]) -> Followers | None:
        return self.followers.get(tuple(key))

    def unigrams(self) -> Followers | None:
        return self.often


class Stated(CostCurve):
    """A cost curve that stays as it was stated, however long the steps really take."""

    def observe(self, nodes: int, verify: float, draft: float, other: float) -> None:
        super().observe(nodes, self.seconds(nodes), 0.0, 0.0)

    def fresh(self) -> "Stated":
        return Stated(self.points)


def curves() -> dict[str, CostCurve | None]:
    """What a forward may cost. A machine where drafting is free, one where it never pays, ..."""
    return {
        "none": None,
        "free": Stated({0: 1.0, 63: 1.0}),
        "usual": Stated({0: 1.0, 3: 1.1, 7: 1.3, 15: 1.7, 63: 4.0}),
        "jumps": Stated({0: 1.0, 1: 3.0, 2: 1.5, 30: 1.5, 31: 9.0, 63: 9.0}),
        "never": Stated({0: 1.0, 63: 1000.0}),
        "learning": CostCurve({0: 1e-4, 7: 2e-4, 63: 1e-3}),
    }


@cache
def plain_toy(generation: Generation, prompt: tuple[int, ...] = PROMPT, context: int = 4096):
    return events_of(ToyBackend(context), prompt, generation)


def as_plain(
    wanted: Generation,
    drafters: Sequence[Drafter],
    drafting: Drafting | None = None,
    costs: CostCurve | None = None,
    backend: ToyBackend | None = None,
) -> list[Step]:
    """The steps of the toy's answer with these drafters, which is the plain one."""
    backend = backend or ToyBackend()
    fast = events_of(backend, PROMPT, wanted, drafters, drafting, costs=costs)
    assert_lossless(plain_toy(wanted, PROMPT, backend.info.context_length), fast)
    return fast


@cache
def toy_table() -> Counts:
    draws = [
        Generation(Sampling(temperature, seed=seed), max_tokens=80)
        for temperature in TEMPERATURES
        for seed in range(3)
    ]
    return Counts([[*PROMPT, *(t.id for t in tokens_of(plain_toy(draw)))] for draw in draws])


def warm_toy() -> Databases:
    databases = Databases(statistics=toy_table())
    for seed in (5, 0, 1):
        answer = [t.id for t in tokens_of(plain_toy(generation(1.0, seed)))]
        databases.learned.finish([*PROMPT, *answer], len(answer))
    return databases


class Strict(ToyBackend):
    """Refuses what a real model cannot do: to read unknown tokens, or beyond its context."""

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        assert len(tokens) <= self.info.context_length
        assert max(tokens) < self.info.vocabulary_size
        return super().prefill(tokens, cancelled)

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        assert len(self.cache) + max(tree.depths) < self.info.context_length
        assert max(tree.tokens) < self.info.vocabulary_size
        return super().score(tree, sampling)


DEVIATIONS = {"tiny": 3.0, "small": 2.0, "mid": 1.0}


def made_up(names: Sequence[str]) -> Profile:
    """A profile of models, the smallest first, each of four times the cost of the one before."""
    models = tuple(
        ModelProfile(
            name, name, size, size, {0: size * 1e-6, 63: size * 2e-6}, 0.0,
            Rounds((0.5, 0.5), size * 1.2e-6),
        )
        for name, size in zip(names, (1, 4, 16, 64), strict=False)
    )  # fmt: skip
    survival = tuple(0.8**depth for depth in range(1, 9))
    pair = Pair(0.8, dict.fromkeys(RULES, survival))
    return Profile(models, {(i, j): pair for j in range(len(models)) for i in range(j)}, {})


def toy_family() -> Family:
    drafts = {
        name: Strict(name=name, logits=deviating(deviation))
        for name, deviation in DEVIATIONS.items()
    }
    return Family(ToyBackend(), drafts, made_up([*drafts, "toy"]))


def generation(temperature: float, seed: int, most: int = 50, **cuts: float) -> Generation:
    return Generation(Sampling(temperature=temperature, seed=seed, **cuts), max_tokens=most)


class Adversary(Drafter):
    """A drafter made of a function, within its budget unless told otherwise; learns nothing."""

    name = "model"

    def __init__(
        self,
        say: Callable[[Sequence[int]], Iterable[tuple[int, ...]]],
        name: str = "model",
        obedient: bool = True,
    ) -> None:
        self.say, self.name, self.obedient = say, name, obedient

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        nodes, depth = (budget.nodes, budget.depth) if self.obedient else (10**6, None)
        for path in self.say(tokens):
            graft(tree, path[:depth], self.name, 1, nodes)
        return {self.name: Work(0.0)}


Paths = list[tuple[int, ...]]


def garbage(tokens: Sequence[int]) -> Paths:
    draw = random.Random(len(tokens))
    return [tuple(draw.randrange(VOCABULARY) for _ in range(draw.randrange(6))) for _ in range(60)]


def duplicates(tokens: Sequence[int]) -> Paths:
    return [(letter,) for letter in range(97, 123)] * 3


def deep(tokens: Sequence[int]) -> Paths:
    return [(97,) * depth for depth in range(1, 60)]


def everything(tokens: Sequence[int]) -> Paths:
    return [(token,) for token in range(VOCABULARY)]


def knowing(truth: Sequence[int], ahead: int = 7) -> Adversary:
    return Adversary(lambda tokens: [tuple(truth[len(tokens) : len(tokens) + ahead])])


QUESTIONS = (
    "Tell me a story about a fox who wanted to learn how to swim.",
    "Explain in simple words why the sky is blue.",
)
