"""Captured forwards on a GPU: what they take, and what whole answers gain.

One model is measured in two ways in the same process: with captured forwards
(engine/backends/captured.py), and with forwards whose operations are started one by one. Times are
medians, and every timed forward has a length that was not seen before. Answers are compared with
plain decoding of the same way.
"""

import argparse
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from transformers import LlamaForCausalLM

from bench.harness import (
    EMBEDDED,
    Add,
    Measurement,
    Setup,
    generation_of,
    load_model,
    numbers,
    prepared,
)
from bench.measure import GENERATE, PROMPT_LOOKUP, Peer, by_category, compared, speed, verdict
from bench.report import Record, conditions, headline, show_rows, table
from bench.transformers_peers import transformers_peer
from engine.backends.base import Backend
from engine.backends.captured import TREES, CapturedModel
from engine.backends.transformers import TransformersBackend
from engine.decode import never
from engine.drafting.costs import GrowingText, comb
from engine.errors import SettingError
from engine.methods import Method, method_named
from engine.models.inflate import write
from engine.models.memory import RECORDINGS, cache_numbers
from engine.models.shape import SHAPES
from engine.settings import Sampling

CAPTURED, SINGLE = "captured", "one by one"
"""The two ways to compute the forwards of a model."""
OURS = ("plain", "hd-published", "lookup", "hd")
PROMPT_LENGTHS = (20, 100, 300, 500)
ROUNDS = 15
TRANSFORMERS_PEERS = (GENERATE, PROMPT_LOOKUP)
ANSWERS = {
    "way": "{way}",
    "T": "{temperature:g}",
    "method": "{name}",
    "tok/s": "{tokens_per_second:.1f}",
    "decoding": "{decode_tokens_per_second:.1f}",
    "over plain": "{over_plain:.2f}x",
    "least category": "{least_category:.2f}x",
    "tok/step": "{mean_acceptance_length:.2f}",
    "step ms": "{step_ms:.2f}",
    "forward ms": "{verify_ms_per_step:.2f}",
    "draft ms": "{draft_ms_per_step:.2f}",
    "text of plain": "{verdict}",
}


class Gpu(Measurement):
    """What captured forwards gain on a GPU: forwards, prompts, steps, answers, memory."""

    groups = ("model", "prompts", "sampling", "methods")
    defaults = {"limit": 8, "max_new_tokens": 96, "context_length": 4096}

    def add_options(self, add: Add) -> None:
        add("--size", choices=SHAPES, help="the embedded model in this shape")
        add("--temperatures", type=numbers(0, float), default="0,0.7", help="comma between")
        add("--lengths", type=numbers(2), default="300,2000", help="cached tokens, comma between")
        add("--peers", action=argparse.BooleanOptionalAction, default=True)

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        if not torch.cuda.is_available():
            raise SettingError("There is no GPU here that torch can use. Run this where one is.")
        backend = inflated(options) if options.size else load_model(options.model, options)
        if not isinstance(backend, TransformersBackend) or backend.captured is None:
            raise SettingError(f"{backend.info.name} has no captured forwards. {backend.info.note}")
        prompts = prepared(backend, options)
        record = conditions(backend, options) | {
            "prompts": len(prompts),
            "driver": driver(),
            "note": backend.info.note,
            "exact": backend.info.exact,
            "memory": memory(backend),
            "forwards": [],
            "reading": [],
            "answers": [],
        }
        for way in (CAPTURED, SINGLE):
            with computing(backend, way):
                record["forwards"] += [
                    {"way": way, "length": length, "ms": timed_trees(backend, length)}
                    for length in options.lengths
                ]
                reading = {"way": way, "ms": timed_prompts(backend)}
                record["reading"].append(reading | {"accepting": timed_accepting(backend)})
                for temperature in options.temperatures:
                    options.temperature = temperature
                    setup = Setup(options, backend, prompts, generation_of(options), stack)
                    record["answers"] += answers(setup, way)
        return record

    def show(self, record: Record) -> None:
        print(f"{headline(record)}, driver {record['driver']}")
        if record["note"]:
            print(record["note"])
        if record["exact"]:
            print("The logits of captured forwards have the same bits with and without drafts.")
        trees, prompts = ([*record[name][0]["ms"]] for name in ("forwards", "reading"))
        forwards = {f"{rows} rows": f"{{ms[{rows}]:.2f}}" for rows in trees}
        reading = {f"{tokens} tokens": f"{{ms[{tokens}]:.1f}}" for tokens in prompts}
        print("\n## Milliseconds of a forward\n")
        show_rows(record["forwards"], {"way": "{way}", "cached": "{length:,}"} | forwards)
        print("\n## Milliseconds to read a prompt, and to accept rows that move\n")
        show_rows(record["reading"], {"way": "{way}"} | reading | {"accept": "{accepting:.2f}"})
        print(f"\n## {record['prompts']} answers of up to {record['max_new_tokens']} tokens\n")
        show_rows(record["answers"], ANSWERS)
        print("\n## GB of memory\n")
        memory = record["memory"].items()
        table(*zip(*((name, f"{size / 1e9:.2f}") for name, size in memory), strict=True))


