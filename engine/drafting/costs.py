"""c(n, length): what a target forward over n drafted nodes costs on this machine, behind a text.

Measured once per (model, backend, device, dtype, threads), stored, and corrected by every step
that is decoded. All that drafting decides from it are ratios, so a machine that is busy with
something else slows every size alike and changes little.

The sizes are measured behind a short text. Each further cached token adds a little to any forward,
and a little more for every node: two numbers serve all lengths.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from math import inf
from time import perf_counter
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.backends.base import Backend
from engine.settings import Sampling
from engine.tree import Tree
from engine.types import WAYS

SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Nodes per measured forward. The steps are small where kernels change their way of working."""
CACHED = 256
"""Tokens in the cache while measuring. Shorter texts count as this long."""
LONG, LONG_SIZE = 4096, 15
"""Tokens in the cache while what they cost is measured, and nodes at most."""
LEAST = 4 * CACHED
"""Fewer would tell less of it than the machine's hiccups do."""
READING = 0.5
"""Seconds that reading so long a text may take, where it has to be read."""
SAMPLES = 3
"""Forwards of a size behind it then."""
FAR_SECONDS = 0.3
"""Seconds of forwards behind it and behind a short one, in turn, where it has not to be read."""
MOST_BYTES = 1 << 29
"""What it may take in memory."""
SECONDS = 1.7
COMMON_GAIN = 0.15
"""How far an observation moves the estimates of all sizes: what slows one down has most likely
slowed down all. How much further it moves that of its own size depends on what is known of it."""
GAIN = 0.05
"""How far it moves what drafting and the rest of a step take."""
DRIFT = 4e-4
"""How much less is known of a size after every step in which it was not observed, in variances of
an observation. A size that is seen in each step is so moved by DRIFT ** 0.5 of what surprises."""
INITIAL_VARIANCE = 0.1
"""The same for a size as measured: with little in the cache, and without drafting in between."""
UNKNOWN_VARIANCE = 100.0
"""The same for what cached tokens cost, where nobody has measured that."""
FAR, WIDE = 8192, 8
"""Cached tokens, and nodes, at which variances of what these cost are told."""
LENGTHENED = 0.05
"""The share by which a text grows until its steps are tabulated again."""
UNDOING_GAIN = 0.1
"""How far a step that drafted moves what undoing takes, and returning to plain steps."""
FEWEST = 2
SLOW = 0.2
SLOW_SIZES = (0, 1, 3, 7, 15, 31)
"""Where a forward takes longer than SLOW seconds, so few sizes are timed, once."""
SURPRISE = 1.5
"""Observations count as at most so many times what was expected: a machine hiccups."""
HICCUP = 10.0
"""The same for the rest of a step, which is so short that it differs more."""
REFRESH = 32
LARGEST = 128
"""No tree is larger: costs are tabulated up to here."""
LEARN_SECONDS = 3e-6
"""Seconds to learn a token, until it was measured."""


@dataclass(slots=True)
class Gain:
    """What one way to draft saved of late, in plain steps, and its back-off.

    `balance` is the moving estimate; what is saved pays `debt`, for reading and keeping whole
    texts, before it counts. The way is left out for the next `backoff` steps; `length` is what that
    was in the beginning. It was not used for `unused` steps; once these are `wait`, it is probed.
    """

    balance: float = 3.0
    debt: float = 0.0
    backoff: int = 0
    length: int = 0
    unused: int = 0
    wait: int = 32


HEAD_LEVELS = 5
"""Levels of a head from here on are counted together."""
WHOLE = -1
"""Stands for all calls of a step together, where a level is meant."""
HEAD_GAIN = 0.05
"""How far an observation moves what is known of the time of a call, once a few were made."""
HEAD_PRIOR, HEAD_MEMORY = 4.0, 60.0
"""What the first gains of a head count for, and beyond what the old ones fade, in probability that
was open where it was asked."""


