"""What answers were worth, in the words of llama-server, of vLLM, and in ours.

All of it follows from `engine.metrics`. A drafted token is a node of a draft tree, an accepted one
was kept; the token that the model adds behind them (the bonus token) is neither drafted nor
accepted in any of the three. Only a step that drafted is one of vLLM's steps, as there.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from engine.compare import live
from engine.metrics import Metrics
from engine.types import Finish, Prefill

FINISHES: dict[Finish, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
}
"""Why an answer ended, in OpenAI's words."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer that is over: of which model, by which method with at most so many drafted tokens
    a step, from which seed, with what it was worth. `thought` of its tokens were thinking, where
    that is told apart."""

    model: str
    method: str
    nodes: int
    seed: int
    prefill: Prefill
    metrics: Metrics
    thought: int = 0

    @property
    def drafts(self) -> int:
        """Steps that drafted."""
        return self.metrics.forwards - self.metrics.plain_steps


def usage(answers: Sequence[Answered], prompts: int) -> dict[str, Any]:
    """What was read and said. A prompt is counted once, however many choices it has."""
    first = answers[:: max(1, len(answers) // max(1, prompts))]
    read = sum(one.prefill.tokens for one in first)
    emitted = sum(one.metrics.tokens for one in answers)
    cached = sum(one.prefill.reused for one in first)
    return {
        "prompt_tokens": read,
        "completion_tokens": emitted,
        "total_tokens": read + emitted,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(one.thought for one in answers)},
    }


def timings(one: Answered) -> dict[str, Any]:
    """llama-server's figures. What was in the cache is not processed."""
    metrics, processed = one.metrics, one.prefill.tokens - one.prefill.reused
    found = {"cache_n": one.prefill.reused}
    found |= rates("prompt", processed, metrics.prefill_seconds)
    found |= rates("predicted", metrics.tokens, metrics.decode_seconds)
    drafted = sum(metrics.proposed.values())
    if drafted:  # as there: where nothing was drafted, nothing is said of drafts
        found |= {"draft_n": drafted, "draft_n_accepted": metrics.kept}
    return found


def rates(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    """How many tokens took how long."""
    return {
        f"{name}_n": tokens,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


def speculative(one: Answered) -> dict[str, Any] | None:
    """vLLM's figures of one answer; None where nothing was drafted."""
    metrics, drafts = one.metrics, one.drafts
    drafted = sum(metrics.proposed.values())
    if not drafts:
        return None
    return {
        "num_spec_tokens": one.nodes,
        "num_spec_steps": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": metrics.kept,
        "mean_acceptance_length": 1 + metrics.kept / drafts,
        "draft_acceptance_rate": metrics.kept / drafted,
        "acceptance_histogram": {str(kept): n for kept, n in metrics.kept_lengths.items()},
        "acceptance_rate_per_position": [kept / drafts for _, kept in metrics.by_depth],
    }


def ours(one: Answered) -> dict[str, Any]:
    """All of it in our words: by source, and what it gained."""
    metrics, gained = one.metrics, live(one.metrics)
    return {
        "method": one.method,
        "seed": one.seed,
        "forwards": metrics.forwards,
        "tokens_per_forward": metrics.mean_acceptance_length,
        "by_source": {
            source: {"drafted": drafted, "accepted": metrics.accepted.get(source, 0)}
            for source, drafted in metrics.proposed.items()
        },
        "speedup_estimate": gained.whole,
        "decode_speedup_estimate": gained.decoding,
        "plain_steps": metrics.plain_steps,
        "seconds": {
            "prompt": metrics.prefill_seconds,
            "draft": metrics.draft_seconds,
            "verify": metrics.verify_seconds,
            "sample": metrics.sample_seconds,
            "other": metrics.other_seconds,
            "learn": metrics.learning_seconds,
        },
    }


def figures(answers: Sequence[Answered]) -> dict[str, Any]:
    """What stands beside the choices; of several ones there are only our figures, of each."""
    if len(answers) != 1:
        return {"metrics": None, "strata": {"choices": [ours(one) for one in answers]}}
    (one,) = answers
    told = {"speculative_decoding": speculative(one)}
    return {"timings": timings(one), "metrics": told, "strata": ours(one)}


class Totals:
    """Sums over all answers of one model."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.per_position: list[int] = []

    def add(self, one: Answered, finish: str) -> None:
        """Count an answer; `finish` says how it ended."""
        metrics = one.metrics
        self.finished[finish] += 1
        self.sums.update(
            prompt=one.prefill.tokens,
            cached=one.prefill.reused,
            emitted=metrics.tokens,
            forwards=metrics.forwards,
            drafts=one.drafts,
        )
        self.drafted.update(metrics.proposed)
        self.accepted.update(metrics.accepted)
        kept = (kept for _, kept in metrics.by_depth)
        self.per_position = [a + b for a, b in zip_longest(self.per_position, kept, fillvalue=0)]
        self.seconds["prompt"] += metrics.prefill_seconds
        self.seconds["decode"] += metrics.decode_seconds
        if metrics.plain_seconds is not None:
            plain = metrics.plain_prefill_seconds
            prompt = metrics.prefill_seconds if plain is None else plain
            self.seconds["plain"] += prompt + metrics.plain_seconds
            self.seconds["compared"] += metrics.seconds
