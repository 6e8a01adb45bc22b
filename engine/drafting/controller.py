"""Does drafting pay? The databases, the draft models and a head are judged in the same way.

- **Balance.** Each of them has a balance, in plain steps: what its latest steps saved, by the
  cost curve. Look-ups, forwards of draft models, calls of the head, learning, and what sampling and
  bookkeeping take beyond those of plain steps are charged to it.
  What databases and head draft together is shared by whose tokens were kept, and the rows of the
  forward by whose nodes they were. It starts at three and is six at most, twelve for a head. A
  balance is bounded where an average is not: a small gain that comes in bursts is left alone, and
  what a try can lose is limited.
- **Back-off.** Once the balance is negative, drafting pauses for 16 steps, then for 32, up to 512.
  After each pause it may lose one plain step, a head two. Once the balance is full, pauses are
  short again.
- **Probe.** During a pause drafting is tried now and then, so seldom that it costs two per cent of
  the time. Databases are probed without the slowest one. A probe that saves something ends the
  pause.
- **Plain time.** A forward of another size than the last one finds less prepared: behind a draft
  tree, a plain one took 9 to 113 % longer (docs/log.md). So only a plain step behind a plain one
  tells what plain decoding takes, and what the others take longer is charged to who drafted. Where
  drafting goes on and on, two plain steps are taken now and then, and the second one counts.

Invariant: this decides what is drafted and when it is learned, never what the answer says.
"""

from collections.abc import Mapping, Sequence

from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.costs import HICCUP, CostCurve, Gain
from engine.settings import Drafting
from engine.types import DATABASES, DRAFT, HEAD, STACK, WAYS, Step

LEAST = -1.0
"""What a step saves at least, beside undoing: one hiccup of the machine must not decide."""
FULL, TRIAL = 6.0, 1.0
"""The balance at most, and after a back-off."""
PATIENCE = {HEAD: 2.0}
"""How many times as large both are for a way to draft. What a head saves differs much from step to
step, as several guesses are right or wrong together: with less, a head that pays would often rest
(docs/log.md)."""
SHORTEST, LONGEST = 16, 512
"""Steps of a back-off: the first, and the last after doubling again and again."""
PROBE = 32
"""Steps at least between two probes of a way to draft."""
FIRST = 2
"""The step of an answer that probes near databases anyway: there are some words to go by."""
PLAIN, DRAFTED = 192, 128
"""Steps without a plain one behind a plain one, after which such two are due; and steps without
drafts after which one with some is."""
LEARNING_SHARE, PROBE_SHARE, HEAD_PROBE_SHARE = 0.01, 0.02, 0.01
"""The shares of a back-off's time that learning may take, probes, and those of a head: these come
on top of the probes of databases."""
PRIOR_TOKENS = 32
"""Tokens whose time to learn counts as much as what was known of it before."""
PLAIN_GAIN = 0.1
"""How far a plain step moves what the run knows of plain steps."""