@dataclass(slots=True)
class HeadPace:
    """What a head takes, and what asking it has brought: for engine/drafting/head.py.

    `seconds[d]` are those of the call for level d below the root. `added[d]` are the tokens that
    such calls added to their steps, the rows of the forward paid. `missing[d]` is the probability
    that the tree had left open there, in all. The last of each is for all calls of a step. `seen`
    counts what was timed.
    """

    added: list[float] = field(
        default_factory=lambda: [0.85 * HEAD_PRIOR] * HEAD_LEVELS + [1.5 * HEAD_PRIOR]
    )
    missing: list[float] = field(default_factory=lambda: [HEAD_PRIOR] * (HEAD_LEVELS + 1))
    seconds: list[float] = field(default_factory=lambda: [0.0] * (HEAD_LEVELS + 1))
    seen: list[int] = field(default_factory=lambda: [0] * (HEAD_LEVELS + 1))

    def gain(self, which: int) -> float:
        """The tokens that a call adds, as a share of the probability that is open."""
        return self.added[which] / self.missing[which]

    def pays(self, level: int, missing: float, expected: float, step: float) -> bool:
        """Whether to ask for a level where the tree leaves `missing` open, is `expected` to emit so
        many tokens, and its step takes so long.

        The first call may pay by itself, or by those that follow it. What was never asked is tried.
        """
        at = min(level, HEAD_LEVELS - 1)
        for which in (at,) if level else (at, WHOLE):
            # A level that nobody has asked for will take what the one above it takes.
            known = max((n for n in range(at + 1) if self.seen[n]), default=0)
            takes = self.seconds[known if which == at else which]
            if self.gain(which) * missing * step > takes * expected:
                return True
        return False

    def took(self, level: int, seconds: float) -> None:
        """The call for a level, or all of a step, took so long."""
        at = level if level == WHOLE else min(level, HEAD_LEVELS - 1)
        self.seen[at] += 1
        known = self.seconds[at]
        # One hiccup of the machine must not decide.
        cut = min(seconds, 3 * known) if known else seconds
        gain = max(HEAD_GAIN, 1 / self.seen[at])
        self.seconds[at] = known + gain * (cut - known)

    def brought(self, level: int, missing: float, added: float) -> None:
        """It has added so many tokens where so much was missing."""
        at = level if level == WHOLE else min(level, HEAD_LEVELS - 1)
        self.added[at] += added
        self.missing[at] += missing
        if self.missing[at] > HEAD_MEMORY:
            self.added[at] /= 2
            self.missing[at] /= 2


@dataclass(slots=True)
class Gate:
    """Whether drafting pays, as far as known: plain data for engine/drafting/controller.py.

    `plain` and `drafted` count the steps since the last one without drafts and with some. The
    databases need `learn_seconds` to learn a token, and `learn_and_calibrate_seconds` where they
    drafted before: then they also learn what their evidence is worth.
    """

    gains: dict[str, Gain] = field(default_factory=lambda: {name: Gain() for name in WAYS})
    plain: int = 0
    drafted: int = 0
    learn_seconds: float = LEARN_SECONDS
    learn_and_calibrate_seconds: float = LEARN_SECONDS
    head: HeadPace = field(default_factory=HeadPace)


class Growth:
    """What cached tokens add to a forward: each `token` seconds, and `row` more for every node.

    Learned from steps by a Kalman filter of these two, relative to a plain forward: steps of
    several sizes tell them apart. Zeros are not known.
    """

    def __init__(self, token: float = 0.0, row: float = 0.0) -> None:
        if not (0 <= token < inf and 0 <= row < inf):
            raise ValueError(f"cached tokens cannot take {token} and {row} seconds")
        self.token, self.row = token, row
        known = INITIAL_VARIANCE if token or row else UNKNOWN_VARIANCE
        self.variances = known / FAR**2, 0.0, known / (FAR * WIDE) ** 2
        """Of the two numbers, and between them their covariance."""

    def seconds(self, tokens: int, nodes: int) -> float:
        """What so many tokens add to a forward over `nodes` nodes."""
        return tokens * (self.token + self.row * nodes)

    def scale(self, factor: float) -> None:
        """Everything takes so many times as long."""
        self.token, self.row = factor * self.token, factor * self.row

    def observe(self, tokens: int, nodes: int, plain: float, expected: float, off: float) -> None:
        """A forward took a share of `off` more than expected; `plain` seconds are the unit."""
        of_token = tokens * plain / expected
        of_row = of_token * nodes
        token, both, row = self.variances
        from_token, from_row = token * of_token + both * of_row, both * of_token + row * of_row
        all_of_it = of_token * from_token + of_row * from_row + 1
        gain, gain_of_row = from_token / all_of_it, from_row / all_of_it
        self.token = max(0.0, self.token + plain * gain * off)
        self.row = max(0.0, self.row + plain * gain_of_row * off)
        drift = DRIFT * min(1.0, tokens / FAR)
        self.variances = (
            token - gain * from_token + drift / FAR**2,
            both - gain * from_row,
            row - gain_of_row * from_row + drift / (FAR * WIDE) ** 2,
        )


