"""From the body of a request to what is asked of the engine, checked before anything runs.

Three kinds of parameters. Those that we know are used, or refused with their name when they make no
sense. Those that would change the answer and cannot be honoured are refused, unless they say what
is so anyway (`NEUTRAL`). All others are hints that change nothing, and are ignored.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal, NoReturn

from app.api.errors import ApiError, refused
from app.service.preferences import SEEDS
from engine.backends.base import BackendInfo
from engine.backends.chat_template import SWITCHES
from engine.engine import Request
from engine.errors import SettingError
from engine.methods import PLAIN, USUAL, Method, method_named
from engine.settings import Generation, Sampling, shortened
from engine.types import Message

Kind = Literal["chat", "text"]
"""Of a request: messages that are answered, or texts that are gone on with."""
Body = Mapping[str, Any]

MOST_CHOICES = 16
MOST_MESSAGES = 4096
MOST_STOPS, LONGEST_STOP = 16, 1000
MOST_LIKELIEST: dict[Kind, int] = {"chat": 20, "text": 5}
MOST_TOKENS = 32768
USUAL_TOKENS: dict[Kind, int] = {"chat": MOST_TOKENS, "text": 16}
"""Of an answer, where nothing is said; the context ends it as well."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
DRAFTING = ("method", "tiers", "nodes")
REASONING = ("auto", "deepseek", "none")

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
"""Parameters that would change the answer, and the values with which they do not; null never does.
"""
NOT_HERE = {
    "tools": "Tools are not supported: ask for text, and read it yourself.",
    "functions": "Functions are not supported: ask for text, and read it yourself.",
    "response_format": "Only text is answered: say in a message what form you want.",
    "echo": "The prompt is not repeated: you have it.",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A checked request: what is to be answered, one after the other, and how it is told.

    `likeliest` is None where no probabilities are wanted, else how many tokens are told beside each
    one. `parted` says that thinking is told apart from the answer. The choices of the first prompt
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
        """The parameter that holds what is to be answered."""
        return "messages" if self.kind == "chat" else "prompt"


def parsed(body: bytes) -> dict[str, Any]:
    """The parameters of a request. Raises ApiError for what is no JSON object."""

    def no_number(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number")

    try:
        found = json.loads(body, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"The body is not JSON: {words[:200]}.", code="invalid_json") from error
    if not isinstance(found, dict):
        raise ApiError(400, f"The body is {shortened(found)}, not a JSON object.")
    return found


def wanted(kind: Kind, body: Body, info: BackendInfo) -> Wanted:
    """A request to the loaded model. Raises ApiError."""
    check_model(body, info)
    check_neutral(body)
    count = whole(body, "n", 1, 1, MOST_CHOICES)
    likeliest = likeliest_of(kind, body)
    thinking = thinking_of(body, info)
    generation = Generation(
        sampling_of(body, info), tokens_of(kind, body), stops_of(body), thinking
    )
    method = method_of(body.get("speculative"))
    basic = Request((), (), generation, method, likeliest=likeliest or 0)
    if kind == "chat":
        messages, begun = messages_of(body)
        prompts = [replace(basic, messages=messages, begun=begun)]
    else:
        prompts = prompts_of(body, basic, info)
    if len(prompts) * count > MOST_CHOICES:
        raise refused(f"{len(prompts)} prompts make too many choices. Ask in parts.", "prompt")
    requests = tuple(reseeded(prompt, number) for prompt in prompts for number in range(count))
    usage = flag(object_of(body, "stream_options"), "include_usage", "stream_options")
    parted = kind == "chat" and parted_of(body)
    return Wanted(kind, requests, len(prompts), flag(body, "stream"), usage, likeliest, parted)


def check_model(body: Body, info: BackendInfo) -> None:
    """Raise ApiError for another model than the loaded one; none at all will do."""
    name = body.get("model")
    if name is None or name == "":
        return
    if not isinstance(name, str):
        raise refused(f"The model cannot be {shortened(name)}. Give a name.", "model")
    if name != info.name:
        raise ApiError(
            404,
            f"There is no model {shortened(name)}. The loaded one is {info.name!r}; another is "
            "loaded in the Models tab, or with --model.",
            "model",
            "model_not_found",
        )


def check_neutral(body: Body) -> None:
    """Raise ApiError for what would change the answer and cannot be honoured."""
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and not any(same(value, each) for each in neutral):
            words = NOT_HERE.get(name, f"{name} is not supported. Leave it out.")
            raise refused(words, name, "unsupported_parameter")


def same(value: Any, neutral: Any) -> bool:
    """Whether a value is the neutral one; true is no 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


# how it is answered


def sampling_of(body: Body, info: BackendInfo) -> Sampling:
    """The sampler: what was said, else what the model's makers recommend, with a fresh seed."""
    chosen = replace(info.sampling, seed=secrets.randbelow(SEEDS))
    for name in ("temperature", "top_p", "min_p", "top_k", "seed"):
        value = body.get(name)
        if name in ("top_k", "seed") and value == -1:
            value = 0 if name == "top_k" else None  # as other servers say "all" and "any"
        if value is None:
            continue
        try:
            chosen = replace(chosen, **{name: value})
        except SettingError as error:
            raise refused(str(error), name) from error
    return chosen


def reseeded(request: Request, number: int) -> Request:
    """The request for a further choice: with the seed that follows."""
    generation = request.generation
    seed = (generation.sampling.seed + number) % 2**63
    sampling = replace(generation.sampling, seed=seed)
    return replace(request, generation=replace(generation, sampling=sampling))


def tokens_of(kind: Kind, body: Body) -> int:
    """How many tokens an answer has at most."""
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            return min(MOST_TOKENS, whole(body, name, 0, 1, 2**53))
    return USUAL_TOKENS[kind]


def stops_of(body: Body) -> tuple[str, ...]:
    """The strings that end an answer."""
    given = body.get("stop")
    found = [given] if isinstance(given, str) else [] if given is None else given
    fits = isinstance(found, list) and len(found) <= MOST_STOPS
    if not fits or not all(isinstance(s, str) and len(s) <= LONGEST_STOP for s in found):
        raise refused(
            f"stop cannot be {shortened(given)}. Give a string, or at most {MOST_STOPS} of them "
            f"with at most {LONGEST_STOP} characters each.",
            "stop",
        )
    return tuple(clean(string) for string in found if string)


def likeliest_of(kind: Kind, body: Body) -> int | None:
    """How many tokens are told beside each one; None where no probabilities are."""
    most = MOST_LIKELIEST[kind]
    if kind == "text":
        given = body.get("logprobs")
        return None if given is None or given is False else whole(body, "logprobs", 0, 0, most)
    told = flag(body, "logprobs")
    beside = whole(body, "top_logprobs", 0, 0, most)
    if beside and not told:
        raise refused("top_logprobs needs logprobs to be true.", "top_logprobs")
    return beside if told else None


def thinking_of(body: Body, info: BackendInfo) -> bool | None:
    """Whether the model is to think before it answers; None leaves that to its chat template."""
    name = "chat_template_kwargs"
    given = object_of(body, name)
    unknown = [each for each in given if each not in SWITCHES]
    if unknown:
        words = f"{name} cannot have {shortened(unknown[0])}. Use: {', '.join(SWITCHES)}."
        raise refused(words, name, "unsupported_parameter")
    chosen = {flag(given, each, name) for each in given if given[each] is not None}
    if len(chosen) > 1:
        raise refused(f"{name} says both. Use one of: {', '.join(SWITCHES)}.", name)
    if True in chosen and not info.can_think:
        words = f"{info.name} has no thinking that can be switched on. Leave {name} out."
        raise refused(words, name, "unsupported_parameter")
    return chosen.pop() if chosen else None


def parted_of(body: Body) -> bool:
    """Whether thinking is told apart from the answer: unless "none" is said, in llama-server's
    words."""
    given = body.get("reasoning_format")
    if given not in (None, *REASONING):
        words = f"reasoning_format cannot be {shortened(given)}. Choose: {', '.join(REASONING)}."
        raise refused(words, "reasoning_format")
    return given != "none"


def method_of(given: Any) -> Method:
    """The way to decode: {"method": ..., "tiers": [...], "nodes": ...}, a method's name, or false
    for plain decoding. The text is the same in all of them."""
    if given is None or given is True:
        return USUAL
    if given is False:
        return PLAIN
    chosen = {"method": given} if isinstance(given, str) else given
    if not isinstance(chosen, dict) or any(name not in DRAFTING for name in chosen):
        raise refused(
            f"speculative cannot be {shortened(given)}. Give false, the name of a method, or an "
            f"object with some of: {', '.join(DRAFTING)}.",
            "speculative",
        )
    try:
        name = chosen.get("method", USUAL.name)
        if not isinstance(name, str):
            raise SettingError(f"The method cannot be {shortened(name)}. Give its name.")
        method = method_named(name)
        given_drafting = {each: chosen[each] for each in DRAFTING[1:] if each in chosen}
        for each in given_drafting:
            fits = method.settable and (each != "tiers" or method.tiers_settable)
            if not fits:
                raise SettingError(f"The method {name!r} takes no {each!r}. Leave it out.")
        return method.using(replace(method.drafting, **given_drafting))
    except SettingError as error:
        raise refused(str(error), "speculative") from error


# what is answered


def messages_of(body: Body) -> tuple[tuple[Message, ...], str]:
    """The conversation, as the page would put it: messages in a row by one role become one, and
    empty ones are left out. Where the last one is the assistant's, the answer begins with it."""
    given = body.get("messages")
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise refused(
            f"messages cannot be {shortened(given)}. Give a list of 1 to {MOST_MESSAGES:,} "
            "messages.",
            "messages",
        )
    found: list[Message] = []
    for number, each in enumerate(given):
        message = message_of(each, f"messages[{number}]")
        if not message.content.strip():
            continue
        if found and found[-1].role == message.role:
            message = Message(message.role, f"{found.pop().content}\n\n{message.content}")
        found.append(message)
    begun = found.pop().content if found and found[-1].role == "assistant" else ""
    if not found or found[-1].role != "user":
        raise refused(
            "The last message has to be the user's, and must not be empty. Behind it there may be "
            "the beginning of the answer.",
            "messages",
        )
    return tuple(found), begun


def message_of(given: Any, name: str) -> Message:
    """One message."""
    if not isinstance(given, dict):
        raise refused(f"{name} cannot be {shortened(given)}. Give an object.", name)
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refused(
            f"The role of {name} cannot be {shortened(role)}. Choose from: {', '.join(ROLES)}.",
            f"{name}.role",
        )
    for unknown in ("tool_calls", "function_call", "audio"):
        if given.get(unknown):
            raise refused(f"{name} has {unknown}, and only text is read.", f"{name}.{unknown}")
    return Message(ROLES[role], content_of(given.get("content"), f"{name}.content"))


def content_of(given: Any, name: str) -> str:
    """The text of a message: a string, or a list of parts."""
    if given is None:
        return ""
    if isinstance(given, str):
        return clean(given)
    if not isinstance(given, list):
        words = f"{name} cannot be {shortened(given)}. Give a string, or a list of parts."
        raise refused(words, name)
    texts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise refused(
                f"{name} has a part {shortened(kind)}. Only parts of the type 'text' are read: no "
                "images, no sound, no files.",
                name,
            )
        texts.append(clean(part["text"]))
    return "\n".join(texts)


def prompts_of(body: Body, basic: Request, info: BackendInfo) -> list[Request]:
    """What is gone on with: a text, tokens, or a list of either."""
    given = body.get("prompt")
    several = isinstance(given, list) and (not given or not is_number(given[0]))
    each = given if several else [given]
    return [prompt_of(one, basic, info) for one in each or [None]]


def prompt_of(given: Any, basic: Request, info: BackendInfo) -> Request:
    """One of them."""
    if isinstance(given, str) and given:
        return replace(basic, text=clean(given))
    tokens = given if isinstance(given, list) else []
    size = info.vocabulary_size
    if tokens and all(is_number(token) and 0 <= token < size for token in tokens):
        return replace(basic, prompt=tuple(tokens))
    raise refused(
        f"prompt cannot be {shortened(given)}. Give a text that is not empty, a list of tokens "
        f"from 0 to {size - 1:,}, or a list of either.",
        "prompt",
    )


# values


def clean(text: str) -> str:
    """A text without halves of surrogate pairs, which are no characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_number(value: Any) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(body: Body, name: str, default: int, low: int, high: int) -> int:
    """A whole number within a range."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, float) and isfinite(value) and value == int(value):
        value = int(value)
    if not is_number(value) or not low <= value <= high:
        words = f"{name} cannot be {shortened(value)}. Give a whole number from {low} to {high:,}."
        raise refused(words, name)
    return int(value)


def flag(body: Body, name: str, group: str = "") -> bool:
    """True or false, in a group of parameters where there is one; false where nothing is said."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        words = f"{name} cannot be {shortened(value)}. Give true or false."
        raise refused(words, group or name)
    return bool(value)


def object_of(body: Body, name: str) -> Body:
    """A group of parameters; empty where nothing is said."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise refused(f"{name} cannot be {shortened(value)}. Give an object.", name)
    return value or {}
