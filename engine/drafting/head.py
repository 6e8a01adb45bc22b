"""Drafting with a head: its guesses become evidence in the tree of the databases.

A guess is the head's distribution of the token after one node. For the hierarchy this is the
evidence of one more tier (`HeadTier`), with a weight that is learned per depth and probability
class (engine/drafting/calibration.py). Candidates of databases and head are therefore on one scale,
in one tree, under one budget.

A guess costs a call, so the head is called level by level (`HeadDrafter`). First the tree is grown
from the evidence at hand. A guess can gain at most the probability that the answer leaves this tree
at the next level. If that is worth less than the time of a call, judged by earlier calls, the head
is not called, or not for deeper levels.

Invariant: guesses decide nothing. A head that is wrong, or fails, costs only time.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from time import perf_counter

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

    def add(self, suffix: Suffix, guess: LogitGuess, depth: int, position: int) -> None:
        self.guesses.setdefault(suffix, (guess, depth, position))
        self.known.pop(suffix, None)

    def clear(self) -> None:
        self.guesses.clear()
        self.known.clear()

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

    def observe(self, tokens: Sequence[int], new: int) -> None:
        self.clear()


@dataclass(frozen=True, slots=True)
class Look:
    """A tree grown from the present evidence: the path probability of each row, the root first, the
    number of tokens that the tree is `expected` to emit, and the seconds of its step without the
    head."""

    tree: Tree
    chances: Sequence[float]
    expected: float
    seconds: float

    def missing(self, rows: Iterable[int]) -> float:
        """The probability that the answer reaches one of these rows and leaves the tree after
        it."""
        chances, children = self.chances, self.tree.children
        return sum(chances[row] - sum(chances[n] for n in children[row].values()) for row in rows)

    def kept(self, emitted: Sequence[int]) -> int:
        following = iter(emitted)
        rows, _ = self.tree.walk(lambda row: next(following, -1))
        return len(rows)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a head for a level: the probability that the tree left open at that level, and the
    tree before and after the call."""

    level: int
    missing: float
    before: Look
    after: Look


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
    """The calls of a head in one step, decided by growing the tree from the present evidence.

    With `reads` the head reads the prompt in this step, so the time of its first call is no sample
    of later ones.
    """

    def __init__(
        self, hierarchy: Hierarchy, tokens: Sequence[int], budget: Budget, reads: bool = False
    ) -> None:
        self.hierarchy, self.tokens, self.budget = hierarchy, tokens, budget
        self.reads, self.decided = reads, len(tokens)
        self.pace: HeadPace | None = budget.costs.gate.head if budget.costs else None
        self.calls: list[Call] = []
        self.spent = 0.0
        self.claim: tuple[int, float] | None = None
        self.searched = defaultdict[str, float](float)
        """The seconds of look-ups in each database, which growing the tree does not make again."""

    def run(self, head: Head, tier: HeadTier, cancelled: Callable[[], bool]) -> None:
        look, info = self.look(), head.info
        depths = look.tree.depths
        missing = look.missing(row for row, depth in enumerate(depths) if depth < info.at_once)
        if self.budget.due != HEAD and not self.pays(0, missing, look):
            return
        clock = perf_counter()
        guess = head.start(self.tokens, tier.sampling, cancelled)
        level = [Node(0, (), tuple(self.tokens[-WINDOW:]), 0)]
        if guess is not None:
            tier.add(level[0].suffix, guess, 0, self.decided)
            self.claim = tier.claim(level[0].suffix)
        look = self.called(0, missing, look, clock)
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
                tier.add(node.suffix, guess, depth, self.decided + depth)
            level = nodes
            look = self.called(depth, missing, look, clock)

    def pays(self, level: int, missing: float, look: Look) -> bool:
        seconds = look.seconds + self.spent
        return self.pace is None or self.pace.pays(level, missing, look.expected, seconds)

    def called(self, level: int, missing: float, before: Look, clock: float) -> Look:
        """Record a call of the head for a level that began at `clock`; returns the new look of the
        tree."""
        self.hierarchy.forget()
        after = self.look()
        seconds = perf_counter() - clock
        self.spent += seconds
        if self.pace is not None and (level or not self.reads):
            self.pace.took(level, seconds)
        self.calls.append(Call(level, missing, before, after))
        return after

    def look(self) -> Look:
        tree, costs = Tree(self.tokens[-1]), self.budget.costs
        if self.budget.leaves == 1:
            chances, expected, work = self.hierarchy.grow_path(tree, self.tokens, self.budget)
        else:
            trial = copy(self.budget)
            work = self.hierarchy.grow_tree(tree, self.tokens, trial)
            chances = self.hierarchy.chances()
            expected = trial.expected if costs is None else sum(chances)
        for source, done in work.items():
            self.searched[source] += done.seconds
        return Look(tree, chances, expected, 1.0 if costs is None else costs.table[len(tree)])

    def settle(self, emitted: Sequence[int]) -> None:
        """Learn what the calls gained, from the tokens that the target chose.

        The tokens that were kept count, not those that were expected. The rows that a call adds to
        the forward are charged in tokens, at the rate of the tree before the call.
        """
        if self.pace is None or not self.calls:
            return
        if not self.reads:
            self.pace.took(WHOLE, self.spent)
        if self.claim is not None:
            token, chance = self.claim
            self.pace.record.add(chance, emitted[0] == token)
        first, last = self.calls[0], self.calls[-1]
        whole = Call(WHOLE, first.missing, first.before, last.after)
        for call in (*self.calls, whole):
            rows = call.after.seconds - call.before.seconds
            pace = call.before.expected / call.before.seconds
            added = call.after.kept(emitted) - call.before.kept(emitted) - rows * pace
            self.pace.gained(call.level, call.missing, added)


