"""c(n, length): the time of a target forward over n drafted nodes, after a text of that length.

It is measured once per (model, backend, device, dtype, threads), stored, and corrected by every
decoded step. Drafting uses only ratios of these times. Other programs on the machine slow every
size alike, so they change little.

The sizes are measured after a short text. Each further cached token adds a little to any forward,
and a little more for every node; two numbers describe this for all lengths.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from math import inf
from statistics import median
from time import perf_counter, thread_time
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engine.backends.base import Backend
from engine.drafting.head_record import HeadRecord
from engine.settings import Sampling
from engine.tree import Tree
from engine.types import WAYS

SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Nodes per measured forward, at smaller intervals where kernels change their method."""
CROWDED = (95, 127, 191, 255)
"""Further sizes, of forwards that answers share."""
CACHED = 256
"""Tokens in the cache when measuring begins. Shorter texts count as this long."""
GROWN = 2 * CACHED
"""The most tokens by which the text grows meanwhile."""
LONG, LONG_SIZE = 4096, 15
"""Tokens in the cache, and the most nodes, while the cost of cached tokens is measured."""
LEAST = 4 * CACHED
"""With fewer tokens, the effect would be smaller than the noise of the machine."""
READING = 0.5
"""The most seconds for reading the long text, if it has to be read."""
SAMPLES = 3
"""Forwards of each size after the long text in that case."""
FAR_SECONDS, FAR_GROWN = 0.3, 96
"""Seconds of forwards after the long and the short text in turn, if they need not be read, and the
most tokens by which these texts grow."""
MOST_BYTES = 1 << 29
"""The most bytes that the long text may take in memory."""
SECONDS = 1.7
GAIN, ROUND_GAIN = 0.05, 0.3
"""The weight of an observation in the times of drafting and of the rest of a step; and in that of a
plain round of several answers, of which there are few."""
SHARED, DRAFTED, OWN = 1.0, 4.0, 0.5
"""Variances of the reasons why a forward takes longer in a chat than it was measured to take, in
units of an observation's variance: a reason that all sizes share, a reason that the sizes with
drafted nodes share, and a reason of one size alone."""
SHARED_DRIFT, OWN_DRIFT = 0.02, 1e-4
"""What a step adds to the first and the last of these. Other programs change the pace of the whole
processor within seconds; the ratios of the sizes change slowly."""
KNOWN_VARIANCE, UNKNOWN_VARIANCE, DRIFT = 0.1, 100.0, 4e-4
"""Variances of the cost of cached tokens: after it was measured, before, and the addition per
step."""
FAR, WIDE = 8192, 8
"""The cached tokens and nodes for which these variances are given."""
LENGTHENED = 0.05
"""The share by which a text may grow before the table is recomputed."""
UNDOING_GAIN = 0.1
"""The weight of a step in the mean times of undoing a draft and of returning to plain steps."""
STEADY, COUNTED = 6, 3
"""Plain steps after a draft until plain decoding has reached its pace again, and how many are then
observed. Further ones are not: while drafting is paused, watching would only cost time."""
FEWEST = 2
SLOW = 0.2
SLOW_SIZES = (0, 1, 3, 7, 15, 31)
"""If a forward takes longer than SLOW seconds, only so many sizes are timed, once each."""
SURPRISE = 1.5
"""An observation counts as at most this multiple of the expectation, to limit outliers."""
HICCUP = 10.0
"""The same multiple for the rest of a step, which varies more because it is short."""
REFRESH = 32
LARGEST = 128
"""The largest tree; costs are tabulated up to this size."""
LEARN_SECONDS = 3e-6
"""The assumed seconds to learn a token, until they are measured."""
LOAD_KEPT, LOAD_PRIOR = 0.998, 100
"""The weight that the estimate of the load keeps after a step, and the number of undisturbed steps
that it starts from."""


@dataclass(slots=True)
class Gain:
    """The recent savings of one way to draft, in plain steps, and its back-off.

    `balance` is the moving estimate. Savings first pay the `debt` for reading and storing whole
    texts, before they count. The way is paused for the next `backoff` steps; `length` was the
    length of that back-off at its start. The way has been unused for `unused` steps, and is probed
    once these reach `wait`.
    """

    balance: float = 3.0
    debt: float = 0.0
    backoff: int = 0
    length: int = 0
    unused: int = 0
    wait: int = 32


