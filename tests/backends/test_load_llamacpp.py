"""Loading GGUF files: what cannot be used is refused in a sentence, and all else goes on."""

import os
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from engine.decode import never
from engine.errors import ModelError, PromptError
from engine.models.gguf import metadata
from engine.models.gguf_files import BLOCK, BLOCKS, file_fingerprint
from engine.models.load_llamacpp import chat_template
from engine.models.loaders import device as device_of
from engine.models.loaders import load
from engine.models.loaders import need as memory_need
from engine.models.probe import Probe
from engine.settings import Generation, Runtime, Sampling
from engine.types import Message
from tests.conftest import EMBEDDED, ROOT
from tests.support.gguf_files import WIDTH, header_size, opened_gguf, rewritten, tiny_gguf, value_of
from tests.support.lossless import events_of, knowing, tokens_of

pytestmark = pytest.mark.gguf
RUNTIME = Runtime(threads=1)
PROMPT = [5, 60, 61, 5, 60]
WANTED = Generation(Sampling(0.7, seed=3), max_tokens=12)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def beside(tiny: Path) -> Any:
    """A model that was loaded before."""
    return opened_gguf(tiny)


def answer(backend: Any) -> list[int]:
    backend.reset()
    plain = [token.id for token in tokens_of(events_of(backend, PROMPT, WANTED))]
    drafters = [knowing([*PROMPT, *plain], 3)]
    assert [t.id for t in tokens_of(events_of(backend, PROMPT, WANTED, drafters))] == plain
    return plain


@pytest.fixture(autouse=True)
def unharmed(beside: Any) -> Any:
    """Whatever a test loads, the model that was there before says what it said."""
    before = answer(beside)
    yield
    assert answer(beside) == before


def refused(path: Path | str, runtime: Runtime = RUNTIME) -> str:
    """One sentence or two, with the name of the file and what to do."""
    with pytest.raises(ModelError) as caught:
        load(str(path), runtime)
    text = str(caught.value)
    assert text.startswith(f"The model {str(path)!r} cannot be used: ") and text.endswith(".")
    assert "Give a complete GGUF file" in text and "Traceback" not in text and "\n" not in text
    with pytest.raises(ModelError) as need:
        memory_need(str(path), runtime)
    assert str(need.value) == text, "and before it is loaded the same is said"
    return text


# What is known of a loaded model.


def test_a_shipped_file_is_loaded() -> None:
    path, runtime = EMBEDDED.parent / "target.gguf", Runtime(threads=1, bits="off")
    backend = load(str(path), runtime)
    info = backend.info
    assert (info.name, info.kind, info.device, info.dtype) == ("target", "llama.cpp", "cpu", "Q8_0")
    assert (info.vocabulary_size, info.context_length, info.threads) == (6144, 2048, 1)
    assert info.can_tree and info.leaves == 128
    # On some processors it is known to crash, and the weights are quantized.
    assert info.note == "" or info.note.startswith("llama.cpp's fast path crashes")
    assert info.eos_ids == {1} and info.tokenizer_type == "BPE"
    assert 1.06 * info.parameters <= info.memory_bytes < 1.1 * info.parameters
    assert len(info.fingerprint) == len(info.tokenizer_fingerprint) == 16
    assert info.sampling == Sampling(temperature=0.8, min_p=0.05), "as its header recommends"
    assert backend.cached == [] and not backend.pending, "the check leaves nothing behind"  # type: ignore[attr-defined]
    need = memory_need(str(path), runtime)
    assert info.head is not None, "the one that lies beside it"
    weights = info.memory_bytes + info.head.memory_bytes
    assert (need.parameters, need.weights) == (info.parameters, weights)
    assert need.total == need.weights + need.cache and device_of(str(path), runtime) == "cpu"


def test_the_weights_are_named(gguf_files: dict[str, Path], tiny: Path, tmp_path: Path) -> None:
    for kind in ("F32", "F16", "Q8_0"):
        assert opened_gguf(gguf_files[f"small-{kind}"]).info.dtype == kind
    assert opened_gguf(tiny).info.dtype == "F32"
    unsaid = tiny_gguf(tmp_path / "unsaid.gguf", general__file_type=None)
    assert opened_gguf(unsaid).info.dtype == "F32", "guessed by the library"
    strange = tiny_gguf(tmp_path / "strange.gguf", general__file_type=999)
    assert opened_gguf(strange).info.dtype == "mixed"


