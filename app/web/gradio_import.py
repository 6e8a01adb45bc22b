"""Gradio imported without writing stub files, which is half of the time that its import takes.

Whenever Gradio is imported it parses the source of each of its components, to see whether the .pyi
file beside it is still right: 0.7 of 1.4 s. Only editors read those files. There is no way to ask
for less, so the function that does it is replaced once its module was loaded, before the components
are. Of another version that does not have it nothing is replaced.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

MODULE, WRITER = "gradio.component_meta", "create_or_modify_pyi"


class Quiet(Loader):
    """Loads a module as its own loader does, then silences the function."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module, still empty."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Fill it."""
        self.loader.exec_module(module)
        if hasattr(module, WRITER):
            setattr(module, WRITER, lambda *_: None)


class Finder(MetaPathFinder):
    """Finds the one module, once."""

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
    """Have Gradio write no stub files; to be called before it is imported."""
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, Finder())
