"""Chains of drafts verified together, over every outcome of every random decision.

The models know three symbols, so the law of what comes out is computed exactly: a stack drafts, the
target verifies once, and its own law continues from there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from engine import verify
from engine.decode import never
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.hsd.family import LevelDrafter
from engine.hsd.measure import lasting
from engine.sampling import Floats, distribution
from engine.settings import Drafting, Sampling
from engine.tree import Tree
from engine.verify import Rejection, residual
from tests.support.lossless import Adversary
from tests.support.toy import ToyBackend, generator

SYMBOLS, END = 3, 2
START = (0, 1)
Text = tuple[int, ...]
Logits = Callable[[Text], Floats]


class Outcomes:
    """The random decisions of one run: `script` gives the first ones, the others follow in order.
    `share` is the probability of the run."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script, self.share = script, 1.0
        self.taken: list[int] = []
        self.open: list[list[int]] = []

    def pick(self, shares: Sequence[float]) -> int:
        possible = [at for at, share in enumerate(shares) if share > 0]
        at = len(self.taken)
        chosen = self.script[at] if at < len(self.script) else possible[0]
        self.open.append(possible[1:] if at >= len(self.script) else [])
        self.taken.append(chosen)
        self.share *= shares[chosen]
        return chosen


class Scripted(Rejection):
    """The rule, with the outcomes of a script."""

    def __init__(self, outcomes: Outcomes) -> None:
        super().__init__(0, 0, SYMBOLS)
        self.outcomes = outcomes

    def accepts(self, share: float) -> bool:
        return self.outcomes.pick((1.0 - share, share)) == 1

    def draw(self, distribution: Floats) -> int:
        shares = np.float64(distribution)
        return self.outcomes.pick((shares / shares.sum()).tolist())


def every(play: Callable[[Outcomes], Text]) -> Iterator[tuple[float, Text]]:
    """What every possible run says, and its probability."""
    scripts: list[list[int]] = [[]]
    while scripts:
        outcomes = Outcomes(scripts.pop())
        said = play(outcomes)
        yield outcomes.share, said
        for at, others in enumerate(outcomes.open):
            scripts += [[*outcomes.taken[:at], other] for other in others]


def blend(key: int, base: Logits | None = None, share: float = 1.2) -> Logits:
    """Random logits after every pair of symbols, on top of another model's."""

    @cache
    def logits(suffix: Text) -> Floats:
        found = share * generator(suffix, key).standard_normal(SYMBOLS)
        return np.float32(found + (base(suffix) if base else 0.0))

    return logits


TARGET = blend(1)
MID, SMALL = blend(2, TARGET, 0.7), blend(3, TARGET, 1.2)


def model(logits: Logits, ends: bool) -> ToyBackend:
    backend = ToyBackend(logits=logits)
    ids = frozenset({END} if ends else ())
    backend.info = replace(backend.info, vocabulary_size=SYMBOLS, eos_ids=ids)
    backend.prefill(START, never)
    return backend


def law(suffix: Text, sampling: Sampling, ends: bool, length: int) -> dict[Text, float]:
    """The target's own law of the next `length` tokens, fewer where the answer ends."""
    if not length or (ends and suffix[-1] == END):
        return {(): 1.0}
    each = np.float64(distribution(TARGET(suffix), sampling))
    return {
        (token, *rest): share * each[token]
        for token in np.flatnonzero(each).tolist()
        for rest, share in law((*suffix, token)[-2:], sampling, ends, length - 1).items()
    }


Below = Callable[[Outcomes], Drafter | None]


def level(
    logits: Logits, batch: int, outcomes: Outcomes, sampling: Sampling, ends: bool, below: Below
) -> LevelDrafter:
    rule = Scripted(outcomes)
    name, backend = str(batch), model(logits, ends)
    return LevelDrafter(name, backend, batch, sampling, rule, SYMBOLS, below(outcomes))


def drafted(drafter: LevelDrafter, depth: int) -> Tree:
    tree = Tree(START[-1])
    drafter.grow(tree, START, Budget(Drafting(), depth, SYMBOLS))
    return tree


def spoken(
    outcomes: Outcomes, tree: Tree, sampling: Sampling, ends: bool, length: int
) -> tuple[int, Text]:
    """The number of drafts that the target keeps, and its answer so far."""
    walk = Scripted(outcomes).walk(tree, model(TARGET, ends).score(tree, sampling))
    text = tuple(walk.tokens)
    stop = text.index(END) + 1 if ends and END in text else length
    return len(walk.rows), text[: min(stop, length)]


def law_of(
    play: Callable[[Outcomes], Text], sampling: Sampling, ends: bool, length: int
) -> dict[Text, float]:
    """The law of what a run says, continued by the target's own up to `length` tokens."""
    found: dict[Text, float] = defaultdict(float)
    for share, said in every(play):
        rest = law((*START, *said)[-2:] if said else START, sampling, ends, length - len(said))
        for more, following in rest.items():
            found[*said, *more] += share * following
    return found