def test_names_and_fingerprints(tiny: Path, tmp_path: Path) -> None:
    """The same weights elsewhere are the same model; other weights or words are not."""
    first = opened_gguf(tiny).info
    moved = tmp_path / "Else.Where.GGUF"
    moved.write_bytes(tiny.read_bytes())
    info = opened_gguf(moved).info
    assert info.name == "Else.Where" and info.fingerprint == first.fingerprint
    assert info.tokenizer_fingerprint == first.tokenizer_fingerprint
    for at in (header_size(tiny), tiny.stat().st_size // 2, tiny.stat().st_size - 1):
        data = bytearray(tiny.read_bytes())
        data[at] ^= 1
        moved.write_bytes(data)
        other = opened_gguf(moved).info
        assert other.fingerprint != first.fingerprint, at
        assert other.tokenizer_fingerprint == first.tokenizer_fingerprint
    words = value_of(tiny, "tokenizer.ggml.tokens")
    tiny_gguf(moved, tokenizer__ggml__tokens=[*words[:-1], "hi"], tokenizer__ggml__merges=["h i"])
    assert opened_gguf(moved).info.tokenizer_fingerprint != first.tokenizer_fingerprint


def test_a_fingerprint_looks_all_over_a_large_file(
    gguf_files: dict[str, Path], tmp_path: Path
) -> None:
    """Of two fine-tunes the sizes and headers are the same."""
    source, path = gguf_files["small-F32"], tmp_path / "x.gguf"
    size, known = source.stat().st_size, {file_fingerprint(source)}
    assert size > 2 * BLOCK * BLOCKS
    for number in range(BLOCKS):
        data = bytearray(source.read_bytes())
        data[min(size - 1, number * (size - BLOCK) // (BLOCKS - 1) + BLOCK // 2)] ^= 1
        path.write_bytes(data)
        known.add(file_fingerprint(path))
    path.write_bytes(source.read_bytes() + b"\0")
    known.add(file_fingerprint(path))
    assert len(known) == BLOCKS + 2


@pytest.mark.parametrize(
    ("trained", "asked", "length"),
    [(256, 8192, 256), (256, 128, 128), (256, 256, 256), (0, 300, 300), (1 << 31, 300, 300)],
)
def test_the_context_is_the_smaller_of_the_models_and_the_wanted_one(
    tmp_path: Path, trained: int, asked: int, length: int
) -> None:
    path = tiny_gguf(tmp_path / "x.gguf", llama__context_length=trained)
    backend = opened_gguf(path, context_length=asked)
    assert backend.info.context_length == length
    assert backend.cells >= length + 256, "there is room for the largest tree behind it"
    backend.prefill([5] * length, never)
    assert len(backend.cached) == length - 1
    with pytest.raises(PromptError, match=f"reads at most {length}"):
        events_of(backend, [5] * length, WANTED)


# What is no model.


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "gone")
    for name in ("none.gguf", "folder.gguf", "pipe.gguf", "link.gguf", "a\0b.gguf", "\ud800.gguf"):
        assert "there is no such file" in refused(tmp_path / name)
    assert "no such file" in refused("no/such/model.gguf") and "no such" in refused(".gguf")
    assert "no such file" in refused("~nobody-of-this-name/x.gguf")


def test_a_file_that_may_not_be_read(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A superuser reads everything, so the refusal is played."""
    path, own = tmp_path / "secret.gguf", Path.open
    path.write_bytes(tiny.read_bytes())
    path.chmod(stat.S_IWUSR)

    def guarded(self: Path, *rest: Any, **named: Any) -> Any:
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return own(self, *rest, **named)

    monkeypatch.setattr(Path, "open", guarded)
    assert "the file cannot be read ([Errno 13] Permission denied" in refused(path)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "the file is empty"),
        (b"G", "it begins with b'G', not b'GGUF'"),
        (b"PK\3\4 a zip archive", "it begins with b'PK\\x03\\x04', not b'GGUF'"),
        (b"<!doctype html><title>Not found</title>", "it begins with b'<!do', not b'GGUF'"),
        (b"ggml" + bytes(100), "it begins with b'ggml'"),
        (b"FUGG\0\0\0\3" + bytes(100), "it begins with b'FUGG'"),
        (b"GGUF\3\0\0\0" + bytes(range(256)), "cannot be used"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    assert problem in refused(tmp_path / "x.gguf")


def test_weights_that_are_no_numbers(gguf_files: dict[str, Path], tmp_path: Path) -> None:
    """Every logit would be nan, which no comparison notices by itself."""
    norm = np.full(WIDTH, np.nan, np.float32)
    source = gguf_files["small-F32"]
    path = rewritten(source, tmp_path / "x.gguf", arrays={"output_norm.weight": norm})
    with pytest.raises(ModelError) as caught:
        opened_gguf(path)
    assert str(caught.value) == (
        "x cannot be used: decoding with its cache gives no numbers. Choose a model of another "
        "architecture; download this one again if it is damaged."
    )


def test_the_probe_is_asked_once_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def probe(path: Path, runtime: Runtime) -> Probe:
        sizes.append(path.stat().st_size)
        problem = "damaged" if sizes[-1] == 8 else ""
        return Probe(problem, weights=sizes[-1], cache=runtime.context_length)

    monkeypatch.setattr("engine.models.probe.probe", probe)
    file = tmp_path / "it.gguf"
    for text, times, asked in (("GGUF one", 2, 2), ("GGUF four", 3, 1), ("GGUF longer", 2, 1)):
        file.write_text(text)
        sizes.clear()
        for _ in range(times):
            with suppress(ModelError):
                assert memory_need(str(file), RUNTIME).weights == len(text) != 8
        assert len(sizes) == asked, "what cannot be used is asked again"
    assert memory_need(str(file), Runtime(context_length=64)).cache == 64


def test_what_fails_after_the_probe_is_the_same_error(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changes meanwhile, memory that is gone."""
    tiny = Path(shutil.copy(tiny, tmp_path))
    monkeypatch.setattr("engine.models.probe.probe", lambda *_: Probe())
    for name in ("llama_init_from_model", "llama_model_load_from_file"):
        freed: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr(llama_cpp, name, lambda *_: None)
            patched.setattr(llama_cpp, "llama_model_free", freed.append)
            with pytest.raises(ModelError, match="cannot be used: .*Give a complete GGUF file"):
                load(str(tiny), RUNTIME)
        assert len(freed) == (name == "llama_init_from_model"), "what was opened is closed"


# Without the library.


def test_without_the_library_it_is_said_how_to_get_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.llama_cpp_python.installed", lambda: False)
    for ask in (load, memory_need):
        with pytest.raises(ModelError) as caught:
            ask(str(tiny), RUNTIME)
        assert str(tiny) in str(caught.value)
        assert "GGUF support in the Models tab" in str(caught.value)
    assert device_of(str(tiny), RUNTIME) == "cpu"


UNTOUCHED = """
import sys
from engine.models.loaders import load
from engine.models.loaders import need as memory_need
from engine.settings import Runtime
load(sys.argv[1], Runtime(threads=1, device="cpu", dtype="float32"))
memory_need(sys.argv[1])
print(sorted(name for name in sys.modules if name.startswith("llama_cpp")))
"""


def run(script: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, str(EMBEDDED.parent / "small"), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


COMES_LATER = """
import sys
from pathlib import Path
installed = next(Path(place) for place in sys.path if (Path(place) / "llama_cpp").is_dir())
packages = Path(sys.argv[2])
for path in installed.iterdir():
    if path.name != "llama_cpp":
        (packages / path.name).symlink_to(path)
sys.path[sys.path.index(str(installed))] = str(packages)
from engine.errors import ModelError
from engine.models.loaders import load
from engine.settings import Runtime
from engine.types import Message
runtime, turns = Runtime(threads=1, device="cpu", dtype="float32"), [Message("user", "Hello")]
folder = load(sys.argv[1], runtime)
asked = folder.render(turns)
try:
    load(sys.argv[1] + ".gguf", runtime)
except ModelError as error:
    print(error)
(packages / "llama_cpp").symlink_to(installed / "llama_cpp")
file = load(sys.argv[1] + ".gguf", runtime)
print(file.info.kind, file.render(turns) == asked, file.tokenize(asked) == folder.tokenize(asked))
"""


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.gguf
def test_files_load_as_soon_as_the_library_is_there(tmp_path: Path) -> None:
    """The process that runs the models goes on; so do its helpers, which have imported others."""
    missing, loaded = run(COMES_LATER, str(tmp_path))
    assert "GGUF support is not set up" in missing
    assert loaded == "llama.cpp True True"


@pytest.mark.soak
@pytest.mark.model
def test_transformers_models_load_without_touching_the_library() -> None:
    assert run(UNTOUCHED) == ["[]"]


# Chat templates.


class Templated:
    """A model whose file has another chat template, None for none."""

    def __init__(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend, self.monkeypatch = backend, monkeypatch
        self.own = backend.template

    def fill(self, template: str | None, *messages: Message) -> str:
        found, self.note = chat_template(template or "", self.backend.tokens)
        with self.monkeypatch.context() as patched:
            patched.setattr(self.backend, "template", found)
            return str(self.backend.render(messages or [Message("user", "hi")]))


@pytest.fixture
def templated(beside: Any, monkeypatch: pytest.MonkeyPatch) -> Templated:
    return Templated(beside, monkeypatch)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['os'].system('true') }}",
        "{{ strftime_now.__func__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ lipsum.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages|attr('__class__') }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ raise_exception('never') }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ nothing() }}",
        "{{ strftime_now(7) }}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(templated: Templated, template: str) -> None:
    """What it tries is refused, or gives nothing."""
    messages = [Message("system", "s"), Message("user", "hi")]
    try:
        text = templated.fill(template, *messages)
    except PromptError as error:
        assert "The chat template of tiny refuses this conversation: " in str(error)
        assert str(error).endswith(".") and templated.note == ""
    else:
        assert text == "" or text in ("[, ]", "[Undefined, Undefined]"), text


@pytest.mark.parametrize("template", ["{% for %}", "{{ 'x", "{% endif %}", "{{ }}", "{% foo %}"])
def test_a_template_that_is_none_is_told_and_done_without(
    templated: Templated, template: str
) -> None:
    assert templated.fill(template) == "User: hi\n\nAssistant:"
    assert templated.note.startswith("Its chat template cannot be read (")
    assert templated.note.endswith("): the conversation is sent as plain lines.")
    assert "\n" not in templated.note


def test_a_file_without_a_template_is_told(templated: Templated) -> None:
    assert templated.fill(None, Message("system", "be kind"), Message("user", "hi")) == (
        "System: be kind\n\nUser: hi\n\nAssistant:"
    )
    assert templated.note == (
        "The file brings no chat template: the conversation is sent as plain lines."
    )


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}", "system=s;user=hi;"),
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}"
            "{% endif %}{{ m.role }}={{ m.content }};{% endfor %}",
            "user=s\n\nhi;",
        ),
        ("{{ bos_token }}|{{ eos_token }}|{{ messages|length }}", "<s>|</s>|2"),
        ("{% if add_generation_prompt %}go{% endif %}{{ tools }}", "goNone"),
        ("{% generation %}a{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}", "a"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{{ messages[1].content|tojson }}", '"hi"'),
        ("{{ messages[1]['content'].strip() + strftime_now('%%') }}", "hi%"),
    ],
)
def test_what_templates_use(templated: Templated, template: str, wanted: str) -> None:
    """Also one without a place for a system prompt, which then opens the first message."""
    filled = templated.fill(template, Message("system", "s"), Message("user", "hi"))
    assert filled == wanted and templated.note == ""


