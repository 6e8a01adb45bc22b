"""Killed at any moment: the database is sound, what was shown a second before is stored, and an
answer that was cut goes on to be the whole one.

A child answers messages with a model that is slow, now and then stalls, and takes long to learn; it
writes down what a page would have been sent, and when. It is killed without warning, and what it
wrote down is compared with what it stored. To try more:
`python -m tests.processes.test_kill --moments 500`.
"""

import argparse
import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from app.service.preferences import Preferences
from app.service.session import Session
from engine.drafting.tiers import ModelTier
from engine.local import Local
from engine.methods import METHODS
from engine.settings import Generation, Sampling
from storage import cleanup
from storage.conversations import StoredMessage
from storage.database import Database
from storage.drafting import DraftingStore
from storage.traces import Traces
from tests.support.inside import updates_of
from tests.support.toy import ToyBackend

OWNER = "local"
MOMENTS, AT_ONCE = 50, 25
LATEST = 4.5
"""Seconds after its first message at which a child is killed at the latest."""
LOST_SECONDS = 1.0
SLACK = 0.5
"""A busy machine may leave a thread waiting for its turn."""
STEP, STALL, LEARNING = 0.04, 1.6, 1.3
TOKENS = 24
"""Of each answer, at most."""
METHODS_OF = multiprocessing.get_all_start_methods()
CONTEXT = multiprocessing.get_context("forkserver" if "forkserver" in METHODS_OF else "spawn")


def chosen(seed: int, tokens: int) -> Preferences:
    generation = Generation(Sampling(temperature=0.8, seed=seed), max_tokens=tokens)
    return Preferences(generation, "hd", METHODS["hd"].drafting, fresh_seed=False)


def answers(session: Session, seed: int) -> Iterator[tuple[int, str]]:
    """The texts that a page is sent, one conversation of endless messages; each with its number.

    The text of message n itself comes as answer -1 - n, once it is stored.
    """
    conversation, number = None, 0
    while True:
        text = f"Message {number} of {seed}."
        conversation = session.chat.say(OWNER, conversation, text)
        yield -1 - number, text
        for update in updates_of(session, OWNER, conversation, chosen(seed, TOKENS)):
            yield number, update.text
        number += 1


class Slow(ToyBackend):
    """Takes its time over each forward, and much of it over some."""

    def score(self, *arguments: Any, **named: Any) -> Any:
        time.sleep(STALL if self.forwards % 30 == 12 else STEP)
        return super().score(*arguments, **named)


