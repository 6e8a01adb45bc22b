"""A toy that answers each prompt with a text of the test's, and whose template knows tools."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.backends.base import LogitScores
from engine.backends.chat_template import Turn, conversation
from engine.sampling import Floats
from engine.settings import Sampling, ThinkingChoice
from engine.tools import FORMS, CallForm
from engine.tree import Tree
from engine.types import Message, Tool
from tests.support.toy import ASSISTANT, END, VOCABULARY, ToyBackend

FRAME = ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
CALLS = FORMS[0]._replace(frame=FRAME)


def template(turns: Sequence[Turn], variables: Mapping[str, Any]) -> str:
    """Turns and tools as Qwen's template writes them, in the toy's special tokens."""
    text = ""
    if effort := variables.get("reasoning_effort"):
        text = f"<|system|>Reasoning: {effort}<|end|>"
    if tools := variables.get("tools"):
        text += f"<|system|>{json.dumps(tools, ensure_ascii=False)}<|end|>"
    for turn in turns:
        content = turn["content"]
        for call in turn.get("tool_calls", ()):
            written = json.dumps(call["function"], ensure_ascii=False)
            content += f"\n<tool_call>\n{written}\n</tool_call>"
        if turn["role"] == "tool":
            content = f"<tool_response>{turn['name']}: {content}</tool_response>"
        role = "user" if turn["role"] == "tool" else turn["role"]
        text += f"<|{role}|>{content}<|end|>"
    return text + "<|assistant|>"


class Scripted(ToyBackend):
    """Says `script(prompt)`, where the prompt is the text up to its answer. `prompts` are those of
    all answers, and `form` is that of its calls."""

    def __init__(self, script: Callable[[str], str], form: CallForm | None = CALLS) -> None:
        super().__init__(context_length=8192, name="scripted")
        self.script, self.prompts = script, list[str]()
        self.info = replace(self.info, calls=form)

    def render(
        self,
        messages: Sequence[Message],
        thinking: ThinkingChoice = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        return conversation(messages, template, "", self.info, self.special, thinking, tools)

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        scores = super().score(tree, sampling)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append((*(self.cache if parent < 0 else paths[parent]), token))
        return LogitScores(lambda row: self.following(paths[row]), scores.positions, sampling)

    def following(self, path: tuple[int, ...]) -> Floats:
        begin = len(path) - path[::-1].index(ASSISTANT)
        prompt = self.detokenize(path[:begin])
        if self.prompts[-1:] != [prompt]:
            self.prompts.append(prompt)
        said, at = self.script(prompt).encode(), len(path) - begin
        logits = np.full(VOCABULARY, -30.0, np.float32)
        logits[said[at] if at < len(said) else END] = 30.0
        return logits
