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
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
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
CONTEXT = 1024
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
        positive = at_least(1)
        add("--model", default=str(EMBEDDED), help="a folder or a hub id")
        add("--dtype", default="float32")
        add("--draft-tokens", type=positive, default=TOKENS)
        add("--rows", type=float, help="as in `strata vllm`")
        add("--repeats", type=positive, default=1)
        add("--ranks", type=positive, default=2, help="of the last two cases; 1 leaves them out")

    def record(self, options: argparse.Namespace) -> Record:
        build = installed()
        words = [options.model, "--draft-tokens", str(options.draft_tokens)]
        command = parse([*words, *(("--rows", str(options.rows)) if options.rows else ())])
        task = {
            "model": options.model,
            "dtype": options.dtype,
            "questions": [text for _, text in texts_of(options)],
            "tokens": options.max_new_tokens,
            "draft_tokens": options.draft_tokens,
            # A case must not find what an earlier case has learned.
            "attached": attached_of(command, build).values() | {"folder": ""},
        }
        cases = [(method, batch, 1) for batch in BATCHES for method in METHODS] * options.repeats
        if options.ranks > 1:
            cases += [(method, SPLIT, options.ranks) for method in (PLAIN, OURS)]
        found: dict[Case, list[Record]] = {}
        for case in cases:
            found.setdefault(case, []).append(answered(task, case))
        return {
            "date": now(),
            "model": Path(options.model).name,
            "dtype": options.dtype,
            "build": f"{build} {version(build)}",
            "torch": version("torch"),
            "questions": len(task["questions"]),
            "tokens": sum(map(len, found[cases[0]][0]["answers"])),
            "draft_tokens": options.draft_tokens,
            "repeats": options.repeats,
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


def rows_of(found: Mapping[Case, Sequence[Record]]) -> list[Record]:
    rates = {case: median(record["rate"] for record in each) for case, each in found.items()}
    answers = found[PLAIN, 1, 1][0]["answers"]
    return [
        {
            "method": method,
            "batch": batch,
            "ranks": ranks,
            "tokens_per_second": round(rates[method, batch, ranks], 1),
            "ratio": round(rates[method, batch, ranks] / rates[PLAIN, batch, ranks], 3),
            "same": all(record["answers"] == answers for record in records),
            "figures": records[0]["figures"],
        }
        for (method, batch, ranks), records in found.items()
    ]


def drafting_of(case: Record) -> Record:
    tokens = {"num_speculative_tokens": case["draft_tokens"]}
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
        dtype=case["dtype"],
        max_model_len=CONTEXT,
        max_num_seqs=case["batch"],
        tensor_parallel_size=case["ranks"],
        enforce_eager=True,
        enable_prefix_caching=False,
        seed=0,
        **drafting_of(case),
    )
    template = llm.get_tokenizer().apply_chat_template
    room = CONTEXT - case["tokens"] - 1 - case["draft_tokens"]

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
    figures = llm.collective_rpc("strata_figures") if case["method"] == OURS else [None]
    record = {
        "answers": answers,
        "rate": sum(map(len, answers)) / seconds,
        "seconds": seconds,
        "figures": next((one for one in figures if one), None),
    }
    print(f"{MARK}{json.dumps(record)}", flush=True)


if __name__ == "__main__":
    child()
