"""What all commands share: their options, the model and its prompts, and the report.

The docstring of a `Command` is its help. A `Measurement` is a command that returns a record and
prints it as tables. Its report ends with one line of JSON, so `tail -n 1` gets all the figures of
the tables. A `Benchmark` is a measurement that asks a model some prompts: the harness checks the
options, loads the model, and passes a `Setup`.
"""

import argparse
import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NoReturn

from tqdm import tqdm

from assets import ASSETS
from engine.backends.base import Backend
from engine.drafting.databases import Databases, read_ahead
from engine.errors import PromptError, SettingError, StrataError
from engine.hsd.family import Family
from engine.hsd.measure import TOKENS, Profiler
from engine.hsd.profile import Profile
from engine.machine import processor
from engine.methods import METHODS, Method, lowest
from engine.models.formats import format_of
from engine.models.loaders import load, name_of
from engine.prompt import Chat
from engine.questions import in_turn, read
from engine.settings import CACHE_TYPES, FLASH_ATTENTION, Generation, Runtime, Sampling
from engine.types import STATISTICS, Message
from storage.statistics import StatisticsTable, find_table

Record = dict[str, Any]
"""A report or a part of one, as JSON values by their names."""
Add = Callable[..., Any]
"""`add_argument` of a parser."""
EMBEDDED = ASSETS / "models" / "tiny-chat" / "target"
SHORT = {"embedded": EMBEDDED, "embedded-gguf": EMBEDDED.with_suffix(".gguf")}
"""The models that are part of the project, by their short names."""
TRANSFORMERS, LLAMA_CPP = "transformers", "llama.cpp"
LIBRARIES = {TRANSFORMERS: ("torch", "transformers"), LLAMA_CPP: ("llama-cpp-python",)}
"""The packages that compute the forwards of each kind of model."""
HELP = {
    "device": "of transformers models: auto, cpu, cuda, mps",
    "dtype": "of transformers models: auto, float32, bfloat16, float16",
    "flash_attention": f"of GGUF models: {', '.join(FLASH_ATTENTION)}",
    "cache_type": f"of GGUF models: {', '.join(CACHE_TYPES)}",
}
"""Help for the settings of a Runtime that declare no help themselves."""
REPORTED = (
    *("skip", "limit", "max_new_tokens", "temperature", "min_p", "seed", "repeats"),
    *("nodes", "budget"),
)
"""The options that a report repeats, if its command has them."""
REPORTED_OF = {LLAMA_CPP: ("gpu_layers", "batch_size", "flash_attention", "cache_type")}
"""More such options, for one kind of model."""
OTHER_SEED = 1
"""Added to the seed, so draft models are not profiled on the answers that are measured."""


# options


def model_options(add: Add) -> None:
    add("--model", default="embedded", help=f"{', '.join(SHORT)}, a folder, *.gguf or a hub id")
    for item in fields(Runtime):
        text = HELP.get(item.name) or item.metadata["help"]
        default: Any = item.default
        add(f"--{item.name.replace('_', '-')}", type=type(default), default=default, help=text)


def prompt_options(add: Add) -> None:
    add("--prompts", default=str(PROMPTS), help="JSON lines with 'turns', or 'random' tokens")
    add("--skip", type=at_least(0), default=0, help="leave out the first N of every category")
    add("--limit", type=at_least(0), default=0, help="prompts in all, 0 for every one (random: 8)")
    add("--max-new-tokens", type=int, default=128)


def sampling_options(add: Add) -> None:
    add("--temperature", type=float, default=0.0)
    add("--min-p", type=float, default=0.0)
    add("--seed", type=int, default=0)


def method_options(add: Add) -> None:
    add("--repeats", type=at_least(1), default=1)
    add("--statistics", type=Path, help="a statistics file (default: the shipped)")


def draft_options(add: Add) -> None:
    add("--drafts", help="folders, *.gguf or hub ids, comma between (embedded models bring two)")
    add("--profile-tokens", type=int, default=TOKENS, help="tokens per prompt of the profile")


