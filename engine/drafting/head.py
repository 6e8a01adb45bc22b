"""A head drafts like any other source: its guesses become evidence in the tree of the databases.

A guess is the head's law of the token behind one node. To the hierarchy that is what one more tier
says there (`HeadTier`). It takes its place among the matches of the databases, with a weight that
is learned per depth and probability class (engine/drafting/calibration.py). Its estimates know the
noise as all others do (engine/drafting/noise.py). So the candidates of databases and head are on
one scale, in one tree, under one budget.

A guess costs a call. So the head is asked level by level (`HeadDrafter`). First the tree is grown
from what is known already. What it leaves open, the probability that the answer leaves the tree at
the next level, is what a guess can win. Where that is worth less than the call takes, by what calls
have brought and taken so far, the head is not asked, or not any deeper. Where databases hold a
chain of high trust next to nothing is open, and the time of the head is saved.

Invariant: guesses decide nothing. A head that is wrong, or fails, costs time only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from time import perf_counter

from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.calibration import HEAD_CLASSES, HEAD_DEPTHS, LONGEST
from engine.drafting.costs import WHOLE, HeadPace
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.paths import best_row, path_to, weighed
from engine.heads.base import Guess, Head
from engine.sampling import COLDEST
from engine.settings import Sampling
from engine.tree import Tree
from engine.types import DATABASES, HEAD, Followers, Work

PLACE = 5
"""A guess comes behind matches that are longer, and before those that are shorter or as long."""
NAMED = 24
"""The likeliest tokens of a guess that are named, beside the one that its noise favours most."""
CLASSES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
"""Upper bounds of all classes of probability but the last."""
SHARPEST = 2.0
"""No law is sharpened by a higher power, however low the temperature: a guess may be wrong."""
WIDTH = 8
"""Nodes of a level that a head is asked to extend, at most."""

Suffix = tuple[int, ...]


class HeadTier:
    """What a head has guessed in this step, as a tier: what follows a suffix where it was asked.

    A node is known by its last tokens. Where two nodes have the same ones, the first counts.
    """

    name = source = HEAD

    def __init__(self, sampling: Sampling, noisy: bool) -> None:
        self.sampling, self.noisy = sampling, noisy
        self.guesses: dict[Suffix, tuple[Guess, int, int]] = {}
        self.said: dict[Suffix, Sequence[Followers]] = {}

    def add(self, suffix: Suffix, guess: Guess, depth: int, position: int) -> None:
        """A guess of what follows a suffix at a position, `depth` levels below the root."""
        self.guesses.setdefault(suffix, (guess, depth, position))
        self.said.pop(suffix, None)

    def clear(self) -> None:
        """Forget all guesses."""
        self.guesses.clear()
        self.said.clear()

    def matches(self, suffix: Suffix) -> Sequence[Followers]:
        """As a match of PLACE tokens; shorter ones say nothing of their own."""
        if suffix not in self.said:
            asked = self.guesses.get(suffix)
            self.said[suffix] = () if asked is None else (*SHORTER, self.followers(*asked))
        return self.said[suffix]

    def followers(self, guess: Guess, depth: int, position: int) -> Followers:
        """A guess as followers, whose counts are probabilities at the temperature of the run.

        Their strength is the kind of evidence: depth and probability class.
        """
        # The draw looks at all logits once; what it finds out makes the rest cheap.
        drawn = guess.draw(position, self.sampling) if self.noisy else None
        likeliest = [(token, chance) for token, chance in guess.likeliest(NAMED) if chance > 0]
        power = min(1 / max(self.sampling.temperature, COLDEST), SHARPEST)
        last = likeliest[-1][1]
        rest = max(0.0, 1.0 - sum(chance for _, chance in likeliest))
        # As if all that is not named were as unlikely as the last one that is.
        mass = sum(chance**power for _, chance in likeliest) + rest * last ** (power - 1)
        counts = {token: chance**power / mass for token, chance in likeliest}
        if drawn is not None and drawn not in counts:
            counts[drawn] = max(guess.probability(drawn) ** power / mass, LEAST)
        made = Followers(1.0, float(len(counts)), counts)
        top = sum(max(counts.values()) > bound for bound in CLASSES)
        made.strength = min(depth, HEAD_DEPTHS - 1) * HEAD_CLASSES + top
        return made

    def unigrams(self) -> Followers | None:
        """A head says nothing that does not depend on what came before."""
        return None

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """More is decided: what was guessed is over."""
        self.clear()

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""


LEAST = 1e-9
"""The least probability of a token that is named."""
SHORTER = tuple(Followers(1.0, 1.0, {}) for _ in range(PLACE - 1))


@dataclass(frozen=True, slots=True)
class Look:
    """A tree as grown from what is known: the probability of the path to each of its rows, the root
    first, the tokens it is `expected` to emit, and the seconds of its step, those of the head left
    out."""

    tree: Tree
    chances: Sequence[float]
    expected: float
    seconds: float

    def missing(self, rows: Iterable[int]) -> float:
        """The probability that the answer reaches one of these rows, and leaves the tree there."""
        chances, children = self.chances, self.tree.children
        return sum(chances[row] - sum(chances[n] for n in children[row].values()) for row in rows)

    def kept(self, said: Sequence[int]) -> int:
        """How many of the tokens that were said lie in the tree."""
        row, count = 0, 0
        for token in said:
            child = self.tree.children[row].get(token)
            if child is None:
                break
            row, count = child, count + 1
        return count


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a head for a level: what the tree left open there, and how it looked before and
    after it."""

    level: int
    missing: float
    before: Look
    after: Look


