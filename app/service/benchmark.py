"""Benchmarks: many questions answered by several methods, with each result stored at once.

Every method begins every question from the same state: it knows what was stored when the benchmark
began, or nothing, and no run teaches another. The order of the methods is rotated from question to
question, so that a drifting load of the machine affects all of them alike.

Chats have priority. A run waits up to QUIET seconds until no other task runs, and is given up for
a task that begins to wait. The last of ATTEMPTS is not given up, but stored as disturbed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from app.service.benchmark_report import (
    FEWEST,
    Drop,
    Plan,
    Report,
    differences,
    drops,
    report,
    stored_plan,
)
from app.service.comparison import followed
from app.service.core import Core
from app.service.jobs import Job, Slot, Task
from app.service.revival import end_hung
from assets import ASSETS
from engine.compare import rotated
from engine.engine import Measured, Request, Started
from engine.errors import Busy, EngineDied, ModelError, PromptError, SettingError, StrataError
from engine.machine import machine
from engine.methods import Method
from engine.metrics import summarise
from engine.questions import digest, read
from engine.queue import Waiting
from engine.types import Message, Question, Run
from storage.benchmarks import Benchmark, Benchmarks, Result
from storage.drafting import BENCHMARK
from strata_chat import __version__

SAMPLE = ASSETS / "benchmark" / "sample.jsonl"
ATTEMPTS = 3
QUIET = 60.0
"""The most seconds that a run waits for other tasks."""
HELLO = Question("", "", "Say hello.")
HELLO_TOKENS = 8
"""An uncounted warm-up answer of every method, which loads its libraries and statistics."""
MOST_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Cell:
    position: int
    repeat: int
    method: Method


@dataclass(frozen=True, slots=True)
class BenchmarkStatus:
    """The progress of a benchmark: `done` of `runs`, the current question and method, and whether
    it waits for other tasks. `seconds_left` is None until every method had a turn."""

    benchmark: str
    done: int
    runs: int
    question: int = 0
    method: str = ""
    waiting: bool = False
    seconds_left: float | None = None


Measuring = Job[BenchmarkStatus, str]
"""Its result is the id of the benchmark."""


def cells(plan: Plan, results: Sequence[Result] = ()) -> Iterator[Cell]:
    """The runs of a plan in their order, without those that have a result."""
    done = {(result.position, result.method, result.repeat) for result in results}
    for position in range(len(plan.questions)):
        for repeat in range(plan.repeats):
            for method in rotated(plan.methods, position + repeat):
                if (position, method.name, repeat) not in done:
                    yield Cell(position, repeat, method)


class BenchmarkRuns:
    """Runs one benchmark at a time, as a job whose result is its id. Finished runs stay if it ends
    early."""

    def __init__(self, core: Core) -> None:
        self.core, self.owner = core, ""
        self.slot = Slot[BenchmarkStatus, str]()

    @property
    def status(self) -> BenchmarkStatus | None:
        return job.progress if (job := self.slot.running) is not None else None

    def store(self, owner: str) -> Benchmarks:
        return Benchmarks(self.core.database, owner)

    def start(self, owner: str, plan: Plan) -> Measuring:
        """Start a benchmark. Raises SettingError and ModelError, with nothing stored, if the plan
        cannot be measured."""
        self.check(plan)
        info = self.core.current.info

        def make() -> Measuring:
            new = Benchmark(
                title=plan.title,
                model=info.name,
                fingerprint=info.fingerprint,
                machine=machine(info),
                version=__version__,
                asked=digest(plan.questions),
                plan={**plan.mapping(), "weights": info.weights},
                runs=plan.runs,
            )
            return self.job(owner, self.store(owner).create(new, plan.questions), plan, ())

        return self.slot.take(make, under_way()).start("benchmark")

    def resume(self, owner: str, benchmark: str) -> Measuring:
        """Continue a benchmark that was cancelled, or whose program ended. Raises ModelError unless
        its model is loaded with the same settings."""
        store = self.store(owner)
        stored = store.get(benchmark)
        plan = stored_plan(stored, store.questions(benchmark))
        self.check(plan)
        info = self.core.current.info
        if (stored.fingerprint, stored.machine) != (info.fingerprint, machine(info)):
            raise ModelError(
                f"This benchmark is of {stored.label} on {stored.machine}. {info.label} on "
                f"{machine(info)} is loaded. Load that model with the same settings to continue."
            )
        if stored.version != __version__:
            raise SettingError(
                f"This benchmark was started with version {stored.version}, and this is "
                f"{__version__}: their figures do not mix. Start a new one."
            )
        results = store.results(benchmark)
        job = self.slot.take(lambda: self.job(owner, benchmark, plan, results), under_way())
        return job.start("benchmark")

    def check(self, plan: Plan) -> None:
        """Raise an error for a plan that cannot be measured."""
        if self.core.guests:
            raise SettingError(
                "A benchmark was not started: others share this app, and would wait for it."
            )
        names = [method.name for method in plan.methods]
        if not names or len(set(names)) < len(names):
            raise SettingError("Choose at least one method, and each of them once.")
        if not 1 <= plan.repeats <= MOST_REPEATS:
            raise SettingError(
                f"Repeats cannot be {plan.repeats}. Give a whole number from 1 to {MOST_REPEATS}."
            )
        if not plan.questions:
            raise PromptError("There is no question. Choose a set of questions first.")
        if not self.core.engine.state.is_loaded:
            raise ModelError("No model is loaded. Load one in the Models tab first.")
        for method in plan.methods:
            self.core.stacks.check(method, plan.generation.sampling)

    def job(self, owner: str, benchmark: str, plan: Plan, results: Sequence[Result]) -> Measuring:
        self.owner, left = owner, list(cells(plan, results))

        def work(job: Measuring) -> str:
            try:
                self.measure(owner, plan, left, job)
            finally:
                self.core.notices.keep(owner, partial(self.core.past_answers.lend, None))
            return benchmark

        return Job(work, BenchmarkStatus(benchmark, plan.runs - len(left), plan.runs), broke_off)

    def stop(self, owner: str) -> None:
        if owner == self.owner:
            self.slot.cancel(partial(end_hung, self.core.engine))

    def measure(self, owner: str, plan: Plan, left: Sequence[Cell], job: Measuring) -> None:
        """Make the remaining runs, and store each at once. Raises Cancelled if it is stopped."""
        store, benchmark = self.store(owner), job.progress.benchmark
        runner = Runner(self, owner, plan, Task(owner, stop=job.stop))
        for method in plan.methods if left else ():
            runner.answer(HELLO, method, HELLO_TOKENS)
        start = monotonic()
        for number, cell in enumerate(left):
            spent = (monotonic() - start) / number if number >= len(plan.methods) else None
            job.report(
                BenchmarkStatus(
                    benchmark,
                    plan.runs - len(left) + number,
                    plan.runs,
                    cell.position,
                    cell.method.name,
                    seconds_left=None if spent is None else spent * (len(left) - number),
                )
            )
            store.add(benchmark, runner.result(cell))

    def show_waiting(self, waiting: bool) -> None:
        if (job := self.slot.running) is not None:
            job.report(replace(job.progress, waiting=waiting))

    def report(self, owner: str, benchmark: str) -> Report:
        """The report of a benchmark. Raises StorageError."""
        store = self.store(owner)
        stored = store.get(benchmark)
        plan = stored_plan(stored, store.questions(benchmark))
        return report(stored, plan, store.results(benchmark))

    def before(self, owner: str, now: Benchmark) -> Report | None:
        for stored in self.store(owner).list():
            if stored.created < now.created and stored.done and not differences(stored, now):
                return self.report(owner, stored.id)
        return None

    def lost(self, owner: str, now: Report) -> tuple[Report | None, list[Drop]]:
        """The last benchmark that measured the same, and what became slower since. Empty while only
        a few of many questions are complete."""
        if now.complete < min(FEWEST, len(now.plan.questions)):
            return None, []
        before = self.before(owner, now.benchmark)
        return before, drops(now, before) if before else []


def bundled() -> list[Question]:
    """The bundled questions: two of each of Spec-Bench's categories."""
    return read(SAMPLE)


