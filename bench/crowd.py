"""Many answers at once: tokens per second of all, against one after the other and plain batching.

The answers go through the engine's own queue, as those of programs do. Each number of
answers at once is measured with plain decoding and with the method, in rotated order, on the same
prompts. Every text is compared with that of the first run.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median
from time import perf_counter

from tqdm import tqdm

from bench.harness import Add, Benchmark, Setup, numbers
from bench.report import Record, headline, show_rows
from engine.backends.base import is_batching
from engine.compare import plain_reading
from engine.engine import Request
from engine.errors import SettingError
from engine.local import Local
from engine.methods import PLAIN, Method, method_named
from engine.metrics import summarise
from engine.runs import collected
from engine.types import NO_RUN, Learned, Prefill, Step

COLUMNS = {
    "answers at once": "{at_once}",
    "plain tok/s": "{plain:.1f}",
    "drafted tok/s": "{drafted:.1f}",
    "of one after the other": "{over_alone:.2f}x",
    "of plain at once": "{over_plain:.2f}x",
    "tok/fwd": "{tokens_per_forward:.2f}",
    "told": "{told:.2f}x",
    "other texts": "{different}",
}


class Crowd(Benchmark):
    """Several answers at once, against one after the other and against plain batching."""

    defaults = {"parallel": 8, "limit": 16, "max_new_tokens": 64, "temperature": 0.7, "repeats": 3}

    def add_options(self, add: Add) -> None:
        add("--at-once", type=numbers(1), default=[1, 2, 4, 8], help="comma between")
        add("--method", default="hd")

    def measure(self, setup: Setup) -> Record:
        if not (is_batching(setup.backend) and setup.backend.at_once):
            raise SettingError(f"{setup.backend.info.label} answers one request after the other.")
        options, method = setup.options, method_named(setup.options.method)
        databases = setup.databases({"hd": method})["hd"]
        found: dict[tuple[str, int], list[Record]] = {}
        texts: dict[int, list[int]] = {}
        with closing(Local(lambda *_: databases.statistics, backend=setup.backend)) as engine:
            engine.loaded.measure_costs()
            cases = [(each, at_once) for at_once in options.at_once for each in (PLAIN, method)]
            answer_all(engine, setup, PLAIN, 1, setup.prompts[:1])  # what is first takes longer
            for turn in tqdm(range(options.repeats), desc="Rounds"):
                for at in range(len(cases)):
                    how, at_once = cases[(at + turn) % len(cases)]
                    row = answer_all(engine, setup, how, at_once, setup.prompts)
                    said = row.pop("texts")
                    for number, text in enumerate(said):
                        texts.setdefault(number, text)
                    row["different"] = sum(texts[n] != text for n, text in enumerate(said))
                    found.setdefault((how.name, at_once), []).append(row)
        middle = {case: median_of(rows) for case, rows in found.items()}
        alone = middle[method.name, options.at_once[0]]["tokens_per_second"]
        return {
            "method": method.name,
            "first": options.at_once[0],
            "rows": [
                {
                    "at_once": at_once,
                    "plain": (plain := middle[PLAIN.name, at_once]["tokens_per_second"]),
                    "drafted": (drafted := middle[method.name, at_once])["tokens_per_second"],
                    "over_alone": drafted["tokens_per_second"] / alone,
                    "over_plain": drafted["tokens_per_second"] / plain,
                    "tokens_per_forward": drafted["tokens_per_forward"],
                    "told": drafted["told"],
                    "different": max(
                        row["different"]
                        for name in (PLAIN.name, method.name)
                        for row in found[name, at_once]
                    ),
                }
                for at_once in options.at_once
            ],
        }

    def show(self, record: Record) -> None:
        print(
            f"{headline(record)}\n{record['prompts']} prompts, up to {record['max_new_tokens']} "
            f"tokens, T={record['temperature']:g}, {record['method']}; tokens per second of all "
            f"answers, whole answers, medians of {record['repeats']}\n"
        )
        show_rows(record["rows"], COLUMNS)


def median_of(rows: Sequence[Record]) -> Record:
    return {name: median(row[name] for row in rows) for name in rows[0]}


def answer_all(
    engine: Local,
    setup: Setup,
    method: Method,
    at_once: int,
    prompts: Sequence[tuple[str, list[int]]],
) -> Record:
    """Answer all prompts, so many at once; every owner is new, and has no past answers."""
    engine.queue.parallel = at_once
    sampling = setup.generation.sampling
    start = perf_counter()
    streams = [
        engine.generate(
            Request(
                prompt=tuple(tokens),
                generation=replace(
                    setup.generation, sampling=replace(sampling, seed=sampling.seed + number)
                ),
                method=method,
                owner=f"{start} {number}",
            )
        )
        for number, (_, tokens) in enumerate(prompts)
    ]
    kinds = Prefill | Step | Learned
    runs = [collected(NO_RUN, (e for e in stream if isinstance(e, kinds))) for stream in streams]
    seconds = perf_counter() - start
    metrics = [summarise(run) for run in runs]
    told = [
        (plain_reading(each) + each.plain_seconds, each.seconds)
        for each in metrics
        if each.plain_seconds is not None
    ]
    tokens = sum(each.tokens for each in metrics)
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_forward": tokens / sum(each.forwards for each in metrics),
        "told": sum(plain for plain, _ in told) / sum(took for _, took in told) if told else 1.0,
        "texts": [[token.id for token in run.tokens] for run in runs],
    }
