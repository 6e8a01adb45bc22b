"""Turns the body of a request into requests to the engine, and checks it before anything runs.

There are three kinds of parameters. Those that the models below declare are used, or refused with
their name. Unsupported ones that would change the answer are refused, except for the values with
which they change nothing (`NEUTRAL`). All others are hints, and are ignored.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NoReturn

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from app.http.problems import ApiError, refused
from app.service.chat import taking_turns
from app.service.preferences import SEEDS
from engine.backends.base import BackendInfo
from engine.backends.chat_template import SWITCHES
from engine.engine import Request
from engine.errors import SettingError
from engine.methods import PLAIN, USUAL, Method, method_named
from engine.settings import MOST_TOKENS, Generation, Sampling
from engine.text import read_json
from engine.types import Message
from storage.validation import Outside, problem_of, quoted, refusal, spelled

Kind = Literal["chat", "text"]
"""The kind of a request: messages to answer, or texts to continue."""

MOST_CHOICES = 16
MOST_MESSAGES = 4096
MOST_STOPS, LONGEST_STOP = 16, 1000
LARGEST = 2**53
"""The largest limit of tokens that a request may name."""
USUAL_TOKENS: dict[Kind, int] = {"chat": MOST_TOKENS, "text": 16}
"""The default limit of an answer's tokens; the context is a limit as well."""
SAMPLING = ("temperature", "top_p", "min_p", "top_k", "seed")
UNSUPPORTED = "unsupported_parameter"

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "dry_multiplier": (0,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": ({},),
    "guided_regex": ("",),
    "ignore_eos": (False,),
    "json_schema": ({},),
    "logit_bias": ({}, []),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "prompt_logprobs": (0, False),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
"""Unsupported parameters, and the values with which they do not change the answer, besides null."""
NOT_HERE = {
    "tools": "Tools are not supported. Ask for text, and parse it yourself.",
    "functions": "Functions are not supported. Ask for text, and parse it yourself.",
    "response_format": "Only text is supported. Describe the format that you want in a message.",
    "echo": "The prompt is not repeated, because you have it.",
}


def integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def unlimited(value: Any) -> Any:
    """A limit of tokens. As with other servers, -1 means that there is none."""
    return LARGEST if value == -1 else integral(value)


def sampled(value: Any, info: ValidationInfo) -> Any:
    """Validate a setting of the sampler by its range in `Sampling`. As with other servers, -1 means
    "all" for top_k and "any" for the seed."""
    name = info.field_name or ""
    if value == -1 and name in ("top_k", "seed"):
        return 0 if name == "top_k" else None
    try:
        return getattr(Sampling(**{name: value}), name)
    except SettingError as error:
        raise refusal(str(error)) from error


def in_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def as_object(value: Any) -> Any:
    """Turn the short forms into an object: a boolean (false is plain decoding), or a method's
    name."""
    if isinstance(value, bool):
        return {} if value else {"method": PLAIN.name}
    return {"method": value} if isinstance(value, str) else value


def empty(value: Any) -> Any:
    if value:
        raise refusal("Only the text of messages is read: no calls, and no sound. Leave them out.")
    return value


def switch(name: str) -> str:
    if name not in SWITCHES:
        text = f"chat_template_kwargs cannot have {quoted(name)}. Use: {', '.join(SWITCHES)}."
        raise refusal(text, UNSUPPORTED)
    return name


def whole(low: int, high: int, default: int | None = None) -> Any:
    message = f"a whole number from {low} to {high:,}"
    return Field(default=default, ge=low, le=high, description=message)


Whole = Annotated[int, BeforeValidator(integral)]
Real = Annotated[float | None, BeforeValidator(sampled)]
Integer = Annotated[int | None, BeforeValidator(sampled)]
Nothing = Annotated[Any, AfterValidator(empty)]


Limit = Annotated[
    Annotated[int, Field(ge=1, le=LARGEST)] | None,
    Field(description=f"a whole number from 1 to {LARGEST:,}, or -1 for no limit"),
    BeforeValidator(unlimited),
]


class Given(Outside):
    """A JSON object in which null means that the value is not given."""

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class Part(Outside):
    type: Literal["text"]
    text: str


class SentMessage(Given):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], FailFast(), BeforeValidator(in_parts)] = Field(
        default=[],
        description="a string, or a list of parts of the type 'text': no images, sound or files",
    )
    tool_calls: Nothing = None
    function_call: Nothing = None
    audio: Nothing = None


class Prediction(Given):
    type: Literal["content"]
    content: Annotated[list[Part], FailFast(), BeforeValidator(in_parts)] = Field(
        description="a string, or a list of parts of the type 'text'"
    )

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class StreamOptions(Given):
    include_usage: bool = False


