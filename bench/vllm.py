"""What drafting brings to vLLM's servers: vLLM alone, with its own n-gram drafts, and with ours.

Run this with the Python of vLLM's environment. Each case is a server in a process of its own, so
that none finds what another one has learned. All questions are asked at once; the batch is the
number of concurrent answers. All cases must emit the same tokens at temperature 0.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from app.vllm.attached import NAME
from app.vllm.serve import (
    PROPOSER,
    TOKENS,
    WORKER,
    attached_of,
    environment_of,
    installed,
    parse,
    root,
)
from bench.harness import EMBEDDED, Add, Measurement, at_least, texts_of
from bench.prompts import cut_text
from bench.report import Record, now, show_rows
from engine.errors import ModelError

PLAIN, NGRAM, OURS = "plain", "ngram", "strata"
METHODS = (PLAIN, NGRAM, OURS)
BATCHES, SPLIT = (1, 4, 16), 4
"""The numbers of concurrent answers, and their number in the cases on several ranks."""
LOOK_UP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""Of vLLM's n-gram method, as its documentation sets it."""
DTYPE, CONTEXT = "float32", 1024
MARK = "bench vllm: "
"""Begins the line in which a case reports its result."""
WARM = "Say hello to me, and tell me about your day in three short sentences."
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
COLUMNS = {
    "drafts": "{method}",
    "batch": "{batch}",
    "ranks": "{ranks}",
    "tokens/s": "{tokens_per_second:.1f}",
    "ratio": "{ratio:.2f}",
    "same tokens": "{same}",
}

Case = tuple[str, int, int]
"""Method, batch and ranks."""


class Servers(Measurement):
    """vLLM alone, with its own n-gram drafts, and with ours: tokens per second, same tokens."""

    groups = ("prompts",)
    defaults = {"max_new_tokens": 96}

    def add_options(self, add: Add) -> None:
        add("--model", default=str(EMBEDDED), help="a folder or a hub id")
        ranks = "of the last two cases; 1 leaves them out"
        add("--ranks", type=at_least(1), default=2, help=ranks)

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        build = installed()
        task = {
            "model": options.model,
            "questions": [text for _, text in texts_of(options)],
            "tokens": options.max_new_tokens,
            # A case must not find what an earlier case has learned.
            "attached": attached_of(parse([options.model]), build).values() | {"folder": ""},
        }
        cases = [(method, batch, 1) for batch in BATCHES for method in METHODS]
        if options.ranks > 1:
            cases += [(method, SPLIT, options.ranks) for method in (PLAIN, OURS)]
        found = {case: answered(task, case) for case in cases}
        return {
            "date": now(),
            "model": Path(options.model).name,
            "dtype": DTYPE,
            "build": f"{build} {version(build)}",
            "torch": version("torch"),
            "questions": len(task["questions"]),
            "tokens": sum(map(len, found[cases[0]]["answers"])),
            "draft_tokens": TOKENS,
            "cases": rows_of(found),
        }

    def show(self, record: Record) -> None:
        print(
            f"{record['model']}, {record['dtype']}, {record['build']}, {record['questions']} "
            f"questions, {record['tokens']} tokens, drafts of up to {record['draft_tokens']}\n"
        )
        show_rows(record["cases"], COLUMNS)


def answered(task: Record, case: Case) -> Record:
    method, batch, ranks = case
    command = parse([task["model"], "--tensor-parallel", str(ranks)])
    environment = environment_of(command, installed(), os.environ)
    done = subprocess.run(
        [sys.executable, "-m", "bench.vllm"],
        input=json.dumps(task | {"method": method, "batch": batch, "ranks": ranks}),
        cwd=root(),
        env={**QUIET, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise ModelError(f"vLLM could not run {method} at batch {batch}: see above.")
    record: Record = json.loads(lines[-1].removeprefix(MARK))
    print(f"{method} {batch} x{ranks}: {record['rate']:.1f} tokens/s", file=sys.stderr, flush=True)
    return record


def rows_of(found: Mapping[Case, Record]) -> list[Record]:
    return [
        {
            "method": method,
            "batch": batch,
            "ranks": ranks,
            "tokens_per_second": round(record["rate"], 1),
            "ratio": round(record["rate"] / found[PLAIN, batch, ranks]["rate"], 3),
            "same": record["answers"] == found[PLAIN, 1, 1]["answers"],
        }
        for (method, batch, ranks), record in found.items()
    ]


def drafting_of(case: Record) -> Record:
    tokens = {"num_speculative_tokens": TOKENS}
    if case["method"] == PLAIN:
        return {}
    if case["method"] == NGRAM:
        return {"speculative_config": {"method": "ngram", **tokens, **LOOK_UP}}
    return {
        "speculative_config": {"method": "custom_class", "model": PROPOSER, **tokens},
        "additional_config": {NAME: case["attached"]},
        "worker_extension_cls": WORKER,
    }


def child() -> None:
    """Run one case: answer the questions, and report the result in one line."""
    from vllm import LLM, SamplingParams

    case = json.load(sys.stdin)
    llm: Any = LLM(
        case["model"],
        dtype=DTYPE,
        max_model_len=CONTEXT,
        max_num_seqs=case["batch"],
        tensor_parallel_size=case["ranks"],
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
        **drafting_of(case),
    )
    template = llm.get_tokenizer().apply_chat_template
    room = CONTEXT - case["tokens"] - 1 - TOKENS

    def prompt(text: str) -> Record:
        def tokens(text: str) -> list[int]:
            message = [{"role": "user", "content": text}]
            return list(template(message, add_generation_prompt=True, return_dict=False))

        return {"prompt_token_ids": cut_text(tokens, text, room)}

    prompts = [prompt(text) for text in case["questions"]]
    greedy = SamplingParams(temperature=0.0, max_tokens=case["tokens"])
    llm.generate([prompt(WARM)] * case["batch"], greedy, use_tqdm=False)
    clock = perf_counter()
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    seconds = perf_counter() - clock
    answers = [list(one.outputs[0].token_ids) for one in outputs]
    record = {"answers": answers, "rate": sum(map(len, answers)) / seconds}
    print(f"{MARK}{json.dumps(record)}", flush=True)


if __name__ == "__main__":
    child()
