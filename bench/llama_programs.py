"""The programs of llama.cpp, run as child processes on the same GGUF file with our settings.

Their interface is the one that llama.cpp documents, as of October 2026: the options and endpoints
of tools/server/README.md, the kinds of speculation of docs/speculative.md, whose sizes stay as they
are, and what examples/lookup prints. Times are those that the programs tell of themselves: loading,
and the way there and back, are left out in their favour.
"""

import json
import re
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from tempfile import TemporaryFile
from time import monotonic, sleep
from types import TracebackType
from typing import Self

import llama_cpp

from bench.llama_peers import DRAFTED, SEEDS, Gguf, temperature_of
from bench.options import Record
from bench.peer import LOOKUP, SERVER, Reply, paced
from engine.errors import ModelError, SettingError
from engine.settings import Generation

HOST = "127.0.0.1"
READY_SECONDS, STOP_SECONDS, PAUSE = 600.0, 10.0, 0.05
"""How long a server may take to load and to end; between two questions whether it is ready."""
SPAN = r" +(\d+) tokens in +([\d.]+) seconds"
ENCODED, DECODED = re.compile(f"encoded{SPAN}"), re.compile(f"decoded{SPAN}")
ACCEPTED = re.compile(r"n_accept += +(\d+)")
BEHIND = "\n\n\n\n"
"""What llama-lookup prints behind an answer."""


def options_of(file: Gguf) -> list[str]:
    """The options that both programs share, apart from the batch."""
    layers = "all" if file.gpu_layers < 0 else str(file.gpu_layers)
    return [
        *("--model", file.path, "--ctx-size", str(file.context), "--gpu-layers", layers),
        *("--threads", str(file.threads), "--threads-batch", str(file.threads)),
        *("--ubatch-size", str(file.batch), "--flash-attn", file.attention),
        *("--cache-type-k", file.cache, "--cache-type-v", file.cache),
    ]


def last_line(words: bytes) -> str:
    """The end of what a program said, which most often is why it ended."""
    lines = words.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


class LookupPeer:
    """llama-lookup: drafts from n-grams of the prompt and the answer, one process per prompt.

    It takes and prints text. It may go on behind the last token for as many as were accepted with
    it: those are left out, and their share of the time and the forwards with them.
    """

    name = LOOKUP

    def __init__(self, file: Gguf) -> None:
        self.file = file

    def answer(self, prompt: Sequence[int], generation: Generation) -> Reply:
        """One process. Raises ModelError where it fails, SettingError where text is not enough."""
        backend = self.file.backend
        text = backend.detokenize(prompt[1:] if self.begins(prompt[0]) else prompt)
        words = self.command(text, generation)
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        said = done.stderr.decode("utf-8", "replace")
        _, shown, answer = done.stdout.decode("utf-8", "replace").partition(text)
        encoded, decoded, accepted = (p.search(said) for p in (ENCODED, DECODED, ACCEPTED))
        if done.returncode or not (shown and encoded and decoded and accepted):
            raise ModelError(
                f"{LOOKUP} cannot answer (status {done.returncode}): {last_line(done.stderr)}. "
                "Leave it out of --methods."
            )
        if int(encoded[1]) != len(prompt):
            raise SettingError(
                f"{LOOKUP} reads a prompt of {len(prompt):,} tokens as {int(encoded[1]):,}: it "
                "takes text, which is not enough here. Leave it out of --methods."
            )
        made = int(decoded[1])
        kept = min(made, generation.max_tokens)
        spent = kept / made * float(decoded[2])
        seconds = float(encoded[2]) + spent
        forwards = max(1, round(kept / made * (made - int(accepted[1]))))
        answer = answer.removesuffix(BEHIND)
        tokens = backend.tokenize(answer)[:kept]
        return Reply(tokens, seconds, paced(seconds, spent, kept), forwards, answer, kept)

    def begins(self, token: int) -> bool:
        """Whether the program itself puts this token before a text."""
        vocabulary = self.file.backend.tokens.raw
        adds = bool(llama_cpp.llama_vocab_get_add_bos(vocabulary))
        return adds and token == llama_cpp.llama_vocab_bos(vocabulary)

    def command(self, text: str, generation: Generation) -> list[str]:
        """The program with its options."""
        sampling = generation.sampling
        return [
            *(LOOKUP, *options_of(self.file), "--batch-size", str(self.file.context)),
            *("--prompt", text, "--no-escape", "--color", "off", "--repeat-penalty", "1.0"),
            *("--temp", str(temperature_of(sampling)), "--seed", str(sampling.seed % SEEDS)),
            *("--top-k", str(sampling.top_k), "--top-p", str(sampling.top_p)),
            *("--min-p", str(sampling.min_p), "--spec-draft-n-max", str(DRAFTED)),
            # It ends once there are more than so many; 0 would be no limit.
            *("--predict", str(max(1, generation.max_tokens - 1))),
        ]


