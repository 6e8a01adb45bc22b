"""Prove it: plain decoding measured against drafting. Compare: any two ways to answer.

Both decode in the same pairs of runs (app/service/comparison.py).

Answers can also be proved in the background, while no other request needs the model
(engine/queue.py). A proof that is stopped for one begins again later. The outcome is stored with
the answer's run. Waiting proofs are forgotten when the program ends, as the prompt of an answer is
not stored.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Any

from app.service.comparison import LEFT, RIGHT, Pairs, Progress, Proof, Race, Side, differs
from app.service.core import Core
from app.service.history import FinishedAnswer
from app.service.jobs import Task
from app.service.model_swap import Swap
from app.service.preferences import Preferences
from engine.backends.base import BackendInfo
from engine.compare import UNKNOWN, Reruns, reruns
from engine.engine import Measured, Request, Started
from engine.errors import Cancelled, EngineDied, ModelError, PromptError, StrataError
from engine.methods import PLAIN
from engine.metrics import summarise
from engine.queue import Waiting
from engine.runs import PlainSpeed, Verdict, verdict, worth
from engine.settings import Generation
from engine.types import Message, Run
from storage.conversations import Conversations
from storage.traces import Traces

ELSEWHERE = (
    "This answer came from a server, whose text cannot be proved here. The Compare tab asks it "
    "with and without drafts."
)
PROOFS, FEWEST_PROOFS = 31, 5
"""The most pairs of a proof, and the fewest before it may end because they agree."""
ENOUGH = 8.0
"""Seconds of pairs after which a proof ends with an odd number of them, so that one is in the
middle; after twice as many it ends in any case. On a machine that does other work, a pair of short
runs may be off by ten per cent; the median of many pairs is not."""
NARROW = 0.03
"""The pairs agree if the range of their median is at most this share of it."""


@dataclass(frozen=True, slots=True)
class Proofs:
    core: Core

    def prove(self, owner: str, conversation_id: str) -> Iterator[Proof | Waiting]:
        """Decode the last answer of a conversation again, plainly and with drafts, from the same
        prompt and seed.

        The verdict compares the shown answer with the plain run, which has the same limit; an
        answer that the user stopped can only be the beginning of the plain run. The speedup is
        measured on the reruns, at the same load of the machine, with drafters that have not learned
        this answer. Raises PromptError if the loaded model gave no answer, or if the proof was
        stopped.
        """
        with self.core.tasks.begin(owner, conversation_id) as task:
            yield from self.core.model_swap.gate(task)
            finished = self.core.history.provable(owner, conversation_id)
            if finished is not None and finished.info.server is not None:
                raise PromptError(ELSEWHERE)
            if finished is None or finished.info != self.core.current.info:
                raise PromptError(
                    "There is no answer to prove since the program started. Send a message or "
                    "regenerate an answer first."
                )
            progress: Progress | None = None
            for item in self.reruns(owner, finished, task):
                if isinstance(item, Waiting):
                    yield item
                    continue
                progress = item
                if progress.running is not None:
                    run, pair = progress.running, len(progress.pairs) + 1
                    yield Proof(len(run.tokens), run.method, pair=pair)
        if progress is None or not progress.over:
            raise PromptError("The proof was stopped. Press Prove it to try again.")
        yield self.proof_of(owner, finished, progress)

    def reruns(
        self, owner: str, finished: FinishedAnswer, task: Task, background: bool = False
    ) -> Iterator[Progress | Waiting]:
        """Decode an answer again, plainly and with drafters that do not know it, in pairs."""
        shown, generation = finished.run, finished.generation
        tokens = tuple(token.id for token in shown.tokens)
        if shown.broken_off:
            generation = replace(generation, max_tokens=max(1, len(tokens)))
        request = Request(
            (),
            finished.prompt,
            generation,
            finished.method,
            None,
            owner,
            prediction=finished.prediction,
            background=background,
        )
        known = (*finished.prompt, *tokens)
        measured = Measured(known, len(tokens), finished.conversation, finished.calibration)
        pairs = self.pairs(plain_and(request), measured, task, finished.info)
        return pairs.compare(PROOFS, agreed(finished))

    def proof_of(self, owner: str, finished: FinishedAnswer, progress: Progress) -> Proof:
        found = reruns_of(finished, progress.pairs)
        shown, (plain, fast) = finished.run, progress.pairs[found.middle]
        speed = summarise(plain).tokens_per_second
        self.core.current.plain = PlainSpeed(speed, "by the last proof")
        if finished.run_id:
            self.core.history.note(owner, finished.run_id, found.speedup)
        return Proof(
            len(plain.tokens),
            finished.method.name,
            verdict(self.core.current.text, plain, shown),
            found,
            plain,
            fast,
            shown,
            finished.same_text,
        )

    def compare_sides(
        self, owner: str, text: str, system: str, sides: tuple[Side, Side], repeats: int
    ) -> Iterator[Progress | Waiting]:
        """Answer one prompt in two ways, in pairs, until the comparison is stopped.

        Every run has a fresh context tier, and is stored with its pair. Other tasks may use the
        model between two runs; raises ModelError if it was replaced meanwhile. If the comparison is
        stopped while it waits, it ends with the finished pairs. If a side needs another model, the
        loaded model is loaded again in any case when the comparison ends.
        """
        messages = asked(text, system)
        with self.core.tasks.begin(owner, "") as task:
            self.core.model_swap.check(sides)
            yield from self.core.revival.loaded(task)
            left, right = sides
            sides = self.core.model_swap.named(left), self.core.model_swap.named(right)
            check_switch(self.core.engine.state.info, sides)
            if not any(side.source for side in sides):
                yield from self.compared(owner, messages, sides, repeats, task)
                return
            with self.core.model_swap.start(task) as swap:
                yield from self.compared(owner, messages, sides, repeats, task, swap)
            yield from self.core.model_swap.awaited()

    def race(
        self, owner: str, text: str, system: str, sides: tuple[Side, Side]
    ) -> Iterator[Race | Waiting]:
        """Answer one prompt in two ways at once. Nothing of it is kept, as its times are not those
        of answers that have the machine to themselves. Raises PromptError for sides with another
        model than the loaded one."""
        with self.core.tasks.begin(owner, "") as task:
            yield from self.core.revival.loaded(task)
            left, right = sides
            sides = self.core.model_swap.named(left), self.core.model_swap.named(right)
            if any(side.source for side in sides):
                raise PromptError(
                    "Both sides of a race use the loaded model. Choose it for both, or press "
                    "Compare, which loads one model after the other."
                )
            yield from self.pairs_of(owner, asked(text, system), sides, task).race()

    def compared(
        self,
        owner: str,
        messages: Sequence[Message],
        sides: tuple[Side, Side],
        repeats: int,
        task: Task,
        swap: Swap | None = None,
    ) -> Iterator[Progress | Waiting]:
        """The pairs of a comparison, stored as they are finished."""
        pairs = self.pairs_of(owner, messages, sides, task)
        if swap is not None:
            pairs.swap = lambda side: swap.use(sides[side].source)
        progress: Progress | None = None
        for item in pairs.compare(repeats):
            yield item
            if isinstance(item, Waiting):
                continue
            progress = item
            if progress.running is None and not progress.cancelled:
                self.keep(owner, sides, progress)
        for at, side in enumerate(sides):
            if progress and progress.pairs and side.method == PLAIN and not side.source:
                speed = summarise(progress.pairs[progress.middle][at]).tokens_per_second
                self.core.current.plain = PlainSpeed(speed, "in the last comparison")

    def pairs_of(
        self, owner: str, messages: Sequence[Message], sides: tuple[Side, Side], task: Task
    ) -> Pairs:
        """Pairs of runs of two sides.

        The drafters do not know the last answer to the same prompt, so a comparison after a chat
        shows what drafting gains for a first answer.
        """

        def exclude(started: Started) -> Measured:
            for (user, conversation), last in reversed(self.core.history.last.items()):
                if (user, last.prompt, last.info) == (owner, started.prompt, started.info):
                    tokens = tuple(token.id for token in last.run.tokens)
                    known = (*last.prompt, *tokens)
                    return Measured(known, len(tokens), conversation, last.calibration)
            return Measured()

        tools = self.core.tool_servers.offered()
        left, right = (
            Request(tuple(messages), (), side.generation, side.method, None, owner, tools=tools)
            for side in sides
        )
        pairs = self.pairs((left, right), exclude, task)
        pairs.differs, pairs.foreign = differs(*sides), all(side.source for side in sides)
        return pairs

    def keep(self, owner: str, sides: tuple[Side, Side], progress: Progress) -> None:
        pair, gained = progress.pairs[-1], None
        if not progress.differs and PLAIN in (sides[LEFT].method, sides[RIGHT].method):
            pair = pair if sides[LEFT].method == PLAIN else (pair[RIGHT], pair[LEFT])
            gained = worth([pair])
        self.core.history.save_runs(owner, *pair, gained=gained)

    def first_answers(self, owner: str, prompt: str, tokens: int, task: Task) -> Pairs:
        """Pairs of answers to a prompt of at most so many tokens, plain and by the default method,
        which know of nothing. They have a new seed, and the sampler that the model's makers
        recommend."""
        chosen = Preferences(Generation(self.core.current.info.sampling, tokens))
        message = Message("user", prompt)
        request = Request((message,), (), chosen.seeded(), chosen.chosen(), None, owner)
        return self.pairs(plain_and(request), Measured(), task)

    def pairs(
        self,
        requests: tuple[Request, Request],
        measured: Measured | Callable[[Started], Measured],
        task: Task,
        info: BackendInfo | None = None,
    ) -> Pairs:
        """Pairs of runs of two requests, by the model of `info` or the loaded one. They are stopped
        with `task`."""
        report = partial(self.core.notices.report, requests[RIGHT].owner)
        profile = self.core.stacks.profile_for
        return Pairs(self.core.engine, requests, measured, report, task.stop, info, profile)


def asked(text: str, system: str) -> list[Message]:
    """The messages of a prompt, with a system prompt unless that is empty."""
    before = [Message("system", system.strip())] if system.strip() else []
    return [*before, Message("user", text)]


def plain_and(request: Request) -> tuple[Request, Request]:
    return replace(request, method=PLAIN), request


def reruns_of(finished: FinishedAnswer, pairs: Sequence[tuple[Run, Run]]) -> Reruns:
    metrics = [(summarise(plain), summarise(fast)) for plain, fast in pairs]
    return reruns(metrics, summarise(finished.run))


def agreed(finished: FinishedAnswer) -> Callable[[Sequence[tuple[Run, Run]], float], bool]:
    """A function that says whether pairs of reruns are enough: they took long, they agree, or no
    further pair could measure a speedup."""

    def enough(pairs: Sequence[tuple[Run, Run]], seconds: float) -> bool:
        if seconds >= ENOUGH:
            return len(pairs) % 2 == 1 or seconds >= 2 * ENOUGH
        if len(pairs) < FEWEST_PROOFS:
            return False
        found = reruns_of(finished, pairs)
        low, high = found.range
        return found.speedup == UNKNOWN or high - low <= NARROW * low

    return enough


def check_switch(info: BackendInfo, sides: tuple[Side, Side]) -> None:
    """Raise PromptError for two sides that are the same to a server, because it cannot be asked to
    answer without drafts."""
    server = info.server
    methods = {side.method == PLAIN for side in sides if not side.source}
    if server is not None and not server.switches and len(methods) > 1:
        raise PromptError(
            f"{server.host} cannot be asked to answer without drafts. Start the same server "
            "without drafting at a second address, load that once in the Models tab, and choose "
            "it as the model of the left side."
        )


MOST = 16
"""The most answers that wait to be proved; beyond that the oldest ones are dropped."""
TRIES = 20
"""How often a proof may be interrupted before it is given up."""

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Check:
    """An answer to be proved. Its task is not among the owner's tasks, as nobody waits for it."""

    finished: FinishedAnswer
    run_id: str
    task: Task


