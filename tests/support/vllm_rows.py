"""vLLM's side of its interface for drafters: the exact types, and rows that are slots.

A batch is a list of requests in slots without gaps. When one goes, the last one takes its slot. The
target's choice is a function of the tokens before, so what it says does not depend on drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from app.vllm.attached import NAME, Attached

ROWS, LONGEST = 8, 512


class Proposes(Protocol):
    """What vLLM asks of its drafter."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts for every row."""


def config(tokens: int = 4, vocabulary: int = 50, rank: int = 0, **attached: Any) -> Any:
    """As much of vLLM's configuration as is read."""
    values = Attached(**{"rows": 1e9, **attached}).values()
    return SimpleNamespace(
        additional_config={NAME: values},
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary, max_model_len=LONGEST),
        parallel_config=SimpleNamespace(rank=rank, data_parallel_rank=0),
        device_config=SimpleNamespace(device_type="cuda"),
    )


@dataclass
class Request:
    """One request: its tokens, how many of them are its prompt, and what it has drafts of."""

    name: str
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    unread: int = 0
    """Steps until its prompt is read."""


class Batch:
    def __init__(self, proposer: Proposes, choose: Callable[[Sequence[int]], int]) -> None:
        self.proposer, self.choose = proposer, choose
        self.requests: list[Request] = []
        self.token_ids_cpu = np.zeros((ROWS, LONGEST), dtype=np.int32)
        self.num_tokens_no_spec = np.zeros(ROWS, dtype=np.int32)

    def add(self, request: Request) -> None:
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        """A request goes: it is over, or preempted. The last one moves into its slot."""
        at = self.requests.index(request)
        last = self.requests.pop()
        if last is not request:
            self.requests[at] = last
        request.drafts = []

    def step(self, ask: bool = True) -> list[list[int]]:
        """One forward over all rows: what it emitted. vLLM leaves out asking near the context's
        end."""
        sampled = [self.verified(request) for request in self.requests]
        for row, request in enumerate(self.requests):
            size = len(request.tokens)
            self.token_ids_cpu[row, :size] = request.tokens
            self.token_ids_cpu[row, size : size + 5] = 49  # what stood there before
            self.num_tokens_no_spec[row] = size
        if ask:
            given = sampled, self.num_tokens_no_spec, self.token_ids_cpu
            made = self.proposer.propose(*given, slot_mappings=None)
            assert type(made) is list and len(made) == len(sampled)
        else:
            made = [[] for _ in sampled]
        for request, drafts in zip(self.requests, made, strict=True):
            assert type(drafts) is list and all(type(token) is int for token in drafts)
            request.drafts = drafts
        return sampled

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def verified(self, request: Request) -> list[int]:
        """What a step says for a request; nothing while its prompt is being read."""
        if request.unread:
            request.unread -= 1
            return []
        said: list[int] = []
        for draft in [*request.drafts, None]:
            said.append(self.choose([*request.tokens, *said]))
            if said[-1] != draft:
                break
        request.tokens += said
        return said
