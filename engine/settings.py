"""Every setting, declared once: its range, its description and its default.

Sliders and checks are derived from these declarations.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, get_args

from engine.errors import SettingError
from engine.types import RULES, TIERS, Rule

LONGEST_NAMED = 80
MOST_TOKENS = 32_768
"""The most tokens that an answer may be allowed to have."""


def setting(default: float, allowed: tuple[float, float, float], label: str, help: str) -> Any:
    """A number; `allowed` are its least and largest value, and the step of its slider."""
    names = ("low", "high", "step", "label", "help")
    return field(default=default, metadata=dict(zip(names, (*allowed, label, help), strict=True)))


def shortened(value: object) -> str:
    """A value as shown in an error, cut because values from files may be long."""
    text = repr(value)
    return text if len(text) <= LONGEST_NAMED else f"{text[:LONGEST_NAMED]}…"


def check_range(owner: object, item: Field[Any]) -> None:
    value, low, high = getattr(owner, item.name), item.metadata["low"], item.metadata["high"]
    wants = int if isinstance(item.default, int) else float
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if not numeric or not low <= value <= high or (wants is int and value != int(value)):
        given = (
            "a whole number from {:,} to {:,}"
            if wants is int
            else "a number from {:.12g} to {:.12g}"
        )
        raise SettingError(
            f"{item.metadata['label']} cannot be {shortened(value)}. "
            f"Give {given.format(low, high)}."
        )
    object.__setattr__(owner, item.name, wants(value))


def check_choice(owner: object, item: Field[Any]) -> None:
    value, choices = getattr(owner, item.name), item.metadata["choices"]
    if not isinstance(value, str):
        raise SettingError(f"{item.metadata['label']} cannot be {value!r}. Give a text.")
    if choices and value not in choices:
        raise SettingError(
            f"{item.metadata['label']} cannot be {value!r}. Choose from: {', '.join(choices)}."
        )


def check_texts(owner: object, name: str) -> None:
    values = getattr(owner, name)
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise SettingError(
            f"The setting {name!r} cannot be {shortened(values)}. Give a list of strings."
        )
    object.__setattr__(owner, name, tuple(values))


class Checked:
    """Mixin of the settings classes: range checks on creation, strict reading of mappings."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            if "choices" in item.metadata:
                check_choice(self, item)
            elif item.metadata:
                check_range(self, item)

    removed: ClassVar[tuple[str, ...]] = ()
    """Settings of earlier versions: what was stored with them still opens, without them."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping (stored JSON, a form); an unknown name is an error, not ignored."""
        if not isinstance(values, Mapping):
            raise SettingError(f"Settings cannot be {shortened(values)}. Give names and values.")
        values = {name: value for name, value in values.items() if name not in cls.removed}
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        for name in values:
            if name not in known:
                raise SettingError(
                    f"There is no setting named {shortened(name)}. The settings are: "
                    f"{', '.join(known)}."
                )
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Sampling(Checked):
    """How the target's next token is drawn. At temperature 0 it is the argmax."""

    temperature: float = setting(
        0.7,
        (0.0, 2.0, 0.05),
        "Temperature",
        "0 always takes the most likely token; higher values vary more.",
    )
    top_k: int = setting(0, (0, 1000, 1), "Top-k", "Choose among the k most likely tokens; 0: all.")
    top_p: float = setting(
        1.0,
        (0.0, 1.0, 0.01),
        "Top-p",
        "Choose among the most likely tokens that together have this probability.",
    )
    min_p: float = setting(
        0.0,
        (0.0, 1.0, 0.01),
        "Min-p",
        "Leave out tokens that have less than this share of the top token's probability.",
    )
    seed: int = setting(
        0, (0, 2**63 - 1, 1), "Seed", "The same seed and settings give the same text."
    )


FORMATS = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "gbnf": "grammar",
    "lark": "grammar",
    "call": "schema of a tool",
}
"""The kinds of formats, and what people call them."""
ANY_OBJECT = '{"type": "object"}'
"""The JSON schema of any object."""
LONGEST_FORMAT = 1 << 18


@dataclass(frozen=True, slots=True)
class AnswerFormat(Checked):
    """The format of an answer: a JSON schema, a regular expression, a JSON list of the possible
    texts, a grammar in the notation of llama.cpp or Lark, or a call of one of some tools
    (engine/constraint.py)."""

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in FORMATS:
            raise SettingError(
                f"There is no format {shortened(self.kind)}. Choose from: {', '.join(FORMATS)}."
            )
        if not isinstance(self.text, str) or len(self.text) > LONGEST_FORMAT:
            raise SettingError(
                f"The {self.title} cannot be {shortened(self.text)}. Give a text of at most "
                f"{LONGEST_FORMAT:,} characters."
            )

    @property
    def title(self) -> str:
        return FORMATS[self.kind]


Effort = Literal["low", "medium", "high"]
ThinkingChoice = bool | Effort | None
"""Whether a model thinks before its answer, or how much; None leaves it to the chat template."""