HEAD_LEVELS = 5
"""The number of levels of a head that are counted separately; deeper ones count as the last."""
WHOLE = -1
"""The index that stands for all calls of a step together."""
HEAD_GAIN = 0.05
"""The weight of an observation in the time of a call, after the first few."""
HEAD_MARGIN = 1.6
"""How many times its time the first call of a head in a step has to be worth, because it also slows
down what comes after it (docs/log.md)."""
HEAD_PRIOR, HEAD_MEMORY = 4.0, 60.0
"""The weight of the initial gains of a head, and the limit beyond which older ones decay, in units
of open probability."""


@dataclass(slots=True)
class HeadPace:
    """The time that a head takes, and what its calls have gained, for engine/drafting/head.py.

    `seconds[d]` is the time of the call for level d below the root; reading prompts is a part of
    it. `saved[d]` is the number of steps that such calls saved, after the cost of the rows in the
    forward. `missing[d]` is the total probability that the tree had left open at that level. The
    last entry of each stands for all calls of a step. `seen` counts the timed calls. A step with
    calls takes `beside` seconds more in other places. `record` tells whether the guesses hold as
    often as the head claims.
    """

    saved: list[float] = field(
        default_factory=lambda: [0.7 * HEAD_PRIOR] * HEAD_LEVELS + [1.2 * HEAD_PRIOR]
    )
    missing: list[float] = field(default_factory=lambda: [HEAD_PRIOR] * (HEAD_LEVELS + 1))
    seconds: list[float] = field(default_factory=lambda: [0.0] * (HEAD_LEVELS + 1))
    seen: list[int] = field(default_factory=lambda: [0] * (HEAD_LEVELS + 1))
    beside: float = 0.0
    record: HeadRecord = field(default_factory=HeadRecord)

    def gain(self, which: int) -> float:
        """The steps that a call saves, as a share of the open probability."""
        return self.saved[which] / self.missing[which]

    def pays(self, level: int, missing: float, step: float) -> bool:
        """Whether to call the head for a level if the tree leaves `missing` open, and its step
        takes the given time.

        The first call may pay by itself, or through those that follow it. A level that was never
        called is tried.
        """
        at = min(level, HEAD_LEVELS - 1)
        for which in (at,) if level else (at, WHOLE):
            # A level that was never called is assumed to take as long as the level above it.
            known = max((n for n in range(at + 1) if self.seen[n]), default=0)
            takes = self.seconds[known if which == at else which]
            if not level:
                takes = HEAD_MARGIN * (takes + self.beside)
            if self.gain(which) * missing * step > takes:
                return True
        return False

    def took(self, level: int, seconds: float) -> None:
        at = level if level == WHOLE else min(level, HEAD_LEVELS - 1)
        self.seen[at] += 1
        known = self.seconds[at]
        # One hiccup of the machine must not decide.
        cut = min(seconds, 3 * known) if known else seconds
        gain = max(HEAD_GAIN, 1 / self.seen[at])
        self.seconds[at] = known + gain * (cut - known)

    def took_beside(self, seconds: float) -> None:
        most, gain = self.seconds[WHOLE], max(HEAD_GAIN, 1 / self.seen[WHOLE])
        self.beside += gain * (min(max(seconds, -most), most) - self.beside)

    def gained(self, level: int, missing: float, saved: float) -> None:
        at = level if level == WHOLE else min(level, HEAD_LEVELS - 1)
        self.saved[at] += saved
        self.missing[at] += missing
        if self.missing[at] > HEAD_MEMORY:
            self.saved[at] /= 2
            self.missing[at] /= 2


@dataclass(slots=True)
class Load:
    """Estimates how much longer a forward takes than it computes, because other programs use the
    processor too: `seconds` / `computing` of the last steps, beginning with an idle machine.

    Other programs interrupt one forward and not the next. Costs are learned as if they slowed every
    forward equally, so that the relative costs of the sizes do not depend on which forward was
    interrupted.
    """

    seconds: float = 0.0
    computing: float = 0.0

    def steady(self, seconds: float, computing: float | None) -> float:
        """The average time, at this load, of a forward with these times."""
        if not computing:
            return seconds
        if not self.computing:
            self.seconds = self.computing = LOAD_PRIOR * computing
        self.seconds = LOAD_KEPT * self.seconds + seconds
        self.computing = LOAD_KEPT * self.computing + computing
        return computing * self.seconds / self.computing


