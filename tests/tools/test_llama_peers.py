"""The peers of GGUF models: which can run, that they say the same, and the programs' interface.

The programs of llama.cpp are played by small ones, which take the documented options, refuse all
others, and answer from a table.
"""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.measure import Result, match_texts
from bench.options import LLAMA_CPP, SHORT, TRANSFORMERS, kind_of, source_of
from bench.peer import PROGRAMS, Reply, paced
from bench.peers import DEFAULTS, PEERS, checked_methods, program_versions
from bench.speed import add_arguments, speed
from engine.backends.toy import ToyBackend
from engine.decode import decode
from engine.errors import ModelError, SettingError
from engine.methods import METHODS
from engine.models.loaders import name_of
from engine.settings import Generation, Runtime, Sampling
from engine.types import Step

LOOKUP_PROGRAM = """#!{python}
import argparse, json, sys
from pathlib import Path

table = json.loads(Path({table!r}).read_text())
if "--version" in sys.argv:
    print("version: 7 (lookup)", "built by hand", sep="\\n", file=sys.stderr)
    sys.exit()
options = argparse.ArgumentParser(allow_abbrev=False)
for name in ("--model", "--cache-type-k", "--cache-type-v", "--gpu-layers", "--prompt", "--color"):
    options.add_argument(name, required=True)
for name in ("--ctx-size", "--threads", "--threads-batch", "--batch-size", "--ubatch-size",
             "--top-k", "--seed", "--spec-draft-n-max", "--predict"):
    options.add_argument(name, type=int, required=True)
for name in ("--temp", "--top-p", "--min-p", "--repeat-penalty"):
    options.add_argument(name, type=float, required=True)
options.add_argument("--flash-attn", choices=["on", "off", "auto"], required=True)
options.add_argument("--no-escape", action="store_true", required=True)
asked = options.parse_args()
assert Path(asked.model).is_file()
if table["fails"]:
    print("first", table["fails"], sep="\\n", file=sys.stderr)
    sys.exit(3)
row = table["rows"][asked.prompt]
with open({log!r}, "a") as log:
    log.write(json.dumps(vars(asked)) + "\\n")
sys.stdout.write("\\n\\n" + asked.prompt + row["text"] + "\\n\\n\\n\\n")
for what, count, seconds in (("encoded", row["read"], 0.25), ("decoded", row["made"], 0.5)):
    print(f"0.00.371.853 I {{what}} {{count:4d}} tokens in {{seconds:8.3f}} seconds, speed: 1 t/s",
          file=sys.stderr)
print("0.00.371.935 I n_accept     =", row["accepted"], file=sys.stderr)
"""
SERVER_PROGRAM = """#!{python}
import argparse, json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

table = json.loads(Path({table!r}).read_text())
if "--version" in sys.argv:
    print("version: 8 (server)")
    sys.exit()
options = argparse.ArgumentParser(allow_abbrev=False)
for name in ("--model", "--cache-type-k", "--cache-type-v", "--gpu-layers", "--host"):
    options.add_argument(name, required=True)
for name in ("--ctx-size", "--threads", "--threads-batch", "--batch-size", "--ubatch-size",
             "--port", "--parallel", "--cache-ram"):
    options.add_argument(name, type=int, required=True)
options.add_argument("--flash-attn", choices=["on", "off", "auto"], required=True)
options.add_argument("--spec-type", choices=["none", "ngram-mod", "ngram-cache"], required=True)
asked = options.parse_args()
if table["fails"]:
    print("first", table["fails"], sep="\\n", file=sys.stderr)
    sys.exit(1)


def note(what):
    with open({log!r}, "a") as log:
        log.write(json.dumps(what) + "\\n")


class Handler(BaseHTTPRequestHandler):
    loading = 2

    def reply(self, status, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        assert self.path == "/health"
        Handler.loading -= 1
        if Handler.loading >= 0:
            self.reply(503, {{"error": {{"code": 503, "message": "Loading model"}}}})
        else:
            self.reply(200, {{"status": "ok"}})

    def do_POST(self):
        assert self.path == "/completion"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note(body)
        if table["answers"] is not None:
            self.reply(*table["answers"]) if isinstance(table["answers"], list) else self.reply(
                200, table["answers"].encode())
            return
        row = next(row for row in table["rows"].values() if row["prompt"] == body["prompt"])
        tokens = row["tokens"][:body["n_predict"]]
        timings = {{"prompt_n": len(body["prompt"]), "prompt_ms": 250.0}}
        timings |= {{"predicted_n": len(tokens), "predicted_ms": 500.0}}
        if asked.spec_type != "none":
            timings |= {{"draft_n": 9, "draft_n_accepted": row["accepted"]}}
        self.reply(200, {{"tokens": tokens, "timings": timings, "content": ""}})

    def log_message(self, *_):
        pass


note(vars(asked))
HTTPServer((asked.host, asked.port), Handler).serve_forever()
"""
NEAR = 0.05
"""Logits that part a near-tie, which other processors may round otherwise."""
QUESTIONS = ("Tell me a story about a fox.", "What is the sun?")


