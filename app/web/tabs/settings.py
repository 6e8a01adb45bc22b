"""Settings: how the next answer is sampled and drafted.

Numbers have their ranges and help texts from engine/settings.py. What a chat rarely needs is behind
"Advanced".
"""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import gradio as gr

from app.service.preferences import DEFAULT_TOKENS, Preferences
from app.service.session import Session
from app.web.colors import ink
from app.web.wiring import AFTER, AT_ONCE, LATEST, Event, Memory, Updates, owner_of, told
from engine.errors import StrataError
from engine.methods import USUAL, method_named, offered, served
from engine.settings import BUDGETS, Drafting, Generation, Sampling
from engine.types import TIERS, Rule

SAMPLERS = {
    "Exact": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "Balanced": {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
    "Lively": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.05},
}
SLIDER_STEPS = 2_000
"""A range with more steps than this gets a box to type in, not a slider."""
USUAL_METHOD = USUAL.name
FOLLOWING = (
    *(f.name for f in fields(Sampling) if f.name != "seed"),
    "max_tokens",
    "method",
    "thinking",
)
"""The settings that another model changes."""
THINKING: dict[str, bool | None] = {"As the model does": None, "On": True, "Off": False}
VERIFICATION: dict[str, Rule] = {"Same text": "match", "Same distribution": "rejection"}


@dataclass(slots=True)
class Controls:
    """The components, by the name of the setting they hold, in a fixed order."""

    system: gr.Textbox
    parts: dict[str, gr.components.Component] = field(default_factory=dict)
    samplers: dict[str, gr.Button] = field(default_factory=dict)

    @property
    def inputs(self) -> list[gr.components.Component]:
        """What an event that needs the settings takes as inputs."""
        return [self.system, *self.parts.values()]

    def read(self, values: Iterable[object]) -> tuple[str, Preferences]:
        """System prompt and preferences from the inputs' values; raises SettingError."""
        system, *rest = values
        # Of any type: the values check themselves.
        given: dict[str, Any] = dict(zip(self.parts, rest, strict=True))
        sampling = Sampling(**{f.name: number(f.default, given[f.name]) for f in fields(Sampling)})
        stop = tuple(line for line in str(given["stop"] or "").splitlines() if line)
        thinking = THINKING.get(str(given["thinking"]))
        generation = Generation(sampling, number(0, given["max_tokens"]), stop, thinking)
        drafting = Drafting(
            tuple(given["tiers"] or ()),
            number(0, given["nodes"]),
            number(0.0, given["threshold"]),
            given["budget"],
            given["rule"],
        )
        fresh, check = bool(given["fresh_seed"]), bool(given["check"])
        chosen = Preferences(generation, given["method"], drafting, fresh, check)
        chosen.chosen()
        return str(system or ""), chosen

    def show(self, system: str, preferences: Preferences) -> list[object]:
        """The inputs' values for stored preferences, in the inputs' order."""
        sampling, drafting = preferences.generation.sampling, preferences.drafting
        values: dict[str, object] = {
            **{f.name: getattr(sampling, f.name) for f in fields(Sampling)},
            "fresh_seed": preferences.fresh_seed,
            "check": preferences.check,
            "max_tokens": preferences.generation.max_tokens,
            "stop": "\n".join(preferences.generation.stop),
            "thinking": thinking_choice(preferences.generation.thinking),
            "method": preferences.method,
            "tiers": list(drafting.tiers),
            "nodes": drafting.nodes,
            "threshold": drafting.threshold,
            "budget": drafting.budget,
            "rule": drafting.rule,
        }
        return [system, *(values[name] for name in self.parts)]

    @property
    def followers(self) -> list[gr.components.Component]:
        """What `follow` changes."""
        return [self.parts[name] for name in FOLLOWING]

    def follow(
        self, session: Session, method: str, length: float | None, sampler: bool = True
    ) -> Updates:
        """What the loaded model decides: its makers' sampler, unless that is to stay as it is, how
        long an answer can be, the methods there are, whether thinking can be switched. `method`
        and `length` stay where it can do them."""
        info = session.current.info
        values: dict[str, object] = {
            f.name: getattr(info.sampling, f.name) if sampler else gr.skip()
            for f in fields(Sampling)
        }
        longest = info.context_length or DEFAULT_TOKENS
        values["max_tokens"] = min(int(length or DEFAULT_TOKENS), longest)
        chosen = method if usable(session, method) else USUAL_METHOD
        values["method"] = gr.update(choices=methods(session), value=chosen)
        values["thinking"] = gr.update(visible=info.can_think)
        return {self.parts[name]: values[name] for name in FOLLOWING}


def thinking_choice(thinking: bool | None) -> str:
    """The words for whether a model thinks first."""
    return next(words for words, value in THINKING.items() if value is thinking)


def number(default: object, value: Any) -> Any:
    """A component's number with the setting's type, so that 3.0 is a whole number.

    Whatever else a page sends stays as it is: the settings refuse it themselves, in words.
    """
    whole = isinstance(default, int) and isinstance(value, float) and value.is_integer()
    if isinstance(default, float) and isinstance(value, int):
        return float(value)
    return int(value) if whole else value


def control(
    owner: type, name: str, value: object = None, choices: Sequence[str] = ()
) -> gr.components.Component:
    """A slider, a box for a wide range, or a choice, made from a setting's declaration.

    `choices` are for a text whose declaration leaves them open.
    """
    item = next(f for f in fields(owner) if f.name == name)
    meta = item.metadata
    value = item.default if value is None and item.default is not MISSING else value
    words: dict[str, Any] = {"label": meta["label"], "info": meta["help"], "value": value}
    if "choices" in meta:
        return gr.Radio(list(meta["choices"] or choices), **words)
    if (meta["high"] - meta["low"]) / meta["step"] > SLIDER_STEPS:
        # No minimum: it would refuse what is only half typed, in words that are not ours.
        return gr.Number(**words, precision=0)
    return gr.Slider(meta["low"], meta["high"], step=meta["step"], **words)


