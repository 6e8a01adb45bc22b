"""A target and its draft models: each verifies the drafts of the model below it, the target last.

A level of the stack is a drafter like any other. To draft, it collects at least `batch` tokens: the
drafter below it proposes, one forward verifies, and the level passes on the tokens that it keeps
and the one that it chooses next (by the rule of the run, engine/verify.py). The lowest level has
no drafter below it, or the databases. Each level proposes exactly what its model alone would have
written, so the level above need not know how the text was produced. This is the recursion
produce(i) of HSD (arXiv 2510.19705).

Invariant: a level's cache holds `cached`, which may differ from the decided tokens only at its end.
The next draft rolls it back, and its forward includes the missing tokens. If reading was cancelled,
the cache is not `valid`, and the level reads again before it drafts.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Generic, Protocol, TypeVar

from engine.backends.base import Backend, BackendInfo, common_prefix
from engine.decode import never
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.costs import CostCurve
from engine.errors import ModelError, SettingError
from engine.hsd.planner import DATABASES, HEAD, Plan, Recursion, best, resolve
from engine.hsd.profile import Profile
from engine.settings import Drafting, Sampling
from engine.tree import Tree
from engine.types import DRAFT, STACK, Rule, Work
from engine.verify import Verifier, Walk, verifier

LAG = 8
"""The most missing tokens of a cache that are computed together with the drafts."""


class LevelDrafter(Drafter):
    """One draft model. `batch` is T_i, the least number of tokens it proposes at a time.

    It draws with the `sampling` of the run, as the target does. All models know the tokens below
    `vocabulary`. `costs` limits the drafts of databases below the level. `cancelled` is the
    cancellation check of the run, which also ends reading.
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
        self.valid = False
        self.rounds: list[int] = []
        """The number of tokens that each round emitted."""

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
        """Add a chain of this model's own tokens: a batch, or as many as there is room for."""
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
        """One round: draft, verify in one forward, append the tokens to chain and context.

        Returns whether nothing can follow: after the end of the answer, or if the next token is
        unknown to another model.
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
        text = [*context, *walk.tokens]
        self.cached = text[:-1]
        if self.below is not None:
            self.below.observe(text, len(walk.tokens))
        self.rounds.append(len(walk.tokens))
        ended = self.link(chain, context, tree, walk)
        seconds = perf_counter() - clock - sum(done.seconds for done in below.values())
        own = {self.source: Work(seconds, 1, len(drafts), len(walk.rows))}
        for source, done in (own | below).items():
            work[source] = work.get(source, Work(0.0)).plus(done)
        return ended

    def drafted(self, context: Sequence[int], room: int) -> tuple[Tree, dict[str, Work]]:
        """The proposal of the drafter below, and the work of the models below.

        The time of databases counts as that of this level, because only the databases of the target
        are accounted for separately.
        """
        drafts = Tree(context[-1])
        if self.below is None:
            return drafts, {}
        budget = Budget(Drafting(), room, self.vocabulary, self.costs)
        work = self.below.grow(drafts, context, budget)
        return drafts, {source: done for source, done in work.items() if source.startswith(DRAFT)}

    def link(self, chain: Tree, context: list[int], tree: Tree, walk: Walk) -> bool:
        row = len(chain)
        for i, token in enumerate(walk.tokens):
            if token >= self.vocabulary:
                return True
            if i < len(walk.rows):
                kept = walk.rows[i]
                row = chain.add(row, token, tree.sources[kept], tree.match_lengths[kept])
            else:
                row = chain.add(row, token, self.source)
            if walk.distributions:
                chain.distributions[row] = walk.distributions[i]
            context.append(token)
            if token in self.backend.info.eos_ids:
                return True
        return False

    def rooted(self, context: Sequence[int]) -> tuple[Tree, int] | None:
        """A tree of the tokens that the cache lacks, and the row of the last token of `context`.

        None if reading was cancelled.
        """
        known = common_prefix(self.cached, context[:-1])
        lacks = not self.valid or len(context) - known > LAG
        read = context if lacks else context[: known + 1]
        if (lacks or known < len(self.cached)) and not self.read(read):
            return None
        tree = Tree(read[-1])
        for row, token in enumerate(context[len(read) :]):
            tree.add(row, token, "")
        return tree, len(tree)

    def read(self, tokens: Sequence[int]) -> bool:
        self.valid = self.backend.prefill(tokens, self.cancelled).complete
        if self.valid:
            self.cached = list(tokens[:-1])
        return self.valid

    def reads(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens fit this model's context, and are all in its vocabulary."""
        info = self.backend.info
        unread = tokens[common_prefix(self.cached, tokens) :]
        return len(tokens) <= info.context_length and max(unread, default=0) < info.vocabulary_size

    def observe(self, tokens: Sequence[int], new: int) -> None:
        """Read a prompt. Tokens that are decided later are read with the next draft."""
        if new == len(tokens):
            if self.reads(tokens):
                self.read(tokens)
            if self.below is not None:
                self.below.observe(tokens, new)

    def finish(self, tokens: Sequence[int], new: int) -> None:
        """Keep nothing of an answer except the cache."""


