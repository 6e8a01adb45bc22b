"""Draft models in a stack: each verifies what the one below it drafts, the target verifies last.

A level is a drafter like any other. Asked for a draft, it gathers at least `batch` tokens: its own
drafter below proposes, one forward verifies, what it keeps and what it says next are its own (by
the rule of the run, engine/verify.py). The lowest has nobody below it, or the databases. So what a
level proposes is just what its model alone would have said, and the level above need not know how
it came about: the recursion produce(i) of HSD (arXiv 2510.19705).

Invariant: a level's cache holds `cached`, which may differ from the decided tokens in its end only.
It is rolled back when the level is next asked, and what it lacks goes into the same forward. Where
reading was cancelled it is not `held`, and the level reads again before it drafts.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from engine.backends.base import Backend, common_prefix
from engine.decode import never
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.costs import CostCurve
from engine.settings import Drafting, Sampling
from engine.tree import Tree
from engine.types import DRAFT, STACK, Work
from engine.verify import Verifier, Walk

LAG = 8
"""Up to so many tokens that a cache lacks are computed together with the drafts."""


class LevelDrafter:
    """One draft model. `batch` is T_i, the least number of tokens it proposes at a time.

    `sampling` is its own sampler; with the rule "match" drafts are accepted more often the more it
    resembles the target's. Tokens from `vocabulary` on are not known to all models. `costs` bounds
    what databases below it draft. `cancelled` is the run's: it ends reading as well.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        batch: int,
        sampling: Sampling,
        rule: Verifier,
        vocabulary: int,
        below: Drafter | None = None,
        costs: CostCurve | None = None,
        cancelled: Callable[[], bool] = never,
    ) -> None:
        self.name, self.source = name, DRAFT + name
        self.backend, self.batch, self.sampling, self.rule = backend, batch, sampling, rule
        self.vocabulary, self.below, self.costs = vocabulary, below, costs
        self.cancelled = cancelled
        self.cached: list[int] = []
        self.held = False
        self.rounds: list[int] = []
        """The tokens that each round emitted."""

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Add a chain of this model's own tokens: a batch, or what there is room for."""
        context_left = self.backend.info.context_length - len(tokens) - 1
        own = self.backend.depth_limit(len(tokens))
        room = min(budget.depth, budget.nodes - len(tree), context_left)
        room = max(0, room if own is None else min(room, own))
        if not self.reads(tokens):
            room = 0
        chain, context, work = Tree(tokens[-1]), list(tokens), {self.source: Work(0.0)}
        ended = False
        while len(chain) < min(self.batch, room) and not ended:
            ended = self.extend(chain, context, room - len(chain), work)
        chain.cut(room)
        tree.attach(0, chain)
        return work

    def extend(self, chain: Tree, context: list[int], room: int, work: dict[str, Work]) -> bool:
        """One round: draft, verify in one forward, put what is said behind chain and context.

        True when nothing can follow: the end of the answer, or a token that others do not know.
        """
        clock = perf_counter()
        rooted = self.rooted(context)
        if rooted is None:
            return True
        tree, start = rooted
        drafts, below = self.drafted(context, room)
        tree.attach(start, drafts.within(self.backend.info.leaves))
        scores = self.backend.score(tree, self.sampling)
        walk = self.rule.walk(tree, scores, start)
        self.backend.accept([*range(1, start + 1), *walk.rows])
        said = [*context, *walk.tokens]
        self.cached = said[:-1]
        if self.below is not None:
            self.below.observe(said, len(walk.tokens))
        self.rounds.append(len(walk.tokens))
        ended = self.link(chain, context, tree, walk)
        add(work, below)
        seconds = perf_counter() - clock - sum(done.seconds for done in below.values())
        add(work, {self.source: Work(seconds, 1, len(drafts), len(walk.rows))})
        return ended

    def drafted(self, context: Sequence[int], room: int) -> tuple[Tree, Mapping[str, Work]]:
        """What the drafter below proposes, and what the models below did for it.

        What databases took counts as this level's: the target's own have their own account.
        """
        drafts = Tree(context[-1])
        if self.below is None:
            return drafts, {}
        budget = Budget(Drafting(), room, self.vocabulary, self.costs)
        work = self.below.grow(drafts, context, budget)
        return drafts, {source: done for source, done in work.items() if source.startswith(DRAFT)}

    def link(self, chain: Tree, context: list[int], tree: Tree, walk: Walk) -> bool:
        """Put the tokens of a walk behind chain and context; whether that is the end of both."""
        row = len(chain)
        for i, token in enumerate(walk.tokens):
            if token >= self.vocabulary:
                return True
            if i < len(walk.rows):
                kept = walk.rows[i]
                row = chain.add(row, token, tree.sources[kept], tree.match_lengths[kept])
            else:
                row = chain.add(row, token, self.source)
            if walk.laws:
                chain.laws[row] = walk.laws[i]
            context.append(token)
            if token in self.backend.info.eos_ids:
                return True
        return False

    def rooted(self, context: Sequence[int]) -> tuple[Tree, int] | None:
        """A tree of the tokens that the cache lacks, and the row of the last one of `context`.

        None when reading them was cancelled.
        """
        known = common_prefix(self.cached, context[:-1])
        lacks = not self.held or len(context) - known > LAG
        read = context if lacks else context[: known + 1]
        if (lacks or known < len(self.cached)) and not self.read(read):
            return None
        tree = Tree(read[-1])
        for row, token in enumerate(context[len(read) :]):
            tree.add(row, token, "")
        return tree, len(tree)

    def read(self, tokens: Sequence[int]) -> bool:
        """Have the cache hold all of `tokens` but the last; whether it does."""
        self.held = self.backend.prefill(tokens, self.cancelled).complete
        if self.held:
            self.cached = list(tokens[:-1])
        return self.held

    def reads(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens fit this model's context, and are all in its vocabulary."""
        info = self.backend.info
        unread = tokens[common_prefix(self.cached, tokens) :]
        return len(tokens) <= info.context_length and max(unread, default=0) < info.vocabulary_size

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Read a prompt; what is decided later is read with the next draft."""
        if new == len(tokens):
            if self.reads(tokens):
                self.read(tokens)
            if self.below is not None:
                self.below.observe(tokens, new)

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept of an answer but what the cache holds."""


def add(work: dict[str, Work], more: Mapping[str, Work]) -> None:
    """Add up what sources did."""
    for source, done in more.items():
        work[source] = work.get(source, Work(0.0)).plus(done)


TRIES = 4
"""What a prediction is worth, in observed steps."""
MEMORY = 32
"""Older steps fade, so that the estimate follows the text."""


class Stack:
    """The top level, which drafts where the databases do not draft better.

    What they have put into the tree before is then dropped, as few of its nodes would be worth
    their rows beside the stack's own. `tokens` and `seconds` are what a step with a draft emits and
    what drafting it takes: predicted at first, then observed. Whether draft models pay at all is
    for engine/drafting/controller.py to say. Without a cost curve the stack drafts where nobody
    else did.
    """

    name = STACK

    def __init__(self, top: LevelDrafter, tokens: float, seconds: float) -> None:
        self.top, self.tokens, self.seconds = top, tokens, seconds
        self.steps = TRIES
        self.drafting = False

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Let the top level draft, unless others are better at it here."""
        self.drafting = self.leads(tree, budget)
        if not self.drafting:
            return {}
        chain, clock = Tree(tokens[-1]), perf_counter()
        work = self.top.grow(chain, tokens, budget)
        self.drafting = len(chain) > 0
        if self.drafting:
            tree.cut(0)
            tree.attach(0, chain)
            self.steps = min(self.steps + 1, MEMORY)
            self.seconds += (perf_counter() - clock - self.seconds) / self.steps
        return work

    def leads(self, tree: Tree, budget: Budget) -> bool:
        """Whether tokens come faster with the stack than with the drafts that are there."""
        if not len(tree) or budget.due == STACK:
            return True
        if budget.costs is None:
            return False
        step = self.seconds + budget.costs.table[self.top.batch]
        return self.tokens / step > budget.worth

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Learn what the draft was worth."""
        if self.drafting:
            self.tokens += (new - self.tokens) / self.steps
            self.drafting = False
        self.top.observe(tokens, new)

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Nothing is kept."""
        self.top.finish(tokens, new)
