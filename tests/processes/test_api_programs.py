"""The program as other programs meet it: `strata serve` in a fresh interpreter, curl, `llm`."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from app.arguments import EMBEDDED
from storage.api_keys import ApiKeys
from storage.database import Database
from tests.conftest import ROOT
from tests.support.calling import call
from tests.support.scripted import Scripted
from tests.support.served import served

pytestmark = pytest.mark.model
NO_PAGE = """
import sys
class Never:
    def find_spec(self, name, path, target=None):
        assert name.partition(".")[0] not in ("gradio", "gradio_client", "plotly"), name
sys.meta_path.insert(0, Never())
from app.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""`strata`, in an interpreter that breaks off when it is to import the page."""


@dataclass
class Running:
    """The program under its address."""

    address: str
    folder: Path
    process: "subprocess.Popen[str]"


def started(folder: Path, *arguments: str, before: str = "") -> Running:
    """The program without a page, once it listens and has a model."""
    code = before + NO_PAGE
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--data-dir", str(folder)]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said, address = "", ""
    assert process.stdout is not None
    for line in process.stdout:
        said += line
        if found := re.search(r"ready at (http\S+)/v1", line):
            address = found[1]
        if "is loaded" in line and address:
            return Running(address, folder, process)
    raise AssertionError(f"The program ended with {process.wait()}:\n{said}")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("served")
    running = started(folder, "--parallel", "4", "--dtype", "float32")
    yield running
    running.process.terminate()
    assert running.process.stdout is not None
    rest = running.process.stdout.read()
    assert running.process.wait(60) in (0, -15) and "Traceback" not in rest
    running.process.stdout.close()


@pytest.mark.parametrize(
    ("option", "value"), [("--dtype", "float8"), ("--head", "/no/head"), ("--model", str(ROOT))]
)
def test_it_ends_with_one_message_if_its_model_cannot_be_loaded(
    tmp_path: Path, option: str, value: str
) -> None:
    """What starts it knows by its status. Its output ends once the engine's process has ended."""
    command = [sys.executable, "-c", NO_PAGE, "serve", "--port", "0", "--data-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, option, value],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("strata: The") and repr(value) in line


GOODBYE = """
from app.api import routes
routes.GOODBYE, routes.ABANDONED = {}, 3600
"""
"""For how many seconds answers go on once the program is to end."""
ENDLESS = {
    "prompt": "Once",
    "n": 16,
    "max_tokens": 4000,
    "guided_regex": "[a-z ]{9000}",
    "stream": True,
}
"""A request whose choices fill the context, one after the other."""


@pytest.mark.parametrize("all_of_them", [True, False], ids=["group", "app"])
def test_a_termination_is_no_crash(tmp_path: Path, all_of_them: bool) -> None:
    """Systems send the signal to the app, or to all of its processes. An answer that takes too long
    is stopped, and its program is told."""
    running = started(tmp_path, "--parallel", "1", before=GOODBYE.format(0))
    (engine,) = (
        each
        for each in psutil.Process(running.process.pid).children()
        if "resource_tracker" not in " ".join(each.cmdline())
    )
    url = f"{running.address}/v1/completions"
    with httpx.stream("POST", url, json=ENDLESS, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        if all_of_them:
            os.killpg(running.process.pid, signal.SIGTERM)
        else:
            running.process.terminate()
        last = [line for line in lines if line][-1]
    assert "The answer was stopped, as the program ends" in last
    assert running.process.stdout is not None
    assert running.process.stdout.read().strip() == ""
    assert running.process.wait(60) == 0 and not engine.is_running()
    running.process.stdout.close()


@pytest.mark.parametrize(
    ("output", "option", "words"),
    [
        (">&-", ("--dtype", "float8"), "The dtype 'float8' is unknown"),
        (">/dev/full", (), "The output cannot be written (No space left on device)"),
    ],
    ids=["closed", "full"],
)
def test_it_runs_with_a_closed_output_and_ends_with_a_full_one(
    tmp_path: Path, output: str, option: tuple[str, ...], words: str
) -> None:
    command = [sys.executable, "-c", NO_PAGE, "serve", "--port", "0", "--data-dir", str(tmp_path)]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {output}', "sh", *command, *option],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("strata: ") and words in last
    assert "Traceback" not in done.stderr


def test_a_second_interrupt_ends_an_answer_at_once(tmp_path: Path) -> None:
    running = started(tmp_path, "--parallel", "1", before=GOODBYE.format(3600))
    url = f"{running.address}/v1/completions"
    with httpx.stream("POST", url, json=ENDLESS, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        running.process.send_signal(signal.SIGINT)
        with pytest.raises(httpx.TransportError):
            while httpx.get(f"{running.address}/health", timeout=60):
                pass
        running.process.send_signal(signal.SIGINT)
        last = [line for line in lines if line][-1]
    assert "The answer was stopped, as the program ends" in last
    assert running.process.stdout is not None
    assert running.process.stdout.read().strip() == "" and running.process.wait(60) == 0
    running.process.stdout.close()


def printed(running: Running, *words: str) -> str:
    """What the program prints until a line has all these words."""
    assert running.process.stdout is not None
    said = ""
    for line in running.process.stdout:
        said += line
        if all(word in line for word in words):
            return said
    raise AssertionError(f"The program ended with {running.process.wait()}:\n{said}")


def kill_engine(running: Running) -> None:
    """End the process that holds the model, without warning."""
    holders = psutil.Process(running.process.pid).children()
    max(holders, key=lambda process: process.memory_info().rss).kill()


@pytest.mark.soak
def test_every_end_of_the_engine_is_printed_and_it_is_tried_again(tmp_path: Path) -> None:
    """Killed, killed as soon as it is healthy again, and killed once more."""
    shutil.copytree(EMBEDDED, tmp_path / "mine")  # of no other format, which would take its place
    running = started(tmp_path / "data", "--model", str(tmp_path / "mine"))
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    with httpx.Client(base_url=running.address, timeout=60) as client:
        kill_engine(running)
        first = printed(running, "mine is being loaded again.")
        assert "ended (SIGKILL)" in first
        while client.get("/health").status_code != 200:
            pass
        kill_engine(running)
        again = printed(running, "mine is being loaded again.")
        assert "while" not in again
        printed(running, "mine is loaded again.")
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        kill_engine(running)
        last = printed(running, "for the third time", "is tried again in 30 seconds.")
        assert "Models tab" not in first + again + last
        found = client.post("/v1/chat/completions", json=body)
        assert found.status_code == 503 and "Models tab" not in found.text
        assert "It is tried again in" in found.json()["error"]["message"]
        assert "It is tried again in" in client.get("/health").json()["error"]["message"]
    running.process.terminate()
    assert running.process.wait(60) in (0, -15)
    assert running.process.stdout is not None
    running.process.stdout.close()


@pytest.mark.soak
def test_a_request_loads_the_model_that_it_names(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path / "models" / "mine")
    running = started(tmp_path, "--api-load")
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    with httpx.Client(base_url=running.address, timeout=120) as client:
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert names == ["tiny-chat", "mine"]
        for name in ("mine", "tiny-chat"):
            found = client.post("/v1/chat/completions", json=body | {"model": name})
            assert found.json()["model"] == name
    running.process.terminate()
    assert running.process.wait(60) in (0, -15)
    assert running.process.stdout is not None
    running.process.stdout.close()


def test_it_answers_without_a_page_and_without_gradio(program: Running) -> None:
    """Gradio would have ended the interpreter that serves this."""
    with openai.OpenAI(base_url=f"{program.address}/v1", api_key="any") as client:
        found = client.chat.completions.create(
            model="tiny-chat",
            messages=[{"role": "user", "content": "Tell me about the sea."}],
            seed=3,
            max_tokens=40,
        )
    assert found.choices[0].message.content
    assert found.model_extra is not None and found.model_extra["timings"]["predicted_n"] > 3
    assert httpx.get(program.address, timeout=60).status_code == 404
    assert httpx.get(f"{program.address}/health", timeout=60).json() == {"status": "ok"}


def test_curl_is_answered_line_by_line(program: Running) -> None:
    curl = shutil.which("curl")
    assert curl, "This test needs curl: apt-get install curl."
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 8}
    )
    command = [curl, "-sN", f"{program.address}/v1/chat/completions", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 2
    for line in lines[:-1]:
        assert json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk"


def test_open_webui_s_requests_are_answered(program: Running) -> None:
    """As it sends them: models with a key in the header, streams with usage, its own fields."""
    with Database(program.folder / "strata.db") as database:
        key, secret = ApiKeys(database).make("Open WebUI")
    headers = {"authorization": f"Bearer {secret}", "x-openwebui-user-name": "ann"}
    with httpx.Client(base_url=f"{program.address}/v1", headers=headers, timeout=60) as client:
        (model,) = client.get("/models").json()["data"]
        body = {
            "stream": True,
            "model": model["id"],
            "messages": [
                {"role": "system", "content": "You help."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            ],
            "stream_options": {"include_usage": True},
            "temperature": 0.7,
            "max_tokens": 12,
            "metadata": {"chat_id": "1"},
        }
        with client.stream("POST", "/chat/completions", json=body) as response:
            assert response.status_code == 200
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        last = json.loads(lines[-1])
        assert last["usage"]["completion_tokens"] > 0 and last["choices"] == []
        title = {
            "model": model["id"],
            "stream": False,
            "max_completion_tokens": 10,
            "messages": [{"role": "user", "content": "### Task:\nGenerate a title."}],
        }
        assert client.post("/chat/completions", json=title).json()["choices"][0]["message"]
    with Database(program.folder / "strata.db") as database:
        (known,) = [each for each in ApiKeys(database).list() if each.id == key.id]
        assert known.used is not None


@dataclass(frozen=True)
class Llm:
    """The program `llm`, with models that it finds in a file of its own."""

    folder: Path

    def know(self, address: str, model: str, **models: str) -> None:
        lines = (
            f"- {{model_id: {name}, model_name: {model}, api_base: {address}/v1, "
            f"api_key_name: strata, supports_tools: true, supports_schema: true, {more}}}\n"
            for name, more in models.items()
        )
        (self.folder / "extra-openai-models.yaml").write_text("".join(lines))
        (self.folder / "keys.json").write_text('{"strata": "any"}')

    def __call__(self, *words: str, said: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *words],
            env={**os.environ, "LLM_USER_PATH": str(self.folder)},
            input=said,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def llm(tmp_path: Path) -> Llm:
    return Llm(tmp_path)


@pytest.mark.soak
def test_llm_talks_to_it_as_to_any_model(program: Running, llm: Llm) -> None:
    """With a stream and without, on and on, in a chat, and in the format of a schema."""
    llm.know(program.address, "tiny-chat", strata="")
    options = ["-m", "strata", "-o", "seed", "5", "-o", "max_tokens", "30"]
    said = llm("Tell me about the sea.", *options)
    assert said and said == llm("Tell me about the sea.", *options, "--no-stream")
    assert llm("And then?", "-c", *options)
    assert said in llm("chat", *options, said="Tell me about the sea.\nexit\n")
    wet = {"properties": {"wet": {"enum": [True]}}, "required": ["wet"]}
    schema = json.dumps({"type": "object", "additionalProperties": False, **wet})
    assert llm("Is the sea wet?", *options, "--schema", schema) == '{"wet":true}'


@pytest.mark.soak
@pytest.mark.parametrize("more", ["", "responses: true"], ids=["completions", "responses"])
def test_llm_runs_the_functions_that_a_model_calls(llm: Llm, more: str) -> None:
    function = """
def depth(of: str) -> str:
    return f"The {of} is 4 km deep"
"""

    def script(prompt: str) -> str:
        if "<tool_response>" in prompt:
            return prompt.rpartition("<tool_response>")[2].partition("<")[0]
        return f"I look.\n{call('depth', of='sea')}" if '"depth"' in prompt else "I cannot."

    with served(Scripted(script)) as made:
        llm.know(made.address, "scripted", strata=more)
        for stream in ((), ("--no-stream",)):
            said = llm("How deep is it?", "-m", "strata", "--functions", function, *stream)
            assert said.startswith("I look.") and said.endswith("The sea is 4 km deep")
        assert llm("And now?", "-c", "--functions", function) == "depth: The sea is 4 km deep"


QUESTIONS = (
    "Tell me a story about the sea.",
    "Write a list of ten animals.",
    "Why is the sky blue?",
    "Once upon a time",
    "Write code that adds two numbers.",
    "Describe a house in the mountains.",
)


def asked(client: httpx.Client, number: int) -> str:
    """The text of one answer, streamed."""
    messages = [{"role": "system", "content": "You are brief. " * 20}]
    messages.append({"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]})
    body = {"messages": messages, "max_tokens": 60, "seed": number, "temperature": 0.7}
    text = ""
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                text += choices[0]["delta"].get("content") or "" if choices else ""
    return text


def test_requests_are_answered_at_once_with_the_texts_of_one_after_the_other(
    program: Running,
) -> None:
    """Also those of one program, whose prompts begin alike."""

    def counted(name: str) -> float:
        figures = client.get("/metrics").text
        found = re.search(rf"^strata_{name}_total\S* (\S+)", figures, re.MULTILINE)
        return float(found[1]) if found else 0.0

    with httpx.Client(base_url=program.address, timeout=120) as client:
        beside, steps = counted("beside"), counted("forwards")
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(partial(asked, client), range(8)))
        beside, steps = counted("beside") - beside, counted("forwards") - steps
        assert beside > steps > 0, "two or more on average"
        assert [asked(client, number) for number in range(8)] == together


@pytest.mark.soak
def test_answers_at_once_end_with_their_engine_and_further_ones_begin(tmp_path: Path) -> None:
    """Killed while four answer: each is told, and the same requests succeed later."""
    shutil.copytree(EMBEDDED, tmp_path / "mine")
    running = started(tmp_path / "data", "--parallel", "4", "--model", str(tmp_path / "mine"))

    def told(number: int) -> str:
        body = {"prompt": QUESTIONS[number], "max_tokens": 4000, "guided_regex": "[a-z ]{9000}"}
        return client.post("/v1/completions", json=body).json()["error"]["message"]

    with httpx.Client(base_url=running.address, timeout=120) as client, ThreadPoolExecutor() as own:
        answers = [own.submit(told, number) for number in range(4)]
        time.sleep(1)
        kill_engine(running)
        assert all("ended" in answer.result() for answer in answers)
        printed(running, "mine is loaded again.")
        assert all(list(own.map(partial(asked, client), range(4))))
    running.process.terminate()
    assert running.process.stdout is not None
    running.process.stdout.read()
    assert running.process.wait(60) in (0, -15)
    running.process.stdout.close()
