"""Sources: every way to name a model, bytes from a hub on this machine, and what goes wrong."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import close_session, constants, file_download
from huggingface_hub.utils import WeakFileLock

from engine.errors import Cancelled, ModelError
from engine.models import hub as hub_module
from engine.models import llama_cpp_python, loaders
from engine.models.formats import format_of
from engine.models.gguf_files import HubFile, heads_for, hub_file
from engine.models.hub import check_reachable
from engine.models.loaders import present, scan
from tests.support.hub import COMMIT, Hub, serving

BYTES = bytes(range(256)) * 40
GGUF = b"GGUF" + BYTES
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "generation_config.json": b"{}",
    "model.safetensors": BYTES,
    "README.md": b"# A model",
    "pytorch_model.bin": b"pickled",
    "modeling_own.py": b"print()",
    "tokenizer.py": b"print()",
    "consolidated.safetensors": BYTES + b"!",
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = b'{"weight_map": {"a": "%s", "b": "%s", "c": "%s"}}' % tuple(
    name.encode() for name in (*SHARDS, SHARDS[0])
)
PARTS = [f"deep/big-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
REPOS = {
    "some/one": {"a.gguf": GGUF, "b.gguf": GGUF + b"b", "mmproj.gguf": GGUF},
    "some/split": {part: GGUF + part.encode() for part in PARTS},
    "some/model": MODEL,
    "some/shards": {**MODEL, "model.safetensors.index.json": INDEX}
    | dict(zip(SHARDS, (BYTES, BYTES + b"2"), strict=True)),
    "some/many": {f"{number:02}.gguf": GGUF for number in range(11)},
    "some/empty": {"README.md": b""},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server, and the hub's client set to ask it, in small bites and without rests."""
    with serving(Hub({repo: dict(files) for repo, files in REPOS.items()})) as hub:
        ask(hub.url, tmp_path / "cache", monkeypatch)
        yield hub
    close_session()


def ask(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "DOWNLOAD_CHUNK_SIZE": 1000,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None))


