"""The command line: defaults that keep to this machine, passwords that nobody has to remember."""

import io
import json
import os
import runpy
import socket
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import fields
from errno import ENOSPC
from pathlib import Path
from typing import NoReturn

import httpx
import pytest

from app import build_statistics
from app.arguments import folder_of, is_local, parse, parse_keys
from app.cli import (
    importing,
    load,
    main,
    prepare_environment,
    report,
    serve_api,
    tell_of_keys,
)
from app.http.access import pick_port
from app.service.jobs import Progress
from engine.backends import fast_path
from engine.errors import EngineDied, ModelError, SettingError, StrataError
from engine.models import loaders
from engine.settings import Runtime
from storage.api_keys import ApiKeys
from storage.database import Database
from tests.support.inside import on_toy


def test_the_defaults_stay_on_this_machine() -> None:
    options = parse([])
    assert options.host == "127.0.0.1" and options.model == ""
    assert not options.public and options.password is None and options.browser
    assert options.port is None and options.data_dir is None
    assert options.runtime == Runtime()


def test_every_setting_of_the_runtime_is_an_option() -> None:
    given = {
        "context": ("context_length", 1024),
        "threads": ("threads", 4),
        "device": ("device", "cuda:1"),
        "dtype": ("dtype", "bfloat16"),
        "bits": ("bits", "4"),
        "gpu-layers": ("gpu_layers", -1),
        "batch-size": ("batch_size", 64),
        "flash-attention": ("flash_attention", "on"),
        "cache-type": ("cache_type", "q8_0"),
        "parallel": ("parallel", 3),
        "head": ("head", "off"),
    }
    assert {name for name, _ in given.values()} == {item.name for item in fields(Runtime)}
    arguments = [word for flag, (_, value) in given.items() for word in (f"--{flag}", str(value))]
    assert parse(arguments).runtime == Runtime(**dict(given.values()))
    for flag, (name, value) in given.items():
        assert parse([f"--{flag}", str(value)]).runtime == Runtime(**{name: value})


def test_a_server_answers_several_requests_at_once_unless_told_otherwise() -> None:
    assert parse(["serve"]).runtime == Runtime(parallel=0)
    assert parse(["serve", "--parallel", "1"]).runtime == Runtime()


def test_the_help_says_what_settings_are_for_and_names_the_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    output = " ".join(capsys.readouterr().out.split())
    for item in fields(Runtime):
        assert item.metadata["help"].rstrip(".") in output
    for command in ("serve", "keys", "ways", "vllm"):
        assert f"strata {command} --help" in output


def test_draft_models_are_separated_by_commas() -> None:
    for nothing in ([], ["--drafts", "auto"], ["--drafts", ""]):
        assert parse(nothing).drafts == (), "those that were chosen before"
    assert parse(["--drafts", "a/small, org/mid,"]).drafts == ("a/small", "org/mid")


@pytest.mark.parametrize("arguments", [["--share"], ["--host", "0.0.0.0"], ["--host", "my.lan"]])
def test_a_public_app_gets_a_password_of_its_own(arguments: list[str]) -> None:
    first, second = parse(arguments), parse(arguments)
    assert first.public and first.made_up and first.user == "guest"
    assert first.password and len(first.password) >= 16 and first.password != second.password


def test_a_given_password_is_used() -> None:
    options = parse(["--share", "--auth", "ann:s3cret:with:colons"])
    assert (options.user, options.password) == ("ann", "s3cret:with:colons")
    assert options.public and not options.made_up
    assert not parse(["--auth", "ann:x"]).public


