"""Keys of other programs: shown once, stored as a digest, named, used, taken back."""

import hashlib
import hmac
from pathlib import Path

import pytest

from engine.errors import SettingError
from engine.types import CalibrationRow
from storage import api_keys
from storage.api_keys import LONGEST_NAME, MOST_KEYS, ApiKeys
from storage.database import Database
from storage.drafting import CalibrationStore
from storage.ngrams import ModelNgrams


@pytest.fixture
def keys(db: Database) -> ApiKeys:
    return ApiKeys(db)


def test_a_key_is_shown_once_and_only_its_digest_is_stored(tmp_path: Path) -> None:
    with Database(tmp_path / "strata.db") as db:
        keys = ApiKeys(db)
        key, secret = keys.make("  Open\n WebUI ")
        assert key.name == "Open WebUI" and secret.startswith("sk-strata-")
        assert len(secret.removeprefix("sk-strata-")) == 43, "256 random bits"
        made = [(key, secret), *(keys.make(f"key {number}") for number in range(8))]
        assert len({secret for _, secret in made}) == len({key.id for key, _ in made}) == 9
        assert [keys.find(secret) for _, secret in made] == [key for key, _ in made] == keys.list()
        for other in ("", "sk-strata-", "x", "\ud800", "sk-strata-\0", "ä" * 999):
            assert keys.find(other) is None
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert secret.encode() not in stored
    assert hashlib.sha256(secret.encode()).digest() in stored


def test_every_digest_is_compared_in_constant_time(
    keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, also behind the one that fits."""
    made, compared = [keys.make(name)[1] for name in "abc"], list[bytes]()
    real = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return real(left, right)

    monkeypatch.setattr("storage.api_keys.hmac.compare_digest", compare)
    assert keys.find(made[0]) is not None and len(compared) == 3


def test_names_are_distinguished_and_numbers_bounded(
    keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.make("one")
    for name in ("", " \n", "x" * (LONGEST_NAME + 1)):
        with pytest.raises(SettingError, match="Give it a name"):
            keys.make(name)
    for name in ("one", "ONE"):
        with pytest.raises(SettingError, match="already"):
            keys.make(name)
    monkeypatch.setattr(api_keys, "MOST_KEYS", 1)
    with pytest.raises(SettingError, match="Revoke"):
        keys.make("two")
    assert MOST_KEYS > 1 and len(keys.list()) == 1


def test_a_key_that_was_revoked_opens_nothing(keys: ApiKeys) -> None:
    (one, first), (two, second) = keys.make("one"), keys.make("two")
    assert keys.revoke(one.id) == one
    assert keys.find(first) is None and keys.find(second) == two and keys.list() == [two]
    with pytest.raises(SettingError, match="There is no key"):
        keys.revoke(one.id)
    assert keys.make("one")[0].id != one.id


def test_what_a_key_taught_goes_with_it(keys: ApiKeys, db: Database) -> None:
    (one, _), (two, _) = keys.make("one"), keys.make("two")
    rows = [CalibrationRow("context", 1, 1, 1.0, 1.0)]
    for owner in (one.owner, two.owner, "local"):
        ModelNgrams(db, owner, "model").learn([(1, 2), (2, 3)])
        CalibrationStore(db, owner, "model").save(rows)
    keys.revoke(one.id)
    left = {
        owner: (ModelNgrams(db, owner, "model").rows(), CalibrationStore(db, owner, "model").load())
        for owner in (one.owner, two.owner, "local")
    }
    assert left == {one.owner: (0, []), two.owner: (2, rows), "local": (2, rows)}
    assert (db.wipes(one.owner), db.wipes(two.owner)) == (1, 0), "nor does an answer bring it back"


def test_its_last_use_is_noted_once_a_minute(
    keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("storage.api_keys.time.time", lambda: now[0])
    key, secret = keys.make("one")
    for at, noted in ((1000.0, 1000.0), (1059.0, 1000.0), (1060.0, 1060.0)):
        now[0] = at
        found = keys.find(secret)
        assert found is not None
        keys.use(found)
        assert keys.list()[0].used == noted
    assert key.used is None


def test_the_switch_is_off_until_it_is_chosen_and_remembered(tmp_path: Path) -> None:
    path = tmp_path / "strata.db"
    for chosen in (None, True, False, True):
        with Database(path) as db:
            if chosen is not None:
                ApiKeys(db).switch(chosen)
        with Database(path) as db:
            assert ApiKeys(db).on is bool(chosen)


def test_damaged_rows_are_no_keys_of_anybody(keys: ApiKeys, db: Database) -> None:
    with db.write() as handle:
        handle.execute("INSERT INTO api_keys VALUES ('a', 'b', 'text', 'x', 'y')")
        handle.execute("INSERT INTO switches VALUES ('api', 'yes')")
    assert keys.find("text") is None and not keys.on
    assert [(key.name, key.created, key.used) for key in keys.list()] == [("b", 0.0, None)]
    assert keys.revoke("a").id == "a"
