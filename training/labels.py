"""What models are called that are measured side by side."""

from collections.abc import Sequence
from pathlib import Path

from engine.errors import SettingError


def label(folder: Path) -> str:
    """A model's name and that of its family."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}"


def labelled(folders: Sequence[Path]) -> dict[str, Path]:
    """Models by their labels. Raises SettingError where two have the same."""
    models = {label(folder): folder for folder in folders}
    if len(models) < len(folders):
        raise SettingError(
            f"Two of {', '.join(map(str, folders))} are called the same. Rename a folder or the "
            "one that it is in."
        )
    return models
