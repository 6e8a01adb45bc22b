"""Taking a model off the list, and off the disk where it lies in a folder that Strata keeps.

Those folders are the hub's cache and `models` in the data directory. What lies elsewhere is its
owner's: it only leaves the list. A model that is in use stays, and so does one that came along.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from app.service.draft_models import amount
from app.service.models import Models, is_embedded, size_of, title_of
from engine.errors import ModelError
from engine.models.formats import format_of
from engine.queue import OWNER


@dataclass(frozen=True, slots=True)
class Removal:
    """What removing a model would do. `deletes` says whether its files go, which take `bytes`;
    `folder` is what was added as a whole, with `models` in it, and leaves the list as a whole."""

    source: str
    name: str
    bytes: int
    deletes: bool
    folder: str = ""
    models: int = 0

    @property
    def question(self) -> str:
        """What is asked before."""
        if self.deletes:
            return (
                f"Delete {self.name} from the disk? {amount(self.bytes)} become free. To use it "
                "again it has to be downloaded or copied again."
            )
        if self.folder:
            return (
                f"{self.name} lies in the folder {self.folder}, which was added as a whole. Take "
                f"all {self.models} models of that folder off the list? Their files stay."
            )
        return f"Take {self.name} off the list? Its files stay where they are."

    @property
    def done(self) -> str:
        """What is said afterwards."""
        if self.deletes:
            return f"{self.name} was deleted. {amount(self.bytes)} are free again."
        if self.folder:
            return f"The folder {self.folder} is off the list. Its files stay."
        return f"{self.name} is off the list. Its files stay where they are."


def plan(models: Models, source: str) -> Removal:
    """What removing a listed model would do. Raises ModelError where it has to stay."""
    name = title_of(source)
    if source not in {candidate.source for candidate in models.candidates()} | models.added.keys():
        raise ModelError(f"The model {source!r} is not on the list. Choose one from the list.")
    if is_embedded(source):
        raise ModelError(f"{name} comes with the program and stays.")
    if models.loading is not None or models.tasks.busy(OWNER, ""):
        raise ModelError(
            f"{name} cannot be removed while a model is being loaded. Wait until it is ready, or "
            "stop it."
        )
    here = place(source)
    if here == place(models.source):
        raise ModelError(f"{name} is loaded. Load another model, then remove it.")
    if any(here == place(draft.source) for draft in models.engine.state.drafts):
        raise ModelError(
            f"{name} is loaded as a draft model. Unload it in the Stack tab, then remove it."
        )
    if models.loaders.removable(source, models.kept):
        return Removal(source, name, size_of(source), True)
    for folder, found in models.found.items():
        if source in found:
            return Removal(source, name, 0, False, folder, len(found))
    return Removal(source, name, 0, False)


def remove(models: Models, source: str) -> Removal:
    """Remove a listed model, as `plan` says; the bytes are those that became free."""
    planned = plan(models, source)
    if planned.folder:
        models.store.forget_folder(planned.folder)
        del models.found[planned.folder]
        return planned
    freed = models.loaders.remove(source, models.kept) if planned.deletes else 0
    models.store.forget(source)
    models.added.pop(source, None)
    models.stacks.offered = [each for each in models.stacks.offered if each != source]
    for folder, found in models.found.items():
        models.found[folder] = [each for each in found if each != source]
    return Removal(source, planned.name, freed, planned.deletes)


def place(source: str) -> str:
    """What tells two names of one model apart from two models: its path, links followed."""
    path = format_of(source).located(source) if source else None
    return os.path.realpath(Path(path)) if path else source
