"""All ways to run the loaded model are measured, and it is loaded again as it was."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from app import cli
from app.arguments import EMBEDDED, Options, parse_ways
from app.service import ways
from app.service.jobs import Task
from app.service.session import Session
from app.service.ways import CORE, LLAMA_CPP, Found, Way, Ways, computed_by
from engine.backends.base import Backend
from engine.errors import Cancelled, ModelError, SettingError, StrataError
from engine.local import Local
from engine.models.loaders import ModelLoaders
from engine.models.memory import Need
from engine.settings import Runtime
from storage.database import Database
from tests.support.inside import OWNER
from tests.support.toy import ToyBackend

TYPES = {"auto": "bfloat16", "off": "Q4_0", "8": "8 bits", "4": "4 bits"}


class Machine:
    """Loads a toy whose weights are of the type of the bits, in the order of `loaded`. Loading with
    `refused` bits fails, and those with `large` bits do not fit."""

    def __init__(self) -> None:
        self.loaded = list[str]()
        self.refused = self.large = ""
        self.parameters = 1

    def load(self, source: str, runtime: Runtime) -> Backend:
        if runtime.bits == self.refused:
            raise ModelError("no core for it")
        self.loaded.append(runtime.bits)
        toy = ToyBackend(name="it")
        kind = {"kind": "transformers", "dtype": TYPES[runtime.bits], "device": "cpu"}
        toy.info = replace(toy.info, parameters=self.parameters, **kind)
        return toy

    def need(self, source: str, runtime: Runtime) -> Need:
        return Need(1, 10_000 if runtime.bits == self.large else 1, 1)

    def session(self, db: Database, source: str = "/m/it", guests: bool = False) -> Session:
        loaders = ModelLoaders(
            load=self.load,
            need=self.need,
            device=lambda source, runtime: "cpu",
            free=lambda device: 1000,
            scan=lambda folder: [],
            present=lambda source: True,
        )
        session = Session(Local(loaders=loaders), db, guests, loaders=loaders)
        list(session.models.start(source))
        return session


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(ways, "multiplies_few_bits", lambda: True)
    return Machine()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The paces that are measured, one after the other."""
    paces = list[tuple[float, float]]()

    def measured(self: Ways, owner: str, task: Task) -> tuple[float, float]:
        return paces.pop(0)

    monkeypatch.setattr(Ways, "paces", measured)
    return paces


def test_each_way_is_measured_and_the_usual_one_twice(
    machine: Machine, db: Database, told: list[tuple[float, float]]
) -> None:
    session = machine.session(db)
    told += [(10.0, 20.0), (20.0, 40.0), (30.0, 25.0), (11.0, 22.0)]
    found = session.ways.start(OWNER).result()
    assert machine.loaded == ["auto", "8", "4", "auto"] and session.models.runtime == Runtime()
    assert [(way.dtype, way.plain, way.drafted) for way in found.ways] == [
        ("bfloat16", 10.5, 21.0),
        ("8 bits", 20.0, 40.0),
        ("4 bits", 30.0, 25.0),
    ]
    assert found.spread == 1.1 and found.fastest.runtime == Runtime(bits="8")
    assert session.ways.known == {"/m/it": found} and not found.left_out


def test_figures_are_those_of_whole_answers(machine: Machine, db: Database) -> None:
    found = machine.session(db).ways.start(OWNER).result()
    assert len(found.ways) == 3
    assert all(way.plain > 0 and way.drafted > 0 for way in found.ways)


@pytest.mark.parametrize(
    ("refused", "large", "said"), [("8", "", "no core for it"), ("", "8", "needs 9.8 KiB")]
)
def test_a_way_that_cannot_be_is_left_out_and_the_reason_is_told(
    machine: Machine,
    db: Database,
    told: list[tuple[float, float]],
    refused: str,
    large: str,
    said: str,
) -> None:
    session = machine.session(db)
    machine.refused, machine.large = refused, large
    told += 3 * [(1.0, 2.0)]
    found = session.ways.start(OWNER).result()
    assert [way.dtype for way in found.ways] == ["bfloat16", "4 bits"]
    ((name, reason),) = found.left_out
    assert name == "Bits 8" and said in reason
    assert session.models.runtime == Runtime() and session.models.is_loaded


