"""The Models tab without a browser: its words, and what its buttons change."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import pytest

from app.service import catalogue, ways
from app.service.catalogue import Entry, File, Layers, Model
from app.service.current import line
from app.service.jobs import Job, Progress
from app.service.models import PADDED, Candidate, title_of
from app.service.session import Session
from app.web import models_html
from app.web.layout import header
from app.web.tabs import catalogue as catalogue_cards
from app.web.tabs import models
from engine.engine import Room
from engine.errors import ModelError
from engine.heads.base import HeadInfo
from engine.loaded import NO_MODEL_INFO
from engine.models.memory import Need
from engine.settings import Runtime
from engine.types import Costs
from storage.database import Database
from tests.support.blocks import last, made, tab_of
from tests.support.inside import local, on_toy
from tests.support.quick import quick  # noqa: F401
from tests.support.shop import Shop
from tests.support.toy import ToyBackend

EVIL = "<img src=x onerror=alert(1)>{{constructor.constructor('alert(2)')()}}"
GIB = 2**30


# words


def test_the_facts_of_a_model() -> None:
    info = ToyBackend(name=EVIL).info
    info = replace(info, parameters=6_300_000, memory_bytes=3 * GIB, threads=2, note="Because <b>.")
    text = models_html.loaded(info, f"/models/{EVIL}")
    assert "6.3 M" in text and "3.0 GiB" in text and "2 threads" in text
    assert "<img" not in text and "<b>" not in text and text.count("&lt;img") == 2
    imitates = "can imitate a turn of the conversation"
    assert imitates not in text
    assert imitates in models_html.loaded(replace(info, imitable=True), "/models/a")
    assert "No model" in models_html.loaded(NO_MODEL_INFO, "")
    assert not models_html.still_loaded(NO_MODEL_INFO, "")


def test_what_drafts_for_the_loaded_model_is_always_shown() -> None:
    head = HeadInfo("MTP", 4, branches=False)
    info = replace(ToyBackend().info, leaves=1, depth=8, head=head)
    text = models_html.loaded(info, "/m/a.gguf", drafts=[EVIL])
    assert "one guess per token, up to 8 tokens ahead" in text
    assert "MTP, up to 4 tokens ahead" in text
    assert "&lt;img" in text and "<img" not in text
    plain = models_html.loaded(replace(info, can_tree=False), "/m/a.gguf")
    assert plain.count("decodes plainly") == 3


CHEAP = {0: 1.0, 1: 1.1, 3: 1.3, 7: 2.0, 15: 3.4}
DEAR = {0: 1.0, 1: 2.0, 3: 3.6, 7: 6.6, 15: 8.1}


def test_few_bits_are_suggested_where_they_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "multiplies_few_bits", lambda: True)
    monkeypatch.setattr(ways, "verifies_cheaply", lambda: True)
    large = replace(ToyBackend().info, kind="transformers", device="cpu", dtype="bfloat16")
    large = replace(large, parameters=600_000_000)
    assert "8 or 4 Bits" in models_html.loaded(large, "/m/a")
    file = replace(large, kind="llama.cpp", dtype="Q4_K_M")
    assert "load it with 8 Bits" in models_html.loaded(file, "/m/a.gguf")
    assert "It computes in bfloat16" in models_html.loaded(large, "/m/a")
    packed = models_html.loaded(replace(large, dtype="Q4_K_M"), "/m/a.gguf")
    assert "It computes in" not in packed and "Bits" not in packed
    assert "the compiled core" in packed
    assert "the compiled core" not in models_html.loaded(file, "/m/a.gguf")
    for change in (
        {"device": "cuda"}, {"dtype": "4 bits"}, {"dtype": "gptq"}, {"parameters": 10_000_000},
    ):  # fmt: skip
        assert "Bits" not in models_html.loaded(replace(large, **change), "/m/a"), change
    monkeypatch.setattr(ways, "verifies_cheaply", lambda: False)
    assert "Bits" not in models_html.loaded(file, "/m/a.gguf")
    monkeypatch.setattr(ways, "multiplies_few_bits", lambda: False)
    assert "Bits" not in models_html.loaded(large, "/m/a")
    assert "Bits" not in models_html.loaded(file, "/m/a.gguf")


def test_what_verifying_takes_is_shown_with_what_it_allows() -> None:
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
    assert "verify faster" not in models_html.verifying(info, DEAR, other_files=False)
    text = models_html.verifying(replace(info, leaves=1, depth=4), CHEAP)
    assert "Verifying 3 drafted tokens takes 1.3 times" in text, "of drafts which can be"
    assert models_html.verifying(replace(info, can_tree=False), CHEAP) == ""
    assert models_html.verifying(info, {0: 1.0, 1: 1.1}) == "", "nothing that could be told"


def test_a_mixture_of_experts_says_why_drafts_do_not_pay() -> None:
    info = replace(ToyBackend().info, experts=128, used_experts=8)
    why = (
        ", because each token uses 8 of 128 experts in every layer, and every further token mostly "
        "needs others."
    )
    times = "takes 3.6, 6.6 or 8.1 times as long here as computing one"
    dear = models_html.verifying(info, DEAR)
    assert times + why in dear and "make it no faster" in dear
    assert "experts" not in models_html.verifying(info, CHEAP)
    dense = replace(info, experts=0, used_experts=0)
    assert f"{times}. " in models_html.verifying(dense, DEAR)
    drafting = line(info)
    hardly = "They hardly pay here: verifying 3 tokens takes 3.6 times as long as computing one"
    assert line(info, points=DEAR) == f"{drafting} {hardly}{why}"
    assert line(dense, points=DEAR) == f"{drafting} {hardly}."
    assert line(info, points=CHEAP) == line(info, points={0: 1.0}) == drafting
    assert "1 token takes 2.0 times" in line(info, points={0: 1.0, 1: 2.0, 7: 9.0})
    assert "7 tokens takes 9.0 times" in line(info, points={0: 1.0, 7: 9.0})
    assert "hardly" not in line(replace(info, can_tree=False), points=DEAR)


def test_the_header_tells_a_mixture_that_drafts_do_not_pay(db: Database) -> None:
    toy = ToyBackend()
    toy.info = replace(toy.info, experts=16, used_experts=2)
    session = on_toy(db, toy)
    assert "hardly" not in header(session, ())
    session.costs.save(toy.info, Costs(DEAR, 0.0, 0.0, 1.0))
    assert "each token uses 2 of 16 experts" in header(session, ())


def test_the_padded_model_is_never_taken_for_a_real_one() -> None:
    path = f"/data/models/{PADDED}"
    here = Candidate(path, title_of(path), "transformers", GIB, False)
    assert models_html.choice(here)[0] == "tiny-chat, padded to 0.5 B · transformers · 1.0 GiB"
    assert "This is no real model." in models_html.loaded(ToyBackend().info, path)
    assert "This is no real model." in models_html.need(path, Need(1, 1, 1), 10, "cpu")
    assert "no real model" not in models_html.loaded(ToyBackend().info, "/data/models/other")


def test_a_need_that_fits_and_one_that_does_not() -> None:
    fits = models_html.need(EVIL, Need(10**9, 2 * GIB, GIB), 12 * GIB, "cpu")
    assert "3.0 GiB of 12.0 GiB free on cpu" in fits and "differs" not in fits
    assert "width:16.67%" in fits and "width:8.33%" in fits and "over" not in fits
    assert "<img" not in fits and "&lt;img" in fits
    over = models_html.need("m", Need(10**9, 12 * GIB, 4 * GIB), 8 * GIB, "cuda:0")
    assert "8.0 GiB are missing" in over and 'class="need over"' in over
    assert "width:75.00%" in over and "left:50.00%" in over
    assert models_html.bar((0, 0), 0).count("<i") == 0


def test_paths_are_shown_where_the_user_has_no_home(homeless: None) -> None:
    assert models_html.where("/home/someone/a.gguf") == "/home/someone/a.gguf"


def family(stack: bool = True) -> Entry:
    """A target that has to be downloaded, with two drafts, one of them suggested."""
    target, *drafts = (
        Model(
            name=f"{EVIL} {name}",
            source=f"hub/x:{name}.gguf",
            parameters=parameters,
            bytes=40,
            bytes_are="estimated" if name == "small" else "published",
            context=4096,
            layers=(Layers(count=1, key_heads=1, head_size=1),),
        )
        for name, parameters in (("target", 10**9), ("small", 10**7), ("mid", 10**8))
    )
    return Entry(
        name=EVIL,
        maker=EVIL,
        licence=EVIL,
        licence_address="https://example.org/licence",
        tools=True,
        description=EVIL,
        target=target,
        drafts=tuple(drafts) if stack else (),
        stack=(drafts[0].name,) if stack else (),
        alone="" if stack else EVIL,
        sources=("https://example.org/family",),
    )


def test_a_family_is_shown_with_what_it_takes() -> None:
    entry = family()
    needs = dict(models_html.family_needs(entry, 4096, "cuda", 40 + 16384))
    assert needs == {"memory": "16.0 KiB, fits", "with drafts": "32.1 KiB, does not fit"}
    assert dict(models_html.family_needs(family(False), 64, "cuda", 1)).keys() == {"memory"}
    text = models_html.family(entry, {"hub/x:small.gguf"}, needs.items(), "<hr>")
    assert "about 40 B, on this machine" in text and text.count("on this machine") == 1
    assert "suggested" in text and "1.0 B parameters" in text and text.endswith("<hr>")
    assert "<img" not in text and "<img" not in models_html.family(family(False), ())
    assert "none: &lt;img" in models_html.family(family(False), ())


# the tab


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def session(db: Database, shop: Shop) -> Session:
    return shop.session(db)


@pytest.fixture
def on(session: Session, monkeypatch: pytest.MonkeyPatch) -> models.ModelsTab:
    monkeypatch.setattr("app.web.tabs.catalogue.entries", lambda: (family(),))

    return tab_of(models.ModelsTab, session)


def values(**changes: Any) -> list[Any]:
    runtime = Runtime()
    given = {item.name: getattr(runtime, item.name) for item in fields(Runtime)} | changes
    return [float(v) if isinstance(v, int) else v for v in given.values()]


def sources(shown: dict[Any, Any], on: models.ModelsTab) -> list[str]:
    return [source for _, source in shown[on.choice]["choices"]]


def test_every_setting_has_a_control_and_is_read_back(on: models.ModelsTab) -> None:
    controls = on.runtime
    assert list(controls) == [item.name for item in fields(Runtime)]
    shown = [control.value for control in controls.values()]  # type: ignore[attr-defined]
    assert on.read(shown) == Runtime()
    for name in ("device", "dtype", "bits", "flash_attention", "cache_type"):
        assert isinstance(controls[name], gr.Radio) and controls[name].choices[0][1] == "auto"
    chosen = values(context_length=4096, cache_type="q8_0", gpu_layers=-1)
    assert on.read(chosen) == Runtime(context_length=4096, cache_type="q8_0")


def test_the_settings_are_those_of_the_kind_of_model(on: models.ModelsTab) -> None:
    groups = on.groups
    for kind in groups.keys() - {models.HERE}:
        shown = on.settings(Candidate("hub/x", "x", kind, 0, False))
        seen = {k for k, column in groups.items() if shown[column]["visible"]}
        assert seen == {kind} | ({models.HERE} if kind != "server" else set())


def test_a_key_is_given_to_its_server_and_forgotten_by_the_page(
    on: models.ModelsTab, warned: list[str]
) -> None:
    address = "http://127.0.0.1:9/v1"
    shown = on.refresh(on.models.add(address), *values())
    assert address in sources(shown, on)
    assert "What you write is sent to that server" in shown[on.needed]
    found = list(on.open("hush", address, *values()))
    assert found[0] == {on.key: ""} and "hush" not in repr(found[1:])
    assert on.models.keys == {"http://127.0.0.1:9": "hush"} and "hush" not in repr(warned)


def test_only_devices_that_are_there_are_offered(on: models.ModelsTab) -> None:
    def device(source: str, runtime: Runtime) -> str:
        if runtime.device == "mps":
            raise ModelError("There is none.")
        return runtime.device

    engine = local(on.session)
    engine.loaders = replace(engine.loaders, device=device)
    candidate = Candidate("x", "x", "transformers", 1, False, Runtime(device="cuda:1"))
    shown = on.settings(candidate)[on.runtime["device"]]
    assert shown["choices"] == ["auto", "cpu", "cuda", "cuda:1"] and shown["value"] == "cuda:1"


def test_a_page_that_opens_shows_the_loaded_model(on: models.ModelsTab, shop: Shop) -> None:
    shown = on.refresh(None, *values(context_length=64))
    assert shown[on.choice]["value"] == shop.source("one")
    assert shown[on.runtime["context_length"]]["value"] == 8192, "as it runs, not as typed"
    assert "one" in shown[on.facts] and "48 B of 1,000 B free on cpu" in shown[on.needed]
    assert not shown[on.place.stop]["visible"] and on.place.status not in shown
    for card in on.cards:
        assert escape(card.entry.description) in (card.facts.value or ""), "before it is asked"
    begin, go = Progress(None, "Loading two …"), threading.Event()
    work = Job[Progress, None](lambda job: (go.wait(20), None)[1], begin)
    job = on.models.slot.take(lambda: work, ModelError()).start("loader")
    shown = on.refresh(None, *values())
    assert shown[on.place.stop]["visible"] and "Loading two …" in shown[on.place.status]

    async def followed() -> list[dict[Any, Any]]:
        seen = []
        async for update in on.show(None, *values()):
            seen.append(update)
            if len(seen) == 3:
                job.report(Progress(1.0, "two is loaded."))
                go.set()
        return seen

    _, first, second, *_, done = asyncio.run(followed())
    assert first[on.place.stop]["visible"] and "Loading two …" in second[on.place.status]
    assert not done[on.place.stop]["visible"] and done[on.place.status] == ""


def test_the_context_field_says_what_is_loaded(
    on: models.ModelsTab, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8,192 tokens are asked for by default; a model that can read less has less."""
    context, source = on.runtime["context_length"], shop.source("one")
    current = on.session.current
    for length, text in (
        (2048, "one reads at most 2,048 tokens: no more can be loaded."),
        (8192, models.META["context_length"]["help"]),
    ):
        monkeypatch.setattr(type(current), "info", replace(current.info, context_length=length))
        for shown in (on.refresh(source, *values()), on.hint(source)):
            assert shown[context]["info"] == text
        assert on.overview()[context]["info"] == text, "at once when the tab opens"
        other = on.hint(shop.source("two"))
        assert other[context]["info"] == models.META["context_length"]["help"]
        chosen = on.screen(shop.source("two"))
        assert "info" not in chosen[context], "together with a value it is taken for typing"


