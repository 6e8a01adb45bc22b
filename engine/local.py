"""The engine in this process: the loaded models, what drafting knows, one run at a time.

Everything that computes happens on the model's thread, in the order of the queue. What other
threads ask looks at `loaded` once, so that another model can take its place between two runs.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from engine import native
from engine.backends.base import Backend, Tokenizer
from engine.compare import cold
from engine.decode import decode
from engine.drafting.base import Drafter, NgramTable
from engine.drafting.calibration import Calibration
from engine.drafting.context import ContextTier
from engine.drafting.databases import Databases
from engine.drafting.guarded import Guarded
from engine.drafting.memory import DraftingMemory, OpenConversation, PastAnswers
from engine.drafting.model import ModelTier
from engine.engine import (
    Calibrated,
    ContextLogged,
    CostsMeasured,
    Draft,
    Event,
    Load,
    Loading,
    Measured,
    NgramsLearned,
    Notice,
    Request,
    Share,
    Started,
    State,
    StoredContextLog,
    StoredPastAnswers,
    WantedContextLog,
    WantedCosts,
    WantedPastAnswers,
)
from engine.errors import (
    Busy,
    Cancelled,
    ModelError,
    SettingError,
    StrataError,
    first_line,
)
from engine.hsd.family import Family
from engine.hsd.measure import Profiler
from engine.hsd.profile import Profile
from engine.hsd.trials import Trial, entries, prompts_of, trials
from engine.loaded import NO_MODEL, Costs, Loaded, no_model
from engine.methods import lowest
from engine.models.loaders import DEFAULT_RUNTIME, MODEL_LOADERS, ModelLoaders
from engine.models.memory import Need
from engine.prompt import Size, ends_in_thinking, no_room, splice
from engine.queue import MOST_WAITING, OWNER, Run, RunQueue, Waiting, before_it_began
from engine.runs import warm_up
from engine.servers.answer import answer as answered_elsewhere
from engine.servers.served import ServedModel
from engine.settings import Drafting, Runtime, Sampling
from engine.streams import Stream
from engine.text import TextStream, behind, resumed
from engine.types import Document, Message, Step

Opener = Callable[[str, Callable[[str], None]], NgramTable | None]
"""Opens the statistics for a tokenizer, None where there are none; tells what is damaged."""


def without_statistics(tokenizer: str, report: Callable[[str], None]) -> None:
    """No statistics for any tokenizer."""


class Work(Stream[Any]):
    """A stream whose work leaves the queue once it is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.leave: Callable[[], None] = lambda: None

    def stop(self) -> None:
        super().stop()
        self.leave()


