"""Files that the page saves: their text goes to the browser, which offers it as a download.

So the server hands out no file, and what one user saves never lies where another could ask for it.
"""

import json

SAVE_FILE = """(made) => {
  if (!made) return;
  const { name, type, text } = JSON.parse(made);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}"""
"""What the page does with what `saved` made."""


def saved(name: str, kind: str, text: str) -> str:
    """A file for the page to save, called `name`; `kind` is its media type."""
    return json.dumps({"name": name, "type": kind, "text": text})
