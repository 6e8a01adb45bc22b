"""Speed of decoding methods on the same prompts, in one process, in rotated order.

Every run starts with an empty cache. A method's model tier learns from each answer once, after
its repeats, so no repeat is drafted from the one before. Times are wall times; a prompt's time is
the median of its repeats; a method's speed is all its tokens over all its time. Step figures
(drafting, acceptance) are the last repeat's, which finds look-ups cached by the ones before.
"""

import argparse
import json
import platform
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from engine.backends.load import load_transformers
from engine.backends.transformers import TransformersBackend
from engine.chat import Chat
from engine.decode import decode
from engine.errors import PromptError, SettingError
from engine.methods import METHODS, Databases, Method, method_named, untraced
from engine.metrics import Metrics, summarise
from engine.settings import Drafting, Generation, Sampling
from engine.types import TIERS, Message, Prefill, Step
from storage.statistics import StatisticsTable, find_table

ASSETS = Path(__file__).resolve().parent.parent / "assets"
EMBEDDED = ASSETS / "models" / "tiny-chat" / "target"
PROMPTS = Path(__file__).with_name("prompts.jsonl")
GENERATE = "generate"
METHOD_NAMES = ("plain", GENERATE, *(name for name in METHODS if name != "plain"))


@dataclass
class Result:
    """One method on one prompt: its tokens and one time per repeat."""

    category: str
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)
    metrics: Metrics | None = None
    look_ups: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench speed`."""
    parser.add_argument("--model", default="embedded", help="'embedded', a folder or a hub id")
    parser.add_argument("--methods", default="plain,generate,hd,hd-published")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines with 'turns'")
    parser.add_argument("--limit", type=int, default=0, help="prompts in all, 0 for every one")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=Drafting().nodes)
    parser.add_argument("--policy", default=Drafting().policy)
    parser.add_argument("--statistics", type=Path, help="a statistics file (default: the shipped)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")


def read_prompts(path: Path, limit: int) -> list[tuple[str, str]]:
    """(category, first turn) of each question; a limit takes from all categories in turn."""
    categories: dict[str, list[tuple[str, str]]] = defaultdict(list)
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            name = str(record.get("category", "all"))
            categories[name].append((name, str(record["turns"][0])))
        longest = max(len(prompts) for prompts in categories.values())
    except (OSError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise SettingError(
            f"The prompts in {str(path)!r} cannot be read ({error}). Each line must be a JSON "
            'object with "turns", a list of texts.'
        ) from error
    mixed = [p[i] for i in range(longest) for p in categories.values() if i < len(p)]
    return mixed[: limit or None]


def cut_prompt(chat: Chat, text: str, room: int) -> list[int]:
    """The prompt tokens of a question, its text cut at the end until it has `room` tokens."""
    while True:
        tokens = chat.prompt([Message("user", text)], known=())
        if len(tokens) <= room:
            return tokens
        text = text[: int(len(text) * room / len(tokens)) - 1]
        if not text.strip():
            raise PromptError(f"There is no room for a question in {room} tokens.")


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    for name in names:
        if name not in METHOD_NAMES:
            known = ", ".join(METHOD_NAMES)
            raise SettingError(f"There is no method {name!r}. Choose from: {known}.")
    if not names or options.repeats < 1 or options.limit < 0:
        raise SettingError("Give at least one method and one repeat, and no negative limit.")
    prompts = read_prompts(options.prompts, options.limit)
    sampling = Sampling(temperature=options.temperature, min_p=options.min_p, seed=options.seed)
    generation = Generation(sampling, max_tokens=options.max_new_tokens)
    drafting = Drafting(nodes=options.nodes, policy=options.policy)
    methods = {name: None if name == GENERATE else method_named(name, drafting) for name in names}
    source = str(EMBEDDED) if options.model == "embedded" else options.model
    backend = load_transformers(source, device=options.device, dtype=options.dtype)
    table = (
        StatisticsTable(options.statistics)
        if options.statistics
        else find_table(backend.info.tokenizer_fingerprint, ASSETS / "statistics")
    )
    results = measure(backend, table, methods, prompts, generation, options.repeats)
    report(backend, results, options)


def measure(
    backend: TransformersBackend,
    table: StatisticsTable | None,
    methods: dict[str, Method | None],
    prompts: Sequence[tuple[str, str]],
    generation: Generation,
    repeats: int,
) -> dict[str, list[Result]]:
    """Every method on every prompt, the order rotated from run to run."""
    chat = Chat(backend)
    room = backend.info.context_length - generation.max_tokens - 1
    databases = {name: Databases(statistics=table) for name in methods}
    results: dict[str, list[Result]] = {name: [] for name in methods}
    warm_up = cut_prompt(chat, "Say hello.", room)
    short = Generation(generation.sampling, max_tokens=8)
    for method in methods.values():
        one_run(backend, method, Databases(statistics=table), warm_up, short, Result(""))
    names = list(methods)
    for number, (category, text) in enumerate(tqdm(prompts, desc="Prompts", leave=False)):
        prompt = cut_prompt(chat, text, room)
        for name in names:
            results[name].append(Result(category))
        for repeat in range(repeats):
            turn = (number + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                fresh = databases[name].for_measuring()
                one_run(backend, methods[name], fresh, prompt, generation, results[name][-1])
        for name, method in methods.items():
            answer = results[name][-1].tokens
            if method is not None:
                for drafter in databases[name].drafters(method):
                    drafter.finish([*prompt, *answer], len(answer))
    return results


def one_run(
    backend: TransformersBackend,
    method: Method | None,
    databases: Databases,
    prompt: list[int],
    generation: Generation,
    result: Result,
) -> None:
    """One answer by one method from an empty cache, added to `result`."""
    backend.reset()
    if method is None:
        library_run(backend, prompt, generation, result)
        return
    drafters = untraced(databases.drafters(method))
    start = perf_counter()
    events = list(decode(backend, prompt, drafters, generation, method.drafting))
    result.seconds.append(perf_counter() - start)
    steps = [event for event in events if isinstance(event, Step)]
    prefill = next(event for event in events if isinstance(event, Prefill))
    result.metrics = summarise(prefill, steps)
    result.decode_seconds.append(result.metrics.decode_seconds)
    for step in steps:
        for tier, seconds in step.look_ups.items():
            result.look_ups[tier].append(seconds)
    result.tokens = [token.id for step in steps for token in step.tokens]


class Arrivals:
    """The streamer of `generate()`: notes when tokens arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with each token."""
        self.times.append(perf_counter())

    def end(self) -> None:
        """Called when the answer is over."""


def library_run(
    backend: TransformersBackend, prompt: list[int], generation: Generation, result: Result
) -> None:
    """The library's own `generate()` with the same settings (its own random numbers)."""
    sampling = generation.sampling
    warm = sampling.temperature > 0
    settings: dict[str, Any] = {"do_sample": warm, "max_new_tokens": generation.max_tokens}
    if warm:
        settings |= {"temperature": sampling.temperature, "min_p": sampling.min_p}
        settings |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
        torch.manual_seed(sampling.seed)
    inputs = torch.tensor([prompt], device=backend.model.device)
    arrivals = Arrivals()
    start = perf_counter()
    with torch.inference_mode():
        output = backend.model.generate(
            inputs, attention_mask=torch.ones_like(inputs), streamer=arrivals, **settings
        )
    result.seconds.append(perf_counter() - start)
    result.decode_seconds.append(arrivals.times[-1] - arrivals.times[0])
    result.tokens = output[0, len(prompt) :].tolist()


def speed(results: Sequence[Result], decode_only: bool = False) -> float:
    """Tokens per second over all prompts, from the median time of each."""
    times = [median(r.decode_seconds if decode_only else r.seconds) for r in results]
    return sum(len(result.tokens) for result in results) / sum(times)


def summary(name: str, results: dict[str, list[Result]], temperature: float) -> dict[str, Any]:
    """One method's figures against the faster of plain and generate()."""
    own = results[name]
    bases = [base for base in ("plain", GENERATE) if base in results] or [name]
    base = max(bases, key=lambda base: speed(results[base]))
    ratios = [
        (len(mine.tokens) / median(mine.seconds)) / (len(other.tokens) / median(other.seconds))
        for mine, other in zip(own, results[base], strict=True)
    ]
    metrics = [result.metrics for result in own if result.metrics]
    forwards = sum(m.forwards for m in metrics) or 1
    comparable = "plain" in results and (name != GENERATE or temperature == 0)
    spread = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    figures = {
        "tokens_per_second": speed(own),
        "decode_tokens_per_second": speed(own, decode_only=True),
        "speedup": speed(own) / speed(results[base]),
        "decode_speedup": speed(own, True) / max(speed(results[b], True) for b in bases),
        "speedup_quartiles": [round(value, 3) for value in spread],
        "identical": [r.tokens for r in own] == [r.tokens for r in results["plain"]]
        if comparable
        else None,
    }
    if metrics:
        decode = sum(m.decode_seconds for m in metrics)
        steps = sum(m.acceptance_ratio * m.tokens for m in metrics)
        figures |= {
            "mean_acceptance_length": sum(m.tokens for m in metrics) / forwards,
            "acceptance_ratio": steps / sum(m.tokens for m in metrics),
            "draft_ms_per_step": 1e3 * sum(m.draft_seconds for m in metrics) / forwards,
            "draft_share": sum(m.draft_seconds for m in metrics) / decode,
            "step_ms": 1e3 * decode / forwards,
            "look_up_us": {
                tier: round(1e6 * median(t for r in own for t in r.look_ups[tier]), 1)
                for tier in TIERS
                if any(result.look_ups[tier] for result in own)
            },
        }
    return figures


def categories(results: dict[str, list[Result]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Per category, each method's speedup over the faster baseline."""
    first = next(iter(results.values()))
    for category in dict.fromkeys(result.category for result in first):
        speeds = {
            name: speed([r for r in own if r.category == category]) for name, own in results.items()
        }
        bases = [speeds[name] for name in ("plain", GENERATE) if name in speeds]
        base = max(bases or list(speeds.values()))
        yield category, {name: value / base for name, value in speeds.items()}


def report(
    backend: TransformersBackend, results: dict[str, list[Result]], options: argparse.Namespace
) -> None:
    """Print the tables and the JSON line."""
    info = backend.info
    methods = {name: summary(name, results, options.temperature) for name in results}
    count = len(next(iter(results.values())))
    print(
        f"{info.name} ({info.parameters / 1e6:.1f} M parameters, {info.dtype}, {info.device}), "
        f"{count} prompts, up to {options.max_new_tokens} tokens, T={options.temperature:g}, "
        f"min-p {options.min_p:g}, "
        f"{torch.get_num_threads()} threads, {platform.machine()}"
    )
    print(
        f"\n{'method':14}{'tok/s':>8}{'speedup':>9}{'quartiles':>15}{'decode':>8}{'tok/step':>10}"
        f"{'ratio':>7}{'draft ms':>10}{'draft %':>9}  same text"
    )
    for name, f in methods.items():
        low, _, high = f["speedup_quartiles"]
        drafted = (
            f"{f['mean_acceptance_length']:10.2f}{f['acceptance_ratio']:7.0%}"
            f"{f['draft_ms_per_step']:10.3f}{f['draft_share']:9.1%}"
            if "step_ms" in f
            else f"{'':36}"
        )
        same = {True: "yes", False: "NO", None: "-"}[f["identical"]]
        print(
            f"{name:14}{f['tokens_per_second']:8.1f}{f['speedup']:8.2f}x"
            f"{low:8.2f} - {high:4.2f}{f['decode_speedup']:7.2f}x{drafted}  {same}"
        )
    for name, f in methods.items():
        if f.get("look_up_us"):
            tiers = ", ".join(f"{tier} {value:.0f}" for tier, value in f["look_up_us"].items())
            print(f"\nmedian look-up of {name}, us per step: {tiers}", end="")
    print(f"\n\n{'category':18}" + "".join(f"{name:>14}" for name in results))
    for category, speedups in categories(results):
        print(f"{category:18}" + "".join(f"{value:13.2f}x" for value in speedups.values()))
    print()
    print(
        json.dumps(
            {
                "model": info.name,
                "temperature": options.temperature,
                "min_p": options.min_p,
                "prompts": count,
                "max_new_tokens": options.max_new_tokens,
                "nodes": options.nodes,
                "threads": torch.get_num_threads(),
                "methods": methods,
            }
        )
    )
