"""What all commands share: their options, the model and its prompts, and the report.

A `Measurement` is a command that returns a record and prints it as tables. Its report ends with one
line of JSON, so `tail -n 1` gets all the figures of the tables. A `Benchmark` is a measurement that
asks a model some prompts: the harness loads the model, and passes a `Setup`.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

from tqdm import tqdm

from assets import ASSETS
from bench.prompts import PROMPTS, RANDOM, cut_prompt, random_prompts, read_prompts
from bench.report import Record, conditions
from engine.backends.base import Backend
from engine.constraint import grammar_of
from engine.drafting.databases import Databases, read_ahead
from engine.errors import PromptError, SettingError, StrataError
from engine.hsd.family import Family
from engine.hsd.measure import TOKENS, Profiler
from engine.hsd.profile import Profile
from engine.methods import METHODS, Method, lowest
from engine.models.formats import format_of
from engine.models.loaders import load, name_of
from engine.prompt import Chat
from engine.settings import (
    CACHE_TYPES,
    FLASH_ATTENTION,
    AnswerFormat,
    Generation,
    Runtime,
    Sampling,
)
from engine.types import STATISTICS
from storage.statistics import StatisticsTable, find_table

Add = Callable[..., Any]
"""`add_argument` of a parser."""
EMBEDDED = ASSETS / "models" / "tiny-chat" / "target"
SHORT = {"embedded": EMBEDDED, "embedded-gguf": EMBEDDED.with_suffix(".gguf")}
"""The models that are part of the project, by their short names."""
HELP = {
    "device": "of transformers models: auto, cpu, cuda, mps",
    "dtype": "of transformers models: auto, float32, bfloat16, float16",
    "flash_attention": f"of GGUF models: {', '.join(FLASH_ATTENTION)}",
    "cache_type": f"of GGUF models: {', '.join(CACHE_TYPES)}",
}
"""Help for the settings of a Runtime that declare no help themselves."""
DEFAULTS = {"bits": "off"}
"""Settings that differ here from those of the app: a GGUF file is run by llama.cpp."""


# options


def shared_options(add: Add, groups: Collection[str]) -> None:
    """Declare the options of these groups, which several commands have."""
    if "model" in groups:
        add("--model", default="embedded", help=f"{', '.join(SHORT)}, a folder, *.gguf or a hub id")
        for item in fields(Runtime):
            name, default = f"--{item.name.replace('_', '-')}", cast(Any, item.default)
            text = HELP.get(item.name) or item.metadata["help"]
            default = DEFAULTS.get(item.name, default)
            add(name, type=type(default), default=default, help=text)
    if "prompts" in groups:
        add("--prompts", default=str(PROMPTS), help="JSON lines with 'turns', or 'random' tokens")
        add("--skip", type=at_least(0), default=0, help="leave out the first N of every category")
        text = "prompts in all, 0 for every one (random: 8)"
        add("--limit", type=at_least(0), default=0, help=text)
        add("--max-new-tokens", type=int, default=128)
    if "temperature" in groups:
        add("--temperature", type=float, default=0.0)
    if "sampling" in groups:
        add("--min-p", type=float, default=0.0)
        add("--seed", type=int, default=0)
        add("--schema", help="a file with the JSON schema of all answers")
    if "methods" in groups:
        add("--repeats", type=at_least(1), default=1)
    if "drafts" in groups:
        add("--drafts", help="folders, *.gguf or hub ids, comma between (embedded: brings two)")
        add("--profile-tokens", type=int, default=TOKENS, help="tokens per prompt of the profile")
    if "replay" in groups:
        add("--nodes", type=at_least(0), nargs="*", default=[8, 16, 32, 63])
        add("--peers", action=argparse.BooleanOptionalAction, default=True)


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
    read = at_least(least, kind)
    return lambda text: [read(number) for number in text.split(",")]


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
    form = None
    if options.schema is not None:
        form = AnswerFormat("json_schema", Path(options.schema).read_text(encoding="utf-8"))
        grammar_of(form)
    return Generation(sampling, options.max_new_tokens, format=form)


def texts_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    return read_prompts(Path(options.prompts), options.limit, options.skip)


def prepared(backend: Backend, options: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """(category, tokens) of each prompt, cut so that an answer fits after it."""
    room = backend.info.context_length - options.max_new_tokens - 1
    if options.prompts != RANDOM:
        chat = Chat(backend)
        return [(category, cut_prompt(chat, text, room)) for category, text in texts_of(options)]
    if room < 1:
        raise PromptError(f"There is no room for a prompt in {room} tokens.")
    drawn = random_prompts(backend, options.limit, options.skip)
    return [(RANDOM, tokens[:room]) for tokens in drawn]


def has_drafts(method: object) -> bool:
    return isinstance(method, Method) and method.stack is not None


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
    with tqdm(total=1.0, desc="Profiling", leave=False) as bar:
        for share in profiler.run():
            bar.update(share - bar.n)
    assert profiler.profile is not None
    return profiler.profile


def own_statistics(fingerprint: str, stack: ExitStack) -> StatisticsTable | None:
    """The project's statistics for a tokenizer, if it has some; `stack` closes them."""
    table = find_table(fingerprint, ASSETS / "statistics")
    if table is not None:
        stack.callback(table.close)
    return table


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
        generation = generation_of(options)
        if options.prompts != RANDOM:
            texts_of(options)  # complains before the model is loaded
        backend = load_model(options.model, options)
        return cls(options, backend, prepared(backend, options), generation, stack)

    def databases(self, methods: Mapping[str, object]) -> dict[str, Databases]:
        """Empty databases for each method, with statistics of its own if it uses them."""
        known, found = self.backend.info.tokenizer_fingerprint, {}
        for name, method in methods.items():
            uses = isinstance(method, Method) and STATISTICS in method.drafting.tiers
            table = own_statistics(known, self.stack) if uses or has_drafts(method) else None
            if table is not None:
                read_ahead(table)
            found[name] = Databases(statistics=table)
        return found

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
            # Another seed, so that they are not profiled on the answers that are measured.
            replace(sampling, seed=sampling.seed + 1),
            lowest(databases, target.info),
            tokens,
        )
        return Family(target, family.drafts, profile_of(profiler))