class Local:
    """See the module's docstring, and engine/engine.py for what the methods do.

    `each` is how many runs of one owner may wait. `backend` is a model that is there already.
    """

    def __init__(
        self,
        statistics: Opener = without_statistics,
        loaders: ModelLoaders = MODEL_LOADERS,
        each: int = MOST_WAITING,
        backend: Backend | None = None,
    ) -> None:
        self.statistics, self.loaders = statistics, loaders
        self.queue = RunQueue(each)
        self.watch: Callable[[State], None] = lambda state: None
        self.drafts: dict[str, Backend] = {}
        self.sources: dict[str, str] = {}
        """The source of each loaded draft model, by its name."""
        self.planned: Family | None = None
        """The draft models with the profile that was used last, and what was planned with it."""
        self.emit: Callable[[Event], None] = lambda event: None
        """Where what is learned goes: into the stream of the run under way."""
        self.loaded = no_model()
        if backend is not None:
            self.loaded = self.loaded_of(backend, "", DEFAULT_RUNTIME, lambda problem: None)

    # what is loaded

    @property
    def state(self) -> State:
        """What is loaded now."""
        loaded = self.loaded
        drafts = (Draft(n, self.sources.get(n, ""), d.info) for n, d in self.drafts.items())
        info = loaded.backend.info
        runtime, plain = loaded.runtime, loaded.plain
        compiled = native.core is not None
        return State(info, loaded.there, loaded.source, runtime, tuple(drafts), plain, compiled)

    def loaded_of(
        self, backend: Backend, source: str, runtime: Runtime, report: Callable[[str], None]
    ) -> Loaded:
        """A backend with all that it takes to answer with it."""
        table = self.statistics(backend.info.tokenizer_fingerprint, report)
        return Loaded(backend, DraftingMemory(table), source, runtime)

    def use(self, loaded: Loaded) -> None:
        """Use this model from now on. What was opened or loaded for the old one goes with it."""
        self.loaded.sequences.clear()
        self.loaded = loaded
        self.use_drafts({}, {})

    def use_drafts(self, drafts: Mapping[str, Backend], sources: Mapping[str, str]) -> None:
        """Use these draft models from now on."""
        for gone in {*self.drafts.values()} - {*drafts.values()}:
            self.loaded.sequences.drop_model(gone)
        self.drafts, self.sources, self.planned = dict(drafts), dict(sources), None
        self.watch(self.state)

    # the queue

    def start(
        self,
        owner: str,
        work: Callable[[Stream[Any]], None],
        urgent: bool = False,
        patient: bool = False,
    ) -> Stream[Any]:
        """Queue work up. What cannot wait in the queue ends with Busy."""
        stream = Work()

        def run() -> None:
            error: BaseException | None = None
            try:
                if stream.stopped.is_set():
                    raise before_it_began()
                work(stream)
            except BaseException as raised:
                error = raised
            stream.end(error)

        def tell(ahead: int) -> None:
            if ahead:
                stream.put(Waiting(ahead))

        def leave() -> None:
            if self.queue.leave(entry):
                stream.end(before_it_began())

        entry = Run(owner, run, tell, stream.stop, urgent, patient=patient)
        stream.leave = leave
        try:
            self.queue.join(entry)
        except (Busy, Cancelled) as error:
            stream.end(error)
        return stream

    # answers

    def generate(self, request: Request) -> Stream[Event]:
        def work(stream: Stream[Event]) -> None:
            self.answer(request, stream)

        return self.start(request.owner, work, patient=request.patient)

    def answer(self, request: Request, stream: Stream[Event]) -> None:
        """One answer, on the model's thread."""
        self.need_model()
        self.loaded.memory.sweep()
        served = self.loaded.backend
        if isinstance(served, ServedModel):
            answered_elsewhere(served, request, stream.put, stream.stopped.is_set)
            return
        self.emit = stream.put
        try:
            if request.measured is None:
                events = self.answer_events(request, stream)
            else:
                events = self.measured_events(request, request.measured, stream)
            for event in events:
                stream.put(event)
        finally:
            self.emit = lambda event: None

    def need_model(self) -> None:
        """Raise ModelError unless a model is loaded."""
        if not self.loaded.there:
            raise ModelError(NO_MODEL)

    def need_model_here(self) -> None:
        """Raise ModelError unless the loaded model is on this machine."""
        self.need_model()
        if isinstance(self.loaded.backend, ServedModel):
            self.loaded.backend.refuse()

    def answer_events(self, request: Request, stream: Stream[Event]) -> Iterator[Event]:
        """The events of an answer that is learned."""
        loaded, method, generation = self.loaded, request.method, request.generation
        cancelled = stream.stopped.is_set
        past = self.past_answers(request.owner, stream)
        conversation = self.open_conversation(request, past, stream)
        loaded.memory.fit(request.owner)
        chat = loaded.chat
        chat.tokens = conversation.tokens
        prompt, dropped = self.prompt_of(request, conversation)
        text, told = self.text_of(request, prompt)
        calibration = tuple(past.calibration.rows())
        known = [*prompt, *request.said]
        conversation.tokens = list(known)
        with self.sequences(request) as (target, drafts):
            drafters = self.drafters(request, conversation.databases, stream, target, drafts)
            curve = loaded.curve_of(method) if drafters else None
            thinks = ends_in_thinking(loaded.backend, prompt)
            yield Started(loaded.backend.info, tuple(prompt), dropped, calibration, told, thinks)
            how = method.drafting, cancelled, curve, text, request.likeliest
            events = decode(target, known, drafters, generation, *how)
            steps, rests = 0, loaded.suited(method) is not method
            try:
                for event in events:
                    if isinstance(event, Step):
                        steps += 1
                        conversation.tokens += [token.id for token in event.tokens]
                    yield event
            finally:
                if rests:
                    loaded.rested(steps)
                if len(conversation.tokens) > len(known):
                    self.emit(Calibrated(tuple(past.calibration.rows())))
                    if curve is not None:
                        self.emit(CostsMeasured(loaded.backend.info, loaded.costs))
                loaded.memory.fit(request.owner)

    @contextmanager
    def sequences(self, request: Request) -> Iterator[tuple[Backend, dict[str, Backend]]]:
        """What a run decodes with, the target's sequence and those of the draft models: the warm
        ones of its conversation; without one, fresh ones that are closed after it."""
        models = {"": self.loaded.backend, **self.drafts}
        warm, key = self.loaded.sequences, (request.owner, request.conversation)
        kept = request.conversation and request.measured is None
        opened = {n: warm.get(key, model) if kept else model.open() for n, model in models.items()}
        try:
            yield opened[""], {name: opened[name] for name in self.drafts}
        finally:
            if kept:
                warm.fit()
            else:
                for sequence in opened.values():
                    sequence.close()

    def prompt_of(self, request: Request, conversation: OpenConversation) -> tuple[list[int], int]:
        """The prompt of a request, and how many messages it leaves out. Raises PromptError where
        there is no room for more of an answer that is to go on, ModelError for another model."""
        chat, context = self.loaded.chat, conversation.databases.context
        thinking = request.generation.thinking
        if request.said and request.speaker != self.loaded.backend.info.fingerprint:
            raise ModelError("Another model was loaded meanwhile. Have the answer go on once more.")
        prompt, dropped = list(request.prompt), 0
        if request.prompt and request.said:
            context.expect(prompt)
        elif request.messages:
            if request.said:
                prompt, dropped = chat.go_on(request.messages, request.said, thinking)
            else:
                prompt, dropped = chat.fit(request.messages, request.begun, thinking)
            self.expect(conversation, prompt, request)
        elif request.text:
            begin = self.loaded.backend.info.begin
            prompt = splice(self.loaded.backend, begin + request.text, chat.tokens)
        info, length = self.loaded.backend.info, len(prompt) + len(request.said)
        if request.said and length >= info.context_length:
            raise no_room(info, length)
        return prompt, dropped

    def text_of(self, request: Request, prompt: Sequence[int]) -> tuple[TextStream, str]:
        """The text of an answer as far as it is there already, and what it has told of it."""
        detokenize, stop = self.loaded.backend.detokenize, request.generation.stop
        if request.begun or request.text:
            return behind(detokenize, stop, prompt), ""
        return resumed(detokenize, stop, request.said)

    def expect(
        self, conversation: OpenConversation, prompt: Sequence[int], request: Request
    ) -> None:
        """A conversation that was opened again has logged all but its last message before."""
        context, backend = conversation.databases.context, self.loaded.backend
        if context.log and not context.seen:
            fresh = len(backend.tokenize(backend.render(request.messages[-1:])))
            context.expect(prompt[: max(0, len(prompt) - fresh)])

    def past_answers(self, owner: str, stream: Stream[Event]) -> PastAnswers:
        """What the model said to an owner."""

        def recall() -> PastAnswers:
            wanted = WantedPastAnswers(self.loaded.backend.info.fingerprint)
            stored: StoredPastAnswers = recalled(stream, wanted)
            tier = ModelTier(
                stored.grams, lambda grams: self.emit(NgramsLearned(tuple(grams), tier.size))
            )
            return PastAnswers(tier, Calibration(stored.rows))

        return self.loaded.memory.answers_of(owner, recall)

    def open_conversation(
        self, request: Request, past: PastAnswers, stream: Stream[Event]
    ) -> OpenConversation:
        """The open conversation of a request, its context tier warm from what was stored."""
        memory = self.loaded.memory

        def recall() -> OpenConversation:
            wanted = WantedContextLog(self.loaded.backend.info.tokenizer_fingerprint)
            stored: StoredContextLog = (
                recalled(stream, wanted) if request.conversation else StoredContextLog()
            )

            def logged(tokens: Sequence[int]) -> None:
                if request.conversation:
                    self.emit(ContextLogged(tuple(tokens)))

            context = ContextTier(stored.tokens, logged, stored.cap)
            return OpenConversation(
                Databases(context, past.tier, memory.statistics, past.calibration)
            )

        if not request.conversation:
            return recall()
        return memory.conversation(request.owner, request.conversation, recall)

    def measured_events(
        self, request: Request, wanted: Measured, stream: Stream[Event]
    ) -> Iterator[Event]:
        """The events of a run that starts from nothing and leaves no trace."""
        loaded, method, generation = self.loaded, request.method, request.generation
        past = self.past_answers(request.owner, stream)
        loaded.memory.fit(request.owner)
        tier, calibration = past.tier, wanted.calibration
        if wanted.unlearned:
            tier = tier.without(wanted.unlearned, wanted.new)
        rows = past.calibration.rows() if calibration is None else calibration
        base = Databases(None, tier, loaded.memory.statistics, Calibration(rows))
        prompt = list(request.prompt)
        prompt = prompt or loaded.chat.prompt(request.messages, (), generation.thinking)
        with self.sequences(request) as (target, drafts):
            # What takes long to make is made before the run; what is missing is told at once.
            drafters = self.drafters(request, base.for_measuring(), stream, target, drafts)
            yield Started(target.info, tuple(prompt), 0, tuple(rows))
            if wanted.warm:
                warm_up(target, prompt, generation)
            cold((target, *drafts.values()))
            if self.table is not None:
                self.table.forget_look_ups()
            curve = loaded.copy_of(method) if drafters else None
            cancelled = stream.stopped.is_set
            yield from decode(
                target, prompt, drafters, generation, method.drafting, cancelled, curve
            )

    def drafters(
        self,
        request: Request,
        databases: Databases,
        stream: Stream[Any],
        target: Backend,
        drafts: Mapping[str, Backend],
    ) -> list[Drafter]:
        """What drafts for one answer; its faults become notices.

        Raises SettingError for draft models that are not there.
        """
        family = self.family(request.profile, target, drafts)
        sampling, cancelled = request.generation.sampling, stream.stopped.is_set
        method = self.loaded.suited(request.method)
        found = method.drafters(databases, family, sampling, cancelled, target)
        return [Guarded(each, lambda text: stream.put(Notice(text))) for each in found]

    def family(
        self, profile: Profile | None, target: Backend, drafts: Mapping[str, Backend]
    ) -> Family | None:
        """The loaded models with a profile; None without draft models."""
        if not drafts:
            return None
        if self.planned is None or self.planned.profile != profile:
            self.planned = Family(target, drafts, profile)
        family = Family(target, drafts, profile)
        family.plans = self.planned.plans
        return family

    # loading

    def load(self, wanted: Load) -> Stream[Loading]:
        return self.start(OWNER, lambda stream: self.replace_model(wanted, stream), urgent=True)

    def replace_model(self, wanted: Load, stream: Stream[Loading]) -> None:
        """Read a model and put it in the place of the loaded one."""
        both = min(wanted.runtime.tensor_parallel, self.loaded.runtime.tensor_parallel)
        # One model at a time is split over processes.
        before = None if wanted.beside and both == 1 else self.make_room()
        problem = ""
        try:
            self.use(self.read_model(wanted, stream))
        except StrataError as error:
            problem = str(error)
        except Exception as error:
            # The libraries below raise many types, out of memory among them.
            problem = (
                f"The model {wanted.source!r} cannot be used: {first_line(error)}. Choose another "
                "one, or a shorter context if memory ran out."
            )
        # Only now: an error holds on to the model that failed, and with it to its memory.
        gc.collect()
        if problem:
            raise ModelError(problem + (self.put_back(before, stream) if before else ""))

    def read_model(self, wanted: Load, stream: Stream[Loading]) -> Loaded:
        """A model, ready to answer: read, and known in its costs and its speed."""
        backend = self.loaders.load(wanted.source, wanted.runtime)
        if isinstance(backend, ServedModel):
            backend.connect(wanted.key)
            return Loaded(backend, DraftingMemory(None), wanted.source, wanted.runtime)
        if wanted.name:
            backend.info = replace(backend.info, name=wanted.name)

        def report(problem: str) -> None:
            stream.put(Notice(problem))

        loaded = self.loaded_of(backend, wanted.source, wanted.runtime, report)
        if backend.info.can_tree:
            known: Costs | None = None
            with suppress(Cancelled):
                # What has begun is not stopped any more: the old model may be gone.
                known = stream.ask(WantedCosts(backend.info))
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
        # What was measured is no conversation: its cache would only take memory.
        backend.close()
        return loaded

    def time_forwards(self, loaded: Loaded, stream: Stream[Any]) -> None:
        """Measure what forwards cost."""
        words = f"Measuring {loaded.backend.info.name} …"
        loaded.measure_costs(lambda share: stream.put(Share(share, words)))

    def make_room(self) -> tuple[Load, list[tuple[str, str]]] | None:
        """Let the loaded models go; what comes back is enough to have them again."""
        loaded = self.loaded
        info = loaded.backend.info
        served = loaded.backend
        key = served.access.key if isinstance(served, ServedModel) else ""
        old = Load(loaded.source, loaded.runtime, info.name, key=key)
        before = old, list(self.sources.items())
        there = loaded.there
        del loaded, served
        self.use(no_model(info))
        gc.collect()
        return before if there else None

    def put_back(self, before: tuple[Load, list[tuple[str, str]]], stream: Stream[Loading]) -> str:
        """Have the models again that made room; what came of it, as the end of a message."""
        old, drafts = before
        stream.put(Share(None, f"Loading {old.name} again …"))
        try:
            self.use(self.read_model(old, stream))
        except Exception as error:
            # As above. What read it once may fail now: its files may be gone.
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

    def load_drafts(self, wanted: Sequence[tuple[str, str]]) -> Stream[Loading]:
        return self.start(OWNER, lambda stream: self.read_drafts(wanted))

    def read_drafts(self, wanted: Sequence[tuple[str, str]]) -> None:
        """Have these draft models; those that are loaded already stay as they are."""
        self.need_model_here()
        there = {(name, source): self.drafts[name] for name, source in self.sources.items()}
        drafts: dict[str, Backend] = {}
        for name, source in wanted:
            known = there.get((name, source))
            drafts[name] = known or self.loaders.load(source, self.loaded.runtime.unsplit)
        family = Family(self.loaded.backend, drafts)
        self.use_drafts(family.drafts, {name: dict(wanted)[name] for name in family.drafts})

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
        """The statistics for the loaded model's tokenizer."""
        return self.loaded.memory.statistics

    def need_drafts(self) -> None:
        """Raise SettingError unless draft models are loaded."""
        self.need_model()
        if not self.drafts:
            raise SettingError("No draft model is loaded. Load one in the Stack tab first.")

    # at once

    def check(self, text: str) -> None:
        self.loaded.chat.check(text)

    def measure(self, messages: Sequence[Message]) -> Size:
        return self.loaded.chat.measure(messages)

    def counts(self, texts: Sequence[str]) -> list[int]:
        return [self.loaded.chat.counted(text) for text in texts]

    def check_turn(self, owner: str) -> None:
        self.queue.check(owner)

    def texts(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        detokenize = self.loaded.backend.detokenize
        return [detokenize(each) for each in tokens]

    def tokens(self, documents: Sequence[Document], tokenizer: str) -> list[list[int]]:
        backend = self.loaded.backend
        if backend.info.tokenizer_fingerprint != tokenizer:
            raise ModelError(
                f"{backend.info.name} is loaded now, whose tokenizer is another one. Begin again."
            )
        return [backend.tokenize(document_text(document, backend)) for document in documents]

    def read_statistics(self) -> None:
        def work() -> None:
            loaded = self.loaded
            if loaded.there:
                found = self.statistics(loaded.backend.info.tokenizer_fingerprint, lambda _: None)
                # All that was remembered comes back from where it is stored.
                loaded.memory = DraftingMemory(found)

        self.queue.thread.submit(work)

    def need(self, source: str, runtime: Runtime) -> Need:
        return self.loaders.need(source, runtime)

    def device(self, source: str, runtime: Runtime) -> str:
        return self.loaders.device(source, runtime)

    def free(self, device: str) -> int:
        return self.loaders.free(device)

    def forget(self, owner: str, conversation: str | None = None, past: bool = False) -> None:
        loaded = self.loaded
        loaded.memory.unwanted.append((owner, conversation, past))

        def sweep() -> None:
            loaded.memory.sweep()
            if conversation is not None:
                loaded.sequences.drop((owner, conversation))

        # At once where nothing runs. The next run looks as well, as it may come before this.
        self.queue.thread.submit(sweep)

    def close(self) -> None:
        self.queue.close()
        self.use(no_model())


def recalled(stream: Stream[Any], wanted: Any) -> Any:
    """What was stored. Raises Cancelled when the run is stopped before that is known."""
    try:
        return stream.ask(wanted)
    except Cancelled:
        raise before_it_began() from None


def document_text(document: Document, backend: Tokenizer) -> str:
    """A document as the model would see it; one that ends with an answer ends as answers do."""
    if isinstance(document, str):
        return document
    if document and document[-1].role == "assistant":
        end = backend.detokenize(sorted(backend.info.eos_ids)[:1])
        return backend.render(document[:-1]) + document[-1].content + end
    return backend.render(document)