def child(folder: str, seed: int) -> None:
    """Answer until killed."""
    log = os.open(Path(folder, "shown"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(number: int | str, text: str) -> None:
        os.write(log, json.dumps([time.monotonic(), number, text]).encode() + b"\n")

    learn = ModelTier.finish

    def learn_slowly(*arguments: Any) -> None:
        note("learning", "")
        time.sleep(LEARNING)
        learn(*arguments)
        note("learned", "")

    ModelTier.finish = learn_slowly  # type: ignore[method-assign]
    db = Database(Path(folder, "strata.db"))
    session = Session(Local(backend=Slow(), store=DraftingStore(db)), db)
    for number, text in answers(session, seed):
        note(number, text)


@cache
def truth(seed: int, count: int) -> tuple[str, ...]:
    """The whole texts of the first answers."""
    texts: dict[int, str] = {}
    for number, text in answers(Session(Local(backend=ToyBackend()), Database()), seed):
        if number >= count:
            return tuple(texts[n] for n in range(count))
        texts[number] = text
    raise AssertionError("the messages never end")


@dataclass(frozen=True, slots=True)
class Killed:
    """A child that was killed: where its files are, and when it happened."""

    folder: Path
    seed: int
    moment: float

    def shown(self) -> list[tuple[float, Any, str]]:
        """What it wrote down; the last line may be cut."""
        lines = (self.folder / "shown").read_bytes().split(b"\n")[:-1]
        return [tuple(json.loads(line)) for line in lines]


def kill(folder: Path, seeds: Sequence[int]) -> list[Killed]:
    """Start a child for each seed and kill each at a moment of its own."""
    children: list[tuple[Any, Path, int]] = []
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir()
        process = CONTEXT.Process(target=child, args=[str(place), seed])
        process.start()
        children.append((process, place, seed))
    due = {seed: random.Random(seed).uniform(0.05, LATEST) for seed in seeds}
    killed: list[Killed] = []
    while children:
        time.sleep(0.005)
        for entry in list(children):
            process, place, seed = entry
            log = place / "shown"
            assert process.is_alive(), f"the child {seed} ended by itself"
            if not log.exists() or not log.stat().st_size:
                continue
            if time.monotonic() > began(log) + due[seed]:
                killed.append(Killed(place, seed, time.monotonic()))
                process.kill()
                process.join()
                process.close()
                children.remove(entry)
    return killed


def began(log: Path) -> float:
    """When the first message was stored."""
    with log.open("rb") as lines:
        return float(json.loads(lines.readline())[0])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a child was doing when it was killed, and how old the oldest text is that was lost."""

    doing: str
    lost_seconds: float
    problems: tuple[str, ...]
    cut: bool


def outcome(killed: Killed) -> Outcome:
    """Compare what was shown with what is there after a new start."""
    shown = killed.shown()
    with Database(killed.folder / "strata.db") as db:
        problems = list(db.notices)
        cleanup.clean(db, killed.folder)
        for check in ("integrity_check", "foreign_key_check"):
            found = db.execute_read(f"PRAGMA {check}")
            problems += [str(row) for row in found if row != ("ok",)]
        session = Session(Local(backend=ToyBackend(), store=DraftingStore(db)), db)
        store = session.chat.conversations(OWNER)
        stored = [message for item in store.list() for message in store.messages(item.id)]
        cut = bool(stored) and is_cut(session, stored[-1])
        if cut:
            problems += wrong(gone_on(session, stored, killed.seed), killed.seed, cut=False)
    said = {n: text for _, n, text in shown if isinstance(n, int) and n < 0}
    texts = {2 * (-1 - number): text for number, text in said.items()}
    problems += [
        f"the message {text!r} is not stored"
        for at, text in texts.items()
        if at >= len(stored) or stored[at].content != text
    ]
    problems += wrong(stored, killed.seed)
    lost = [
        killed.moment - at
        for at, number, text in shown
        if isinstance(number, int) and number >= 0 and not content(stored, number).startswith(text)
    ]
    answering = [number for _, number, _ in shown][-1]
    doing = "learning" if answering == "learning" else "answering"
    return Outcome(doing, max(lost, default=0.0), tuple(problems), cut)


def is_cut(session: Session, last: StoredMessage) -> bool:
    """Whether a message is an answer that did not end."""
    run = last.run_id and Traces(session.database, OWNER).load(last.run_id)
    return bool(run) and run.finish is None


def gone_on(session: Session, stored: Sequence[StoredMessage], seed: int) -> list[StoredMessage]:
    """The messages once the last answer went on."""
    last = stored[-1]
    left = chosen(seed, TOKENS - len(last.pieces or ()))
    session.chat.continue_answer(OWNER, last.conversation_id)
    for _ in session.answering.answer(OWNER, last.conversation_id, left):
        pass
    return list(session.chat.conversations(OWNER).messages(last.conversation_id))


def content(stored: Sequence[StoredMessage], number: int) -> str:
    at = 2 * number + 1
    return stored[at].content if at < len(stored) else ""


def wrong(stored: Sequence[StoredMessage], seed: int, cut: bool = True) -> list[str]:
    """Answers that are not the beginning of the true one, or whose tokens are not their text. Only
    the last one may be `cut`."""
    count = len(stored) // 2
    problems = []
    for number, whole in enumerate(truth(seed, count)):
        answer = stored[2 * number + 1]
        pieces = "".join(piece.text for piece in answer.pieces or ())
        complete = not cut or number + 1 < (len(stored) + 1) // 2
        if answer.role != "assistant" or not answer.content or pieces != answer.content:
            problems.append(f"answer {number} is stored as {answer.content!r} and {pieces!r}")
        elif not whole.startswith(answer.content) or (complete and answer.content != whole):
            problems.append(f"answer {number} is {answer.content!r}, and was to be {whole!r}")
    return problems


def outcomes(folder: Path, moments: int) -> list[Outcome]:
    CONTEXT.set_forkserver_preload(["app.service.session"])
    found = []
    for first in range(0, moments, AT_ONCE):
        seeds = range(first, min(first + AT_ONCE, moments))
        found += [outcome(killed) for killed in kill(folder, seeds)]
    return found


@pytest.mark.soak
def test_fifty_kills_lose_a_second_at_most(tmp_path: Path) -> None:
    found = outcomes(tmp_path, MOMENTS)
    assert [problem for each in found for problem in each.problems] == []
    assert Counter(each.doing for each in found).keys() == {"answering", "learning"}
    assert max(each.lost_seconds for each in found) <= LOST_SECONDS + SLACK
    assert sum(each.cut for each in found) > MOMENTS // 10


def writer(path: str, begun: Any) -> None:
    """Another process of the program, in the middle of a write."""
    with Database(Path(path), made=True).write() as handle:
        handle.execute("INSERT INTO owners (name) VALUES ('cut')")
        begun.set()
        time.sleep(LATEST)


@pytest.mark.soak
def test_a_process_that_is_killed_while_it_writes_holds_up_no_other(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        begun = CONTEXT.Event()
        process = CONTEXT.Process(target=writer, args=[str(db.path), begun])
        process.start()
        assert begun.wait(20)
        process.kill()
        process.join()
        with db.at_once(), db.write() as handle:
            handle.execute("INSERT INTO owners (name) VALUES ('whole')")
        assert db.execute_read("SELECT name FROM owners") == [("whole",)]
        assert db.execute_read("PRAGMA integrity_check") == [("ok",)]


def main() -> None:
    """Kill as often as asked, and print what was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=MOMENTS)
    with TemporaryDirectory() as folder:
        found = outcomes(Path(folder), parser.parse_args().moments)
    doing = Counter(each.doing for each in found)
    problems = [problem for each in found for problem in each.problems]
    lost = sorted(each.lost_seconds for each in found)
    cut = sum(each.cut for each in found)
    print(f"{len(found)} kills: {dict(doing)}; problems: {problems or 'none'}")
    print(f"answers that were cut, and went on to be whole: {cut}")
    print(f"oldest text lost: median {lost[len(lost) // 2]:.2f} s, most {lost[-1]:.2f} s")


if __name__ == "__main__":
    main()
