"""Turns the body of a request into requests to the engine, and checks it before anything runs.

There are three kinds of parameters. Those that the models below declare are used, or refused with
their name. Unsupported ones that would change the answer are refused, except for the values with
which they change nothing (`NEUTRAL`). All others are hints, and are ignored.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self

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

from app.api.formats import Formats, usable
from app.http.problems import ApiError, refused
from app.service.chat import taking_turns
from app.service.preferences import SEEDS
from engine.backends.base import BackendInfo
from engine.backends.chat_template import SWITCHES
from engine.constraint import call_format
from engine.engine import Request
from engine.errors import SettingError
from engine.methods import PLAIN, USUAL, Method, method_named
from engine.settings import MOST_TOKENS, AnswerFormat, Generation, Sampling, ThinkingChoice
from engine.text import read_json
from engine.tools import as_json
from engine.types import Message, Tool, ToolCall
from storage.validation import Outside, problem_of, quoted, refusal, spelled

Kind = Literal["chat", "text"]
"""The kind of an answer in OpenAI's older formats: to messages, or the continuation of texts."""
log = logging.getLogger(__name__)

MOST_CHOICES = 16
MOST_MESSAGES = 4096
LONGEST_ID = 256
LISTS = ("messages", "input", "tools")
"""The parameters whose single elements are named in errors."""
MOST_STOPS, LONGEST_STOP = 16, 1000
LARGEST = 2**53
"""The largest limit of tokens that a request may name."""
NO_ARGUMENTS = '{"type": "object", "properties": {}}'
"""The parameters of a tool without any."""
USUAL_TOKENS: dict[Kind, int] = {"chat": MOST_TOKENS, "text": 16}
"""The default limit of an answer's tokens; the context is a limit as well."""
SAMPLING = ("temperature", "top_p", "min_p", "top_k", "seed")
UNSUPPORTED = "unsupported_parameter"

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "background": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "conversation": (),
    "dry_multiplier": (0,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "ignore_eos": (False,),
    "logit_bias": ({}, []),
    "mcp_servers": ([],),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "prompt_logprobs": (0, False),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "stop_token_ids": ([],),
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
    "tools": "Only answers to messages can call tools. Use /v1/chat/completions.",
    "functions": "Functions are not supported. Use tools.",
    "echo": "The prompt is not repeated, because you have it. Leave echo out.",
}


SentEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: dict[SentEffort | None, ThinkingChoice] = {
    None: None,
    "none": False,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""The efforts of thinking in OpenAI's API, as the closest that chat templates know."""


def integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def unlimited(value: Any) -> Any:
    """A limit of tokens. As with other servers, -1 means that there is none."""
    return LARGEST if value == -1 else integral(value)


def sampled(value: Any, info: ValidationInfo) -> Any:
    """Validate a setting of the sampler by its range in `Sampling`. As with other servers, -1 means
    "all" for top_k and "any" for the seed."""
    name = info.field_name or ""
    may_be_open = name in ("top_k", "seed")
    if value == -1 and may_be_open:
        return 0 if name == "top_k" else None
    try:
        return getattr(Sampling(**{name: value}), name)
    except SettingError as error:
        text = str(error)
        raise refusal(f"{text.removesuffix('.')}, or -1." if may_be_open else text) from error


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
        raise refusal("Only text and calls of tools are read, and no sound. Leave it out.")
    return value


def offer(*known: str) -> Any:
    """How a list of tools is read: without those of other kinds than the `known` ones, which are
    run by their maker's own servers, or have no schema. The first kind is the usual one."""

    def is_known(tool: Any) -> bool:
        kind = tool.get("type", known[0]) if isinstance(tool, dict) else known[0]
        if other := isinstance(kind, str) and kind not in known:
            use = " or ".join(map(repr, known))
            warn(f"Tools of the kind {kind[:80]!r} are skipped. Use {use}.")
        return not other

    return BeforeValidator(lambda v: [*filter(is_known, v)] if isinstance(v, list) else v)


@lru_cache(maxsize=256)
def warn(message: str) -> None:
    """Log that a part of a request is left out, once."""
    log.warning(message)


def arguments(value: str) -> str:
    """The arguments of a call, a JSON object as text; "" stands for none."""
    with suppress(ValueError, RecursionError):
        if isinstance(found := read_json(value or "{}"), dict):
            return as_json(found)
    raise refusal(f"The arguments of a call cannot be {quoted(value)}. Give a JSON object as text.")


def object_text(value: Any, info: ValidationInfo) -> str:
    """A JSON object, as text."""
    if isinstance(value, dict):
        with suppress(ValueError, RecursionError):
            return as_json(value)
    raise refusal(f"{info.field_name} cannot be {quoted(value)}. Give a JSON object.")


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether tools may be called, or have to be: the one called `name`, or any. `sent` is what the
    program wrote."""

    kind: Literal["auto", "none", "required"] = "auto"
    name: str = ""
    sent: Any = "auto"


CHOICES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def chosen(value: Any) -> Any:
    """A choice of tools: a word, or an object with a type and perhaps a name, in any API's form."""
    if isinstance(value, Choice):
        return value
    given = value if isinstance(value, dict) else {"type": value}
    function = given.get("function")
    kind, name = given.get("type"), (function if isinstance(function, dict) else given).get("name")
    if kind in ("function", "tool", "custom") and isinstance(name, str):
        return Choice("required", name, value)
    if isinstance(kind, str) and kind in CHOICES:
        return Choice(CHOICES[kind], sent=value)  # type: ignore[arg-type]
    raise refusal(
        f"tool_choice cannot be {quoted(value)}. Use 'auto', 'none', 'required' or a tool's name."
    )


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
Id = Annotated[str, Field(min_length=1, max_length=LONGEST_ID, description="the id of a call")]
ToolName = Annotated[
    str, Field(pattern=r"^[\w./:-]{1,128}$", description="a name of letters, digits and . / : - _")
]
Object = Annotated[str, BeforeValidator(object_text)]
Arguments = Annotated[str, AfterValidator(arguments)]
ToolChoice = Annotated[Any, BeforeValidator(chosen)]


Limit = Annotated[
    Annotated[int, Field(ge=1, le=LARGEST)] | None,
    Field(description=f"a whole number from 1 to {LARGEST:,}, or -1 for no limit"),
    BeforeValidator(unlimited),
]


Stops = Annotated[
    list[Annotated[str, Field(max_length=LONGEST_STOP)]],
    FailFast(),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    Field(
        max_length=MOST_STOPS,
        description=f"a string, or at most {MOST_STOPS} of them with at most {LONGEST_STOP} "
        "characters each",
    ),
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
    type: Literal["text", "input_text", "output_text"] = Field(
        description="'text', 'input_text' or 'output_text': no images, sound or files"
    )
    text: str


Content = Annotated[
    list[Part],
    FailFast(),
    BeforeValidator(in_parts),
    Field(description="a string, or a list of parts of the type 'text': no images, sound or files"),
]


def joined(content: Sequence[Part]) -> str:
    return "\n".join(part.text for part in content)


class SentFunction(Given):
    name: ToolName
    arguments: Arguments = "{}"


class SentCall(Given):
    id: Id
    type: Literal["function"] = "function"
    function: SentFunction


LIST = (
    FailFast(),
    Field(
        min_length=1,
        max_length=MOST_MESSAGES,
        description=f"a list of 1 to {MOST_MESSAGES:,} messages",
    ),
)


class SentMessage(Given):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = []
    tool_calls: Annotated[list[SentCall], FailFast(), Field(description="a list of calls")] = []
    tool_call_id: Id | None = None
    function_call: Nothing = None
    audio: Nothing = None

    @model_validator(mode="after")
    def whose_result(self) -> Self:
        if self.role == "tool" and not self.tool_call_id:
            raise refusal("The message of a tool needs the tool_call_id of its call.")
        return self

    @property
    def message(self) -> Message:
        if self.role == "tool":
            return result(self.tool_call_id or "", joined(self.content))
        called = self.tool_calls if self.role == "assistant" else []
        calls = (ToolCall(c.id, c.function.name, c.function.arguments) for c in called)
        role = "system" if self.role == "developer" else self.role
        return Message(role, joined(self.content), tuple(calls))


class ToolFunction(Given):
    name: ToolName
    description: str = ""
    parameters: Object = NO_ARGUMENTS

    @property
    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters)


class SentTool(Given):
    type: Literal["function"]
    function: ToolFunction


class Prediction(Given):
    type: Literal["content"]
    content: Content

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


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a request says about its answer, whatever the names of the parameters are.

    `likeliest` is None if no probabilities are requested, else the number of alternatives for each
    token. `parted` says that thinking is separated from the answer. A `single` call of a tool ends
    the answer. `thinking` is a wish that counts if the chat template knows it.
    """

    limit: int = MOST_TOKENS
    stop: Sequence[str] = ()
    choices: int = 1
    usage: bool = False
    likeliest: int | None = None
    parted: bool = True
    single: bool = False
    thinking: ThinkingChoice = None
    prediction: str = ""
    form: AnswerFormat | None = None


Earlier = Callable[[str], Sequence[Message]]
"""The messages up to the answer with an id. Raises ApiError for an unknown one."""


class Body(Given):
    """The parameters that all formats share. `asked` is the name of the one with the text."""

    asked: ClassVar[str] = "messages"
    model: str = ""
    stream: bool = False
    temperature: Real = None
    top_p: Real = None
    min_p: Real = None
    top_k: Integer = None
    seed: Integer = None
    chat_template_kwargs: dict[Annotated[str, AfterValidator(switch)], bool | None] = {}
    speculative: Annotated[Speculative, BeforeValidator(as_object)] = Field(
        default=Speculative(),
        description="false, the name of a method, or an object with some of: method, tiers, nodes",
    )

    @property
    def options(self) -> AnswerOptions:
        """Raises ApiError for parameters that contradict each other."""
        raise NotImplementedError

    def requests(self, basic: Request, info: BackendInfo, earlier: Earlier) -> list[Request]:
        """A request for each prompt, with the settings of `basic`. Raises ApiError."""
        raise NotImplementedError


class OpenAI(Body, Formats):
    """The parameters of OpenAI's older formats."""

    kind: ClassVar[Kind]
    n: Whole = whole(1, MOST_CHOICES, 1)
    stream_options: StreamOptions = StreamOptions()
    max_completion_tokens: Limit = None
    max_tokens: Limit = None
    stop: Stops = []
    prediction: Prediction | None = None

    @model_validator(mode="before")
    @classmethod
    def one_limit(cls, values: Any) -> Any:
        """The older name of the limit is used only if the newer one is not given."""
        newer = values.get("max_completion_tokens") is not None
        return {**values, "max_tokens": None} if newer else values

    @property
    def options(self) -> AnswerOptions:
        return AnswerOptions(
            self.max_completion_tokens or self.max_tokens or USUAL_TOKENS[self.kind],
            self.stop,
            self.n,
            self.stream_options.include_usage,
            prediction=self.prediction.text if self.prediction else "",
            form=self.form,
        )


class Chat(OpenAI):
    kind: ClassVar[Kind] = "chat"
    messages: Annotated[list[SentMessage], *LIST]
    tools: Annotated[list[SentTool], FailFast(), offer("function")] = []
    tool_choice: ToolChoice = Choice()
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Whole = whole(0, 20, 0)
    reasoning_format: Literal["auto", "deepseek", "none"] = "auto"
    reasoning_effort: SentEffort | None = None

    @property
    def options(self) -> AnswerOptions:
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs needs logprobs to be true.", "top_logprobs")
        return replace(
            super().options,
            likeliest=self.top_logprobs if self.logprobs else None,
            parted=self.reasoning_format != "none",
            single=not self.parallel_tool_calls,
            thinking=EFFORTS[self.reasoning_effort],
        )

    def requests(self, basic: Request, info: BackendInfo, earlier: Earlier) -> list[Request]:
        tools = [each.function.tool for each in self.tools]
        if tools and self.tool_choice.kind != "none" and self.logprobs:
            raise refused("logprobs cannot be combined with tools. Leave one out.", "logprobs")
        turns = [each.message for each in self.messages]
        return [talk(basic, info, turns, tools, self.tool_choice, "messages")]


class Continuation(OpenAI):
    """Texts to continue. Which prompts are valid depends on the model."""

    kind: ClassVar[Kind] = "text"
    asked: ClassVar[str] = "prompt"
    prompt: Any = None
    logprobs: Annotated[Whole | None, BeforeValidator(lambda n: None if n is False else n)] = whole(
        0, 5
    )

    @property
    def options(self) -> AnswerOptions:
        return replace(super().options, likeliest=self.logprobs, parted=False)

    def requests(self, basic: Request, info: BackendInfo, earlier: Earlier) -> list[Request]:
        return prompts_of(self.prompt, basic, info)


@dataclass(frozen=True, slots=True)
class Completion:
    """A checked request: the engine's requests, to be answered in their order, and the form of the
    answer. The choices of the first of the `prompts` come first."""

    body: Body
    options: AnswerOptions
    requests: tuple[Request, ...]
    prompts: int


def parsed(body: bytes) -> dict[str, Any]:
    """The parameters of a request. Raises ApiError for a body that is no JSON object."""

    def no_number(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number")

    try:
        found = read_json(body, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        # Python advises on how to read very long numbers, which no client can do.
        message = str(error).partition("; use sys.")[0]
        message = "it is nested too deeply" if isinstance(error, RecursionError) else message
        raise ApiError(
            400, f"The body is not JSON: {message[:200]}.", code="invalid_json"
        ) from error
    if not isinstance(found, dict):
        raise ApiError(400, f"The body is {quoted(found)}, not a JSON object.")
    return found


def no_earlier(id: str) -> NoReturn:
    raise refused(
        f"There is no answer {quoted(id)}: it was not stored, or too many came after it. Send all "
        "messages.",
        "previous_response_id",
        "previous_response_not_found",
    )


def completion(
    model: type[Body], values: Mapping[str, Any], info: BackendInfo, earlier: Earlier = no_earlier
) -> Completion:
    """The checked request to the loaded model from the body's parameters. Raises ApiError."""
    check_neutral(values, model)
    try:
        body = model.model_validate(values)
    except ValidationError as error:
        path, code, message = problem_of(error, model)
        # The error names a single element of a list, and otherwise the whole parameter.
        name = spelled(path[: 3 if path[0] in LISTS else 1])
        raise refused(message, name, code if code == UNSUPPORTED else None) from error
    check_model(body.model, info)
    options = body.options
    generation = Generation(
        sampling_of(body, info),
        min(MOST_TOKENS, options.limit),
        tuple(string for string in options.stop if string),
        thinking_of(body, info),
        options.form,
    )
    try:
        method = body.speculative.chosen
    except SettingError as error:
        raise refused(str(error), "speculative") from error
    basic = Request(
        generation=generation,
        method=method,
        prediction=options.prediction,
        likeliest=options.likeliest or 0,
        whole=not options.parted,
    )
    prompts = body.requests(basic, info, earlier)
    if len(prompts) * options.choices > MOST_CHOICES:
        raise refused(f"{len(prompts)} prompts make too many choices. Ask in parts.", "prompt")
    choices = (reseeded(one, number) for one in prompts for number in range(options.choices))
    return Completion(body, options, tuple(choices), len(prompts))


def check_neutral(values: Mapping[str, Any], model: type[Body]) -> None:
    """Raise ApiError for unsupported parameters that would change the answer."""
    for name, neutral in NEUTRAL.items():
        value = None if name in model.model_fields else values.get(name)
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
            f"There is no model {quoted(name)}. The loaded one is {info.name!r}, and GET "
            "/v1/models lists all that a request can name. Another is loaded in the Models tab, or "
            "with --model.",
            "model",
            "model_not_found",
        )


def thinking_of(body: Body, info: BackendInfo) -> ThinkingChoice:
    """Whether the model should think before it answers, or how much."""
    name = "chat_template_kwargs"
    chosen = {value for value in body.chat_template_kwargs.values() if value is not None}
    if len(chosen) > 1:
        raise refused(f"{name} says both. Use one of: {', '.join(SWITCHES)}.", name)
    if True in chosen and not info.can_think:
        text = f"{info.name} has no thinking that can be switched on. Leave {name} out."
        raise refused(text, name, UNSUPPORTED)
    if chosen:
        return chosen.pop()
    wish = body.options.thinking
    if not isinstance(wish, str):
        return wish if info.can_think else None
    if not info.has_efforts:
        warn(f"The effort of reasoning is ignored: the chat template of {info.name} knows none.")
    return wish if info.has_efforts else None


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


def talk(
    basic: Request,
    info: BackendInfo,
    turns: Sequence[Message],
    tools: Sequence[Tool],
    choice: Choice,
    name: str,
) -> Request:
    """The request for an answer to messages, which are the parameter `name`. Raises ApiError."""
    messages, begun = conversation(turns, name)
    tools = tools if choice.kind != "none" else ()
    if tools and basic.generation.format is not None:
        raise refused("A format cannot be combined with tools. Leave one out.", "tools")
    if info.calls is None and (tools or any(each.calls for each in messages)):
        raise refused(
            f"{info.name} cannot call tools: its chat template has no place for them, or writes "
            "calls in a form that is not known here. Leave them out, or load a model that can "
            "(Qwen 3, Llama 3.1, Mistral, GLM 4.5).",
            "tools" if tools else name,
            UNSUPPORTED,
        )
    if choice.kind == "required":
        form = enforced(info, tools, choice)
        basic = replace(basic, generation=replace(basic.generation, format=form))
    return replace(basic, messages=messages, prefix=begun, tools=tuple(tools))


def enforced(info: BackendInfo, tools: Sequence[Tool], choice: Choice) -> AnswerFormat:
    """The format of an answer that calls one of the tools. Raises ApiError."""
    among = [tool for tool in tools if choice.name in ("", tool.name)]
    if not among:
        raise refused(
            f"tool_choice demands {quoted(choice.name)}, which is none of the tools."
            if choice.name
            else "tool_choice demands a call, so it needs tools. Give some, or use 'auto'.",
            "tool_choice",
        )
    frame = None if info.calls is None else info.calls.frame
    if frame is None:
        raise refused(
            f"{info.name} writes the arguments of calls in a form that cannot be enforced. Use "
            "'auto' or 'none'.",
            "tool_choice",
            UNSUPPORTED,
        )
    form = call_format(frame, among)
    return usable("tools", form.kind, form.text)


def result(id: str, content: str) -> Message:
    """The result of the call with this id."""
    return Message("tool", content, call=ToolCall(id, "", ""))


def conversation(turns: Iterable[Message], name: str) -> tuple[tuple[Message, ...], str]:
    """The messages and the given beginning of the answer, which is the assistant's last message."""
    found = taking_turns(answered(turns, name))
    begins = found and found[-1].role == "assistant" and not found[-1].calls
    prefix = found.pop().content if begins else ""
    if not found or found[-1].role not in ("user", "tool"):
        raise refused(
            "The last message has to be the user's or a tool's, and the user's must not be empty. "
            "Only the beginning of the answer may follow it.",
            name,
        )
    return tuple(found), prefix


def answered(turns: Iterable[Message], name: str) -> Iterator[Message]:
    """The messages, each result with its call. Raises ApiError for a result without one."""
    calls: dict[str, ToolCall] = {}
    for each in turns:
        calls |= {call.id: call for call in each.calls}
        if each.call and each.call.id not in calls:
            raise refused(f"No call before its result has the id {quoted(each.call.id)}.", name)
        yield replace(each, call=calls[each.call.id]) if each.call else each


def prompts_of(given: Any, basic: Request, info: BackendInfo) -> list[Request]:
    """The requests for a prompt: a text, a list of tokens, or a list of either."""
    if given is None:
        raise no_prompt("is missing", info)
    several = isinstance(given, list) and given and not is_number(given[0])
    return [prompt_of(one, basic, info) for one in (given if several else [given])]


def prompt_of(given: Any, basic: Request, info: BackendInfo) -> Request:
    if isinstance(given, str) and given:
        return replace(basic, text=given)
    tokens = given if isinstance(given, list) else []
    size = info.vocabulary_size
    if tokens and all(is_number(token) and 0 <= token < size for token in tokens):
        return replace(basic, prompt=tuple(tokens))
    raise no_prompt(f"cannot be {quoted(given)}", info)


def no_prompt(what: str, info: BackendInfo) -> ApiError:
    return refused(
        f"prompt {what}. Give a text that is not empty, a list of tokens from 0 to "
        f"{info.vocabulary_size - 1:,}, or a list of either.",
        "prompt",
    )


def is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
