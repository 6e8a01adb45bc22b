"""How much to draft: as long as a node pays (docs/how-it-works.md).

A tree of n nodes is worth E / t(n): the tokens it is expected to emit over the time of its step. A
node of path probability p adds p tokens, so growing on pays while p / E exceeds the relative cost
of a further node. The tree is then cut where its worth was highest: at no node at all when
nothing pays. Without a measured cost curve, a node pays when it is likelier than the threshold.

Looking for drafts takes time as well, and so does learning what they come from. Where that goes on
to cost more than the drafts save, drafting rests for some steps and then tries again; meanwhile
only near databases are glanced at, and they learn no more than costs a hundredth of the time.
"""

from engine.costs import LARGEST, CostCurve
from engine.settings import Drafting
from engine.types import DRAFT, Step


class Budget:
    """The room for one step's tree: `nodes` nodes, `depth` levels, tokens below `vocabulary`.

    `floor` is the least path probability worth considering. `best` is the number of nodes at which
    the tree was worth most so far; `expected` is E, the number of tokens the tree as grown so far
    is expected to emit, its bonus token included. `near` asks for drafts of near databases alone,
    those that are as good as free to look into.
    """

    __slots__ = (
        "best",
        "costs",
        "depth",
        "expected",
        "floor",
        "forced",
        "near",
        "nodes",
        "vocabulary",
        "worth",
    )

    def __init__(
        self, drafting: Drafting, depth: int, vocabulary: int, costs: CostCurve | None = None
    ) -> None:
        self.nodes = min(drafting.nodes, LARGEST) if depth > 0 else 0
        self.depth, self.vocabulary = depth, vocabulary
        self.costs = costs if drafting.budget == "adaptive" else None
        self.floor = drafting.threshold
        self.expected = 1.0
        self.best = 0
        self.worth = 0.0
        self.forced = False
        self.near = False
        if self.costs is not None:
            # Neither of the two ways to step may go unobserved for long.
            if self.costs.idle("plain"):
                self.nodes = 0
            self.forced = self.costs.idle("drafted")
            self.worth = 0.0 if self.forced else 1.0 / self.costs.table[0]
            if not self.forced:
                # No node below this can ever pay, so nothing is looked up for it.
                self.floor = max(self.floor, self.costs.entry)

    def pays(self, size: int, probability: float) -> bool:
        """Whether a tree of `size` nodes should grow by one of that path probability."""
        if size >= self.nodes or probability < self.floor:
            return False
        if self.costs is None or (self.forced and not size):
            return True
        return probability > self.expected * self.costs.slopes[size]

    def added(self, size: int, probability: float) -> None:
        """The tree has `size` nodes now; the last one has that path probability."""
        self.expected += probability
        if self.costs is None:
            self.best = size
            return
        # The larger E, the likelier a node must be to pay; no slope is below the cheapest.
        self.floor = max(self.floor, self.expected * self.costs.cheapest)
        worth = self.expected / self.costs.table[size]
        if worth > self.worth:
            self.worth, self.best = worth, size


CREDIT, AGAIN = 6.0, 1.0
"""Plain steps that drafting may lose before it rests: at most, and after a rest."""
SHORTEST, LONGEST = 16, 512
"""Steps of a rest: the first, and the last after doubling again and again."""
GLANCE = 32
"""In a rest, one step of so many looks into the near databases."""
FIRST = 2
"""The step of an answer that does so first: there are some words to go by."""
SLIGHT = 0.01
"""The share of a rest that learning may take."""
HEARD = 32
"""Tokens whose time to learn counts as much as what was known of it before."""


class Governor:
    """Gives every step of a run its budget, and learns from what came of it.

    What it learns is kept with the costs, and so from answer to answer. A rest is no sleep: now and
    then the near databases are asked, and two of their tokens accepted end the rest. So text that
    was there before is drafted soon, whatever came in between. Draft models alone do not rest, as
    they have a gate of their own: `rests` says so.
    """

    def __init__(
        self,
        drafting: Drafting,
        vocabulary: int,
        costs: CostCurve | None,
        rests: bool = True,
    ) -> None:
        self.drafting, self.vocabulary, self.rests = drafting, vocabulary, rests
        self.costs = costs if drafting.budget == "adaptive" and drafting.nodes else None
        self.steps = 0
        self.resting = self.waited = False

    def budget(self, depth: int) -> Budget:
        """The budget of the next step, whose tree may be `depth` levels deep."""
        resting = self.rests and self.costs is not None and self.costs.trial.rest > 0
        self.waited, self.resting = self.resting or resting, resting
        glance = self.steps % GLANCE == FIRST
        self.steps += 1
        room = 0 if resting and not glance else depth
        budget = Budget(self.drafting, room, self.vocabulary, self.costs)
        budget.near = resting
        return budget

    def lesson(self, new: int) -> int:
        """How many of `new` tokens that were not learned yet are to be learned now: the latest.

        All of them, but of those that were decided in a rest only what takes little of its time.
        """
        if self.costs is None or not self.waited:
            return new
        most = new * SLIGHT * self.costs.seconds(0) / self.costs.trial.lesson
        return min(new, int(most))

    def learned(self, seconds: float, tokens: int) -> None:
        """So many tokens took so long to learn. In a step that drafts, that was also about what
        the drafts were worth, and says nothing of what waits."""
        if self.costs is not None and self.waited:
            trial = self.costs.trial
            trial.lesson += tokens / (tokens + HEARD) * (seconds / tokens - trial.lesson)

    def taught(self, seconds: float, read: int = 0) -> None:
        """A whole text was learned: a prompt with `read` new tokens, or an answer that is over.

        What drafts save pays for that first.
        """
        if self.costs is None or not self.rests:
            return
        trial = self.costs.trial
        trial.owed += seconds / self.costs.seconds(0)
        if read:
            trial.lesson += read / (read + HEARD) * (seconds / read - trial.lesson)

    def observe(self, step: Step, learning: float = 0.0) -> None:
        """A step is over; `learning` is the part of its drafting that was no look-up."""
        if self.costs is None:
            return
        nodes, emitted = sum(step.proposed.values()), len(step.tokens)
        models = sum(s for source, s in step.look_ups.items() if source.startswith(DRAFT))
        # A draft model's time is its own, it says nothing of what a node costs the databases.
        looking = step.draft_seconds - learning - models
        other = step.sample_seconds + step.other_seconds
        self.costs.observe(nodes, step.verify_seconds, looking, learning + other)
        if not self.rests:
            return
        trial = self.costs.trial
        if trial.rest:
            trial.rest = 0 if emitted > 2 else trial.rest - 1
            return
        plain = self.costs.seconds(0)
        saved = emitted - (self.costs.seconds(nodes) + looking + models + learning) / plain
        paid = min(trial.owed, max(saved, 0.0))
        trial.owed, saved = trial.owed - paid, saved - paid
        # One hiccup of the machine must not decide.
        trial.credit = min(trial.credit + max(saved, -1.0), CREDIT)
        if trial.credit >= CREDIT:
            trial.pause = 0
        elif trial.credit < 0:
            trial.pause = min(max(SHORTEST, 2 * trial.pause), LONGEST)
            trial.rest, trial.credit, trial.owed = trial.pause, AGAIN, 0.0
