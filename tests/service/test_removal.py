"""A model leaves the list, or the disk where it lies in a folder of ours; what is in use stays."""

from pathlib import Path

import pytest

from app.arguments import EMBEDDED
from app.service.session import Session
from engine.errors import ModelError
from storage.database import Database
from tests.support.shop import Shop, load_model


@pytest.fixture
def session(db: Database, shop: Shop) -> Session:
    return shop.session(db)


def listed(session: Session) -> list[str]:
    return [candidate.source for candidate in session.models.candidates()]


def test_what_is_named_is_checked_before_it_is_listed(session: Session, shop: Shop) -> None:
    (shop.root / "empty").mkdir()
    for wrong in ("hub/gone", str(shop.root / "gone.gguf"), " ", str(shop.root / "empty")):
        with pytest.raises(ModelError):
            session.models.add(wrong)
    assert listed(session)[2:] == [shop.source("one")]
    session.models.add("hub/new")
    (new,) = [c for c in session.models.candidates() if c.source == "hub/new"]
    assert (new.bytes, new.download) == (0, 3072)
    load_model(session, "hub/new")
    assert listed(session).count("hub/new") == 1


def test_a_model_elsewhere_leaves_the_list_and_its_file_stays(session: Session, shop: Shop) -> None:
    two = shop.source("two")
    load_model(session, two)
    load_model(session, shop.source("one"))
    assert "Its files stay" in session.models.removal(two).question
    assert "off the list" in session.models.remove(two).done
    assert two not in listed(session) and Path(two).exists()
    session.models.add("hub/new")
    session.models.remove("hub/new")
    assert "hub/new" not in listed(session)


def test_a_model_in_a_folder_of_ours_is_deleted_and_what_that_frees_is_reported(
    session: Session, shop: Shop
) -> None:
    two = session.models.add(shop.source("two"))
    shop.ours.add(two)
    session.stacks.offer(two)
    planned = session.models.removal(two)
    assert planned.deletes and planned.bytes == 5 and "That frees 5 B" in planned.question
    assert "4.0 KiB are free again" in session.models.remove(two).done
    assert two not in listed(session) and two not in session.stacks.offered
    assert not Path(two).exists()


def test_a_folder_that_was_added_as_a_whole_leaves_as_a_whole(session: Session, shop: Shop) -> None:
    folder = shop.root / "more"
    folder.mkdir()
    for name in ("four", "five"):
        (folder / f"{name}.gguf").write_text("bytes")
    session.models.add(str(folder))
    four = str(folder / "four.gguf")
    assert "all 2 models" in session.models.removal(four).question
    assert str(folder) in session.models.remove(four).done
    assert not {four, str(folder / "five.gguf")} & {*listed(session)}
    assert (folder / "four.gguf").exists() and session.models.store.folders() == []


def test_what_is_in_use_or_came_along_or_is_not_listed_stays(
    session: Session, shop: Shop, tmp_path: Path
) -> None:
    session.stacks.load([shop.source("draft")])
    session.models.add(shop.source("draft"))
    linked = tmp_path / "linked.gguf"
    linked.symlink_to(shop.source("one"))
    session.models.add(str(linked))
    shop.ours |= {shop.source(name) for name in ("one", "draft", "three")} | {str(linked)}
    for source, expected in (
        (shop.source("one"), "one is loaded"),
        (str(linked), "is loaded"),
        (shop.source("draft"), "as a draft model"),
        (str(EMBEDDED), "comes with the program"),
        (shop.source("three"), "not on the list"),
        ("/etc/passwd", "not on the list"),
    ):
        with pytest.raises(ModelError, match=expected):
            session.models.remove(source)
    assert Path(shop.source("three")).exists() and Path(shop.source("one")).exists()


def test_nothing_is_removed_while_a_model_is_loaded(session: Session, shop: Shop) -> None:
    two = session.models.add(shop.source("two"))
    calls: list[str] = []

    def remove() -> None:
        with pytest.raises(ModelError, match="while a model is being loaded"):
            session.models.remove(two)
        calls.append("asked")

    shop.between = remove
    load_model(session, "hub/three")
    assert calls and Path(two).exists()


def test_the_folder_of_models_in_the_data_directory_is_listed(shop: Shop, tmp_path: Path) -> None:
    ours = tmp_path / "data" / "models"
    ours.mkdir(parents=True)
    (ours / "mine.gguf").write_text("bytes")
    with Database(tmp_path / "data" / "strata.db") as db:
        session = shop.session(db)
        assert str(ours / "mine.gguf") in listed(session)
        assert session.models.kept == [ours]
        shop.ours.add(str(ours / "mine.gguf"))
        session.models.remove(str(ours / "mine.gguf"))
        assert str(ours / "mine.gguf") not in listed(session)