class ServerPeer:
    """llama-server, asked at /completion for the tokens of an answer; with or without speculation.

    What it drafts from, it keeps from one request to the next. So it starts anew before a prompt
    that it was asked already, whose answer it would draft from memory.
    """

    def __init__(self, name: str, file: Gguf, speculation: str = "") -> None:
        self.name, self.file, self.speculation = name, file, speculation
        self.asked: set[tuple[int, ...]] = set()
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.words = TemporaryFile()  # noqa: SIM115 (closed with the server)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the program on a free port, and wait until it has loaded. Raises ModelError."""
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        batch = str(self.file.batch)
        drafts = ("--spec-type", self.speculation or "none")
        words = [
            *(SERVER, *options_of(self.file), "--batch-size", batch, "--parallel", "1"),
            *("--host", HOST, "--port", str(self.port), "--cache-ram", "0"),
            *drafts,
        ]
        self.process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.words
        )
        end = monotonic() + READY_SECONDS
        while monotonic() < end and self.process.poll() is None:
            with suppress(OSError, HTTPException):
                if self.request("GET", "/health")[0] == 200:
                    return
            sleep(PAUSE)
        raise self.failure("it does not start")

    def close(self) -> None:
        """End the program for good."""
        self.stop()
        self.words.close()

    def stop(self) -> None:
        """End the program."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None
        self.asked.clear()

    def request(self, method: str, path: str, body: Record | None = None) -> tuple[int, bytes]:
        """Ask the server: the status and what it answers. No proxy of the system takes part."""
        connection = HTTPConnection(HOST, self.port)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def answer(self, prompt: Sequence[int], generation: Generation) -> Reply:
        """One request, with nothing of the prompt in the cache. Raises ModelError."""
        if self.speculation and tuple(prompt) in self.asked:
            self.stop()
            self.start()
        self.asked.add(tuple(prompt))
        sampling = generation.sampling
        body = {
            "prompt": list(prompt),
            "n_predict": generation.max_tokens,
            "temperature": temperature_of(sampling),
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repeat_penalty": 1.0,
            "seed": sampling.seed % SEEDS,
            "cache_prompt": False,
            "return_tokens": True,
        }
        try:
            status, said = self.request("POST", "/completion", body)
            reply = json.loads(said)
            if status != 200:
                raise self.failure(f"it answers {reply}")
            tokens, timings = reply["tokens"], reply["timings"]
            made = timings["predicted_n"]
            spent = timings["predicted_ms"] / 1e3
            seconds = timings["prompt_ms"] / 1e3 + spent
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            raise self.failure(f"it does not answer as documented ({error!r})") from error
        forwards = max(1, made - timings.get("draft_n_accepted", 0))
        sleep(PAUSE)  # its threads wait awake for a while, at the cost of whoever comes next
        return Reply(tokens, seconds, paced(seconds, spent, made), forwards)

    def failure(self, problem: str) -> ModelError:
        """The error for a server that does not work."""
        self.words.seek(0)
        return ModelError(
            f"{self.name} cannot be measured: {problem}. Its last words: "
            f"{last_line(self.words.read())}. Leave it out of --methods."
        )
