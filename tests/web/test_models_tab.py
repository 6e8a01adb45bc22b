"""The Models tab without a browser: its words, and what its buttons change."""

import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app.service import catalogue
from app.service.catalogue import Entry, Layers, Model
from app.service.formats import Faster, Formats
from app.service.models import Candidate, Progress
from app.service.session import Session
from app.web import models_html
from app.web.tabs import loading, models
from engine.backends.toy import ToyBackend
from engine.errors import ModelError, StorageError
from engine.heads.base import HeadInfo
from engine.loaded import NO_MODEL_INFO
from engine.models.memory import Need
from engine.models.outlook import Outlook
from engine.settings import Runtime
from storage.database import Database
from tests.conftest import EMBEDDED
from tests.service.test_models import Shop, quick  # noqa: F401
from tests.support.inside import local
from tests.web.test_tabs import made

EVIL = "<img src=x onerror=alert(1)>{{constructor.constructor('alert(2)')()}}"
GIB = 2**30


# words


def test_the_facts_of_a_model() -> None:
    info = ToyBackend(name=EVIL).info
    info = replace(info, parameters=6_300_000, memory_bytes=3 * GIB, threads=2, note="Because <b>.")
    words = models_html.loaded(info, f"/models/{EVIL}")
    assert "6.3 M" in words and "3.0 GiB" in words and "2 threads" in words
    assert "<img" not in words and "<b>" not in words and words.count("&lt;img") == 2
    assert "No model" in models_html.loaded(NO_MODEL_INFO, "") and not models_html.still(
        NO_MODEL_INFO, ""
    )


def test_what_drafts_for_the_loaded_model_is_told_never_nothing() -> None:
    head = HeadInfo("MTP", 4, branches=False)
    info = replace(ToyBackend().info, leaves=1, depth=8, head=head)
    words = models_html.loaded(info, "/m/a.gguf", drafts=[EVIL])
    assert "chains of up to 8 tokens" in words and "MTP, up to 4 tokens ahead" in words
    assert "&lt;img" in words and "<img" not in words
    plain = models_html.loaded(replace(info, can_tree=False), "/m/a.gguf")
    assert plain.count("decodes plainly") == 3


CHEAP = {0: 1.0, 1: 1.1, 3: 1.3, 7: 2.0, 15: 3.4}
DEAR = {0: 1.0, 1: 2.0, 3: 3.6, 7: 6.6, 15: 8.1}


def test_what_verifying_takes_is_told_with_what_it_allows() -> None:
    info = replace(ToyBackend().info, kind="llama.cpp", dtype="Q4_K_M", device="cpu")
    cheap = models_html.verifying(info, CHEAP)
    assert "3, 7 or 15 drafted tokens takes 1.3, 2.0 or 3.4 times as long here" in cheap
    assert "80 % are accepted make it at most 2.3 times as fast." in cheap and "Q4_0" not in cheap
    dear = models_html.verifying(info, DEAR)
    assert "make it no faster" in dear
    assert "Q4_0 and IQ4_NL files of the same model verify faster than Q4_K_M" in dear
    for other in (
        replace(info, dtype="IQ4_NL"),
        replace(info, dtype="F16"),
        replace(info, device="gpu"),
        replace(info, kind="transformers", dtype="bfloat16"),
    ):
        assert "verify faster" not in models_html.verifying(other, DEAR)


def test_what_verifying_takes_is_that_of_drafts_which_can_be() -> None:
    info = replace(ToyBackend().info, leaves=1, depth=4)
    words = models_html.verifying(info, CHEAP)
    assert "Verifying 3 drafted tokens takes 1.3 times" in words
    assert models_html.verifying(replace(info, can_tree=False), CHEAP) == ""
    assert models_html.verifying(info, {0: 1.0, 1: 1.1}) == "", "nothing that could be told"