def test_what_comes_to_the_same_is_measured_once(
    machine: Machine,
    db: Database,
    told: list[tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(TYPES, "8", "4 bits")
    told += [(1.0, 1.0), (3.0, 3.0), (1.0, 1.0)]
    found = machine.session(db).ways.start(OWNER).result()
    assert [way.dtype for way in found.ways] == ["bfloat16", "4 bits"] and not told


@pytest.mark.parametrize(
    ("source", "guests", "few", "bits"),
    [
        ("/m/it", False, True, ["auto", "8", "4"]),
        ("/m/it.gguf", False, True, ["auto", "off", "8", "4"]),
        ("/m/it", False, False, ["auto"]),
        ("/m/it", True, True, ["auto"]),
    ],
)
def test_ways_are_offered_where_this_machine_has_others(
    machine: Machine,
    db: Database,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    guests: bool,
    few: bool,
    bits: Sequence[str],
) -> None:
    monkeypatch.setattr(ways, "multiplies_few_bits", lambda: few)
    session = machine.session(db, source, guests)
    assert [each.bits for each in session.ways.runtimes()] == bits
    assert session.ways.offered is (len(bits) > 1)


def test_measuring_can_be_stopped_and_the_model_is_as_it_was(
    machine: Machine, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = machine.session(db)
    paces: Callable[[Ways, str, Task], tuple[float, float]] = Ways.paces

    def stopped(self: Ways, owner: str, task: Task) -> tuple[float, float]:
        if session.current.info.dtype == "8 bits":
            self.stop()
        return paces(self, owner, task)

    monkeypatch.setattr(Ways, "paces", stopped)
    with pytest.raises(Cancelled):
        session.ways.start(OWNER).result()
    list(session.model_swap.awaited())
    assert session.models.runtime == Runtime() and machine.loaded[-1] == "auto"
    assert session.ways.known == {} and session.ways.slot.running is None
    assert not session.tasks.busy(OWNER, ways.ABOUT)


def test_a_way_is_suggested_only_if_it_gains_more_than_the_pace_of_the_machine_changed() -> None:
    def way(bits: str, pace: float) -> Way:
        return Way(Runtime(bits=bits), CORE, bits, 1, pace, pace / 2)

    usual, faster = way("auto", 100.0), way("8", 120.0)
    assert Found((usual, faster)).fastest is faster
    assert Found((usual, faster), spread=1.3).fastest is usual
    assert Found((usual, way("8", 104.0))).fastest is usual


def test_who_computes_a_gguf_file_is_told() -> None:
    info = ToyBackend().info
    assert computed_by(replace(info, kind=LLAMA_CPP), "/m/it.gguf") == LLAMA_CPP
    assert computed_by(replace(info, kind="transformers"), "/m/it.gguf") == CORE
    assert computed_by(replace(info, kind="transformers"), "/m/it") == "transformers"


@pytest.fixture
def terminal(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine on which `strata ways` runs."""

    def session_of(options: Options, folder: Path, database: Database, stack: object) -> Session:
        return machine.session(database)

    monkeypatch.setattr(cli, "session_of", session_of)
    return machine


def test_a_terminal_shows_the_ways_and_the_fastest(
    terminal: Machine, told: list[tuple[float, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.refused = "8"
    told += [(10.0, 20.0), (5.0, 1050.0), (10.0, 20.0)]
    cli.measure_ways(parse_ways(["--model", str(EMBEDDED)]))
    head, fast, slow, left_out, verdict = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "weights" and head.endswith("with guessing")
    assert fast.startswith("4 bits ") and fast.endswith("  1,050")
    assert slow.startswith("bfloat16 ") and slow.endswith("  20.0")
    assert fast.index("transformers") == slow.index("transformers") == head.index("computed by")
    assert left_out == "Bits 8: no core for it"
    assert verdict == "With Bits 4 it answers 52.50 times as fast as with Bits auto."


@pytest.mark.parametrize(("parameters", "said"), [(600_000_000, True), (10_000_000, False)])
def test_a_terminal_tells_of_the_ways_where_fewer_bits_would_help(
    machine: Machine, db: Database, capsys: pytest.CaptureFixture[str], parameters: int, said: bool
) -> None:
    machine.parameters = parameters
    session = machine.session(db)
    cli.load(session, session.models.start("/m/it"), threading.Event(), cli.report)
    assert ("strata ways measures" in capsys.readouterr().err) is said


def test_a_terminal_says_why_there_is_nothing_to_measure(
    terminal: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "multiplies_few_bits", lambda: False)
    with pytest.raises(SettingError, match="runs in one way only on this machine"):
        cli.measure_ways(parse_ways([]))
    with pytest.raises(StrataError, match="no/such"):
        cli.measure_ways(parse_ways(["--model", "no/such/folder/"]))
    with pytest.raises(SettingError, match="a model on a server"):
        cli.measure_ways(parse_ways(["--model", "http://127.0.0.1:9/v1"]))
