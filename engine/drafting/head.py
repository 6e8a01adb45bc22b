"""Drafting with a head: its guesses become evidence in the tree of the databases.

A guess is the head's distribution of the token after one node. For the hierarchy this is the
evidence of one more tier (`HeadTier`), with a weight that is learned per depth and probability
class (engine/drafting/calibration.py). Candidates of databases and head are therefore on one scale,
in one tree, under one budget.

A guess costs a call, so the head is called level by level (`HeadDrafter`). First the databases grow
the tree. A guess can gain at most the probability that the answer leaves this tree at the next
level. If that is worth less than the time of a call, judged by earlier calls, the head is not
called, or not for deeper levels. After a call the tree is grown again from all evidence.

Invariant: guesses decide nothing. A head that is wrong, or fails, costs only time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from time import perf_counter

from engine import native
from engine.drafting.base import Drafter, Tier
from engine.drafting.budget import Budget
from engine.drafting.calibration import HEAD_CLASSES, HEAD_DEPTHS, WINDOW
from engine.drafting.costs import WHOLE, HeadPace
from engine.drafting.hierarchy import Hierarchy
from engine.heads.base import Head, LogitGuess
from engine.sampling import COLDEST
from engine.settings import Sampling
from engine.tree import Tree
from engine.types import DATABASES, HEAD, Followers, Work

PLACE = 5
"""The match length of a guess: it ranks after longer matches, and before those of at most this
length."""
NAMED = 24
"""How many of the likeliest tokens of a guess are candidates, besides the token that its noise
favours most."""
CLASSES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
"""Upper bounds of all classes of probability but the last."""
SHARPEST = 2.0
"""The largest power by which a distribution is sharpened, however low the temperature: a guess may
be wrong."""
WIDTH = 8
"""The most nodes of a level that a head extends."""
LEAST = 1e-9
"""The smallest probability of a candidate token."""
SHORTER = tuple(Followers(1.0, 1.0, {}) for _ in range(PLACE - 1))

Suffix = tuple[int, ...]


class HeadTier(Tier):
    """The guesses of a head in this step, as a tier: the followers of the suffixes for which the
    head was called.

    A node is identified by its last tokens. If two nodes have the same last tokens, the first
    counts. A head that guesses `at_once` levels together is called for the root only.
    """

    name = source = HEAD

    def __init__(self, sampling: Sampling, noisy: bool, at_once: int = 1) -> None:
        self.sampling, self.noisy, self.at_once = sampling, noisy, at_once
        self.guesses: dict[Suffix, tuple[LogitGuess, int, int]] = {}
        self.known: dict[Suffix, Sequence[Followers]] = {}
        self.compiled = native.core.Guessed() if native.core is not None and at_once == 1 else None
        """The same matches, as the compiled core reads them."""

    def add(self, suffix: Suffix, guess: LogitGuess, depth: int, position: int) -> None:
        if suffix in self.guesses:
            return
        self.guesses[suffix] = guess, depth, position
        self.known.pop(suffix, None)
        if self.compiled is not None:
            self.compiled.add(suffix, self.matches(suffix))

    def clear(self) -> None:
        self.guesses.clear()
        self.known.clear()
        if self.compiled is not None:
            self.compiled.clear()

    def matches(self, suffix: Suffix) -> Sequence[Followers]:
        """The guess as a match of PLACE tokens; shorter matches are empty."""
        if suffix not in self.known:
            guess = self.guesses.get(suffix) or self.of_block(suffix)
            self.known[suffix] = () if guess is None else (*SHORTER, self.followers(*guess))
        return self.known[suffix]

    def of_block(self, suffix: Suffix) -> tuple[LogitGuess, int, int] | None:
        """The guess for a node below the root, if the head guessed its level with the root's."""
        for root, (guess, _, position) in self.guesses.items():
            for depth in range(1, self.at_once):
                kept = min(len(root), WINDOW - depth)
                if suffix[:-depth] == root[len(root) - kept :]:
                    found = guess.after(depth, suffix[-1])
                    return None if found is None else (found, depth, position + depth)
        return None

    def followers(self, guess: LogitGuess, depth: int, position: int) -> Followers:
        """A guess as followers, whose counts are probabilities at the temperature of the run.

        Their strength is the kind of evidence: depth and probability class.
        """
        # The draw reads all logits once and caches their normaliser, which the rest needs too.
        drawn = guess.draw(position, self.sampling) if self.noisy else None
        likeliest = [(token, chance) for token, chance in guess.likeliest(NAMED) if chance > 0]
        power = min(1 / max(self.sampling.temperature, COLDEST), SHARPEST)
        last = likeliest[-1][1]
        rest = max(0.0, 1.0 - sum(chance for _, chance in likeliest))
        # Assume that all other tokens are as unlikely as the last named one.
        mass = sum(chance**power for _, chance in likeliest) + rest * last ** (power - 1)
        counts = {token: chance**power / mass for token, chance in likeliest}
        if drawn is not None and drawn not in counts:
            counts[drawn] = max(guess.probability(drawn) ** power / mass, LEAST)
        made = Followers(1.0, float(len(counts)), counts)
        top = sum(max(counts.values()) > bound for bound in CLASSES)
        made.strength = min(depth, HEAD_DEPTHS - 1) * HEAD_CLASSES + top
        return made

    def claim(self, suffix: Suffix) -> tuple[int, float] | None:
        """The likeliest token of a guess, with its probability at the temperature of the run; None
        above temperature 1, where this is only known roughly."""
        if self.sampling.temperature > 1:
            return None
        counts = self.matches(suffix)[-1].counts
        return max(counts.items(), key=lambda each: each[1])

    def unigrams(self) -> None:
        """None: every guess of a head depends on the tokens before it."""