def under_way() -> ModelError:
    return ModelError("A benchmark is under way already. Wait until it is done, or stop it.")


def broke_off(error: Exception) -> StrataError:
    return StrataError(f"The benchmark broke off: {error!r}. What was measured is kept.")


class Runner:
    """Makes the runs of one benchmark, as long as its model is loaded.

    The n-grams of past answers are copied once, so all runs know the same.
    """

    def __init__(self, runs: BenchmarkRuns, owner: str, plan: Plan, task: Task) -> None:
        self.runs, self.plan, self.task, self.owner = runs, plan, task, owner
        self.core = runs.core
        self.info = self.core.current.info
        self.core.past_answers.lend(owner if plan.known else None, self.info.fingerprint)

    def result(self, cell: Cell) -> Result:
        """Make one run; returns its result. Raises Cancelled, ModelError and EngineDied."""
        question = self.plan.questions[cell.position]
        made = Result(cell.position, cell.method.name, cell.repeat)
        try:
            run, disturbed = self.answer(question, cell.method)
        except PromptError as error:
            return replace(made, problem=str(error))
        metrics, prefill = summarise(run), run.prefill
        return replace(
            made,
            tokens=metrics.tokens,
            forwards=metrics.forwards,
            drafted=sum(metrics.proposed.values()),
            kept=metrics.kept,
            prefill_seconds=prefill.seconds if prefill else 0.0,
            first_seconds=metrics.ttft_seconds,
            decode_seconds=metrics.decode_seconds,
            learning_seconds=metrics.learning_seconds,
            disturbed=disturbed,
            answer=tuple(token.id for token in run.tokens),
        )

    def answer(
        self, question: Question, method: Method, tokens: int | None = None
    ) -> tuple[Run, bool]:
        """A finished run, and whether other tasks ran or waited meanwhile."""
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            self.wait_for_others()
            try:
                with self.core.tasks.begin(BENCHMARK, "") as shown:
                    for _ in self.core.revival.loaded(shown):
                        self.runs.show_waiting(True)
                        self.task.stop.check()
                    run, disturbed = self.attempt(question, method, tokens, shown, last)
            except Busy:
                if last:
                    raise
                self.task.stop.event.wait(QUIET / ATTEMPTS)
                continue
            except EngineDied:
                if last:
                    raise
                for _ in self.core.revival.awaited(self.task):
                    self.runs.show_waiting(True)
                continue
            self.task.stop.check()
            if run is not None:
                return run, disturbed
        raise AssertionError("the last attempt is not given up")

    def wait_for_others(self) -> None:
        latest = monotonic() + QUIET
        for _ in self.task.wait(lambda: not self.core.tasks.others(None) or monotonic() >= latest):
            self.runs.show_waiting(True)

    def attempt(
        self, question: Question, method: Method, tokens: int | None, shown: Task, last: bool
    ) -> tuple[Run | None, bool]:
        """One run, None if it was given up for another task; and whether it was disturbed."""
        generation = self.plan.generation
        generation = replace(generation, max_tokens=tokens or generation.max_tokens)
        profile = self.core.stacks.profile_for(generation.sampling)
        messages = (Message("user", question.text),)
        request = Request(messages, (), generation, method, profile, BENCHMARK, measured=Measured())
        stream = self.task.stop.start(lambda: self.core.engine.generate(request))
        run, disturbed = Run(), False
        try:
            for item in followed(stream, request, self.report, self.same_model):
                self.runs.show_waiting(isinstance(item, Waiting))
                if isinstance(item, Waiting):
                    continue
                run, others = item, self.core.tasks.others(shown)
                disturbed = disturbed or bool(others)
                if others and not last and run.finish is None:
                    return None, True
        finally:
            stream.stop()
            self.task.stop.release(stream.stop)
        if run.broken_off and not self.task.stop.is_set():
            raise ModelError(
                f"{self.info.name} was replaced by another model. What was measured is kept. Load "
                "it again and press Resume."
            )
        return run, disturbed

    def same_model(self, started: Started) -> None:
        """Raise ModelError if another model is loaded."""
        if started.info != self.info:
            raise ModelError(
                f"{self.info.name} was replaced by {started.info.name}. What was measured is kept. "
                "Load it again and press Resume."
            )

    def report(self, problem: str) -> None:
        self.core.notices.report(self.owner, problem)