def test_messages_are_text_to_a_template(templated: Templated) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for text in ("{{ 7 * 7 }}", "{% for %}", "<b>&amp;", "\\n", "{{ ''.__class__ }}"):
        assert templated.fill(template, Message("user", text)) == text


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("template", "plain", "begun"),
    [
        ("{{ messages[0].content }}", "hi", "<s>hi"),
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi", "<s>hi"),
        ("{{ messages[0].content }}<s>", "hi<s>", "<s>hi<s>"),
        (None, "User: hi\n\nAssistant:", "<s>User: hi\n\nAssistant:"),
    ],
)
def test_a_text_begins_with_its_token_once_where_the_file_asks_for_it(
    tmp_path: Path, template: str, plain: str, begun: str, add: bool
) -> None:
    path = tiny_gguf(
        tmp_path / "x.gguf", tokenizer__ggml__add_bos_token=add, tokenizer__chat_template=template
    )
    backend = opened_gguf(path)
    assert backend.render([Message("user", "hi")]) == (begun if add else plain)
    assert backend.info.begin == ("<s>" if add else ""), "a text of another program begins so"
    assert (backend.tokenize(begun)[0] == 0) and backend.tokenize("hi")[0] != 0


def test_the_marks_of_thinking_are_those_of_the_files_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if enable_thinking %}[THINK]{% endif %}"
    path = tiny_gguf(tmp_path / "x.gguf", tokenizer__chat_template=template)
    assert [marks.begin for marks in opened_gguf(path).info.marks] == ["[THINK]"]


