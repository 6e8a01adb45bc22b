"""vLLM alone, with its own n-gram drafts, and with this project's: tokens per second, same tokens.

Run with the Python of vLLM's environment. Each case is a server of its own, in a process of its
own, so that none finds what another one has learned. All questions are asked at once; the batch is
how many answers are under way together. Last, the model is split over two ranks, where that is
wanted. Every case must say the same tokens at temperature 0. What is wanted is in WANTED.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
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
from bench.options import EMBEDDED, PROMPTS, Record, add_save_argument, check_save, print_record
from bench.prompts import read_prompts
from engine.errors import ModelError, SettingError

PLAIN, NGRAM, OURS = "plain", "ngram", "strata"
METHODS = (PLAIN, NGRAM, OURS)
BATCHES = (1, 4, 16)
LOOK_UP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""Of vLLM's n-gram method, as its documentation sets it."""
WANTED = 1.5
"""Times plain at batch 1; everywhere at least LEAST, and what vLLM's own method has."""
LEAST = 0.97
SPLIT = 4
"""The batch of the cases on several ranks."""
SAYS = {True: "the same", False: "OTHERS"}
CONTEXT = 1024
MARK = "bench vllm: "
"""Begins the line in which a case says what it found."""
WARM = "Say hello to me, and tell me about your day in three short sentences."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench vllm`."""
    add = parser.add_argument
    add("--model", default=str(EMBEDDED), help="a folder or a hub id")
    add("--dtype", default="float32")
    add("--prompts", default=str(PROMPTS), help="JSON lines with 'turns'")
    add("--limit", type=int, default=0, help="questions in all, 0 for every one")
    add("--max-new-tokens", type=int, default=96)
    add("--draft-tokens", type=int, default=TOKENS)
    add("--rows", type=float, help="as in `strata vllm`")
    add("--repeats", type=int, default=1)
    add("--ranks", type=int, default=2, help="of the last two cases; 1 leaves them out")
    add_save_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Measure, print, save."""
    check_save(options.save)
    if min(options.repeats, options.draft_tokens, options.ranks) < 1:
        raise SettingError("Give at least one repeat, one draft token and one rank.")
    build = installed()
    questions = [text for _, text in read_prompts(Path(options.prompts), options.limit)]
    words = [options.model, "--draft-tokens", str(options.draft_tokens)]
    asked = parse([*words, *(("--rows", str(options.rows)) if options.rows else ())])
    said = {
        "model": options.model,
        "dtype": options.dtype,
        "questions": questions,
        "tokens": options.max_new_tokens,
        "draft_tokens": options.draft_tokens,
        # What is learned in one case must not be there in the next one.
        "attached": attached_of(asked, build).values() | {"folder": ""},
    }
    found: dict[str, list[Record]] = {}
    for _ in range(options.repeats):
        for batch in BATCHES:
            for method in METHODS:
                case = case_of(said, method, batch, 1)
                found.setdefault(f"{method} {batch}", []).append(case)
    split = {}
    if options.ranks > 1:
        for method in (PLAIN, OURS):
            split[method] = case_of(said, method, SPLIT, options.ranks)
    record = record_of(options, build, found, split)
    show(record)
    print_record(record, options.save)


def case_of(said: Record, method: str, batch: int, ranks: int) -> Record:
    """What one case found, in a process of its own."""
    asked = parse([said["model"], "--tensor-parallel", str(ranks)])
    environment = environment_of(asked, installed(), os.environ)
    case = said | {"method": method, "batch": batch, "ranks": ranks}
    done = subprocess.run(
        [sys.executable, "-m", "bench.vllm"],
        input=json.dumps(case),
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


QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}


def drafting_of(case: Record) -> Record:
    """The part of vLLM's configuration that says who drafts."""
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
    """One case: the questions are answered, and a line says what came of it."""
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
    prompts = [cut(template, text, room) for text in case["questions"]]
    greedy = SamplingParams(temperature=0.0, max_tokens=case["tokens"])
    llm.generate([cut(template, WARM, room)] * case["batch"], greedy, use_tqdm=False)
    clock = perf_counter()
    said = llm.generate(prompts, greedy, use_tqdm=False)
    seconds = perf_counter() - clock
    answers = [list(one.outputs[0].token_ids) for one in said]
    figures = llm.collective_rpc("strata_figures") if case["method"] == OURS else [None]
    record = {
        "answers": answers,
        "rate": sum(map(len, answers)) / seconds,
        "seconds": seconds,
        "figures": next((one for one in figures if one), None),
    }
    print(f"{MARK}{json.dumps(record)}", flush=True)


def cut(template: Any, text: str, room: int) -> Record:
    """The prompt of a question, its text cut at the end until it has `room` tokens."""
    while True:
        message = [{"role": "user", "content": text}]
        tokens = template(message, add_generation_prompt=True, return_dict=False)
        if len(tokens) <= room:
            return {"prompt_token_ids": list(tokens)}
        text = text[: int(len(text) * room / len(tokens)) - 1]


def record_of(
    options: argparse.Namespace,
    build: str,
    found: dict[str, list[Record]],
    split: dict[str, Record],
) -> Record:
    """The report: medians, ratios to plain, and where the tokens differ."""
    plain = found[f"{PLAIN} 1"][0]["answers"]
    cases = {}
    for name, records in found.items():
        batch = name.split()[1]
        rate = median(record["rate"] for record in records)
        cases[name] = {
            "tokens_per_second": round(rate, 1),
            "ratio": round(rate / median(r["rate"] for r in found[f"{PLAIN} {batch}"]), 3),
            "same": all(record["answers"] == plain for record in records),
            "figures": records[0]["figures"],
        }
    ranks = {
        method: {"tokens_per_second": round(record["rate"], 1), "same": record["answers"] == plain}
        for method, record in split.items()
    }
    return {
        "bench": "vllm",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "build": f"{build} {version(build)}",
        "torch": version("torch"),
        "questions": len(plain),
        "tokens": sum(map(len, plain)),
        "draft_tokens": options.draft_tokens,
        "repeats": options.repeats,
        "cases": cases,
        "ranks": options.ranks,
        "split": ranks,
    }


def show(record: Record) -> None:
    """Print the table, and what was wanted."""
    print(
        f"{record['model']}, {record['dtype']}, {record['build']}, {record['questions']} "
        f"questions, {record['tokens']} tokens, drafts of up to {record['draft_tokens']}\n"
    )
    print(f"{'':8}{'batch':>6}{'tokens/s':>10}{'ratio':>7}  tokens")
    cases = record["cases"]
    for name, case in cases.items():
        method, batch = name.split()
        rate = f"{case['tokens_per_second']:10.1f}{case['ratio']:7.2f}"
        print(f"{method:8}{batch:>6}{rate}  {SAYS[case['same']]}")
    for method, case in record["split"].items():
        says = f"{SAYS[case['same']]}, on {record['ranks']} ranks"
        print(f"{method:8}{SPLIT:>6}{case['tokens_per_second']:10.1f}{'':7}  {says}")
    ours = {batch: cases[f"{OURS} {batch}"]["ratio"] for batch in BATCHES}
    theirs = {batch: cases[f"{NGRAM} {batch}"]["ratio"] for batch in BATCHES}
    same = all(case["same"] for case in [*cases.values(), *record["split"].values()])
    print()
    told("the same tokens everywhere", same)
    told(f"{WANTED} times plain at batch 1", ours[1] >= WANTED)
    told("its own n-gram method, at every batch", all(ours[b] >= theirs[b] for b in BATCHES))
    told(f"at least {LEAST} times plain at every batch", min(ours.values()) >= LEAST)


def told(wanted: str, met: bool) -> None:
    """Say whether something wanted was met."""
    print(f"wanted: {wanted}: {'yes' if met else 'NO'}")


if __name__ == "__main__":
    child()
