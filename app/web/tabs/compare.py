"""The Compare tab: one prompt answered in two ways that differ in method, settings or model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Any

import gradio as gr
import plotly.graph_objects as go
from gradio.events import Dependency

from app.service.comparison import LEFT, RIGHT, Pace, Progress, Race, Side
from app.service.models import title_of as title_of_model
from app.service.preferences import Preferences
from app.service.session import Session
from app.web import charts, models_html, render
from app.web.colors import ink
from app.web.kit import Tab, Updates, explained, grid, html, notify_errors, show_notices, warn
from app.web.markup import DASH, milliseconds, template, times, verdict
from app.web.metrics_panel import steps_known
from app.web.run_html import (
    EXACT,
    LEFT_AND_RIGHT,
    PLAIN_AND_DRAFTS,
    another_text,
    difference,
    gained,
    on_server,
    same_texts,
    title_of,
    two_servers,
    waiting_line,
)
from app.web.tabs.settings import Settings, methods, number
from app.web.token_view import token_view
from engine import runs
from engine.errors import Cancelled
from engine.methods import PLAIN, USUAL, method_named
from engine.metrics import summarise
from engine.models.formats import format_of
from engine.queue import Waiting
from engine.rounds import TURN
from engine.runs import Verdict
from engine.servers.client import GUARANTEE
from engine.settings import BUDGETS
from engine.types import NO_RUN, TIERS, Run
from storage.steps import digest

PROMPT = "Write a short story about a fox who learns to read, then tell it again in other words."
MOST_REPEATS = 7
UPDATES_PER_SECOND = 5
LOADED = ("The loaded model", "")
AS_CHOSEN = "as in Settings"
NAMES = ("Left", "Right")


class Choices:
    """The choices of one side: its method, its model (None for guests, who cannot change it), and
    the settings in which it differs from the Settings tab. Those that rarely differ are folded
    away. `side_of` takes the values of the `inputs`."""

    def __init__(self, session: Session, side: int, method: str) -> None:
        name, key = NAMES[side], "compare" if side == RIGHT else "compare-left"
        with gr.Column(min_width=320, elem_classes="card"):
            with gr.Row(elem_classes="pair"):
                self.method = gr.Dropdown(
                    methods(session),
                    value=method,
                    label=f"{name}: method",
                    allow_custom_value=True,
                    min_width=200,
                    elem_id=f"{key}-method",
                )
                self.model: gr.Dropdown | None = None
                if not session.guests:
                    self.model = gr.Dropdown(
                        [LOADED],
                        value="",
                        label=f"{name}: model",
                        min_width=200,
                        elem_id=f"{key}-model",
                    )
            with gr.Accordion(f"{name}: other settings", open=False, elem_id=f"{key}-settings"):
                gr.HTML("<p class='fine'>An empty field uses the value in Settings.</p>")
                with gr.Row(elem_classes="pair"):
                    self.temperature = gr.Textbox(
                        label=f"{name}: temperature",
                        placeholder=AS_CHOSEN,
                        max_lines=1,
                        min_width=140,
                        elem_id=f"{key}-temperature",
                    )
                    self.tiers = gr.Dropdown(
                        [(ink(tier).title, tier) for tier in TIERS],
                        value=[],
                        multiselect=True,
                        label=f"{name}: databases",
                        min_width=180,
                    )
                with gr.Row(elem_classes="pair"):
                    self.budget = gr.Dropdown(
                        [("As in Settings", ""), *((one.capitalize(), one) for one in BUDGETS)],
                        value="",
                        label=f"{name}: draft size",
                        min_width=140,
                    )
                    self.nodes = gr.Textbox(
                        label=f"{name}: max drafted tokens",
                        placeholder=AS_CHOSEN,
                        max_lines=1,
                        min_width=180,
                    )
        model = [self.model] if self.model is not None else []
        self.inputs = [self.method, self.temperature, self.tiers, self.budget, self.nodes, *model]


def models_of(session: Session) -> list[tuple[str, str]]:
    loaders = session.models.loaders
    present = (
        candidate
        for candidate in session.models.candidates()
        if not candidate.loaded and loaders.present(candidate.source)
    )
    return [LOADED, *map(models_html.choice, present)]


def side_of(preferences: Preferences, values: Sequence[object]) -> Side:
    """A side from the values of its inputs. Empty ones are as in Settings. Raises SettingError."""
    method, temperature, tiers, budget, nodes, *model = values
    generation, drafting = preferences.generation, preferences.drafting
    if temperature:
        heat: Any = typed(temperature)
        drawn = replace(generation.sampling, temperature=heat)
        generation = replace(generation, sampling=drawn)
    if isinstance(tiers, list | tuple) and tiers:
        drafting = replace(drafting, tiers=tuple(tiers))
    if budget:
        drafting = replace(drafting, budget=str(budget))
    if nodes:
        drafting = replace(drafting, nodes=number(0, typed(nodes)))
    source = str(model[0] or "") if model else ""
    return Side(method_named(str(method), drafting), generation, source)


def typed(value: object) -> object:
    """A typed number. Anything else is returned as it is, because the settings report it."""
    try:
        return float(str(value).replace(",", "."))
    except ValueError:
        return value


def model_label(session: Session, source: str) -> str:
    """The name of a model with its kind, because a folder and a GGUF file may share a name."""
    info = session.current.info
    if not source or source == session.models.source:
        return f"{info.name} ({info.kind})"
    return f"{title_of_model(source)} ({format_of(source).kind})"


def idle(session: Session) -> str:
    return template("compare_idle.html", info=session.current.info, guarantee=GUARANTEE)


def head(title: str, run: Run | None) -> str:
    figures: Sequence[tuple[str, str]] = ()
    if run is not None and run.steps:
        metrics = summarise(run)
        length = f"{metrics.mean_acceptance_length:.2f}" if steps_known(metrics) else DASH
        figures = (
            (f"{metrics.tokens_per_second:,.0f}", "tokens/s"),
            (milliseconds(metrics.ttft_seconds), "first token"),
            (milliseconds(metrics.decode_seconds), "decoding"),
            (milliseconds(metrics.seconds), "whole answer"),
            (length, "tokens/step"),
        )
    return template("side.html", title=title, figures=figures)


def lane(run: Run) -> str:
    """The head of one side of a race. The time of a step is not that of an answer alone."""
    figures: Sequence[tuple[str, str]] = ()
    if run.steps:
        metrics = summarise(run)
        figures = (
            (f"{metrics.tokens:,}", "tokens"),
            (f"{metrics.forwards:,}", "forwards"),
            (f"{metrics.mean_acceptance_length:.2f}", "tokens/step"),
        )
    return template("side.html", title=title_of(run.method), figures=figures)


def result(session: Session, race: Race) -> str:
    """Which side of a race was first, and whether the texts are the same."""
    if not race.over:
        return verdict("Both sides answer at once, in turns of equal time …", "running")
    if race.cancelled or race.first is None:
        return verdict("Stopped before both sides were finished.")
    left, right = (summarise(run).seconds for run in race.runs)
    text = "<b>Both were done</b> within a tenth of a second."
    if abs(left - right) > TURN:
        ended, other = race.runs[race.first], race.runs[RIGHT if race.first == LEFT else LEFT]
        text = f"<b>{NAMES[race.first]} was first</b> ({escape(title_of(ended.method))}). "
        text += f"The other side then had {race.behind:,} of its {len(other.tokens):,} tokens."
    more = " Both had the machine for half of the time: for a speedup, press Compare."
    if race.differs:
        return verdict(f"{text} Their texts may differ.{more}")
    found = runs.verdict(session.current.text, *race.runs)
    if found.identical:
        return verdict(f"{text} The texts are identical.{more}", "same")
    where = f"differ from token {found.position:,} on"
    if race.same_text:
        return verdict(
            f"{text} The texts {where}: Compare shows how close it was.{more}", "differs"
        )
    return verdict(f"{text} The texts {where}, as Same distribution does not keep them.{more}")


def heading(progress: Progress, run: Run, model: str) -> str:
    """The title of a side: its method, and its model or temperature if the sides differ in it."""
    title = title_of(run.method)
    if progress.differs == "model" or progress.foreign:
        return f"{title} · {model}"
    settings = run.settings.get("generation", {}).get("sampling", {})
    if progress.differs == "settings" and "temperature" in settings:
        return f"{title} · temperature {settings['temperature']:g}"
    return title


def banner(session: Session, progress: Progress, repeats: int) -> str:
    """The verdict on all finished repeats. The texts of tokens are escaped."""
    if progress.cancelled and not progress.pairs:
        return verdict("Stopped before both runs were finished.")
    verdicts = [] if progress.differs else [judged(session, progress, *p) for p in progress.pairs]
    sides = PLAIN_AND_DRAFTS if is_plain(progress, LEFT) else LEFT_AND_RIGHT
    for repeat, found in enumerate(verdicts, start=1):
        if not found.identical and progress.same_text and not progress.served:
            return difference(found, f" in repeat {repeat}", sides)
    if len(progress.pairs) < repeats and not progress.cancelled:
        name = title_of(progress.running.method) if progress.running else "Next"
        so_far = ""
        if progress.pairs and progress.same_text:
            so_far = f"; identical in {len(progress.pairs)} so far"
        at = f"repeat {progress.repeat + 1} of {repeats}{so_far}"
        return verdict(f"{escape(name)}, {at} …", "running")
    if progress.differs:
        return unlike(progress)
    speed = outcome(progress)
    other = next((found for found in verdicts if not found.identical), None)
    if progress.served:
        return on_server(progress, other, speed)
    if other is not None:
        return another_text(other, speed)
    count = len(progress.pairs[-1][LEFT].tokens)
    exact = EXACT if session.current.info.exact and not progress.foreign else ""
    often = f"{len(progress.pairs)} of {repeats} repeats"
    return verdict(f"<b>Identical</b>: all {count:,} tokens in {often} ({speed}).{exact}", "same")


def judged(session: Session, progress: Progress, left: Run, right: Run) -> Verdict:
    """Whether a pair gave the same text. If their model was unloaded, the runs themselves hold the
    texts of the tokens."""
    if not progress.foreign:
        return runs.verdict(session.current.text, left, right)
    spelled = {token.id: token.text for run in (left, right) for token in run.tokens}
    return runs.verdict(lambda tokens: "".join(spelled[one] for one in tokens), left, right)


def is_plain(progress: Progress, side: int) -> bool:
    return not progress.pairs or progress.pairs[-1][side].method == PLAIN.name


def outcome(progress: Progress) -> str:
    ended = "stopped early, " if progress.cancelled else ""
    side = "" if is_plain(progress, LEFT) else " of the right side"
    return f"{ended}{gained(progress.speedup, f'median speedup{side}')}{spread(progress)}"


def spread(progress: Progress) -> str:
    known = [ratio for ratio in ratios(progress) if ratio is not None]
    if len(known) < 2 or whole(progress) is None:
        return ""
    shown = f"of which repeat {progress.middle + 1} is shown"
    return f"; repeats {min(known):.2f}–{max(known):.2f}×, {shown}"


def ratios(progress: Progress | None) -> list[float | None]:
    """How many times as fast the right side was in each pair, by time per token. For two models,
    whose tokens have different lengths, it is by time per character."""
    if progress is None:
        return []
    if progress.differs == "model":
        return [replace(progress, pairs=(pair,)).by_character for pair in progress.pairs]
    return [pair.whole for pair in progress.speedups]


def whole(progress: Progress | None) -> float | None:
    if progress is None:
        return None
    return progress.by_character if progress.differs == "model" else progress.speedup.whole


def unlike(progress: Progress) -> str:
    """The verdict on two sides whose texts may differ, which is about their speeds."""
    count = len(progress.pairs)
    over = f"{count} repeat{'s' * (count > 1)}" + (", stopped early" if progress.cancelled else "")
    text = "Their texts may differ, so only speeds and texts are shown."
    if two_servers(progress):
        title, unit = same_texts(progress), "characters per second"
        text, more = GUARANTEE, f"{spread(progress)})."
    elif progress.differs == "model":
        title, unit = "Two models", "characters per second"
        more = f"{spread(progress)}). Tokens of two models are not equally long."
    else:
        title, unit = "Other settings", "tokens per second"
        more = f"{spread(progress)}; decoding alone {times(progress.speedup.decoding)})."
    return verdict(
        f"<b>{title}</b>, {over}. {text} The right side writes <b>{times(whole(progress))}</b> as "
        f"many {unit} (median of whole answers{more}"
    )


def drawn(progress: Progress | None) -> list[go.Figure]:
    """The six charts of the median pair. They show the side that drafts, compared with the
    other."""
    left, right = NO_RUN, NO_RUN
    if progress and progress.pairs:
        left, right = progress.pairs[progress.middle]
    first = charts.speedups(ratios(progress), whole(progress))
    if progress is None or is_plain(progress, LEFT) and not progress.differs:
        return [first, *charts.of_run(digest(right), digest(left))]
    first.update_layout(title_text="Speed of the right side over the left one")
    backwards = is_plain(progress, RIGHT) and not is_plain(progress, LEFT)
    fast, other = (left, right) if backwards else (right, left)
    drawn = charts.of_run(digest(fast), digest(other))
    drafting, plain = NAMES if backwards else NAMES[::-1]
    names = {"with drafts": drafting, "plain": plain}
    drawn[0].for_each_trace(lambda line: line.update(name=names.get(line.name, line.name)))
    return [first, *drawn]


class Compare(Tab):
    controls: Settings

    def __init__(self, session: Session, memory: gr.BrowserState) -> None:
        super().__init__(session, memory)
        with gr.Row(elem_classes="ask"):
            self.prompt = gr.Textbox(
                PROMPT,
                label="Prompt",
                lines=2,
                max_lines=8,
                scale=5,
                elem_id="compare-prompt",
                info="Sampling, seed and system prompt come from the Settings tab.",
            )
            self.repeats = gr.Slider(1, MOST_REPEATS, value=3, step=1, label="Repeats", scale=2)
            with gr.Column(scale=1, min_width=110, elem_classes="go"):
                self.run_button = gr.Button("Compare", variant="primary", elem_id="compare")
                self.race_button = gr.Button("Race", elem_id="compare-race")
                self.stop_button = gr.Button(
                    "Stop", variant="stop", visible=False, elem_id="compare-stop"
                )
        with gr.Row(elem_classes="sides ask"):
            left = Choices(session, LEFT, PLAIN.name)
            right = Choices(session, RIGHT, USUAL.name)
        self.verdict = html(idle(session), elem_id="verdict")
        with gr.Row(elem_classes="sides"):
            with gr.Column(min_width=320):
                plain_head = html(head("Plain decoding", None))
                plain = token_view(elem_classes="transcript side", elem_id="compare-plain")
            with gr.Column(min_width=320):
                fast_head = html(head("With drafts", None))
                fast = token_view(elem_classes="transcript side", elem_id="compare-fast")
        with gr.Column(visible=False) as self.charts:
            self.plots = grid(drawn(None))
        self.sides, self.method = (left, right), right.method
        self.heads, self.views = (plain_head, fast_head), (plain, fast)

    def wire(self, controls: Settings, tab: gr.Tab) -> Dependency:
        self.controls = controls
        shown = [self.verdict, *self.heads, *self.views, self.charts, *self.plots]
        chosen = [each for choice in self.sides for each in choice.inputs]
        inputs = [self.prompt, self.repeats, *chosen, *controls.inputs]
        outputs = [self.run_button, self.race_button, self.stop_button, *shown]
        self.on(self.stop_button.click, self.stop)
        self.on(self.race_button.click, self.race, inputs, outputs)
        models = [each.model for each in self.sides if each.model is not None]
        self.on(tab.select, self.offer, models, [*(each.method for each in self.sides), *models])
        return self.on(self.run_button.click, self.run, inputs, outputs)

    def updates(self, progress: Progress, repeats: int, models: Sequence[str]) -> Updates:
        shown: Updates = {self.verdict: banner(self.session, progress, repeats)}
        running = progress.running
        if running is not None:
            shown |= self.pane(progress, progress.side, running, progress.repeat, models)
        elif progress.pairs:
            shown |= dict(zip(self.plots, drawn(progress), strict=True))
            shown[self.charts] = gr.update(visible=True)
            if progress.over or progress.cancelled:
                for side, run in enumerate(progress.pairs[progress.middle]):
                    shown |= self.pane(progress, side, run, progress.middle, models)
        return shown

    def pane(
        self, progress: Progress, side: int, run: Run, repeat: int, models: Sequence[str]
    ) -> Updates:
        name = f"{side}-{run.method}-{repeat}"
        return {
            self.heads[side]: head(heading(progress, run, models[side]), run),
            self.views[side]: render.side_by_side(name, run.steps),
        }

    def chosen_sides(self, values: Sequence[object]) -> tuple[str, tuple[Side, Side]]:
        """The system prompt and both sides, with one seed. Raises SettingError."""
        own = len(self.sides[LEFT].inputs)
        system, preferences = self.controls.read(values[2 * own :])
        same = replace(preferences, generation=preferences.seeded(), fresh_seed=False)
        return system, (side_of(same, values[:own]), side_of(same, values[own : 2 * own]))

    def run(self, owner: str, text: str, repeats: float, *values: object) -> Iterator[Updates]:
        yield from self.shown(owner, lambda: self.compared(owner, text, int(repeats), values))

    def race(self, owner: str, text: str, repeats: float, *values: object) -> Iterator[Updates]:
        yield from self.shown(owner, lambda: self.raced(owner, text, values))

    def compared(
        self, owner: str, text: str, repeats: int, values: Sequence[object]
    ) -> Iterator[Updates]:
        session, pace = self.session, Pace(1 / UPDATES_PER_SECOND)
        system, sides = self.chosen_sides(values)
        models = [model_label(session, side.source) for side in sides]
        last: Progress | None = None
        for progress in session.proofs.compare_sides(owner, text, system, sides, repeats):
            if isinstance(progress, Waiting):
                # After the last pair only the usual model is loaded again; the verdict stays.
                if last is None or not (last.over or last.cancelled):
                    yield {self.verdict: waiting_line(progress)}
                continue
            last, running = progress, progress.running
            if running is None or running.finish or pace.due():
                yield self.updates(progress, repeats, models)

    def raced(self, owner: str, text: str, values: Sequence[object]) -> Iterator[Updates]:
        system, sides = self.chosen_sides(values)
        yield {self.charts: gr.update(visible=False)}
        for race in self.session.proofs.race(owner, text, system, sides):
            if isinstance(race, Waiting):
                yield {self.verdict: waiting_line(race)}
                continue
            shown: Updates = {self.verdict: result(self.session, race)}
            for side, run in enumerate(race.runs):
                shown[self.heads[side]] = lane(run)
                shown[self.views[side]] = render.side_by_side(f"{side}-race", run.steps)
            yield shown

    def shown(self, owner: str, follow: Callable[[], Iterator[Updates]]) -> Iterator[Updates]:
        """The updates of one comparison, with the buttons that fit, and its error if it fails."""
        buttons = self.run_button, self.race_button, self.stop_button
        yield {each: gr.update(visible=each is self.stop_button) for each in buttons}
        try:
            yield from follow()
        except Cancelled:
            yield {self.verdict: idle(self.session)}
        except Exception as error:
            # The notice disappears, so the banner shows the error as well.
            message = explained(error)
            warn(message)
            yield {self.verdict: verdict(escape(message))}
        show_notices(self.session, owner)
        yield {each: gr.update(visible=each is not self.stop_button) for each in buttons}

    def stop(self, owner: str) -> None:
        self.session.tasks.stop(owner, "")

    def offer(self, *chosen: str | None) -> Updates:
        """Offer the methods and models that are available now. A chosen model that is gone is
        deselected."""
        offered, found = methods(self.session), Updates()
        server = self.session.current.info.server
        # A server that cannot switch drafting off offers only one method.
        only: dict[str, Any] = (
            {"value": USUAL.name} if server is not None and not server.switches else {}
        )
        for each in self.sides:
            found[each.method] = gr.update(choices=offered, **only)
        with notify_errors():
            available = models_of(self.session) if chosen else []
            for each, source in zip(self.sides, chosen, strict=False):
                assert each.model is not None
                # A value is sent only if the chosen model is gone, so that a new choice stays.
                gone: dict[str, Any] = {} if source in dict(available).values() else {"value": ""}
                found[each.model] = gr.update(choices=available, **gone)
        return found