class Speculative(Outside):
    """How to draft. Tiers and nodes are checked by the drafting settings."""

    model_config = ConfigDict(extra="forbid")
    method: str = USUAL.name
    tiers: Any = None
    nodes: Any = None

    @property
    def chosen(self) -> Method:
        """The method with its settings. Raises SettingError."""
        method = method_named(self.method)
        settings = {name: getattr(self, name) for name in self.model_fields_set - {"method"}}
        for name in settings:
            if not method.settable or (name == "tiers" and not method.tiers_settable):
                raise SettingError(f"The method {method.name!r} takes no {name!r}. Leave it out.")
        return method.using(replace(method.drafting, **settings))


class Body(Given):
    model: str = ""
    n: Whole = whole(1, MOST_CHOICES, 1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: Real = None
    top_p: Real = None
    min_p: Real = None
    top_k: Integer = None
    seed: Integer = None
    max_completion_tokens: Limit = None
    max_tokens: Limit = None
    stop: Annotated[
        list[Annotated[str, Field(max_length=LONGEST_STOP)]],
        FailFast(),
        BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    ] = Field(
        default=[],
        max_length=MOST_STOPS,
        description=f"a string, or at most {MOST_STOPS} of them with at most {LONGEST_STOP} "
        "characters each",
    )
    prediction: Prediction | None = None
    chat_template_kwargs: dict[Annotated[str, AfterValidator(switch)], bool | None] = {}
    speculative: Annotated[Speculative, BeforeValidator(as_object)] = Field(
        default=Speculative(),
        description="false, the name of a method, or an object with some of: method, tiers, nodes",
    )

    @model_validator(mode="before")
    @classmethod
    def one_limit(cls, values: Any) -> Any:
        """The older name of the limit is used only if the newer one is not given."""
        newer = values.get("max_completion_tokens") is not None
        return {**values, "max_tokens": None} if newer else values


class Chat(Body):
    messages: Annotated[list[SentMessage], FailFast()] = Field(
        min_length=1,
        max_length=MOST_MESSAGES,
        description=f"a list of 1 to {MOST_MESSAGES:,} messages",
    )
    logprobs: bool = False
    top_logprobs: Whole = whole(0, 20, 0)
    reasoning_format: Literal["auto", "deepseek", "none"] = "auto"

    @property
    def likeliest(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs needs logprobs to be true.", "top_logprobs")
        return self.top_logprobs if self.logprobs else None


class Continuation(Body):
    """Texts to continue. Which prompts are valid depends on the model."""

    prompt: Any = None
    logprobs: Annotated[Whole | None, BeforeValidator(lambda n: None if n is False else n)] = whole(
        0, 5
    )

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


@dataclass(frozen=True, slots=True)
class Completion:
    """A checked request: the engine's requests, to be answered in their order, and the form of the
    answer.

    `likeliest` is None if no probabilities are requested, else the number of alternatives for each
    token. `parted` says that thinking is separated from the answer. The choices of the first prompt
    come first.
    """

    kind: Kind
    requests: tuple[Request, ...]
    prompts: int
    stream: bool
    usage: bool
    likeliest: int | None
    parted: bool

    @property
    def prompt(self) -> str:
        return "messages" if self.kind == "chat" else "prompt"


def parsed(body: bytes) -> dict[str, Any]:
    """The parameters of a request. Raises ApiError for a body that is no JSON object."""

    def no_number(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number")

    try:
        found = read_json(body, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        message = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(
            400, f"The body is not JSON: {message[:200]}.", code="invalid_json"
        ) from error
    if not isinstance(found, dict):
        raise ApiError(400, f"The body is {quoted(found)}, not a JSON object.")
    return found


def completion(kind: Kind, values: Mapping[str, Any], info: BackendInfo) -> Completion:
    """The checked request to the loaded model from the body's parameters. Raises ApiError."""
    check_neutral(values)
    model = Chat if kind == "chat" else Continuation
    try:
        body = model.model_validate(values)
    except ValidationError as error:
        path, code, message = problem_of(error, model)
        # The error names a single message; of other groups it names the whole group.
        name = spelled(path[: 3 if path[0] == "messages" else 1])
        raise refused(message, name, code if code == UNSUPPORTED else None) from error
    check_model(body.model, info)
    generation = Generation(
        sampling_of(body, info),
        min(MOST_TOKENS, body.max_completion_tokens or body.max_tokens or USUAL_TOKENS[kind]),
        tuple(string for string in body.stop if string),
        thinking_of(body, info),
    )
    try:
        method = body.speculative.chosen
    except SettingError as error:
        raise refused(str(error), "speculative") from error
    parted = isinstance(body, Chat) and body.reasoning_format != "none"
    basic = Request(
        generation=generation,
        method=method,
        prediction=body.prediction.text if body.prediction else "",
        likeliest=body.likeliest or 0,
        whole=not parted,
    )
    if isinstance(body, Chat):
        messages, prefix = conversation(body.messages)
        prompts = [replace(basic, messages=messages, begun=prefix)]
    else:
        prompts = prompts_of(body.prompt, basic, info)
    if len(prompts) * body.n > MOST_CHOICES:
        raise refused(f"{len(prompts)} prompts make too many choices. Ask in parts.", "prompt")
    return Completion(
        kind,
        tuple(reseeded(prompt, number) for prompt in prompts for number in range(body.n)),
        len(prompts),
        body.stream,
        body.stream_options.include_usage,
        body.likeliest,
        parted,
    )


def check_neutral(values: Mapping[str, Any]) -> None:
    """Raise ApiError for unsupported parameters that would change the answer."""
    for name, neutral in NEUTRAL.items():
        value = values.get(name)
        if value is not None and not any(same(value, each) for each in neutral):
            message = NOT_HERE.get(name, f"{name} is not supported. Leave it out.")
            raise refused(message, name, UNSUPPORTED)


def same(value: Any, neutral: Any) -> bool:
    """Equality that distinguishes true from 1, unlike Python's."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def check_model(name: str, info: BackendInfo) -> None:
    """Raise ApiError for another model than the loaded one; the name may be empty."""
    if name and name != info.name:
        raise ApiError(
            404,
            f"There is no model {quoted(name)}. The loaded one is {info.name!r}; another is "
            "loaded in the Models tab, or with --model.",
            "model",
            "model_not_found",
        )


def thinking_of(body: Body, info: BackendInfo) -> bool | None:
    """Whether the model should think before it answers; None leaves that to its chat template."""
    name = "chat_template_kwargs"
    chosen = {value for value in body.chat_template_kwargs.values() if value is not None}
    if len(chosen) > 1:
        raise refused(f"{name} says both. Use one of: {', '.join(SWITCHES)}.", name)
    if True in chosen and not info.can_think:
        text = f"{info.name} has no thinking that can be switched on. Leave {name} out."
        raise refused(text, name, UNSUPPORTED)
    return chosen.pop() if chosen else None


def sampling_of(body: Body, info: BackendInfo) -> Sampling:
    """The sampler: the given settings, and otherwise those that the model's makers recommend, with
    a fresh seed."""
    given = {name: getattr(body, name) for name in SAMPLING if getattr(body, name) is not None}
    return replace(info.sampling, **{"seed": secrets.randbelow(SEEDS), **given})


def reseeded(request: Request, number: int) -> Request:
    generation = request.generation
    seed = (generation.sampling.seed + number) % 2**63
    sampling = replace(generation.sampling, seed=seed)
    return replace(request, generation=replace(generation, sampling=sampling))


def conversation(given: list[SentMessage]) -> tuple[tuple[Message, ...], str]:
    """The messages and the given beginning of the answer, which is the assistant's last message."""
    found = taking_turns(
        Message(
            "system" if each.role == "developer" else each.role,
            "\n".join(part.text for part in each.content),
        )
        for each in given
    )
    prefix = found.pop().content if found and found[-1].role == "assistant" else ""
    if not found or found[-1].role != "user":
        raise refused(
            "The last message has to be the user's, and must not be empty. Only the beginning of "
            "the answer may follow it.",
            "messages",
        )
    return tuple(found), prefix


def prompts_of(given: Any, basic: Request, info: BackendInfo) -> list[Request]:
    """The requests for a prompt: a text, a list of tokens, or a list of either."""
    several = isinstance(given, list) and (not given or not is_number(given[0]))
    each = given if several else [given]
    return [prompt_of(one, basic, info) for one in each or [None]]


def prompt_of(given: Any, basic: Request, info: BackendInfo) -> Request:
    if isinstance(given, str) and given:
        return replace(basic, text=given)
    tokens = given if isinstance(given, list) else []
    size = info.vocabulary_size
    if tokens and all(is_number(token) and 0 <= token < size for token in tokens):
        return replace(basic, prompt=tuple(tokens))
    raise refused(
        f"prompt cannot be {quoted(given)}. Give a text that is not empty, a list of tokens "
        f"from 0 to {size - 1:,}, or a list of either.",
        "prompt",
    )


def is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