@dataclass(slots=True)
class Gate:
    """The state of the decision whether drafting pays: plain data for
    engine/drafting/controller.py.

    `plain` counts the steps since plain decoding was last observed at its steady pace; after
    `plain_after` of them some plain steps are due. That number is small at first, because until
    then the pace is only known from measurements outside of answers. `drafted` counts the steps
    since the last one with drafts. After `forced_after` steps without drafts the databases draft in
    any case. `learn_seconds` is the time to learn a token, and `learn_and_calibrate_seconds` the
    time if the databases drafted before, because they then also update the calibration.
    """

    gains: dict[str, Gain] = field(default_factory=lambda: {name: Gain() for name in WAYS})
    plain: int = 0
    plain_after: int = 8
    drafted: int = 0
    forced_after: int = 128
    learn_seconds: float = LEARN_SECONDS
    learn_and_calibrate_seconds: float = LEARN_SECONDS
    head: HeadPace = field(default_factory=HeadPace)
    load: Load = field(default_factory=Load)


class Growth:
    """The time that cached tokens add to a forward: `token` seconds each, and `row` more for every
    node.

    It is learned by a Kalman filter, relative to a plain forward, from steps of several sizes. Zero
    means unknown.
    """

    def __init__(self, token: float = 0.0, row: float = 0.0) -> None:
        if not (0 <= token < inf and 0 <= row < inf):
            raise ValueError(f"cached tokens cannot take {token} and {row} seconds")
        self.token, self.row = token, row
        known = KNOWN_VARIANCE if token or row else UNKNOWN_VARIANCE
        self.variances = known / FAR**2, 0.0, known / (FAR * WIDE) ** 2
        """The variances of the two numbers, and their covariance."""

    def seconds(self, tokens: int, nodes: int) -> float:
        return tokens * (self.token + self.row * nodes)

    def scale(self, factor: float) -> None:
        self.token, self.row = factor * self.token, factor * self.row

    def observe(self, tokens: int, nodes: int, plain: float, expected: float, off: float) -> None:
        """Learn from a forward that took a share `off` more than expected, in units of `plain`
        seconds."""
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
    """The times of steps over trees of 0, 1, 2, ... nodes, and the cost of growing a tree further.

    `table` holds seconds of a whole step over n nodes: forward, drafting, everything else. `slopes`
    holds the least relative cost of a further node (`CostCurve.refresh`). `cheapest` is the
    smallest slope, and `entry` the smallest path probability that can ever pay. The arrays hold the
    same values for the compiled core.
    """

    def __init__(self, table: list[float], slopes: NDArray[np.float64], gate: Gate) -> None:
        self.gate = gate
        self.tabulate(table, slopes)

    def tabulate(self, table: list[float], slopes: NDArray[np.float64]) -> None:
        """Set the times for 0 to LARGEST nodes, and the slopes of all sizes but the last."""
        self.table = table
        self.slopes: list[float] = slopes.tolist()
        self.cheapest = min(self.slopes)
        # The node that makes n of n + 1 is the least likely of them, so E is 1 + n p at least.
        nodes = np.arange(LARGEST)
        paying = nodes * slopes < 1
        self.entry = float((slopes[paying] / (1 - nodes[paying] * slopes[paying])).min())
        self.slopes.append(inf)
        self.table_array, self.slope_array = array("d", self.table), array("d", self.slopes)

    def took(self, nodes: int) -> float:
        """The seconds that a step over so many nodes takes, without what its draft costs later
        steps."""
        return self.table[nodes]

    def delayed(self, seconds: float) -> "StepTimes":
        """The times of a step that has already taken so many seconds before its tree is grown."""
        table = np.array(self.table)
        later = table + seconds
        slopes = np.array(self.slopes[:-1]) * (table / later)[:-1]
        return StepTimes(later.tolist(), slopes, self.gate)