@pytest.mark.parametrize(
    ("kind", "dtype", "told"),
    [
        ("transformers", "bfloat16", True),
        ("transformers", "float16", True),
        ("transformers", "float32", False),
        ("llama.cpp", "BF16", False),
    ],
)
def test_what_coarser_numbers_mean_is_told(kind: str, dtype: str, told: bool) -> None:
    words = models_html.precision(replace(ToyBackend().info, kind=kind, dtype=dtype))
    assert ("tied to within its rounding" in words and dtype in words) is told


def test_candidates_are_told_with_kind_and_size() -> None:
    here = Candidate("/m/a.gguf", "a", "llama.cpp", 3 * GIB, True)
    assert models_html.choice(here) == ("a · llama.cpp · 3.0 GiB · loaded", "/m/a.gguf")
    large = Candidate("owner/c", "c", "transformers", 0, False, download=3 * GIB)
    assert models_html.choice(large)[0] == "c · transformers · 3.0 GiB to download"
    there = Candidate("owner/b", "b", "transformers", 0, False)
    assert models_html.choice(there)[0] == "b · transformers · to be downloaded"


def test_a_need_that_fits_and_one_that_does_not() -> None:
    fits = models_html.need(EVIL, Need(10**9, 2 * GIB, GIB), 12 * GIB, "cpu")
    assert "3.0 GiB of 12.0 GiB free on cpu" in fits and "differs" not in fits
    assert "width:16.67%" in fits and "width:8.33%" in fits and "over" not in fits
    assert "<img" not in fits and "&lt;img" in fits
    over = models_html.need("m", Need(10**9, 12 * GIB, 4 * GIB), 8 * GIB, "cuda:0")
    assert "8.0 GiB are missing" in over and 'class="need over"' in over
    assert "width:75.00%" in over and "left:50.00%" in over
    assert models_html.bar((0, 0), 0).count("<i") == 0


def test_what_will_draft_is_told_before_a_model_is_loaded() -> None:
    need = Need(10**9, 2 * GIB, GIB, Outlook(True, f"in {EVIL}, beside it"))
    words = models_html.need("m", need, 12 * GIB, "cpu")
    assert "What will draft for it" in words and "chains" in words
    assert "&lt;img" in words and "<img" not in words
    assert models_html.NO_HEAD in models_html.outlook(Outlook())
    assert "GGUF files bring it" in models_html.outlook(Outlook(problem="its GGUF files bring it"))
    assert "What will" not in models_html.need("m", Need(1, 1, 1), GIB, "cpu")


def test_paths_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert models_html.where(str(EMBEDDED)) == "assets/models/tiny-chat/target"
    assert models_html.where("/home/someone/models/a.gguf") == "~/models/a.gguf"
    for source in ("/mnt/a.gguf", "owner/name:a.gguf", "/home/someone-else/a"):
        assert models_html.where(source) == source


def test_progress_is_a_bar_that_fills_or_moves() -> None:
    half = models_html.progress(Progress(0.5, f"Downloading {EVIL}"))
    assert "width:50.0%" in half and "50 %" in half and "<img" not in half
    unknown = models_html.progress(Progress(None, "Loading …"))
    assert "moving" in unknown and "%" not in unknown


def test_reports_come_a_few_times_a_second_and_with_every_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("app.service.comparison.perf_counter", lambda: now[0])

    def reports() -> Iterator[Progress]:
        yield Progress(None, "begin")
        for step in range(100):
            now[0] += 0.01
            yield Progress(step / 100, f"at {step}")
        yield Progress(None, "load")
        yield Progress(1.0, "done")

    words = [report.words for report in loading.paced(reports())]
    assert words[0] == "begin" and words[-2:] == ["load", "done"] and len(words) <= 7


def family(stack: bool = True) -> Entry:
    """A target that has to be downloaded, with two drafts, one of them suggested."""
    layers = (Layers(1, 1, 1),)
    target, *drafts = (
        Model(f"{EVIL} {name}", f"hub/x:{name}.gguf", 10**9, 40, name == "small", 4096, layers)
        for name in ("target", "small", "mid")
    )
    words = (EVIL, EVIL, EVIL, "https://example.org/licence", EVIL)
    suggested = (drafts[0],) if stack else ()
    return Entry(
        *words, target, tuple(drafts) if stack else (), suggested, "" if stack else EVIL, ()
    )