class StepTimes:
    """What steps over trees of 0, 1, 2, ... nodes take, and what growing on costs.

    `table` holds seconds of a whole step over n nodes: forward, drafting, everything else. `slopes`
    holds the least relative cost of a further node (`CostCurve.refresh`). `cheapest` is the least
    of them, and `entry` the least path probability that can ever pay. The arrays are the same two,
    for the compiled core.
    """

    def __init__(self, table: list[float], slopes: NDArray[np.float64], gate: Gate) -> None:
        self.gate = gate
        self.tabulate(table, slopes)

    def tabulate(self, table: list[float], slopes: NDArray[np.float64]) -> None:
        """Take over the times of 0 to LARGEST nodes, and the slopes of all but the last."""
        self.table = table
        self.slopes: list[float] = slopes.tolist()
        self.cheapest = min(self.slopes)
        # The node that makes n of n + 1 is the least likely of them, so E is 1 + n p at least.
        nodes = np.arange(LARGEST)
        paying = nodes * slopes < 1
        self.entry = float((slopes[paying] / (1 - nodes[paying] * slopes[paying])).min())
        self.slopes.append(inf)
        self.table_array, self.slope_array = array("d", self.table), array("d", self.slopes)

    def delayed(self, seconds: float) -> "StepTimes":
        """The times of a step that has taken so long before its tree is grown."""
        table = np.array(self.table)
        later = table + seconds
        slopes = np.array(self.slopes[:-1]) * (table / later)[:-1]
        return StepTimes(later.tolist(), slopes, self.gate)


