"""Presets on the page: what a page begins with, what is told, and whose they are."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.service.preferences import Preferences
from app.service.presets import PRESETS
from app.service.session import Session
from app.web.tabs import presets, settings
from engine.backends.toy import ToyBackend
from engine.local import Local
from engine.settings import Generation, Sampling
from storage.database import Database
from tests.support.inside import local
from tests.support.thinking import Thinking
from tests.web.test_tabs import made

EVIL = "<img src=x onerror=alert(1)>"
MINE: Any = SimpleNamespace(username=None, session_hash="one")
GUEST: Any = SimpleNamespace(username="guest", session_hash="two")
CHOSEN = Preferences(Generation(Sampling(0.3), 40), "plain")


@pytest.fixture
def session(db: Database) -> Session:
    session = Session(Local(backend=ToyBackend()), db)
    local(session).use(replace(local(session).loaded, source="owner/name"))
    return session


@pytest.fixture
def handlers(session: Session) -> presets.Handlers:
    def build() -> presets.Handlers:
        with gr.Blocks():
            parts, start_from = presets.build(), presets.picker()
            return presets.Handlers(session, parts, start_from, settings.build(session))

    return made(build)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr("app.web.wiring.gr.Warning", found.append)
    monkeypatch.setattr("app.web.tabs.presets.gr.Info", found.append)
    return found


def values(handlers: presets.Handlers, system: str = "Be kind.") -> list[object]:
    return handlers.controls.show(system, CHOSEN)


def test_a_page_begins_with_the_preset_of_its_model_unless_a_conversation_is_open(
    handlers: presets.Handlers, session: Session, warned: list[str]
) -> None:
    made = session.presets.save("local", EVIL, "Be kind.", CHOSEN)
    parts, controls = handlers.parts, handlers.controls
    plain = handlers.follow(MINE, "", None, "", None, {})
    assert controls.system not in plain and plain[handlers.start_from]["value"] == ""
    assert "its makers&#x27; settings" in str(plain[parts.first])
    said = handlers.begin(MINE, made.id, {})[parts.first]
    assert "&lt;img" in str(said) and "<img" not in str(said)
    begun = handlers.follow(MINE, "", None, "", None, {})
    assert begun[controls.system] == "Be kind." and begun[parts.model] == "owner/name"
    assert begun[handlers.start_from]["value"] == made.id
    assert controls.system not in handlers.follow(MINE, "", None, "", "some id", {})
    again = handlers.follow(MINE, "owner/name", None, "", None, {})
    assert controls.system not in again, "what was set meanwhile stays"
    theirs = handlers.follow(GUEST, "", None, "", None, {"browser": "b"})
    assert controls.system not in theirs and warned == []
    assert len(theirs[parts.choice]["choices"]) == len(PRESETS)


def test_what_a_page_does_with_presets(
    handlers: presets.Handlers, session: Session, warned: list[str]
) -> None:
    parts, controls = handlers.parts, handlers.controls
    shown = handlers.save(MINE, EVIL, "", {}, *values(handlers))
    (mine,) = session.presets.list("local")[len(PRESETS) :]
    assert shown[parts.choice]["value"] == mine.id and shown[parts.name] == ""
    assert warned == ["The preset &lt;img src=x onerror=alert(1)&gt; is saved."]
    handlers.update(MINE, mine.id, {}, *values(handlers, "Be short."))
    assert handlers.use(MINE, mine.id, {})[controls.system] == "Be short."
    handlers.rename(MINE, mine.id, "short", "", {})
    handlers.copy(MINE, mine.id, "", {})
    gone = handlers.delete(MINE, mine.id, mine.id, {})
    assert gone[parts.undo]["visible"] and gone[handlers.start_from]["value"] == ""
    handlers.undo(MINE, str(gone[parts.deleted]), "", {})
    names = [preset.name for preset in session.presets.list("local")[len(PRESETS) :]]
    assert names == ["short 2", "short"]
    assert handlers.reset()[controls.system] == ""
    told = len(warned)
    for refused in (
        handlers.save(MINE, "short", "", {}, *values(handlers)),
        handlers.save(MINE, " ", "", {}, *values(handlers)),
        handlers.update(MINE, PRESETS[0].id, {}, *values(handlers)),
        handlers.rename(MINE, "gone", "x", "", {}),
        handlers.delete(GUEST, mine.id, "", {"browser": "b"}),
        handlers.use(GUEST, mine.id, {"browser": "b"}),
    ):
        assert refused.keys() == {parts.name}
    assert len(warned) == told + 6


def test_a_picked_preset_is_shown_at_once_where_no_conversation_is_open(
    handlers: presets.Handlers,
) -> None:
    first, system = PRESETS[0], handlers.controls.system
    assert handlers.pick(MINE, first.id, None, {})[system] == first.system_prompt
    assert system not in handlers.pick(MINE, first.id, "some id", {})
    assert system not in handlers.pick(MINE, "", None, {})


def test_thinking_is_a_setting_where_the_model_can(
    handlers: presets.Handlers, session: Session
) -> None:
    controls = handlers.controls
    thinking = controls.parts["thinking"]
    assert controls.follow(session, "hd", 256)[thinking]["visible"] is False
    for words, wanted in settings.THINKING.items():
        shown = controls.show("", replace(CHOSEN, generation=Generation(thinking=wanted)))
        assert words in shown
        assert controls.read(shown)[1].generation.thinking is wanted
    local(session).use(local(session).loaded_of(Thinking(), "m", session.models.runtime, print))
    assert controls.follow(session, "hd", 256)[thinking]["visible"] is True


def test_a_file_of_presets_is_read_again(
    handlers: presets.Handlers, session: Session, warned: list[str], tmp_path: Path
) -> None:
    made = session.presets.save("local", EVIL, "Be kind.", CHOSEN)
    file = json.loads(handlers.export(MINE, {}))
    assert (file["name"], file["type"]) == ("presets.json", "application/json")
    session.presets.delete("local", made.id)
    (tmp_path / file["name"]).write_text(file["text"], encoding="utf-8")
    handlers.import_(MINE, str(tmp_path / file["name"]), None, {})
    assert EVIL in [each.name for each in session.presets.list("local")]