class HeadDrafter:
    """Asks the head of a target while that pays, and drafts from what it says.

    `merged` is the hierarchy of databases and head, which grows the tree behind this drafter; None
    where no database drafts. While the databases back off, and without them, `alone` grows it.
    """

    name = HEAD

    def __init__(
        self,
        head: Head,
        tier: HeadTier,
        alone: Hierarchy,
        merged: Hierarchy | None,
        cancelled: Callable[[], bool],
    ) -> None:
        self.head, self.tier, self.cancelled = head, tier, cancelled
        self.alone, self.merged = alone, merged
        self.grew_alone = False
        self.caught_up = False
        """Whether the head has read the prompt."""
        self.asked: Ask | None = None
        """The latest question, until it is known what was said."""

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Ask the head. The tree is grown here only where no database drafts in this step."""
        if self.tier.guesses:
            self.clear()
        self.grew_alone = False
        if not budget.nodes:
            return {}
        with_databases = self.merged is not None and DATABASES in budget.asked
        hierarchy = self.merged if self.merged is not None and with_databases else self.alone
        clock = perf_counter()
        self.asked = ask = Ask(hierarchy, tokens, budget, reads=not self.caught_up)
        try:
            self.ask(ask)
        except BaseException:
            self.clear()
            raise
        finally:
            self.head.forget()
        seconds = perf_counter() - clock
        if ask.calls:
            self.caught_up = True
            budget.spend(seconds)
        if hierarchy is self.alone:
            self.grew_alone = True
            self.alone.grow(tree, tokens, budget)
        return {HEAD: Work(seconds, len(ask.calls))}

    def clear(self) -> None:
        """Forget what the head has said."""
        self.tier.clear()
        for hierarchy in (self.alone, self.merged):
            if hierarchy is not None:
                hierarchy.forget()

    def ask(self, ask: "Ask") -> None:
        """Ask level by level while that pays; the calls are kept in `ask`."""
        pace, tokens = ask.pace, ask.tokens
        look = ask.look()
        missing = look.missing([0])
        due = ask.budget.due == HEAD
        if not (due or pace is None or pace.pays(0, missing, look.expected, look.seconds)):
            return
        clock = perf_counter()
        guess = self.head.start(tokens, self.tier.sampling, self.cancelled)
        if guess is None:
            ask.called(0, missing, look, clock)
            return
        root = Node(0, (), tuple(tokens[-LONGEST:]), 0)
        self.tier.add(root.suffix, guess, 0, len(tokens))
        level = [root]
        look = ask.called(0, missing, look, clock)
        for depth in range(1, min(self.head.info.depth, ask.budget.depth)):
            frontier = ask.frontier(look.tree, level, depth, self.head.info.branches)
            missing = look.missing(node.row for node in frontier)
            seconds = look.seconds + ask.spent
            pays = pace is None or pace.pays(depth, missing, look.expected, seconds)
            if not frontier or not pays:
                return
            clock = perf_counter()
            guesses = self.head.extend(
                [node.parent for node in frontier], [node.path[-1] for node in frontier]
            )
            for node, guess in zip(frontier, guesses, strict=True):
                self.tier.add(node.suffix, guess, depth, len(tokens) + depth)
            level = frontier
            look = ask.called(depth, missing, look, clock)

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Learn what the calls were worth, and the guesses where no database drafted. A prompt is
        read once the head is asked: it may never be."""
        if self.asked is not None and self.asked.decided == len(tokens) - new:
            self.asked.settle(tokens[len(tokens) - new :])
        self.asked = None
        if self.grew_alone:
            self.alone.observe(tokens, new)
            self.grew_alone = False

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node that the head is asked for: its row in the tree that was looked at, its path, its last
    tokens, and which guess of the level above it stands behind."""

    row: int
    path: Suffix
    suffix: Suffix
    parent: int

    def child(self, number: int, row: int, token: int) -> "Node":
        """The node of a token behind this one, which is guess `number` of its level."""
        return Node(row, (*self.path, token), (*self.suffix[1 - LONGEST :], token), number)


class Ask:
    """What one step asks a head for: looks at the tree as it would be grown from what is known.

    In the step in which the head `reads` the prompt, its first call says nothing of later ones.
    """

    def __init__(
        self, hierarchy: Hierarchy, tokens: Sequence[int], budget: Budget, reads: bool = False
    ) -> None:
        self.hierarchy, self.tokens, self.budget = hierarchy, tokens, budget
        self.reads = reads
        self.pace: HeadPace | None = budget.costs.gate.head if budget.costs else None
        self.decided = len(tokens)
        self.calls: list[Call] = []
        self.spent = 0.0

    def called(self, level: int, missing: float, before: Look, clock: float) -> Look:
        """The head was called for a level since `clock`: how the tree looks then."""
        self.hierarchy.forget()
        after = self.look()
        seconds = perf_counter() - clock
        self.spent += seconds
        if self.pace is not None and (level or not self.reads):
            self.pace.took(level, seconds)
        self.calls.append(Call(level, missing, before, after))
        return after

    def settle(self, said: Sequence[int]) -> None:
        """Learn what the calls brought: the target said these tokens.

        What counts is what was kept, not what was expected. The rows that a call adds to the
        forward are paid in tokens, at the pace of the tree before it.
        """
        if self.pace is None or not self.calls:
            return
        if not self.reads:
            self.pace.took(WHOLE, self.spent)
        first, last = self.calls[0], self.calls[-1]
        whole = Call(WHOLE, first.missing, first.before, last.after)
        for call in (*self.calls, whole):
            rows = call.after.seconds - call.before.seconds
            pace = call.before.expected / call.before.seconds
            added = call.after.kept(said) - call.before.kept(said) - rows * pace
            self.pace.brought(call.level, call.missing, added)

    def look(self) -> Look:
        """The tree from what is known now."""
        if self.budget.leaves == 1:
            return self.look_along()
        trial, tree = copy(self.budget), Tree(self.tokens[-1])
        self.hierarchy.grow_tree(tree, self.tokens, trial)
        chances = self.hierarchy.chances()
        if trial.costs is None:
            return Look(tree, chances, trial.expected, 1.0)
        return Look(tree, chances, sum(chances), trial.costs.table[len(tree)])

    def look_along(self) -> Look:
        """The same where one path is verified alone."""
        grown, chances, _ = weighed(self.hierarchy, self.tokens, self.budget)
        best, expected = best_row(grown, chances, self.budget)
        rows, tree, row = path_to(grown, best), Tree(self.tokens[-1]), 0
        for at in rows:
            row = tree.add(row, grown.tokens[at], grown.sources[at])
        seconds = 1.0 if self.budget.costs is None else self.budget.costs.table[len(rows)]
        return Look(tree, [1.0, *(chances[at] for at in rows)], expected, seconds)

    def frontier(self, tree: Tree, level: Sequence[Node], depth: int, branches: bool) -> list[Node]:
        """The nodes of the tree at a depth that stand behind the guesses of the level above, the
        likeliest first: as many as the head takes."""
        numbers = {node.path: number for number, node in enumerate(level)}
        found: list[Node] = []
        for row in range(1, len(tree.tokens)):
            if tree.depths[row] != depth:
                continue
            number = numbers.get(tree.path(tree.parents[row]))
            if number is not None:
                found.append(level[number].child(number, row, tree.tokens[row]))
        return found[: WIDTH if branches else 1]


class FixedHead:
    """Drafts a chain of so many tokens in each step, whatever it costs: as other programs do."""

    name = HEAD

    def __init__(
        self, head: Head, depth: int, sampling: Sampling, cancelled: Callable[[], bool]
    ) -> None:
        self.head, self.depth, self.sampling, self.cancelled = head, depth, sampling, cancelled

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Draw token after token, each with the noise that the target will draw with."""
        room = min(self.depth, budget.depth, budget.nodes, self.head.info.depth)
        if room < 1:
            return {}
        clock, calls, row = perf_counter(), 1, 0
        try:
            guess = self.head.start(tokens, self.sampling, self.cancelled)
            while guess is not None:
                token = guess.draw(len(tokens) + tree.depths[row], self.sampling)
                row = tree.add(row, token, HEAD)
                if tree.depths[row] >= room:
                    break
                [guess] = self.head.extend([0], [token])
                calls += 1
        finally:
            self.head.forget()
        return {HEAD: Work(perf_counter() - clock, calls)}

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """What is decided is read with the next draft."""

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""


def head_drafters(
    head: Head,
    alone: Callable[[HeadTier], Hierarchy],
    merged: Callable[[HeadTier], Hierarchy] | None,
    sampling: Sampling,
    noisy: bool,
    cancelled: Callable[[], bool],
) -> list[Drafter]:
    """A head that drafts, and the databases behind it where they do: both from one tier."""
    tier = HeadTier(sampling, noisy)
    both = merged(tier) if merged is not None else None
    first = HeadDrafter(head, tier, alone(tier), both, cancelled)
    return [first] if both is None else [first, both]
