"""The decode loop: draft, verify in one forward, keep the tokens that the target itself chooses.

Lossless by construction: every emitted token is the target's own choice at its position, and that
choice depends on the decided tokens and (seed, position) only (engine/sampling.py). Drafts decide
how many choices one forward can make, never which ones. With no drafters this is the plain run.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from time import perf_counter, thread_time
from typing import Any, NamedTuple, ParamSpec

from engine.backends.base import Backend, Filled, LogitScores, Wanted, is_batching
from engine.constraint import Constraint
from engine.drafting.base import Drafter
from engine.drafting.budget import Budget
from engine.drafting.controller import Company, DraftController, way
from engine.drafting.costs import CostCurve
from engine.errors import PromptError
from engine.prompt import TextStream
from engine.recorded import recorded
from engine.settings import Drafting, Generation
from engine.tree import Tree, graft
from engine.types import (
    DATABASES,
    HEAD,
    SCHEMA,
    TARGET,
    Event,
    Finish,
    Learned,
    Prefill,
    Rule,
    Step,
    Token,
    Work,
)
from engine.verify import verifier


def never() -> bool:
    """The cancellation check of a run that cannot be cancelled."""
    return False


P = ParamSpec("P")


class Scored(NamedTuple):
    """A forward that an answer wanted, and the time of all of it, if other answers share it. Before
    it, slices of other prompts were `read` in so many seconds."""

    scores: LogitScores
    seconds: float
    computing: float = 0.0
    read: float = 0.0


class Pause:
    """An answer that reads a long prompt lets the other answers go on."""


PAUSE = Pause()
LONG_SLICE = 512
"""The tokens of a prompt that are read before other answers may begin."""
Turns = Generator[Wanted[Any] | Pause, Scored | None, None]
"""An answer in progress. It is resumed with the forward that it wanted, or with None."""
Decoding = Generator[Event | Wanted[Any] | Pause, Scored | None, None]
"""The same, together with its events."""


def resumed(running: Decoding, scored: Scored | None) -> Event | Wanted[Any] | Pause | None:
    """What an answer says or wants next; None once it has ended."""
    try:
        return running.send(scored)
    except StopIteration:
        return None


def alone(decoding: Callable[P, Decoding]) -> Callable[P, Iterator[Event]]:
    """The events of an answer that has its model to itself."""

    @wraps(decoding)
    def decode(*args: P.args, **kwargs: P.kwargs) -> Iterator[Event]:
        running = decoding(*args, **kwargs)
        scored: Scored | None = None
        try:
            while (item := resumed(running, scored)) is not None:
                scored = None
                if isinstance(item, Wanted):
                    scored = score(item)
                elif not isinstance(item, Pause):
                    yield item
        finally:
            running.close()

    return decode


def score(wanted: Wanted[Any]) -> Scored:
    """Compute one forward."""
    computing, clock = thread_time(), perf_counter()
    scores = wanted.sequence.score(wanted.tree, wanted.sampling)
    seconds = perf_counter() - clock
    return Scored(scores, seconds, thread_time() - computing)


def relayed(running: Decoding, take: Callable[[Event], None], pauses: bool = False) -> Turns:
    """Give the events of an answer to `take`, and yield the rest; with `pauses` also a Pause after
    every event, where other answers may go on without adding to the time of a step."""
    scored: Scored | None = None
    try:
        while (item := resumed(running, scored)) is not None:
            scored = None
            if isinstance(item, Wanted | Pause):
                scored = yield item
            else:
                take(item)
                if pauses:
                    yield PAUSE
    finally:
        running.close()


def decoding(
    backend: Backend,
    prompt: Sequence[int],
    drafters: Sequence[Drafter],
    generation: Generation,
    drafting: Drafting,
    cancelled: Callable[[], bool] = never,
    costs: CostCurve | None = None,
    text: TextStream | None = None,
    likeliest: int = 0,
    constraint: Constraint | None = None,
    company: Company | None = None,
) -> Decoding:
    """Answer `prompt`, or continue an answer that it ends in, whose text `text` has already
    returned. Yields one Prefill, one Step per target forward, and Learned at the end; before each
    Step the forward that it wants.

    The last Step carries the reason for the end. If it is empty, there is no answer and no Learned
    follows. The drafters learn however the run ends. `costs` limits the drafts, and learns from
    every step that the answer has to itself. `likeliest` is the number of likeliest tokens that are
    reported at each position. `constraint` is the format of the answer, at its place after the
    prompt. Drafts are then verified by equality, whatever the rule of `drafting`, so the text is
    that of plain decoding in this format. `company` are the answers beside it. The time that the
    consumer takes after an event is not counted.
    Raises PromptError if the prompt is empty or leaves no room for an answer.
    """
    tokens, info = list(prompt), backend.info
    answer = Answer(backend, tokens, generation, cancelled, text, likeliest)
    drafters = drafters if info.can_tree else ()
    if info.nodes is not None:
        drafting = replace(drafting, nodes=min(drafting.nodes, info.nodes))
    how = drafting, info.vocabulary_size, costs, info.leaves, company or Company()
    controller = DraftController(drafters, *how)
    if backend.head is not None:
        backend.head.listen(controller.listens)
    pending = PendingTokens(drafters, tokens, controller)
    rule = drafting.rule if constraint is None else "match"
    loop = DecodeLoop(backend, tokens, answer, controller, pending, rule, constraint)
    try:
        yield (yield from loop.prefill())
        while answer.finish is None:
            step = yield from loop.step()
            yield step
            if not step.tokens:
                return
    finally:
        clock = perf_counter()
        loop.observe()
        controller.wake()
        pending.finish(len(tokens) - len(prompt))
        learned = perf_counter() - clock
    yield Learned(learned)


decode = alone(decoding)


class DecodeLoop:
    """One answer in progress. `tokens` are all decided tokens, the prompt first."""

    def __init__(
        self,
        backend: Backend,
        tokens: list[int],
        answer: "Answer",
        controller: DraftController,
        pending: "PendingTokens",
        rule: Rule,
        constraint: Constraint | None = None,
    ) -> None:
        self.backend, self.tokens, self.answer = backend, tokens, answer
        self.controller, self.pending, self.constraint = controller, pending, constraint
        self.verifier = verifier(rule, answer.sampling.seed, 0, backend.info.vocabulary_size)
        self.filled = Filled(0, False)
        self.index = 0
        self.finished: tuple[Step, float, float, int, float | None] | None = None
        """The last step as `DraftController.observe` takes it, until that has been called."""

    def prefill(self) -> Generator[Pause, None, Prefill]:
        """Read the prompt: as a whole, or in slices."""
        clock = perf_counter()
        self.filled = self.read()
        reused, cancelled = self.filled.reused, self.answer.cancelled
        while self.controller.company.open and not (self.filled.complete or cancelled()):
            yield PAUSE
            self.filled = self.read()
        self.filled = self.filled._replace(reused=reused)
        read, length = perf_counter(), len(self.tokens)
        self.controller.reach(length)
        if self.filled.complete:
            self.pending.read(length - reused)
        return Prefill(length, reused, perf_counter() - clock, read - clock)

    def read(self) -> Filled:
        """Read the prompt, or the next slice of it if other answers may come in between."""
        backend, cancelled, company = self.backend, self.answer.cancelled, self.controller.company
        if company.open and is_batching(backend):
            most = backend.slice_size if company.others else LONG_SLICE
            return backend.prefill(self.tokens, cancelled, most)
        return backend.prefill(self.tokens, cancelled)

    def step(self) -> Generator[Wanted[Backend], Scored, Step]:
        """Draft, verify in one forward, and keep the tokens that the target chooses. Returns an
        empty Step if the run was cancelled before anything was decided."""
        backend, tokens, cancelled = self.backend, self.tokens, self.answer.cancelled
        controller, began = self.controller, perf_counter()
        self.observe()
        observed = perf_counter()
        again = self.filled.limit is not None and len(tokens) > self.filled.limit
        if again:
            self.filled = backend.prefill(tokens, cancelled)
        read = perf_counter()
        # An incomplete prefill decides nothing, even if `cancelled` is false by now.
        if not self.filled.complete or (not self.index and cancelled()):
            return Step(self.index, (), finish="cancelled")
        controller.reach(len(tokens), backend.unread)
        depth = depth_of(backend, len(tokens), self.answer.limit)
        budget, active = controller.plan(depth)
        if controller.learns(budget):
            self.pending.learn()
        learned = perf_counter()
        tree, work = self.draft(active, budget, depth)
        if backend.head is not None:
            backend.head.listen(controller.listens)
        drafted = perf_counter()
        scored = yield Wanted(backend, tree, self.answer.sampling)
        company = controller.company.others
        # In company, an answer also waits while the others draft and take their tokens.
        waited = perf_counter() - drafted - scored.seconds if company else 0.0
        found, settling = self.settle(tree, work, scored.scores, drafted + waited)
        found["draft_seconds"] = drafted - began
        found["other_seconds"] += waited
        refilled, emitted = read - observed + scored.read, len(found["tokens"])
        plain = controller.plain_seconds(len(tree), emitted, found, refilled)
        step = Step(self.index, **found, plain_seconds=plain, beside=controller.company.trees)
        controller.company.took(len(tree) + 1, emitted)
        if not again and not company:
            alone = scored.computing if backend.info.computes_alone else None
            self.finished = step, learned - read, settling, backend.unread, alone
        self.index += 1
        return step

    def settle(
        self, tree: Tree, work: Mapping[str, Work], scores: LogitScores, drafted: float
    ) -> tuple[dict[str, Any], float]:
        """Keep the tokens that the target chooses. Returns the fields of the Step that this tells,
        with the time since `drafted`, and the seconds in which the cache was settled."""
        backend, tokens, answer = self.backend, self.tokens, self.answer
        if self.constraint is not None:
            scores = self.constraint.scores(tree, scores, answer.sampling)
        scored = perf_counter()
        rows, chosen, _ = self.verifier.walk(tree, scores)
        emitted = answer.emit(tree, scores, rows, chosen, len(tokens))
        sampled = perf_counter()
        backend.accept(rows[: len(emitted) - 1])
        accepted = perf_counter()
        tokens += chosen[: len(emitted)]
        self.pending.add(len(emitted))
        if self.constraint is not None and answer.finish is None:
            self.constraint.advance(chosen[: len(emitted)])
        counts = count(tree, rows[: len(emitted)], work)
        found: dict[str, Any] = {
            "tokens": tuple(emitted),
            "finish": answer.finish,
            "tree": recorded(tree, scores, rows[: len(emitted)]),
            "verify_seconds": scored - drafted,
            "sample_seconds": sampled - scored,
            "other_seconds": perf_counter() - sampled,
        }
        return counts | found, accepted - sampled

    def observe(self) -> None:
        """Let the controller learn from the step before. This is part of the next step, so that its
        time counts as well."""
        if self.finished is not None:
            self.controller.observe(*self.finished)
            self.finished = None

    def draft(
        self, active: Sequence[Drafter], budget: Budget, depth: int
    ) -> tuple[Tree, dict[str, Work]]:
        """A tree that the model can verify and the format allows, and the work of each source.

        While drafting pauses, only what the format demands is drafted.
        """
        constraint, leaves = self.constraint, self.backend.info.leaves
        if constraint is None:
            tree, work = draft(active, self.tokens, budget)
            return tree.within(leaves, budget.depth), work
        constraint.look(self.tokens)
        tree, work = draft(active, self.tokens, budget)
        tree = constraint.pruned(tree).within(leaves, budget.depth)
        if self.controller.paused and not len(tree):
            demanded = constraint.here.demanded[:depth]
            graft(tree, demanded, SCHEMA, 0, self.controller.paying(len(demanded)))
        return tree, work


def depth_of(backend: Backend, length: int, limit: int) -> int:
    """The greatest depth of a tree after `length` tokens: with the bonus token it stays within
    `limit`, and within the model's own depth limit."""
    own = backend.depth_limit(length)
    return limit - length - 1 if own is None else min(limit - length - 1, own)