# the model, and the two ways


def inflated(options: argparse.Namespace) -> Backend:
    original: Any = LlamaForCausalLM.from_pretrained(EMBEDDED, dtype=torch.bfloat16)
    original.config.max_position_embeddings = options.context_length
    with TemporaryDirectory() as folder:
        output = Path(folder, f"tiny-chat as {options.size}")
        write(original, SHAPES[options.size], EMBEDDED, output, seed=0)
        return load_model(str(output), options)


@contextmanager
def computing(backend: TransformersBackend, way: str) -> Iterator[None]:
    known = backend.captured, backend.info
    if way == SINGLE:
        backend.captured, backend.info = None, replace(backend.info, nodes=None)
    backend.close()
    try:
        yield
    finally:
        backend.captured, backend.info = known
        backend.close()


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.split()[0]


# forwards and prompts


def timed_trees(backend: TransformersBackend, length: int) -> dict[int, float]:
    """The median milliseconds of forwards over trees by their rows, after a text of that length."""
    found = {}
    for rows in TREES:
        room = length + 2 * ROUNDS + rows
        text = GrowingText(backend, [7] * room, length)
        backend.prefill([7, 7], never)
        backend.stretch(text.prompt[:-1])
        times = [text.seconds(rows - 1) for _ in range(ROUNDS + 3)]
        found[rows] = 1e3 * median(times[3:])
    backend.close()
    return found


def timed_prompts(backend: TransformersBackend) -> dict[int, float]:
    """The median milliseconds to read prompts, by their tokens."""
    found = {}
    for length in PROMPT_LENGTHS:
        times = []
        for _ in range(ROUNDS // 3 + 1):
            backend.close()
            torch.cuda.synchronize()
            start = perf_counter()
            backend.prefill([7] * (length + 1), never)
            torch.cuda.synchronize()
            times.append(perf_counter() - start)
        found[length] = 1e3 * median(times[1:])
    return found


def timed_accepting(backend: TransformersBackend) -> float:
    """The median milliseconds to accept rows that have to move."""
    times = []
    for _ in range(ROUNDS):
        backend.prefill([7] * 300, never)
        tree = comb(7, 31, backend.info.vocabulary_size)
        scores = backend.score(tree, Sampling(temperature=0.0))
        scores.choose(0)
        start = perf_counter()
        backend.accept([1, 3])
        torch.cuda.synchronize()
        times.append(perf_counter() - start)
    backend.close()
    return 1e3 * median(times)


# answers


def answers(setup: Setup, way: str) -> list[Record]:
    """The figures of all methods at one temperature, by one of the two ways."""
    backend = setup.backend
    assert isinstance(backend, TransformersBackend)
    methods: dict[str, Method | Peer] = {name: method_named(name) for name in OURS}
    if way == SINGLE and setup.options.peers:
        methods |= {name: transformers_peer(name, backend) for name in TRANSFORMERS_PEERS}
    results, record = compared(setup, methods)
    plain = speed(results["plain"])
    return [
        {
            "way": way,
            "temperature": setup.options.temperature,
            "name": name,
            "over_plain": figures["tokens_per_second"] / plain,
            "least_category": min(
                speed(own[name]) / speed(own["plain"]) for own in by_category(results).values()
            ),
            "verdict": verdict(figures),
            "tokens": [own.tokens for own in results[name]],
            **figures,
        }
        for name, figures in record["methods"].items()
    ]


# memory


def memory(backend: TransformersBackend) -> Record:
    """Bytes of the model: what is told before loading, and what torch holds afterwards."""
    captured = backend.captured
    assert isinstance(captured, CapturedModel) and captured.pool.states is not None
    config, dtype = backend.model.config, backend.model.dtype
    weights = backend.info.memory_bytes
    pool = captured.pool.states.nbytes
    cache = cache_numbers(config.to_dict(), backend.info.context_length) * dtype.itemsize
    expected = weights + cache + RECORDINGS
    torch.cuda.empty_cache()
    used = torch.cuda.memory_reserved()
    return {"weights": weights, "pool": pool, "expected": expected, "used": used}