class CostCurve(StepTimes):
    """Seconds per forward, and per drafted node, as estimated now.

    `points` maps numbers of nodes to seconds of a forward behind CACHED tokens; `token` and `row`
    are what further ones add, see Growth. Times are those of a text of the length that was told
    last: see `reach`. A size between two of them counts as the larger one: kernels work in blocks
    of rows, and odd numbers of rows can cost more than the next round one. Beyond the last one the
    curve goes on as it rose before.

    Some caches cannot be taken back to just behind what was accepted: `unread` tokens are then read
    again by the next forward (Backend.unread). `undoing` is what that, and accepting itself, takes
    for a step that drafts, on average. `returning` is what the plain step behind it takes longer
    than one behind a plain step, on average again: a forward of another size than the last one
    finds less prepared. So the table tells what drafting costs in the end.
    """

    def __init__(
        self,
        points: Mapping[int, float],
        node: float = 0.0,
        other: float = 0.0,
        token: float = 0.0,
        row: float = 0.0,
    ) -> None:
        usable = all(0 < seconds < inf for seconds in points.values())
        if len(points) < 2 or min(points) != 0 or not usable:
            raise ValueError(f"a cost curve needs positive times for 0 and more nodes: {points}")
        self.sizes = sorted(points)
        self.values = [points[size] for size in self.sizes]
        self.node, self.other = node, other
        self.growth = Growth(token, row)
        self.beyond = self.tabulated = 0
        """Cached tokens beyond CACHED: now, and those of the table."""
        self.unread, self.undoing, self.returning = 0, 0.0, 0.0
        self.variances = [INITIAL_VARIANCE] * len(self.sizes)
        self.since_refresh = 0
        self.gate = Gate()
        self.refresh()

    @property
    def points(self) -> dict[int, float]:
        """The seconds of a forward at the measured sizes behind CACHED tokens, corrected by what
        was observed."""
        return dict(zip(self.sizes, self.values, strict=True))

    def reach(self, length: int, unread: int = 0) -> None:
        """From now on times are those behind so many tokens, the last of which are still unread.

        The table is not made anew for a few more cached ones.
        """
        self.beyond = max(0, length - CACHED)
        longer = abs(self.beyond - self.tabulated) > LENGTHENED * (CACHED + self.tabulated)
        if longer or unread != self.unread:
            self.unread = unread
            self.refresh()

    def seconds(self, nodes: int) -> float:
        """c(n, length): the seconds of a forward over `nodes` nodes and the root."""
        return self.short(nodes) + self.growth.seconds(self.beyond, nodes)

    def rereading(self, unread: int) -> float:
        """What so many unread tokens add to a plain forward."""
        return self.seconds(unread) - self.seconds(0)

    def undone(self, seconds: float) -> None:
        """A step that drafted took so long to accept, and to read again what it left unread."""
        self.undoing += UNDOING_GAIN * (seconds - self.undoing)

    def returned(self, verify: float | None) -> None:
        """The step behind one that drafted was plain, and its forward took so long; None where it
        drafted as well."""
        longer = 0.0
        if verify is not None:
            longer = (self.surprise(self.unread, verify) - 1) * self.seconds(self.unread)
        self.returning += UNDOING_GAIN * (max(longer, 0.0) - self.returning)

    def short(self, nodes: int) -> float:
        """The same behind CACHED tokens."""
        at = bisect_left(self.sizes, nodes)
        if at < len(self.sizes):
            return self.values[at]
        rise = (self.values[-1] - self.values[-2]) / (self.sizes[-1] - self.sizes[-2])
        return self.values[-1] + max(0.0, rise) * (nodes - self.sizes[-1])

    def refresh(self) -> None:
        """Tabulate the step times and what growing on costs at best.

        `slopes[n]` is the smallest relative cost per further node over all larger trees: a jump
        of the curve just ahead must not hide that a few nodes more are free.
        """
        self.tabulated = self.beyond
        steps = [
            self.seconds(nodes + self.unread) + self.other + nodes * self.node
            for nodes in range(LARGEST + 1)
        ]
        # What is unread now is read once more behind a draft that is rejected.
        later = self.undoing + self.returning + self.rereading(self.unread)
        steps[1:] = [seconds + later for seconds in steps[1:]]
        marks = {at for size in self.sizes for at in (size, size + 1) if at < LARGEST}
        table, nodes, ends = np.array(steps), np.arange(LARGEST), np.array([*marks, LARGEST])
        here, gaps = table[:-1], ends - nodes[:, None]
        rises = (table[ends] - here[:, None]) / np.maximum(gaps, 1)
        rise = np.minimum(np.where(gaps > 0, rises, inf).min(axis=1), np.diff(table))
        self.tabulate(steps, np.maximum(rise, 0.0) / here)

    def observe(self, nodes: int, verify: float, draft: float, other: float) -> None:
        """Learn from one step: nodes drafted, seconds of forward, of drafting, of the rest."""
        rows = nodes + self.unread
        at = min(bisect_left(self.sizes, rows), len(self.sizes) - 1)
        if self.beyond:
            # What is left to explain then is that of the sizes.
            off = self.surprise(rows, verify) - 1
            self.growth.observe(self.beyond, rows, self.short(0), self.seconds(rows), off)
        ratio = self.surprise(rows, verify)
        common = ratio**COMMON_GAIN
        # The rarer a size is observed, the more each observation says: the gain of a Kalman filter.
        own = self.variances[at] / (self.variances[at] + 1)
        self.variances[at] = own
        self.variances = [variance + DRIFT for variance in self.variances]
        self.values = [value * common for value in self.values]
        self.values[at] *= ratio**own
        self.growth.scale(common)
        # The first look-up is paid whether or not anything is drafted.
        self.node += GAIN * (draft / (nodes + 1) - self.node)
        beside = draft / (nodes + 1) + other
        cut = min(beside, HICCUP * self.other) if self.other > 0 else beside
        self.other += GAIN * (cut - self.other)
        self.since_refresh += 1
        if self.since_refresh >= REFRESH:
            self.since_refresh = 0
            self.refresh()

    def surprise(self, nodes: int, verify: float) -> float:
        """How many times as long as expected a forward took, hiccups cut."""
        return min(max(verify / self.seconds(nodes), 1 / SURPRISE), SURPRISE)

    def fresh(self) -> "CostCurve":
        """What forwards cost, without what was learned of drafting."""
        return CostCurve(self.points, token=self.growth.token, row=self.growth.row)

    def copy(self) -> "CostCurve":
        """All that is known, apart: what the copy goes on to learn changes nothing here."""
        return deepcopy(self)


@runtime_checkable
class Stretchable(Protocol):
    """A backend that can be timed behind a long text without reading one."""

    def stretch(self, tokens: Sequence[int]) -> None:
        """Let the cache say that it holds these tokens; what it holds is zeros."""