def options(*arguments: str) -> Namespace:
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Programs":
    return Programs(tmp_path, monkeypatch)


class Programs:
    """The two programs on the PATH: the table that they answer from, and what they were told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.table: dict[str, Any] = {"rows": {}, "fails": "", "answers": None}
        for name, text in zip(PROGRAMS, (LOOKUP_PROGRAM, SERVER_PROGRAM), strict=True):
            program = folder / name
            table, log = str(folder / "table.json"), str(folder / f"{name}.log")
            program.write_text(text.format(python=sys.executable, table=table, log=log))
            program.chmod(0o755)
        self.save()
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def save(self, **changes: Any) -> None:
        self.table |= changes
        (self.folder / "table.json").write_text(json.dumps(self.table))

    def told(self, name: str) -> list[dict[str, Any]]:
        log = self.folder / f"{name}.log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


# Which methods can run: nothing is loaded for that.


def test_a_source_tells_the_kind_of_its_model() -> None:
    assert kind_of("embedded") == kind_of("some/model") == kind_of("folder") == TRANSFORMERS
    assert kind_of("embedded-gguf") == kind_of("x/y.GGUF") == LLAMA_CPP
    assert kind_of("some/model:file.gguf") == LLAMA_CPP
    assert all(Path(source_of(name)).exists() for name in SHORT)


def test_draft_models_are_called_after_their_folder_or_file() -> None:
    names = {name_of(source) for source in ("a/small", "b/small.gguf", "some/repo:c/small.gguf")}
    assert names == {"small"} and name_of("small.q8_0.gguf") == "small.q8_0"


def test_programs_that_are_absent_are_left_out_with_a_line_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    names = checked_methods(options("--model", "x.gguf"))
    there = [name for name in DEFAULTS[LLAMA_CPP] if name.partition(":")[0] not in PROGRAMS]
    assert names == there and len(there) < len(DEFAULTS[LLAMA_CPP])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PROGRAMS)
    for program, line in zip(PROGRAMS, lines, strict=True):
        assert line.startswith(f"Left out: {program}") and "PATH" in line
        with pytest.raises(SettingError, match=f"no {program} of llama.cpp on the PATH"):
            checked_methods(options("--model", "x.gguf", "--methods", f"plain,{program}"))
    with pytest.raises(SettingError, match="no llama-server of llama.cpp"):
        checked_methods(options("--model", "x.gguf", "--methods", "llama-server:ngram-mod"))


def test_programs_that_are_there_take_part(
    programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked_methods(options("--model", "x.gguf")) == list(DEFAULTS[LLAMA_CPP])
    assert capsys.readouterr().out == ""
    every = ",".join(PEERS[LLAMA_CPP])
    assert checked_methods(options("--model", "x.gguf", "--methods", every)) == every.split(",")
    assert program_versions(["plain", "llama-server:ngram-mod", "llama-lookup"]) == {
        "llama-lookup": "7 (lookup)",
        "llama-server": "8 (server)",
    }


def test_a_program_that_reads_text_gets_no_random_tokens(programs: Programs) -> None:
    random = options("--model", "x.gguf", "--prompts", "random")
    assert "llama-lookup" not in checked_methods(random)
    random.methods = "plain,llama-lookup"
    with pytest.raises(SettingError, match="random tokens"):
        checked_methods(random)


def test_an_assistant_is_left_out_where_no_model_is_named_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = checked_methods(options("--model", "some/model"))
    assert names == [name for name in DEFAULTS[TRANSFORMERS] if name != "assisted"]
    assert capsys.readouterr().out.startswith("Left out: assisted, as ")
    assert "assisted" in checked_methods(options("--model", "some/model", "--assistant", "other"))


@pytest.mark.parametrize(
    ("model", "method", "kind"),
    [
        *(("x.gguf", name, TRANSFORMERS) for name in PEERS[TRANSFORMERS]),
        *(("embedded", name, LLAMA_CPP) for name in PEERS[LLAMA_CPP]),
    ],
)
def test_peers_of_the_other_kind_of_model_are_refused(model: str, method: str, kind: str) -> None:
    own = TRANSFORMERS if kind == LLAMA_CPP else LLAMA_CPP
    with pytest.raises(SettingError) as raised:
        checked_methods(options("--model", model, "--methods", f"plain,{method}"))
    assert f"{method!r} is of {kind} models" in str(raised.value)
    assert ", ".join(PEERS[own]) in str(raised.value)


def test_a_kind_of_speculation_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(SettingError, match="There is no method 'llama-server:magic'"):
        checked_methods(options("--model", "x.gguf", "--methods", "llama-server:magic"))


# Texts in place of tokens.


def test_the_pace_is_that_behind_the_first_forward() -> None:
    assert paced(9.0, 6.0, tokens=4) == 8.0 and paced(9.0, 6.0, tokens=4, first=2) == 12.0
    assert paced(9.0, 0.0, tokens=1) == 9.0


@pytest.mark.parametrize(
    ("text", "length", "same"),
    [
        ("hi you", 99, True),
        ("hi you too", 6, True),
        ("hi you too", 99, False),
        ("hi yo", 6, False),
        ("hi there", 99, False),
    ],
)
def test_a_text_is_plain_decodings_however_it_is_written_in_tokens(
    text: str, length: int, same: bool
) -> None:
    toy = ToyBackend()
    plain = Result("a", toy.tokenize("hi you"))
    other = Result("a")
    other.note(Reply([1, 2], 1.0, 0.5, 2, text, emitted=5))
    match_texts(toy, {"plain": [plain], "other": [other]}, Generation(max_tokens=length))
    assert other.tokens == (plain.tokens if same else [1, 2])
    assert other.length == 5 and speed([other]) == 5.0, "the tokens that were really made count"


def test_a_text_that_is_cut_within_a_character_is_the_same_up_to_there() -> None:
    toy = ToyBackend()
    plain = Result("a", list("né".encode()[:2]))
    other = Result("a")
    other.note(Reply([1], 1.0, 0.5, 2, "née", emitted=3))
    match_texts(toy, {"plain": [plain], "other": [other]}, Generation(max_tokens=2))
    assert other.tokens == plain.tokens


# The peers themselves, on the embedded GGUF file.

SAMPLERS = [Sampling(0.0), Sampling(0.7, seed=3), Sampling(1.1, top_k=50, top_p=0.9, min_p=0.01)]


@pytest.fixture(scope="module")
def gguf() -> Iterator[Any]:
    """The embedded GGUF target as the peers are to run it, on one thread."""
    from bench.llama_peers import gguf_of
    from engine.models.loaders import load

    source = source_of("embedded-gguf")
    runtime = Runtime(threads=1, context_length=1024, batch_size=32, cache_type="f16")
    yield gguf_of(load(source, runtime), source, runtime)


def prompts_of(gguf: Any, texts: Sequence[str] = QUESTIONS) -> list[list[int]]:
    from bench.prompts import cut_prompt
    from engine.prompt import Chat

    return [cut_prompt(Chat(gguf.backend), text, 900) for text in texts]


def plain_answer(gguf: Any, prompt: Sequence[int], generation: Generation) -> list[int]:
    events = decode(gguf.backend, prompt, (), generation, METHODS["plain"].drafting)
    return [token.id for event in events if isinstance(event, Step) for token in event.tokens]


def check_same(
    gguf: Any, prompt: Sequence[int], plain: list[int], other: list[int], sampling: Sampling
) -> None:
    """The same answer, up to a near-tie."""
    from bench.divergence import divergences

    answers = {"plain": [plain], "other": [other]}
    for found in divergences(gguf.backend, [prompt], answers, sampling)["other"]:
        assert found.gap is not None and abs(found.gap) < NEAR


@pytest.mark.gguf
def test_the_peers_get_our_settings(gguf: Any) -> None:
    from bench.llama_peers import LlamaPeer

    assert (gguf.context, gguf.threads, gguf.cache) == (1024, 1, "f16")
    assert gguf.path == source_of("embedded-gguf")
    with LlamaPeer("llama-lookup-python", gguf) as peer:
        parameters: Any = peer.llama.context_params
        assert (parameters.n_ctx, parameters.n_threads, parameters.n_threads_batch) == (1024, 1, 1)
        assert parameters.n_batch == parameters.n_ubatch == gguf.batch
        assert parameters.type_k == parameters.type_v == 1, "float16"
        assert parameters.flash_attn_type == (gguf.attention != "off")
        assert peer.llama._logits_all and peer.llama.draft_model is not None


@pytest.mark.gguf
@pytest.mark.parametrize("sampling", SAMPLERS, ids=lambda sampling: str(sampling.temperature))
@pytest.mark.parametrize("name", ["llama-cpp-python", "llama-lookup-python"])
def test_llama_cpp_python_says_what_plain_decoding_says(
    gguf: Any, name: str, sampling: Sampling
) -> None:
    from bench.llama_peers import LlamaPeer

    wanted = Generation(sampling, max_tokens=48)
    # Beyond one batch, where prompt lookup without logits of all tokens would break.
    long = [*prompts_of(gguf)[0][:-2], *(40 + at % 90 for at in range(300)), 1, 4]
    assert len(long) > gguf.batch
    with LlamaPeer(name, gguf) as peer:
        for prompt in (*prompts_of(gguf), long):
            plain = plain_answer(gguf, prompt, wanted)
            first, again = (peer.answer(prompt, wanted) for _ in range(2))
            assert first.tokens == again.tokens and first.forwards == again.forwards
            check_same(gguf, prompt, plain, first.tokens, sampling)
            assert first.decode_seconds > 0 and first.seconds > 0
            assert first.forwards <= len(first.tokens) <= 48
            if name == "llama-cpp-python":
                assert first.forwards == len(first.tokens)
            ended = first.tokens[-1] in gguf.backend.info.eos_ids
            assert ended or len(first.tokens) == 48
        one = peer.answer(prompt, Generation(sampling, max_tokens=1))
        assert len(one.tokens) == one.forwards == 1 and one.decode_seconds == one.seconds
        if name == "llama-lookup-python" and not sampling.temperature:
            assert first.forwards < len(first.tokens), "a text that repeats itself"


@pytest.mark.gguf
def test_above_temperature_0_the_seed_counts(gguf: Any) -> None:
    from bench.llama_peers import LlamaPeer

    prompt = prompts_of(gguf)[0]
    with LlamaPeer("llama-cpp-python", gguf) as peer:
        said = [
            peer.answer(prompt, Generation(Sampling(1.0, seed=seed), max_tokens=24)).tokens
            for seed in (1, 1, 2, 2**63 - 1)
        ]
    assert said[0] == said[1] and len({tuple(tokens) for tokens in said}) == 3


def rows_for(gguf: Any, generation: Generation, more: int = 0) -> dict[str, dict[str, Any]]:
    """What the programs answer: what plain decoding says, and `more` tokens behind the limit.

    They know the questions, and the one that warms every method up.
    """
    rows = {}
    longer = Generation(generation.sampling, max_tokens=generation.max_tokens + more)
    for prompt in prompts_of(gguf, ("Say hello.", *QUESTIONS)):
        tokens = plain_answer(gguf, prompt, longer)
        rows[gguf.backend.detokenize(prompt)] = {
            "prompt": prompt,
            "read": len(prompt),
            "tokens": tokens,
            "text": gguf.backend.detokenize(tokens),
            "made": len(tokens),
            "accepted": 2,
        }
    return rows


@pytest.mark.gguf
def test_llama_lookup_is_run_on_the_text_of_a_prompt(gguf: Any, programs: Programs) -> None:
    from bench.llama_programs import LookupPeer

    wanted = Generation(Sampling(0.0, min_p=0.1, seed=2**40), max_tokens=6)
    rows = rows_for(gguf, wanted, more=4)
    programs.save(rows=rows)
    prompt = prompts_of(gguf)[0]
    row = rows[gguf.backend.detokenize(prompt)]
    reply = LookupPeer(gguf).answer(prompt, wanted)
    assert reply.text == row["text"] and row["made"] == 10 and reply.emitted == 6
    assert reply.seconds == pytest.approx(0.25 + 0.5 * 6 / 10)
    assert reply.decode_seconds == pytest.approx(0.5 * 6 / 10 * 6 / 5)
    assert reply.forwards == round((10 - 2) * 6 / 10)
    (asked,) = programs.told("llama-lookup")
    assert asked["model"] == gguf.path and asked["predict"] == 5 and asked["temp"] == 0
    assert asked["batch_size"] == asked["ctx_size"] == 1024, "it reads a prompt in one batch"
    assert gguf.attention == "off", "as ours is on a processor"
    assert (asked["threads"], asked["flash_attn"], asked["cache_type_k"]) == (1, "off", "f16")
    assert asked["min_p"] == 0.1 and asked["top_k"] == 0 and asked["top_p"] == 1.0
    assert asked["repeat_penalty"] == 1.0 and 0 <= asked["seed"] < 2**32


@pytest.mark.gguf
def test_a_program_that_puts_the_first_token_itself_gets_the_text_behind_it(
    gguf: Any, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.llama_programs import LookupPeer

    wanted = Generation(Sampling(0.0), max_tokens=6)
    prompt = prompts_of(gguf)[0]
    text = gguf.backend.detokenize(prompt)
    row = rows_for(gguf, wanted)[text]
    programs.save(rows={text.removeprefix("<|bos|>"): row})
    monkeypatch.setattr(LookupPeer, "begins", lambda self, token: token == 0)
    assert text.startswith("<|bos|>") and LookupPeer(gguf).answer(prompt, wanted).emitted == 6


@pytest.mark.gguf
def test_a_lookup_that_fails_or_reads_other_tokens_is_told(gguf: Any, programs: Programs) -> None:
    from bench.llama_programs import LookupPeer

    wanted = Generation(Sampling(0.0), max_tokens=6)
    rows = rows_for(gguf, wanted)
    for row in rows.values():
        row["read"] += 1
    programs.save(rows=rows)
    prompt = prompts_of(gguf)[0]
    with pytest.raises(SettingError, match=f"{len(prompt)} tokens as {len(prompt) + 1}"):
        LookupPeer(gguf).answer(prompt, wanted)
    programs.save(fails="the model is haunted")
    with pytest.raises(ModelError, match="status 3.: the model is haunted"):
        LookupPeer(gguf).answer(prompt, wanted)


def ended(pid: int) -> bool:
    """Whether there is no such process any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.gguf
