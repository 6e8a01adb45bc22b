"""Several answers at once: in every round each answer gets one forward, and all share it.

An answer is a generator (`Turns` in engine/decode.py). It goes on until it wants a forward over its
tree. Once all have come so far, the rows of all are computed together, and each takes its tokens
and drafts again. An answer that reads a long prompt reads a slice of it in each round, so it
delays the others by no more than that. Answers join and leave between rounds.

Everything happens on the thread that runs the model.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from engine.backends.base import Batching, Wanted
from engine.decode import Pause, Scored, Turns, score
from engine.drafting.controller import Company
from engine.drafting.costs import COUNTED, STEADY

FIRST_REST, REST = 8, 256
"""The rounds until the first plain ones, and between those and the next."""


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
    (engine/drafting/controller.py)."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.number, self.rest = 0, FIRST_REST
        """The number of the round, and that in which the next plain rounds begin."""

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
        together = [member for member in self.members if isinstance(member.waits, Wanted)]
        wanted = [member.waits for member in together if isinstance(member.waits, Wanted)]
        plain = self.number - self.rest
        learner = next((member for member in together if member.company.learn), None)
        for member, scored in zip(together, computed(wanted), strict=True):
            self.meet(member, together)
            # What was drafted for this round was said in the one before it.
            member.company.counts = member is learner and not 0 < plain <= STEADY
            member.company.rests = 0 <= plain < STEADY + COUNTED
            if isinstance(scored, Scored):
                others = sum(reading.values()) - reading.get(member, 0.0)
                scored = scored._replace(read=others)
            member.go_on(scored)
        self.members = [member for member in self.members if member.waits is not None]
        self.number += 1
        if plain == STEADY + COUNTED:
            self.rest = self.number + REST

    def meet(self, member: Member, together: Sequence[Member]) -> None:
        """Tell an answer of those beside it, and of those `together` with it in a forward."""
        company = member.company
        beside = [each.company for each in together if each is not member]
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
        if len(wanted) == 1 or not isinstance(first, Batching):
            return [score(each) for each in wanted]
        clock = perf_counter()
        scores = first.score_all(wanted)
        seconds = perf_counter() - clock
    except Exception as error:
        return [error] * len(wanted)
    return [Scored(each, seconds) for each in scores]


def run_alone(turns: Turns) -> None:
    """Run an answer to its end, with forwards of its own."""
    member = Member(turns, Company(), lambda: None)
    while member.waits is not None:
        wanted = [member.waits] if isinstance(member.waits, Wanted) else []
        member.go_on(next(iter(computed(wanted)), None))