# commands


class Command:
    """A command with its options. The docstring is its help."""

    groups: ClassVar[Sequence[str]] = ()
    """The groups of shared options that it has."""
    defaults: ClassVar[Record] = {}
    """Defaults of these options that differ for this command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        shared_options(parser.add_argument, self.groups)
        self.add_options(parser.add_argument)
        parser.set_defaults(**self.defaults)

    def add_options(self, add: Add) -> None:
        """Declare the options of this command alone."""

    def run(self, options: argparse.Namespace) -> None:
        raise NotImplementedError


class Measurement(Command):
    """A command that measures, and prints its record as tables and as one line of JSON."""

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        """What was measured; `stack` closes what is opened for it. Raises SettingError."""
        raise NotImplementedError

    def show(self, record: Record) -> None:
        raise NotImplementedError

    def run(self, options: argparse.Namespace) -> None:
        with ExitStack() as stack:
            record = self.record(options, stack)
        self.show(record)
        print(f"\n{json.dumps({'bench': options.command} | record)}")


class Benchmark(Measurement):
    """A measurement that asks a model some prompts."""

    groups: ClassVar[Sequence[str]] = ("model", "prompts", "temperature", "sampling", "methods")

    def measure(self, setup: Setup) -> Record:
        raise NotImplementedError

    def record(self, options: argparse.Namespace, stack: ExitStack) -> Record:
        """The record of `measure`, and the conditions under which it was made."""
        setup = Setup.of(options, stack)
        prompts = {"prompts": len(setup.prompts)}
        return conditions(setup.backend, options) | prompts | self.measure(setup)


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