@pytest.mark.parametrize(("speculation", "starts"), [("", 1), ("ngram-mod", 2)])
def test_llama_server_is_asked_for_tokens_and_ended(
    gguf: Any, programs: Programs, speculation: str, starts: int
) -> None:
    from bench.llama_programs import ServerPeer

    wanted = Generation(Sampling(0.0), max_tokens=6)
    rows = rows_for(gguf, wanted)
    programs.save(rows=rows)
    first, second = prompts_of(gguf)
    with ServerPeer("llama-server", gguf, speculation) as peer:
        replies = [peer.answer(prompt, wanted) for prompt in (first, second, second)]
        assert peer.process is not None
        pid = peer.process.pid
    assert ended(pid)
    for reply, prompt in zip(replies, (first, second, second), strict=True):
        row = rows[gguf.backend.detokenize(prompt)]
        assert reply.tokens == row["tokens"] and reply.text is None
        assert reply.seconds == pytest.approx(0.75)
        assert reply.decode_seconds == pytest.approx(0.5 * 6 / 5)
        assert reply.forwards == (4 if speculation else 6)
    told = programs.told("llama-server")
    begun = [line for line in told if "port" in line]
    asked = [line for line in told if "prompt" in line]
    assert len(begun) == starts, "a server that remembers is not asked the same twice"
    assert begun[0]["host"] == "127.0.0.1" and begun[0]["spec_type"] == (speculation or "none")
    assert begun[0]["parallel"] == 1 and begun[0]["cache_ram"] == 0
    assert [line["prompt"] for line in asked] == [first, second, second]
    assert asked[0]["cache_prompt"] is False and asked[0]["return_tokens"] is True
    assert asked[0]["n_predict"] == 6 and asked[0]["temperature"] == 0
    assert asked[0]["repeat_penalty"] == 1.0 and asked[0]["top_k"] == 0


