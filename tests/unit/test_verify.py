"""The rules of verification: what they keep, and that the output has the target's own law.

The laws are checked by chi-square over single tokens and over pairs, given the two tokens before
them, on models of a few symbols. Honest rules must reach p > HONEST, broken ones fall below BROKEN.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import ClassVar

import numpy as np
import pytest

from engine import verify
from engine.backends.base import LogitScores
from engine.decode import decode
from engine.drafting.base import Drafter
from engine.hsd.family import LevelDrafter, Stack
from engine.sampling import Floats, distribution
from engine.settings import Drafting, Generation, Sampling
from engine.tree import Tree
from engine.types import RULES, Step
from engine.verify import Match, Rejection, Walk, normalised, residual, verifier
from tests.support.laws import p_of_counts, p_of_statistic
from tests.support.lossless import Adversary, Paths
from tests.support.toy import ToyBackend, generator

HONEST, BROKEN = 1e-3, 1e-6
SAMPLES = 10_000
RUNS, TOKENS = 30, 200
Logits = Callable[[tuple[int, ...]], Floats]
Law = Sequence[float]
SYMBOLS = 5


class Table:
    """Scores that are written down: a law for every row of a tree."""

    def __init__(self, laws: Mapping[int, Law]) -> None:
        self.laws = {row: np.float32(law) for row, law in laws.items()}
        self.asked: list[int] = []

    def choose(self, row: int) -> int:
        self.asked.append(row)
        return int(self.laws[row].argmax())

    def distribution(self, row: int) -> Floats:
        self.asked.append(row)
        return self.laws[row]

    def probability(self, row: int, token: int) -> float:
        return float(self.laws[row][token])

    def likeliest(self, row: int, count: int) -> list[tuple[int, float]]:
        raise NotImplementedError


def certain(token: int, size: int = SYMBOLS) -> Law:
    return np.eye(size)[token]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("row", [0, 2])
def test_a_walk_goes_on_while_it_stays_in_the_tree(rule: str, row: int) -> None:
    tree = Tree(0)
    for parent, token in [(0, 1), (0, 2), (2, 3), (3, 4), (3, 1)]:
        tree.add(parent, token, "context")
    scores = Table({0: certain(2), 2: certain(3), 3: certain(1), 5: certain(0)})
    walk = verifier(rule, 0, 0, SYMBOLS).walk(tree, scores, row)
    rows, tokens = ([2, 3, 5], [2, 3, 1, 0]) if row == 0 else ([3, 5], [3, 1, 0])
    assert (walk.rows, walk.tokens) == (rows, tokens)
    assert scores.asked == [row, *rows], "only what is visited is read, once"
    assert [list(law) for law in walk.distributions] == (
        [list(certain(token)) for token in tokens] if rule == "rejection" else []
    )


def test_the_rule_match_keeps_what_the_model_itself_chooses() -> None:
    tree = Tree(0)
    row = tree.add(0, 1, "draft:small")
    tree.distributions[row] = np.float32(certain(1))
    assert Match().walk(tree, Table({0: certain(2)})) == Walk([], [2], [])


# One place: the drafted token and what follows it when it was refused.


WANTED = [
    ((0.1, 0.2, 0.3, 0.4, 0.0), (0.1, 0.2, 0.3, 0.4, 0.0)),
    ((0.1, 0.2, 0.3, 0.4, 0.0), (0.4, 0.3, 0.2, 0.1, 0.0)),
    ((0.5, 0.5, 0.0, 0.0, 0.0), (0.0, 0.2, 0.4, 0.4, 0.0)),
    ((0.2, 0.2, 0.2, 0.2, 0.2), (0.0, 0.0, 1.0, 0.0, 0.0)),
    ((0.0, 0.0, 1.0, 0.0, 0.0), (0.2, 0.2, 0.2, 0.2, 0.2)),
    ((0.7, 0.1, 0.1, 0.05, 0.05), (0.3, 0.3, 0.2, 0.2)),
    ((0.01, 0.01, 0.01, 0.01, 0.96), (0.9, 0.1)),
]
"""The laws of a model and of what drafts for it, which may know fewer tokens."""


def outcomes(
    wanted: Law, proposed: Law, beside: Sequence[int] = (), times: int = SAMPLES
) -> tuple[Counter[int], int]:
    """How often every token came out, and how often what was drawn from `proposed` was kept.

    The tokens `beside` it are certain drafts.
    """
    rule = Rejection(1, 0, len(wanted))
    scores = Table(dict.fromkeys(range(len(beside) + 2), wanted))
    draws = np.random.Generator(np.random.Philox(key=9)).choice(len(proposed), times, p=proposed)
    law, found, kept, trees = np.float32(proposed), Counter[int](), 0, list[Tree]()
    for drawn in range(len(proposed)):
        trees.append(Tree(0))
        for token in beside:
            trees[-1].add(0, token, "context")
        trees[-1].distributions[trees[-1].add(0, drawn, "draft:small")] = law
    for drawn in draws.tolist():
        token = rule.walk(trees[drawn], scores).tokens[0]
        found[token] += 1
        kept += token == drawn
    return found, kept


def p_of(found: Mapping[int, int], law: Law) -> float:
    """The p-value of these counts under a law; 0 where the impossible happened."""
    total = sum(found.values())
    expected = np.float64(law) / np.float64(law).sum() * total
    seen = np.array([found.get(token, 0) for token in range(len(law))])
    if seen[expected == 0].any() or seen.sum() < total:
        return 0.0
    if (expected > 0).sum() == 1:
        return 1.0
    return p_of_counts(seen[expected > 0], expected[expected > 0])


@pytest.mark.parametrize("beside", [(), (1, 4)], ids=["alone", "beside certain drafts"])
@pytest.mark.parametrize(("wanted", "proposed"), WANTED)
def test_what_comes_out_has_the_models_own_law(
    wanted: Law, proposed: Law, beside: Sequence[int]
) -> None:
    found, kept = outcomes(wanted, proposed, beside)
    assert p_of(found, wanted) > HONEST
    if not beside:
        overlap = sum(map(min, wanted, proposed))
        assert kept == pytest.approx(SAMPLES * overlap, abs=2.5 * np.sqrt(SAMPLES))


def always(rule: Rejection, share: float) -> bool:
    """Broken on purpose: every chain is kept."""
    return True


def careless(rule: Rejection, share: float) -> bool:
    """Broken on purpose: chains are kept too often."""
    return bool(rule.random.random() < np.sqrt(share))


def unreduced(law: Floats, proposed: Floats, weight: float) -> Floats:
    """Broken on purpose: after a refusal the next token is drawn from p itself."""
    return law


BREAKS = [
    (Rejection, "accepts", always),
    (Rejection, "accepts", careless),
    (verify, "residual", unreduced),
]


def test_the_positive_part_of_a_difference() -> None:
    def rest(law: Law, proposed: Law, weight: float = 1.0) -> list[float]:
        return residual(np.float32(law), np.float32(proposed), weight).tolist()

    assert rest((0.5, 0.25, 0.25), (0.25, 0.75, 0.0)) == [0.25, 0.0, 0.25]
    assert rest((0.5, 0.25, 0.25), (0.5, 0.5)) == [0.0, 0.0, 0.25]
    assert rest((0.5, 0.5), (0.25, 0.25, 0.5)) == [0.25, 0.25]
    assert rest((0.5, 0.5), (0.125, 0.875), 0.5) == [0.125, 0.0]
    law = np.float32((0.5, 0.5))
    residual(law, np.float32((1.0, 0.0)), 0.5)
    assert law.tolist() == [0.5, 0.5]


def test_where_rounding_leaves_nothing_the_models_own_law_is_drawn_from() -> None:
    """The draft's law is nowhere smaller, so nothing is left after it was dropped."""
    tree, rule = Tree(0), Rejection(0, 0, 2)
    tree.distributions[tree.add(0, 1, "draft:small")] = np.float32((0.5, 0.5))
    rule.accepts = lambda share: share == 1.0  # type: ignore[method-assign]
    assert rule.walk(tree, Table({0: (0.5, 0.0)})) == ([], [0], [pytest.approx((0.5, 0.0))])


