"""From messages to a prompt that the cache knows already, and on to the answer.

A prompt is the chat template's text, tokenized. But what a model emitted need not be what the
tokenizer would make of its text, and then the cache of the last turn would be worthless. So the
tokens of the last turn are taken over as far as the new prompt shares their text (whole, or up to
an end token), and only the rest is tokenized: the second turn costs no more than its new words.
"""

from collections.abc import Callable, Iterator, Sequence

from engine.backends.base import Backend
from engine.costs import CostCurve
from engine.decode import decode, never
from engine.drafters.base import Drafter
from engine.errors import PromptError
from engine.settings import Drafting, Generation
from engine.types import Message, Prefill, Step


class Chat:
    """One loaded model in conversation. `tokens` is the last turn, prompt and answer."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.tokens: list[int] = []

    def prompt(self, messages: Sequence[Message], known: Sequence[int] | None = None) -> list[int]:
        """The prompt for the next answer; `known` are tokens to take over (default: last turn's).

        Raises PromptError when there is nothing to answer.
        """
        if not messages or messages[-1].role != "user" or not messages[-1].content.strip():
            raise PromptError("The message is empty. Write something first.")
        text = self.backend.render(messages)
        return splice(self.backend, text, self.tokens if known is None else known)

    def fit(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """The messages without as many of the oldest exchanges as it takes to fit the context.

        Keeps a system prompt, and a quarter of the context (at most 256 tokens) free for the
        answer. Returns the messages and how many were dropped. Raises PromptError when the last
        message alone is too long.
        """
        context = self.backend.info.context_length
        room = context - min(context // 4, 256)
        head = [m for m in messages[:1] if m.role == "system"]
        rest, dropped = list(messages[len(head) :]), 0
        while (size := len(self.prompt([*head, *rest]))) > room:
            turn = next((i for i in range(1, len(rest)) if rest[i].role == "user"), None)
            if turn is None:
                if size < context:
                    break
                raise PromptError(
                    f"The message has {size:,} tokens, and {self.backend.info.name} reads at most "
                    f"{context:,} with the answer. Shorten it."
                )
            del rest[:turn]
            dropped += turn
        return [*head, *rest], dropped

    def reply(
        self,
        prompt: Sequence[int],
        drafters: Sequence[Drafter],
        generation: Generation,
        drafting: Drafting,
        cancelled: Callable[[], bool] = never,
        costs: CostCurve | None = None,
    ) -> Iterator[Prefill | Step]:
        """The events of one answer (engine/decode.py); remembers its tokens for the next turn."""
        self.tokens = list(prompt)
        for event in decode(self.backend, prompt, drafters, generation, drafting, cancelled, costs):
            if isinstance(event, Step):
                self.tokens += [token.id for token in event.tokens]
            yield event


def splice(backend: Backend, text: str, known: Sequence[int]) -> list[int]:
    """Tokens of `text` that begin with as much of `known` as is safe.

    Safe means: all of it, or up to an end token, after which tokenization starts afresh, and only
    when the result reads exactly as `text`.
    """
    ends = [i + 1 for i, token in enumerate(known) if token in backend.info.eos_ids]
    for end in sorted({len(known), *ends} - {0}, reverse=True):
        head = backend.detokenize(known[:end])
        if text.startswith(head):
            spliced = [*known[:end], *backend.tokenize(text[len(head) :])]
            if backend.detokenize(spliced) == text:
                return spliced
            break
    return backend.tokenize(text)