class HeadDrafter(Drafter):
    """Calls the head of a target while that pays, and drafts from its guesses.

    `merged` is the hierarchy of databases and head, which grows the tree after this drafter; None
    if no database drafts. While the databases back off, and without them, `alone` grows the tree.
    The head reads a prompt only when it is first called, which may never happen.
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
        self.has_read_prompt = False
        self.step: HeadStep | None = None
        """The latest calls, until the target's tokens are known."""

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Call the head. The tree is grown here only if no database drafts in this step."""
        if self.tier.guesses:
            self.clear()
        self.grew_alone = False
        if not budget.nodes:
            return {}
        hierarchy = self.alone
        if self.merged is not None and DATABASES in budget.drafting_ways:
            hierarchy = self.merged
        clock = perf_counter()
        self.step = HeadStep(hierarchy, tokens, budget, reads=not self.has_read_prompt)
        try:
            self.step.run(self.head, self.tier, self.cancelled)
        except BaseException:
            self.clear()
            raise
        finally:
            self.head.forget()
        seconds = perf_counter() - clock
        if self.step.calls:
            self.has_read_prompt = True
            budget.spend(seconds)
        if hierarchy is self.alone:
            self.grew_alone = True
            self.alone.grow(tree, tokens, budget)
        searched = self.step.searched
        searched.pop(HEAD, None)
        seconds -= sum(searched.values())
        return {
            HEAD: Work(seconds, len(self.step.calls)),
            **{source: Work(spent) for source, spent in searched.items()},
        }

    def clear(self) -> None:
        self.tier.clear()
        for hierarchy in (self.alone, self.merged):
            if hierarchy is not None:
                hierarchy.forget()

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Learn the value of the calls, and the guesses if no database drafted."""
        start = len(tokens) - new
        if self.step is not None and self.step.decided == start:
            self.step.settle(tokens[start:])
        self.step = None
        if self.grew_alone:
            self.alone.observe(tokens, new)
            self.grew_alone = False


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