def at_least(least: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """A reader of a number from `least` on; it raises SettingError for any other text."""

    def read(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not number >= least:
            raise SettingError(f"{text!r} is no number from {least:g} on. Give one.")
        return number

    return read


def numbers(least: float, kind: Callable[[str], Any] = int) -> Callable[[str], list[Any]]:
    """A reader of numbers from `least` on, separated by commas."""
    read = at_least(least, kind)
    return lambda text: [read(number) for number in text.split(",")]


def check_writable(file: Path | None) -> None:
    """Raise SettingError, before an hour of measuring, if the results cannot be saved."""
    if file is None:
        return
    try:
        file.touch()
    except OSError as error:
        raise SettingError(
            f"The file {str(file)!r} cannot be written ({error.strerror}). Choose another place."
        ) from error


# the model and its prompts


def source_of(name: str) -> str:
    """The source for a name, which may be a short name of one of the project's models."""
    return str(SHORT.get(name, name))


def kind_of(name: str) -> str:
    """The kind of the model, one of LIBRARIES, known before it is loaded."""
    return format_of(source_of(name)).kind


def runtime_of(options: argparse.Namespace) -> Runtime:
    """Where and how models run. Raises SettingError for settings out of range."""
    return Runtime(**{item.name: getattr(options, item.name) for item in fields(Runtime)})


def load_model(name: str, options: argparse.Namespace) -> Backend:
    """The model called `name` (a short name or a source), as the options say it runs."""
    backend = load(source_of(name), runtime_of(options))
    # A garbage collection over all imported modules takes longer than a decoding step.
    gc.collect()
    gc.freeze()
    return backend


def generation_of(options: argparse.Namespace) -> Generation:
    """How each answer is sampled. Raises SettingError for settings out of range."""
    sampling = Sampling(temperature=options.temperature, min_p=options.min_p, seed=options.seed)
    return Generation(sampling, max_tokens=options.max_new_tokens)


def texts_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(category, text) of each question. Raises SettingError if the prompts are random tokens."""
    if options.prompts == RANDOM:
        raise SettingError(
            f"The prompts cannot be {RANDOM!r} tokens, because this command sends text. Name a "
            "file with --prompts."
        )
    return read_prompts(Path(options.prompts), options.limit, options.skip)


def questions_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The same, but empty if the prompts are random tokens."""
    return [] if options.prompts == RANDOM else texts_of(options)


def prepared(
    backend: Backend, options: argparse.Namespace, questions: Sequence[tuple[str, str]]
) -> list[tuple[str, list[int]]]:
    """(category, tokens) of each prompt, cut so that an answer fits after it."""
    room = backend.info.context_length - options.max_new_tokens - 1
    chat = Chat(backend)
    if options.prompts != RANDOM:
        return [(category, cut_prompt(chat, text, room)) for category, text in questions]
    if room < 1:
        raise PromptError(f"There is no room for a prompt in {room} tokens.")
    drawn = random_prompts(backend, options.limit, options.skip)
    return [(RANDOM, tokens[:room]) for tokens in drawn]


def has_drafts(method: object) -> bool:
    return isinstance(method, Method) and method.stack is not None


def open_databases(
    backend: Backend, methods: Mapping[str, object], file: Path | None, stack: ExitStack
) -> dict[str, Databases]:
    """Empty databases for each method, with statistics if it uses them; `stack` closes those."""
    databases = {name: Databases() for name in methods}
    for name, method in methods.items():
        if isinstance(method, Method) and (
            STATISTICS in method.drafting.tiers or has_drafts(method)
        ):
            known = backend.info.tokenizer_fingerprint
            table = StatisticsTable(file) if file else find_table(known, ASSETS / "statistics")
            if table is not None:
                stack.callback(table.close)
                read_ahead(table)
            databases[name] = Databases(statistics=table)
    return databases


def load_drafts(options: argparse.Namespace) -> dict[str, Backend]:
    """The draft models by name. Raises SettingError if none is named."""
    sources = [part.strip() for part in (options.drafts or "").split(",") if part.strip()]
    if not sources and options.model in SHORT:
        sources = [str(SHORT[options.model].with_stem(name)) for name in ("small", "mid")]
    names = [name_of(source) for source in sources]
    if not sources or len(set(names)) < len(names):
        raise SettingError(
            f"The draft models cannot be {options.drafts!r}. Name folders, *.gguf files or hub ids "
            "with --drafts, whose last parts differ."
        )
    runtime = runtime_of(options)
    named = zip(names, map(source_of, sources), strict=True)
    return {name: load(source, runtime) for name, source in named}


def profile_of(profiler: Profiler) -> Profile:
    """Run a profiler with a progress bar."""
    with tqdm(total=1.0, desc="Profiling", leave=False) as bar:
        for share in profiler.run():
            bar.update(share - bar.n)
    assert profiler.profile is not None
    return profiler.profile


@dataclass(frozen=True)
class Setup:
    """A loaded model with its prompts, (category, tokens) each, and the options of the run.

    `stack` closes what is opened for the run.
    """

    options: argparse.Namespace
    backend: Backend
    prompts: list[tuple[str, list[int]]]
    generation: Generation
    stack: ExitStack

    @classmethod
    def of(cls, options: argparse.Namespace, stack: ExitStack) -> "Setup":
        """Load the model that the options name, once they are known to be right."""
        generation, questions = generation_of(options), questions_of(options)
        backend = load_model(options.model, options)
        prompts = prepared(backend, options, questions)
        return cls(options, backend, prompts, generation, stack)

    @property
    def tokens(self) -> list[list[int]]:
        return [tokens for _, tokens in self.prompts]

    def databases(self, methods: Mapping[str, object]) -> dict[str, Databases]:
        return open_databases(self.backend, methods, self.options.statistics, self.stack)

    def family(self) -> Family:
        """The draft models with their profile, which is measured on the project's own prompts."""
        target, tokens = self.backend, self.options.profile_tokens
        family = Family(target, load_drafts(self.options))
        databases = self.databases({"hd": METHODS["hd"]})["hd"]
        room = target.info.context_length - tokens - 1
        chat, sampling = Chat(target), self.generation.sampling
        profiler = Profiler(
            target,
            family.drafts,
            [cut_prompt(chat, text, room) for _, text in read_prompts(PROMPTS, 0)],
            replace(sampling, seed=sampling.seed + OTHER_SEED),
            lowest(databases, target.info),
            tokens,
        )
        return Family(target, family.drafts, profile_of(profiler))


# the report


def conditions(backend: Backend, options: argparse.Namespace) -> Record:
    """What was measured, where and when. Files are given by name, without their paths.

    `dtype` is how the weights are stored, "float32" or "Q4_K_M".
    """
    info = backend.info
    reported = (*REPORTED, *REPORTED_OF.get(info.kind, ()))
    return {
        "date": now(),
        "model": info.name,
        "kind": info.kind,
        "parameters": info.parameters,
        "dtype": info.dtype,
        "device": info.device,
        "machine": machine_of(info.device),
        "threads": info.threads,
        "context_length": info.context_length,
        **{name: version(name) for name in LIBRARIES.get(info.kind, ())},
        "prompt_file": Path(getattr(options, "prompts", "")).name,
        **{name: getattr(options, name) for name in reported if hasattr(options, name)},
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine_of(device: str) -> str:
    """The name of the GPU, or of the processor, that a device stands for."""
    if device != "cpu":
        import torch  # late, as it takes seconds

        if torch.cuda.is_available():
            return str(torch.cuda.get_device_name())
    return processor()


def headline(record: Mapping[str, Any]) -> str:
    libraries = [f"{name} {record[name]}" for name in LIBRARIES.get(record["kind"], ())]
    threads = f"{record['threads']} threads, " if record["threads"] else ""
    return (
        f"{record['model']} ({record['parameters'] / 1e6:.1f} M parameters, {record['dtype']}, "
        f"{record['device']}), {threads}{', '.join([record['machine'], *libraries])}, "
        f"{record['date'][:10]}"
    )


def prompts_line(record: Mapping[str, Any]) -> str:
    return (
        f"{record['prompts']} prompts, up to {record['max_new_tokens']} tokens, "
        f"T={record['temperature']:g}, min-p {record['min_p']:g}"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown. Columns of numbers are aligned right."""
    columns = [list(column) for column in zip(heads, *rows, strict=True)]
    for column in columns:
        right = all(cell[:1] in "+-0123456789" for cell in column[1:])
        width = max(3, *map(len, column))
        column[:] = [cell.rjust(width) if right else cell.ljust(width) for cell in column]
        column.insert(1, "-" * (width - 1) + (":" if right else "-"))
    for line in zip(*columns, strict=True):
        print(f"| {' | '.join(line)} |")


def show_rows(rows: Iterable[Record], columns: Mapping[str, str]) -> None:
    """Print records as a table. `columns` maps each heading to the format of its cells.

    A figure that a record does not have is shown as a dash, and one that none has is left out.
    """
    given = list(rows)
    cells = {head: [cell(form, row) for row in given] for head, form in columns.items()}
    shown = {head: column for head, column in cells.items() if {*column} != {"-"}}
    table([*shown], zip(*shown.values(), strict=True))


def cell(form: str, row: Mapping[str, Any]) -> str:
    try:
        return form.format_map(row)
    except (KeyError, TypeError):  # absent, or None
        return "-"


def times(ratio: float | None) -> str:
    """A speedup as text, a dash for None."""
    return "-" if ratio is None else f"{ratio:.2f}x"


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure of a report, and its target: at least (or at most) `limit`, if there is one."""

    figure: str
    words: str
    limit: float | None = None
    least: bool = False
    shown: str = "{:.2f}"

    def met(self, value: float) -> bool:
        if self.limit is None:
            return True
        return value >= self.limit if self.least else value <= self.limit

    def target(self) -> str:
        if self.limit is None:
            return ""
        return f"at {'least' if self.least else 'most'} {self.shown.format(self.limit)}"


def show_bars(bars: Iterable[Bar], figures: Mapping[str, float]) -> None:
    """Print each figure next to its target."""
    rows = []
    for bar in bars:
        value, met = figures[bar.figure], ""
        if bar.limit is not None:
            met = "met" if bar.met(value) else "MISSED"
        rows.append((bar.words, bar.shown.format(value), bar.target(), met))
    table(("figure", "measured", "wanted", ""), rows)


# commands


class Command:
    """A command with its options. The docstring is its help."""

    groups: ClassVar[Sequence[Callable[[Add], None]]] = ()
    """Declare options that several commands share."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for group in self.groups:
            group(parser.add_argument)
        self.add_options(parser.add_argument)

    def add_options(self, add: Add) -> None:
        """Declare the options of this command alone."""

    def run(self, options: argparse.Namespace) -> None:
        raise NotImplementedError


class Measurement(Command):
    """A command that measures, and prints its record as tables and as one line of JSON."""

    defaults: ClassVar[Record] = {}
    """Defaults of shared options that differ for this command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        help_ = "write the JSON line to a file as well"
        parser.add_argument("--save", type=Path, metavar="FILE", help=help_)
        parser.set_defaults(**self.defaults)

    def check(self, options: argparse.Namespace) -> None:
        """Raise SettingError for options that cannot work, before anything is loaded."""

    def record(self, options: argparse.Namespace) -> Record:
        raise NotImplementedError

    def show(self, record: Record) -> None:
        raise NotImplementedError

    def run(self, options: argparse.Namespace) -> None:
        self.check(options)
        check_writable(options.save)
        record = self.record(options)
        self.show(record)
        line = json.dumps({"bench": options.command} | record)
        print(f"\n{line}")
        if options.save:
            options.save.write_text(f"{line}\n", encoding="utf-8")


class Benchmark(Measurement):
    """A measurement that asks a model some prompts."""

    groups: ClassVar[Sequence[Callable[[Add], None]]] = (
        *(model_options, prompt_options, sampling_options, method_options),
    )

    def measure(self, setup: Setup) -> Record:
        raise NotImplementedError

    def record(self, options: argparse.Namespace) -> Record:
        """The record of `measure`, and the conditions under which it was made."""
        with ExitStack() as stack:
            setup = Setup.of(options, stack)
            found = self.measure(setup)
        return conditions(setup.backend, options) | {"prompts": len(setup.prompts)} | found


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are errors like all others, which end with status 2."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(f"{message}. See `{self.prog} --help`.")


def run_command(
    package: str,
    about: str | None,
    commands: Mapping[str, str],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run the command that the arguments name (default: the process's own).

    `commands` holds the "module.Class" of each command within the package. Only the module of the
    chosen command is imported, to load no unnecessary libraries; help imports all modules.

    Returns the exit status: 2 for a StrataError, 130 when interrupted.
    """
    given = sys.argv[1:] if arguments is None else arguments
    parser = Parser(prog=f"python -m {package}", description=about)
    known = parser.add_subparsers(dest="command", required=True)
    for name in given[:1] if given and given[0] in commands else commands:
        module, _, kind = commands[name].partition(".")
        command: Command = getattr(import_module(f"{package}.{module}"), kind)()
        chosen = known.add_parser(name, help=(command.__doc__ or "").split("\n", 1)[0])
        command.add_arguments(chosen)
        chosen.set_defaults(run=command.run)
    try:
        options = parser.parse_args(given)
        options.run(options)
    except StrataError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Cancelled.", file=sys.stderr)
        return 130
    return 0


# prompts


PROMPTS = Path(__file__).with_name("prompts.jsonl")
RANDOM = "random"
"""Given instead of a file of prompts: tokens drawn at random."""
RANDOM_PROMPTS, RANDOM_TOKENS, RANDOM_SEED = 8, 200, 0


def read_prompts(path: Path, limit: int, skip: int = 0) -> list[tuple[str, str]]:
    """(category, first turn) of each question; a limit takes from all categories in turn.

    The first `skip` questions of every category are left out, to measure on held-out ones.
    """
    found = read(path)
    longest = max(Counter(question.category for question in found).values())
    if skip >= longest:
        raise SettingError(
            f"Skipping {skip} leaves none: no category has more than {longest} prompts."
        )
    chosen = in_turn(found, lambda question: question.category, limit, skip)
    return [(question.category, question.text) for question in chosen]


def random_prompts(backend: Backend, limit: int, skip: int = 0) -> list[list[int]]:
    """Prompts of uniformly drawn tokens, always the same: texts without any regularity.

    Neither special tokens nor others that were added to the vocabulary are drawn.
    """
    size = min(len(backend.vocabulary()), backend.info.vocabulary_size)
    usable = sorted(set(range(size)) - backend.info.eos_ids - added_tokens(backend))
    draw = Random(RANDOM_SEED)
    count = skip + (limit or RANDOM_PROMPTS)
    return [draw.choices(usable, k=RANDOM_TOKENS) for _ in range(count)][skip:]


def added_tokens(backend: Any) -> set[int]:
    """The tokens that the vocabulary marks as not being pieces of text."""
    if backend.info.kind == "transformers":
        return {*backend.tokenizer.all_special_ids, *backend.tokenizer.added_tokens_decoder}
    if backend.info.kind == "llama.cpp":
        # Imported here, because llama_cpp may be missing if other models are used.
        from llama_cpp import LLAMA_TOKEN_ATTR_BYTE, LLAMA_TOKEN_ATTR_NORMAL

        text = LLAMA_TOKEN_ATTR_BYTE | LLAMA_TOKEN_ATTR_NORMAL
        size = backend.info.vocabulary_size
        return {token for token in range(size) if not backend.tokens.attributes(token) & text}
    return set()


def cut_prompt(chat: Chat, text: str, room: int) -> list[int]:
    return cut_text(lambda text: chat.prompt([Message("user", text)], known=()), text, room)


def cut_text(tokens_of: Callable[[str], list[int]], text: str, room: int) -> list[int]:
    """The tokens of a text, cut at the end until there are `room`. Raises PromptError."""
    while True:
        tokens = tokens_of(text)
        if len(tokens) <= room:
            return tokens
        text = text[: int(len(text) * room / len(tokens)) - 1]
        if not text.strip():
            raise PromptError(f"There is no room for a question in {room} tokens.")
