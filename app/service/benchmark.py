"""Benchmarks: many questions, by several methods, answer by answer, each stored as it is there.

Every method begins every question from the same state. It knows what was stored when the benchmark
began (or nothing), and no run teaches another. The order of the methods is rotated from question to
question, so that a load that drifts hits all of them alike.

Who chats meanwhile comes first. A run begins only when nobody else is at work, for QUIET seconds at
most. One that somebody else begins to wait for is given up at once, and made again after them. The
last of ATTEMPTS is not given up: it is stored as disturbed.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from app.service.benchmark_report import (
    FEWEST,
    Drop,
    Plan,
    Report,
    comparable,
    drops,
    report,
    stored_plan,
)
from app.service.comparison import followed
from app.service.current import Current
from app.service.draft_models import Stacks
from app.service.notices import Notices
from app.service.revival import Revival, end_hung
from app.service.stores import Stores
from app.service.tasks import Task, Tasks
from assets import ASSETS
from engine.compare import rotated
from engine.engine import (
    Engine,
    Measured,
    Request,
    Started,
    StoredContextLog,
    StoredPastAnswers,
    WantedContextLog,
    WantedPastAnswers,
)
from engine.errors import (
    Busy,
    Cancelled,
    EngineDied,
    ModelError,
    PromptError,
    SettingError,
    StrataError,
)
from engine.machine import machine
from engine.methods import Method
from engine.metrics import summarise
from engine.questions import digest, read
from engine.queue import Waiting, before_it_began
from engine.types import Message, Question, Run
from storage.benchmarks import Benchmark, Benchmarks, Result
from storage.database import Database
from strata_chat import __version__

SAMPLE = ASSETS / "benchmark" / "sample.jsonl"
OWNER = ":benchmark"
"""Whose the runs are in the engine: nobody's, so that what a user says and learns stays apart."""
ATTEMPTS = 3
QUIET = 60.0
"""Seconds that a run waits for others to be done, at most."""
LOOK_SECONDS = 0.1
HELLO = Question("", "", "Say hello.")
HELLO_TOKENS = 8
"""What every method answers first, uncounted: its libraries and its statistics are awake then."""
MOST_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Cell:
    """One run that is to be made."""

    position: int
    repeat: int
    method: Method


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a benchmark is: `done` of `runs`; the question and method at work; whether it waits
    for others. `seconds_left` is None until every method has had a turn."""

    benchmark: str
    done: int
    runs: int
    question: int = 0
    method: str = ""
    waiting: bool = False
    seconds_left: float | None = None


def cells(plan: Plan, there: Sequence[Result] = ()) -> Iterator[Cell]:
    """The runs of a plan in their order, but for those that are there."""
    done = {(result.position, result.method, result.repeat) for result in there}
    for position in range(len(plan.questions)):
        for repeat in range(plan.repeats):
            for method in rotated(plan.methods, position + repeat):
                if (position, method.name, repeat) not in done:
                    yield Cell(position, repeat, method)


class BenchmarkRuns:
    """See the module's docstring. One benchmark is under way at a time: `standing` says how far it
    is, None where there is none. `problem` says why the last one ended early, "" if it did not."""

    def __init__(
        self,
        engine: Engine,
        database: Database,
        tasks: Tasks,
        current: Current,
        stacks: Stacks,
        stores: Stores,
        notices: Notices,
        revival: Revival,
        guests: bool = False,
    ) -> None:
        self.engine, self.database, self.current = engine, database, current
        self.stacks, self.stores, self.notices = stacks, stores, notices
        self.revival, self.guests = revival, guests
        self.everyone = tasks
        """The tasks of all owners, among which each run is one."""
        self.own = Tasks(partial(end_hung, engine))
        """The benchmark as a whole, for Stop."""
        self.busy = threading.Lock()
        self.standing: Standing | None = None
        self.problem = ""

    def store(self, owner: str) -> Benchmarks:
        """The benchmarks of an owner."""
        return Benchmarks(self.database, owner)

    # beginning and ending

    def start(self, owner: str, plan: Plan) -> str:
        """Begin a benchmark; returns its id. Raises SettingError and ModelError for what cannot be
        measured, with nothing stored."""
        self.check(plan)
        info = self.current.info
        with self.begun():
            made = self.store(owner).create(
                plan.title,
                info.name,
                info.fingerprint,
                machine(info),
                __version__,
                digest(plan.questions),
                plan.mapping(),
                plan.questions,
                plan.runs,
            )
            self.launch(owner, made, plan, ())
        return made

    def resume(self, owner: str, benchmark: str) -> None:
        """Go on with one that was cancelled, or whose program ended. Raises ModelError unless its
        model is loaded, as it was."""
        store = self.store(owner)
        stored = store.get(benchmark)
        plan = stored_plan(stored, store.questions(benchmark))
        self.check(plan)
        info = self.current.info
        if (stored.fingerprint, stored.machine) != (info.fingerprint, machine(info)):
            raise ModelError(
                f"This benchmark is of {stored.model} on {stored.machine}. {info.name} on "
                f"{machine(info)} is loaded. Load that model, with the settings it had, to go on."
            )
        if stored.version != __version__:
            raise SettingError(
                f"This benchmark was begun with version {stored.version}, and this is "
                f"{__version__}: their figures do not mix. Start a new one."
            )
        with self.begun():
            self.launch(owner, benchmark, plan, store.results(benchmark))

    def begun(self) -> "Beginning":
        """Holds the place of the one benchmark that is under way, until it is launched."""
        return Beginning(self.busy)

    def check(self, plan: Plan) -> None:
        """Raise SettingError for a plan that cannot be made."""
        if self.guests:
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
        if not self.engine.state.there:
            raise ModelError("No model is loaded. Load one in the Models tab first.")
        for method in plan.methods:
            self.stacks.check(method, plan.generation.sampling)

    def launch(self, owner: str, benchmark: str, plan: Plan, there: Sequence[Result]) -> None:
        """Have the work done on a thread of its own: a page may close."""
        self.problem = ""
        self.standing = Standing(benchmark, plan.runs - len(list(cells(plan, there))), plan.runs)
        task = self.own.ask(owner, "")
        arguments = owner, benchmark, plan, there, task
        threading.Thread(target=self.work, args=arguments, name="benchmark", daemon=True).start()

    def stop(self, owner: str) -> None:
        """End the benchmark under way; what is done stays."""
        self.own.stop(owner, "")

    # the work

    def work(
        self, owner: str, benchmark: str, plan: Plan, there: Sequence[Result], task: Task
    ) -> None:
        """All runs that are left, until it is stopped."""
        try:
            with self.own.begin(owner, "", asked=True):
                try:
                    self.measure(owner, benchmark, plan, there, task)
                finally:
                    self.engine.forget(OWNER, past=True)
        except Cancelled:
            pass
        except StrataError as error:
            self.problem = str(error)
        except Exception as error:
            # Whatever is wrong, what is done is stored, and someone has to be told.
            self.problem = f"The benchmark broke off: {error!r}. What was measured is kept."
        finally:
            self.standing = None
            self.busy.release()

    def measure(
        self, owner: str, benchmark: str, plan: Plan, there: Sequence[Result], task: Task
    ) -> None:
        """The runs that are left, each stored at once. Raises Cancelled when it is stopped."""
        store, left = self.store(owner), list(cells(plan, there))
        runner = Runner(self, owner, plan, task)
        for method in plan.methods if left else ():
            runner.answer(HELLO, method, HELLO_TOKENS)
        begun = monotonic()
        for number, cell in enumerate(left):
            spent = (monotonic() - begun) / number if number >= len(plan.methods) else None
            self.standing = Standing(
                benchmark,
                plan.runs - len(left) + number,
                plan.runs,
                cell.position,
                cell.method.name,
                seconds_left=None if spent is None else spent * (len(left) - number),
            )
            store.add(benchmark, runner.result(cell))

    def waits(self, waiting: bool) -> None:
        """Tell whether the benchmark waits for others."""
        if self.standing is not None and self.standing.waiting != waiting:
            self.standing = replace(self.standing, waiting=waiting)

    # what came of them

    def report(self, owner: str, benchmark: str) -> Report:
        """What there is to say of a benchmark. Raises StorageError."""
        store = self.store(owner)
        stored = store.get(benchmark)
        plan = stored_plan(stored, store.questions(benchmark))
        return report(stored, plan, store.results(benchmark))

    def before(self, owner: str, now: Benchmark) -> Report | None:
        """The last benchmark before one that measured the same; None where there is none."""
        for stored in self.store(owner).list():
            if stored.created < now.created and stored.done and comparable(stored, now):
                return self.report(owner, stored.id)
        return None

    def lost(self, owner: str, now: Report) -> tuple[Report | None, list[Drop]]:
        """The last benchmark that measured the same, and what became slower since: nothing, while
        that would be said of a few of many questions."""
        if now.complete < min(FEWEST, len(now.plan.questions)):
            return None, []
        before = self.before(owner, now.benchmark)
        return before, drops(now, before) if before else []


def bundled() -> list[Question]:
    """The questions that come along: two of each of Spec-Bench's categories."""
    return read(SAMPLE)