TRIES = 4
"""The weight of the predicted values, in observed steps."""
MEMORY = 32
"""The number of steps over which estimates average, so that they follow the text."""


class Stack(Drafter):
    """The top level, which drafts when it is expected to draft better than the databases.

    Its draft replaces their nodes in the tree, few of which would be worth their rows in addition.
    `tokens` is the number of tokens that a step with its draft emits, and `seconds` the time of
    drafting: first predicted, then observed. engine/drafting/controller.py decides whether draft
    models pay at all. Without a cost curve the stack drafts only if the tree is empty.
    """

    name = STACK

    def __init__(self, top: LevelDrafter, tokens: float, seconds: float) -> None:
        self.top, self.tokens, self.seconds = top, tokens, seconds
        self.steps = TRIES
        self.drafting = False

    def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
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
        """Whether the stack is expected to emit tokens faster than the drafts in the tree."""
        if not len(tree) or budget.due == STACK:
            return True
        if budget.costs is None:
            return False
        step = self.seconds + budget.costs.table[self.top.batch]
        return self.tokens / step > budget.worth

    def observe(self, tokens: Sequence[int], new: int) -> None:
        if self.drafting:
            self.tokens += (new - self.tokens) / self.steps
            self.drafting = False
        self.top.observe(tokens, new)

    def finish(self, tokens: Sequence[int], new: int) -> None:
        self.top.finish(tokens, new)


UNABLE = "it cannot roll back."


class Described(Protocol):
    """A model as planning sees it."""

    @property
    def info(self) -> BackendInfo:
        """What it is."""


Model = TypeVar("Model", bound=Described)


class Plans(Generic[Model]):
    """The plans for a target and its draft models, by name, the smallest first.

    `profile` is None until the models are profiled; nothing can be planned before.
    """

    def __init__(
        self, target: Model, drafts: Mapping[str, Model], profile: Profile | None = None
    ) -> None:
        self.target, self.profile = target, profile
        self.drafts = dict(sorted(drafts.items(), key=lambda item: item[1].info.parameters))
        self.plans: dict[tuple[str, Rule], Plan] = {}

    def profiled(self) -> Profile:
        if self.profile is None:
            names = ", ".join(self.drafts) or "none"
            raise SettingError(
                f"The draft models ({names}) were not profiled with {self.target.info.name} and "
                "this sampler. Profile them in the Stack tab, or choose another method."
            )
        return self.profile

    @property
    def allowed(self) -> list[str]:
        """The names that plans may use: all, except for a head that was found to cost more than it
        can save on this machine (engine/drafting/ceiling.py)."""
        head = self.target.info.head
        return [*self.drafts, DATABASES, *([] if head and head.expensive else [HEAD])]

    def plan(self, spec: str, rule: Rule) -> Plan:
        """The plan that a text describes (engine/hsd/planner.py); the best plan for an empty
        text."""
        profile, key = self.profiled(), (spec, rule)
        if key not in self.plans:
            found = resolve(profile, spec, rule) if spec else best(profile, rule, self.allowed)
            self.plans[key] = found
        return self.plans[key]

    def check(self, plan: Plan) -> None:
        """Raise SettingError unless every model of the plan is loaded."""
        for level in plan.levels:
            if level.model not in self.drafts:
                raise SettingError(
                    f"The draft model {level.model!r} of the plan {plan} is not loaded. Loaded: "
                    f"{', '.join(self.drafts) or 'none'}. Load it in the Stack tab."
                )