@pytest.mark.parametrize("vocabulary", [1, 3, 4])
def test_tokens_beyond_the_vocabulary_are_never_drawn(vocabulary: int) -> None:
    """What is drawn below it keeps its proportions."""
    law = (0.1, 0.3, 0.2, 0.4, 0.0)
    rule, scores, found = Rejection(2, 0, vocabulary), Table({0: law}), Counter[int]()
    for _ in range(SAMPLES):
        walk = rule.walk(Tree(0), scores)
        found[walk.tokens[0]] += 1
    assert p_of(found, law[:vocabulary]) > HONEST
    assert walk.distributions[0] == pytest.approx(
        np.array(law[:vocabulary]) / sum(law[:vocabulary])
    )
    assert scores.laws[0].tolist() == pytest.approx(law), "the model's own law stays as it is"
    if vocabulary > 1:
        assert p_of(found, (*law[: vocabulary - 1], law[vocabulary - 1] * 1.3)) < BROKEN


def test_where_all_is_beyond_the_vocabulary_any_token_below_it_may_be_drawn() -> None:
    """As it is a draft, any law will do, as long as it is one."""
    rule = Rejection(0, 1, 3)
    walk = rule.walk(Tree(0), Table({0: certain(4)}))
    assert walk.tokens[0] < 3 and walk.distributions[0].tolist() == pytest.approx([1 / 3] * 3)
    assert normalised(np.float32((0.0, 3.0, 1.0))).tolist() == [0.0, 0.75, 0.25]


