"""The base of all tabs. It connects events to handlers, turns errors into notices, discards late
answers, and shows long work with its progress.

No event waits for another in Gradio's queue. Requests for the model wait in a queue of Strata's own
(app/service/jobs.py), which shows each request's place and can be left. No event is an API endpoint
for other programs. Long work is a job (app/service/jobs.py), and a page that opens while it runs
follows it too. A file that a page saves is fetched once, under a token that nobody can guess
(app/web/routes.py).
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial, update_wrapper, wraps
from html import escape
from inspect import Parameter, Signature, isasyncgenfunction, isgeneratorfunction, signature
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import gradio as gr
import plotly.graph_objects as go
from gradio.blocks import Block
from gradio.events import Dependency

from app.service.jobs import LOOK_SECONDS, Job, Progress
from app.service.pages import Download
from app.service.session import Session
from app.web import markup
from app.web.markup import fine_print
from assets import read
from engine.errors import Cancelled, StorageError, StrataError, first_line
from engine.text import well_formed

Updates = dict[Block, object]
"""What an event changes: the new value of each component, or a `gr.update`."""
Memory = dict[str, str | None] | None
"""What the browser remembers: its own id, and the id of the open conversation. None at first."""
Blocks = Block | Sequence[Block]
Trigger = Callable[..., Any]
"""A method of a component that connects one of its events, such as `button.click`."""
Mode = Literal["once", "multiple", "always_last"]
"""What happens when an event is triggered again while its handler runs: the new trigger is ignored
("once"), both run at the same time ("multiple"), or the last one runs next ("always_last")."""

P = TypeVar("P")
R = TypeVar("R")

log = logging.getLogger(__name__)
AT_ONCE: dict[str, Any] = {
    "api_visibility": "private",
    "show_progress": "hidden",
    "show_progress_on": (),
    "concurrency_limit": None,
}
"""Arguments for Gradio: an event that waits for no other and shows no spinner on any component,
because spinners cost the page time (app/web/gradio_workarounds.py). It still goes through Gradio's
queue: without it, a handler could not show notices."""
AFTER: dict[str, Any] = {**AT_ONCE, "trigger_mode": "multiple"}
"""Arguments for an event that follows another one, each time."""
LATEST: dict[str, Any] = {**AT_ONCE, "trigger_mode": "always_last"}
"""Arguments for an event that follows a choice. Of the choices made while it runs, it follows the
last one."""


html = partial(gr.HTML, apply_default_css=False)
small_button = partial(gr.Button, size="sm")
upload_button = partial(gr.UploadButton, size="sm", type="filepath")
text_table = partial(gr.Dataframe, datatype="str", interactive=False)
"""Components of Gradio as most tabs build them."""


class Event(NamedTuple):
    handler: Callable[..., Any]
    inputs: Blocks | None
    outputs: Blocks | None


def owner_of(session: Session, memory: Memory, request: gr.Request) -> str:
    """The owner who triggered an event. `memory` is what the browser remembers."""
    return session.owner(request.username, (memory or {}).get("browser"))


class Payload:
    """What a page sent with an event, its texts made well-formed. It can be anything: a value of
    another type than expected counts as missing."""

    def __init__(self, data: gr.EventData) -> None:
        self.values: dict[str, Any] = (
            well_formed(data._data) if isinstance(data._data, dict) else {}
        )

    def text(self, name: str) -> str:
        found = self.values.get(name)
        return found if isinstance(found, str) else ""

    def integer(self, name: str, missing: int = -1) -> int:
        found = self.values.get(name)
        return found if isinstance(found, int) else missing

    def all_of(self, name: str, kind: type[P]) -> list[P]:
        """The items of a list that have this type."""
        found = self.values.get(name)
        return [each for each in found if isinstance(each, kind)] if isinstance(found, list) else []


def clicked_row(event: gr.SelectData) -> int:
    at = event.index
    return int(at[0] if isinstance(at, list | tuple) else at)


def channel(name: str) -> gr.HTML:
    """A hidden component whose new values become events of the document, "strata:`name`"."""
    return html(
        visible="hidden",
        html_template="",
        js_on_load=f'watch("value", () => document.dispatchEvent('
        f'new CustomEvent("strata:{name}", {{ detail: props.value }})));',
    )


NUMBERS = count(1)


def numbered(value: dict[str, object]) -> dict[str, object]:
    """The value with a fresh number, because Gradio does not send a value that equals the last."""
    return {**value, "number": next(NUMBERS)}


@contextmanager
def uploaded(file: str | None) -> Iterator[Path]:
    """The path of an uploaded file. It is deleted afterwards, because Gradio would keep it."""
    path = Path(file or "")
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink()


def upload_content(file: str | None, most: int | None = None) -> bytes:
    """The content of an uploaded file, which is then deleted; no more than one byte beyond `most`,
    if that is given. Raises StorageError."""
    with uploaded(file) as path:
        try:
            with path.open("rb") as opened:
                return opened.read(-1 if most is None else most + 1)
        except OSError as error:
            raise StorageError(f"The file cannot be read ({error.strerror}). Try again.") from error


def warn(message: str) -> None:
    """Show a notice in the corner of the page. `message` is escaped."""
    gr.Warning(escape(message))


def explained(error: Exception) -> str:
    """The text about an error for the user. An error that is not a StrataError is a defect of the
    program, so its traceback goes to the log."""
    if isinstance(error, StrataError):
        return str(error)
    log.error("A request of the page failed.", exc_info=error)
    return (
        f"This failed because of an error in Strata ({type(error).__name__}: {first_line(error)}). "
        "The terminal shows its details, which help to report it. Reload the page and try again."
    )


@contextmanager
def notify_errors() -> Iterator[None]:
    """Show any error as a notice, and skip the rest of the block."""
    try:
        yield
    except Exception as error:
        warn(explained(error))


def show_notices(session: Session, owner: str) -> None:
    for notice in session.notices.take(owner):
        warn(notice)


Keep = Callable[[Any], Any]
"""Replaces the late parts of an answer with `gr.skip()`."""
Guard = Callable[["RefreshGuard"], AbstractContextManager[Keep]]
"""How the guard of a tab treats an event: REFRESH, ACT or `newest(...)`."""


class RefreshGuard:
    """Prevents late answers from undoing what the user did since. It is the value of a gr.State.

    Handlers take time, and their answers arrive in any order. An event does not update a component
    that a newer event will update too. A refresh, which only shows the current state, updates
    nothing that the user has requested or changed since the refresh began. A refresh that begins
    before an act has its first answer updates nothing, because the values that it received from the
    page may be older than the act.
    """

    def __init__(self) -> None:
        self.acts = 0
        self.unanswered = set[object]()
        self.last: dict[Block, UpdateRequest] = {}

    @contextmanager
    def refresh(self) -> Iterator[Keep]:
        """Guard a refresh, which gives way to everything that the user does meanwhile."""
        if self.unanswered:
            yield skip_all
            return
        acts, before = self.acts, {part: one for part, one in self.last.items() if one.over}

        def keep(updates: Updates) -> Updates:
            return {
                part: value
                if self.acts == acts and self.last.get(part) is before.get(part)
                else gr.skip()
                for part, value in updates.items()
            }

        yield keep

    @contextmanager
    def act(self) -> Iterator[Keep]:
        """Guard an act of the user on the tab as a whole. All refreshes give way to it."""
        self.acts += 1
        this_act = object()
        self.unanswered.add(this_act)

        def keep(updates: Updates) -> Updates:
            self.unanswered.discard(this_act)
            return updates

        try:
            yield keep
        finally:
            self.unanswered.discard(this_act)

    @contextmanager
    def newest(self, parts: Sequence[Block], of: Sequence[Block] = ()) -> Iterator[Keep]:
        """Guard a request to update `parts`. It updates those that no newer request will update.

        The answer depends on what the components `of` show. While another request is updating one
        of these, this one updates nothing.
        """
        if any(part in self.last and not self.last[part].over for part in of):
            yield skip_all
            return
        request = UpdateRequest()
        self.last.update(dict.fromkeys(parts, request))

        def keep(updates: Updates) -> Updates:
            late = {part for part in parts if self.last[part] is not request}
            return {part: gr.skip() if part in late else value for part, value in updates.items()}

        try:
            yield keep
        finally:
            request.over = True


class UpdateRequest:
    over = False


def skip_all(updates: Updates) -> Updates:
    return dict.fromkeys(updates, gr.skip())


REFRESH: Guard = RefreshGuard.refresh
ACT: Guard = RefreshGuard.act


def newest(parts: Sequence[Block], of: Sequence[Block] = ()) -> Guard:
    """See `RefreshGuard.newest`."""
    return lambda guard: guard.newest(parts, of)


class Visit(NamedTuple):
    """Who triggered an event: the owner, the id of the open page, and what its browser
    remembers."""

    owner: str
    page: str
    memory: Memory


PROVIDED = ("visit", "owner", "request", "data")
"""The names of the arguments that the kit itself provides to a handler."""


class Tab:
    """A tab. Its attributes are components, and its methods are the handlers of their events.

    `on` connects the two. A handler may be a function, a generator or an async generator. Its first
    arguments may be, in any order: `visit` or only its `owner`, who triggered the event; `request`;
    and `data`, what the page sent with the event. The values of the inputs follow. If the handler
    returns {}, the outputs stay as they are. So they do if it raises an error, which is shown as a
    notice.
    """

    def __init__(self, session: Session, memory: gr.BrowserState) -> None:
        self.session, self.memory = session, memory

    @cached_property
    def guard(self) -> gr.State:
        """The state that holds each page's RefreshGuard."""
        return gr.State(RefreshGuard())

    @cached_property
    def outgoing(self) -> gr.Textbox:
        """The hidden component that brings files to the page."""
        return gr.Textbox(visible="hidden")

    def event(
        self,
        handler: Callable[..., Any],
        inputs: Blocks = (),
        outputs: Blocks = (),
        guard: Guard | None = None,
        refused: object = None,
    ) -> Event:
        """An event for several triggers. `guard` says how late answers are treated; `refused` is
        the answer if the handler raises an error."""
        input_list, output_list = (
            list(each) if isinstance(each, Sequence) else [each] for each in (inputs, outputs)
        )
        provided = provided_arguments(handler)
        first: list[Block] = [self.guard] if guard is not None else []
        first += [self.memory] if {"visit", "owner"} & provided.keys() else []
        no_change = {output_list[0]: gr.skip()} if output_list else None

        @contextmanager
        def call(request: gr.Request, *values: Any) -> Iterator[tuple[list[object], Keep]]:
            rest: list[Any] = well_formed([*values])
            data = rest.pop(0) if "data" in provided else None
            state: Any = rest.pop(0) if guard is not None else None
            memory: Memory = rest.pop(0) if self.memory in first else None
            context = nullcontext(unchanged) if guard is None else guard(state)
            known: dict[str, Any] = {"request": request, "data": data}
            if self.memory in first:
                owner = owner_of(self.session, memory, request)
                visit = Visit(owner, request.session_hash or "", memory)
                known |= {"owner": owner, "visit": visit}
            with context as keep, notify_errors():
                yield (
                    [*(known[name] for name in provided), *rest],
                    lambda updates: no_change if updates == {} else keep(updates),
                )

        types = {"request": gr.Request}
        if "data" in provided:
            types["data"] = provided["data"]
        return Event(
            gradio_handler(handler, call, types, no_change if refused is None else refused),
            [*first, *input_list],
            output_list,
        )

    def on(
        self,
        triggers: Trigger | Sequence[Trigger],
        handler: Callable[..., Any] | Event,
        inputs: Blocks = (),
        outputs: Blocks = (),
        *,
        mode: Mode = "once",
        guard: Guard | None = None,
        refused: object = None,
        concurrency_limit: int | None = None,
        js: str | None = None,
    ) -> Dependency:
        """Connect a handler. `js` is a script that first gets the inputs, and returns them."""
        if not isinstance(handler, Event):
            handler = self.event(handler, inputs, outputs, guard, refused)
        options = {**AT_ONCE, "trigger_mode": mode, "concurrency_limit": concurrency_limit}
        options["js"] = js
        connect = partial(gr.on, triggers) if isinstance(triggers, Sequence) else triggers
        done: Dependency = connect(*handler, **options)
        return done

    def then(
        self,
        before: Dependency,
        handler: Callable[..., Any] | Event,
        inputs: Blocks = (),
        outputs: Blocks = (),
        *,
        guard: Guard | None = None,
    ) -> Dependency:
        """Connect a handler that runs after each run of another event."""
        return self.on(before.then, handler, inputs, outputs, mode="multiple", guard=guard)

    def confirm(
        self,
        question: "Confirmation",
        act: Callable[..., Any],
        inputs: Blocks = (),
        outputs: Sequence[Block] = (),
        *,
        ask: Callable[..., Updates] | None = None,
        guard: Guard | None = None,
    ) -> Dependency:
        """Ask for confirmation before the handler `act` runs, which hides the question again. `ask`
        shows the question, if that is not always the same. It has the same inputs and outputs."""
        shown, click = question.shown, question.button.click
        filled, closed = [*dict.fromkeys([shown, *outputs])], {shown: hide()}

        def always(*_: object) -> Updates:
            return {shown: show()}

        self.on(click, ask or always, inputs, filled, guard=newest([shown]), refused=closed)
        self.on(question.no.click, hide, (), shown)
        return self.on(question.yes.click, act, inputs, filled, guard=guard, refused=closed)

    def on_save(
        self, trigger: Trigger, handler: Callable[..., Download], inputs: Blocks = ()
    ) -> None:
        """Have the page save the file that a handler makes."""

        @wraps(handler)
        def offer(*values: Any) -> str:
            file = handler(*values)
            token = self.session.downloads.offer(file)
            return json.dumps({"token": token, "name": file.name})

        offered = self.on(trigger, offer, inputs, self.outgoing, refused="")
        offered.then(None, self.outgoing, self.outgoing, js=SAVE_FILE, **AFTER)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A button that asks before it acts. The question stands in `shown`, which is hidden at
    first."""

    button: gr.Button
    shown: gr.Row | gr.Column
    yes: gr.Button
    no: gr.Button

    @classmethod
    def build(cls, button: gr.Button, yes: str, no: str) -> "Confirmation":
        """A question that consists of two buttons in a row."""
        with gr.Row(visible=False, elem_classes="asking") as row:
            agree = small_button(yes, variant="stop", min_width=60)
            return cls(button, row, agree, small_button(no, min_width=60))


def show() -> dict[str, Any]:
    return gr.update(visible=True)


def hide() -> dict[str, Any]:
    return gr.update(visible=False)


def provided_arguments(handler: Callable[..., Any]) -> dict[str, Any]:
    """The arguments at the beginning of a handler that the kit provides, with their types."""
    found = dict[str, Any]()
    for name, parameter in signature(handler).parameters.items():
        if name not in PROVIDED:
            break
        found[name] = parameter.annotation
    return found


def unchanged(updates: Any) -> Any:
    return updates


def gradio_handler(
    handler: Callable[..., Any],
    call: Callable[..., AbstractContextManager[tuple[list[object], Keep]]],
    types: dict[str, Any],
    refused: object,
) -> Callable[..., Any]:
    """A function that Gradio calls in place of `handler`, with an argument of each of the `types`
    and then the values of the inputs. Gradio finds the types in the function's annotations. `call`
    makes the handler's arguments from these values."""

    async def async_answers(*values: Any) -> AsyncIterator[Any]:
        with call(*values) as (arguments, keep):
            async for updates in handler(*arguments):
                yield keep(updates)

    def answers(*values: Any) -> Iterator[Any]:
        with call(*values) as (arguments, keep):
            for updates in handler(*arguments):
                yield keep(updates)

    def answer(*values: Any) -> Any:
        with call(*values) as (arguments, keep):
            return keep(handler(*arguments))
        return refused

    made: Any = async_answers if isasyncgenfunction(handler) else answer
    made = answers if isgeneratorfunction(handler) else made
    made.__annotations__ = types
    typed = [
        Parameter(name, Parameter.POSITIONAL_ONLY, annotation=kind) for name, kind in types.items()
    ]
    made.__signature__ = Signature([*typed, Parameter("values", Parameter.VAR_POSITIONAL)])
    return update_wrapper(made, handler, ("__name__", "__qualname__"), ())


