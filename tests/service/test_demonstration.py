"""The demonstration model runs in the format that is faster here; a race shows what drafting gains,
and may have the padded model made. What was measured, failed or was chosen is remembered."""

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.service import demonstration, race
from app.service.comparison import Progress
from app.service.demonstration import FILE, FOLDER, Formats, run_by
from app.service.jobs import Progress as Making
from app.service.models import PADDED
from app.service.race import ABOUT, TOKENS, NoGain, Race
from app.service.session import Session
from engine.backends.base import Backend
from engine.backends.toy import ToyBackend
from engine.compare import Speedup
from engine.engine import Event, Request
from engine.errors import ModelError
from engine.local import Local
from engine.models.formats import Gguf
from engine.models.loaders import MODEL_LOADERS, ModelLoaders
from engine.models.memory import Need
from engine.settings import Runtime
from engine.streams import Stream
from engine.types import Costs
from storage.database import Database
from storage.machine import Speed, SpeedStore
from storage.traces import Traces
from tests.service.test_revival import Fragile
from tests.support.inside import OWNER, Held

QUIET: Callable[[], bool] = lambda: True  # noqa: E731


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the library for GGUF files is here, whatever is installed; nobody waits for quiet."""
    there = {"llama": True}
    monkeypatch.setattr("engine.models.llama_cpp_python.installed", lambda: there["llama"])
    monkeypatch.setattr(demonstration, "QUIET_SECONDS", 0.01)
    return there


class Measuring:
    """Trials of known outcome, told by the speed with drafts; what was asked for."""

    def __init__(self, file: float, folder: float, plain: tuple[float, float] = (1, 1)) -> None:
        self.speeds = {FILE: Speed(plain[0], file), FOLDER: Speed(plain[1], folder)}
        self.asked: list[str] = []

    def __call__(self, source: str, runtime: Runtime, wanted: Callable[[], bool]) -> Speed | None:
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
        (1660.0, 285.0, FILE, "GGUF is 5.8 times as fast here as safetensors, by whole answers "),
        (100.0, 250.0, FOLDER, "safetensors is 2.5 times as fast here as GGUF, by whole answers "),
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


def test_whole_answers_with_drafts_count_and_not_plain_decoding(db: Database) -> None:
    """A file that decodes fast plainly, which drafts cannot make faster."""
    Formats(db, Measuring(480.0, 520.0, plain=(500.0, 300.0))).learn(QUIET, threading.Event())
    faster = Formats(db).faster
    assert Formats(db).first() == FOLDER and faster is not None
    assert "1.1 times as fast here as GGUF, by whole answers with drafts" in faster.words


@pytest.mark.parametrize("changed", ["torch", "the processor", "this program", "the weights"])
def test_it_is_measured_once_and_again_where_it_may_have_changed(
    db: Database, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    measuring = Measuring(10.0, 5.0)
    for _ in range(2):
        assert Formats(db, measuring).learn(QUIET, threading.Event())
    assert sorted(measuring.asked) == sorted([FILE, FOLDER])
    assert Formats(db).faster is not None
    if changed == "torch":
        known = demonstration.version
        monkeypatch.setattr(
            demonstration, "version", lambda n: "99.0" if n == changed else known(n)
        )
    elif changed == "the processor":
        monkeypatch.setattr(demonstration, "processor", lambda: "another one")
    elif changed == "this program":
        monkeypatch.setattr(demonstration, "__version__", "99.0")
    else:
        monkeypatch.setattr(Gguf, "weight_files", lambda self, path: [Path(__file__)])
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

    def disturbed(source: str, runtime: Runtime, wanted: Callable[[], bool]) -> Speed | None:
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
    assert Formats(db).first() == FILE and known.store.chosen(demonstration.CHOICE) == ""


@pytest.mark.parametrize(
    ("runtime", "first"),
    [
        (Runtime(device="cpu"), FOLDER),
        (Runtime(gpu_layers=0), FILE),
        (Runtime(context_length=512, threads=1), FILE),
    ],
)
def test_settings_of_one_format_ask_for_it(db: Database, runtime: Runtime, first: str) -> None:
    assert Formats(db).first(runtime) == first


# in the program


def loaders(broken: Sequence[str] = ()) -> ModelLoaders:
    """Toys in the place of all models."""

    def load(source: str, runtime: Runtime) -> Backend:
        if source in broken:
            raise ModelError(f"{source} is broken.")
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


def opened(db: Database, *broken: str) -> Session:
    return Session(Local(loaders=loaders(broken)), db, loaders=loaders(broken))


def test_a_program_starts_with_it_and_keeps_what_is_named(db: Database) -> None:
    for asked, wanted in (("", FILE), (FOLDER, FOLDER)):
        session = opened(db)
        list(session.models.start(asked))
        assert session.models.source == wanted and session.models.demonstration
        assert session.current.info.name == "tiny-chat"


def test_who_loads_the_other_one_gets_it_from_then_on(db: Database) -> None:
    session = opened(db)
    list(session.models.start(""))
    list(session.models.load(FOLDER))
    assert session.models.source == FOLDER and Formats(db).first() == FOLDER
    list(session.models.load(FILE))
    assert Formats(db).first() == FILE


def test_where_one_cannot_be_read_the_other_is_and_that_is_told(db: Database) -> None:
    session = opened(db, FILE)
    list(session.models.start(""))
    assert session.models.source == FOLDER
    (notice,) = session.models.notices
    assert "does not run here as GGUF. It runs as safetensors." in notice and "broken" in notice
    assert Formats(db).first() == FOLDER, "it is not tried again at the next start"
    named = opened(db, FILE)
    with pytest.raises(ModelError, match="is broken"):
        list(named.models.start(FILE))
    assert not named.models.is_loaded, "what is named is not replaced"


def test_where_nothing_can_be_read_that_is_told(db: Database) -> None:
    session = opened(db, FILE, FOLDER)
    with pytest.raises(ModelError, match="target is broken"):
        list(session.models.start(""))


def test_other_settings_are_not_held_against_a_format(db: Database) -> None:
    session = opened(db, FILE)
    list(session.models.start("", Runtime(cache_type="q8_0", flash_attention="off")))
    assert session.models.source == FOLDER and Formats(db).first() == FILE


@pytest.mark.parametrize("when", ["while it loads", "again and again"])
def test_one_that_ends_the_process_is_replaced(db: Database, when: str) -> None:
    made = loaders()
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
    assert session.models.source == FOLDER and session.models.is_loaded
    told = " ".join(session.notices.take(OWNER))
    assert "tiny-chat does not run here as GGUF. It runs as safetensors." in told
    assert Formats(db).first() == FOLDER


# the trial


def test_both_speeds_of_whole_answers_are_measured() -> None:
    class Counted(Local):
        asked: list[Request] = []

        def generate(self, request: Request) -> Stream[Event]:
            self.asked.append(request)
            return super().generate(request)

    found = demonstration.of_answers(Counted(backend=ToyBackend()), demonstration.QUESTIONS)
    assert found.plain > 0 and found.drafted > 0
    methods = [request.method.name for request in Counted.asked]
    assert methods.count("plain") == methods.count("auto") == len(demonstration.QUESTIONS) + 1
    assert all(request.measured for request in Counted.asked), "none learns from another"


def test_a_trial_that_crashes_or_never_ends_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = ["python3", "-c", "import os; print(5.0, 5.0); os.abort()"]
    monkeypatch.setattr(demonstration, "command", lambda *words: crash)
    assert demonstration.trial("m", Runtime(), lambda: True) == demonstration.FAILED
    monkeypatch.setattr(demonstration, "SECONDS", 0.1)
    monkeypatch.setattr(demonstration, "command", lambda *words: ["sleep", "60"])
    assert demonstration.trial("m", Runtime(), lambda: True) == demonstration.FAILED


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
    (said,) = session.races.run(OWNER)
    assert isinstance(said, NoGain)
    assert "checking one guess takes 2.9 times as long as computing a token" in said.why
    assert Traces(session.database, OWNER).history() == []
    assert isinstance([*session.races.run(OWNER, anyway=True)][-1], Race)
    session.costs.known = session.current.info, costs(n0=0.55, n1=0.74, n3=1.49)
    session.races.known.clear()
    assert isinstance([*session.races.run(OWNER)][-1], Race)


def test_what_the_last_race_said_counts_first(session: Session) -> None:
    *_, race = session.races.run(OWNER, anyway=True)
    assert isinstance(race, Race)
    (known,) = session.races.known
    for whole, gains in ((0.84, False), (1.9, True)):
        session.races.known[known] = replace(race, speedup=Speedup(whole, whole))
        assert (session.races.no_gain() == "") is gains


def test_what_was_measured_of_the_demonstration_model_counts(db: Database) -> None:
    session = opened(db)
    list(session.models.start(FILE))
    session.costs.known = None
    for speed, gains in ((Speed(500.0, 470.0), False), (Speed(500.0, 700.0), True)):
        SpeedStore(db).save(FILE, run_by(FILE), speed)
        assert (session.races.no_gain() == "") is gains
    SpeedStore(db).save(FILE, run_by(FILE), Speed(500.0, 470.0))
    assert "500 tokens/s plainly and 470 with guessing" in session.races.no_gain()


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
    assert [how.dtype for _, how in at_home.races.known] == ["float32"]
    at_home.model_swap.slot.wait()
    assert at_home.models.source == FILE, "the usual model is back"
    names = {each.name: each for each in at_home.models.candidates()}
    assert names["tiny-chat, padded to 0.5 B"].source == at_home.padded.source
    again = [*at_home.races.run(OWNER, padded=True)]
    assert isinstance(again[-1], Race)
    assert not any(isinstance(item, Making) for item in again), "it is there already"
    at_home.model_swap.slot.wait()
    asked = at_home.models.removal(at_home.padded.source)
    assert asked.deletes and "made again" in asked.question
    at_home.models.remove(at_home.padded.source)
    assert not at_home.padded.exists


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


def test_what_goes_wrong_while_it_is_made_is_told(
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
    words = {"disk": "on the disk, and 476.8 MiB", "memory": "of memory, and 476.8 MiB"}
    with pytest.raises(ModelError, match=words.get(short, "others share this app")):
        [*at_home.races.run(OWNER, padded=True)]
    assert not at_home.padded.exists


def test_its_size_is_that_of_the_demonstration_model_in_a_larger_shape() -> None:
    config = json.loads((Path(race.EMBEDDED) / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    shape = race.SHAPES[race.SIZE]
    assert shape.parameters(config["vocab_size"], config.get("head_dim", head)) == race.PARAMETERS
    assert config["tie_word_embeddings"] and PADDED.endswith(race.SIZE)
