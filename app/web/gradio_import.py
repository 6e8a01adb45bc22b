"""Imports Gradio, without two things that its import does and Strata does not need.

Gradio makes HTTP clients, which read the proxies and certificates of the environment, and fail if
these cannot be used: a SOCKS proxy needs another package. `without_environment` keeps them from
reading it.

Gradio parses the source of each of its components to see whether the .pyi file next to it is up to
date. That takes 0.7 of 1.4 s, and only editors read these files. No option prevents it, so the
function that does it is replaced after its module was loaded and before the components are. If a
version of Gradio does not have that function, nothing is replaced.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import get_ident
from types import ModuleType
from typing import Any

import httpx

MODULE, WRITER = "gradio.component_meta", "create_or_modify_pyi"


class WithoutStubs(MetaPathFinder, Loader):
    """An import hook that finds the one module, once. It loads it with its own loader, then
    replaces the function by one that does nothing."""

    loader: Loader

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        found = find_spec(name)
        if found is not None and found.loader is not None:
            self.loader, found.loader = found.loader, self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if hasattr(module, WRITER):
            setattr(module, WRITER, lambda *_: None)


def import_gradio() -> None:
    """Import Gradio in the way that the module's docstring describes."""
    skip_stubs()
    with without_environment():
        import gradio  # noqa: F401


def skip_stubs() -> None:
    """Prevent Gradio from writing stub files. Call this before Gradio is imported."""
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, WithoutStubs())


@contextmanager
def without_environment() -> Iterator[None]:
    """HTTP clients that this thread makes in the block ignore the environment."""
    kinds: tuple[Any, ...] = (httpx.Client, httpx.AsyncHTTPTransport)
    thread = get_ident()
    before = [kind.__init__ for kind in kinds]
    try:
        for kind, make in zip(kinds, before, strict=True):
            kind.__init__ = ignoring(make, thread)
        yield
    finally:
        for kind, make in zip(kinds, before, strict=True):
            kind.__init__ = make


def ignoring(make: Any, thread: int) -> Any:
    @wraps(make)
    def made(*arguments: Any, **options: Any) -> None:
        if get_ident() == thread:
            options["trust_env"] = False
        make(*arguments, **options)

    return made
