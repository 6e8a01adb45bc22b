"""What is sent to a server for an answer, and what is left out where a server refuses it.

Servers agree on messages, temperature, top-p, seed, stop and a limit. What goes beyond that is sent
where it is wanted and left out where the server says that it does not take it; what changes the
answer is then told.
"""

from collections.abc import Iterable
from typing import Any

from engine.engine import Request
from engine.methods import PLAIN
from engine.servers.makers import FULL, OFF, STRATA, VLLM

SILENT = ("stream_options", "return_token_ids", "logprobs")
"""Parameters that change nothing of the answer."""
RENAMED = {"max_tokens": "max_completion_tokens"}
"""What newer servers call a parameter that they refuse."""
OPTIONAL = ("top_k", "min_p", "seed", "top_p", "temperature", *SILENT)
"""What a server may refuse, and is then left out."""
SAMPLERS = ("top_k", "min_p")
NAMES = {"top_k": "Top-k", "min_p": "Min-p", "top_p": "Top-p"}


def body_of(
    request: Request, model: str, maker: str, told: bool, without: Iterable[str]
) -> dict[str, Any]:
    """A request in OpenAI's words. `told` says that the server tells where tokens came from, so
    that the text of each one is wanted; `without` are names that it does not take."""
    generation, sampling = request.generation, request.generation.sampling
    messages = [{"role": each.role, "content": each.content} for each in request.messages]
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": generation.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
    # What is left out may be set by the model's own file, where a server reads that.
    if sampling.top_k or maker in FULL:
        body["top_k"] = sampling.top_k
    if sampling.min_p or maker in FULL:
        body["min_p"] = sampling.min_p
    if generation.stop:
        body["stop"] = list(generation.stop)
    if generation.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": generation.thinking}
    if request.begun:
        messages.append({"role": "assistant", "content": request.begun})
        if maker == VLLM:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
    if maker == VLLM:
        body["return_token_ids"] = True
    if told:
        body["logprobs"] = True
    if request.method == PLAIN:
        body |= OFF.get(maker, {}) if told or maker == STRATA else {}
    return renamed(body, maker, without)


def renamed(body: dict[str, Any], maker: str, without: Iterable[str]) -> dict[str, Any]:
    """A request without what the server does not take."""
    for name in without:
        value = body.pop(name, None)
        if name in SAMPLERS and maker in FULL:
            body[name] = 0
        if value is not None and name in RENAMED:
            body[RENAMED[name]] = value
    return body


def refused_name(words: str, body: dict[str, Any]) -> str:
    """The parameter that a server's refusal is about; "" where it is about something else."""
    names = [name for name in (*OPTIONAL, *RENAMED) if name in body and name in words]
    return max(names, key=len, default="")


def left_out(name: str, host: str) -> str:
    """What to say of a parameter that changes the answer and was not taken; "" for others."""
    if name in SILENT or name in RENAMED:
        return ""
    return (
        f"{host} does not take {NAMES.get(name, name.capitalize())}, so it was left out of the "
        "request."
    )