class Background:
    """Proves answers in the background, on one thread that ends when none is left."""

    def __init__(self, proofs: Proofs) -> None:
        self.proofs, self.core = proofs, proofs.core
        self.checks: deque[Check] = deque()
        self.running: Check | None = None
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def add(self, owner: str, conversation: str, finished: FinishedAnswer) -> None:
        """Schedule the proof of an answer, if it is stored."""
        if not finished.run_id:
            return
        check = Check(finished, finished.run_id, Task(owner, conversation))
        if not finished.same_text:
            why = "Same distribution does not keep the text of a seed."
            self.store(check, skipped(why if finished.info.server is None else ELSEWHERE))
            return
        if not finished.one:
            self.store(check, skipped("It was continued with other settings or another model."))
            return
        with self.changed:
            self.checks.append(check)
            while len(self.checks) > MOST:
                self.checks.popleft()
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="proofs", daemon=True)
                self.thread.start()

    def forget(self, owner: str, conversation: str) -> None:
        with self.changed:
            known = [*self.checks, *([self.running] if self.running else [])]
            for check in known:
                if (check.task.owner, check.task.about) == (owner, conversation):
                    check.task.stop.set()

    def idle(self, seconds: float) -> bool:
        """Wait up to `seconds` until nothing is left to prove; returns whether that is so."""
        with self.changed:
            return self.changed.wait_for(lambda: self.thread is None, seconds)

    def work(self) -> None:
        while True:
            with self.changed:
                self.running = self.checks.popleft() if self.checks else None
                if self.running is None:
                    self.thread = None
                    self.changed.notify_all()
                    return
            self.prove(self.running)

    def prove(self, check: Check) -> None:
        found, tries = None, 0
        while found is None and tries < TRIES:
            tries += 1
            try:
                found = self.outcome(check)
            except Cancelled:
                pass  # Another request needed the model.
            except EngineDied:
                return
            except ModelError:
                found = skipped("Another model was loaded before this answer could be checked.")
            except StrataError as error:
                found = skipped(str(error))
            except Exception:
                logger.exception("A proof in the background broke off.")
                found = skipped("The check broke off. The log says why.")
            if check.task.stop.is_set():
                return
        self.store(check, found or skipped("Other requests needed the model."))

    def outcome(self, check: Check) -> dict[str, Any] | None:
        """The outcome of the proof; None if it was interrupted."""
        Traces(self.core.database, check.task.owner).get(check.run_id)
        if check.task.stop.is_set():
            return None
        for _ in self.core.revival.loaded(check.task):
            pass
        if self.core.current.info != check.finished.info:
            raise ModelError("another model")
        owner, finished = check.task.owner, check.finished
        reruns = self.proofs.reruns(owner, finished, check.task, background=True)
        (last,) = deque(reruns, maxlen=1)
        if isinstance(last, Waiting) or not last.over:
            return None
        return stored_outcome(self.proofs.proof_of(owner, finished, last))

    def store(self, check: Check, found: dict[str, Any]) -> None:
        database = self.core.database

        def write() -> None:
            with database.write():
                Traces(database, check.task.owner).prove(check.run_id, found)
                Conversations(database, check.task.owner).mark_changed(check.task.about)

        self.core.notices.keep(check.task.owner, write)


def skipped(why: str) -> dict[str, Any]:
    return {"kind": "skipped", "why": why}


def stored_outcome(proof: Proof) -> dict[str, Any]:
    found, plain, shown = proof.verdict, proof.plain, proof.shown
    assert found is not None and plain is not None and shown is not None
    if found.identical:
        return {"kind": "same", "tokens": found.tokens, "speedup": proof.speedup.whole}
    return {
        "kind": "differs",
        "at": found.position,
        "plain": found.plain,
        "said": found.accelerated,
        "early": found.ended_early,
        "gap": gap(found, plain, shown),
    }


def gap(found: Verdict, plain: Run, shown: Run) -> float | None:
    """The distance of the two tokens' logits where two runs diverge: the logarithm of the ratio of
    the model's own probabilities. None if one of the runs ended there."""
    at = found.position - 1
    runs = [run.tokens for run in (plain, shown)]
    if any(at >= len(tokens) or tokens[at].probability <= 0 for tokens in runs):
        return None
    left, right = (tokens[at].probability for tokens in runs)
    return round(abs(log(left / right)), 6)