def test_a_draw_follows_the_law_and_never_takes_what_has_none() -> None:
    rule = Rejection(3, 0, SYMBOLS)
    for law in (
        (0.0, 0.2, 0.0, 0.8, 0.0),
        (0.0, 2.0, 6.0, 0.0, 2.0),
        (1e-30, 0.0, 0.0, 0.0, 1e-30),
    ):
        found = Counter(rule.draw(np.float32(law)) for _ in range(SAMPLES))
        assert p_of(found, law) > HONEST

    class Edge:
        value = 0.0

        def random(self) -> float:
            return self.value

    rule.random = Edge()  # type: ignore[assignment]
    assert rule.draw(np.float32((0.0, 0.5, 0.0, 0.5, 0.0))) == 1
    Edge.value = 1.0
    assert rule.draw(np.float32((0.0, 0.5, 0.0, 0.5, 0.0))) == 3


def test_the_rule_depends_on_seed_and_stream_and_they_are_independent() -> None:
    draws = {
        (seed, stream): Rejection(seed, stream, 9).random.random(4_000)
        for seed in (0, 1, 2**63 - 1)
        for stream in (0, 1, 2, 3)
    }
    assert (draws[0, 1] == Rejection(0, 1, 9).random.random(4_000)).all()
    keyed = [  # the noise that the rule "match" takes from the same generator
        np.random.Generator(np.random.Philox(key=0, counter=[0, 0, 0, at])).random(4_000)
        for at in range(4)
    ]
    correlations = np.corrcoef([*draws.values(), *keyed])[np.triu_indices(16, 1)]
    assert abs(correlations).max() < 5 / np.sqrt(4_000)


# A whole run: a stack of models over a few symbols, databases beside it, the decode loop.


def blend(key: int, base: Logits | None = None, share: float = 1.5) -> Logits:
    """A model over a few symbols: random logits after every pair of them, on top of another's."""

    @cache
    def logits(suffix: tuple[int, ...]) -> Floats:
        found = share * generator(suffix, key).standard_normal(SYMBOLS)
        return np.float32(found + (base(suffix) if base else 0.0))

    return logits


TARGET = blend(1)
DRAFTS = (blend(2, TARGET, 1.5), blend(3, TARGET, 1.0), blend(4, TARGET, 0.6))
"""The smaller, the less like the target."""
START = (0, 1)


class Remembered(LogitScores):
    """Every law is computed once; nobody may write into it."""

    laws: ClassVar[dict[tuple[object, ...], Floats]] = {}

    def distribution(self, row: int) -> Floats:
        own = self.sampling
        key = self.row(row).tobytes(), own.temperature, own.top_k, own.top_p, own.min_p
        if key not in self.laws:
            self.laws[key] = super().distribution(row)
            self.laws[key].flags.writeable = False
        return self.laws[key]


