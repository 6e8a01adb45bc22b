"""What was deleted goes after an hour, though nobody does anything."""

import threading
from collections.abc import Callable

import pytest

from app.service.session import Session
from engine.backends.toy import ToyBackend
from engine.local import Local
from storage import deletions
from storage.database import Database
from tests.support.inside import OWNER


class Timers(list[tuple[float, Callable[[], None]]]):
    """Timers that never run by themselves: their seconds, and what they would do."""

    def make(self, seconds: float, work: Callable[[], None]) -> threading.Thread:
        self.append((seconds, work))
        return threading.Thread(target=lambda: None)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    found = Timers()
    monkeypatch.setattr("app.service.trash.threading.Timer", found.make)
    return found


def test_one_timer_waits_for_the_oldest_deletion_and_then_for_the_next(
    db: Database, timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    session = Session(Local(backend=ToyBackend()), db)
    chat = session.chat
    first, second, third = (chat.conversations(OWNER).create().id for _ in range(3))
    chat.delete(OWNER, first)
    now[0] += 600
    token = chat.delete(OWNER, second)
    assert [seconds for seconds, _ in timers] == [deletions.SECONDS + 1]
    now[0] = 1000 + deletions.SECONDS + 1
    timers.pop()[1]()
    assert [place for (place,) in db.execute_read("SELECT place FROM deletions")] == [second]
    assert [seconds for seconds, _ in timers] == [600.0]
    assert chat.undo(OWNER, token) == second
    timers.pop()[1]()
    assert timers == [] and len(chat.conversations(OWNER).list()) == 2
    chat.delete(OWNER, third)
    assert len(timers) == 1
    db.close()
    timers.pop()[1]()  # The program is closing: the next start looks.