@pytest.mark.parametrize("number", [None, 260, 2**31, 2**32 - 1])
def test_a_file_may_have_no_token_that_begins_a_text(tmp_path: Path, number: int | None) -> None:
    """The library would begin it with token 11, which is a tab here."""
    path = tiny_gguf(
        tmp_path / "x.gguf",
        tokenizer__ggml__add_bos_token=True,
        tokenizer__ggml__bos_token_id=number,
        tokenizer__chat_template="{{ bos_token }}|{{ eos_token }}|",
    )
    assert opened_gguf(path).render([Message("user", "hi")]) == "|</s>|"


# Settings.


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_a_cache_that_only_flash_attention_reads(tiny: Path, kind: str) -> None:
    runtime = Runtime(threads=1, cache_type=kind, flash_attention="off")
    with pytest.raises(ModelError) as caught:
        load(str(tiny), runtime)
    assert str(caught.value) == (
        f"A cache of {kind} numbers needs flash attention, which is off. Turn it on, or choose "
        "another cache type."
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Sampling()),
        ({"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}, Sampling(0.6, 20, 0.95, 0.05)),
        ({"temp": 0.25}, Sampling(0.25)),
        ({"temp": 0, "top_k": 64.0}, Sampling(0.0, 64)),
        ({"temp": "0.5", "top_k": "40"}, Sampling(0.5, 40)),
        ({"top_k": 20.5}, Sampling()),
        ({"temp": -3.0}, Sampling()),
        ({"temp": float("nan")}, Sampling()),
        ({"temp": float("inf"), "top_k": 7}, Sampling()),
        ({"top_k": 1 << 31}, Sampling()),
        ({"temp": "warm"}, Sampling()),
        ({"temp": ""}, Sampling()),
        ({"temp": True}, Sampling()),
        ({"temp": [0.5, 0.6]}, Sampling()),
        ({"penalty_repeat": 1.5, "temp": 0.5}, Sampling(0.5)),
    ],
    ids=str,
)
def test_the_makers_sampler_settings_are_taken_where_they_are_usable(
    tmp_path: Path, given: dict[str, Any], expected: Sampling
) -> None:
    values = {f"general__sampling__{name}": value for name, value in given.items()}
    found = opened_gguf(tiny_gguf(tmp_path / "x.gguf", **values)).info.sampling
    assert (found.top_k, found.seed) == (expected.top_k, expected.seed)
    for name in ("temperature", "top_p", "min_p"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-6)


def test_long_values_of_a_header_are_read_whole(tmp_path: Path) -> None:
    words = "x" * 5000 + "é"
    backend = opened_gguf(tiny_gguf(tmp_path / "x.gguf", general__description=words))
    assert metadata(backend.model, "general.description") == words
    assert metadata(backend.model, "general.nothing") == ""