class Small(ToyBackend):
    """A model over a few symbols whose answers have no end."""

    def __init__(self, logits: Logits) -> None:
        super().__init__(logits=logits)
        self.info = replace(self.info, vocabulary_size=SYMBOLS, eos_ids=frozenset())

    def score(self, tree: Tree, sampling: Sampling) -> Remembered:
        scores = super().score(tree, sampling)
        return Remembered(scores.read, scores.positions, sampling)


def stack(
    depth: int, sampling: Sampling, own: Sequence[Sampling] = (), vocabulary: int = SYMBOLS
) -> list[Drafter]:
    """Up to three draft models on top of each other; `own` are samplers of their own."""
    below: LevelDrafter | None = None
    for number, logits in enumerate(DRAFTS[3 - depth :]):
        sampler = replace(own[number] if own else sampling, seed=sampling.seed)
        rule = Rejection(sampling.seed, number + 1, vocabulary)
        backend, batch = Small(logits), (4, 2, 3)[number]
        below = LevelDrafter(str(number), backend, batch, sampler, rule, vocabulary, below)
    return [Stack(below, 2.0, 0.0)] if below else []


Drafters = Callable[[Sampling], Sequence[Drafter]]


def texts(drafters: Drafters, sampling: Sampling, runs: int = RUNS) -> list[list[int]]:
    """What the target says in so many runs of the engine, and how it began."""
    target, found = Small(TARGET), []
    drafting = Drafting(rule="rejection", budget="fixed")
    for seed in range(runs):
        own = replace(sampling, seed=seed)
        events = decode(target, START, drafters(own), Generation(own, TOKENS), drafting)
        steps = [event for event in events if isinstance(event, Step)]
        found.append([*START, *(token.id for step in steps for token in step.tokens)])
    return found