class DraftController:
    """Gives every step of a run its budget and its drafters, and learns from what came of it.

    What it learns is kept with the costs, and so from answer to answer. Without a cost curve, or
    with a fixed budget, all drafters draft in all steps.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        drafting: Drafting,
        vocabulary: int,
        costs: CostCurve | None,
        leaves: int | None = None,
    ) -> None:
        self.drafters, self.drafting, self.vocabulary = drafters, drafting, vocabulary
        self.leaves = leaves
        self.costs = costs if drafting.budget == "adaptive" and drafting.nodes else None
        self.ways = {way(drafter) for drafter in drafters}
        self.gains = self.costs.gate.gains if self.costs is not None else {}
        self.plain_time = PlainTime(self.costs)
        self.steps = self.unread = 0
        self.before: int | None = None
        """The nodes of the step before; None where there is none."""
        self.least = LEAST
        self.asked: set[str] = set()
        self.forced = ""
        self.paused = self.was_paused = False

    def reach(self, length: int, unread: int = 0) -> None:
        """The text has so many tokens now, of which the next forward reads `unread` again: what a
        step costs depends on that."""
        self.unread = unread
        if self.costs is not None:
            self.costs.reach(length, unread)

    def plan(self, depth: int) -> tuple[Budget, Sequence[Drafter]]:
        """The budget of the next step, whose tree may be `depth` levels deep, and who may use it.

        Nobody drafts where the depth is 0: in a plain step, or where all ways to draft back off.
        """
        backing_off = {name for name in self.ways if self.backing_off(name)}
        self.was_paused, self.paused = self.paused, bool(self.ways) and backing_off == self.ways
        asked = {name for name in self.ways if name not in backing_off or self.probes(name)}
        plain = self.costs is not None and self.costs.gate.plain >= PLAIN
        depth = depth if asked and not plain else 0
        near = DATABASES in backing_off
        due, costs = self.due(asked), self.costs
        self.forced = due
        room = self.drafting, depth, self.vocabulary
        budget = Budget(*room, costs, due, near, self.leaves, frozenset(asked))
        self.steps += 1
        self.asked = asked if budget.nodes else set()
        return budget, [drafter for drafter in self.drafters if way(drafter) in self.asked]

    def backing_off(self, name: str) -> bool:
        """Whether a way to draft is left out now, but for probes."""
        return name in self.gains and self.gains[name].backoff > 0

    def probes(self, name: str) -> bool:
        """Whether a way to draft was not used for so long that it is tried again."""
        gain = self.gains[name]
        return gain.unused >= gain.wait or (name == DATABASES and self.steps == FIRST)

    def due(self, asked: set[str]) -> str:
        """Who drafts in the next step whatever is expected of it.

        Draft models that are asked are left out only where databases draft better, and a head where
        it is not expected to pay. They must not be judged for ever by how they did when they last
        drafted.
        """
        for name in (STACK, HEAD):
            if name in asked and self.costs is not None and self.probes(name):
                return name
        return DATABASES if self.costs is not None and self.costs.gate.drafted >= DRAFTED else ""

    # learning

    def learns(self, budget: Budget) -> bool:
        """Whether pending tokens are learned now: before drafting, and while not paused."""
        return budget.nodes > 0 or not self.was_paused

    def learnable(self, new: int) -> int:
        """How many of `new` pending tokens are to be learned now: the latest.

        All of them; but of those that were decided during a back-off only as many as take little of
        its time.
        """
        if self.costs is None or not self.was_paused:
            return new
        most = new * LEARNING_SHARE * self.costs.seconds(0) / self.costs.gate.learn_seconds
        return min(new, int(most))

    def learned(self, seconds: float, tokens: int) -> None:
        """So many tokens took the databases so long to learn. In a step that drafts, calibration is
        part of that, so the two times are kept apart."""
        if self.costs is None:
            return
        gate = self.costs.gate
        if self.was_paused:
            gate.learn_seconds = updated(gate.learn_seconds, seconds, tokens)
        else:
            known = gate.learn_and_calibrate_seconds
            gate.learn_and_calibrate_seconds = updated(known, seconds, tokens)

    def read(self, seconds: Mapping[str, float], tokens: int) -> None:
        """A prompt with so many new tokens was read, which took either way so long."""
        self.charge(seconds)
        if self.costs is not None and tokens and DATABASES in seconds:
            gate = self.costs.gate
            gate.learn_seconds = updated(gate.learn_seconds, seconds[DATABASES], tokens)

    def charge(self, seconds: Mapping[str, float]) -> None:
        """A whole text was learned: what drafts save pays for that first."""
        if self.costs is not None:
            for name, spent in seconds.items():
                self.gains[name].debt += spent / self.costs.seconds(0)

    # what a step came to

    def plain_seconds(
        self, nodes: int, emitted: int, times: Mapping[str, float], refilled: float
    ) -> float | None:
        """What plain decoding would have taken for a step of those times (see Step); it fills a
        cache again as well."""
        parts = (times[f"{part}_seconds"] for part in ("verify", "sample", "other"))
        plain = self.plain_time.seconds(nodes + self.unread, self.before, emitted, *parts)
        return None if plain is None else refilled + plain

    def observe(
        self, step: Step, learning: float = 0.0, accepting: float = 0.0, unread: int = 0
    ) -> None:
        """A step is over; `learning` is the part of its drafting that was no look-up, and
        `accepting` the part of the rest in which the cache was settled. It leaves so many tokens
        unread."""
        nodes = sum(step.proposed.values())
        before, self.before = self.before, nodes
        if self.costs is None:
            return
        models = [s for source, s in step.look_ups.items() if source.startswith(DRAFT)]
        head = step.look_ups.get(HEAD, 0.0)
        # A model's time is its own, it says nothing of what a node costs the databases.
        looking = step.draft_seconds - learning - sum(models) - head
        settling = accepting if nodes else 0.0
        rest = step.sample_seconds + step.other_seconds - settling
        gate = self.costs.gate
        settled = nodes == before == 0
        if nodes or settled:
            self.costs.observe(nodes, step.verify_seconds, looking, learning + rest)
        if before:
            self.costs.returned(None if nodes else step.verify_seconds)
        gate.plain = 0 if settled else gate.plain + 1
        gate.drafted = 0 if nodes else gate.drafted + 1
        plain = self.costs.seconds(0)
        databases = (looking + learning) / plain
        # Whoever left tokens unread has paid for them.
        read = self.costs.seconds(nodes + self.unread) - self.costs.rereading(self.unread)
        rows = (self.costs.seconds(nodes) - plain) / plain
        undoing = self.undoing(nodes, accepting, unread)
        emitted = len(step.tokens)
        beside = self.plain_time.beside(nodes, emitted, rest)
        took = (read + undoing + sum(models) + head + beside) / plain + databases
        self.least = LEAST - undoing / plain
        later = emitted * gate.learn_and_calibrate_seconds / plain
        guessed = float(step.accepted.get(HEAD, 0))
        if nodes:
            guessed -= rows * step.proposed.get(HEAD, 0) / nodes
        winner = STACK if models else DATABASES
        head_share = guessed - head / plain if HEAD in step.levels else None
        self.weigh(winner, emitted - took, databases, head_share, later)

    def undoing(self, nodes: int, accepting: float, unread: int) -> float:
        """The seconds that a step is charged for accepting what it drafted, for what it left
        unread, and for what the next one takes longer: their mean, as one step drafts in vain and
        the next one does not."""
        if self.costs is None or not nodes:
            return 0.0
        self.costs.undone(accepting + self.costs.rereading(unread))
        return self.costs.undoing + self.costs.returning

    def weigh(
        self,
        winner: str,
        saved: float,
        databases: float,
        guessed: float | None,
        later: float,
    ) -> None:
        """Add what a step saved, in plain steps, to the balance of the ways that drafted.

        `databases` is what their look-ups and learning took. Where draft models drafted, it is
        charged to the databases, unless these back off and so learn for the draft models alone.
        `guessed` is the head's share of what was saved, None where it was not called.
        `later` is what learning the tokens of the step takes: a probe does not pay without it.
        """
        shares: dict[str, float] = {}
        drafted = {winner, DATABASES}
        if guessed is not None:
            # Without databases there is nobody to share with.
            shares[HEAD] = guessed if self.ways - {HEAD} else saved
            saved -= shares[HEAD]
            drafted.add(HEAD)
        if winner == STACK and DATABASES in self.ways and not self.backing_off(DATABASES):
            shares |= {STACK: saved + databases, DATABASES: -databases}
        else:
            shares[winner] = saved
        for name in self.ways:
            gain, used = self.gains[name], name in self.asked and name in drafted
            gain.unused = 0 if used else gain.unused + 1
            if gain.backoff:
                probe = shares.get(name, 0.0) - (later if name == DATABASES else 0.0)
                back_off(name, gain, probe if used else None)
            elif name in shares:
                settle(name, gain, shares[name], self.least)
                if name == HEAD == self.forced:
                    gain.wait = rest_of(name, shares[name])


def way(drafter: Drafter) -> str:
    """Which way to draft a drafter is of."""
    return drafter.name if drafter.name in WAYS else DATABASES


def updated(known: float, seconds: float, tokens: int) -> float:
    """The mean time to learn a token, after so many tokens took so long."""
    return known + tokens / (tokens + PRIOR_TOKENS) * (seconds / tokens - known)


def settle(name: str, gain: Gain, saved: float, least: float) -> None:
    """Add what a step saved to the balance; once that is negative, a back-off begins. Not even a
    hiccup of the machine makes it save less than `least`."""
    full, trial = limits(name)
    paid = min(gain.debt, max(saved, 0.0))
    gain.debt, saved = gain.debt - paid, saved - paid
    gain.balance = min(gain.balance + max(saved, least), full)
    if gain.balance >= full:
        gain.length = 0
    elif gain.balance < 0:
        gain.length = min(max(SHORTEST, 2 * gain.length), LONGEST)
        gain.backoff, gain.balance, gain.debt, gain.wait = gain.length, trial, 0.0, PROBE


def back_off(name: str, gain: Gain, probe: float | None) -> None:
    """A step of a back-off is over; a probe in it saved so much. Saving anything ends the back-off,
    and pays for the try that follows."""
    gain.backoff -= 1
    if probe is None:
        return
    if probe > 0:
        full, trial = limits(name)
        gain.backoff = gain.length = 0
        gain.balance = min(trial + probe, full)
    gain.wait = rest_of(name, probe)


def limits(name: str) -> tuple[float, float]:
    """The balance of a way to draft at most, and after a back-off."""
    patience = PATIENCE.get(name, 1.0)
    return FULL * patience, TRIAL * patience


def rest_of(name: str, saved: float) -> int:
    """Steps until the next probe of a way to draft, so that what this one lost stays within its
    share of the time."""
    share = HEAD_PROBE_SHARE if name == HEAD else PROBE_SHARE
    return max(PROBE, round(-saved / share))


class PlainTime:
    """What plain decoding would take at the load of this moment, from what a step took.

    The cost curve says how a plain forward compares with the one that was made: load slows both
    alike. A plain one takes at most as long, whatever a curve says that was measured on a busy
    machine: nothing is shown as gained that was not. Without a curve, plain steps of the run behind
    plain ones are used, and until there is one the shortest of the others. Tokens are sampled one
    by one in either case.
    """

    def __init__(self, costs: CostCurve | None) -> None:
        self.costs = costs
        self.settled: float | None = None
        self.shortest: float | None = None
        self.other: float | None = None
        self.rest: float | None = None

    def seconds(
        self,
        nodes: int,
        before: int | None,
        emitted: int,
        verify: float,
        sample: float,
        other: float,
    ) -> float | None:
        """Plain decoding's seconds for the tokens of a step whose parts took so long. It follows
        one of `before` nodes, or none."""
        if not nodes:
            self.other = moving_mean(self.other, other)
            self.rest = moving_mean(self.rest, sample + other)
            if before == 0:
                self.settled = moving_mean(self.settled, verify)
            self.shortest = min(verify, self.shortest or verify)
            # Plain decoding would have found prepared what a step behind drafts does not.
            forward = self.forward if before else None
            return min(verify, forward or verify) + sample + other
        forward = self.forward
        if self.costs is not None:
            forward = verify * min(1.0, self.costs.seconds(0) / self.costs.seconds(nodes))
        if forward is None:
            return None
        # What follows a plain forward moves no rows of the cache.
        return emitted * forward + sample + (other if self.other is None else emitted * self.other)

    @property
    def forward(self) -> float | None:
        """The seconds of a plain forward behind a plain one, as far as they are known."""
        if self.costs is not None:
            return self.costs.seconds(0)
        return self.shortest if self.settled is None else self.settled

    def beside(self, nodes: int, emitted: int, rest: float) -> float:
        """The seconds by which sampling and the rest of a step that drafted took longer than those
        of plain steps for its tokens."""
        return rest - emitted * self.rest if nodes and self.rest is not None else 0.0


def moving_mean(known: float | None, seen: float) -> float:
    """A moving mean after one more value, hiccups cut."""
    return seen if known is None else known + PLAIN_GAIN * (min(seen, HICCUP * known) - known)
