"""The demonstration model runs in the format that is faster here; where that one fails, in the
other. What was measured, what failed and what was chosen by hand is remembered."""

import threading
from collections.abc import Callable
from itertools import count

import pytest

from app.service import formats
from app.service.formats import FILE, FOLDER, Formats
from app.service.session import Session
from engine.backends.base import Backend
from engine.backends.toy import ToyBackend
from engine.errors import ModelError
from engine.local import Local
from engine.models import plain_trial
from engine.models.loaders import ModelLoaders
from engine.models.memory import Need
from engine.settings import Runtime
from storage.database import Database
from tests.conftest import EMBEDDED
from tests.service.test_models import quick  # noqa: F401
from tests.service.test_revival import Fragile

OWNER = "local"
QUIET: Callable[[], bool] = lambda: True  # noqa: E731


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the library for GGUF files is here, whatever is installed; nobody waits for quiet."""
    there = {"llama": True}
    monkeypatch.setattr("engine.models.llama_cpp_python.installed", lambda: there["llama"])
    monkeypatch.setattr(formats, "QUIET_SECONDS", 0.01)
    return there


class Measuring:
    """Trials of known outcome; what was asked for."""

    def __init__(self, file: float, folder: float) -> None:
        self.speeds = {FILE: file, FOLDER: folder}
        self.asked: list[str] = []

    def __call__(self, source: str, runtime: Runtime, wanted: Callable[[], bool]) -> float | None:
        self.asked.append(source)
        return self.speeds[source] if wanted() else None


def learned(db: Database, file: float, folder: float) -> Formats:
    """Both formats as they were measured."""
    known = Formats(db, Measuring(file, folder))
    known.learn(QUIET, threading.Event())
    return Formats(db)


def test_until_it_is_measured_the_file_is_taken_where_it_can_be_read(
    db: Database, here: dict[str, bool]
) -> None:
    assert Formats(db).first() == FILE and Formats(db).faster is None
    here["llama"] = False
    assert Formats(db).first() == FOLDER


@pytest.mark.parametrize(
    ("file", "folder", "first", "words"),
    [
        (1660.0, 285.0, FILE, "GGUF is 5.8 times as fast here as safetensors: 1,660 against 285 "),
        (100.0, 250.0, FOLDER, "safetensors is 2.5 times as fast here as GGUF: 250 against 100 "),
        (0.0, 250.0, FOLDER, None),
        (100.0, 0.0, FILE, None),
    ],
)
def test_the_faster_one_is_taken_and_the_figures_are_told(
    db: Database, file: float, folder: float, first: str, words: str | None
) -> None:
    known = learned(db, file, folder)
    assert known.first() == first
    assert (known.faster.words[: len(words)] if words and known.faster else None) == words


def test_it_is_measured_once_and_again_for_another_library(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = Measuring(10.0, 5.0)
    for _ in range(2):
        assert Formats(db, measuring).learn(QUIET, threading.Event())
    assert sorted(measuring.asked) == sorted([FILE, FOLDER])
    monkeypatch.setattr(formats, "version", lambda name: "99.0" if name == "torch" else "1")
    assert Formats(db).faster is None


def test_nothing_is_measured_while_somebody_uses_the_program(db: Database) -> None:
    """A trial that is disturbed counts for nothing, and is made again."""
    used, over, looks = [True], threading.Event(), count()
    measuring = Measuring(10.0, 5.0)

    def quiet() -> bool:
        if next(looks) == 3:
            assert measuring.asked == []
            used[0] = False
        return not used[0]

    def disturbed(source: str, runtime: Runtime, wanted: Callable[[], bool]) -> float | None:
        used[0] = not measuring.asked
        found = measuring(source, runtime, wanted)
        used[0] = False
        return found

    known = Formats(db, disturbed)
    assert known.learn(quiet, over) and measuring.asked == [FILE, FILE, FOLDER]


def test_measuring_ends_with_the_program(db: Database) -> None:
    over, measuring = threading.Event(), Measuring(1.0, 1.0)
    over.set()
    assert Formats(db, measuring).learn(QUIET, over) is None and measuring.asked == []


def test_what_has_one_format_has_nothing_to_measure(db: Database, here: dict[str, bool]) -> None:
    here["llama"] = False
    measuring = Measuring(1.0, 1.0)
    assert Formats(db, measuring).learn(QUIET, threading.Event()) is None
    assert measuring.asked == []


def test_the_one_chosen_by_hand_is_kept_until_the_other_is_chosen(db: Database) -> None:
    known = learned(db, 10.0, 5.0)
    known.prefer(FOLDER)
    assert Formats(db).first() == FOLDER and known.automatic == FILE
    known.prefer("owner/name")
    assert Formats(db).first() == FOLDER
    known.prefer(FILE)
    assert Formats(db).first() == FILE and known.store.chosen(formats.CHOICE) == ""


@pytest.mark.parametrize(
    ("runtime", "first"),
    [
        (Runtime(device="cpu"), FOLDER),
        (Runtime(tensor_parallel=2), FOLDER),
        (Runtime(gpu_layers=0), FILE),
        (Runtime(context_length=512, threads=1), FILE),
    ],
)
def test_settings_of_one_format_ask_for_it(db: Database, runtime: Runtime, first: str) -> None:
    assert Formats(db).first(runtime) == first


# in the program


def loaders(broken: set[str]) -> ModelLoaders:
    """Toys in the place of both formats."""

    def load(source: str, runtime: Runtime) -> Backend:
        if source in broken:
            raise ModelError(f"{source} is broken.")
        return ToyBackend(name=source)

    return ModelLoaders(
        load=load,
        need=lambda source, runtime: Need(1, 1, 1),
        device=lambda source, runtime: "cpu",
        free=lambda device: 1000,
        scan=lambda folder: [],
        present=lambda source: True,
    )


def test_a_program_starts_with_it_and_keeps_what_is_named(db: Database) -> None:
    for asked, wanted in (("", FILE), (FOLDER, FOLDER)):
        session = Session(Local(loaders=loaders(set())), db, loaders=loaders(set()))
        list(session.models.start(asked))
        assert session.models.source == wanted and session.models.demonstration
        assert session.current.info.name == "tiny-chat"


def test_who_loads_the_other_one_gets_it_from_then_on(db: Database) -> None:
    session = Session(Local(loaders=loaders(set())), db, loaders=loaders(set()))
    list(session.models.start(""))
    list(session.models.load(FOLDER))
    assert session.models.source == FOLDER and Formats(db).first() == FOLDER
    list(session.models.load(FILE))
    assert Formats(db).first() == FILE


def test_where_one_cannot_be_read_the_other_is_and_that_is_told(db: Database) -> None:
    broken = loaders({FILE})
    session = Session(Local(loaders=broken), db, loaders=broken)
    list(session.models.start(""))
    assert session.models.source == FOLDER
    (notice,) = session.models.notices
    assert "does not run here as GGUF. It runs as safetensors." in notice and "broken" in notice
    assert Formats(db).first() == FOLDER, "it is not tried again at the next start"
    named = Session(Local(loaders=broken), db, loaders=broken)
    with pytest.raises(ModelError, match="is broken"):
        list(named.models.start(FILE))
    assert not named.models.there, "what is named is not replaced"


def test_where_nothing_can_be_read_that_is_told(db: Database) -> None:
    broken = loaders({FILE, FOLDER})
    session = Session(Local(loaders=broken), db, loaders=broken)
    with pytest.raises(ModelError, match="target is broken"):
        list(session.models.start(""))


def test_other_settings_are_not_held_against_a_format(db: Database) -> None:
    broken = loaders({FILE})
    session = Session(Local(loaders=broken), db, loaders=broken)
    list(session.models.start("", Runtime(cache_type="q8_0", flash_attention="off")))
    assert session.models.source == FOLDER and Formats(db).first() == FILE


@pytest.mark.parametrize("when", ["while it loads", "again and again"])
def test_one_that_ends_the_process_is_replaced(db: Database, when: str) -> None:
    made = loaders(set())
    engine = Fragile(made)
    session = Session(engine, db, loaders=made)
    if when == "while it loads":
        engine.ends = lambda wanted: getattr(wanted, "source", "") == FILE
        with pytest.raises(Exception, match="SIGSEGV"):
            list(session.models.start(""))
        engine.settle()
    else:
        list(session.models.start(""))
        for _ in range(3):
            engine.die()
            engine.settle()
    assert session.models.source == FOLDER and session.models.there
    told = " ".join(session.notices.take(OWNER))
    assert "tiny-chat does not run here as GGUF. It runs as safetensors." in told
    assert Formats(db).first() == FOLDER


# the trial


@pytest.mark.model
def test_a_trial_measures_in_a_process_of_its_own() -> None:
    small = str(EMBEDDED.with_name("small"))
    speed = plain_trial.trial(small, Runtime(threads=1), lambda: True)
    assert speed is not None and speed > 1
    assert plain_trial.trial(f"{small}/gone", Runtime(), lambda: True) == 0.0
    assert plain_trial.trial(small, Runtime(), lambda: False) is None


def test_a_trial_that_crashes_or_never_ends_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = ["python3", "-c", "import os; print(5.0); os.abort()"]
    monkeypatch.setattr(plain_trial, "command", lambda *words: crash)
    assert plain_trial.trial("m", Runtime(), lambda: True) == 0.0
    monkeypatch.setattr(plain_trial, "SECONDS", 0.1)
    monkeypatch.setattr(plain_trial, "command", lambda *words: ["sleep", "60"])
    assert plain_trial.trial("m", Runtime(), lambda: True) == 0.0