def joint(suffix: tuple[int, ...], sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The exact law of the next `length` tokens."""
    if not length:
        return {(): 1.0}
    law = np.float64(distribution(TARGET(suffix), sampling))
    return {
        (token, *rest): share * law[token]
        for token in np.flatnonzero(law).tolist()
        for rest, share in joint((*suffix, token)[-2:], sampling, length - 1).items()
    }


def p_value(found: Sequence[Sequence[int]], sampling: Sampling, length: int) -> float:
    """The p-value of `length` tokens at a time, given the two before: one test for all of them.

    What is expected less than five times is pooled. 0 where the impossible happened.
    """
    counts: dict[tuple[int, ...], Counter[tuple[int, ...]]] = defaultdict(Counter)
    for text in found:
        for at in range(2, len(text) - length + 1, length):
            counts[tuple(text[at - 2 : at])][tuple(text[at : at + length])] += 1
    statistic, freedom = 0.0, 0
    for suffix, seen in counts.items():
        law, total = joint(suffix, sampling, length), seen.total()
        if set(seen) - set(law):
            return 0.0
        cells = [(seen[path], share * total) for path, share in law.items()]
        large = [cell for cell in cells if cell[1] >= 5]
        small = np.sum([cell for cell in cells if cell[1] < 5], axis=0)
        if np.ndim(small) and (small[1] >= 5 or not large):
            large.append((small[0], small[1]))
        elif np.ndim(small):
            large[0] = (large[0][0] + small[0], large[0][1] + small[1])
        if len(large) > 1:
            statistic += float(sum((is_ - wanted) ** 2 / wanted for is_, wanted in large))
            freedom += len(large) - 1
    return p_of_statistic(statistic, freedom)


SAMPLERS = [
    Sampling(1.0),
    Sampling(0.6),
    Sampling(1.5),
    Sampling(1.0, top_k=3),
    Sampling(1.3, top_p=0.8),
    Sampling(0.8, min_p=0.15, top_k=4),
]


def assert_law(found: Sequence[Sequence[int]], sampling: Sampling) -> None:
    for length in (1, 2):
        assert p_value(found, sampling, length) > HONEST, length


@pytest.mark.grid(1)
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
def test_a_stack_leaves_the_targets_law_as_it_is(depth: int, sampling: Sampling) -> None:
    assert_law(texts(lambda own: stack(depth, own), sampling), sampling)


def databases(tokens: Sequence[int]) -> Paths:
    """Certain drafts, good ones and bad ones, of one token and of several."""
    last = tuple(tokens[-2:])
    best = int(TARGET(last).argmax())
    after = int(TARGET((*last, best)[-2:]).argmax())
    number = len(tokens) % 4
    return [[], [(best, after), (0,)], [(4, 1, 1), (best,)], [(number,), (1, 2)]][number]


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize(
    ("depth", "sampling"), [(0, Sampling(0.7, top_p=0.9)), (1, Sampling(0.7)), (2, Sampling(1.0))]
)
def test_databases_beside_a_stack_leave_the_law_as_it_is(depth: int, sampling: Sampling) -> None:
    found = texts(lambda own: [Adversary(databases), *always_on(depth, own)], sampling)
    assert_law(found, sampling)


def always_on(depth: int, sampling: Sampling) -> list[Drafter]:
    """A stack without its gate: it drafts beside whatever is in the tree."""
    return [part.top for part in stack(depth, sampling) if isinstance(part, Stack)]


@pytest.mark.parametrize("below", [Adversary(databases), None])
def test_databases_below_a_stack_and_drafts_by_the_other_rule_leave_the_law_as_it_is(
    below: Drafter | None,
) -> None:
    """Keyed choices come without a law; the target takes them for certain drafts."""

    def drafters(sampling: Sampling) -> list[Drafter]:
        rule = Rejection(sampling.seed, 1, SYMBOLS) if below else Match()
        top = LevelDrafter("0", Small(DRAFTS[2]), 3, sampling, rule, SYMBOLS, below)
        return [Stack(top, 2.0, 0.0)]

    assert_law(texts(drafters, Sampling(0.9)), Sampling(0.9))


OWN = [
    (Sampling(0.0), Sampling(0.5), Sampling(1.7)),
    (Sampling(1.5), Sampling(1.0, top_k=2), Sampling(0.7, top_p=0.6)),
]


@pytest.mark.soak(stay=1)
@pytest.mark.parametrize(("depth", "own"), [(3, OWN[0]), (2, OWN[1])])
def test_samplers_of_draft_models_leave_the_targets_law_as_it_is(
    own: Sequence[Sampling], depth: int
) -> None:
    """What is proposed is the law that was drawn from, not the one the target would draw from."""
    found = texts(lambda each: stack(depth, each, own[3 - depth :]), Sampling(0.8))
    assert_law(found, Sampling(0.8))


def test_tokens_that_are_never_drafted_are_said_as_often() -> None:
    """A draft is cut to the vocabulary that all models share, the target is not."""
    found = texts(lambda own: stack(2, own, vocabulary=SYMBOLS - 1), Sampling(1.0))
    assert_law(found, Sampling(1.0))


@pytest.mark.grid(1)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("owner", "name", "broken"), BREAKS)
def test_broken_rules_break_the_law_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    broken: Callable[..., object],
    depth: int,
) -> None:
    monkeypatch.setattr(owner, name, broken)
    found = texts(lambda own: stack(depth, own), Sampling(1.0))
    assert min(p_value(found, Sampling(1.0), length) for length in (1, 2)) < BROKEN


def test_the_check_of_the_law_can_fail() -> None:
    found = texts(lambda own: [], Sampling(1.0), 50)
    assert p_value(found, Sampling(1.0), 1) > HONEST
    assert p_value(found, Sampling(1.15), 1) < BROKEN
    assert p_value(found, Sampling(1.0, top_k=4), 2) == 0.0


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_at_temperature_0_both_rules_say_the_same(depth: int) -> None:
    wanted, cold = Generation(Sampling(0.0), 120), []
    for rule, drafters in product(RULES, ([], stack(depth, Sampling(0.0)))):
        drafting = Drafting(rule=rule, budget="fixed")
        events = [*decode(Small(TARGET), START, drafters, wanted, drafting)]
        cold.append([t.id for step in events if isinstance(step, Step) for t in step.tokens])
    assert cold[0] == cold[1] == cold[2] == cold[3] and len(cold[0]) == 120


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_same_seed_and_stack_say_the_same(depth: int) -> None:
    """And another stack says something else: the law is kept, not the text."""
    runs = [texts(lambda own: stack(depth, own), Sampling(1.0), 3) for _ in range(2)]
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]
    assert texts(lambda own: stack(2, own), Sampling(1.0), 3) != runs[0]
