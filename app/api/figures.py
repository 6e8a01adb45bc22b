"""Figures of each answer in the formats of llama-server, vLLM and Strata, and counters of all
answers for Prometheus.

All figures come from `engine.metrics`. A drafted token is a node of a draft tree, and an accepted
token is one that was kept. The token that the model adds after them (the bonus token) counts as
neither in all three formats. As in vLLM, only a step that drafted counts as a vLLM step.

A counter with the same meaning as in vLLM has vLLM's name, so that its dashboards work. The names
of other counters begin with `strata_`. All counters start at 0 with the program.
"""

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from engine.compare import live
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


class Totals:
    """Sums over all answers of one model."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.per_position: list[int] = []

    def add(self, one: AnswerFigures, finish: str) -> None:
        """Count an answer; `finish` says how it ended."""
        metrics = one.metrics
        self.finished[finish] += 1
        self.drafted.update(metrics.proposed)
        self.accepted.update(metrics.accepted)
        kept = (kept for _, kept in metrics.by_depth)
        self.per_position = [a + b for a, b in zip_longest(self.per_position, kept, fillvalue=0)]
        sums = {
            "prompt": one.prefill.tokens,
            "cached": one.prefill.reused,
            "emitted": metrics.tokens,
            "forwards": metrics.forwards,
            "drafts": one.drafts,
            "prompt_seconds": metrics.prefill_seconds,
            "decode_seconds": metrics.decode_seconds,
        }
        if metrics.plain_seconds is not None:
            plain = metrics.plain_prefill_seconds
            prompt = metrics.prefill_seconds if plain is None else plain
            sums["plain_seconds"] = prompt + metrics.plain_seconds
            sums["compared_seconds"] = metrics.seconds
        for name, value in sums.items():
            self.sums[name] += value


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the classes in which durations are counted."""
Labels = Mapping[str, str]
Samples = Sequence[tuple[Labels, float]]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds


class Counters:
    """The counters of all answers to programs. Any thread may count."""

    def __init__(self) -> None:
        self.totals: defaultdict[str, Totals] = defaultdict(Totals)
        self.first: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.whole: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.refused: Counter[int] = Counter()
        self.lock = threading.Lock()

    def answered(self, one: AnswerFigures, finish: str, first: float | None, whole: float) -> None:
        """Count a finished answer, whose first token came `first` seconds after its request."""
        with self.lock:
            self.totals[one.model].add(one, finish)
            self.whole[one.model].add(whole)
            if first is not None:
                self.first[one.model].add(first)

    def failed(self, status: int) -> None:
        with self.lock:
            self.refused[status] += 1

    def text(self, waiting: int, running: int, model: str) -> str:
        """All counters in Prometheus' format; `model` is the name of the loaded model, "" if there
        is none."""
        with self.lock:
            return "\n".join([*self.lines(waiting, running, model), ""])

    def lines(self, waiting: int, running: int, model: str) -> Iterator[str]:
        for name, description, value in (
            ("vllm:num_requests_running", "Requests that are answered now.", running),
            ("vllm:num_requests_waiting", "Requests that wait now.", waiting),
            ("strata_model_loaded", "Whether a model is loaded.", int(bool(model))),
        ):
            yield from family(name, "gauge", description, [({"model_name": model}, value)])
        refused = [({"status": str(status)}, n) for status, n in sorted(self.refused.items())]
        name = "strata_requests_refused_total"
        yield from family(name, "counter", "Requests not answered.", refused)
        totals = self.totals.items()
        for name, description, key in SUMS:
            yield from counter(name, description, {model: {"": t.sums[key]} for model, t in totals})
        yield from counter(
            "vllm:request_success_total",
            "Answers by how they ended.",
            {model: t.finished for model, t in totals},
            "finished_reason",
        )
        yield from counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "Accepted drafted tokens by their place in the draft.",
            {model: dict(enumerate(t.per_position)) for model, t in totals},
            "position",
        )
        for name, total, description, sources in (
            ("drafted", "draft", "Drafted", {model: t.drafted for model, t in totals}),
            ("accepted", "accepted", "Accepted drafted", {m: t.accepted for m, t in totals}),
        ):
            of_each = f"{description} tokens by source."
            yield from counter(f"strata_{name}_tokens_total", of_each, sources, "source")
            sums = {model: {"": found.total()} for model, found in sources.items()}
            name = f"vllm:spec_decode_num_{total}_tokens_total"
            yield from counter(name, f"{description} tokens.", sums)
        for name, description, known in (
            (
                "vllm:time_to_first_token_seconds",
                "Seconds from the request to the first token.",
                self.first,
            ),
            (
                "vllm:e2e_request_latency_seconds",
                "Seconds from the request to its end.",
                self.whole,
            ),
        ):
            yield from histogram(name, description, known)


SUMS = (
    ("vllm:prompt_tokens_total", "Prompt tokens.", "prompt"),
    ("vllm:generation_tokens_total", "Generated tokens.", "emitted"),
    ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the cache.", "prompt"),
    ("vllm:prefix_cache_hits_total", "Prompt tokens found in the cache.", "cached"),
    ("vllm:spec_decode_num_drafts_total", "Steps that drafted.", "drafts"),
    ("strata_forwards_total", "Steps of the model, plain ones included.", "forwards"),
    ("strata_prompt_seconds_total", "Seconds of reading prompts.", "prompt_seconds"),
    ("strata_decode_seconds_total", "Seconds of decoding.", "decode_seconds"),
    (
        "strata_plain_seconds_total",
        "Seconds that plain decoding would have taken, for answers with an estimate.",
        "plain_seconds",
    ),
    ("strata_compared_seconds_total", "Seconds that these answers took.", "compared_seconds"),
)


def family(name: str, kind: str, description: str, samples: Samples) -> Iterator[str]:
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{{{written(labels)}}} {value:.17g}"


def counter(
    name: str, description: str, models: Mapping[str, Mapping[Any, float]], label: str = ""
) -> Iterator[str]:
    """A metric that only grows, by model and, if there is a `label`, by its values."""
    samples = [
        ({"model_name": model, label: str(value)} if label else {"model_name": model}, n)
        for model, values in models.items()
        for value, n in values.items()
    ]
    return family(name, "counter", description, samples)


def histogram(name: str, description: str, known: Mapping[str, Histogram]) -> Iterator[str]:
    """Durations by model: each class counts all durations up to its bound."""
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} histogram"
    for model, found in known.items():
        below = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), found.counts, strict=True):
            below += count
            yield f"{name}_bucket{{{written({'model_name': model, 'le': bound})}}} {below}"
        labels = written({"model_name": model})
        yield f"{name}_sum{{{labels}}} {found.sum:.17g}"
        yield f"{name}_count{{{labels}}} {below}"


def written(labels: Labels) -> str:
    """Labels in Prometheus' format, with special characters escaped."""
    pairs = []
    for name, value in labels.items():
        value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        pairs.append(f'{name}="{value}"')
    return ",".join(pairs)
