"""Several answers at once: in every round each answer gets one forward, and all share it.

An answer is a generator (`Turns` in engine/decode.py). It goes on until it wants a forward over its
tree. Once all have come so far, the rows of all are computed together, and each takes its tokens
and drafts again. An answer that reads a long prompt reads a slice of it in each round, so it
delays the others by no more than that. Answers join and leave between rounds. A run that has the
model to itself, such as the loading of another one, is alone in its rounds.

Answers that are to be watched side by side take turns instead (`take_turns`): each has forwards of
its own, and the model for as long as the others.

Everything happens on the thread that runs the model.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from engine.backends.base import Wanted, is_batching
from engine.decode import Pause, Scored, Turns, score
from engine.drafting.controller import LEAST, Company, settle
from engine.drafting.costs import COUNTED, STEADY, CostCurve, Gain
from engine.types import DATABASES

FIRST_REST, REST = 8, 256
"""The rounds until the first plain ones, and between those and the next."""
TURN = 0.1
"""The seconds of a turn: the first forward after one of another answer takes longer, so there are
several in it, and it is short enough to look like a steady flow."""


class Member:
    """An answer in progress. It waits for a forward, or with a Pause for the others; for None once
    it has ended, of which `end` is then told."""

    def __init__(self, turns: Turns, company: Company, end: Callable[[], None]) -> None:
        self.turns, self.company, self.end = turns, company, end
        self.waits: Wanted[Any] | Pause | None = Pause()

    def go_on(self, scored: Scored | Exception | None = None) -> None:
        """Resume the answer until it waits again. Its errors are its own: it reports them."""
        self.waits = None
        try:
            if isinstance(scored, Exception):
                self.waits = self.turns.throw(scored)
            else:
                self.waits = self.turns.send(scored)
        except StopIteration:
            self.end()


class Rounds:
    """The answers in progress. Now and then they decode plainly for some rounds, as one alone does
    (engine/drafting/controller.py), and for longer while their drafts do not pay."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.until_rest = FIRST_REST
        """Rounds until the next plain ones."""
        self.rested = 0
        """Rounds since the answers have been told to decode plainly."""
        self.gain: Gain | None = None
        """The balance of drafting with as many answers as there were in the last round."""

    @property
    def paused(self) -> bool:
        """Whether the answers decode plainly because their drafts did not pay."""
        return self.gain is not None and self.gain.backoff > 0

    @property
    def resting(self) -> bool:
        return self.paused or self.until_rest <= 0

    def add(self, member: Member) -> None:
        self.members.append(member)

    def round(self) -> None:
        """Let every answer read a slice of its prompt, or decode one step."""
        reading: dict[Member, float] = {}
        for member in self.members:
            if isinstance(member.waits, Pause):
                clock = perf_counter()
                self.meet(member, ())
                member.go_on()
                reading[member] = perf_counter() - clock
        self.decode(reading)
        self.members = [member for member in self.members if member.waits is not None]

    def decode(self, reading: Mapping[Member, float]) -> None:
        """Compute a forward for all answers that want one, and let them go on. Others have read
        slices of their prompts in so many seconds."""
        together = [member for member in self.members if isinstance(member.waits, Wanted)]
        wanted = [member.waits for member in together if isinstance(member.waits, Wanted)]
        trees, drafted = len(wanted) - 1, sum(len(each.tree) for each in wanted)
        clock = perf_counter()
        found = computed(wanted)
        verify = perf_counter() - clock
        adaptive = (each.company.costs for each in together if each.company.costs is not None)
        costs = next(adaptive, None) if trees > 0 else None
        plain = self.rested > 0 and not drafted
        for member, scored in zip(together, found, strict=True):
            self.meet(member, together)
            member.company.plain_round = (
                None if plain or costs is None else costs.plain_round(trees)
            )
            if isinstance(scored, Scored):
                others = sum(reading.values()) - reading.get(member, 0.0)
                scored = scored._replace(read=others)
            member.go_on(scored)
        if costs is None:
            return
        took = perf_counter() - clock
        steady = self.rested > STEADY
        if drafted or steady:
            costs.observe_together(trees, trees + drafted, verify)
        if plain and steady and all(member.waits is not None for member in together):
            costs.observe_plain(trees, took)
        gained = sum(member.company.gained for member in together) / len(together)
        self.judge(costs, trees, gained - took / costs.plain_round(trees))

    def judge(self, costs: CostCurve, trees: int, saved: float) -> None:
        """Count a round that saved so many plain ones, and decide whether drafting goes on."""
        self.gain = gain = costs.together(trees).gate.gains[DATABASES]
        if trees not in costs.rounds:
            self.until_rest = 0
        if self.resting:
            self.rested += 1
            gain.backoff = max(0, gain.backoff - 1)
            if self.rested > STEADY + COUNTED:
                self.until_rest = REST
        else:
            self.rested = 0
            self.until_rest -= 1
            settle(DATABASES, gain, saved, LEAST)

    def meet(self, member: Member, together: Sequence[Member]) -> None:
        """Tell an answer of those beside it, and of those `together` with it in a forward."""
        company = member.company
        beside = [each.company for each in together if each is not member]
        company.rests, company.paused = self.resting, self.paused
        company.others = len(self.members) - 1
        company.trees = len(beside)
        company.rows = sum(each.own_rows for each in beside)
        company.tokens = sum(each.pace for each in beside)


def computed(wanted: Sequence[Wanted[Any]]) -> Sequence[Scored | Exception]:
    """Compute the forwards of several answers, in one if their model can. If this fails, each of
    them gets the error."""
    if not wanted:
        return ()
    try:
        first = wanted[0].sequence
        if len(wanted) == 1 or not is_batching(first):
            return [score(each) for each in wanted]
        clock = perf_counter()
        scores = first.score_all(wanted)
        seconds = perf_counter() - clock
    except Exception as error:
        return [error] * len(wanted)
    return [Scored(each, seconds) for each in scores]


def take_turns(running: Sequence[Turns]) -> None:
    """Let answers have the model for equal times, TURN seconds each in turn, until all have ended.
    A turn ends where an answer yields a Pause. If one raises an error, all of them end."""
    spent = {Member(turns, Company(), lambda: None): 0.0 for turns in running}
    try:
        while spent:
            member = min(spent, key=lambda each: spent[each])
            clock = perf_counter()
            while wanted := member.waits:
                if isinstance(wanted, Pause) and perf_counter() - clock >= TURN:
                    break
                member.go_on(*computed([wanted] if isinstance(wanted, Wanted) else ()))
            spent[member] += perf_counter() - clock
            if member.waits is None:
                del spent[member]
    finally:
        for member in spent:
            member.turns.close()
