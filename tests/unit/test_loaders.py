"""What models are called, and how the app reaches the engine's loaders."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from engine.backends.toy import ToyBackend
from engine.errors import ModelError
from engine.models.formats import FORMATS, format_of
from engine.models.loaders import MODEL_LOADERS, free_name, kind_of, name_of, settled
from engine.models.memory import Need
from engine.settings import Runtime
from tests.conftest import EMBEDDED, ROOT

RUNTIME = Runtime(threads=3)
HUB_FILE = "owner/name-GGUF:part/of/it-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("source", "name", "kind"),
    [
        ("/models/mid", "mid", "transformers"),
        ("/models/mid.gguf", "mid", "llama.cpp"),
        ("/models/It.Q8_0.GGUF", "It.Q8_0", "llama.cpp"),
        ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B", "transformers"),
        (HUB_FILE, "it-Q4_K_M", "llama.cpp"),
        ("owner/name:file.gguf", "file", "llama.cpp"),
        ("/odd:place/mid.gguf", "mid", "llama.cpp"),
        ("/", "model", "transformers"),
        ("/a\udc80.gguf", "a?", "llama.cpp"),
        (".gguf", "model", "llama.cpp"),
    ],
)
def test_a_model_is_called_by_the_last_part_of_its_source(
    source: str, name: str, kind: str
) -> None:
    assert name_of(source) == name and kind_of(source) == kind


def test_no_two_draft_models_have_one_name() -> None:
    assert free_name("/b/mid.gguf", {"mid", "mid-2"}) == "mid-3"
    assert free_name("/b/mid", {"small"}) == "mid"


def test_one_model_has_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "blob").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "folder" / "linked.gguf").symlink_to(tmp_path / "blob")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = str(tmp_path.resolve() / "folder")
    for source in ("folder", " ./folder/ ", "~/folder", "link", str(tmp_path / "link" / ".")):
        assert settled(source) == folder
    for source in ("folder/linked.gguf", "link/linked.gguf", "~/link/../folder/linked.gguf"):
        assert settled(source) == f"{folder}/linked.gguf", "what it points to is no .gguf"
    for source in ("", "owner/name", HUB_FILE, "folder/none.gguf"):
        assert settled(f" {source} ") == source


def test_a_file_from_the_hub_is_read_where_the_cache_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, model = str(tmp_path / "kept.gguf"), ToyBackend()
    asked: list[tuple[str, Runtime]] = []

    def load(source: str, runtime: Runtime) -> ToyBackend:
        asked.append((source, runtime))
        return model

    def need(source: str, runtime: Runtime) -> Need:
        asked.append((source, runtime))
        return Need(1, 2, 3)

    monkeypatch.setattr("engine.models.load_llamacpp.load_gguf", load)
    monkeypatch.setattr("engine.models.load_llamacpp.need", need)
    kept = {("owner/name-GGUF", "part/of/it-Q4_K_M.gguf"): path}
    monkeypatch.setattr("engine.models.hub.cached", lambda *asked: kept.get(asked))
    assert MODEL_LOADERS.load(HUB_FILE, RUNTIME) is model
    assert MODEL_LOADERS.need(HUB_FILE, RUNTIME) == Need(1, 2, 3)
    assert asked == [(path, RUNTIME)] * 2
    with pytest.raises(ModelError, match="is known once it is here"):
        MODEL_LOADERS.need("owner/name:gone.gguf", RUNTIME)


def test_every_format_answers_for_its_models() -> None:
    """What a newcomer must tell, and that no two formats claim one thing."""
    assert FORMATS[-1].recognises("anything at all"), "the last one takes the rest"
    assert len({each.kind for each in FORMATS}) == len(FORMATS)
    settings = [name for each in FORMATS for name in each.settings]
    own = {item.name for item in fields(Runtime)} - {"context_length", "threads", "head"}
    assert sorted(settings) == sorted(own)
    for each in FORMATS:
        if each.elsewhere:
            assert each.located("http://it/v1") == "http://it/v1", "nothing is to be downloaded"
            assert each.name("http://h/v1#it") == "it" and each.name("http://") == "http://"
            continue
        source = f"/models/it{each.ending}"
        assert format_of(source) is each and each.name(source) == "it"
        assert each.located(source) == source
        assert list(each.find("/models", ["it.txt"])) == [] == list(each.weight_files(Path(source)))


def test_models_on_this_machine_need_no_download() -> None:
    assert MODEL_LOADERS.present(str(EMBEDDED)) and not MODEL_LOADERS.present(
        "owner/name:file.gguf"
    )
    assert MODEL_LOADERS.download(str(EMBEDDED), lambda *_: None, lambda: False) == str(EMBEDDED)
    assert str(EMBEDDED) in MODEL_LOADERS.scan(str(EMBEDDED.parent))


def test_nothing_heavy_is_imported_before_a_model_is_read() -> None:
    heavy = {"torch", "transformers", "llama_cpp", "huggingface_hub"}
    names = "app.service.session, app.service.models"
    code = f"import sys, {names}; print(*({heavy!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