def measure_costs(
    backend: Backend,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
    progress: Callable[[float], None] = lambda share: None,
) -> CostCurve:
    """Time forwards over trees of the given sizes, in rounds, for about `seconds` seconds.

    Every round times every size. A plain forward follows a plain one, as in plain decoding. A tree
    follows one of another size, as its budget changes from step to step: a forward of the same size
    would find prepared what it needs. The fastest of the rounds counts: what else the machine does
    can only add to a forward, and to a short one many times what it takes. A slow model is timed
    once, at fewer sizes: what it does is corrected by its first answers anyway.
    """
    length = min(CACHED, backend.info.context_length // 2)
    vocabulary = backend.info.vocabulary_size
    prompt = [(7 + 13 * at) % vocabulary for at in range(length)]
    levels = backend.depth_limit(length) if backend.info.leaves == 1 else None
    start = perf_counter()
    backend.prefill(prompt, lambda: False)
    reading = (perf_counter() - start) / length
    forward_seconds(backend, prompt, 0)
    slow = forward_seconds(backend, prompt, 0) > SLOW
    times: dict[int, list[float]] = {
        size: []
        for size in (SLOW_SIZES if slow else sizes)
        if length + size < backend.info.context_length and (levels is None or size <= levels)
    }
    for round_ in count():
        for number, (size, found) in enumerate(times.items(), start=1):
            if not slow and not size:
                forward_seconds(backend, prompt, size)
            found.append(forward_seconds(backend, prompt, size))
            rounds, spent = (1, 0.0) if slow else (FEWEST, perf_counter() - start)
            progress(
                min(1.0, max((round_ + number / len(times)) / rounds, spent / max(seconds, 1e-9)))
            )
        if slow or (round_ + 1 >= FEWEST and perf_counter() - start >= seconds):
            break
    points = {size: min(found) for size, found in times.items()}
    return CostCurve(points, 0.0, 0.0, *measure_growth(backend, points, reading, slow))


def measure_growth(
    backend: Backend, points: Mapping[int, float], reading: float, slow: bool
) -> tuple[float, float]:
    """What each cached token adds to a forward, and to each of its nodes; zeros where measuring
    that would take long. `reading` is how many seconds the model needs to read a token."""
    nodes = max(size for size in points if size <= LONG_SIZE)
    length = min(LONG, backend.info.context_length - nodes)
    if isinstance(backend, Stretchable):
        length = min(length, CACHED * MOST_BYTES // max(backend.bytes, 1))
    elif reading > 0:
        length = min(length, int(READING / reading))
    if length < LEAST or not nodes:
        return 0.0, 0.0
    times = timed_far(backend, [0] * length, nodes, slow)
    near, far = times[0, CACHED], times[0, length]
    # What else the machine does changes between measuring the sizes and this: see ratios only.
    pace = points[0] / near / (length - CACHED)
    added = far - near
    more = times[nodes, length] - times[nodes, CACHED] - added
    return pace * max(added, 0.0), pace * max(more, 0.0) / nodes


def timed_far(
    backend: Backend, prompt: Sequence[int], nodes: int, slow: bool
) -> dict[tuple[int, int], float]:
    """The least seconds of forwards over none and so many nodes, by these and the cached tokens:
    CACHED and all of the prompt, in turn. The cache is empty then.

    A text that has to be read is read once, and forwards behind the short one surround it. They are
    few, so what disturbs one of them must not count.
    """
    start = perf_counter()
    times: dict[tuple[int, int], list[float]] = {}
    reads = not isinstance(backend, Stretchable)
    samples = SAMPLES if reads and not slow else 1
    for round_ in count():
        for length in (CACHED, len(prompt), CACHED) if reads else (CACHED, len(prompt)):
            if isinstance(backend, Stretchable):
                backend.stretch(prompt[: length - 1])
            if not slow:
                forward_seconds(backend, prompt[:length], nodes)
            for size in (0, nodes) * samples:
                spent = forward_seconds(backend, prompt[:length], size)
                times.setdefault((size, length), []).append(spent)
        if slow or reads:
            break
        if round_ + 1 >= FEWEST and perf_counter() - start >= FAR_SECONDS:
            break
    backend.close()
    return {case: min(found) for case, found in times.items()}


def forward_seconds(backend: Backend, prompt: Sequence[int], nodes: int) -> float:
    """The seconds of one forward over `nodes` nodes behind the prompt."""
    backend.prefill(prompt, lambda: False)
    branching = backend.info.leaves != 1
    tree = comb(prompt[-1], nodes, backend.info.vocabulary_size, branching)
    clock = perf_counter()
    backend.score(tree, Sampling(temperature=0.0))
    spent = perf_counter() - clock
    backend.accept(())
    return spent


def comb(root: int, nodes: int, vocabulary: int, branching: bool = True) -> Tree:
    """A tree of the usual form: a chain from the root, with short branches beside it if wanted."""
    tree, row = Tree(root), 0
    for number in range(nodes):
        added = tree.add(row, (root + 1 + number) % vocabulary, "")
        if number % 2 == 0 or not branching:
            row = added
    return tree