class Beginning:
    """Takes the lock of the one benchmark; gives it back where it could not be launched."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise ModelError("A benchmark is under way already. Wait until it is done, or stop it.")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.lock.release()


class Runner:
    """Makes the runs of one benchmark, for as long as its model is loaded.

    What the drafters know of past answers is read once, so it is the same for all.
    """

    def __init__(self, runs: BenchmarkRuns, owner: str, plan: Plan, task: Task) -> None:
        self.runs, self.plan, self.task, self.owner = runs, plan, task, owner
        self.info = runs.current.info
        self.past = StoredPastAnswers()
        if plan.known:
            self.past = runs.stores.past_answers.recall(owner, self.info.fingerprint)

    def result(self, cell: Cell) -> Result:
        """One run, as it is stored. Raises Cancelled, ModelError and EngineDied."""
        question = self.plan.questions[cell.position]
        made = Result(cell.position, cell.method.name, cell.repeat)
        try:
            run, disturbed = self.answer(question, cell.method)
        except PromptError as error:
            return replace(made, problem=str(error))
        figures, prefill = summarise(run), run.prefill
        return replace(
            made,
            tokens=figures.tokens,
            forwards=figures.forwards,
            drafted=sum(figures.proposed.values()),
            kept=figures.kept,
            prefill_seconds=prefill.seconds if prefill else 0.0,
            first_seconds=figures.ttft_seconds,
            decode_seconds=figures.decode_seconds,
            learning_seconds=figures.learning_seconds,
            disturbed=disturbed,
            answer=tuple(token.id for token in run.tokens),
        )

    def answer(
        self, question: Question, method: Method, tokens: int | None = None
    ) -> tuple[Run, bool]:
        """A finished run, and whether other work went on meanwhile."""
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            self.quiet()
            try:
                with self.runs.everyone.begin(OWNER, "") as shown:
                    for _ in self.runs.revival.loaded(shown):
                        self.runs.waits(True)
                        self.check_stop()
                    run, disturbed = self.attempt(question, method, tokens, shown, last)
            except Busy:
                if last:
                    raise
                self.task.stop.event.wait(QUIET / ATTEMPTS)
                continue
            except EngineDied:
                if last:
                    raise
                for _ in self.runs.revival.awaited(self.task):
                    self.runs.waits(True)
                continue
            self.check_stop()
            if run is not None:
                return run, disturbed
        raise AssertionError("the last attempt is not given up")

    def quiet(self) -> None:
        """Wait until nobody else is at work, but not for ever."""
        latest = monotonic() + QUIET
        while self.runs.everyone.others(None) and monotonic() < latest:
            self.runs.waits(True)
            self.check_stop()
            self.task.stop.event.wait(LOOK_SECONDS)

    def attempt(
        self, question: Question, method: Method, tokens: int | None, shown: Task, last: bool
    ) -> tuple[Run | None, bool]:
        """One run, None where it was given up for somebody else; and whether it was disturbed."""
        runs, generation = self.runs, self.plan.generation
        if tokens is not None:
            generation = replace(generation, max_tokens=tokens)
        profile = runs.stacks.profile_for(generation.sampling)
        messages = (Message("user", question.text),)
        request = Request(messages, (), generation, method, profile, OWNER, measured=Measured())
        stream = self.task.stop.start(lambda: runs.engine.generate(request))
        run, disturbed = Run(), False
        try:
            for item in followed(stream, request, self.recall, self.report, self.same_model):
                runs.waits(isinstance(item, Waiting))
                if isinstance(item, Waiting):
                    continue
                run, others = item, runs.everyone.others(shown)
                disturbed = disturbed or bool(others)
                if others and not last and run.finish is None:
                    return None, True
        finally:
            stream.stop()
            self.task.stop.over(stream)
        if run.broken_off and not self.task.stop.is_set():
            raise ModelError(
                f"{self.info.name} made way for another model. What was measured is kept. Load it "
                "again and press Resume."
            )
        return run, disturbed

    def check_stop(self) -> None:
        """Raise Cancelled when the benchmark was stopped."""
        if self.task.stop.is_set():
            raise before_it_began()

    def same_model(self, started: Started) -> None:
        """Raise ModelError when another model is there."""
        if started.info != self.info:
            raise ModelError(
                f"{self.info.name} was replaced by {started.info.name}. What was measured is kept. "
                "Load it again and press Resume."
            )

    def recall(
        self, wanted: WantedPastAnswers | WantedContextLog
    ) -> StoredPastAnswers | StoredContextLog:
        """What the drafters begin with."""
        return self.past if isinstance(wanted, WantedPastAnswers) else StoredContextLog()

    def report(self, problem: str) -> None:
        """Something went wrong aside."""
        self.runs.notices.report(self.owner, problem)