def hull(sizes: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """The sizes at which a curve is lowest, so that its slope only rises, and its values there."""
    kept: list[int] = []
    for at in range(len(sizes)):
        while len(kept) > 1:
            first, second = kept[-2:]
            there = (values[second] - values[first]) * (sizes[at] - sizes[first])
            if there < (values[at] - values[first]) * (sizes[second] - sizes[first]):
                break
            kept.pop()
        kept.append(at)
    return [sizes[at] for at in kept], [values[at] for at in kept]


def cost_at(sizes: Sequence[int], values: Sequence[float], nodes: int) -> float:
    """The cost of so many nodes, by the costs of measured sizes in ascending order.

    A size between two of them counts as the larger one, because kernels work in blocks of rows, and
    odd numbers of rows can cost more than the next round number. Beyond the last one, the curve
    continues with its last slope.
    """
    at = bisect_left(sizes, nodes)
    if at < len(sizes):
        return values[at]
    rise = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
    return values[-1] + max(0.0, rise) * (nodes - sizes[-1])


class CostCurve(StepTimes):
    """The current estimates of the seconds per forward and per drafted node.

    `points` maps numbers of nodes to seconds of a forward after CACHED tokens; `token` and `row`
    are the cost of further tokens (see Growth). Times refer to the text length that was last given
    to `reach`.

    Some caches cannot be cut back to exactly the accepted tokens; the next forward then reads
    `unread` tokens again (Backend.unread). `undoing` is the mean time that a step with drafts takes
    for this and for accepting. `returning` is the mean extra time of a plain step after it,
    compared with a plain step after another plain one, since a forward takes longer after one of
    another size. The table therefore includes the full cost of drafting.
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
        """Cached tokens beyond CACHED: now, and when the table was computed."""
        self.unread, self.undoing, self.returning = 0, 0.0, 0.0
        drafted = np.array(self.sizes) > 0
        alone = np.eye(len(self.sizes))
        self.covariance = SHARED + DRAFTED * np.outer(drafted, drafted) + OWN * alone
        self.drift = SHARED_DRIFT + OWN_DRIFT * alone
        self.since_refresh = 0
        self.shared: dict[int, CostCurve] = {}
        self.tables: dict[tuple[int, int], StepTimes] = {}
        self.rounds: dict[int, float] = {}
        """The seconds of a plain round, by the number of answers beside one."""
        self.gate = Gate()
        marks = {at for size in self.sizes for at in (size, size + 1) if at < LARGEST}
        self.ends = np.array([*marks, LARGEST])
        self.ahead = self.ends - np.arange(LARGEST)[:, None]
        """The sizes before which the slope of the curve may change, and how many nodes each is
        ahead of every size."""
        self.refresh()

    @property
    def points(self) -> dict[int, float]:
        """The seconds of a forward at the measured sizes after CACHED tokens, corrected by
        observations."""
        return dict(zip(self.sizes, self.values, strict=True))

    def reach(self, length: int, unread: int = 0) -> None:
        """Set the number of cached tokens, the last of which are still unread.

        The table is not recomputed for a small increase.
        """
        self.beyond = max(0, length - CACHED)
        longer = abs(self.beyond - self.tabulated) > LENGTHENED * (CACHED + self.tabulated)
        if longer or unread != self.unread:
            self.unread = unread
            self.refresh()

    def seconds(self, nodes: int) -> float:
        """c(n, length): the seconds of a forward over `nodes` nodes and the root."""
        return self.short(nodes) + self.growth.seconds(self.beyond, nodes)

    def took(self, nodes: int) -> float:
        return self.seconds(nodes + self.unread) + self.other + nodes * self.node

    def rereading(self, unread: int) -> float:
        return self.seconds(unread) - self.seconds(0)

    def undone(self, seconds: float) -> None:
        """Record the seconds that a step with drafts took to accept, and to read its unread tokens
        again."""
        self.undoing += UNDOING_GAIN * (seconds - self.undoing)

    def returned(self, verify: float | None) -> None:
        """Record the seconds of the forward after a step that drafted; None if that step drafted as
        well."""
        longer = 0.0
        if verify is not None:
            longer = (self.surprise(self.unread, verify) - 1) * self.seconds(self.unread)
        self.returning += UNDOING_GAIN * (max(longer, 0.0) - self.returning)

    def short(self, nodes: int) -> float:
        return cost_at(self.sizes, self.values, nodes)

    def forwards(self, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        """`seconds` of many sizes."""
        last = self.sizes[-1]
        at = np.searchsorted(self.sizes, np.minimum(nodes, last))
        rise = self.short(last + 1) - self.values[-1]
        short = np.array(self.values)[at] + rise * np.maximum(nodes - last, 0)
        return short + self.beyond * (self.growth.token + self.growth.row * nodes)

    def refresh(self) -> None:
        """Tabulate the step times, and the best-case cost of growing a tree further.

        `slopes[n]` is the smallest relative cost per further node over all larger trees, so that a
        jump of the curve just ahead does not hide that several further nodes are cheap.
        """
        self.tabulated = self.beyond
        nodes = np.arange(LARGEST + 1)
        table = self.forwards(nodes + self.unread) + self.other + nodes * self.node
        # If a draft is rejected, the tokens that are unread now are read once more.
        table[1:] += self.undoing + self.returning + self.rereading(self.unread)
        here = table[:-1]
        rises = np.where(self.ahead > 0, table[self.ends] - here[:, None], inf)
        rise = np.minimum((rises / np.maximum(self.ahead, 1)).min(axis=1), np.diff(table))
        self.tabulate(table.tolist(), np.maximum(rise, 0.0) / here)
        self.tables.clear()

    def together(self, trees: int) -> "CostCurve":
        """The costs of forwards that an answer shares with so many others, by the rows of all but
        its root. Such forwards begin with the costs of trees, and are then learned by themselves,
        for each power of two. Their gate holds the balance of drafting in such forwards."""
        key = trees.bit_length()
        if key not in self.shared:
            sizes = (*self.sizes, *(size for size in CROWDED if size > self.sizes[-1]))
            self.shared[key] = CostCurve({size: self.seconds(size) for size in sizes})
        return self.shared[key]

    def observe_together(self, trees: int, rows: int, verify: float) -> None:
        """Learn from a forward that was shared with so many others, over `rows` rows besides the
        answer's root."""
        curve = self.together(trees)
        at = min(bisect_left(curve.sizes, rows), len(curve.sizes) - 1)
        curve.correct(at, curve.surprise(rows, verify))
        curve.since_refresh += 1
        if curve.since_refresh >= REFRESH:
            curve.since_refresh = 0
            self.tables.clear()

    def observe_plain(self, trees: int, seconds: float) -> None:
        """Learn from a whole round of steps without drafts of an answer and so many others."""
        known = self.rounds.get(trees, seconds)
        self.rounds[trees] = known + ROUND_GAIN * (min(seconds, HICCUP * known) - known)

    def plain_round(self, trees: int) -> float:
        """The seconds in which an answer and so many others get a token each without drafts: as it
        was measured, or else as it is for one answer."""
        guess = self.together(trees).seconds(trees) + (1 + trees) * self.other
        return self.rounds.get(trees, guess)

    def beside(self, trees: int, rows: int) -> StepTimes:
        """The times of steps by the nodes of one answer, whose forward is shared with so many other
        trees, which have `rows` rows.

        All answers decide at the same time. Where further rows cost nothing up to the next larger
        size, each would take them, so a row costs as much as it does on the way to that size.
        """
        key = trees, rows
        if key not in self.tables:
            nodes, curve = np.arange(LARGEST + 1), self.together(trees)
            sizes, values = hull(curve.sizes, curve.values)
            beyond = np.maximum(rows + nodes - sizes[-1], 0)
            last = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
            table = np.interp(rows + nodes, sizes, values) + last * beyond
            table += (1 + trees) * self.other + (rows - trees + nodes) * self.node
            slopes: NDArray[np.float64] = np.maximum(np.diff(table), 0.0) / table[:-1]
            self.tables[key] = StepTimes(table.tolist(), slopes, self.gate)
        return self.tables[key]

    def observe(self, nodes: int, verify: float, draft: float, other: float) -> None:
        """Learn from one step: nodes drafted, seconds of forward, of drafting, of the rest."""
        rows = nodes + self.unread
        at = min(bisect_left(self.sizes, rows), len(self.sizes) - 1)
        if self.beyond:
            # The sizes then explain what remains.
            off = self.surprise(rows, verify) - 1
            self.growth.observe(self.beyond, rows, self.short(0), self.seconds(rows), off)
        self.correct(at, self.surprise(rows, verify))
        # The first look-up takes time whether or not anything is drafted.
        self.node += GAIN * (draft / (nodes + 1) - self.node)
        rest = draft / (nodes + 1) + other
        cut = min(rest, HICCUP * self.other) if self.other > 0 else rest
        self.other += GAIN * (cut - self.other)
        self.since_refresh += 1
        if self.since_refresh >= REFRESH:
            self.since_refresh = 0
            self.refresh()

    def correct(self, at: int, ratio: float) -> None:
        """Learn that a forward of the size at this index took `ratio` times what was expected.

        A Kalman filter on the logarithms of all sizes decides how much of that is due to this size
        and how much to reasons that it shares with others. Certain values move little.
        """
        gains = self.covariance[at] / (self.covariance[at, at] + 1)
        self.covariance += self.drift - gains[:, None] * self.covariance[at]
        factors = ratio**gains
        self.values = (factors * self.values).tolist()
        self.growth.scale(float(factors[0]))

    def surprise(self, nodes: int, verify: float) -> float:
        return min(max(verify / self.seconds(nodes), 1 / SURPRISE), SURPRISE)

    def fresh(self) -> "CostCurve":
        """A curve with the costs of forwards only, without what was learned about drafting."""
        return CostCurve(self.points, token=self.growth.token, row=self.growth.row)

    def copy(self) -> "CostCurve":
        return deepcopy(self)


@runtime_checkable
class Stretchable(Protocol):
    """A backend that can be timed after a long text without reading one."""

    def stretch(self, tokens: Sequence[int]) -> None:
        """Make the cache claim to hold these tokens; its content is zeros."""


class GrowingText:
    """A text that is one token longer at each timed forward, as an answer is.

    Some libraries prepare every shape of a forward that they have not seen before. In an answer no
    shape comes twice, so timing one twice would hide that cost. The text begins again with its
    first `length` tokens only if no more of `tokens` are left.
    """

    def __init__(self, backend: Backend, tokens: Sequence[int], length: int) -> None:
        self.backend, self.tokens = backend, tokens
        self.begin = self.length = length

    @property
    def prompt(self) -> Sequence[int]:
        return self.tokens[: self.length]

    def room(self, forwards: int, nodes: int) -> bool:
        return self.length + forwards + nodes <= len(self.tokens)

    def seconds(self, nodes: int) -> float:
        if not self.room(1, nodes):
            self.length = self.begin
        spent = forward_seconds(self.backend, self.prompt, nodes)
        self.length += 1
        return spent


def measure_costs(
    backend: Backend,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
    progress: Callable[[float], None] = lambda share: None,
) -> CostCurve:
    """Time forwards over trees of the given sizes, in rounds, for at most about `seconds` seconds.

    Every round times every size. A plain forward follows STEADY others, as in plain decoding: right
    after a tree it takes longer, so that drafts would seem to gain more than they do. A tree
    follows one of another size, as in real use, where the budget changes from step to step; after a
    forward of the same size it would be faster. The text grows with each forward (GrowingText). The
    fastest round counts, because other load can only make a forward slower, and a short one many
    times slower. If it is known, only the time in which the forward itself computed counts. A slow
    model is timed once, at fewer sizes, since its first answers correct the curve anyway.
    """
    context, vocabulary = backend.info.context_length, backend.info.vocabulary_size
    length = min(CACHED, context // 2)
    longest = min(length + GROWN + max(sizes), context)
    text = GrowingText(backend, [(7 + 13 * at) % vocabulary for at in range(longest)], length)
    levels = backend.depth_limit(length) if backend.info.leaves == 1 else None
    start = perf_counter()
    backend.prefill(text.prompt, lambda: False)
    reading = (perf_counter() - start) / length
    text.seconds(0)
    slow = text.seconds(0) > SLOW
    times: dict[int, list[float]] = {
        size: []
        for size in (SLOW_SIZES if slow else sizes)
        if length + size < context and (levels is None or size <= levels)
    }
    for round_ in count():
        before = text.length
        for number, (size, found) in enumerate(times.items(), start=1):
            steady, timed = (0, 1) if slow or size else (STEADY, COUNTED)
            for _ in range(steady):
                text.seconds(size)
            found.append(median(text.seconds(size) for _ in range(timed)))
            rounds, spent = (1, 0.0) if slow else (FEWEST, perf_counter() - start)
            progress(
                min(1.0, max((round_ + number / len(times)) / rounds, spent / max(seconds, 1e-9)))
            )
        fits = text.room(text.length - before, max(times))
        if slow or (round_ + 1 >= FEWEST and (perf_counter() - start >= seconds or not fits)):
            break
    points = {size: min(found) for size, found in times.items()}
    return CostCurve(points, 0.0, 0.0, *measure_growth(text, points, reading, slow))


def measure_growth(
    text: GrowingText, points: Mapping[int, float], reading: float, slow: bool
) -> tuple[float, float]:
    """The time that each cached token adds to a forward, and to each of its nodes; zeros if
    measuring would take too long. `text` is in the cache, `reading` is the time in seconds that the
    model needs to read a token."""
    backend = text.backend
    nodes = max(size for size in points if size <= LONG_SIZE)
    length = min(LONG, backend.info.context_length - nodes - FAR_GROWN)
    if isinstance(backend, Stretchable):
        length = min(length, text.length * MOST_BYTES // max(backend.bytes, 1))
    elif reading > 0:
        length = min(length, int(READING / reading))
    if length < LEAST or not nodes:
        return 0.0, 0.0
    times = timed_far(backend, length, nodes, slow)
    near, far = times[0, CACHED], times[0, length]
    # The load of the machine changes between measuring the sizes and this, so use ratios only.
    pace = points[0] / near / (length - CACHED)
    added = far - near
    more = times[nodes, length] - times[nodes, CACHED] - added
    return pace * max(added, 0.0), pace * max(more, 0.0) / nodes


def timed_far(
    backend: Backend, length: int, nodes: int, slow: bool
) -> dict[tuple[int, int], float]:
    """The least seconds of forwards, by number of nodes (0 and `nodes`) and of the tokens that the
    text began with (CACHED and `length`). Leaves the cache empty.

    If texts have to be read, the long one is read once, with forwards after the short text before
    and after it. These forwards are few, so the least time counts, which ignores disturbances.
    """
    start = perf_counter()
    times: dict[tuple[int, int], list[float]] = {}
    reads = not isinstance(backend, Stretchable)
    near, far = (
        GrowingText(backend, [0] * (tokens + FAR_GROWN + nodes), tokens)
        for tokens in (CACHED, length)
    )
    timed = (0, nodes) * (SAMPLES if reads and not slow else 1)
    for round_ in count():
        for text in (near, far, near) if reads else (near, far):
            if isinstance(backend, Stretchable):
                backend.stretch(text.prompt[:-1])
            if not slow:
                text.seconds(nodes)
            for size in timed:
                times.setdefault((size, text.begin), []).append(text.seconds(size))
        if slow or reads or not far.room(1 + len(timed), nodes):
            break
        if round_ + 1 >= FEWEST and perf_counter() - start >= FAR_SECONDS:
            break
    backend.close()
    return {case: min(found) for case, found in times.items()}


def forward_seconds(backend: Backend, prompt: Sequence[int], nodes: int) -> float:
    backend.prefill(prompt, lambda: False)
    branching = backend.info.leaves != 1
    tree = comb(prompt[-1], nodes, backend.info.vocabulary_size, branching)
    # While other programs use the processor, the clock of this thread stands still: on a busy
    # machine a forward of 5 ms varies by a tenth by this clock, and twofold by the other.
    clock = thread_time if backend.info.computes_alone else perf_counter
    begun = clock()
    backend.score(tree, Sampling(temperature=0.0))
    spent = clock() - begun
    backend.accept(())
    return spent


def comb(root: int, nodes: int, vocabulary: int, branching: bool = True) -> Tree:
    """A tree of a typical form: a chain from the root, with short branches if `branching`."""
    tree, row = Tree(root), 0
    for number in range(nodes):
        added = tree.add(row, (root + 1 + number) % vocabulary, "")
        if number % 2 == 0 or not branching:
            row = added
    return tree
