"""Gradio's app, made once: when it is served.

Blocks make an app when they begin, and another one when they are complete. Each has eighty routes
and describes every component. Nobody asks those two for anything, as the one that is served is a
third (app/web/server.py). They were a tenth of the program's work at its start.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from gradio.routes import App

MAKER = "create_app"


@contextmanager
def without_apps() -> Iterator[None]:
    """Blocks that are built in here have no app until they are served."""
    make = vars(App)[MAKER]
    setattr(App, MAKER, staticmethod(lambda *_, **__: None))
    try:
        yield
    finally:
        setattr(App, MAKER, make)