@dataclass(frozen=True, slots=True)
class Generation(Checked):
    """A whole answer: the sampler, its length, the strings that end it, its format.

    `thinking` counts if the chat template supports it (`BackendInfo.can_think`, `has_efforts`).
    """

    sampling: Sampling = Sampling()
    max_tokens: int = setting(
        512, (1, MOST_TOKENS, 1), "Max tokens", "The answer has at most this many tokens."
    )
    stop: tuple[str, ...] = ()
    thinking: ThinkingChoice = None
    format: AnswerFormat | None = None

    def __post_init__(self) -> None:
        super(Generation, self).__post_init__()
        if isinstance(self.format, Mapping):
            object.__setattr__(self, "format", AnswerFormat.from_mapping(self.format))
        if not (self.format is None or isinstance(self.format, AnswerFormat)):
            raise SettingError(
                f"The format of an answer cannot be {shortened(self.format)}. Give an AnswerFormat."
            )
        if not (isinstance(self.thinking, bool) or self.thinking in (None, *get_args(Effort))):
            raise SettingError(
                f"Thinking cannot be {shortened(self.thinking)}. Give true, false, "
                f"{', '.join(get_args(Effort))}, or nothing for what the model does by itself."
            )
        check_texts(self, "stop")
        if not isinstance(self.sampling, Sampling):
            raise SettingError(f"The sampler cannot be {self.sampling!r}. Give a Sampling.")


@dataclass(frozen=True, slots=True)
class Drafting(Checked):
    """Which databases draft, in which order, and how much they may propose per step."""

    removed = ("policy", "harvest")
    tiers: tuple[str, ...] = TIERS
    nodes: int = setting(
        64,
        (0, 128, 1),
        "Max drafted tokens",
        "The most tokens drafted in one step; 0 turns drafting off.",
    )
    threshold: float = setting(
        0.003,
        (0.0, 1.0, 0.001),
        "Minimum probability",
        "Tokens less likely than this are not drafted.",
    )
    budget: str = "adaptive"
    rule: Rule = "match"

    def __post_init__(self) -> None:
        super(Drafting, self).__post_init__()
        check_texts(self, "tiers")
        if self.budget not in BUDGETS:
            raise SettingError(
                f"There is no draft budget {shortened(self.budget)}. Choose from: "
                f"{', '.join(BUDGETS)}."
            )
        if self.rule not in RULES:
            raise SettingError(
                f"There is no verification rule {shortened(self.rule)}. Choose from: "
                f"{', '.join(RULES)}."
            )
        for name in self.tiers:
            if name not in TIERS or self.tiers.count(name) > 1:
                raise SettingError(
                    f"The tiers {shortened(self.tiers)} are not usable because of "
                    f"{shortened(name)}. "
                    f"Name each of {', '.join(TIERS)} at most once."
                )


FLASH_ATTENTION = ("auto", "on", "off")
CACHE_TYPES = ("auto", "f32", "f16", "q8_0", "q4_0")
"""auto: float32, the most exact type, on a processor; float16 on a GPU."""


def choice(label: str, help: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default="auto", metadata={"label": label, "help": help, "choices": choices})


@dataclass(frozen=True, slots=True)
class Runtime(Checked):
    """Where and how a model runs. Settings of one kind of model are ignored by the others.

    `device` and `dtype` are for transformers models (engine/models/load_transformers.py); what
    follows `bits` is for GGUF files that llama.cpp runs, but for `head`.
    """

    removed = ("tensor_parallel",)
    context_length: int = setting(
        8192,
        (64, 1 << 20, 64),
        "Context length",
        "The most tokens that a conversation and its answer may have; the model's own limit also "
        "applies.",
    )
    threads: int = setting(
        0,
        (0, 512, 1),
        "Threads",
        "Processor threads; 0 uses one per physical core, and a page leaves one to its browser.",
    )
    device: str = choice("Device", "Where the model runs: auto, cpu, cuda, cuda:1 or mps.")
    dtype: str = choice(
        "Precision",
        "auto, float32, bfloat16 or float16. auto uses the model's own precision on a GPU, "
        "bfloat16 on a processor that supports it, and float32 otherwise.",
    )
    bits: str = choice(
        "Bits",
        "The most bits of a weight: auto, off, 8 or 4. Fewer take less memory, and on x86 "
        "processors less time. auto keeps 16 bits, or those of the files; off leaves GGUF files to "
        "llama.cpp and other quantised files to transformers.",
        ("auto", "off", "8", "4"),
    )
    gpu_layers: int = setting(
        -1, (-1, 1000, 1), "GPU layers", "How many layers run on the GPU, if there is one; -1: all."
    )
    batch_size: int = setting(
        512, (32, 8192, 32), "Batch size", "How many tokens of a prompt are read at once."
    )
    flash_attention: str = choice(
        "Flash attention", "Computes attention with less memory: auto, on or off.", FLASH_ATTENTION
    )
    cache_type: str = choice(
        "Cache type",
        "Precision of the cache: auto, f32, f16, q8_0 or q4_0; fewer bits take less memory.",
        CACHE_TYPES,
    )
    parallel: int = setting(
        1,
        (0, 64, 1),
        "Answers at once",
        "So many answers are decoded at the same time, and share each forward; further ones wait. "
        "0: up to four, as memory allows.",
    )
    head: str = choice(
        "Head",
        "The built-in head, which guesses ahead: auto finds it, off ignores it; or the path of "
        "its file or folder.",
    )


BUDGETS = ("adaptive", "fixed")
"""adaptive: draft what pays, by the measured cost of a forward. fixed: fill the tree's nodes."""
