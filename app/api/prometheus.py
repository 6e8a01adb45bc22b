"""Counters of all answers to programs, as Prometheus reads them.

Where a figure means what vLLM means by it, it has vLLM's name, so that its dashboards work. What
only we know has names that begin with `strata_`. All begin anew with the program.
"""

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from app.api.figures import Answered, Totals

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the classes in which durations are counted."""
Labels = Mapping[str, str]
Samples = Sequence[tuple[Labels, float]]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """How many durations were how long."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds


class Counters:
    """See the module's docstring. Any thread may count."""

    def __init__(self) -> None:
        self.totals: defaultdict[str, Totals] = defaultdict(Totals)
        self.first: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.whole: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.refused: Counter[int] = Counter()
        self.lock = threading.Lock()

    def answered(self, one: Answered, finish: str, first: float | None, whole: float) -> None:
        """An answer is over: its first token came `first` seconds after it was asked for."""
        with self.lock:
            self.totals[one.model].add(one, finish)
            self.whole[one.model].add(whole)
            if first is not None:
                self.first[one.model].add(first)

    def failed(self, status: int) -> None:
        """A request was not answered."""
        with self.lock:
            self.refused[status] += 1

    def text(self, waiting: int, running: int, model: str) -> str:
        """All of it; `model` is the loaded one, "" for none."""
        with self.lock:
            return "\n".join([*self.lines(waiting, running, model), ""])

    def lines(self, waiting: int, running: int, model: str) -> Iterator[str]:
        """Line by line."""
        loaded = {"model_name": model}
        for name, words, value in (
            ("vllm:num_requests_running", "Requests that are answered now.", running),
            ("vllm:num_requests_waiting", "Requests that wait now.", waiting),
            ("strata_model_loaded", "Whether a model is loaded.", int(bool(model))),
        ):
            yield from family(name, "gauge", words, [(loaded, value)])
        told = [({"status": str(status)}, n) for status, n in sorted(self.refused.items())]
        yield from counter("strata_requests_refused_total", "Requests not answered.", told)
        for name, words, field in SUMS:
            found = [({"model_name": m}, t.sums[field]) for m, t in self.totals.items()]
            yield from counter(name, words, found)
        for name, words, field in DURATIONS:
            took = [({"model_name": m}, t.seconds[field]) for m, t in self.totals.items()]
            yield from counter(name, words, took)
        yield from self.by_label()
        for name, words, known in (
            ("vllm:time_to_first_token_seconds", "From asking to the first token.", self.first),
            ("vllm:e2e_request_latency_seconds", "From asking to the end.", self.whole),
        ):
            yield from histogram(name, words, known)

    def by_label(self) -> Iterator[str]:
        """What is counted apart: by how answers ended, by source, by position."""
        totals = self.totals.items()
        ends = [
            ({"model_name": m, "finished_reason": reason}, n)
            for m, t in totals
            for reason, n in t.finished.items()
        ]
        yield from counter("vllm:request_success_total", "Answers by how they ended.", ends)
        places = [
            ({"model_name": m, "position": str(place)}, n)
            for m, t in totals
            for place, n in enumerate(t.per_position)
        ]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        yield from counter(name, "Accepted drafted tokens by their place in the draft.", places)
        for kind, words in (("drafted", "Drafted"), ("accepted", "Accepted drafted")):
            found = [
                ({"model_name": m, "source": source}, n)
                for m, t in totals
                for source, n in getattr(t, kind).items()
            ]
            yield from counter(f"strata_{kind}_tokens_total", f"{words} tokens by source.", found)
            meant = {"drafted": "draft", "accepted": "accepted"}[kind]
            sums = [({"model_name": m}, getattr(t, kind).total()) for m, t in totals]
            yield from counter(
                f"vllm:spec_decode_num_{meant}_tokens_total", f"{words} tokens.", sums
            )


SUMS = (
    ("vllm:prompt_tokens_total", "Tokens of prompts.", "prompt"),
    ("vllm:generation_tokens_total", "Tokens that were said.", "emitted"),
    ("vllm:prefix_cache_queries_total", "Tokens of prompts looked for in the cache.", "prompt"),
    ("vllm:prefix_cache_hits_total", "Tokens of prompts found in the cache.", "cached"),
    ("vllm:spec_decode_num_drafts_total", "Steps that drafted.", "drafts"),
    ("strata_forwards_total", "Steps of the model, plain ones included.", "forwards"),
)
DURATIONS = (
    ("strata_prompt_seconds_total", "Reading prompts.", "prompt"),
    ("strata_decode_seconds_total", "Decoding.", "decode"),
    (
        "strata_plain_seconds_total",
        "What plain decoding would have taken for the answers of which that is known.",
        "plain",
    ),
    ("strata_compared_seconds_total", "What these answers took.", "compared"),
)


def family(name: str, kind: str, words: str, samples: Samples) -> Iterator[str]:
    """A figure with its values."""
    yield f"# HELP {name} {words}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{{{written(labels)}}} {value:.17g}"


def counter(name: str, words: str, samples: Samples) -> Iterator[str]:
    """A figure that only grows."""
    return family(name, "counter", words, samples)


def histogram(name: str, words: str, known: Mapping[str, Histogram]) -> Iterator[str]:
    """Durations by model: each class counts all that were no longer."""
    yield f"# HELP {name} {words}"
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
    """Labels as they are read: what would end a value is escaped."""
    pairs = []
    for name, value in labels.items():
        value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        pairs.append(f'{name}="{value}"')
    return ",".join(pairs)