class Watch:
    """Notes the progress; stops after so many bytes."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at, self.seen = stop_at, [(0, 0)]

    def progress(self, done: int, total: int) -> None:
        self.seen.append((done, total))

    def cancelled(self) -> bool:
        return self.stop_at is not None and self.seen[-1][0] >= self.stop_at

    def check(self, total: int) -> None:
        """It never falls, every step is of one whole, and all of it came."""
        steps = self.seen[1:]
        assert steps == sorted(steps) and {whole for _, whole in steps} == {total}
        assert steps[-1] == (total, total)


def get(source: str, watch: Watch | None = None) -> Path:
    watch = watch or Watch()
    found = loaders.download(source, watch.progress, watch.cancelled)
    return Path(found)


def refused(source: str) -> str:
    with pytest.raises(ModelError) as told:
        get(source)
    text = str(told.value)
    assert text.endswith(".") and "\n" not in text
    assert source.partition(":")[0] in text
    return text


def parts(cache: Path) -> list[int]:
    """The sizes of what was left behind."""
    return [path.stat().st_size for path in cache.rglob("*.part")]


# What a source names.


def test_a_file_on_the_hub_is_named_after_a_colon() -> None:
    assert hub_file("some/one:a.gguf") == HubFile("some/one", "a.gguf")
    assert hub_file("so-me/o.n_e:Q4/a.GGUF") == HubFile("so-me/o.n_e", "Q4/a.GGUF")
    for other in ("some/one", "one:a.gguf", "a/b/c:d.gguf", "some/one:a.bin", "/a/b:c.gguf", "",
                  "C:/models/a.gguf", "./b:c.gguf", "a.gguf"):  # fmt: skip
        assert hub_file(other) is None, other


def test_a_path_that_exists_is_no_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "one:a.gguf").write_bytes(GGUF)
    assert hub_file("some/one:a.gguf") is None and present("some/one:a.gguf")


def test_local_sources_need_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (str(tmp_path), "./nowhere", "missing.gguf", "a/b/c.gguf"):
        assert format_of(source).located(source) == source
        assert get(source, Watch(stop_at=0)) == Path(source)
    assert format_of("~/model").located("~/model") == str(tmp_path / "model")


# Downloads.


def test_a_file_is_downloaded_once_into_the_hubs_cache(hub: Hub, tmp_path: Path) -> None:
    assert not present("some/one:a.gguf")
    watch = Watch()
    path = get("some/one:a.gguf", watch)
    assert path.name == "a.gguf" and path.read_bytes() == GGUF
    watch.check(len(GGUF))
    assert len(watch.seen) > 10, "told all along, not only at the end"
    assert file_download.try_to_load_from_cache("some/one", "a.gguf") == str(path)
    assert present("some/one:a.gguf") and not present("some/one:b.gguf")
    hub.asked.clear()
    assert get("some/one:a.gguf") == path and hub.asked == []
    assert not parts(tmp_path)


def test_every_part_of_a_split_file_comes_and_the_first_is_the_path(hub: Hub) -> None:
    watch = Watch()
    path = get(f"some/split:{PARTS[1]}", watch)
    assert path.read_bytes() == GGUF + PARTS[0].encode()
    assert sorted(p.name for p in path.parent.iterdir()) == [p.split("/")[1] for p in PARTS]
    watch.check(3 * len(GGUF + PARTS[0].encode()))
    path.with_name("big-00003-of-00003.gguf").unlink()
    assert not present(f"some/split:{PARTS[0]}")


def test_the_head_that_is_made_for_a_file_comes_with_it(hub: Hub) -> None:
    names = ("big-Q4.gguf", "big-F16.gguf", "mtp-big-F16.gguf", "mtp-small.gguf", "eagle3-x.gguf")
    hub.repos["some/headed"] = {**dict.fromkeys(names, GGUF), "old/mtp-big-Q4.gguf": GGUF}
    path = get("some/headed:big-Q4.gguf")
    assert path.name == "big-Q4.gguf"
    assert {each.name for each in path.parent.iterdir()} == {"big-Q4.gguf", "mtp-big-F16.gguf"}


@pytest.mark.parametrize(
    ("model", "others", "heads"),
    [
        ("target.gguf", ["small.gguf", "mid.gguf"], ["eagle3-target.gguf"]),
        ("small.gguf", ["target.gguf", "mid.gguf"], []),
        ("small.gguf", ["TARGET-Q8_0.gguf"], []),
        # A head serves its model whatever the kind of either's weights.
        ("big-it-Q8_0.gguf", ["big-it-UD-Q4_K_XL.gguf"], ["mtp-big-it-UD-Q4_K_XL.gguf"]),
        ("big-it-BF16-00001-of-00002.gguf", ["big-it.gguf"], ["mtp-big-it-Q4_0.gguf"]),
        ("Qwen3.5-4B-Q4_0.gguf", ["Qwen3.5-9B-Q4_0.gguf"], []),
        ("Qwen3.5-9B-Q4_0.gguf", ["Qwen3.5-4B-Q4_0.gguf"], ["mtp-Qwen3.5-9B-F16.gguf"]),
        # A file that is no model has no head.
        ("big.gguf", ["mmproj-other.gguf"], ["eagle3-mmproj-other.gguf"]),
        ("big-Q4_K_M.gguf", ["small-Q4_K_M.gguf"], ["dflash-big-Q8_0.gguf"]),
        # One like no model beside it may be that of any.
        ("big.gguf", ["small.gguf"], ["mtp-x.gguf"]),
    ],
)
def test_a_head_by_its_name_is_that_of_the_model_most_like_it(
    model: str, others: list[str], heads: list[str]
) -> None:
    there = heads or ["mtp-Qwen3.5-9B-F16.gguf" if "Qwen" in model else "eagle3-target.gguf"]
    files = [*others, model, *there]
    assert heads_for(model, files) == heads
    assert heads_for(f"a/{model}", ["b/mtp-big.gguf", *(f"a/{each}" for each in files)]) == [
        f"a/{each}" for each in heads
    ]


def test_of_a_transformers_repository_comes_what_loading_needs(hub: Hub) -> None:
    watch = Watch()
    folder = get("some/model", watch)
    names = {name for name in MODEL if name.endswith(".json")} | {"model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    assert all((folder / name).read_bytes() == MODEL[name] for name in names)
    watch.check(sum(len(MODEL[name]) for name in names))
    assert present("some/model") and get("some/model") == folder
    assert not [line for line in hub.asked if line.endswith((".bin", ".py"))]


def test_of_weights_in_shards_come_those_of_the_index(hub: Hub) -> None:
    folder = get("some/shards")
    assert {path.name for path in folder.glob("*.safetensors")} == set(SHARDS)
    assert present("some/shards")
    (folder / SHARDS[1]).unlink()
    assert not present("some/shards")
    get("some/shards")
    assert present("some/shards") and len(hub.fetched(SHARDS[1])) == 1, "its content was there"


def test_the_log_in_stays_with_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    get("some/one:a.gguf")
    tokens = {path.split("/")[1] for path, token in hub.tokens if token == "Bearer hf_secret"}
    assert tokens == {"api", "some"} and ("/cdn/some/one/a.gguf", None) in hub.tokens


def test_on_a_system_without_links_one_copy_is_kept(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    get("some/one:a.gguf")
    copies = [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size >= len(GGUF)]
    assert [path.name for path in copies] == ["a.gguf"]
    assert present("some/one:a.gguf")


# Interruptions.


def test_a_cancelled_download_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(Cancelled, match="stopped"):
        get("some/one:a.gguf", Watch(stop_at=4000))
    assert not present("some/one:a.gguf")
    (kept,) = parts(tmp_path)
    assert 0 < kept <= 5000 < len(GGUF)
    watch = Watch()
    assert get("some/one:a.gguf", watch).read_bytes() == GGUF
    assert hub.fetched("a.gguf")[-1].endswith(f"bytes={kept}-")
    assert watch.seen[2] == (kept, len(GGUF))
    watch.check(len(GGUF))
    assert not parts(tmp_path)


def test_a_broken_connection_is_taken_up_again(hub: Hub) -> None:
    hub.breaks_after = 3000
    watch = Watch()
    assert get("some/one:a.gguf", watch).read_bytes() == GGUF
    watch.check(len(GGUF))
    assert len(hub.fetched("a.gguf")) > 2


def test_a_connection_that_stays_broken_is_told_and_its_part_stays(
    hub: Hub, tmp_path: Path
) -> None:
    with pytest.raises(Cancelled):
        get("some/one:a.gguf", Watch(stop_at=2000))
    kept = parts(tmp_path)
    hub.breaks_after = 0
    assert "broke off" in (text := refused("some/one:a.gguf")) and "try again" in text
    assert parts(tmp_path) == kept and kept[0] > 0
    hub.breaks_after = None
    assert get("some/one:a.gguf").read_bytes() == GGUF


def test_a_server_that_sends_everything_again_spoils_nothing(hub: Hub) -> None:
    with pytest.raises(Cancelled):
        get("some/one:a.gguf", Watch(stop_at=4000))
    hub.ranges = False
    watch = Watch()
    assert get("some/one:a.gguf", watch).read_bytes() == GGUF
    watch.check(len(GGUF))


def test_damaged_content_is_thrown_away(hub: Hub, tmp_path: Path) -> None:
    hub.damaged = True
    with pytest.raises(ModelError, match=r"'a\.gguf' arrived damaged.*download it again"):
        get("some/one:a.gguf")
    assert not parts(tmp_path) and not present("some/one:a.gguf")
    hub.damaged = False
    assert get("some/one:a.gguf").read_bytes() == GGUF


def test_two_downloads_of_one_file_do_not_mix(hub: Hub, tmp_path: Path) -> None:
    name = f"{hashlib.sha256(GGUF).hexdigest()}.lock"
    lock = tmp_path / "cache" / ".locks" / "models--some--one" / name
    lock.parent.mkdir(parents=True)
    with WeakFileLock(lock):
        assert "under way" in refused("some/one:a.gguf")
    assert get("some/one:a.gguf").read_bytes() == GGUF


# Refusals.


def test_a_file_that_is_not_there_is_told_with_those_that_are(hub: Hub) -> None:
    text = refused("some/one:c.gguf")
    assert "no file 'c.gguf'" in text and "a.gguf, b.gguf, mmproj.gguf." in text
    text = refused("some/many:c.gguf")
    assert "00.gguf, 01.gguf" in text and "07.gguf and 3 more." in text and "08.gguf" not in text
    assert "no GGUF files" in refused("some/empty:c.gguf")
    del hub.repos["some/split"][PARTS[2]]
    assert repr(PARTS[2]) in refused(f"some/split:{PARTS[0]}")


def test_a_repository_that_is_no_transformers_model_is_told(hub: Hub) -> None:
    assert "a.gguf, b.gguf" in refused("some/one") and "config.json" in refused("some/one")
    del hub.repos["some/model"]["model.safetensors"]
    assert "no model.safetensors" in refused("some/model")
    del hub.repos["some/shards"][SHARDS[0]]
    assert f"no {SHARDS[0]}" in refused("some/shards")


@pytest.mark.parametrize("source", ["no/such", "no/such:a.gguf"])
def test_a_repository_that_is_not_there(hub: Hub, source: str) -> None:
    assert "no such repository" in (text := refused(source)) and "hf auth login" in text


@pytest.mark.parametrize("source", ["some/one:a.gguf", "some/model", "some/shards"])
def test_a_gated_repository_says_what_to_do(hub: Hub, source: str) -> None:
    repo = source.partition(":")[0]
    hub.gated = {repo}
    text = refused(source)
    assert f"{hub.url}/{repo}" in text and "hf auth login" in text


@pytest.mark.parametrize(
    ("status", "words"),
    [(403, "hf auth login"), (401, "hf auth login"), (500, "error 500"), (429, "error 429")],
)
def test_a_hub_that_refuses(hub: Hub, status: int, words: str) -> None:
    hub.status = status
    assert words in refused("some/one:a.gguf")


@pytest.mark.parametrize("source", ["so--me/one", "some/one.:a.gguf", "a b", "some/a..b"])
def test_a_name_that_cannot_be(hub: Hub, source: str) -> None:
    assert not present(source)
    assert "no name on the hub" in refused(source) and hub.asked == []


def test_without_a_network_it_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Port 9 refuses connections; nothing sleeps, so this cannot have been tried for long."""
    ask("http://127.0.0.1:9", tmp_path, monkeypatch)
    for source in ("some/one:a.gguf", "some/model"):
        assert "cannot be reached" in refused(source)
        assert not present(source)
    with pytest.raises(ConnectionError, match="cannot be reached"):
        check_reachable("some/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused("some/one:a.gguf")
    close_session()


def test_a_hub_that_does_not_answer_is_given_up_on(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from socket import create_server

    monkeypatch.setattr("engine.models.hub.SECONDS", 0.05)
    with create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        assert "cannot be reached (timed out)" in refused("some/one:a.gguf")


def test_a_full_disk_is_told_before_anything_comes(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Cancelled):
        get("some/one:a.gguf", Watch(stop_at=4000))
    (kept,) = parts(tmp_path)
    hub.asked.clear()
    usage: Callable[[Path], SimpleNamespace] = lambda _: SimpleNamespace(free=free)  # noqa: E731
    monkeypatch.setattr(hub_module.shutil, "disk_usage", usage)
    free = len(GGUF) - kept - 1
    assert "HF_HOME" in (text := refused("some/one:a.gguf")) and str(tmp_path / "cache") in text
    assert not hub.fetched("a.gguf")
    free += 1
    assert get("some/one:a.gguf").read_bytes() == GGUF, "only what is missing needs room"


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "disk is full"), (errno.EACCES, "cannot be written")]
)
def test_a_disk_that_fills_up_or_is_closed(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(hub_module, "http_get", fail)
    assert words in refused("some/one:a.gguf")


# Scans.


def put(path: Path, content: bytes = GGUF) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def test_a_scan_finds_models_and_nothing_else(tmp_path: Path) -> None:
    found = [
        put(tmp_path / "a.gguf"),
        put(tmp_path / "owner" / "name" / "B.GGUF"),
        put(tmp_path / "owner" / "name" / "big-00001-of-00002.gguf"),
    ]
    put(tmp_path / "owner" / "name" / "big-00002-of-00002.gguf")
    put(tmp_path / "owner" / "name" / "mmproj-model-f16.gguf")
    put(tmp_path / "imatrix_unsloth.gguf")
    put(tmp_path / "empty.gguf", b"")
    put(tmp_path / "page.gguf", b"<html>")
    put(tmp_path / "a.gguf.part")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nowhere")
    put(tmp_path / "model" / "config.json", b"{}")
    put(tmp_path / "model" / "model.safetensors", b"")
    put(tmp_path / "no-weights" / "config.json", b"{}")
    assert scan(str(tmp_path)) == sorted([*found, str(tmp_path / "model")], key=str.casefold)


def test_a_scan_reads_the_hubs_cache(hub: Hub, tmp_path: Path) -> None:
    model, file = get("some/model"), get("some/one:a.gguf")
    other = tmp_path / "cache" / "models--some--one" / "snapshots" / ("f" * 40)
    shutil.copytree(file.parent, other, symlinks=True)
    for folder in (tmp_path, tmp_path / "cache", tmp_path / "cache" / "models--some--one"):
        assert str(file) in scan(str(folder)) and str(other / "a.gguf") not in scan(str(folder))
    assert str(model) in scan(str(tmp_path)) and COMMIT in str(model)
    assert scan(str(model)) == [str(model)]


def test_a_scan_is_not_caught_in_links_and_closed_folders(tmp_path: Path) -> None:
    path = put(tmp_path / "models" / "a.gguf")
    for name in ("loop", "again"):
        (tmp_path / "models" / name).symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert scan(str(tmp_path)) == [path]


def test_what_cannot_be_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, closed = put(tmp_path / "a.gguf"), put(tmp_path / "closed.gguf")
    put(tmp_path / "folder" / "c.gguf")
    listdir = os.listdir

    def denied(folder: str) -> list[str]:
        if folder.endswith("folder"):
            raise PermissionError(folder)
        return listdir(folder)

    def opened(file: str, mode: str) -> object:
        if file == closed:
            raise PermissionError(file)
        return open(file, mode)

    monkeypatch.setattr("engine.models.loaders.os.listdir", denied)
    monkeypatch.setattr("engine.models.gguf_files.open", opened, raising=False)
    assert scan(str(tmp_path)) == [path]


def test_a_scan_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "1" / "2" / "3" / "4"
    path = put(deep / "a.gguf")
    put(deep / "5" / "b.gguf")
    assert scan(str(tmp_path)) == [path]
    near = [put(tmp_path / f"{number:03}.gguf") for number in range(500)]
    assert scan(str(tmp_path)) == near, "the nearest ones"
    monkeypatch.setattr("engine.models.loaders.ENTRIES", 3)
    assert scan(str(tmp_path)) == near[:3]


def test_a_scan_of_no_folder_is_told(tmp_path: Path) -> None:
    for folder in (str(tmp_path / "nowhere"), put(tmp_path / "a.gguf"), ""):
        with pytest.raises(ModelError, match="no folder"):
            scan(folder)


# checked before they are listed


CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'


def check(source: str) -> int:
    return loaders.check(source)


def test_what_is_on_the_hub_is_known_with_its_bytes_and_nothing_large_comes(hub: Hub) -> None:
    hub.repos["some/model"] = {**MODEL, "config.json": CONFIG}
    whole = sum(len(hub.repos["some/model"][name]) for name in MODEL if is_loaded(name))
    assert check("some/model") == whole
    assert check("some/one:a.gguf") == len(GGUF)
    assert check("some/split:" + PARTS[0]) == sum(len(GGUF) + len(part) for part in PARTS)
    assert not hub.fetched("")


def is_loaded(name: str) -> bool:
    return name.endswith(".json") or name == "model.safetensors"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("some/gone", "no such repository"),
        ("some/one:gone.gguf", "has no file 'gone.gguf'"),
        ("some/one:mmproj.gguf", "its name says mmproj"),
        ("some/empty", "has no config.json"),
        ("some/one", "Name one of its GGUF files"),
        ("no name at all", "no name on the hub"),
        ("./nowhere", "There is no './nowhere' on this machine"),
        ("/nowhere/model.gguf", "There is no '/nowhere/model.gguf' on this machine"),
    ],
)
def test_what_is_not_there_is_not_listed(hub: Hub, source: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        check(source)


def test_a_file_that_is_not_there_needs_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp_python, "installed", lambda: False)
    gone, there = str(tmp_path / "gone.gguf"), put(tmp_path / "a.gguf")
    with pytest.raises(ModelError, match=r"^There is no .*gone\.gguf' on this machine"):
        check(gone)
    with pytest.raises(ModelError, match="there is no such file"):
        loaders.load(gone)
    for source in (there, "some/one:a.gguf"):
        with pytest.raises(ModelError, match="GGUF support is not set up"):
            check(source)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config.json": b'{"architectures": ["BertModel"]}'}, r"left to right \(BertModel\)"),
        ({"config.json": b'{"is_encoder_decoder": true}'}, "an encoder with a decoder"),
        ({"config.json": b"[1]"}, "config.json cannot be read"),
        ({"config.json": b"{" * 9}, "config.json cannot be read"),
        ({"tokenizer.json": None}, "it has no tokenizer"),
    ],
)
@pytest.mark.grid(1)
@pytest.mark.parametrize("where", ["hub", "disk"])
def test_what_does_not_write_text_is_not_listed(
    hub: Hub, tmp_path: Path, where: str, changes: dict[str, bytes | None], words: str
) -> None:
    files = {**MODEL, "config.json": CONFIG, **changes}
    there = {name: content for name, content in files.items() if content is not None}
    source = "some/model"
    hub.repos[source] = there
    if where == "disk":
        source = str(tmp_path / "model")
        for name, content in there.items():
            put(tmp_path / "model" / name, content)
    with pytest.raises(ModelError, match=words):
        check(source)