class PendingTokens:
    """The last `new` decided tokens, which the drafters have not learned yet. During a back-off
    their number grows until the drafters are used again. The controller receives the time of
    learning."""

    def __init__(
        self, drafters: Sequence[Drafter], tokens: Sequence[int], controller: DraftController
    ) -> None:
        self.drafters, self.tokens, self.controller = drafters, tokens, controller
        self.new = 0

    def read(self, fresh: int) -> None:
        """Let the drafters learn the prompt, whose last `fresh` tokens are new.

        Draft models and heads that back off do not read it before they draft.
        """
        readers = [
            drafter
            for drafter in self.drafters
            if way(drafter) == DATABASES or not self.controller.backing_off(way(drafter))
        ]
        seconds = self.timed(lambda d: d.observe(self.tokens, len(self.tokens)), readers)
        self.controller.read(seconds, fresh)

    def add(self, new: int) -> None:
        self.new += new

    def learn(self) -> None:
        """Let the drafters learn these tokens, or as many of the last as the controller allows."""
        new = self.controller.learnable(self.new)
        if new:
            seconds = self.timed(lambda d: d.observe(self.tokens, new), self.drafters)
            self.controller.learned(seconds.get(DATABASES, 0.0), new)
        self.new = 0

    def finish(self, new: int) -> None:
        """Let the drafters keep the answer, the last `new` tokens."""
        self.learn()
        self.controller.charge(self.timed(lambda d: d.finish(self.tokens, new), self.drafters))

    def timed(
        self, work: Callable[[Drafter], None], drafters: Sequence[Drafter]
    ) -> dict[str, float]:
        """Call `work` for some drafters; returns the seconds for each way to draft."""
        seconds: dict[str, float] = {}
        for drafter in drafters:
            clock = perf_counter()
            work(drafter)
            spent = perf_counter() - clock
            seconds[way(drafter)] = seconds.get(way(drafter), 0.0) + spent
        return seconds