def test_a_family_is_told_with_what_it_takes() -> None:
    entry = family()
    needs = dict(models_html.family_needs(entry, 4096, "cuda", 40 + 16384))
    assert needs == {"memory": "16.0 KiB, fits", "with drafts": "32.1 KiB, does not fit"}
    assert dict(models_html.family_needs(family(False), 64, "cuda", 1)).keys() == {"memory"}
    words = models_html.family(entry, {"hub/x:small.gguf"}, needs.items(), "<hr>")
    assert "about 40 B, on this machine" in words and words.count("on this machine") == 1
    assert "suggested" in words and "1.0 B parameters" in words and words.endswith("<hr>")
    assert "<img" not in words and "<img" not in models_html.family(family(False), ())
    assert "none: &lt;img" in models_html.family(family(False), ())


# the tab


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def session(db: Database, shop: Shop) -> Session:
    return shop.session(db)


@pytest.fixture
def handlers(session: Session, monkeypatch: pytest.MonkeyPatch) -> models.Handlers:
    monkeypatch.setattr("app.web.tabs.catalogue.entries", lambda: (family(),))

    def build() -> models.Handlers:
        with gr.Blocks(), gr.Tab("Models") as tab:
            return models.Handlers(session, models.build(tab, session))

    return made(build)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr("app.web.wiring.gr.Warning", found.append)
    return found


def values(**changes: Any) -> list[Any]:
    """What the controls hold: numbers as a browser sends them."""
    runtime = Runtime()
    given = {item.name: getattr(runtime, item.name) for item in fields(Runtime)} | changes
    return [float(v) if isinstance(v, int) else v for v in given.values()]


def last(updates: Iterator[dict[Any, Any]]) -> dict[Any, Any]:
    *_, found = updates
    return found


def sources(shown: dict[Any, Any], handlers: models.Handlers) -> list[str]:
    return [source for _, source in shown[handlers.parts.choice]["choices"]]


def test_every_setting_has_a_control_and_is_read_back(handlers: models.Handlers) -> None:
    controls = handlers.parts.runtime
    assert list(controls) == [item.name for item in fields(Runtime)]
    shown = [control.value for control in controls.values()]  # type: ignore[attr-defined]
    assert handlers.read(shown) == Runtime()
    for name in ("device", "dtype", "flash_attention", "cache_type"):
        assert isinstance(controls[name], gr.Radio) and controls[name].choices[0][1] == "auto"
    chosen = values(context_length=4096, cache_type="q8_0", gpu_layers=-1)
    assert handlers.read(chosen) == Runtime(context_length=4096, cache_type="q8_0")


def test_the_settings_are_those_of_the_kind_of_model(handlers: models.Handlers) -> None:
    groups = handlers.parts.groups
    for kind in groups.keys() - {models.HERE}:
        shown = handlers.settings(Candidate("hub/x", "x", kind, 0, False))
        seen = {k for k, column in groups.items() if shown[column]["visible"]}
        assert seen == {kind} | ({models.HERE} if kind != "server" else set())


def test_a_key_is_given_to_its_server_and_forgotten_by_the_page(
    handlers: models.Handlers, warned: list[str]
) -> None:
    address = "http://127.0.0.1:9/v1"
    shown = handlers.refresh(handlers.models.add(address), *values())
    assert address in sources(shown, handlers)
    assert "What you write is sent to that server" in shown[handlers.parts.need]
    found = list(handlers.open("hush", address, *values()))
    assert found[0] == {handlers.parts.key: ""} and "hush" not in repr(found[1:])
    assert handlers.models.keys == {"http://127.0.0.1:9": "hush"} and "hush" not in repr(warned)


