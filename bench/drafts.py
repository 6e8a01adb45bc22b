"""The draft models of a run: loaded, and profiled with their target before anything is measured."""

import argparse
from contextlib import ExitStack
from dataclasses import replace

from tqdm import tqdm

from bench.options import PROMPTS, SHORT, open_databases, runtime_of, source_of
from bench.prompts import cut_prompt, read_prompts
from engine.backends.base import Backend
from engine.errors import SettingError
from engine.hsd.family import Family
from engine.hsd.measure import TOKENS, Profiler
from engine.hsd.profile import Profile
from engine.methods import METHODS, lowest
from engine.models.loaders import load, name_of
from engine.prompt import Chat
from engine.settings import Sampling

OTHER_SEED = 1
"""The profile is of other answers than those that are measured, where there is chance in them."""


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the draft models and how they are profiled."""
    add = parser.add_argument
    add("--drafts", help="folders, *.gguf or hub ids, comma between (embedded models bring two)")
    add("--profile-tokens", type=int, default=TOKENS, help="tokens per prompt of the profile")


def load_drafts(options: argparse.Namespace) -> dict[str, Backend]:
    """The draft models by name. Raises SettingError where none is named."""
    sources = [part.strip() for part in (options.drafts or "").split(",") if part.strip()]
    if not sources and options.model in SHORT:
        sources = [str(SHORT[options.model].with_stem(name)) for name in ("small", "mid")]
    names = [name_of(source) for source in sources]
    if not sources or len(set(names)) < len(names):
        raise SettingError(
            f"The draft models cannot be {options.drafts!r}. Name folders, *.gguf files or hub ids "
            "with --drafts, whose last parts differ."
        )
    runtime = runtime_of(options).unsplit
    named = zip(names, map(source_of, sources), strict=True)
    return {name: load(source, runtime) for name, source in named}


def load_family(
    target: Backend,
    options: argparse.Namespace,
    sampling: Sampling,
    stack: ExitStack,
) -> Family:
    """The draft models with their profile, made over the dozen questions of our own."""
    tokens = options.profile_tokens
    family = Family(target, load_drafts(options))
    databases = open_databases(target, {"hd": METHODS["hd"]}, options.statistics, stack)["hd"]
    room = target.info.context_length - tokens - 1
    chat = Chat(target)
    profiler = Profiler(
        target,
        family.drafts,
        [cut_prompt(chat, text, room) for _, text in read_prompts(PROMPTS, 0)],
        replace(sampling, seed=sampling.seed + OTHER_SEED),
        lowest(databases, target.info),
        tokens,
    )
    return Family(target, family.drafts, profile_of(profiler))


def profile_of(profiler: Profiler) -> Profile:
    """Run a profiler with a progress bar."""
    with tqdm(total=1.0, desc="Profiling", leave=False) as bar:
        for share in profiler.run():
            bar.update(share - bar.n)
    assert profiler.profile is not None
    return profiler.profile