def draft(
    drafters: Sequence[Drafter], tokens: Sequence[int], budget: Budget
) -> tuple[Tree, dict[str, Work]]:
    """A tree of possible continuations, and the work of each source for it.

    One drafter after the other grows the tree as long as there is room, the fastest first.
    """
    tree = Tree(tokens[-1])
    work: dict[str, Work] = {}
    for drafter in drafters:
        if len(tree) >= budget.nodes and drafter.name != HEAD:
            continue  # A head grows the tree again.
        for source, done in drafter.grow(tree, tokens, budget).items():
            work[source] = done.plus(work.get(source, Work(0.0)))
    return tree, work


class Answer:
    """Decides where an answer ends: end token, stop string, length, context, or the user."""

    def __init__(
        self,
        backend: Backend,
        prompt: Sequence[int],
        generation: Generation,
        cancelled: Callable[[], bool],
        text: TextStream | None = None,
        likeliest: int = 0,
    ) -> None:
        context = backend.info.context_length
        if not prompt:
            raise PromptError("The prompt is empty. Write a message first.")
        if len(prompt) >= context:
            raise PromptError(
                f"The prompt has {len(prompt):,} tokens, and {backend.info.name} reads at most "
                f"{context:,} with the answer. Shorten it."
            )
        self.eos_ids = backend.info.eos_ids
        self.text = text or TextStream(backend.detokenize, generation.stop)
        self.sampling = generation.sampling
        self.cancelled, self.likeliest = cancelled, likeliest
        self.limit = min(len(prompt) + generation.max_tokens, context)
        self.at_limit: Finish = "context" if self.limit == context else "length"
        self.finish: Finish | None = None

    def emit(
        self, tree: Tree, scores: LogitScores, rows: list[int], chosen: list[int], start: int
    ) -> list[Token]:
        """The tokens of one step up to where the answer ends; sets `finish` when it does.

        `chosen[i]` follows `rows[i - 1]` (the root for i = 0) and sits at position `start` + i.
        """
        emitted: list[Token] = []
        for i, token in enumerate(chosen):
            before, begins = rows[i - 1] if i else 0, self.text.length
            piece, stopped = ("", False) if token in self.eos_ids else self.text.push(token)
            if token in self.eos_ids:
                self.finish = "eos"
            elif stopped:
                self.finish = "stop"
            elif start + i + 1 >= self.limit:
                self.finish = self.at_limit
            elif i == len(chosen) - 1 and self.cancelled():
                self.finish = "cancelled"
            if self.finish is not None and self.finish != "stop":
                piece += self.text.flush()
            drafted = i < len(rows)
            emitted.append(
                Token(
                    token,
                    start + i,
                    tree.sources[rows[i]] if drafted else TARGET,
                    tree.match_lengths[rows[i]] if drafted else 0,
                    piece,
                    scores.probability(before, token),
                    tuple(scores.likeliest(before, self.likeliest)) if self.likeliest else (),
                    begins,
                )
            )
            if self.finish is not None:
                break
        return emitted


def count(tree: Tree, accepted: Sequence[int], work: Mapping[str, Work]) -> dict[str, Any]:
    """The counters of a Step: nodes per source and per depth, and the work of the sources."""
    if not tree and not work:
        return {}
    spent = {
        "look_ups": {source: done.seconds for source, done in work.items()},
        "levels": {source: done[1:] for source, done in work.items() if done.forwards},
    }
    if not tree:
        return spent
    proposed_at, accepted_at = Counter(tree.depths[1:]), Counter(tree.depths[r] for r in accepted)
    return spent | {
        "proposed": dict(Counter(tree.sources[1:])),
        "accepted": dict(Counter(tree.sources[row] for row in accepted)),
        "by_depth": tuple((proposed_at[d], accepted_at[d]) for d in sorted(proposed_at)),
    }