class Family(Plans[Backend]):
    """The plans of loaded models, which creates their drafters. Raises ModelError for a model that
    cannot draft for the target."""

    def __init__(
        self, target: Backend, drafts: Mapping[str, Backend], profile: Profile | None = None
    ) -> None:
        if target.info.name in drafts:
            raise ModelError(
                f"A draft model cannot be called {target.info.name!r}: the target is. Rename its "
                "folder, or make a link of another name."
            )
        for name, draft in drafts.items():
            check_drafts(target, name, draft)
        super().__init__(target, drafts, profile)
        sizes = [model.info.vocabulary_size for model in (target, *drafts.values())]
        self.vocabulary = min(sizes)

    def stack(
        self,
        plan: Plan,
        sampling: Sampling,
        rule: Rule,
        below: Drafter | None,
        cancelled: Callable[[], bool] = never,
    ) -> Stack:
        """The drafter of a plan with at least one level; `below` drafts for the smallest model.

        `cancelled` is the cancellation check of the run. Raises SettingError for a model that is
        not loaded.
        """
        profile, drafter = self.profiled(), below
        self.check(plan)
        for number, level in enumerate(plan.levels, start=1):
            costs = profile.models[profile.index(level.model)].costs
            top = drafter = LevelDrafter(
                level.model,
                self.drafts[level.model],
                level.batch,
                sampling,
                verifier(rule, sampling.seed, number, self.vocabulary),
                self.vocabulary,
                drafter,
                CostCurve(costs),
                cancelled,
            )
        recursion = Recursion(profile, rule)
        emits, _ = recursion.round(plan, len(profile.models) - 1)
        tokens = float(sum(tokens * share for tokens, share in enumerate(emits)))
        return Stack(top, tokens, recursion.proposed(plan)[1])


def check_drafts(target: Backend, name: str, draft: Backend) -> None:
    if not target.info.can_tree:
        raise ModelError(
            f"{target.info.name} cannot verify drafts: {target.info.note or UNABLE} Choose another "
            "model to answer, or do without draft models."
        )
    if not draft.info.can_tree:
        raise ModelError(
            f"{name} cannot draft: {draft.info.note or UNABLE} Choose a model that can, or leave "
            "it out."
        )
    check_vocabulary(target, draft)


def check_vocabulary(target: Backend, draft: Backend) -> None:
    one, other = target.info, draft.info
    if one.tokenizer_fingerprint == other.tokenizer_fingerprint:
        return
    mine, theirs = target.vocabulary(), draft.vocabulary()
    if one.tokenizer_type == other.tokenizer_type and list(mine) == list(theirs):
        return
    reasons = []
    if one.tokenizer_type != other.tokenizer_type:
        reasons.append(f"its tokenizer is {other.tokenizer_type}, not {one.tokenizer_type}")
    if len(mine) != len(theirs):
        reasons.append(f"it has {len(theirs):,} tokens, not {len(mine):,}")
    pairs = enumerate(zip(mine, theirs, strict=False))
    at = next((at for at, (left, right) in pairs if left != right), None)
    if at is not None:
        reasons.append(f"the first token that differs is {at:,}: {theirs[at]!r}, not {mine[at]!r}")
    raise ModelError(
        f"{other.name} cannot draft for {one.name}: {'; '.join(reasons)}. Choose a smaller model "
        "of the same family. The databases draft without one."
    )