SAVE_FILE = read("save.js")
"""The script with which the page saves a file that it was offered."""


def text_file(name: str, kind: str, text: str) -> Download:
    """A file of text. `kind` is its media type."""
    return Download(name, kind, lambda: iter([text.encode("utf-8", "replace")]))


def grid(figures: Sequence[go.Figure]) -> list[gr.Plot]:
    """A component for each figure, two in a row. An odd last one takes the whole width."""
    plots: list[gr.Plot] = []
    for start in range(0, len(figures), 2):
        with gr.Row(elem_classes="plots"):
            plots += [
                gr.Plot(figure, show_label=False, container=False)
                for figure in figures[start : start + 2]
            ]
    return plots


@dataclass(slots=True)
class JobCard:
    """The controls of a job. Each of the `buttons` begins it in its own way; they are hidden while
    it runs. `stop` ends it. `status` shows its progress, then its outcome."""

    buttons: list[gr.Button]
    stop: gr.Button
    status: gr.HTML

    @classmethod
    def build(cls, name: str, *titles: str) -> "JobCard":
        """A button for each title, the Stop button and the status. Their ids begin with `name`."""
        with gr.Row(elem_classes="presets"):
            buttons = [
                small_button(title, elem_id=f"{name}-load{number or ''}")
                for number, title in enumerate(titles)
            ]
            stop = small_button("Stop", variant="stop", visible=False, elem_id=f"{name}-stop")
        return cls(buttons, stop, html(elem_id=f"{name}-status"))

    def busy(self, *others: Block) -> Updates:
        """The updates when a job begins. None of the `others` can be used while it runs."""
        return {
            **{other: gr.update(interactive=False) for other in others},
            **{button: gr.update(visible=False) for button in self.buttons},
            self.stop: gr.update(visible=True),
        }

    def idle(self, *others: Block, status: str | None = None) -> Updates:
        """The updates when no job runs. `status` is the last outcome; None leaves what is shown."""
        return {
            **{other: gr.update(interactive=True) for other in others},
            **{button: gr.update(visible=True) for button in self.buttons},
            self.stop: gr.update(visible=False),
            **({} if status is None else {self.status: status}),
        }

    def follow(
        self,
        reports: Iterator[Progress],
        done: Callable[[Progress], str],
        failed: Callable[[StrataError], str],
    ) -> Generator[Updates, None, str]:
        """Show the progress of a job. Returns its outcome, as HTML for `status`: that of `done` for
        the last report, that of `failed` for an error, or the message of a job that was stopped."""
        last = None
        try:
            for report in reports:
                if report != last:
                    yield {self.status: markup.progress(report)}
                last = report
            return done(last or Progress(None, ""))
        except Cancelled as error:
            return fine_print(str(error))
        except Exception as error:
            return failed(StrataError(explained(error)))


async def watched(job: Job[P, R]) -> AsyncIterator[P]:
    """The progress of a job, as from `Job.watch`, until the job is over. It holds no thread, so
    many pages can watch a job that takes hours."""
    while not job.over.is_set():
        yield job.progress
        await asyncio.sleep(LOOK_SECONDS)