@pytest.mark.gguf
def test_a_server_that_does_not_start_is_told_with_its_last_words(
    gguf: Any, programs: Programs
) -> None:
    from bench.llama_programs import ServerPeer

    programs.save(fails="no such architecture")
    with (
        pytest.raises(ModelError, match="does not start.*last words: no such architecture"),
        ServerPeer("llama-server", gguf),
    ):
        raise AssertionError("it did start")


@pytest.mark.gguf
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([500, {"error": {"message": "out of ideas"}}], "out of ideas"),
        ([200, {"tokens": [1]}], "as documented .KeyError"),
        ([200, [1, 2]], "as documented .TypeError"),
        ("{", "as documented .JSONDecodeError"),
    ],
)
def test_a_server_that_answers_otherwise_is_told(
    gguf: Any, programs: Programs, answers: Any, words: str
) -> None:
    from bench.llama_programs import ServerPeer

    programs.save(answers=answers)
    with ServerPeer("llama-server:ngram-mod", gguf, "ngram-mod") as peer:
        with pytest.raises(ModelError, match=words) as raised:
            peer.answer([0, 3, 4], Generation(Sampling(0.0), max_tokens=4))
        assert str(raised.value).startswith("llama-server:ngram-mod cannot be measured")


def bench(*arguments: str) -> int:
    from bench.__main__ import main

    return main([*arguments])


