"""Decides whether drafting pays. The databases, the draft models and a head are judged by the same
rule.

- **Balance.** Each way to draft has a balance, in units of plain steps: the savings of its latest
  steps, by the cost curve. It is charged for look-ups, forwards of draft models, calls of the head
  and learning, and for the time by which sampling and bookkeeping exceed those of plain steps.
  A head saves the steps of the tokens that it alone guessed. A balance starts at three and is
  capped at six, or twelve for a head. Unlike an average, a balance tolerates a small gain that
  comes in bursts, and limits what an attempt can lose.
- **Back-off.** When the balance becomes negative, drafting pauses for 16 steps, then for 32, up to
  512. After each pause it may lose one plain step, a head two. Once the balance is full, pauses
  start again at 16. Steps of a pause in which nothing is due cost nothing but a count.
- **Probe.** During a pause drafting is tried occasionally, so rarely that this takes two per cent
  of the time. Databases are probed without the slowest one. A probe that saves something ends the
  pause, but the next pause is longer all the same, because that may have been chance.
- **Plain time.** A forward takes longer if the one before had another size: a plain one right after
  a draft tree took 9 to 113 % longer, the seventh still 5 % (docs/log.md). Only plain steps after
  STEADY others therefore measure plain decoding, and the extra time of the first one is charged to
  the drafter. If drafting never pauses, some plain steps are taken now and then, and the last
  COUNTED of them count.

With other answers in the same forward, the rows of all compete. Its time depends on all rows, and
what it brings are the tokens of all answers, so a node pays if it adds more tokens per time than
all trees together bring: the more answers there are, the fewer nodes. What such forwards take is
learned apart from those of one answer. One balance judges the drafts of all answers (`Rounds` in
engine/rounds.py): during a back-off all of them decode plainly. The balances of one answer learn
nothing from such steps. Draft models and heads rest meanwhile.

Invariant: this decides what is drafted and when it is learned, never what the answer says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.costs import COUNTED, HICCUP, LARGEST, STEADY, SURPRISE, CostCurve, Gain, Gate
from engine.settings import Drafting
from engine.types import DATABASES, DRAFT, HEAD, SCHEMA, STACK, WAYS, Step

LEAST = -1.0
"""The largest loss that a step may report, apart from undoing, because one outlier must not
decide."""
FULL, TRIAL = 6.0, 1.0
"""The cap of a balance, and its value after a back-off."""
PATIENCE = {HEAD: 2.0}
"""The factor by which both are larger for a way to draft. The savings of a head vary much from step
to step, because several guesses are right or wrong together; with smaller values, a head that pays
would often pause (docs/log.md)."""
SHORTEST, LONGEST = 16, 512
"""The length of a back-off in steps: the first, and the longest after repeated doubling."""
PROBE = 32
"""The fewest steps between two probes of a way to draft, except for a head that may be broken."""
SPARSE = 8
"""About the most probes of a back-off."""
FIRST = 2
"""The step of an answer that always probes the databases in memory: there are then some tokens to
match."""
PLAIN = 768
"""The most steps without steady plain decoding before some plain steps are due. At first they are
due sooner (Gate.plain_after)."""
DRAFTED, RARELY = 128, 8192
"""Steps without drafts after which the databases draft regardless of the cost curve, which may be
wrong. While such drafts save nothing, they become rarer, down to one in RARELY steps."""
LEARNING_SHARE, PROBE_SHARE, HEAD_PROBE_SHARE = 0.01, 0.02, 0.01
"""The shares of a back-off's time that may go into learning, into probes, and into probes of a
head, which come on top of those of the databases."""
PRIOR_TOKENS = 32
"""The number of tokens whose learning time weighs as much as the earlier estimate."""
PACE_GAIN = 0.2
"""The weight of a step in the tokens that an answer is expected to gain from the next one."""
RESTED, HEARD = 16, 8
"""The steps after which a head that was not called rests, and those before it is tried again in
which it listens."""
PARTS = "draft", "verify", "sample", "other"
"""The times of a Step."""
PLAIN_GAIN = 0.1
"""The weight of a plain step in the moving estimate of plain steps."""


@dataclass(slots=True)
class Company:
    """The answers beside one: `others`, of which `trees` share its forwards, with `rows` rows in
    the last one. These are expected to gain `tokens` tokens from the next one. If it is `open`,
    further ones may join. With `rests` all decode plainly, and `paused` if their drafts do not pay.
    Without drafts, all would get a token in `plain_round` seconds; None if this is such a round.

    The answer itself took `own_rows` rows of the last forward and got `gained` tokens from it,
    `pace` on average. Its decisions depend on `costs`.
    """

    others: int = 0
    trees: int = 0
    rows: int = 0
    tokens: float = 0.0
    open: bool = False
    rests: bool = False
    paused: bool = False
    plain_round: float | None = None
    own_rows: int = 1
    gained: int = 0
    pace: float = 1.0
    costs: CostCurve | None = None

    def took(self, rows: int, tokens: int) -> None:
        self.own_rows, self.gained = rows, tokens
        self.pace += PACE_GAIN * (tokens - self.pace)


class DraftController:
    """Gives every step of a run its budget and its drafters, and learns from the outcome.

    The learned state is stored with the cost curve, and so kept from answer to answer. Without a
    cost curve, or with a fixed budget, all drafters draft in all steps.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        drafting: Drafting,
        vocabulary: int,
        costs: CostCurve | None,
        leaves: int | None = None,
        company: Company | None = None,
    ) -> None:
        self.drafters, self.drafting, self.vocabulary = drafters, drafting, vocabulary
        self.company = company or Company()
        self.leaves = leaves
        self.costs = costs if drafting.budget == "adaptive" and drafting.nodes else None
        self.company.costs = self.costs
        self.ways = {way(drafter) for drafter in drafters}
        self.gains = self.costs.gate.gains if self.costs is not None else {}
        self.plain_time = PlainTime(self.costs)
        self.steps = self.unread = 0
        self.since = 1
        """Plain steps since the last step that drafted. The first steps of an answer take longer,
        also in plain decoding, so they do not measure its pace, and nothing is charged for them."""
        self.least = LEAST
        self.active: set[str] = set()
        self.forced = ""
        self.nothing = Budget(drafting, 0, vocabulary)
        self.paused = self.was_paused = False
        self.sleeping = self.slept = 0
        """Steps of a pause for which nothing has to be decided: those left, and those to count."""
        self.listens = HEAD in self.ways and not self.rests()
        """Whether a head needs the hidden states of the next forward."""

    def reach(self, length: int, unread: int = 0) -> None:
        """Set the length of the text, and how many of its tokens the next forward reads again
        (`unread`): the cost of a step depends on both."""
        self.unread = unread
        if self.costs is not None and not self.sleeping:
            self.costs.reach(length, unread)

    def plan(self, depth: int) -> tuple[Budget, Sequence[Drafter]]:
        """The budget of the next step, whose tree may be `depth` levels deep, and the drafters that
        may use it.

        No drafter drafts if the depth is 0: in a plain step, or if all ways to draft are backing
        off.
        """
        if self.sleeping and not self.company.others:
            self.sleeping -= 1
            self.slept += 1
            self.was_paused = True
            return self.nothing, ()
        self.wake()
        idle = {name for name in self.ways if self.idle(name)}
        active = self.ways - idle | {name for name in idle if self.probes(name)}
        if not self.listens:
            active.discard(HEAD)
        near, paused = DATABASES in idle, 0 < len(idle) == len(self.ways)
        self.listens = HEAD in self.ways and not self.rests()
        self.steps += 1
        plain = self.costs is not None and self.costs.gate.plain >= self.costs.gate.plain_after
        if self.company.others:
            active, near = {DATABASES} & self.ways, False
            plain, paused = self.company.rests, self.company.paused
        self.was_paused, self.paused = self.paused and not self.active, paused
        if depth <= 0 or plain or not active or not self.drafting.nodes:
            self.active, self.forced = set(), ""
            if paused and not self.company.others and self.since >= STEADY + COUNTED:
                self.sleeping = self.unchanged()
            return self.nothing, ()
        self.active, self.forced = active, "" if self.company.others else self.due(active)
        budget = Budget(
            self.drafting,
            depth,
            self.vocabulary,
            self.costs,
            self.forced,
            near=near,
            leaves=self.leaves,
            drafting_ways=frozenset(active),
        )
        if self.company.others and self.costs is not None:
            trees, rows, tokens = self.company.trees, self.company.rows, self.company.tokens
            plain_rate = (1 + trees) / self.costs.plain_round(trees)
            budget.share(self.costs.beside(trees, rows), tokens, plain_rate)
        return budget, [drafter for drafter in self.drafters if way(drafter) in active]

    def backing_off(self, name: str) -> bool:
        """Whether a way to draft is paused now, except for probes."""
        return name in self.gains and self.gains[name].backoff > 0

    def probes(self, name: str) -> bool:
        """Whether a way to draft has been unused for so long that it is tried again."""
        return self.left(name) <= 0 or (name == DATABASES and self.steps == FIRST)

    def left(self, name: str) -> int:
        """The steps until a way to draft is tried again if it is unused until then."""
        gain = self.gains[name]
        soon = name == HEAD and self.suspects()
        return (gain.wait if soon else max(gain.wait, PROBE, gain.length // SPARSE)) - gain.unused

    def suspects(self) -> bool:
        """Whether a head may be broken, which more guesses will tell."""
        return self.costs is not None and self.costs.gate.head.record.suspect

    def idle(self, name: str) -> bool:
        """Whether a way to draft is not used now, except for probes."""
        if self.backing_off(name):
            return True
        return name == HEAD and (not self.listens or (self.alone and self.sleeps()))

    @property
    def alone(self) -> bool:
        """Whether a step would only look for drafts because of the head."""
        return self.backing_off(DATABASES)

    def sleeps(self) -> bool:
        """Whether a head has not paid for so long that it is only tried now and then."""
        gain = self.gains[HEAD]
        return gain.unused > RESTED or (self.alone and gain.wait > PROBE)

    def rests(self) -> bool:
        """Whether a head does not even listen to the target, which takes time as well. Shortly
        before it is tried again, it listens."""
        if HEAD not in self.gains or self.left(HEAD) <= HEARD:
            return False
        return self.gains[HEAD].backoff > HEARD or self.sleeps()

    def unchanged(self) -> int:
        """After this step of a pause, the steps for which all ways to draft remain idle."""
        ends = [self.left(name) - (HEARD if name == HEAD else 0) for name in self.ways]
        ends += [self.gains[name].backoff for name in self.ways if self.backing_off(name)]
        return max(0, min(ends) - 1)

    def wake(self) -> None:
        """Count the steps that were spent asleep. Has to be called when the answer ends."""
        if self.slept and self.costs is not None:
            self.skip(self.slept)
            self.costs.gate.drafted += self.slept
        self.sleeping = self.slept = 0

    def due(self, active: set[str]) -> str:
        """The way to draft that is used in the next step regardless of expectations.

        Draft models are left out while the databases are expected to draft better, and so is a head
        that is not expected to pay. Without such steps both would be judged by their last drafts
        forever.
        """
        for name in (STACK, HEAD):
            if name in active and self.costs is not None and self.probes(name):
                return name
        if self.costs is None or self.costs.gate.drafted < self.costs.gate.forced_after:
            return ""
        return DATABASES

    def paying(self, certain: int) -> int:
        """How many of so many certain tokens to draft in a step with no other drafts."""
        table = None if self.costs is None else self.costs.table
        most = min(certain, self.drafting.nodes, LARGEST)
        if table is None:
            return most
        return max(range(most + 1), key=lambda nodes: (1 + nodes) / table[nodes])

    # learning

    def learns(self, budget: Budget) -> bool:
        return budget.nodes > 0 or not (self.was_paused or self.company.rests)

    def learnable(self, new: int) -> int:
        """How many of `new` pending tokens to learn now; the latest ones are learned.

        All of them are learned, except during a back-off: then only as many as take a small share
        of its time.
        """
        if self.costs is None or not self.was_paused:
            return new
        most = new * LEARNING_SHARE * self.costs.seconds(0) / self.costs.gate.learn_seconds
        return min(new, int(most))

    def learned(self, seconds: float, tokens: int) -> None:
        """Record how long the databases took to learn so many tokens. In a step that drafts this
        includes calibration, so the two times are kept apart."""
        if self.costs is None:
            return
        gate = self.costs.gate
        if self.was_paused:
            gate.learn_seconds = updated(gate.learn_seconds, seconds, tokens)
        else:
            known = gate.learn_and_calibrate_seconds
            gate.learn_and_calibrate_seconds = updated(known, seconds, tokens)

    def read(self, seconds: Mapping[str, float], tokens: int) -> None:
        """Record that a prompt with so many new tokens was read, and how long each way to draft
        took."""
        self.charge(seconds)
        if self.costs is not None and tokens and DATABASES in seconds:
            gate = self.costs.gate
            gate.learn_seconds = updated(gate.learn_seconds, seconds[DATABASES], tokens)

    def charge(self, seconds: Mapping[str, float]) -> None:
        if self.costs is not None:
            for name, spent in seconds.items():
                self.gains[name].debt += spent / self.costs.seconds(0)

    # the outcome of a step

    def plain_seconds(
        self, nodes: int, emitted: int, times: Mapping[str, float], refilled: float
    ) -> float | None:
        """The time that plain decoding would have taken for a step with these times (see Step),
        including `refilled` seconds of filling caches."""
        draft, verify, sample, other = (times[f"{part}_seconds"] for part in PARTS)
        if self.company.others:
            if self.costs is None:
                return None
            plain = self.company.plain_round
            whole = draft + verify + sample + other
            return whole if plain is None else refilled + emitted * plain
        nodes += self.unread
        plain = self.plain_time.seconds(nodes, self.since, emitted, verify, sample, other)
        return None if plain is None else refilled + plain

    def observe(
        self,
        step: Step,
        learning: float = 0.0,
        accepting: float = 0.0,
        unread: int = 0,
        computing: float | None = None,
    ) -> None:
        """Learn from a finished step.

        `learning` is the part of its drafting time that was no look-up, and `accepting` the part of
        the remaining time in which the cache was settled. The step leaves `unread` tokens unread.
        `computing` is the time in seconds in which its forward computed, if it is known separately
        from the time in which other programs used the processor.
        """
        if self.slept:
            return
        nodes = sum(step.proposed.values())
        since, self.since = self.since, 0 if nodes else self.since + 1
        if self.costs is None:
            return
        gate = self.costs.gate
        verify = gate.load.steady(step.verify_seconds, computing)
        self.count(nodes, gate)
        resting = self.paused and not self.active
        if resting:
            self.skip(1)
            if not nodes and since >= STEADY + COUNTED:
                return
        models = [s for source, s in step.look_ups.items() if source.startswith(DRAFT)]
        head = step.look_ups.get(HEAD, 0.0)
        # The time of models does not count as the cost of nodes from databases.
        looking = step.draft_seconds - learning - sum(models) - head
        rest = step.sample_seconds + step.other_seconds - (accepting if nodes else 0.0)
        # After a call of the head everything takes longer, which is the head's cost.
        if HEAD not in step.levels and (nodes or STEADY <= since < STEADY + COUNTED):
            self.costs.observe(nodes, verify, looking, learning + rest)
        if not since:
            self.costs.returned(None if nodes else verify)
        if resting:
            return
        plain = self.costs.seconds(0)
        databases = (looking + learning) / plain
        # The step that left tokens unread has paid for them.
        read = self.costs.seconds(nodes + self.unread) - self.costs.rereading(self.unread)
        undoing = self.undoing(nodes, accepting, unread)
        emitted = len(step.tokens)
        extra = self.plain_time.extra(nodes, emitted, rest)
        extra += self.slowed(nodes, since, verify, plain)
        took = (read + undoing + sum(models) + head + extra) / plain + databases
        self.least = LEAST - undoing / plain
        later = emitted * gate.learn_and_calibrate_seconds / plain
        # What the format demands is no gain of any way to draft.
        took += guessed(step, SCHEMA, self.costs.seconds(nodes) / plain - 1)
        winner = STACK if models else DATABASES
        alone = step.draft_seconds - sum(models) + verify + rest
        head_share = self.of_head(step, alone) if HEAD in step.levels else None
        if nodes and self.forced == DATABASES:
            self.settle_forced(emitted > took)
        self.weigh(winner, emitted - took, databases, head_share, later)

    def slowed(self, nodes: int, since: int, verify: float, plain: float) -> float:
        """The seconds by which a forward without drafts took longer because of look-ups that found
        nothing. After a step that drafted, they are in `CostCurve.returning`."""
        looked = not nodes and self.active and since
        return min(verify, SURPRISE * plain) - plain if looked else 0.0

    def settle_forced(self, pays: bool) -> None:
        if self.costs is not None:
            gate = self.costs.gate
            gate.forced_after = DRAFTED if pays else min(2 * gate.forced_after, RARELY)

    def of_head(self, step: Step, seconds: float) -> float:
        """What the calls of the head in a step saved, in plain steps. Without the time of draft
        models, the step took so many seconds."""
        chosen = [token.id for token in step.tokens]
        heads = (drafter for drafter in self.drafters if drafter.name == HEAD)
        return sum(drafter.saved(chosen, seconds) for drafter in heads)

    def count(self, nodes: int, gate: Gate) -> None:
        """Count a step towards the next plain steps, and towards the next forced drafts."""
        gate.plain += 1
        gate.drafted = 0 if nodes else gate.drafted + 1
        if self.since >= STEADY + COUNTED:
            # Each further step of a pause adds evidence, so the next plain steps are due later.
            gate.plain, gate.plain_after = 0, min(8 * gate.plain_after, PLAIN)

    def skip(self, steps: int) -> None:
        """Count steps of a pause without a probe. Nothing else is computed, because the steps of
        small models take little time."""
        for name in self.ways:
            gain = self.gains[name]
            gain.unused += steps
            gain.backoff = max(0, gain.backoff - steps)

    def undoing(self, nodes: int, accepting: float, unread: int) -> float:
        """The seconds that a step is charged for accepting its draft, for the tokens that it left
        unread, and for the slower forward of a following plain step. These are means, because only
        some drafts are rejected."""
        if self.costs is None or not nodes:
            return 0.0
        self.costs.undone(accepting + self.costs.rereading(unread))
        return self.costs.undoing + self.costs.returning

    def weigh(
        self, winner: str, saved: float, databases: float, guessed: float | None, later: float
    ) -> None:
        """Add what a step saved, in plain steps, to the balances of the ways that drafted.

        `databases` is the time of their look-ups and learning. If draft models drafted, it is
        charged to the databases, unless these back off and learn only for the draft models.
        `guessed` is the head's share of what was saved, None if it was not called. `later` is the
        time to learn the tokens of the step, without which a probe does not pay.
        """
        shares: dict[str, float] = {}
        drafted = {winner, DATABASES}
        if guessed is not None:
            # Without databases, all savings are those of the head.
            shares[HEAD] = guessed if self.ways - {HEAD} else saved
            saved -= shares[HEAD]
            drafted.add(HEAD)
        if winner == STACK and DATABASES in self.ways and not self.backing_off(DATABASES):
            shares |= {STACK: saved + databases, DATABASES: -databases}
        else:
            shares[winner] = saved
        for name in self.ways:
            gain, used = self.gains[name], name in self.active and name in drafted
            gain.unused = 0 if used else gain.unused + 1
            if gain.backoff:
                probe = shares.get(name, 0.0) - (later if name == DATABASES else 0.0)
                back_off(name, gain, probe if used else None)
            elif name in shares:
                settle(name, gain, shares[name], self.least)
                if name == HEAD:
                    self.put_off(gain, shares[name])

    def put_off(self, gain: Gain, saved: float) -> None:
        """Set when a head is tried again: later each time, until it is called because that pays."""
        wait = PROBE
        if self.forced == HEAD:
            wait = rest_of(HEAD, saved)
            if not self.suspects():
                wait = max(wait, min(2 * gain.wait, LONGEST))
        gain.wait = wait


def guessed(step: Step, source: str, rows: float) -> float:
    """The accepted tokens of a source, minus its part of the cost of all rows, in plain steps."""
    nodes = sum(step.proposed.values())
    cost = rows * step.proposed.get(source, 0) / nodes if nodes else 0.0
    return step.accepted.get(source, 0) - cost


def way(drafter: Drafter) -> str:
    return drafter.name if drafter.name in WAYS else DATABASES


def updated(known: float, seconds: float, tokens: int) -> float:
    return known + tokens / (tokens + PRIOR_TOKENS) * (seconds / tokens - known)


def settle(name: str, gain: Gain, saved: float, least: float) -> None:
    """Add the savings of a step, at least `least`, to the balance, and begin a back-off if the
    balance becomes negative."""
    patience = PATIENCE.get(name, 1.0)
    full = FULL * patience
    paid = min(gain.debt, max(saved, 0.0))
    gain.debt, saved = gain.debt - paid, saved - paid
    gain.balance = min(gain.balance + max(saved, least), full)
    if gain.balance >= full:
        gain.length = 0
    elif gain.balance < 0:
        gain.length = min(max(SHORTEST, 2 * gain.length), LONGEST)
        gain.backoff, gain.balance = gain.length, TRIAL * patience
        gain.debt, gain.wait = 0.0, PROBE


def back_off(name: str, gain: Gain, probe: float | None) -> None:
    """Count a step of a back-off, and the savings of a probe in it. A probe with savings ends the
    back-off, and they are added to the balance."""
    gain.backoff -= 1
    if probe is None:
        return
    if probe > 0:
        patience = PATIENCE.get(name, 1.0)
        gain.backoff = 0
        gain.balance = min(TRIAL * patience + probe, FULL * patience)
    gain.wait = rest_of(name, probe)


def rest_of(name: str, saved: float) -> int:
    """Steps until the next probe of a way to draft, so that the loss of this probe keeps within the
    share of the time that probes may take."""
    share = HEAD_PROBE_SHARE if name == HEAD else PROBE_SHARE
    return round(-saved / share)


class PlainTime:
    """Estimates the time of plain decoding at the load of this moment, from the times of a step.

    The cost curve gives the ratio of a plain forward to the forward of the step, since load slows
    both alike. The first STEADY steps after the prompt are slow for another reason: caches are
    cold. Plain decoding would lose that time only once, and not once per token of the step. A plain
    forward is assumed to take at most as long as that of the step, even if a curve that was
    measured on a busy machine has a larger value. Without a curve, the run's steady plain steps are
    used, and until there is one, its shortest plain step. In either case tokens are sampled one by
    one.
    """

    def __init__(self, costs: CostCurve | None) -> None:
        self.costs = costs
        self.steps = 0
        self.settled: float | None = None
        self.shortest: float | None = None
        self.other: float | None = None
        self.rest: float | None = None

    def seconds(
        self, nodes: int, since: int, emitted: int, verify: float, sample: float, other: float
    ) -> float | None:
        """The seconds of plain decoding for the tokens of a step with these times, which follows
        `since` plain steps."""
        self.steps += 1
        if not nodes:
            self.other = moving_mean(self.other, other)
            self.rest = moving_mean(self.rest, sample + other)
            self.shortest = min(verify, self.shortest or verify)
            if since >= STEADY:
                self.settled = moving_mean(self.settled, verify)
            # Unlike this step, plain decoding would follow a forward of the same size.
            forward = None if since else self.forward
            return min(verify, forward or verify) + sample + other
        forward, cold = self.forward, 0.0
        if self.costs is not None:
            known = self.costs.seconds(nodes)
            if self.steps <= STEADY:
                cold = max(0.0, verify - known)
            forward = (verify - cold) * min(1.0, self.costs.seconds(0) / known)
        if forward is None:
            return None
        # After a plain forward no rows of the cache are moved.
        rest = sample + (other if self.other is None else emitted * self.other)
        return cold + emitted * forward + rest

    @property
    def forward(self) -> float | None:
        """The seconds of a plain forward after another plain one, None if unknown."""
        if self.costs is not None:
            return self.costs.seconds(0)
        return self.shortest if self.settled is None else self.settled

    def extra(self, nodes: int, emitted: int, rest: float) -> float:
        """The seconds by which sampling and the rest of a step that drafted took longer than those
        of plain steps for its tokens."""
        return rest - emitted * self.rest if nodes and self.rest is not None else 0.0


def moving_mean(known: float | None, seen: float) -> float:
    return seen if known is None else known + PLAIN_GAIN * (min(seen, HICCUP * known) - known)
