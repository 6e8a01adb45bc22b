"""What drafting costs in vLLM's step, per row: the class that vLLM loads, without vLLM.

Questions are answered plainly by the model. Then these answers are said again, as vLLM's rows show
them to the class: many at once, each step with as many tokens as its drafts were right, and one
more. A row whose answer is over takes the next question. Memory is touched between two calls, so
that drafting finds the processor's caches as a forward leaves them. What is wanted is in WANTED_MS.
"""

import argparse
from collections.abc import Sequence
from itertools import count, islice
from statistics import mean, median
from time import perf_counter
from types import SimpleNamespace

import numpy as np
from tqdm import tqdm

from app.vllm.attached import NAME, Attached
from app.vllm.proposer import Proposer
from assets import ASSETS
from bench.drafting import EVICTED
from bench.options import (
    Record,
    add_run_arguments,
    check_run,
    conditions,
    generation_of,
    headline,
    load_model,
    print_record,
)
from bench.prompts import prepared, questions_of
from engine.decode import decode
from engine.errors import SettingError
from engine.settings import Drafting
from engine.types import TIERS, Step
from storage.statistics import SUFFIX

ROWS = (1, 4, 16, 32)
WANTED_MS, WANTED_ROWS = 0.1, 32
"""Milliseconds per row, and at how many rows."""
CALLS = 150
"""Steps that are timed for each number of rows."""
WARM = 10
"""Steps before these."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench proposer`."""
    add_run_arguments(parser)
    parser.add_argument("--draft-tokens", type=int, default=7, help="the most tokens of a draft")
    parser.set_defaults(limit=12, max_new_tokens=128)


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    check_run(options)
    if options.draft_tokens < 1:
        raise SettingError(f"Draft at least one token, not {options.draft_tokens}.")
    generation, questions = generation_of(options), questions_of(options)
    backend = load_model(options.model, options)
    answers: list[tuple[list[int], list[int]]] = []
    for _, prompt in tqdm(prepared(backend, options, questions), desc="Answers", leave=False):
        events = decode(backend, prompt, (), generation, Drafting(nodes=0))
        said = [token.id for step in events if isinstance(step, Step) for token in step.tokens]
        answers.append((prompt, said))
    file = options.statistics or ASSETS / "statistics" / (
        backend.info.tokenizer_fingerprint + SUFFIX
    )
    config = config_of(options.draft_tokens, backend.info.vocabulary_size, str(file))
    found = {rows: measured(Proposer(config), answers, rows) for rows in ROWS}
    record = conditions(backend, options) | {"bench": "proposer", "rows": found}
    show(record)
    print_record(record, options.save)


def config_of(length: int, vocabulary: int, statistics: str) -> SimpleNamespace:
    """What the class reads of vLLM's configuration."""
    return SimpleNamespace(
        additional_config={NAME: Attached(statistics=statistics, databases=TIERS).values()},
        speculative_config=SimpleNamespace(num_speculative_tokens=length),
        model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary, max_model_len=1 << 20),
        # No device: no vLLM runs here whose sampler might have to be mended.
        device_config=SimpleNamespace(device_type=""),
        parallel_config=SimpleNamespace(rank=0, data_parallel_rank=0),
    )


class Rows:
    """vLLM's arrays, as the class sees them: so many answers under way at once."""

    def __init__(self, answers: Sequence[tuple[list[int], list[int]]], rows: int) -> None:
        self.answers = answers
        self.next = count()
        longest = max(len(prompt) + len(said) for prompt, said in answers)
        self.tokens = np.zeros((rows, longest + 1), np.int32)
        self.lengths = np.zeros(rows, np.int32)
        self.left: list[list[int]] = [[] for _ in range(rows)]

    def say(self, number: int, drafts: Sequence[int]) -> list[int]:
        """The tokens that a step gives a row with these drafts."""
        if not self.left[number]:
            prompt, said = self.answers[next(self.next) % len(self.answers)]
            self.tokens[number, : len(prompt)] = prompt
            self.lengths[number], self.left[number], drafts = len(prompt), list(said), ()
        kept = 0
        while kept < min(len(drafts), len(self.left[number]) - 1):
            if drafts[kept] != self.left[number][kept]:
                break
            kept += 1
        said, self.left[number] = self.left[number][: kept + 1], self.left[number][kept + 1 :]
        at = int(self.lengths[number])
        self.tokens[number, at : at + len(said)] = said
        self.lengths[number] = at + len(said)
        return said


def measured(
    proposer: Proposer, answers: Sequence[tuple[list[int], list[int]]], rows: int
) -> Record:
    """Milliseconds per row and call, and what was drafted."""
    proposer.load_model()
    batch, touched = Rows(answers, rows), np.zeros(EVICTED, dtype=np.uint8)
    drafts: list[list[int]] = [[] for _ in range(rows)]
    seconds, emitted = [], 0
    for _ in range(WARM + CALLS):
        said = [batch.say(number, drafts[number]) for number in range(rows)]
        emitted += sum(map(len, said))
        touched += 1
        clock = perf_counter()
        drafts = proposer.propose(said, batch.lengths, batch.tokens)
        seconds.append((perf_counter() - clock) / rows)
    timed = list(islice(seconds, WARM, None))
    if proposer.problem:
        raise SettingError(f"Drafting failed: {proposer.problem}.")
    return {
        "ms": round(1e3 * median(timed), 4),
        "mean_ms": round(1e3 * mean(timed), 4),
        "tokens_per_step": round(emitted / len(seconds) / rows, 3),
        "drafted": proposer.drafted,
        "accepted": proposer.accepted,
    }


def show(record: Record) -> None:
    """Print the table."""
    print(f"{headline(record)}\n")
    print(f"{'rows':>5}{'ms a row':>10}{'mean':>8}{'tok/step':>10}  accepted of drafted")
    for rows, f in record["rows"].items():
        shares = ", ".join(
            f"{name} {f['accepted'][name]} of {drafted}" for name, drafted in f["drafted"].items()
        )
        print(f"{rows:5}{f['ms']:10.3f}{f['mean_ms']:8.3f}{f['tokens_per_step']:10.2f}  {shares}")
    met = record["rows"][WANTED_ROWS]["ms"] <= WANTED_MS
    print(f"\nwanted: {WANTED_MS:g} ms a row at {WANTED_ROWS} rows: {'yes' if met else 'NO'}")