def build(session: Session) -> Controls:
    """Three groups: instructions, sampling, speed."""
    with gr.Row(elem_classes="cards"):
        with gr.Column(elem_classes="card"):
            gr.HTML("<h3>Instructions</h3>")
            system = gr.Textbox(
                label="System prompt",
                info="Sent before the conversation. Leave it empty for none.",
                lines=4,
                max_lines=12,
            )
            controls = Controls(system)
            parts = controls.parts
            length = min(DEFAULT_TOKENS, session.current.info.context_length or DEFAULT_TOKENS)
            parts["max_tokens"] = control(Generation, "max_tokens", length)
            parts["stop"] = gr.Textbox(
                label="Stop strings",
                info="One per line. The answer ends where one of them would begin.",
                lines=2,
            )
            parts["thinking"] = gr.Radio(
                list(THINKING),
                value=thinking_choice(None),
                label="Thinking",
                info="Whether the model thinks before it answers. Thinking takes time and tokens.",
                visible=session.current.info.can_think,
                elem_id="thinking",
            )
        with gr.Column(elem_classes="card"):
            gr.HTML("<h3>Sampling</h3>")
            with gr.Row(elem_classes="presets"):
                buttons = {name: gr.Button(name, size="sm") for name in SAMPLERS}
            for item in fields(Sampling):
                if item.name == "seed":
                    parts["fresh_seed"] = gr.Checkbox(
                        True,
                        label="A new seed for each answer",
                        info="Off: the seed below. The same question then gets the same answer.",
                    )
                value = getattr(session.current.info.sampling, item.name)
                parts[item.name] = control(Sampling, item.name, value)
        build_speed(session, parts)
    controls.samplers = buttons
    return controls


def methods(session: Session) -> list[tuple[str, str]]:
    """All methods to choose from, by title: the named ones and those of the loaded models."""
    info = session.current.info
    named = [(m.title, m.name) for m in offered(info)]
    if info.server is not None:
        named = [(served(m, info.server).title, m.name) for m in offered(info)]
    return [*named, *session.stacks.methods()]


def usable(session: Session, method: str) -> bool:
    """Whether a method that was chosen before can be followed with the models there are now."""
    try:
        session.stacks.check(method_named(method), session.current.info.sampling)
    except StrataError:
        return False
    return True


def build_speed(session: Session, parts: dict[str, gr.components.Component]) -> None:
    """Where drafts come from; behind "Advanced", how many there are and when one is kept."""
    with gr.Column(elem_classes="card"):
        gr.HTML(
            "<h3>Speed</h3><p>Drafts make answers faster. The text stays the same unless you "
            "choose otherwise under Advanced.</p>"
        )
        parts["method"] = gr.Dropdown(
            methods(session),
            value=USUAL_METHOD,
            label="Method",
            info="Where drafts come from. Plain decoding uses none. Load draft models in the Stack "
            "tab, or type a plan such as hsd:small@8/mid@4.",
            allow_custom_value=True,
            elem_id="method",
        )
        parts["check"] = gr.Checkbox(
            False,
            label="Check every answer in the background",
            info="Decodes each answer twice more, plainly and with drafts, and says below it "
            "whether the text is the same. That is about three times the work. It waits until "
            "nothing else runs, and gives way as soon as you ask something.",
            elem_id="check",
        )
        with gr.Accordion("Advanced", open=False, elem_id="advanced"):
            build_advanced(parts)


def build_advanced(parts: dict[str, gr.components.Component]) -> None:
    """What drafting does well without anyone's help."""
    parts["tiers"] = gr.Dropdown(
        [(ink(name).title, name) for name in TIERS],
        value=list(TIERS),
        multiselect=True,
        label="Databases",
        info="They are asked in this order. Remove one to do without it.",
    )
    parts["budget"] = gr.Radio(
        [(name.capitalize(), name) for name in BUDGETS],
        value=BUDGETS[0],
        label="Draft size",
        info="Adaptive drafts as much as pays on this machine. Fixed always drafts the most.",
    )
    parts["nodes"] = control(Drafting, "nodes")
    parts["threshold"] = control(Drafting, "threshold")
    parts["rule"] = gr.Radio(
        list(VERIFICATION.items()),
        value="match",
        label="What drafts must not change",
        info="Same text: an answer is exactly what plain decoding gives with the same seed. "
        "Same distribution: every answer is as likely as with plain decoding, but a seed gives "
        "another text. It keeps more drafts at temperatures above 0 (rejection sampling).",
    )


def wire(session: Session, controls: Controls, current: gr.State, memory: gr.BrowserState) -> Event:
    """Keep changed settings with the conversation that is open. Returns the event that does so."""

    def keep(
        request: gr.Request, conversation: str | None, memory: Memory, *values: object
    ) -> None:
        owner = owner_of(session, memory, request)
        with told():
            system, preferences = controls.read(values)
            if conversation:
                store = session.chat.conversations(owner)
                store.set_system_prompt(conversation, system)
                store.set_settings(conversation, preferences.mapping())

    inputs = [current, memory, *controls.inputs]
    edits = [part.input for part in controls.inputs]  # type: ignore[attr-defined]
    gr.on(edits, keep, inputs, None, **LATEST)
    for name, button in controls.samplers.items():
        sampler = SAMPLERS[name]
        button.click(
            lambda sampler=sampler: list(sampler.values()),
            outputs=[controls.parts[key] for key in sampler],
            **AT_ONCE,
        ).then(keep, inputs, None, **AFTER)
    return Event(keep, inputs, None)
