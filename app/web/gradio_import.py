"""Prevents Gradio from writing stub files, which takes half of the time of its import.

On import, Gradio parses the source of each of its components to see whether the .pyi file next to
it is up to date. That takes 0.7 of 1.4 s, and only editors read these files. No option prevents it,
so the function that does it is replaced after its module was loaded and before the components are.
If a version of Gradio does not have that function, nothing is replaced.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

MODULE, WRITER = "gradio.component_meta", "create_or_modify_pyi"


class Quiet(Loader):
    """Loads a module with its own loader, then replaces the function by one that does nothing."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if hasattr(module, WRITER):
            setattr(module, WRITER, lambda *_: None)


class Finder(MetaPathFinder):
    """An import hook that finds the one module, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where the module is; None for any other."""
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        found = find_spec(name)
        if found is not None and found.loader is not None:
            found.loader = Quiet(found.loader)
        return found


def skip_stubs() -> None:
    """Prevent Gradio from writing stub files. Call this before Gradio is imported."""
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, Finder())
