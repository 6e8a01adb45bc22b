"""A database file with one wrong byte, wherever it is: the file is put aside with a clear message,
or the program starts and works."""

from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from app.service.preferences import Preferences
from engine.errors import StorageError
from engine.settings import Generation, Sampling
from storage import cleanup
from storage.api_keys import ApiKeys
from storage.database import Database
from storage.traces import Traces
from tests.support.inside import ask, on_toy, updates_of

OWNER = "local"
CHOSEN = Preferences(Generation(Sampling(0.8, seed=3), max_tokens=20), fresh_seed=False)
PAGE = 4096
HEADER = 100
TABLE_PAGES, INDEX_PAGES = (5, 13), (2, 10)
"""The first bytes of SQLite's pages of either kind."""
REGIONS = ("header", "schema", "index", "table")
EACH = 50


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with conversations, their runs, n-grams, a key, a preset."""
    path = tmp_path_factory.mktemp("sound") / "strata.db"
    with Database(path) as db:
        session = on_toy(db)
        for number in range(5):
            conversation = None
            for text in (f"message of {number} " * 20, "and then?", "go on"):
                conversation = session.chat.say(OWNER, conversation, text)
                for _ in updates_of(session, OWNER, conversation, CHOSEN):
                    pass
        ApiKeys(db).make("a program")
        ApiKeys(db).switch(True)
        session.engine.close()
    return path.read_bytes()


def positions(content: bytes, region: str) -> list[int]:
    """The bytes of a region of the file."""
    if region == "header":
        return list(range(HEADER))
    pages = range(0, len(content), PAGE)
    schema = [at for at in pages if b"CREATE " in content[at : at + PAGE]]
    if region == "schema":
        first = [content.index(b"CREATE ", at) for at in schema]
        ends = [content.rindex(b")", at, at + PAGE) for at in schema]
        return [at for low, high in zip(first, ends, strict=True) for at in range(low, high)]
    kinds = TABLE_PAGES if region == "table" else INDEX_PAGES
    chosen = [at for at in pages if at not in schema and content[at] in kinds]
    return [at for page in chosen for at in range(page, page + PAGE)]


def flipped(content: bytes, region: str, number: int) -> bytes:
    """The file with one wrong byte, always the same one."""
    random = Random(f"{region} {number}")
    places = positions(content, region)
    # Of the header every second byte, once the even and once the odd one; of all else any.
    at = places[2 * number + number % 2] if region == "header" else random.choice(places)
    wrong = bytearray(content)
    wrong[at] ^= random.choice([1 << bit for bit in range(8)] + [0xFF] * 4)
    return bytes(wrong)


def used(path: Path) -> list[str]:
    """What is told where the program starts with a file, and everything in it is looked at."""
    with Database(path) as db:
        cleanup.clean(db, path.parent)
        session = on_toy(db)
        store, traces = session.chat.conversations(OWNER), Traces(db, OWNER)
        for conversation in store.list():
            store.messages(conversation.id)
            store.export(conversation.id)
            traces.worths(conversation.id)
        for trace in traces.history():
            with suppress(StorageError):  # One run that is damaged says so.
                traces.load(trace.id)
        store.list("message")
        session.models.candidates()
        ApiKeys(db).list()
        made, last = ask(session, chosen=CHOSEN)
        assert last.text and store.messages(made)[1].content == last.text
        session.engine.close()
        return db.notices


def test_a_sound_file_is_left_alone(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    path.write_bytes(sound)
    assert used(path) == []


@pytest.mark.soak(stay=20)
@pytest.mark.grid(1)
@pytest.mark.parametrize("number", range(EACH))
@pytest.mark.parametrize("region", REGIONS)
def test_one_wrong_byte_is_reported_or_does_no_harm(
    sound: bytes, tmp_path: Path, region: str, number: int
) -> None:
    path = tmp_path / "strata.db"
    wrong = flipped(sound, region, number)
    path.write_bytes(wrong)
    notices = used(path)
    if notices:
        (notice,) = notices
        aside = Path(notice.split("kept as ")[1].split(",")[0])
        assert "was damaged (" in notice and aside.read_bytes() == wrong
        assert used(path) == [], "the next start is an ordinary one"