# taken from the disk


def remove(source: str, *folders: Path) -> int:
    return loaders.remove(source, folders)


def test_a_file_of_the_hub_goes_with_its_content_and_the_others_stay(
    hub: Hub, tmp_path: Path
) -> None:
    kept, gone = get("some/one:a.gguf"), get("some/one:b.gguf")
    assert remove("some/one:b.gguf") == len(GGUF) + 1
    assert not gone.exists() and kept.read_bytes() == GGUF
    assert present("some/one:a.gguf") and not present("some/one:b.gguf")
    assert remove("some/one:a.gguf") == len(GGUF)
    assert not (tmp_path / "cache" / "models--some--one").exists()
    with pytest.raises(ModelError, match="outside of the folders"):
        remove("some/one:a.gguf")


def test_a_head_goes_with_the_last_file_that_it_serves(hub: Hub, tmp_path: Path) -> None:
    names = ("big-Q4.gguf", "big-F16.gguf", "mtp-big.gguf")
    hub.repos["some/headed"] = {name: GGUF + name.encode() for name in names}
    gone, kept = get("some/headed:big-Q4.gguf"), get("some/headed:big-F16.gguf")
    head = kept.with_name("mtp-big.gguf")
    assert remove("some/headed:big-Q4.gguf") == len(GGUF + b"big-Q4.gguf")
    assert head.exists() and kept.exists() and not gone.exists()
    remove("some/headed:big-F16.gguf")
    assert not (tmp_path / "cache" / "models--some--headed").exists()


