"""The engine in this process: the loaded models and the drafting memory.

Everything that computes runs on the model's thread, in the order of the queue. Methods that other
threads call read `loaded` only once, because another model may replace it between two runs.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from engine import native
from engine.backends.base import Backend, Tokenizer, is_batching
from engine.compare import reset_caches
from engine.constraint import Constraint
from engine.decode import Turns, decoding, relayed
from engine.drafting.base import Drafter, FailSafeDrafter, NgramTable
from engine.drafting.calibration import LONGEST, Calibration
from engine.drafting.controller import Company
from engine.drafting.databases import (
    Databases,
    DraftingMemory,
    NoStore,
    OpenConversation,
    PastAnswers,
    Store,
)
from engine.drafting.tiers import ContextTier, ModelTier, PredictionTier
from engine.engine import (
    Beside,
    CostsMeasured,
    Draft,
    Event,
    Load,
    Loading,
    Measured,
    Notice,
    Request,
    Room,
    Share,
    Started,
    State,
)
from engine.errors import (
    Busy,
    Cancelled,
    ModelError,
    SettingError,
    StorageError,
    StrataError,
    first_line,
    forget_frames,
)
from engine.hsd.family import Family
from engine.hsd.measure import Profiler
from engine.hsd.profile import Profile
from engine.hsd.trials import Trial, entries, prompts_of, trials
from engine.loaded import NO_MODEL, Loaded, no_model
from engine.methods import lowest
from engine.models.loaders import DEFAULT_RUNTIME, MODEL_LOADERS, ModelLoaders, answers_at_once
from engine.models.memory import Need
from engine.prompt import Size, TextStream, continued, ends_in_thinking, no_room, resumed, splice
from engine.queue import MOST_WAITING, OWNER, Run, RunQueue, Waiting, before_it_began
from engine.rounds import take_turns
from engine.runs import warm_up
from engine.servers.answer import answer as answer_from_server
from engine.servers.served import ServedModel
from engine.settings import Drafting, Runtime, Sampling, ThinkingChoice
from engine.streams import Stream
from engine.thinking import Splitter
from engine.types import CalibrationRow, Document, Message, Step, Taught, Tool

Opener = Callable[[str, Callable[[str], None]], NgramTable | None]
"""Opens the statistics table for a tokenizer, None if there is none; reports damaged files."""


class RunModels(NamedTuple):
    """The sequences of a run: that of the target, and those of the draft models by name."""

    target: Backend
    drafts: dict[str, Backend]


class Part(Stream[Event]):
    """The events of one of several answers, which go into the stream of all with its number."""

    def __init__(self, whole: Stream[Any], answer: int) -> None:
        super().__init__()
        self.whole, self.answer, self.stopped = whole, answer, whole.stopped

    def put_all(self, items: Sequence[Event]) -> None:
        self.whole.put_all([Beside(self.answer, item) for item in items])


def shares_forwards(backend: Backend) -> bool:
    return is_batching(backend) and backend.at_once


class Local:
    """The engine in this process; engine/engine.py documents its methods.

    `store` keeps what drafting has learned for longer than this process lives. `each` is the number
    of runs of one owner that may wait. `backend` is a model that is loaded from the start.
    """

    def __init__(
        self,
        statistics: Opener = lambda tokenizer, report: None,
        loaders: ModelLoaders = MODEL_LOADERS,
        each: int = MOST_WAITING,
        backend: Backend | None = None,
        store: Store | None = None,
    ) -> None:
        self.statistics, self.loaders = statistics, loaders
        self.store = store or NoStore()
        self.store.report, self.locked = self.report, ""
        self.notify: Callable[[str, str], None] = lambda owner, notice: None
        self.queue = RunQueue(each)
        self.watch: Callable[[State], None] = lambda state: None
        self.drafts: dict[str, Backend] = {}
        self.sources: dict[str, str] = {}
        """The source of each loaded draft model, by its name."""
        self.planned: Family | None = None
        """The draft models with the last used profile, and the plans made with it."""
        self.loaded = no_model()
        if backend is not None:
            self.loaded = self.loaded_of(backend, "", DEFAULT_RUNTIME, lambda problem: None)

    # what is loaded

    @property
    def state(self) -> State:
        loaded = self.loaded
        drafts = (Draft(n, self.sources.get(n, ""), d.info) for n, d in self.drafts.items())
        return State(
            loaded.backend.info,
            loaded.is_loaded,
            loaded.source,
            loaded.runtime,
            tuple(drafts),
            loaded.plain,
            compiled=native.core is not None,
            locked=self.locked,
        )

    def loaded_of(
        self, backend: Backend, source: str, runtime: Runtime, report: Callable[[str], None]
    ) -> Loaded:
        table = self.statistics(backend.info.tokenizer_fingerprint, report)
        return Loaded(backend, DraftingMemory(table), source, runtime)

    def use(self, loaded: Loaded) -> None:
        self.loaded.sequences.clear()
        self.loaded = loaded
        backend = loaded.backend
        self.queue.parallel = loaded.runtime.parallel if shares_forwards(backend) else 1
        self.use_drafts({}, {})

    def use_drafts(self, drafts: Mapping[str, Backend], sources: Mapping[str, str]) -> None:
        for unused in {*self.drafts.values()} - {*drafts.values()}:
            self.loaded.sequences.drop_model(unused)
        self.drafts, self.sources, self.planned = dict(drafts), dict(sources), None
        self.watch(self.state)

    def report(self, owner: str, notice: str) -> None:
        self.notify(owner, notice)
        if self.locked != self.store.locked:
            self.locked = self.store.locked
            self.watch(self.state)

    # the queue

    def start(
        self,
        owner: str,
        work: Callable[[Stream[Any]], Turns | None],
        priority: bool = False,
        background: bool = False,
        company: Company | None = None,
        conversation: str = "",
    ) -> Stream[Any]:
        """Put work into the queue. It is done when the call returns, or when the answer that it
        returns has ended; this shares the model if it can hear of `company`. The stream raises Busy
        if the queue is full."""

        def turns() -> Turns:
            try:
                if stream.stopped.is_set():
                    raise before_it_began()
                yield from work(stream) or ()
            except BaseException as error:
                # Its frames would keep the model in memory for as long as anyone has the error.
                forget_frames(error)
                stream.end(error)
            else:
                stream.end()

        def notify(ahead: int) -> None:
            if ahead:
                stream.put(Waiting(ahead))

        def leave() -> None:
            if self.queue.leave(entry):
                stream.end(before_it_began())

        stream = Stream[Any](on_stop=leave)
        entry = Run(owner, turns, notify, stream.stop, priority, background=background)
        if company is not None:
            entry.shares, entry.company, entry.conversation = True, company, conversation
        try:
            self.queue.join(entry)
        except (Busy, Cancelled) as error:
            stream.end(error)
        return stream

    # answers

    def generate(self, request: Request) -> Stream[Event]:
        # What is measured has the model to itself, and work for idle times gives way.
        shares = request.measured is None and not request.background
        company = Company()
        return self.start(
            request.owner,
            lambda stream: self.answer(request, stream, company),
            background=request.background,
            company=company if shares else None,
            conversation=request.conversation,
        )

    def take_turns(self, requests: Sequence[Request]) -> Stream[Waiting | Beside]:
        def work(stream: Stream[Any]) -> None:
            self.need_model_here()
            parts = [Part(stream, number) for number in range(len(requests))]
            take_turns(
                [
                    self.measure_answer(request, request.measured or Measured(), part, pauses=True)
                    for request, part in zip(requests, parts, strict=True)
                ]
            )

        return self.start(requests[0].owner, work)

    def answer(self, request: Request, stream: Stream[Event], company: Company) -> Turns:
        self.need_model()
        self.loaded.memory.sweep()
        served = self.loaded.backend
        if isinstance(served, ServedModel):
            answer_from_server(served, request, stream.put, stream.stopped.is_set)
            return
        if request.measured is None:
            yield from self.answer_now(request, stream, company)
        else:
            yield from self.measure_answer(request, request.measured, stream)

    def need_model(self) -> None:
        if not self.loaded.is_loaded:
            raise ModelError(NO_MODEL)

    def need_model_here(self) -> None:
        self.need_model()
        if isinstance(self.loaded.backend, ServedModel):
            self.loaded.backend.refuse()

    def answer_now(self, request: Request, stream: Stream[Event], company: Company) -> Turns:
        loaded, method, generation = self.loaded, request.method, request.generation
        cancelled = stream.stopped.is_set
        past = self.past_answers(request.owner)
        conversation = self.open_conversation(request, past)
        loaded.memory.fit(request.owner)
        chat = loaded.chat
        chat.tokens = conversation.tokens
        prompt, dropped = self.prompt_of(request, conversation)
        detokenize, text = loaded.backend.detokenize, ""
        thinks = ends_in_thinking(loaded.backend, prompt, request.prefix)
        splitter = partial(self.splitter, request, thinks)
        if request.prefix or request.text:
            before = splitter(), request.prefix
            text_stream = continued(detokenize, generation.stop, prompt, *before)
        else:
            text_stream, text = resumed(detokenize, generation.stop, request.answered, splitter)
        calibration = tuple(past.calibration.rows())
        known = [*prompt, *request.answered]
        conversation.tokens = list(known)
        with self.sequences(request) as models:
            if request.conversation:
                key = request.owner, request.conversation
                loaded.sequences.begin(key, loaded.backend, known)
            databases = conversation.databases
            drafters, constraint = self.drafters(request, databases, stream, models, known, thinks)
            curve = loaded.curve_of(method) if drafters else None
            info = loaded.backend.info
            stream.put(Started(info, tuple(prompt), dropped, calibration, text, thinks))
            how = method.drafting, cancelled, curve, text_stream, request.likeliest, constraint
            events = decoding(models.target, known, drafters, generation, *how, company)
            steps, rests = 0, loaded.suited(method) is not method

            def take(event: Event) -> None:
                nonlocal steps
                if isinstance(event, Step):
                    steps += 1
                    conversation.tokens += [token.id for token in event.tokens]
                stream.put(event)

            try:
                yield from relayed(events, take)
            finally:
                if rests:
                    loaded.rested(steps)
                if len(conversation.tokens) > len(known) and curve is not None:
                    stream.put(CostsMeasured(info, loaded.costs))
                if notice := loaded.judge_head():
                    stream.put(Notice(notice))
                    self.watch(self.state)
                self.keep(request, past, conversation, calibration)
                loaded.memory.fit(request.owner)

    def thinking(self, request: Request) -> ThinkingChoice:
        """What the chat template is told of thinking. In a format it is off unless it is switched
        on: who asks for a format rarely waits for thoughts."""
        chosen = request.generation.thinking
        if request.generation.format is not None and self.loaded.backend.info.can_think:
            return chosen is True
        return chosen

    def may_think(self, request: Request) -> bool:
        """Whether a model may begin to think by itself: if that is switched on, or cannot be
        switched off."""
        info = self.loaded.backend.info
        return self.thinking(request) is True or (info.has_efforts and not info.can_think)

    def splitter(self, request: Request, thinks: bool) -> Splitter | None:
        """What tells the answer apart, in which alone stop strings count; None if they count
        everywhere."""
        if request.whole or not request.generation.stop:
            return None
        return Splitter(self.loaded.backend.info.marks, thinks)

    def keep(
        self,
        request: Request,
        past: PastAnswers,
        conversation: OpenConversation,
        before: Sequence[CalibrationRow],
    ) -> None:
        info, rows = self.loaded.backend.info, tuple(past.calibration.rows())
        taught = Taught(
            request.owner,
            info.fingerprint,
            past.wipes,
            tuple(past.fresh),
            past.tier.size,
            rows if past.trusted and rows != before else None,
            request.conversation,
            info.tokenizer_fingerprint,
            tuple(conversation.fresh) if request.conversation else (),
        )
        past.fresh.clear()
        conversation.fresh.clear()
        if taught and self.store.learn(taught):
            self.loaded.memory.forget(request.owner)

    @contextmanager
    def sequences(self, request: Request) -> Iterator[RunModels]:
        """The sequences of a run. Those of a conversation stay open after it; other runs open new
        ones and close them again."""
        models = {"": self.loaded.backend, **self.drafts}
        warm, key = self.loaded.sequences, (request.owner, request.conversation)
        kept = request.conversation and request.measured is None
        if kept:
            warm.using.add(key)
        opened = {n: warm.get(key, model) if kept else model.open() for n, model in models.items()}
        try:
            yield RunModels(opened[""], {name: opened[name] for name in self.drafts})
        finally:
            if kept:
                warm.release(key)
            else:
                for sequence in opened.values():
                    sequence.close()

    def prompt_of(self, request: Request, conversation: OpenConversation) -> tuple[list[int], int]:
        """The prompt of a request, and how many messages it leaves out. Raises PromptError if the
        context has no room to continue the answer, ModelError if another model began the answer."""
        chat, context = self.loaded.chat, conversation.databases.context
        asked = self.thinking(request), request.tools
        if request.answered and request.model_fingerprint != self.loaded.backend.info.fingerprint:
            raise ModelError("Another model was loaded meanwhile. Continue the answer once more.")
        prompt, dropped = list(request.prompt), 0
        if request.prompt and request.answered:
            context.expect(prompt)
        elif request.messages:
            if request.answered:
                prompt, dropped = chat.continue_answer(request.messages, request.answered, *asked)
            else:
                prompt, dropped = chat.fit(request.messages, request.prefix, *asked)
            if context.log and not context.seen:
                # The log of a reopened conversation has all messages but the last one.
                backend = self.loaded.backend
                last = Message("user", request.messages[-1].content)
                fresh = len(backend.tokenize(backend.render([last])))
                context.expect(prompt[: max(0, len(prompt) - fresh)])
        elif request.text:
            begin = self.loaded.backend.info.begin
            prompt = splice(self.loaded.backend, begin + request.text, chat.tokens)
        info, length = self.loaded.backend.info, len(prompt) + len(request.answered)
        if request.answered and length >= info.context_length:
            raise no_room(info, length)
        return prompt, dropped

    def past_answers(self, owner: str) -> PastAnswers:
        def recall() -> PastAnswers:
            info = self.loaded.backend.info
            stored = self.store.past(owner, info.fingerprint)
            fresh: list[tuple[int, ...]] = []
            tier = ModelTier(stored.grams, fresh.extend)
            for name, tokens in self.store.texts(owner, info.tokenizer_fingerprint):
                tier.texts.read(name, tokens)
            calibration = Calibration(stored.rows or ())
            return PastAnswers(tier, calibration, fresh, stored.wipes, stored.rows is not None)

        return self.loaded.memory.answers_of(owner, recall)

    def open_conversation(self, request: Request, past: PastAnswers) -> OpenConversation:
        """The open conversation of a request, its context tier filled from the stored log."""
        memory, owner, name = self.loaded.memory, request.owner, request.conversation

        def recall() -> OpenConversation:
            tokenizer, fresh = self.loaded.backend.info.tokenizer_fingerprint, list[int]()
            log = self.store.log(owner, name, tokenizer) if name else ()

            def save(tokens: Sequence[int]) -> None:
                fresh.extend(tokens)
                if name:
                    past.tier.texts.read(name, tokens)

            context = ContextTier(log, save, self.store.cap)
            databases = Databases(context, past.tier, memory.statistics, past.calibration)
            return OpenConversation(databases, fresh)

        return memory.conversation(owner, name, recall) if name else recall()

    def measure_answer(
        self, request: Request, measured: Measured, stream: Stream[Event], pauses: bool = False
    ) -> Turns:
        loaded, method, generation = self.loaded, request.method, request.generation
        past = self.past_answers(request.owner)
        loaded.memory.fit(request.owner)
        calibration = measured.calibration
        rows = past.calibration.rows() if calibration is None else calibration
        prompt = list(request.prompt)
        asked = request.messages, (), self.thinking(request), request.tools
        prompt = prompt or loaded.chat.prompt(*asked)
        known = measured.unlearned, measured.new, measured.conversation
        tier = past.tier.without(*known, prompt)
        base = Databases(None, tier, loaded.memory.statistics, Calibration(rows))
        with self.sequences(request) as models:
            # Created before the run because this may take long and raises if draft models are
            # missing.
            databases, target = base.for_measuring(), models.target
            thinks = ends_in_thinking(target, prompt)
            drafters, constraint = self.drafters(request, databases, stream, models, prompt, thinks)
            stream.put(Started(target.info, tuple(prompt), 0, tuple(rows), thinks=thinks))
            if measured.warm:
                warm_up(target, prompt, generation)
            reset_caches((target, *models.drafts.values()))
            if self.table is not None:
                self.table.forget_look_ups()
            curve = loaded.copy_of(method) if drafters else None
            splitter = self.splitter(request, thinks)
            text = TextStream(target.detokenize, generation.stop, splitter)
            how = method.drafting, stream.stopped.is_set, curve, text, 0, constraint
            events = decoding(target, prompt, drafters, generation, *how)
            yield from relayed(events, stream.put, pauses)

    def drafters(
        self,
        request: Request,
        databases: Databases,
        stream: Stream[Any],
        models: RunModels,
        known: Sequence[int],
        thinks: bool,
    ) -> tuple[list[Drafter], Constraint | None]:
        """The drafters of one answer after its `known` tokens, and the format of that answer. A
        drafter that fails causes a notice. Raises SettingError if draft models are not loaded."""
        backend, form, constraint = self.loaded.backend, request.generation.format, None
        if request.prediction:
            # What is predicted may come at any place after the thinking.
            before = () if thinks else known[-LONGEST:]
            predicted = [*before, *backend.tokenize(request.prediction)]
            databases.prediction = PredictionTier(predicted)
        if form is not None:
            begun = request.answered or backend.tokenize(request.prefix)
            may_begin = not thinks and self.may_think(request)
            marks = backend.info.marks if thinks or may_begin else ()
            constraint = Constraint(backend, form, begun, marks, may_begin)
        found = self.loaded.suited(request.method).drafters(
            databases,
            self.family(request.profile, models),
            request.generation.sampling,
            stream.stopped.is_set,
            models.target,
            constraint,
        )
        databases.prediction = None
        return [
            FailSafeDrafter(d, lambda text: stream.put(Notice(text))) for d in found
        ], constraint

    def family(self, profile: Profile | None, models: RunModels) -> Family | None:
        """The models of a run with a profile; None without draft models. The plans are made once
        for each profile."""
        if not models.drafts:
            return None
        family = Family(*models, profile)
        if self.planned is None or self.planned.profile != profile:
            self.planned = family
        family.plans = self.planned.plans
        return family

    # loading

    def load(self, request: Load) -> Stream[Loading]:
        return self.start(OWNER, lambda stream: self.replace_model(request, stream), priority=True)

    def replace_model(self, request: Load, stream: Stream[Loading]) -> None:
        before = None if request.keep_loaded else self.make_room()
        failure = ""
        try:
            self.use(self.read_model(request, stream))
        except StrataError as error:
            failure = str(error)
        except Exception as error:
            # The libraries below raise many types, out of memory among them.
            failure = (
                f"The model {request.source!r} cannot be used: {first_line(error)}. Choose another "
                "one, or a shorter context if memory ran out."
            )
        # Not earlier: while it is handled, the exception keeps the failed model in memory.
        gc.collect()
        if failure:
            raise ModelError(failure + (self.put_back(before, stream) if before else ""))

    def settled(self, source: str, runtime: Runtime) -> Runtime:
        """The settings with the number of answers at once, if that was left open."""
        if runtime.parallel:
            return runtime
        alone = replace(runtime, parallel=1)
        try:
            need = self.loaders.need(source, alone)
            free = self.loaders.free(self.loaders.device(source, alone))
        except ModelError:
            return alone  # what it needs is unknown, or loading it says what is wrong
        return replace(runtime, parallel=answers_at_once(need, free))

    def read_model(self, request: Load, stream: Stream[Loading]) -> Loaded:
        runtime = self.settled(request.source, request.runtime)
        backend = self.loaders.load(request.source, runtime)
        if not request.runtime.parallel and not shares_forwards(backend):
            runtime = replace(runtime, parallel=1)
        if isinstance(backend, ServedModel):
            backend.connect(request.key)
            return Loaded(backend, DraftingMemory(None), request.source, runtime)
        if request.name:
            backend.info = replace(backend.info, name=request.name)

        def report(problem: str) -> None:
            stream.put(Notice(problem))

        loaded = self.loaded_of(backend, request.source, runtime, report)
        if backend.info.can_tree:
            known = None
            try:
                known = self.store.costs(backend.info.costs_key)
            except StorageError as error:
                report(str(error))
            if known is None or not loaded.know(known):
                try:
                    self.time_forwards(loaded, stream)
                except ModelError as error:
                    report(str(error))
            if backend.head is not None:
                stream.put(Share(None, f"Timing the head of {backend.info.name} …"))
            loaded.weigh_head()
            if loaded.curve is not None:
                stream.put(CostsMeasured(backend.info, loaded.costs))
        loaded.measure_plain()
        # Free the cache of the measured text, which belongs to no conversation.
        backend.close()
        return loaded

    def time_forwards(self, loaded: Loaded, stream: Stream[Any]) -> None:
        activity = f"Measuring {loaded.backend.info.name} …"
        loaded.measure_costs(lambda share: stream.put(Share(share, activity)))

    def make_room(self) -> tuple[Load, list[tuple[str, str]]] | None:
        """Unload the models; returns what `put_back` needs to load them again."""
        loaded = self.loaded
        info = loaded.backend.info
        served = loaded.backend
        key = served.access.key if isinstance(served, ServedModel) else ""
        old = Load(loaded.source, loaded.runtime, info.name, key=key)
        before = old, list(self.sources.items())
        was_loaded = loaded.is_loaded
        del loaded, served
        self.use(no_model(info))
        gc.collect()
        return before if was_loaded else None

    def put_back(self, before: tuple[Load, list[tuple[str, str]]], stream: Stream[Loading]) -> str:
        """Load the unloaded models again; returns the outcome as the end of a message."""
        old, drafts = before
        stream.put(Share(None, f"Loading {old.name} again …"))
        try:
            self.use(self.read_model(old, stream))
        except Exception as error:
            # Any type, as above. A model that was loaded before may fail now if its files are gone.
            return (
                f" {old.name} had made room for it, and cannot be loaded again either "
                f"({first_line(error)}). No model is loaded now: load one in the Models tab."
            )
        try:
            if drafts:
                self.read_drafts(drafts)
        except Exception as error:
            return f" {old.name} is back, without draft models ({first_line(error)})."
        return f" {old.name} is back."

    def load_drafts(self, named: Sequence[tuple[str, str]]) -> Stream[Loading]:
        return self.start(OWNER, lambda stream: self.read_drafts(named))

    def read_drafts(self, named: Sequence[tuple[str, str]]) -> None:
        self.need_model_here()
        loaded = {(name, source): self.drafts[name] for name, source in self.sources.items()}
        drafts: dict[str, Backend] = {}
        for name, source in named:
            known = loaded.get((name, source))
            drafts[name] = known or self.loaders.load(source, self.loaded.runtime)
        family = Family(self.loaded.backend, drafts)
        self.use_drafts(family.drafts, {name: dict(named)[name] for name in family.drafts})

    def unload_drafts(self) -> Stream[Loading]:
        return self.start(OWNER, lambda stream: self.use_drafts({}, {}))

    # measuring

    def measure_costs(self) -> Stream[Loading]:
        def work(stream: Stream[Loading]) -> None:
            self.need_model_here()
            self.time_forwards(self.loaded, stream)
            stream.put(CostsMeasured(self.loaded.backend.info, self.loaded.costs))

        return self.start(OWNER, work)

    def profile(
        self, sampling: Sampling, texts: Sequence[str], tokens: int
    ) -> Stream[Waiting | Share | Profile]:
        def work(stream: Stream[Waiting | Share | Profile]) -> None:
            self.need_drafts()
            target, own = self.loaded.backend, Databases(statistics=self.table)
            profiler = Profiler(
                target,
                self.drafts,
                prompts_of(target, texts),
                Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
                lowest(own, target.info),
                tokens,
                stream.stopped.is_set,
            )
            for share in profiler.run():
                stream.put(Share(share))
            assert profiler.profile is not None
            stream.put(profiler.profile)

        return self.start(OWNER, work)

    def trials(
        self,
        profile: Profile,
        sampling: Sampling,
        drafting: Drafting,
        chosen: str,
        texts: Sequence[str],
        tokens: int,
    ) -> Stream[Waiting | Share | list[Trial]]:
        def work(stream: Stream[Waiting | Share | list[Trial]]) -> None:
            self.need_drafts()
            target = self.loaded.backend
            family = Family(target, self.drafts, profile)
            running = trials(
                family,
                Databases(statistics=self.table),
                entries(family, drafting, chosen),
                prompts_of(target, texts),
                sampling,
                self.loaded.copy_of,
                stream.stopped.is_set,
                tokens,
            )
            for found in running:
                stream.put(found if isinstance(found, list) else Share(found))

        return self.start(OWNER, work)

    @property
    def table(self) -> NgramTable | None:
        return self.loaded.memory.statistics

    def need_drafts(self) -> None:
        self.need_model()
        if not self.drafts:
            raise SettingError("No draft model is loaded. Load one in the Stack tab first.")

    # without waiting in the queue

    def check(self, owner: str, text: str | None = None) -> None:
        if text is not None:
            self.loaded.chat.check(text)
        self.queue.check(owner)

    def measure(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Size:
        return self.loaded.chat.measure(messages, tools)

    def counts(self, texts: Sequence[str]) -> list[int]:
        return [self.loaded.chat.content(text) for text in texts]

    def texts(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        detokenize = self.loaded.backend.detokenize
        return [detokenize(each) for each in tokens]

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return [self.loaded.backend.piece(token) for token in tokens]

    def tokens(self, documents: Sequence[Document], tokenizer: str) -> list[list[int]]:
        backend = self.loaded.backend
        if backend.info.tokenizer_fingerprint != tokenizer:
            raise ModelError(
                f"{backend.info.name} is loaded now, and its tokenizer is another one. Start again."
            )
        return [backend.tokenize(document_text(document, backend)) for document in documents]

    def read_statistics(self) -> None:
        def work() -> None:
            loaded = self.loaded
            if loaded.is_loaded:
                found = self.statistics(loaded.backend.info.tokenizer_fingerprint, lambda _: None)
                # Everything else in the old memory is in the store, and is read again when needed.
                loaded.memory = DraftingMemory(found)

        self.queue.thread.submit(work)

    def need(self, source: str, runtime: Runtime) -> Need:
        return self.loaders.need(source, runtime)

    def room(self, source: str, runtime: Runtime) -> Room:
        state, device_of = self.state, self.loaders.device
        device = device_of(source, runtime) if source else state.info.device
        held = 0
        if state.source and device_of(state.source, state.runtime) == device:
            held = sum(info.memory_bytes for info in (state.info, *(d.info for d in state.drafts)))
        return Room(device, self.loaders.free(device), held)

    def forget(self, owner: str, conversation: str | None = None, past: bool = False) -> None:
        loaded = self.loaded
        loaded.memory.to_forget.append((owner, conversation, past))

        def sweep() -> None:
            loaded.memory.sweep()
            if conversation is not None:
                loaded.sequences.drop((owner, conversation))

        # This runs at once if nothing else does. A run that comes first sweeps as well.
        self.queue.thread.submit(sweep)

    def close(self) -> None:
        self.queue.close()
        self.use(no_model())


def document_text(document: Document, backend: Tokenizer) -> str:
    """The text of a document as the model would see it, for `tokenize`. An answer at the end of a
    chat is followed by the end token."""
    if isinstance(document, str):
        return backend.special.literal(document)
    if document and document[-1].role == "assistant":
        end = backend.detokenize(sorted(backend.info.eos_ids)[:1])
        content = backend.special.literal(document[-1].content, answer=True)
        return backend.render(document[:-1]) + content + end
    return backend.render(document)