PAGE = ("--share", "--auth=a:b", "--no-browser", "--api")
"""What is for a page is no option of the API alone."""
WRONG_ORIGINS = ("localhost", "http://a.b/", "*", "null", "file:///x", "http://a b/c")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--auth", "ann"], "USER:PASSWORD"),
        (["--auth", ":x"], "USER:PASSWORD"),
        (["--auth", ""], "USER:PASSWORD"),
        (["--port", "http"], "'http' is not a port"),
        (["--port", "70000"], "from 0 to 65535"),
        (["--threads", "-1"], "Threads cannot be -1. Give a whole number from 0 to 512."),
        (["--threads", "many"], "--threads: 'many' is not a number. Give a whole one."),
        (["srve"], "There is no command 'srve'. Give serve, keys, ways or vllm"),
        (["--context", "63"], "Context length cannot be 63"),
        (["--batch-size", "9999999"], "Batch size cannot be 9999999"),
        (["--gpu-layers", "-2"], "GPU layers cannot be -2"),
        (["--flash-attention", "maybe"], "Choose from: auto, on, off."),
        (["--cache-type", "q1"], "Cache type cannot be 'q1'"),
        (["--colour"], "--colour"),
        (["--data-dir", ""], "It is empty"),
        (["--api-load"], "--api-load"),
        *((["serve", "--api-origin", wrong], wrong) for wrong in WRONG_ORIGINS),
        *((["serve", word], "strata serve: error: ") for word in PAGE),
    ],
)
def test_nonsense_is_refused_with_its_value(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(arguments)
    *_, last = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and expected in last


def test_local_addresses() -> None:
    assert all(map(is_local, ["127.0.0.1", "localhost", "::1", "127.1.2.3"]))
    assert not any(map(is_local, ["0.0.0.0", "::", "192.168.1.5", "example.org"]))
    assert parse(["--host", "[::1]"]).host == "::1" and not parse(["--host", "[::1]"]).public


def test_the_api_is_off_unless_it_is_asked_for() -> None:
    assert not parse([]).api and parse([]).page and parse([]).origins == ()
    assert parse(["--api"]).api and parse(["--api"]).page
    alone = parse(["serve"])
    assert alone.api and not alone.page and not alone.browser and not alone.public
    assert not alone.api_load and parse(["serve", "--api-load"]).api_load


def test_the_api_alone_takes_the_options_of_a_server() -> None:
    given = ["serve", "--model", "a.gguf", "--threads", "2", "--port", "0", "--data-dir", "d"]
    options = parse([*given, "--drafts", "b", "--host", "0.0.0.0"])
    assert (options.model, options.runtime.threads, options.port) == ("a.gguf", 2, 0)
    assert options.drafts == ("b",) and str(options.data_dir) == "d"
    assert options.public and options.password is None, "keys are asked for instead"


def test_origins_of_pages_that_may_ask_are_named() -> None:
    options = parse(["serve", "--api-origin", "http://Localhost:3000", "--api-origin=https://a.b"])
    assert options.origins == ("http://localhost:3000", "https://a.b")


def test_keys_are_listed_made_and_revoked() -> None:
    assert parse_keys(["list"]) == Namespace(command="list", data_dir=None)
    making = Namespace(command="make", word="Open WebUI", data_dir=None)
    assert parse_keys(["make", "Open WebUI"]) == making
    revoking = Namespace(command="revoke", word="abc", data_dir=Path("d"))
    assert parse_keys(["revoke", "abc", "--data-dir", "d"]) == revoking
    for wrong in ([], ["make"], ["steal"]):
        with pytest.raises(SystemExit):
            parse_keys(wrong)


def test_keys_are_managed_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def strata(*words: str) -> str:
        status = main(["keys", *words, "--data-dir", str(tmp_path)])
        output = capsys.readouterr()
        assert status == (2 if words[0] != "list" and output.err else 0)
        assert not (output.out and output.err)
        return output.out + output.err

    made = strata("make", "my editor")
    secret = made.splitlines()[-1]
    assert secret.startswith("sk-strata-") and "only once" in made
    with Database(tmp_path / "strata.db") as database:
        found = ApiKeys(database).find(secret)
    assert found is not None and found.name == "my editor"
    listed = strata("list")
    assert found.id in listed and "my editor" in listed and secret not in listed
    assert "already" in strata("make", "my editor")
    assert "no longer works" in strata("revoke", found.id) and "no key yet" in strata("list")
    assert "There is no key" in strata("revoke", found.id)


class Output(io.TextIOWrapper):
    """An output that shows ASCII only."""

    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding="ascii")


class Full(Output):
    def write(self, text: str) -> NoReturn:
        raise OSError(ENOSPC, "No space left on device")


def test_any_name_of_a_key_is_shown_on_any_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output()
    monkeypatch.setattr("sys.stdout", output)
    for arguments in (["make", "é日😀"], ["list"]):
        assert main(["keys", *arguments, "--data-dir", str(tmp_path)]) == 0
    assert output.bytes.getvalue().count(rb"\xe9\u65e5\U0001f600") == 2


@pytest.mark.parametrize("output", [Full, lambda: None])
def test_a_key_that_cannot_be_shown_is_not_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: Callable[[], Output | None],
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", output())
        assert main(["keys", "make", "one", "--data-dir", str(tmp_path)]) == 2
    assert "The output cannot be written" in capsys.readouterr().err
    with Database(tmp_path / "strata.db") as database:
        assert ApiKeys(database).list() == []


