"""Where the files lie that come along: the demonstration model, its statistics, styles, scripts."""

from pathlib import Path

ASSETS = Path(__file__).resolve().parent