def test_all_parts_of_a_split_file_go(hub: Hub, tmp_path: Path) -> None:
    get("some/split:" + PARTS[0])
    assert remove("some/split:" + PARTS[0]) == sum(len(GGUF) + len(part) for part in PARTS)
    assert not (tmp_path / "cache" / "models--some--split").exists()


def test_a_download_that_was_stopped_goes_too(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(Cancelled):
        get("some/one:a.gguf", Watch(2000))
    assert remove("some/one:a.gguf") >= 2000
    assert not (tmp_path / "cache" / "models--some--one").exists()


def test_a_model_of_the_hub_goes_and_its_gguf_files_stay(hub: Hub) -> None:
    hub.repos["some/model"] = {**MODEL, "x.gguf": GGUF}
    get("some/model")
    file = get("some/model:x.gguf")
    once = {MODEL[name] for name in MODEL if is_loaded(name)}
    assert remove("some/model") == sum(map(len, once))
    assert file.is_file() and not present("some/model")


def test_what_was_found_in_the_cache_by_its_path_goes_like_that(hub: Hub, tmp_path: Path) -> None:
    get("some/one:a.gguf")
    path = get("some/one:b.gguf")
    assert remove(str(path)) == len(GGUF) + 1
    assert not path.is_symlink() and present("some/one:a.gguf")
    folder = get("some/model")
    assert remove(str(folder)) > 0 and not (tmp_path / "cache" / "models--some--model").exists()


def test_what_lies_in_a_folder_of_ours_goes_and_what_lies_elsewhere_stays(
    hub: Hub, tmp_path: Path
) -> None:
    ours = tmp_path / "data" / "models"
    mine, other = put(ours / "a.gguf"), put(tmp_path / "a.gguf")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "notes.txt"):
        put(ours / "one" / name, b"12345")
    link = ours / "linked.gguf"
    link.symlink_to(other)
    assert remove(mine, ours) == len(GGUF) and not Path(mine).exists()
    assert remove(str(ours / "one"), ours) == 15
    assert [path.name for path in (ours / "one").iterdir()] == ["notes.txt"]
    assert remove(str(link), ours) < len(GGUF) and not link.is_symlink()
    for source in (other, f"{ours}/../../a.gguf", str(ours), str(tmp_path)):
        with pytest.raises(ModelError, match="outside of the folders"):
            remove(source, ours)
    assert Path(other).read_bytes() == GGUF


def test_a_folder_that_is_a_link_out_of_ours_is_not_touched(tmp_path: Path) -> None:
    ours, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    put(elsewhere / "a.gguf")
    ours.mkdir()
    (ours / "linked").symlink_to(elsewhere)
    for source in (ours / "linked", ours / "linked" / "a.gguf"):
        with pytest.raises(ModelError, match="outside of the folders"):
            remove(str(source), ours)
    assert (elsewhere / "a.gguf").is_file()


def test_what_cannot_be_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlink(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    mine = put(tmp_path / "models" / "a.gguf")
    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(ModelError, match="could not be deleted .*Permission denied"):
        remove(mine, tmp_path / "models")
