"""Figures of each answer in the formats of llama-server, vLLM and Strata, and counters of all
answers for Prometheus.

A drafted token is a node of a draft tree, and an accepted token is one that was kept. The token
that the model adds after them (the bonus token) counts as neither in all three formats. As in vLLM,
only a step that drafted counts as a vLLM step. A counter with the same meaning as in vLLM has
vLLM's name, so that its dashboards work. All counters start at 0 with the program.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from engine.compare import live, plain_reading
from engine.metrics import Metrics
from engine.types import PREDICTION, Finish, Prefill

FINISHES: dict[Finish, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
}
"""Why an answer ended, in OpenAI's terms."""


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """A finished answer. A step drafted at most `nodes` tokens. `thought` is the number of tokens
    of thinking, if thinking is separated from the answer."""

    model: str
    method: str
    nodes: int
    seed: int
    prefill: Prefill
    metrics: Metrics
    thought: int = 0

    @property
    def drafts(self) -> int:
        return self.metrics.forwards - self.metrics.plain_steps


def usage(answers: Sequence[AnswerFigures], prompts: int) -> dict[str, Any]:
    """Tokens that were read and generated. A prompt counts once, however many choices it has. The
    tokens of a prediction count if they were drafted."""
    first = answers[:: max(1, len(answers) // max(1, prompts))]
    read = sum(one.prefill.tokens for one in first)
    emitted = sum(one.metrics.tokens for one in answers)
    cached = sum(one.prefill.reused for one in first)
    drafted = sum(one.metrics.proposed[PREDICTION] for one in answers)
    accepted = sum(one.metrics.accepted[PREDICTION] for one in answers)
    return {
        "prompt_tokens": read,
        "completion_tokens": emitted,
        "total_tokens": read + emitted,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.thought for one in answers),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def timings(one: AnswerFigures) -> dict[str, Any]:
    """llama-server's figures. Tokens in the cache do not count as processed."""
    metrics, processed = one.metrics, one.prefill.tokens - one.prefill.reused
    found = {"cache_n": one.prefill.reused}
    found |= rates("prompt", processed, metrics.prefill_seconds)
    found |= rates("predicted", metrics.tokens, metrics.decode_seconds)
    drafted = sum(metrics.proposed.values())
    if drafted:  # like llama-server, which leaves these out if nothing was drafted
        found |= {"draft_n": drafted, "draft_n_accepted": metrics.kept}
    return found


def rates(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


def speculative(one: AnswerFigures) -> dict[str, Any] | None:
    """vLLM's figures of one answer; None if nothing was drafted."""
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
        "acceptance_histogram": {str(kept): n for kept, n in sorted(metrics.kept_lengths.items())},
        "acceptance_rate_per_position": [kept / drafts for _, kept in metrics.by_depth],
    }


def ours(one: AnswerFigures) -> dict[str, Any]:
    """Strata's own figures: by source, with the speedup."""
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


def figures(answers: Sequence[AnswerFigures]) -> dict[str, Any]:
    """The figures next to the choices. Several choices have only Strata's figures, for each."""
    if len(answers) != 1:
        return {"metrics": None, "strata": {"choices": [ours(one) for one in answers]}}
    (one,) = answers
    metrics = {"speculative_decoding": speculative(one)}
    return {"timings": timings(one), "metrics": metrics, "strata": ours(one)}


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the classes in which durations are counted."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REFUSED = "strata_requests_refused_total"
FINISHED = "vllm:request_success_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
DRAFTED, ACCEPTED = "strata_drafted_tokens_total", "strata_accepted_tokens_total"
FIRST, WHOLE = "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"
METRICS = {
    "vllm:num_requests_running": "Requests that are answered now.",
    "vllm:num_requests_waiting": "Requests that wait now.",
    "strata_model_loaded": "Whether a model is loaded.",
    REFUSED: "Requests not answered.",
    "vllm:prompt_tokens_total": "Prompt tokens.",
    "vllm:generation_tokens_total": "Generated tokens.",
    "vllm:prefix_cache_queries_total": "Prompt tokens looked up in the cache.",
    "vllm:prefix_cache_hits_total": "Prompt tokens found in the cache.",
    "vllm:spec_decode_num_drafts_total": "Steps that drafted.",
    "strata_forwards_total": "Steps of the model, plain ones included.",
    "strata_beside_total": "Other answers in the forwards of these steps, added up.",
    "strata_prompt_seconds_total": "Seconds of reading prompts.",
    "strata_decode_seconds_total": "Seconds of decoding.",
    "strata_plain_seconds_total": "Seconds that plain decoding would have taken, for answers with "
    "an estimate.",
    "strata_compared_seconds_total": "Seconds that these answers took.",
    FINISHED: "Answers by how they ended.",
    PER_POSITION: "Accepted drafted tokens by their place in the draft.",
    DRAFTED: "Drafted tokens by source.",
    "vllm:spec_decode_num_draft_tokens_total": "Drafted tokens.",
    ACCEPTED: "Accepted drafted tokens by source.",
    "vllm:spec_decode_num_accepted_tokens_total": "Accepted drafted tokens.",
    FIRST: "Seconds from the request to the first token.",
    WHOLE: "Seconds from the request to its end.",
}
"""The description of each metric, by its name."""


def sums(one: AnswerFigures) -> dict[str, float]:
    """What an answer adds to the counters that have no other label than the model."""
    metrics, plain, compared = one.metrics, 0.0, 0.0
    if metrics.plain_seconds is not None:
        plain = plain_reading(metrics) + metrics.plain_seconds
        compared = metrics.seconds
    return {
        "vllm:prompt_tokens_total": one.prefill.tokens,
        "vllm:generation_tokens_total": metrics.tokens,
        "vllm:prefix_cache_queries_total": one.prefill.tokens,
        "vllm:prefix_cache_hits_total": one.prefill.reused,
        "vllm:spec_decode_num_drafts_total": one.drafts,
        "vllm:spec_decode_num_draft_tokens_total": sum(metrics.proposed.values()),
        "vllm:spec_decode_num_accepted_tokens_total": sum(metrics.accepted.values()),
        "strata_forwards_total": metrics.forwards,
        "strata_beside_total": metrics.beside,
        "strata_prompt_seconds_total": metrics.prefill_seconds,
        "strata_decode_seconds_total": metrics.decode_seconds,
        "strata_plain_seconds_total": plain,
        "strata_compared_seconds_total": compared,
    }


class Counters:
    """The counters of all answers to programs. Any thread may count."""

    def __init__(self) -> None:
        self.values: defaultdict[str, defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(float)
        )
        """The value of each series, in Prometheus' format, by the name of its metric."""
        self.waiting, self.running = 0, 0
        self.lock = threading.Lock()

    def answered(self, one: AnswerFigures, finish: str, first: float | None, whole: float) -> None:
        """Count a finished answer, whose first token came `first` seconds after its request;
        `finish` says how it ended."""
        model, metrics = one.model, one.metrics
        with self.lock:
            for name, value in sums(one).items():
                self.add(name, value, model_name=model)
            self.add(FINISHED, 1, model_name=model, finished_reason=finish)
            for place, (_, kept) in enumerate(metrics.by_depth):
                self.add(PER_POSITION, kept, model_name=model, position=str(place))
            for name, tokens in ((DRAFTED, metrics.proposed), (ACCEPTED, metrics.accepted)):
                for source, count in tokens.items():
                    self.add(name, count, model_name=model, source=source)
            self.add_duration(WHOLE, whole, model)
            if first is not None:
                self.add_duration(FIRST, first, model)

    def change(self, waiting: int = 0, running: int = 0) -> None:
        """Count requests that begin or end to wait, and to run."""
        with self.lock:
            self.waiting += waiting
            self.running += running

    def failed(self, status: int) -> None:
        with self.lock:
            self.add(REFUSED, 1, status=str(status))

    def add(self, name: str, value: float, **labels: str) -> None:
        self.values[name][series(name, **labels)] += value

    def add_duration(self, name: str, seconds: float, model: str) -> None:
        values = self.values[name]
        for bound in (*SECONDS, inf):
            label = "+Inf" if bound == inf else str(bound)
            values[series(f"{name}_bucket", model_name=model, le=label)] += seconds <= bound
        values[series(f"{name}_sum", model_name=model)] += seconds
        values[series(f"{name}_count", model_name=model)] += 1

    def text(self, model: str) -> str:
        """All counters in Prometheus' format; `model` is the name of the loaded model, "" if there
        is none."""
        gauges = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": self.waiting,
            "strata_model_loaded": int(bool(model)),
        }
        lines = []
        with self.lock:
            for name, description in METRICS.items():
                kind = "counter" if name.endswith("_total") else "histogram"
                kind = "gauge" if name in gauges else kind
                lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
                if name in gauges:
                    lines.append(f"{series(name, model_name=model)} {gauges[name]}")
                lines += [f"{key} {value:.17g}" for key, value in self.values[name].items()]
        return "\n".join([*lines, ""])


def series(name: str, **labels: str) -> str:
    """A metric with its labels in Prometheus' format, with special characters escaped."""
    pairs = []
    for label, value in labels.items():
        value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        pairs.append(f'{label}="{value}"')
    return f"{name}{{{','.join(pairs)}}}"