def test_without_a_home_only_what_needs_it_is_refused(
    homeless: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingError, match="Name one with --data-dir"):
        folder_of(None)
    assert folder_of(Path("d")) == Path("d")
    assert build_statistics.parsed(["a.txt", "--model", "m"]).data_dir is None
    with pytest.raises(ModelError, match="~/m"):
        loaders.check_there("~/m")
    trials = runpy.run_path(str(fast_path.__file__))
    trials["remember"]("here", {"Q8_0": ""})
    trials["forget"]()
    assert trials["remembered"]("here") == {}


def test_a_library_that_cannot_use_the_environment_is_named() -> None:
    named = pytest.raises(SettingError, match=r"^json.decoder cannot be loaded \(JSONDecodeError")
    with named, importing():
        json.loads("x")


def test_variables_for_other_programs_with_gradio_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("os.environ", {"GRADIO_SERVER_PORT": "x", "GRADIO_ANALYTICS_ENABLED": "1"})
        prepare_environment(page=True)
        assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
        assert "GRADIO_SERVER_PORT" not in os.environ


@pytest.mark.parametrize(
    ("cores", "page", "threads"), [(2, True, "1"), (2, False, "2"), (8, True, "7"), (1, True, "1")]
)
def test_a_page_leaves_a_core_to_its_browser(
    monkeypatch: pytest.MonkeyPatch, cores: int, page: bool, threads: str
) -> None:
    monkeypatch.setattr("app.cli.physical_cores", lambda: cores)
    with monkeypatch.context() as patched:
        patched.setattr("os.environ", {})
        prepare_environment(page)
        assert os.environ["OMP_NUM_THREADS"] == threads
    with monkeypatch.context() as patched:
        patched.setattr("os.environ", {"OMP_NUM_THREADS": "5"})
        prepare_environment(page)
        assert os.environ["OMP_NUM_THREADS"] == "5", "the user's own value stays"


@pytest.mark.parametrize("public", [True, False])
def test_a_server_for_others_without_a_key_says_what_to_do(
    public: bool, db: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parse(["serve", *(["--host", "0.0.0.0"] if public else [])])
    tell_of_keys(options, db)
    assert ("strata keys make" in capsys.readouterr().err) is public
    ApiKeys(db).make("one")
    tell_of_keys(options, db)
    assert capsys.readouterr().err == ""


def test_a_busy_port_is_reported_with_the_option_that_chooses_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=f":{port} cannot be listened on: .*--port"):
            pick_port("127.0.0.1", port)


@pytest.mark.parametrize("port", [None, 7861])
@pytest.mark.parametrize("host", ["300.1.1.1", "192.0.2.1"])
def test_a_wrong_address_is_reported_with_the_option_for_it(host: str, port: int | None) -> None:
    with pytest.raises(SettingError, match=f"{host}' cannot be listened on .*--host"):
        pick_port(host, port)


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_load_that_ends_with_the_app_is_not_reported(
    has_ended: bool, db: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    def loading() -> Iterator[Progress]:
        yield Progress(0.0, "Loading")
        raise EngineDied("The engine was closed.")

    session, ended = on_toy(db), threading.Event()
    if has_ended:
        ended.set()
    load(session, loading(), ended, report)
    assert ("was closed" in capsys.readouterr().err) is not has_ended
    session.engine.close()


def test_a_server_ends_without_its_model_unless_that_is_tried_again(
    db: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parse(["serve", "--port", str(pick_port("127.0.0.1", 0))])
    session, statuses = on_toy(db), list[int]()

    def loaded(failed: Callable[[StrataError], None]) -> None:
        try:
            failed(EngineDied("Its process ended."))
            with httpx.Client(transport=httpx.HTTPTransport(retries=9)) as client:
                found = client.get(f"http://127.0.0.1:{options.port}/health", timeout=60)
            statuses.append(found.status_code)
        finally:
            failed(ModelError("There is no head in 'x'."))

    with pytest.raises(ModelError, match="no head in 'x'"):
        serve_api(options, session, loaded)
    out, err = capsys.readouterr()
    assert statuses == [200] and "ready at" in out
    assert "process ended" in err and "no head" not in err
    session.engine.close()


def test_a_server_whose_model_failed_before_it_listens_is_never_ready(
    db: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = on_toy(db)
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.run)
    with pytest.raises(ModelError):
        serve_api(
            parse(["serve", "--port", "0"]), session, lambda failed: failed(ModelError("none"))
        )
    assert "ready" not in capsys.readouterr().out
    session.engine.close()