def assert_equal(found: dict[Text, float], wanted: dict[Text, float]) -> None:
    assert sum(found.values()) == pytest.approx(1.0)
    assert {text for text, share in found.items() if share > 1e-9} == set(wanted)
    assert found == pytest.approx(dict.fromkeys(found, 0.0) | wanted, abs=1e-6)


SAMPLERS = [
    Sampling(0.7),
    Sampling(1.3),
    Sampling(1.0, top_k=2),
    Sampling(1.2, top_p=0.8),
    Sampling(1.0, min_p=0.3),
    Sampling(0.0),
]


def nothing(outcomes: Outcomes) -> None:
    return None


def alone(batch: int, sampling: Sampling, ends: bool) -> Callable[[Outcomes], LevelDrafter]:
    """One draft model, which proposes `batch` tokens."""
    return lambda outcomes: level(SMALL, batch, outcomes, sampling, ends, nothing)


def answers(
    drafter: Callable[[Outcomes], LevelDrafter], sampling: Sampling, ends: bool, length: int
) -> Callable[[Outcomes], Text]:
    """One step of the target: what it says of an answer of at most `length` tokens."""

    def play(outcomes: Outcomes) -> Text:
        tree = drafted(drafter(outcomes), 4)
        return spoken(outcomes, tree, sampling, ends, length)[1]

    return play


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
def test_a_chain_leaves_the_joint_law_as_it_is(sampling: Sampling, batch: int, ends: bool) -> None:
    """Also where the answer is stopped before the end of the chain, and goes on with another."""
    for length in (batch + 1, batch):
        play = answers(alone(batch, sampling, ends), sampling, ends, length)
        assert_equal(law_of(play, sampling, ends, length), law(START, sampling, ends, length))


def certain(outcomes: Outcomes) -> Drafter:
    """Databases below a draft model, right in part and with branches."""
    return Adversary(lambda tokens: [(0, 1), (1,), (2, 0, 1)] if len(tokens) % 2 else [(1, 1)])


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sampling", [SAMPLERS[0], SAMPLERS[3]], ids=str)
@pytest.mark.parametrize("lowest", ["databases", "small@1", "small@2"])
def test_a_stack_of_two_levels_leaves_the_joint_law_as_it_is(
    lowest: str, sampling: Sampling, batch: int, ends: bool
) -> None:
    """What the middle model keeps is a chain of its own, with an end that depends on the luck of
    the drafts below it."""
    if lowest == "databases":
        below: Below = certain
    else:
        below = alone(int(lowest[-1]), sampling, ends)

    def middle(outcomes: Outcomes) -> LevelDrafter:
        return level(MID, batch, outcomes, sampling, ends, below)

    play = answers(middle, sampling, ends, 3)
    assert_equal(law_of(play, sampling, ends, 3), law(START, sampling, ends, 3))


def unreduced(law: Floats, proposed: Floats, weight: float) -> Floats:
    """Broken on purpose: after a dropped draft the next token is drawn from p itself."""
    return law


def unweighted(law: Floats, proposed: Floats, weight: float) -> Floats:
    """Broken on purpose: it is drawn as if that draft had been verified alone."""
    return residual(law, proposed, 1.0)


def as_a_whole(weight: float, rest: float) -> float:
    """Broken on purpose: a chain is kept as often as one that ends there."""
    return weight


@pytest.mark.parametrize(
    ("name", "broken"),
    [("residual", unreduced), ("residual", unweighted), ("share_kept", as_a_whole)],
)
def test_broken_rules_break_the_joint_law(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: object
) -> None:
    monkeypatch.setattr(verify, name, broken)
    play = answers(alone(3, SAMPLERS[0], False), SAMPLERS[0], False, 4)
    found, wanted = law_of(play, SAMPLERS[0], False, 4), law(START, SAMPLERS[0], False, 4)
    assert max(abs(found[text] - wanted[text]) for text in wanted) > 1e-3


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_more_is_kept_than_by_verifying_drafts_one_by_one(batch: int) -> None:
    """And as much as a profile measures along the target's own text."""
    sampling, kept = Sampling(0.7), np.zeros(batch)

    def play(outcomes: Outcomes) -> Text:
        tree = drafted(alone(batch, sampling, False)(outcomes), batch)
        count, _ = spoken(outcomes, tree, sampling, False, batch)
        return (count,)

    for share, (count,) in every(play):
        kept[:count] += share
    single, measured = np.zeros(batch), np.zeros(batch)
    for text, share in law(START, sampling, False, batch).items():
        whole, ratios = (*START, *text), list[float]()
        for at, token in enumerate(text, start=2):
            suffix = whole[at - 2 : at]
            laws = [distribution(logits(suffix), sampling)[token] for logits in (SMALL, TARGET)]
            ratios.append(float(laws[0] / laws[1]))
        single += share * np.cumprod(np.minimum(ratios, 1.0))
        measured += share * np.array(lasting(ratios))
    assert kept == pytest.approx(measured)
    assert kept[0] == pytest.approx(single[0]) and (kept[1:] > single[1:] + 0.004).all()