@pytest.fixture
def asked(tmp_path: Path) -> str:
    """A file with the questions."""
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [text]}) for text in QUESTIONS))
    return str(path)


@pytest.mark.gguf
def test_the_speed_of_a_gguf_file_with_its_peers_ends_in_one_json_line(
    gguf: Any, programs: Programs, asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_for(gguf, Generation(Sampling(0.0), max_tokens=12), more=3)
    other = next(row for text, row in rows.items() if QUESTIONS[1] in text)
    other["text"], other["tokens"] = " No.", [18] * 12
    programs.save(rows=rows)
    programmed = [*PROGRAMS, "llama-server:ngram-mod"]
    methods = ["plain", "llama-cpp-python", *programmed, "hd"]
    status = bench(
        *("speed", "--model", "embedded-gguf", "--prompts", asked, "--max-new-tokens", "12"),
        *("--threads", "1", "--context-length", "1024", "--batch-size", "32"),
        *("--methods", ",".join(methods)),
    )
    captured = capsys.readouterr()
    assert status == 0, captured.err
    *table, line = captured.out.strip().splitlines()
    report = json.loads(line)
    assert (report["kind"], report["dtype"], report["threads"]) == (LLAMA_CPP, "F16", 1)
    assert report["llama-cpp-python"] and "torch" not in report and report["statistics"] is True
    assert (report["context_length"], report["batch_size"]) == (1024, 32)
    assert report["programs"] == {"llama-lookup": "7 (lookup)", "llama-server": "8 (server)"}
    assert any("llama-lookup 7" in row for row in table)
    figures = report["methods"]
    assert list(figures) == methods and len(report["forward_ms"]) > 5
    for name in ("llama-cpp-python", "hd"):
        assert figures[name]["identical"] or figures[name]["largest_gap"] < NEAR
    assert [figures[name]["differing_answers"] for name in programmed] == [1, 1, 1]
    parting = {name: figures[name].get("divergences") for name in programmed}
    assert parting["llama-lookup"] is None and len(parting["llama-server"]) == 1
    assert figures["llama-server"]["tokens_per_second"] == pytest.approx((12 + 12) / (0.75 + 0.75))
    rivals = [figures[name]["tokens_per_second"] for name in programmed if name != "llama-server"]
    assert figures["hd"]["over_best_peer"] == figures["hd"]["tokens_per_second"] / max(rivals)


@pytest.mark.gguf
def test_stacks_and_parts_of_gguf_models_are_measured(
    asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ("--prompts", asked, "--limit", "1", "--max-new-tokens", "8", "--threads", "1")
    drafts = ("--model", "embedded-gguf", "--profile-tokens", "6")
    assert bench("stack", *short, *drafts) == 0
    record = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert record["drafts"] == ["small", "mid"] and record["kind"] == LLAMA_CPP
    assert bench("ablation", *short, "--model", "embedded-gguf", "--groups", "access") == 0
    record = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert record["kind"] == LLAMA_CPP and len(record["methods"]) == 9


@pytest.mark.gguf
@pytest.mark.model
def test_a_stack_mixes_both_kinds_of_models(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = (
        SHORT["embedded"].with_name("small"),
        SHORT["embedded-gguf"].with_name("mid.gguf"),
    )
    status = bench(
        *("speed", "--model", "embedded-gguf", "--drafts", f"{folder},{file}", "--prompts", asked),
        *("--methods", "plain,hsd:small@2/mid@3", "--max-new-tokens", "8", "--threads", "1"),
        *("--profile-tokens", "6", "--limit", "1"),
    )
    assert status == 0
    record = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert record["drafts"] == ["small", "mid"]


@pytest.mark.gguf
@pytest.mark.model
def test_random_prompts_are_the_same_for_both_kinds_of_the_same_vocabulary(
    gguf: Any, embedded: Any
) -> None:
    from bench.prompts import random_prompts

    assert random_prompts(gguf.backend, 3) == random_prompts(embedded, 3)
