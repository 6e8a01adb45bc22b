"""Presets on the page: what a page begins with, what is told, and whose they are."""

from dataclasses import replace

import gradio as gr
import pytest

from app.service.preferences import PRESETS, Preferences
from app.service.session import Session
from app.web.tabs import settings
from engine.errors import StrataError
from engine.settings import AnswerFormat, Generation, Sampling
from tests.support.blocks import EVIL, tab_of
from tests.support.inside import local
from tests.support.thinking import Thinking

MINE, GUEST = "local", "guest:b"
CHOSEN = Preferences(Generation(Sampling(0.3), 40), "plain")


@pytest.fixture
def session(session: Session) -> Session:
    local(session).use(replace(local(session).loaded, source="owner/name"))
    return session


@pytest.fixture
def tab(session: Session) -> settings.Presets:
    return tab_of(settings.Presets, session)


@pytest.fixture
def warned(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All notices."""
    monkeypatch.setattr(gr, "Info", warned.append)
    return warned


def values(tab: settings.Presets, system: str = "Be kind.") -> list[object]:
    return tab.controls.show(system, CHOSEN)


def test_a_page_begins_with_the_preset_of_its_model_unless_a_conversation_is_open(
    tab: settings.Presets, session: Session, warned: list[str]
) -> None:
    made = session.presets.save("local", EVIL, "Be kind.", CHOSEN)
    controls = tab.controls
    plain = tab.follow(MINE, "", None, "", None, "")
    assert controls.system not in plain and plain[tab.start_from]["value"] == ""
    assert "its makers&#x27; settings" in str(plain[tab.first])
    shown = tab.begin(MINE, made.id)[tab.first]
    assert "&lt;img" in str(shown) and "<img" not in str(shown)
    begun = tab.follow(MINE, "", None, "", None, "")
    assert begun[controls.system] == "Be kind." and begun[tab.model] == "owner/name"
    assert begun[tab.start_from]["value"] == made.id
    assert controls.system not in tab.follow(MINE, "", None, "", "some id", "")
    again = tab.follow(MINE, "owner/name", None, "", None, "")
    assert controls.system not in again, "what was set meanwhile stays"
    theirs = tab.follow(GUEST, "", None, "", None, "")
    assert controls.system not in theirs and warned == []
    assert len(theirs[tab.choice]["choices"]) == len(PRESETS)


def test_a_page_that_is_reloaded_shows_what_it_showed(
    tab: settings.Presets, session: Session
) -> None:
    """With the same model; a page that opens later begins with the preset of its model."""
    controls = tab.controls
    tab.begin(MINE, session.presets.save(MINE, "first", "Be brief.", Preferences()).id)
    for kept in (
        controls.keep(MINE, None, *values(tab)),
        str(controls.shown("Be kind.", CHOSEN)[controls.kept]),
    ):
        back = tab.follow(MINE, "", None, "", None, kept)
        assert controls.read([back[part] for part in controls.inputs]) == ("Be kind.", CHOSEN)
        assert controls.system not in tab.follow(MINE, "", None, "", "some id", kept)
        stack = kept.replace('"plain"', '"hsd"')
        assert tab.follow(MINE, "", None, "", None, stack)[controls.parts["method"]] == "auto"
        for other in (kept.replace('{"model": "', '{"model": "x'), kept.replace("0.3", '"hot"')):
            assert tab.follow(MINE, "", None, "", None, other)[controls.system] == "Be brief."
    for nonsense in ("", "{", "[" * 9_999, "[]", '"text"', "{}", None):
        assert tab.follow(MINE, "", None, "", None, nonsense)[controls.system] == "Be brief."
    loaded_later = tab.follow(MINE, "another", None, "", None, kept)
    assert loaded_later[controls.system] == "Be brief."


def test_what_a_page_does_with_presets(
    tab: settings.Presets, session: Session, warned: list[str]
) -> None:
    controls = tab.controls
    shown = tab.save(MINE, EVIL, "", *values(tab))
    (mine,) = session.presets.list("local")[len(PRESETS) :]
    assert shown[tab.choice]["value"] == mine.id and shown[tab.name] == ""
    assert warned == ["The preset &lt;img src=x onerror=alert(1)&gt; is saved."]
    tab.update(MINE, mine.id, *values(tab, "Be short."))
    assert tab.use(MINE, mine.id)[controls.system] == "Be short."
    tab.rename(MINE, mine.id, "short", "")
    tab.copy(MINE, mine.id, "")
    gone = tab.delete(MINE, mine.id, mine.id)
    assert gone[tab.uses["undo"]]["visible"] and gone[tab.start_from]["value"] == ""
    tab.undo(MINE, str(gone[tab.deleted]), "")
    names = [preset.name for preset in session.presets.list("local")[len(PRESETS) :]]
    assert names == ["short 2", "short"]
    assert tab.reset()[controls.system] == ""
    values_ = values(tab)
    for act, *given in (
        (tab.save, MINE, "short", "", *values_),
        (tab.save, MINE, " ", "", *values_),
        (tab.update, MINE, PRESETS[0].id, *values_),
        (tab.rename, MINE, "gone", "x", ""),
        (tab.delete, GUEST, mine.id, ""),
        (tab.use, GUEST, mine.id),
    ):
        with pytest.raises(StrataError):
            act(*given)


def test_what_is_picked_for_new_conversations_changes_no_open_one(
    tab: settings.Presets, session: Session, warned: list[str]
) -> None:
    made = session.presets.save(MINE, "mine", "Be kind.", CHOSEN)
    assert tab.pick(MINE, made.id, None)[tab.controls.system] == "Be kind."
    session.presets.delete(MINE, made.id)
    for id, conversation in ((made.id, "some id"), (made.id, None), ("", None)):
        assert tab.pick(MINE, id, conversation).keys() == {tab.ready}, "the composer waits for it"
    assert len(warned) == 1 and "no preset" in warned[0]


def test_thinking_is_a_setting_where_the_model_can(tab: settings.Presets, session: Session) -> None:
    controls = tab.controls
    thinking = controls.parts["thinking"]
    assert controls.follow("hd", 256)[thinking]["visible"] is False
    for text, expected in settings.THINKING.items():
        shown = controls.show("", replace(CHOSEN, generation=Generation(thinking=expected)))
        assert text in shown
        assert controls.read(shown)[1].generation.thinking is expected
    effort = Generation(thinking="low")
    assert "Model default" in controls.show("", replace(CHOSEN, generation=effort))
    local(session).use(local(session).loaded_of(Thinking(), "m", session.models.runtime, print))
    assert controls.follow("hd", 256)[thinking]["visible"] is True


@pytest.mark.parametrize(
    ("kind", "text", "stored"),
    [
        ("", "", None),
        ("object", "", AnswerFormat("json_schema", '{"type": "object"}')),
        ("json_schema", '{"type": "array"}', AnswerFormat("json_schema", '{"type": "array"}')),
        ("choice", "yes\nnot sure", AnswerFormat("choice", '["yes", "not sure"]')),
        ("regex", "[a-z]+", AnswerFormat("regex", "[a-z]+")),
        ("gbnf", 'root ::= "a"', AnswerFormat("gbnf", 'root ::= "a"')),
    ],
)
def test_a_format_is_a_setting_that_a_preset_keeps(
    tab: settings.Presets, session: Session, kind: str, text: str, stored: AnswerFormat | None
) -> None:
    controls = tab.controls
    shown = controls.show("", replace(CHOSEN, generation=Generation(format=stored)))
    named = dict(zip(controls.parts, shown[1:], strict=True))
    assert (named["format"], named["format_text"]) == (kind, text)
    assert controls.read(shown)[1].generation.format == stored
    assert settings.asked_for(kind)["visible"] is (kind not in ("", "object"))
    tab.save(MINE, "an invoice", "", *shown)
    used = tab.use(MINE, session.presets.list(MINE)[-1].id)
    assert [used[controls.parts[name]] for name in ("format", "format_text")] == [kind, text]


def test_a_format_that_is_not_written_yet_is_none(tab: settings.Presets) -> None:
    shown = tab.controls.show("", CHOSEN)
    at = 1 + [*tab.controls.parts].index("format")
    shown[at] = "json_schema"
    assert tab.controls.read(shown)[1].generation.format is None