def test_a_head_is_found_left_out_or_named(on: models.ModelsTab, shop: Shop) -> None:
    """Whatever the kind of model: one control for all."""
    control = on.runtime["head"]
    assert isinstance(control, gr.Dropdown) and control.allow_custom_value
    assert [value for _, value in control.choices] == ["auto", "off"]
    assert not any("head" in names for names in models.OF_KIND.values())
    last(on.load(shop.source("one"), *values(head="/some/mtp-one.gguf")))
    assert shop.runtimes[-1].head == "/some/mtp-one.gguf"


def test_what_there_is_is_shown_before_anything_is_weighed(
    on: models.ModelsTab, session: Session, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first question to the libraries imports them, which takes seconds."""
    for name in ("need", "room"):
        monkeypatch.setattr(session.engine, name, None)
    shown = on.overview()
    assert shop.source("one") in sources(shown, on)
    assert "one" in str(shown[on.facts])
    assert "value" not in shown[on.choice], "its settings come with the choice"


def test_the_needs_follow_the_settings(on: models.ModelsTab, shop: Shop) -> None:
    def need(source: str | None, **changes: Any) -> str:
        return on.needs(source, *values(**changes))[on.needed]

    source = shop.source("two")
    assert "cache</dt><dd>8 B" in need(source)
    assert "cache</dt><dd>16 B" in need(source, context_length=16384)
    assert "does not fit" in need(source, context_length=2**20)
    assert "64 to" in need(source, context_length=3)
    assert "cannot be None" in need(source, context_length=None)
    assert "does not tell" in need("strange/x")
    assert "It is downloaded first" in need("hub/x")
    assert "Choose a model" in need(None)
    *_, card = on.cards
    assert "fits" in on.needs(source, *values(context_length=64))[card.facts]
    assert "32.0 KiB, does not fit" in on.needs(source, *values())[card.facts]


def test_a_chosen_model_brings_its_own_settings(
    on: models.ModelsTab, session: Session, shop: Shop
) -> None:
    for name, length in (("two", 1024), ("three", 8192)):
        list(session.models.load(shop.source(name), Runtime(context_length=length)))
    shown = on.screen(shop.source("two"))
    assert shown[on.runtime["context_length"]]["value"] == 1024
    assert "cache</dt><dd>1 B" in shown[on.needed]
    Path(shop.source("two")).unlink()
    shown = on.screen(shop.source("two"))
    assert shown[on.choice]["value"] == shop.source("three"), "the file is gone"


def test_a_folder_is_searched_and_its_first_model_chosen(
    on: models.ModelsTab, shop: Shop, warned: list[str]
) -> None:
    shown = on.add(f" {shop.root} ")
    everything = {shop.source(name) for name in ("one", "two", "three", "draft")}
    assert everything <= set(sources(shown, on))
    assert shown[on.choice]["value"] == shop.source("draft")
    assert shown[on.box] == "" and warned == []


def test_a_file_and_a_hub_id_are_offered_until_they_are_loaded(
    on: models.ModelsTab, shop: Shop, warned: list[str]
) -> None:
    for named in (shop.source("two"), "hub/model", "hub/model"):
        shown = on.add(named)
        assert shown[on.choice]["value"] == named
    assert {shop.source("two"), "hub/model"} <= set(sources(shown, on))
    assert sources(shown, on).count("hub/model") == 1
    last(on.load("hub/model", *values()))
    found = sources(on.refresh("hub/model", *values()), on)
    assert found.count("hub/model") == 1 and warned == []


def test_a_load_that_fails_leaves_the_model(
    on: models.ModelsTab, session: Session, shop: Shop, warned: list[str]
) -> None:
    shop.broken.add(shop.source("two"))
    shown = last(on.load(shop.source("two"), *values()))
    assert "damaged" in warned[0]
    assert "one is loaded, as before" in shown[on.place.status]
    last(on.load(shop.source("three"), *values(context_length=2**20)))
    assert "needs 1.0 KiB" in warned[1]
    last(on.load(None, *values()))
    last(on.load(shop.source("three"), *values(threads=9999)))
    assert "No model is chosen" in warned[2] and "9999" in warned[3]
    assert session.current.info.name == "one" and len(warned) == 4


def test_a_download_is_shown_and_can_be_stopped(
    on: models.ModelsTab, session: Session, shop: Shop, warned: list[str]
) -> None:
    place, going = on.place, threading.Event()
    shop.pieces, shop.between = 1000, lambda: going.wait(5) and None
    updates = on.load("hub/model", *values())
    assert any("Downloading" in update.get(place.status, "") for update in updates)
    session.models.stop()
    going.set()
    shown = last(updates)
    assert "was stopped" in shown[place.status] and warned == []
    assert session.current.info.name == "one"


def downloading(shop: Shop, updates: Iterator[dict[Any, Any]]) -> list[dict[Any, Any]]:
    shown, seen = threading.Event(), []
    shop.between = lambda: shown.wait(10) and None
    for update in updates:
        seen.append(update)
        if "Downloading" in str(update):
            shown.set()
    return seen


def test_a_family_is_loaded_and_its_drafts_are_offered(
    on: models.ModelsTab, session: Session, shop: Shop, warned: list[str]
) -> None:
    *_, card = on.cards
    assert [button.value for button in card.place.buttons] == ["Download and load", "With drafts"]
    updates = downloading(shop, on.load_family(card, (), None, *values(context_length=64)))
    assert any("Downloading target" in update.get(card.place.status, "") for update in updates)
    assert session.models.source == "hub/x:target.gguf" and session.stacks.offered == []
    *_, shown, done = updates
    assert shown[card.place.buttons[0]] == "Load" and "on this machine" in shown[card.facts]
    assert "target is loaded" in done[card.place.status]
    updates = downloading(
        shop, on.load_family(card, card.entry.stack, None, *values(context_length=64))
    )
    assert any("Downloading small" in update.get(card.place.status, "") for update in updates)
    assert session.stacks.offered == ["hub/x:small.gguf"] and shop.runtimes[-1].context_length == 64
    assert "in the Stack tab" in updates[-1][card.place.status] and warned == []


def test_a_processor_gets_the_file_that_verifies_fast(
    on: models.ModelsTab, session: Session, warned: list[str]
) -> None:
    *_, card = on.cards
    other = File(source="hub/x:target-IQ4_NL.gguf", bytes=40, bytes_are="published")
    target = card.entry.target.model_copy(update={"processor": other})
    card.entry = card.entry.model_copy(update={"target": target})
    assert "IQ4_NL" in on.refresh(None, *values(context_length=64))[card.facts]
    last(on.load_family(card, (), None, *values(context_length=64)))
    assert session.models.source == other.source and warned == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.engine, "room", lambda source, runtime: Room("cuda:0", 1000))
        shown = on.refresh(None, *values(context_length=64))
    assert "IQ4_NL" not in shown[card.facts]


def test_a_family_that_does_not_fit_is_not_downloaded(
    on: models.ModelsTab, session: Session, shop: Shop, warned: list[str]
) -> None:
    *_, card = on.cards
    last(on.load_family(card, (), None, *values()))
    assert "32.0 KiB for the cache" in warned[0] and "Nothing was downloaded" in warned[0]
    assert shop.arrived == set() and session.current.info.name == "one"


def test_a_damaged_catalogue_is_reported_and_the_tab_works(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> tuple[Entry, ...]:
        raise catalogue.unusable(EVIL)

    for name in ("entries", "starter"):
        monkeypatch.setattr(f"app.web.tabs.catalogue.{name}", refuse)

    def build() -> tuple[models.ModelsTab, gr.Blocks]:
        with gr.Blocks() as blocks, gr.Tab("Models") as tab:
            return models.ModelsTab(session, gr.BrowserState({}), tab), blocks

    on, blocks = made(build)
    markup = [str(b.value) for b in blocks.blocks.values() if isinstance(b, gr.HTML)]
    assert on.cards == [] and any("&lt;img" in each for each in markup)
    assert not any("<img" in each for each in markup)
    assert on.needed in on.refresh(None, *values())


def test_the_usual_settings_come_back(on: models.ModelsTab, shop: Shop) -> None:
    last(on.load(shop.source("two"), *values(context_length=2048, threads=3)))
    parts = on.runtime
    assert on.screen(shop.source("two"))[parts["threads"]]["value"] == 3
    shown = on.reset(shop.source("two"))
    assert shown[parts["threads"]]["value"] == 0
    assert shown[parts["context_length"]]["value"] == Runtime().context_length


@pytest.mark.parametrize("gguf", [True, False])
def test_the_real_model_is_small_and_free_for_every_use(
    gguf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = catalogue.starter(gguf)
    assert entry.licence == "Apache-2.0" and entry.target.bytes <= 1e9
    assert entry.target.source.endswith(".gguf") is gguf
    text = models_html.starter(entry)
    assert "Apache-2.0" in text and "to download" in text and "of memory" in text
    assert "8 bits" in models_html.starter(entry, fewer_bits=True) and "8 bits" not in text
    for few in (True, False):
        monkeypatch.setattr(catalogue_cards, "multiplies_few_bits", lambda few=few: few)
        assert catalogue_cards.rounds(entry.target.source) is (few and not gguf)


def test_a_first_real_model_has_8_bits_where_they_help(
    on: models.ModelsTab, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is loaded as it is if the core cannot compute it."""
    tried, refused = list[str](), set[str]()

    def load(source: str, runtime: Runtime) -> Iterator[Progress]:
        tried.append(runtime.bits)
        if runtime.bits in refused:
            raise ModelError("The core cannot compute it.")
        yield Progress(1.0, "Loading")

    monkeypatch.setattr(on.models, "load", load)
    monkeypatch.setattr(catalogue_cards, "rounds", lambda source: True)
    source = shop.source("two")
    for runtime, refuses, expected in (
        (Runtime(), "", ["8"]),
        (Runtime(), "8", ["8", "auto"]),
        (Runtime(bits="4"), "", ["4"]),
    ):
        tried.clear()
        refused.clear()
        refused.add(refuses)
        assert list(catalogue_cards.load_starter(on.models, source, runtime))
        assert tried == expected
    monkeypatch.setattr(catalogue_cards, "rounds", lambda source: False)
    tried.clear()
    assert list(catalogue_cards.load_starter(on.models, source, Runtime())) and tried == ["auto"]


def test_a_model_in_coarser_numbers_is_loaded_again_in_float32_by_one_click(
    on: models.ModelsTab, session: Session, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, engine = on.exact, local(session)
    assert not on.overview()[exact]["visible"]
    before = engine.loaded.backend.info
    engine.loaded.backend.info = replace(before, kind="transformers", dtype="bfloat16")
    shown = on.overview()
    assert shown[exact]["visible"] and "bfloat16" in shown[on.facts]
    last(on.load_exact(None, *values(context_length=128)))
    runtime = shop.runtimes[-1]
    assert runtime.dtype == "float32" and runtime.context_length == 8192, "nothing else changes"
    assert session.models.source == shop.source("one") and not on.overview()[exact]["visible"]


def test_a_name_in_the_question_before_a_removal_stays_text(
    on: models.ModelsTab, shop: Shop
) -> None:
    path = shop.root / f"{EVIL}.gguf"
    path.write_text("bytes")
    on.add(str(path))
    shop.ours.add(str(path))
    removal = on.ask_removal(str(path))[on.question]
    assert "&lt;img" in removal and "<img" not in removal


def test_another_model_takes_over(
    on: models.ModelsTab,
    session: Session,
    shop: Shop,
    warned: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, shown_loading, toy = on.place, threading.Event(), shop.toy
    monkeypatch.setattr(shop, "toy", lambda name: (shown_loading.wait(20), toy(name))[1])
    updates = []
    for update in on.load(shop.source("two"), *values(context_length=2048)):
        updates.append(update)
        if "Loading two" in str(update.get(place.status)):
            shown_loading.set()
    (go,) = place.buttons
    assert not updates[0][go]["visible"] and updates[0][place.stop]["visible"]
    *_, card = on.cards
    assert not any(updates[0][button]["interactive"] for button in card.place.buttons)
    assert shown_loading.is_set()
    *_, shown, done = updates
    assert session.current.info.name == "two" and shop.runtimes[-1].context_length == 2048
    assert "two" in shown[on.facts] and "two is loaded" in done[place.status]
    assert done[go]["visible"] and not done[place.stop]["visible"]
    assert done[card.place.buttons[0]]["interactive"] and warned == []
    assert shown[on.choice]["value"] == shop.source("two")
    labels = [label for label, _ in shown[on.choice]["choices"]]
    assert [x for x in labels if x.endswith("loaded")] == ["two · GGUF · 5 B · loaded"]
