"""A race of the demonstration model shows what drafting gains, and may have the padded model
made."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.arguments import EMBEDDED
from app.service import race
from app.service.comparison import Progress
from app.service.jobs import Progress as Making
from app.service.models import EMBEDDED_FILE, PADDED
from app.service.race import ABOUT, TOKENS, NoGain, Race
from app.service.session import Session
from engine.backends.base import Backend
from engine.compare import Speedup
from engine.errors import ModelError
from engine.local import Local
from engine.machine import physical_cores
from engine.models.loaders import MODEL_LOADERS, ModelLoaders
from engine.models.memory import Need
from engine.settings import Runtime
from engine.types import Costs
from storage.database import Database
from storage.traces import Traces
from tests.support.inside import OWNER, Held
from tests.support.toy import ToyBackend

FILE = str(EMBEDDED_FILE)


def loaders() -> ModelLoaders:
    """Toys in the place of all models."""

    def load(source: str, runtime: Runtime) -> Backend:
        return ToyBackend(name=source)

    def scan(folder: str) -> list[str]:
        return [str(path.parent) for path in Path(folder).glob("*/config.json")]

    return ModelLoaders(
        load=load,
        need=lambda source, runtime: Need(1, 1, 1),
        device=lambda source, runtime: "cpu",
        free=lambda device: 1000,
        scan=scan,
        present=lambda source: True,
        removable=MODEL_LOADERS.removable,
        remove=MODEL_LOADERS.remove,
    )


def opened(db: Database) -> Session:
    return Session(Local(loaders=loaders()), db, loaders=loaders())


def test_a_program_starts_with_the_demonstration_model_unless_another_is_named(
    db: Database,
) -> None:
    for named, expected in (("", str(EMBEDDED)), (FILE, FILE)):
        session = opened(db)
        list(session.models.start(named))
        assert session.models.source == expected and session.models.demonstration
        assert session.current.info.name == "tiny-chat"


def test_a_race_is_a_pair_of_runs_that_were_just_made(session: Session) -> None:
    *before, race = session.races.run(OWNER, anyway=True)
    assert isinstance(race, Race) and race.verdict.identical
    assert [race.plain.method, race.fast.method] == ["plain", "auto"]
    assert race.plain.prefill is not None and race.plain.prefill.reused == 0
    assert 1 <= len(race.plain.tokens) <= TOKENS
    assert [t.text for t in race.fast.tokens] == [t.text for t in race.plain.tokens]
    running = [
        item.running.method for item in before if isinstance(item, Progress) and item.running
    ]
    assert running[0] == "plain" and running[-1] == "auto"
    stored = Traces(session.database, OWNER).history()
    assert [(trace.kind, trace.conversation_id) for trace in stored] == [("compare", None)] * 2
    assert session.chat.conversations(OWNER).list() == []


def test_a_race_that_is_stopped_leaves_nothing_and_another_can_follow(
    session: Session, toy: Held
) -> None:
    toy.allow(20)
    items = session.races.run(OWNER)
    for item in items:
        if isinstance(item, Progress):
            break
    session.races.stop(OWNER)
    toy.allow()
    assert not any(isinstance(item, Race) for item in items)
    assert not session.tasks.busy(OWNER, ABOUT)
    assert Traces(session.database, OWNER).history() == []
    assert isinstance([*session.races.run(OWNER)][-1], Race)


# whether there is a gain to show


def costs(**seconds: float) -> Costs:
    """A measured curve: n1=2.9 says that a forward over one node takes 2.9 ms."""
    points = {int(name[1:]): value / 1000 for name, value in seconds.items()}
    return Costs(points, 0.0, 0.0, 1.0)


def test_where_forwards_leave_no_gain_that_is_said_before_anything_is_recorded(
    session: Session,
) -> None:
    session.costs.known = session.current.info, costs(n0=0.84, n1=2.47, n3=3.1, n7=4.6)
    (outcome,) = session.races.run(OWNER)
    assert isinstance(outcome, NoGain)
    assert "checking one guess takes 2.9 times as long as computing a token" in outcome.why
    assert Traces(session.database, OWNER).history() == []
    assert isinstance([*session.races.run(OWNER, anyway=True)][-1], Race)
    session.costs.known = session.current.info, costs(n0=0.55, n1=0.74, n3=1.49)
    session.races.known.clear()
    assert isinstance([*session.races.run(OWNER)][-1], Race)


def test_the_median_of_the_last_races_counts_first(session: Session) -> None:
    *_, race = session.races.run(OWNER, anyway=True)
    assert isinstance(race, Race)
    ((model, ratios),) = session.races.known.items()
    assert ratios == (race.ratio,)
    session.costs.known = session.current.info, costs(n0=0.84, n1=2.47, n3=3.1, n7=4.6)
    session.races.known[model] = (1.9, 0.84, 1.7)
    assert session.races.no_gain() == "", "one of them was noisy"
    session.races.known[model] = (1.9, 0.84, 0.9, 0.97)
    assert session.races.no_gain() == (
        "in its last 4 races, the median speed with guessing was 0.94× that of plain decoding"
    )


def test_a_single_race_cannot_tell_that_a_model_gains_nothing(session: Session) -> None:
    session.costs.known = session.current.info, costs(n0=0.55, n1=0.74, n3=1.49)
    model = session.models.source, session.models.runtime
    for ratios, gains in (((0.84,), True), ((0.84, 0.9), True), ((0.84, 0.9, 1.0), False)):
        session.races.known[model] = ratios
        assert (session.races.no_gain() == "") is gains


def test_the_last_races_are_remembered(session: Session) -> None:
    model = session.models.source, session.models.runtime
    session.races.known[model] = (1.1, 1.2, 1.3, 1.4, 1.5)
    *_, race = session.races.run(OWNER, anyway=True)
    assert isinstance(race, Race)
    assert session.races.known[model] == (1.2, 1.3, 1.4, 1.5, race.ratio)
    assert replace(race, speedup=Speedup()).ratio == 1.0, "no guess was kept"


# the padded model

WRITES = (
    "import json, pathlib, sys, time\n"
    "out = pathlib.Path(sys.argv[1])\n"
    "print(0.0, flush=True); print(0.5, flush=True)\n"
    "(out.parent / f'.{out.name}-x').mkdir(parents=True)\n"
    "MIDDLE\n"
    "out.mkdir(); (out / 'config.json').write_text('{}')\n"
    "(out / 'model.safetensors').write_bytes(bytes(1000))\n"
    "print(1.0, flush=True)\n"
)


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A program with a data directory, toys for models, and a process that writes a small one."""
    monkeypatch.setattr(race, "free_memory", lambda device: 10**12)
    monkeypatch.setattr(race, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(race, "multiplies_few_bits", lambda: True)
    writing(monkeypatch, "pass")
    with Database(tmp_path / "strata.db") as database:
        session = opened(database)
        list(session.models.start(FILE))
        yield session


def writing(monkeypatch: pytest.MonkeyPatch, middle: str) -> None:
    def command(module: str, source: str, size: str, output: str) -> list[str]:
        assert (module, size) == ("engine.models.inflate", "0.5b")
        return [sys.executable, "-c", WRITES.replace("MIDDLE", middle), output]

    monkeypatch.setattr(race, "command", command)


def test_a_race_at_the_pace_of_a_real_model_makes_it_and_gives_the_usual_model_back(
    at_home: Session,
) -> None:
    *before, race = at_home.races.run(OWNER, padded=True)
    assert isinstance(race, Race) and race.model == "tiny-chat, padded to 0.5 B"
    assert any(isinstance(item, Making) for item in before) and at_home.padded.exists
    # So that both texts are the same: in bfloat16 rounding often decides.
    assert [how for _, how in at_home.races.known] == [Runtime(bits="4", threads=physical_cores())]
    at_home.model_swap.slot.wait()
    assert at_home.models.source == FILE, "the usual model is back"
    names = {each.name: each for each in at_home.models.candidates()}
    assert names["tiny-chat, padded to 0.5 B"].source == at_home.padded.source
    again = [*at_home.races.run(OWNER, padded=True)]
    assert isinstance(again[-1], Race)
    assert not any(isinstance(item, Making) for item in again), "it is there already"
    at_home.model_swap.slot.wait()
    removal = at_home.models.removal(at_home.padded.source)
    assert removal.deletes and "made again" in removal.question
    at_home.models.remove(at_home.padded.source)
    assert not at_home.padded.exists


@pytest.mark.parametrize(("device", "fast"), [("cuda", True), ("cpu", False)])
def test_it_races_in_float32_on_a_gpu_and_where_few_bits_are_slow(
    at_home: Session, monkeypatch: pytest.MonkeyPatch, device: str, fast: bool
) -> None:
    monkeypatch.setattr(race, "multiplies_few_bits", lambda: fast)
    info = replace(at_home.current.info, device=device)
    monkeypatch.setattr(type(at_home.current), "info", info)
    assert at_home.races.runtime == Runtime(dtype="float32")
    monkeypatch.setattr(race, "free_memory", lambda device: 2 * 10**9)
    with pytest.raises(ModelError, match="takes 2.4 GiB of memory"):
        [*at_home.races.run(OWNER, padded=True)]


def test_stopped_while_it_is_made_nothing_is_left(
    at_home: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing(monkeypatch, "time.sleep(600)")
    found = []
    for item in at_home.races.run(OWNER, padded=True):
        found.append(item)
        if isinstance(item, Making) and item.share == 0.5:
            at_home.races.stop(OWNER)
    assert not any(isinstance(item, Race) for item in found)
    with at_home.padded.busy:
        assert at_home.padded.path is not None and list(at_home.padded.path.parent.iterdir()) == []


def test_what_goes_wrong_while_it_is_made_is_reported(
    at_home: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing(monkeypatch, "print('The disk is full.'); sys.exit(1)")
    with pytest.raises(ModelError, match="could not be made: The disk is full"):
        [*at_home.races.run(OWNER, padded=True)]
    assert not at_home.padded.exists and at_home.models.source == FILE


@pytest.mark.parametrize("short", ["disk", "memory", "guests"])
def test_it_is_not_made_where_there_is_no_room_for_it(
    at_home: Session, monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    free = 5 * 10**8 if short == "disk" else 10**12
    monkeypatch.setattr(race.shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    if short == "memory":
        monkeypatch.setattr(race, "free_memory", lambda device: 5 * 10**8)
    at_home.models.guests = short == "guests"
    expected = {"disk": "on the disk, and 476.8 MiB", "memory": "of memory, and 476.8 MiB"}
    with pytest.raises(ModelError, match=expected.get(short, "others share this app")):
        [*at_home.races.run(OWNER, padded=True)]
    assert not at_home.padded.exists


def test_its_size_is_that_of_the_demonstration_model_in_a_larger_shape() -> None:
    config = json.loads((EMBEDDED / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    shape = race.SHAPES[race.SIZE]
    assert shape.parameters(config["vocab_size"], config.get("head_dim", head)) == race.PARAMETERS
    assert config["tie_word_embeddings"] and PADDED.endswith(race.SIZE)