@dataclass(frozen=True, slots=True)
class Look:
    """A tree grown from the present evidence: the path probability of each row, the root first, and
    the seconds of its step without the head."""

    tree: Tree
    chances: Sequence[float]
    seconds: float

    def missing(self, rows: Iterable[int]) -> float:
        """The probability that the answer reaches one of these rows and leaves the tree after
        it."""
        chances, children = self.chances, self.tree.children
        return sum(chances[row] - sum(chances[n] for n in children[row].values()) for row in rows)

    def kept(self, emitted: Sequence[int]) -> list[int]:
        """The rows that such tokens follow, without those that other drafters have added since."""
        following = iter(emitted)
        rows, _ = self.tree.walk(lambda row: next(following, -1))
        return [row for row in rows if row < len(self.chances)]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a head for a level, which took `seconds`: the probability that the tree left open
    at that level, and the tree before and after the call."""

    level: int
    missing: float
    seconds: float
    before: Look
    after: Look

    def saved(self, emitted: Sequence[int]) -> int:
        """How many steps the call saved if the target chose these tokens.

        A token that the head alone guessed saves a step. What the databases draft after it does
        not: they would have drafted it in that step.
        """
        had, has = self.before.kept(emitted), self.after.kept(emitted)
        if len(has) < len(had):
            return -1
        return sum(self.after.tree.sources[row] == HEAD for row in has[len(had) :])

    @property
    def rows(self) -> float:
        """The seconds by which a forward takes longer for the rows that it has more."""
        return self.after.seconds - self.before.seconds


@dataclass(frozen=True, slots=True)
class Node:
    """A node for the head to extend: its row in the tree, its path, its last tokens, and the number
    of the guess of the level above to which it belongs."""

    row: int
    path: Suffix
    suffix: Suffix
    parent: int


def frontier(tree: Tree, level: Sequence[Node], depth: int) -> list[Node]:
    """The nodes of the tree at a depth that follow the nodes of the level above, the likeliest
    first."""
    numbers = {node.path: number for number, node in enumerate(level)}
    found: list[Node] = []
    for row in range(1, len(tree.tokens)):
        number = numbers.get(tree.path(tree.parents[row])) if tree.depths[row] == depth else None
        if number is not None:
            parent, token = level[number], tree.tokens[row]
            suffix = (*parent.suffix[1 - WINDOW :], token)
            found.append(Node(row, (*parent.path, token), suffix, number))
    return found


class HeadStep:
    """The calls of a head in one step. After each the hierarchy grows the tree again."""

    def __init__(
        self, hierarchy: Hierarchy, tree: Tree, tokens: Sequence[int], budget: Budget
    ) -> None:
        self.hierarchy, self.tree, self.tokens, self.budget = hierarchy, tree, tokens, budget
        self.costs = budget.costs
        self.pace: HeadPace | None = budget.costs.gate.head if budget.costs else None
        self.calls: list[Call] = []
        self.claim: tuple[int, float] | None = None

    def run(self, head: Head, tier: HeadTier, cancelled: Callable[[], bool]) -> None:
        look, info = self.look(), head.info
        depths = look.tree.depths
        missing = look.missing(row for row, depth in enumerate(depths) if depth < info.at_once)
        if self.budget.due != HEAD and not self.pays(0, missing, look):
            return
        clock, position = perf_counter(), len(self.tokens)
        guess = head.start(self.tokens, tier.sampling, cancelled)
        level = [Node(0, (), tuple(self.tokens[-WINDOW:]), 0)]
        if guess is not None:
            tier.add(level[0].suffix, guess, 0, position)
            self.claim = tier.claim(level[0].suffix)
        # A guess for several levels at once is evidence at nodes below the root, too.
        stale = None if info.at_once > 1 else [level[0].suffix]
        look = self.called(0, stale, missing, look, clock)
        if guess is None:
            return
        width = WIDTH if info.branches else 1
        for depth in range(info.at_once, min(info.depth, self.budget.depth)):
            nodes = frontier(look.tree, level, depth)[:width]
            missing = look.missing(node.row for node in nodes)
            if not nodes or not self.pays(depth, missing, look):
                return
            clock = perf_counter()
            guesses = head.extend(
                [node.parent for node in nodes], [node.path[-1] for node in nodes]
            )
            for node, guess in zip(nodes, guesses, strict=True):
                tier.add(node.suffix, guess, depth, position + depth)
            level = nodes
            look = self.called(depth, [node.suffix for node in nodes], missing, look, clock)

    def pays(self, level: int, missing: float, look: Look) -> bool:
        return self.pace is None or self.pace.pays(level, missing, look.seconds)

    def called(
        self, level: int, stale: list[Suffix] | None, missing: float, before: Look, clock: float
    ) -> Look:
        """Record a call of the head for a level that began at `clock`, and grow the tree again,
        with new look-ups for the suffixes that are `stale`. Returns its new look."""
        self.budget.again(perf_counter() - clock)
        self.hierarchy.forget(stale)
        self.tree.begin(self.tokens[-1])
        self.hierarchy.grow(self.tree, self.tokens, self.budget)
        after = self.look()
        seconds = perf_counter() - clock
        if self.pace is not None:
            self.pace.took(level, seconds)
        self.calls.append(Call(level, missing, seconds, before, after))
        return after

    def look(self) -> Look:
        chances = self.hierarchy.chances() if len(self.tree) else [1.0]
        seconds = 1.0 if self.costs is None else self.costs.took(len(self.tree))
        return Look(copy(self.tree), chances, seconds)

    def saved(self, emitted: Sequence[int], seconds: float) -> float:
        """Learn what the calls gained and cost in a step that took so many seconds. Returns how
        many plain steps they saved.

        The tokens that the target chose count, not those that were expected. The step also takes
        longer than one without calls in other places: for learning from guesses, and because the
        target's weights have left the processor's caches.
        """
        if self.pace is None or self.costs is None or not self.calls:
            return 0.0
        if self.claim is not None:
            token, chance = self.claim
            self.pace.record.add(chance, emitted[0] == token)
        first, last = self.calls[0], self.calls[-1]
        spent = sum(call.seconds for call in self.calls)
        whole = Call(WHOLE, first.missing, spent, first.before, last.after)
        self.pace.took(WHOLE, spent)
        self.pace.took_beside(seconds - last.after.seconds - spent)
        for call in (*self.calls, whole):
            saved = call.saved(emitted) - call.rows / call.before.seconds
            self.pace.gained(call.level, call.missing, saved)
        alone = first.before.seconds
        return (whole.saved(emitted) * alone - (seconds - alone)) / self.costs.table[0]


class HeadDrafter(Drafter):
    """Calls the head of a target while that pays, and grows the tree again from its guesses.

    `merged` is the hierarchy of databases and head, which has grown the tree before; None if no
    database drafts. While the databases back off, and without them, `alone` grows the tree. The
    head reads a prompt only when it is first called, which may never happen.
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
        self.step: HeadStep | None = None
        """The latest calls, until the target's tokens are known."""

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        clock, hierarchy, before = perf_counter(), self.alone, copy(tree)
        if self.merged is not None and DATABASES in budget.drafting_ways:
            hierarchy = self.merged
        self.step = HeadStep(hierarchy, tree, tokens, budget)
        try:
            self.step.run(self.head, self.tier, self.cancelled)
        except BaseException:
            tree.begin(tokens[-1])
            tree.attach(0, before)
            self.step = None
            self.clear()
            raise
        finally:
            self.head.forget()
        return {HEAD: Work(perf_counter() - clock, len(self.step.calls))}

    def clear(self) -> None:
        self.tier.clear()
        for hierarchy in (self.alone, self.merged):
            if hierarchy is not None:
                hierarchy.forget()

    def saved(self, emitted: Sequence[int], seconds: float) -> float:
        return 0.0 if self.step is None else self.step.saved(emitted, seconds)

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Learn the guesses if no database drafted; otherwise `merged` has learned them."""
        if self.step is not None and self.step.calls and self.step.hierarchy is self.alone:
            self.alone.observe(tokens, new)
        self.tier.clear()
        self.step = None


class FixedHead(Drafter):
    """Drafts a chain of a fixed number of tokens in each step, whatever the cost, as other programs
    do."""

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
