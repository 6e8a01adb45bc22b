"""The program as tests start it: `python -m tests.support.held FOLDER ARGUMENTS`.

Many tests share one program, so it differs from the real one in some ways. A browser says in the
cookie "owner" whose data it shows, so that each test begins with none. The seeds that are drawn are
the same for each of these owners, whatever other tests did before. The handlers in HELD answer as
late as a test wants: not while FOLDER has a file of that name, which `late` in
tests/support/pages.py makes and removes. Long answers of an owner end no sooner than a test wants,
by `unending` there. The model is one that calls tools if FOLDER says which
(tests/support/calling.py). A proof has a second, not eight. Nobody else can log in to its machine.
On SIGUSR1 it writes what its threads are doing into the file STACKS.
"""

import faulthandler
import secrets
import signal
import sys
import time
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from app import cli
from app.service import proofs
from app.web.gradio_import import skip_stubs
from tests.support import calling, held_answers

HELD = (
    "diagnostics.Diagnostics.filter",
    "diagnostics.Diagnostics.show",
    "diagnostics.Diagnostics.choose",
    "conversations.ConversationList.new",
    "conversations.ConversationList.open",
    "conversations.ConversationList.look",
)
"""`module.Class.method` below app/web/tabs."""
STACKS = "stacks.txt"
LOOK_SECONDS = 0.02


def hold(folder: Path, name: str) -> None:
    """Have a handler wait while its file is there. Another file says how often it began."""
    module, kind, method = name.split(".")
    found = getattr(import_module(f"app.web.tabs.{module}"), kind)
    handler: Callable[..., Any] = getattr(found, method)
    file, begun = folder / name, folder / f"{name}.begun"

    @wraps(handler)
    def waiting(*values: object) -> Any:
        if begun.exists():
            with begun.open("a") as told:
                told.write(".")
        answer = handler(*values)
        while file.exists():
            time.sleep(LOOK_SECONDS)
        return answer

    setattr(found, method, waiting)


def give_each_browser_its_own_data() -> None:
    """Guests are told apart as always."""
    from app.web import kit

    owner_of = kit.owner_of
    seeds, known = Random(0), set[str]()

    def named_by_the_browser(session: Any, memory: Any, request: Any) -> str:
        if request.username is not None:
            return owner_of(session, memory, request)
        owner: str = request.cookies.get("owner", "local")
        if owner not in known:
            known.add(owner)
            seeds.seed(0)
        return owner

    kit.owner_of = named_by_the_browser
    secrets.randbelow = seeds.randrange


if __name__ == "__main__":
    cli.other_people = list
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    stacks = folder.joinpath(STACKS).open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    skip_stubs()
    give_each_browser_its_own_data()
    proofs.ENOUGH = 1.0
    for each in HELD:
        hold(folder, each)
    model = calling if calling.file_of(folder).exists() else held_answers
    cli.engine_of = partial(model.engine_of, folder)
    sys.exit(cli.main(sys.argv[2:]))