def test_only_devices_that_are_there_are_offered(handlers: models.Handlers) -> None:
    def device(source: str, runtime: Runtime) -> str:
        if runtime.device == "mps":
            raise ModelError("There is none.")
        return runtime.device

    engine = local(handlers.session)
    engine.loaders = replace(engine.loaders, device=device)
    candidate = Candidate("x", "x", "transformers", 1, False, Runtime(device="cuda:1"))
    shown = handlers.settings(candidate)[handlers.parts.runtime["device"]]
    assert shown["choices"] == ["auto", "cpu", "cuda", "cuda:1"] and shown["value"] == "cuda:1"


def test_a_page_that_opens_shows_the_loaded_model(handlers: models.Handlers, shop: Shop) -> None:
    parts = handlers.parts
    shown = handlers.refresh(None, *values(context_length=64))
    assert shown[parts.choice]["value"] == shop.source("one")
    assert shown[parts.runtime["context_length"]]["value"] == 8192, "as it runs, not as typed"
    assert "one" in shown[parts.loaded] and "48 B of 1,000 B free on cpu" in shown[parts.need]
    assert not shown[parts.place.stop]["visible"] and parts.place.status not in shown
    with handlers.models.busy:
        shown = handlers.refresh(None, *values())
    assert shown[parts.place.stop]["visible"] and "being loaded" in shown[parts.place.status]


def test_a_head_is_found_left_out_or_named(handlers: models.Handlers, shop: Shop) -> None:
    """Whatever the kind of model: one control for all."""
    control = handlers.parts.runtime["head"]
    assert isinstance(control, gr.Dropdown) and control.allow_custom_value
    assert [value for _, value in control.choices] == ["auto", "off"]
    assert not any("head" in names for names in models.OF_KIND.values())
    last(handlers.load(shop.source("one"), *values(head="/some/mtp-one.gguf")))
    assert shop.runtimes[-1].head == "/some/mtp-one.gguf"


def test_a_model_in_coarser_numbers_is_loaded_again_in_float32_by_one_click(
    handlers: models.Handlers, session: Session, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, engine = handlers.parts.exact, local(session)
    assert not handlers.overview()[exact]["visible"]
    before = engine.loaded.backend.info
    engine.loaded.backend.info = replace(before, kind="transformers", dtype="bfloat16")
    shown = handlers.overview()
    assert shown[exact]["visible"] and "bfloat16" in shown[handlers.parts.loaded]
    last(handlers.load_exact(None, *values(context_length=128)))
    runtime = shop.runtimes[-1]
    assert runtime.dtype == "float32" and runtime.context_length == 8192, "nothing else changes"
    assert session.models.source == shop.source("one") and not handlers.overview()[exact]["visible"]


def test_what_there_is_is_shown_before_anything_is_weighed(
    handlers: models.Handlers, session: Session, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first question to the libraries imports them, which takes seconds."""
    for name in ("need", "free", "device"):
        monkeypatch.setattr(session.engine, name, None)
    shown = handlers.overview()
    assert shop.source("one") in sources(shown, handlers)
    assert "one" in str(shown[handlers.parts.loaded])
    assert "value" not in shown[handlers.parts.choice], "its settings come with the choice"


def test_the_needs_follow_the_settings(handlers: models.Handlers, shop: Shop) -> None:
    def need(source: str | None, **changes: Any) -> str:
        return handlers.weigh(source, *values(**changes))[handlers.parts.need]

    source = shop.source("two")
    assert "cache</dt><dd>8 B" in need(source)
    assert "cache</dt><dd>16 B" in need(source, context_length=16384)
    assert "does not fit" in need(source, context_length=2**20)
    assert "64 to" in need(source, context_length=3)
    assert "cannot be None" in need(source, context_length=None)
    assert "does not tell" in need("strange/x")
    assert "Loading it downloads it" in need("hub/x")
    assert "Choose a model" in need(None)
    *_, card = handlers.parts.cards
    assert "fits" in handlers.weigh(source, *values(context_length=64))[card.facts]
    assert "32.0 KiB, does not fit" in handlers.weigh(source, *values())[card.facts]


def test_a_chosen_model_brings_its_own_settings(
    handlers: models.Handlers, session: Session, shop: Shop
) -> None:
    for name, length in (("two", 1024), ("three", 8192)):
        list(session.models.load(shop.source(name), Runtime(context_length=length)))
    shown = handlers.choose(shop.source("two"))
    assert shown[handlers.parts.runtime["context_length"]]["value"] == 1024
    assert "cache</dt><dd>1 B" in shown[handlers.parts.need]
    Path(shop.source("two")).unlink()
    shown = handlers.choose(shop.source("two"))
    assert shown[handlers.parts.choice]["value"] == shop.source("three"), "the file is gone"


def test_a_folder_is_searched_and_its_first_model_chosen(
    handlers: models.Handlers, shop: Shop, warned: list[str]
) -> None:
    shown = handlers.add(f" {shop.root} ")
    assert set(shop_sources(shop)) <= set(sources(shown, handlers))
    assert shown[handlers.parts.choice]["value"] == shop.source("draft")
    assert shown[handlers.parts.box] == "" and warned == []


def shop_sources(shop: Shop) -> list[str]:
    return [shop.source(name) for name in ("one", "two", "three", "draft")]


def test_a_file_and_a_hub_id_are_offered_until_they_are_loaded(
    handlers: models.Handlers, shop: Shop, warned: list[str]
) -> None:
    for named in (shop.source("two"), "hub/model", "hub/model"):
        shown = handlers.add(named)
        assert shown[handlers.parts.choice]["value"] == named
    assert {shop.source("two"), "hub/model"} <= set(sources(shown, handlers))
    assert sources(shown, handlers).count("hub/model") == 1
    last(handlers.load("hub/model", *values()))
    found = sources(handlers.refresh("hub/model", *values()), handlers)
    assert found.count("hub/model") == 1 and warned == []


def test_what_is_no_model_is_told_and_changes_nothing(
    handlers: models.Handlers, session: Session, shop: Shop, warned: list[str]
) -> None:
    (shop.root / "empty").mkdir()
    for named in ("", str(shop.root / "empty"), "strange/x"):
        assert handlers.add(named).keys() == {handlers.parts.box}
    assert len(warned) == 3 and "no model in" in warned[1] and not handlers.models.added
    with pytest.MonkeyPatch.context() as patch:

        def refuse() -> list[Candidate]:
            raise StorageError("The database is gone.")

        patch.setattr(session.models, "candidates", refuse)
        assert handlers.refresh(None, *values()).keys() == {handlers.parts.place.stop}
        assert handlers.choose("x").keys() == {handlers.parts.need}
    assert warned[3:] == ["The database is gone."] * 2


def test_another_model_takes_over(
    handlers: models.Handlers, session: Session, shop: Shop, warned: list[str]
) -> None:
    place = handlers.parts.place
    updates = list(handlers.load(shop.source("two"), *values(context_length=2048)))
    (go,) = place.buttons
    assert not updates[0][go]["visible"] and updates[0][place.stop]["visible"]
    *_, card = handlers.parts.cards
    assert not any(updates[0][button]["interactive"] for button in card.place.buttons)
    assert any("Loading two" in update[place.status] for update in updates[1:-2])
    *_, shown, done = updates
    assert session.current.info.name == "two" and shop.runtimes[-1].context_length == 2048
    assert "two" in shown[handlers.parts.loaded] and "two is loaded" in done[place.status]
    assert done[go]["interactive"] and done[go]["visible"] and not done[place.stop]["visible"]
    assert done[card.place.buttons[0]]["interactive"] and warned == []
    assert shown[handlers.parts.choice]["value"] == shop.source("two")
    labels = [label for label, _ in shown[handlers.parts.choice]["choices"]]
    assert [x for x in labels if x.endswith("loaded")] == ["two · llama.cpp · 5 B · loaded"]


def test_a_load_that_fails_leaves_the_model(
    handlers: models.Handlers, session: Session, shop: Shop, warned: list[str]
) -> None:
    shop.broken.add(shop.source("two"))
    shown = last(handlers.load(shop.source("two"), *values()))
    assert "damaged" in warned[0]
    assert "one is loaded, as before" in shown[handlers.parts.place.status]
    last(handlers.load(shop.source("three"), *values(context_length=2**20)))
    assert "needs 1.0 KiB" in warned[1]
    last(handlers.load(None, *values()))
    last(handlers.load(shop.source("three"), *values(threads=9999)))
    assert "No model is chosen" in warned[2] and "9999" in warned[3]
    assert session.current.info.name == "one" and len(warned) == 4


def test_a_download_is_shown_and_can_be_stopped(
    handlers: models.Handlers, session: Session, shop: Shop, warned: list[str]
) -> None:
    place, going = handlers.parts.place, threading.Event()
    shop.pieces, shop.between = 1000, lambda: going.wait(5) and None
    updates = handlers.load("hub/model", *values())
    seen = [next(updates), next(updates), next(updates)]
    session.models.stop()
    going.set()
    shown = last(updates)
    assert any("Downloading" in update[place.status] for update in seen[1:])
    assert "was stopped" in shown[place.status] and warned == []
    assert session.current.info.name == "one"


def test_a_family_is_loaded_and_its_drafts_are_offered(
    handlers: models.Handlers, session: Session, shop: Shop, warned: list[str]
) -> None:
    *_, card = handlers.parts.cards
    assert [button.value for button in card.place.buttons] == ["Download and load", "With drafts"]
    updates = list(handlers.take(card, (), None, *values(context_length=64)))
    assert any("Downloading target" in update.get(card.place.status, "") for update in updates)
    assert session.models.source == "hub/x:target.gguf" and session.stacks.offered == []
    *_, shown, done = updates
    assert shown[card.place.buttons[0]] == "Load" and "on this machine" in shown[card.facts]
    assert "target is loaded" in done[card.place.status]
    updates = list(handlers.take(card, card.entry.stack, None, *values(context_length=64)))
    assert any("Downloading small" in update.get(card.place.status, "") for update in updates)
    assert session.stacks.offered == ["hub/x:small.gguf"] and shop.runtimes[-1].context_length == 64
    assert "in the Stack tab" in updates[-1][card.place.status] and warned == []


def test_a_processor_gets_the_file_that_verifies_fast(
    handlers: models.Handlers, session: Session, warned: list[str]
) -> None:
    *_, card = handlers.parts.cards
    other = replace(card.entry.target, source="hub/x:target-IQ4_NL.gguf")
    card.entry = replace(card.entry, target=replace(card.entry.target, processor=other))
    assert "IQ4_NL" in handlers.refresh(None, *values(context_length=64))[card.facts]
    last(handlers.take(card, (), None, *values(context_length=64)))
    assert session.models.source == other.source and warned == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.engine, "device", lambda source, runtime: "cuda:0")
        shown = handlers.refresh(None, *values(context_length=64))
    assert "IQ4_NL" not in shown[card.facts]


def test_a_family_that_does_not_fit_is_not_downloaded(
    handlers: models.Handlers, session: Session, shop: Shop, warned: list[str]
) -> None:
    *_, card = handlers.parts.cards
    last(handlers.take(card, (), None, *values()))
    assert "32.0 KiB for the cache" in warned[0] and "Nothing was downloaded" in warned[0]
    assert shop.arrived == set() and session.current.info.name == "one"


def test_a_damaged_catalogue_is_told_and_the_tab_works(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> tuple[Entry, ...]:
        raise catalogue.unusable(EVIL)

    for name in ("entries", "starter"):
        monkeypatch.setattr(f"app.web.tabs.catalogue.{name}", refuse)

    def build() -> tuple[models.Parts, gr.Blocks]:
        with gr.Blocks() as blocks, gr.Tab("Models") as tab:
            return models.build(tab, session), blocks

    parts, blocks = made(build)
    markup = [str(b.value) for b in blocks.blocks.values() if isinstance(b, gr.HTML)]
    assert parts.cards == [] and any("&lt;img" in each for each in markup)
    assert not any("<img" in each for each in markup)
    assert parts.need in models.Handlers(session, parts).refresh(None, *values())


def test_hostile_names_stay_text(handlers: models.Handlers, shop: Shop, warned: list[str]) -> None:
    path = shop.root / f"{EVIL}.gguf"
    path.write_text("bytes")
    shown = handlers.add(str(path))
    *_, loaded, done = handlers.load(str(path), *values())
    parts = handlers.parts
    for markup in (shown[parts.need], loaded[parts.loaded], done[parts.place.status]):
        assert "<img" not in markup and "&lt;img" in markup
    shop.broken.add(str(path))
    last(handlers.load(str(path), *values(context_length=64)))
    assert len(warned) == 1 and "<img" not in warned[0]


def test_a_model_is_removed_after_asking(
    handlers: models.Handlers, shop: Shop, warned: list[str]
) -> None:
    two, parts = shop.source("two"), handlers.parts
    handlers.add(two)
    shop.ours.add(two)
    asked = handlers.ask(two)
    assert asked[parts.remove.asking]["visible"] and "Delete two" in asked[parts.remove.question]
    assert "5 B become free" in asked[parts.remove.question] and Path(two).exists()
    shown = handlers.remove(two)
    assert not Path(two).exists() and two not in sources(shown, handlers)
    assert "4.0 KiB are free again" in shown[parts.place.status]
    assert not shown[parts.remove.asking]["visible"]
    for source in (shop.source("one"), str(EMBEDDED), "/etc/passwd", None):
        assert not handlers.ask(source)[parts.remove.asking]["visible"]
        assert not handlers.remove(source)[parts.remove.asking]["visible"]
    assert len(warned) == 8 and "is loaded" in warned[0] and "comes with" in warned[2]


def test_the_usual_settings_come_back(handlers: models.Handlers, shop: Shop) -> None:
    last(handlers.load(shop.source("two"), *values(context_length=2048, threads=3)))
    parts = handlers.parts.runtime
    assert handlers.choose(shop.source("two"))[parts["threads"]]["value"] == 3
    shown = handlers.reset(shop.source("two"))
    assert shown[parts["threads"]]["value"] == 0
    assert shown[parts["context_length"]]["value"] == Runtime().context_length


def test_a_real_model_is_offered_beside_the_demonstration_model_alone(
    handlers: models.Handlers, session: Session
) -> None:
    card = handlers.parts.cards[0]
    assert card.box is not None and not handlers.starters()[card.box]["visible"]
    local(session).use(replace(local(session).loaded, source=str(EMBEDDED)))
    assert handlers.starters()[card.box]["visible"]
    words = models_html.starter(family(False))
    assert "<img" not in words and words.count("&lt;img") >= 3 and "8,192 tokens" in words


@pytest.mark.parametrize("gguf", [True, False])
def test_the_real_model_is_small_and_free_for_every_use(gguf: bool) -> None:
    entry = catalogue.starter(gguf)
    assert entry.licence == "Apache-2.0" and entry.target.bytes <= 1e9
    assert entry.target.source.endswith(".gguf") is gguf
    words = models_html.starter(entry)
    assert "Apache-2.0" in words and "to download" in words and "of memory" in words


def test_which_format_is_faster_is_told_of_the_demonstration_model(
    handlers: models.Handlers, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Faster(str(EMBEDDED), 2.0, "safetensors is 2.0 times as fast here.")
    monkeypatch.setattr(Formats, "faster", known)
    assert known.words not in handlers.loaded()
    local(session).use(replace(local(session).loaded, source=str(EMBEDDED)))
    assert known.words in handlers.loaded()
