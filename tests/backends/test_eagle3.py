"""EAGLE-3 heads on transformers: the network computes what its definition says, every format gives
the same head, a head that does not fit is told, and answers stay what they were."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from engine.backends.quantised import PackedLinear
from engine.backends.transformers import TransformersBackend
from engine.decode import never
from engine.drafting.budget import Budget
from engine.errors import ModelError
from engine.heads import eagle3_head
from engine.heads.eagle3_head import CHUNK, LARGE, LATEST, bytes_of, linear, packed
from engine.models.loaders import load, need, scan
from engine.models.torch_heads import eagle3_in
from engine.prompt import Chat
from engine.settings import Runtime, Sampling
from engine.tree import Tree
from engine.types import Message, Work
from tests.conftest import EMBEDDED
from tests.support.heads import SAMPLINGS, Guessing, answer, fresh, law
from tests.support.lossless import assert_lossless, tokens_of

pytestmark = pytest.mark.model

Tensors = dict[str, Any]
HIDDEN, HEADS, KV_HEADS, SIZE, INNER, KNOWN = 256, 4, 2, 32, 96, 500
LAYERS = (0, 4, 7)
TEXT = [0, 3, 500, 41, 2000, 17, 3000, 12, 9, 700, 4, 31, 800, 5000]
"""The beginning of some conversation, in tokens."""


def numbers(seed: int, known: int = 0, own_embedding: bool = False) -> Tensors:
    """The weights of a head, as the flat formats name them."""
    made = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Any:
        return 0.05 * torch.randn(*shape, generator=made)

    tensors = {
        "fc.weight": random(HIDDEN, 3 * HIDDEN),
        "midlayer.input_layernorm.weight": 1 + random(HIDDEN),
        "midlayer.hidden_norm.weight": 1 + random(HIDDEN),
        "midlayer.post_attention_layernorm.weight": 1 + random(HIDDEN),
        "midlayer.self_attn.q_proj.weight": random(HEADS * SIZE, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": random(KV_HEADS * SIZE, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": random(KV_HEADS * SIZE, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": random(HIDDEN, HEADS * SIZE),
        "midlayer.mlp.gate_proj.weight": random(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": random(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": random(HIDDEN, INNER),
        "norm.weight": 1 + random(HIDDEN),
    }
    if known:
        tokens = torch.randperm(6144, generator=made)[:known]
        tensors["lm_head.weight"] = random(known, HIDDEN)
        tensors["d2t"] = tokens - torch.arange(known)
        tensors["t2d"] = torch.zeros(6144, dtype=torch.bool)
    if own_embedding:
        tensors["embed_tokens.weight"] = random(6144, HIDDEN)
    return tensors


LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": 6144,
    "max_position_embeddings": 2048,
}


def flat(architecture: str) -> dict[str, Any]:
    """The config of the formats that have one config for all; layers are told by number."""
    own = {"eagle_aux_hidden_state_layer_ids": [each - 1 for each in LAYERS]}
    return LAYER | {"architectures": [architecture], "eagle_config": own}


def speculators(**more: Any) -> dict[str, Any]:
    """The config of the speculators library."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": LAYER,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "norm_before_residual": False,
        "norm_before_fc": False,
    } | more


def written(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "a.safetensors")
    return folder


def of_speculators(tensors: Tensors) -> Tensors:
    """The same weights under the names of that library."""
    return {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}


def loaded(head: Path | str, eight_bits: bool = False) -> TransformersBackend:
    """The embedded model with a head, of weights of eight bits or as they are in its file."""
    runtime = Runtime(dtype="float32", threads=1, head=str(head))
    with pytest.MonkeyPatch.context() as here:
        here.setattr(eagle3_head, "verifies_cheaply", lambda: eight_bits)
        backend = load(str(EMBEDDED), runtime)
    assert isinstance(backend, TransformersBackend)
    return backend


def states_of(text: Sequence[int]) -> Any:
    """The target's hidden states of a text by the library alone, side by side."""
    model = AutoModelForCausalLM.from_pretrained(str(EMBEDDED), dtype=torch.float32)
    with torch.no_grad():
        found = model(torch.tensor([list(text)]), output_hidden_states=True)
    states = torch.cat([found.hidden_states[each][0] for each in LAYERS], dim=-1)
    return states, model.get_input_embeddings().weight.detach()


class Reference:
    """A head computed from its definition, row by row, in double precision and without a cache."""

    def __init__(self, tensors: Tensors, before_residual: bool = False) -> None:
        self.tensors = {name: np.asarray(each, np.float64) for name, each in tensors.items()}
        self.before_residual = before_residual
        states, embedding = states_of(TEXT)
        self.states = np.asarray(states, np.float64)
        own = self.tensors.get("embed_tokens.weight")
        self.embedding = np.asarray(embedding, np.float64) if own is None else own
        self.output = self.tensors.get("lm_head.weight", np.asarray(embedding, np.float64))

    def norm(self, values: Any, name: str) -> Any:
        scale = np.sqrt((values**2).mean() + 1e-5)
        return values / scale * self.tensors[f"{name}.weight"]

    def turned(self, values: Any, position: int) -> Any:
        """Rotary positions: pairs of numbers half a head apart turn by an angle."""
        half = SIZE // 2
        out = values.copy()
        for at in range(half):
            angle = position / 5000.0 ** (2 * at / SIZE)
            one, other = values[at], values[at + half]
            out[at] = one * math.cos(angle) - other * math.sin(angle)
            out[at + half] = other * math.cos(angle) + one * math.sin(angle)
        return out

    def logits(self, path: Sequence[int]) -> Any:
        """What follows the text and the tokens of a path behind it."""
        attention = "midlayer.self_attn."
        joined = self.states
        if "input_norm.weight" in self.tensors:
            joined = [self.norm(each, "input_norm") for each in joined]
        hidden = [self.tensors["fc.weight"] @ each for each in joined[: len(TEXT) - 1]]
        keys, values = [], []
        tokens = [*TEXT[1:], *path]
        for row, token in enumerate(tokens):
            before = hidden[row]
            normed = self.norm(before, "midlayer.hidden_norm")
            both = np.concatenate(
                (self.norm(self.embedding[token], "midlayer.input_layernorm"), normed)
            )
            queries, key, value = (
                (self.tensors[f"{attention}{name}_proj.weight"] @ both).reshape(-1, SIZE)
                for name in "qkv"
            )
            keys.append([self.turned(each, row) for each in key])
            values.append(value)
            read = []
            for head, query in enumerate(queries):
                own = head * KV_HEADS // HEADS
                query = self.turned(query, row)
                scores = np.array([query @ each[own] for each in keys]) / math.sqrt(SIZE)
                weights = np.exp(scores - scores.max())
                read.append(weights @ np.array([each[own] for each in values]) / weights.sum())
            residual = normed if self.before_residual else before
            residual = residual + self.tensors[f"{attention}o_proj.weight"] @ np.concatenate(read)
            inner = self.norm(residual, "midlayer.post_attention_layernorm")
            gate = self.tensors["midlayer.mlp.gate_proj.weight"] @ inner
            gate = (
                gate / (1 + np.exp(-gate)) * (self.tensors["midlayer.mlp.up_proj.weight"] @ inner)
            )
            out = residual + self.tensors["midlayer.mlp.down_proj.weight"] @ gate
            if row >= len(TEXT) - 2:
                hidden.append(out)
        return self.output @ self.norm(hidden[-1], "norm")


def read(backend: TransformersBackend, text: Sequence[int] = TEXT) -> Any:
    """The head of a backend after it has read a text, and what it guesses then."""
    backend.head.listen(True)
    backend.prefill(text, lambda: False)
    return backend.head, backend.head.start(text, Sampling(temperature=0), lambda: False)


LEVELS = [[(7,), (900,)], [(7, 7), (900, 5), (7, 33)], [(7, 33, 2), (900, 5, 1)]]
"""Paths behind the text, as a tree grows."""


def guessed(backend: TransformersBackend) -> dict[tuple[int, ...], Any]:
    """The head's logits after the paths of a tree, asked level by level."""
    head, root = read(backend)
    found: dict[tuple[int, ...], Any] = {(): root.logits}
    last: list[tuple[int, ...]] = [()]
    for paths in LEVELS:
        parents = [last.index(path[:-1]) for path in paths]
        guesses = head.extend(parents, [path[-1] for path in paths])
        found |= {path: guess.logits for path, guess in zip(paths, guesses, strict=True)}
        last = list(paths)
    head.forget()
    return found


FORMS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Tensors], Tensors], dict[str, Any]]]
FORMS = {
    "LlamaForCausalLMEagle3": (lambda: flat("LlamaForCausalLMEagle3"), dict, {}),
    "Eagle3LlamaForCausalLM": (lambda: flat("Eagle3LlamaForCausalLM"), dict, {}),
    "speculators": (speculators, of_speculators, {}),
    "known": (lambda: flat("LlamaForCausalLMEagle3"), dict, {"known": KNOWN}),
    "embedding": (speculators, of_speculators, {"known": KNOWN, "own_embedding": True}),
    "flags": (
        lambda: speculators(norm_before_residual=True, norm_before_fc=True), of_speculators, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_head_computes_its_definition_along_a_tree_in_every_format(
    form: str, tmp_path: Path
) -> None:
    config, names, more = FORMS[form]
    tensors = numbers(1, **more)
    if form == "flags":
        tensors["input_norm.weight"] = torch.full((3 * HIDDEN,), 0.7)
    backend = loaded(written(tmp_path / "a", config(), names(tensors)))
    reference = Reference(tensors, before_residual=form == "flags")
    for path, logits in guessed(backend).items():
        wanted = reference.logits(path)
        if "d2t" in tensors:
            ids = np.arange(KNOWN) + tensors["d2t"].numpy()
            wanted = wanted[np.argsort(ids)]
        assert np.abs(logits - wanted).max() < 1e-4 * np.abs(wanted).max(), path


@pytest.fixture(scope="module")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> TransformersBackend:
    """The embedded target with a head of random weights, which knows a part of the vocabulary."""
    folder = tmp_path_factory.mktemp("head")
    tensors = numbers(3, known=KNOWN)
    return loaded(written(folder, flat("LlamaForCausalLMEagle3"), tensors))


def ask(backend: TransformersBackend, text: str, before: Sequence[int] = ()) -> list[int]:
    chat = Chat(backend)
    return chat.prompt([Message("user", text)], before)


def test_long_prompts_are_read_in_parts_and_stopped_between_them(
    random_head: TransformersBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.heads.eagle3_head.LATEST", 2000)
    backend = random_head.open()
    head = backend.head
    tokens = [3 + at * 37 % 6000 for at in range(1300)]
    head.listen(True)
    backend.prefill(tokens, never)
    asked = [False, False, True]
    assert head.start(tokens, SAMPLINGS[0], lambda: asked.pop(0)) is None
    assert head.done == 2 * CHUNK
    whole = law(backend, tokens)
    assert np.abs(whole - fresh(backend, tokens)).max() < 1e-5
    asked = [False] * 14
    assert not backend.prefill([7, *tokens], lambda: asked.pop(0) if asked else True).complete
    backend.prefill(tokens, never)
    assert np.abs(law(backend, tokens) - whole).max() < 1e-5
    backend.close()


def test_of_what_waits_to_be_read_the_latest_is_kept(random_head: TransformersBackend) -> None:
    backend = random_head.open()
    head = backend.head
    tokens = [3 + at * 37 % 6000 for at in range(700)]
    head.listen(True)
    backend.prefill(tokens, never)
    # Nothing was computed yet: the states are as the target left them, and few.
    assert head.done == 0 and head.levels[0].states.values is None
    assert head.rows == list(range(699 - LATEST, 699)) and head.waiting_rows == LATEST
    assert head.bytes == 4 * LATEST * 3 * HIDDEN
    one = law(backend, tokens)
    assert (head.done, head.waiting_rows, head.waiting) == (LATEST, 0, [])
    # What was read is kept however long the text grows; what waits is not.
    longer = [*tokens, *range(40, 40 + 2 * LATEST)]
    backend.prefill(longer, never)
    assert head.rows == [
        *range(699 - LATEST, 699),
        *range(len(longer) - 1 - LATEST, len(longer) - 1),
    ]
    # A text that is cut takes from what waits first.
    cut = longer[: -LATEST // 2]
    backend.prefill(cut, never)
    assert head.rows[-1] == len(cut) - 2 and head.waiting_rows == LATEST - LATEST // 2
    assert law(backend, cut).shape == one.shape
    backend.prefill(tokens, never)
    assert np.abs(law(backend, tokens) - one).max() < 1e-5
    backend.close()


def test_a_step_of_which_the_head_is_not_asked_takes_a_copy_of_states_alone(
    random_head: TransformersBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = random_head.open()
    multiplied = []
    seam = "engine.heads.eagle3_head.linear"
    monkeypatch.setattr(seam, lambda *args: multiplied.append(args) or fail())
    backend.head.listen(True)
    backend.prefill(TEXT, never)
    for _ in range(5):
        backend.score(Tree(backend.cached[-1]), SAMPLINGS[0])
        backend.accept(())
    assert not multiplied and backend.head.waiting_rows == len(TEXT) + 4
    with pytest.raises(ZeroDivisionError):
        law(backend, [*backend.cached, 5])
    backend.close()


def test_eight_bits_guess_nearly_the_same_and_say_the_same(tmp_path: Path) -> None:
    tensors = numbers(1)
    backend = loaded(written(tmp_path / "a", speculators(), of_speculators(tensors)), True)
    exact = loaded(tmp_path / "a")
    assert backend.info.head is not None and exact.info.head is not None
    # Its weights take a byte each, and so does a copy of the target's output matrix, 6,144 x 256.
    # In addition there are scales, and rotary factors of all positions.
    count = exact.info.head.parameters + 6144 * 256
    assert 1 < backend.info.head.memory_bytes / count < 1.5
    assert backend.info.head == exact.info.head, "one head, however a trial went"
    reference = Reference(tensors)
    for path, logits in guessed(backend).items():
        wanted = reference.logits(path)
        cosine = torch.cosine_similarity(torch.tensor(logits), torch.tensor(wanted), dim=0)
        assert cosine > 0.99, path
    for sampling in SAMPLINGS:
        prompt = ask(backend, "What is a river?")
        plain = answer(exact.open(), prompt, sampling)
        said = answer(backend.open(), prompt, sampling, Guessing(backend.head, sampling))
        assert_lossless(plain, said)


def test_a_forward_that_fails_leaves_a_head_that_goes_on(
    random_head: TransformersBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = random_head.open()
    prompt = ask(backend, "What is a river?")
    plain = tokens_of(answer(backend.open(), prompt, SAMPLINGS[1]))

    class Failing(Guessing):
        def grow(self, tree: Tree, tokens: Sequence[int], budget: Budget) -> Mapping[str, Work]:
            if len(tokens) > len(prompt) + 3:
                with monkeypatch.context() as broken:
                    broken.setattr("torch.nn.functional.scaled_dot_product_attention", fail)
                    self.head.start(tokens, self.sampling, never)
            return super().grow(tree, tokens, budget)

    with pytest.raises(ZeroDivisionError):
        answer(backend, prompt, SAMPLINGS[1], Failing(backend.head, SAMPLINGS[1]))
    again = answer(backend, prompt, SAMPLINGS[1], Guessing(backend.head, SAMPLINGS[1]))
    assert [each.id for each in tokens_of(again)] == [each.id for each in plain]
    backend.close()


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


Change = Callable[[dict[str, Any], Tensors], object]
WRONG: dict[str, tuple[Change, str]] = {
    "width": (
        lambda config, _: config.update(target_hidden_size=128),
        "reads hidden states of 128 numbers, and those of the model have 256",
    ),
    "vocabulary": (
        lambda config, _: config.update(vocab_size=32000),
        "made for a vocabulary of 32,000 tokens, and the model has 6,144",
    ),
    "weights": (
        lambda config, _: config.update(strata_target="0123"),
        "trained for other weights of this model",
    ),
    "layers": (
        lambda config, _: config["eagle_config"].update(
            eagle_aux_hidden_state_layer_ids=[1, 4, 40]
        ),
        "the hidden states (2, 5, 41), and the model has three of 0 to 8",
    ),
    "deep": (lambda config, _: config.update(num_hidden_layers=2), "has 2 layers"),
    "architecture": (
        lambda config, _: config.update(architectures=["LlamaForCausalLM"]),
        "architecture is LlamaForCausalLM, and LlamaForCausalLMEagle3",
    ),
    "one state": (
        lambda config, _: config["eagle_config"].update(use_aux_hidden_state=False),
        "reads one hidden state",
    ),
    "missing": (lambda _, tensors: tensors.pop("fc.weight"), "its tensor fc.weight has the shape"),
    "unknown": (
        lambda _, tensors: tensors.update({"midlayer.q_norm": tensors["norm.weight"] + 0}),
        "its tensor midlayer.q_norm has the shape (256,), expected was none",
    ),
    "no d2t": (lambda _, tensors: tensors.pop("d2t"), "knows 500 tokens and has no d2t"),
    "short": (
        lambda _, tensors: tensors.update(d2t=tensors["d2t"][:9]),
        "knows 500 tokens and has a d2t of 9",
    ),
    "beyond": (lambda _, tensors: tensors["d2t"].add_(1000), "tokens that the model does not have"),
    "twice": (
        lambda _, tensors: tensors["d2t"][1:2].copy_(tensors["d2t"][:1] - 1),
        "its d2t names a token twice",
    ),
}


def refused(backend: Any, folder: Path, target: str = "") -> str:
    with pytest.raises(ModelError) as raised:
        eagle3_in(backend, folder, target)
    return str(raised.value)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_head_that_does_not_fit_is_told(
    wrong: str, embedded: TransformersBackend, tmp_path: Path
) -> None:
    change, words = WRONG[wrong]
    config, tensors = flat("LlamaForCausalLMEagle3"), numbers(1, known=KNOWN)
    change(config, tensors)
    folder = written(tmp_path / "a", config, tensors)
    text = refused(embedded, folder, "4567")
    assert words in text and str(folder) in text and "load the model without one" in text


def test_files_that_are_no_head_are_told(embedded: TransformersBackend, tmp_path: Path) -> None:
    config = speculators()
    del config["norm_before_residual"]
    folder = written(tmp_path / "a", config, of_speculators(numbers(1)))
    for words, file in {
        "has no norm_before_residual": "a.safetensors",
        "the folder holds config.json. Give a folder with config.json and": "config.json",
        "the folder is empty. Give a folder": "",
    }.items():
        assert words in refused(embedded, folder)
        if file:
            (folder / file).unlink()
    written(folder, speculators(), {})
    (folder / "a.safetensors").write_bytes(b"12345678" * 9)
    assert "cannot be used" in refused(embedded, folder)


def test_a_path_without_a_head_is_told_with_what_is_there(
    embedded: TransformersBackend, tmp_path: Path
) -> None:
    def said(path: Path) -> str:
        text = refused(embedded, path)
        assert str(path) in text and "*.safetensors" in text
        return text

    assert "there is no such file or folder" in said(tmp_path / "none")
    for number in range(9):
        (tmp_path / f"{number}.txt").touch()
    (tmp_path / "3.txt").unlink()
    (tmp_path / "3").mkdir()
    words = said(tmp_path)
    assert "holds 0.txt, 1.txt, 2.txt, 3/, 4.txt, 5.txt and 3 more" in words
    assert "GGUF" not in words
    file = tmp_path / "eagle3-x.gguf"
    file.touch()
    assert "it is a file" in said(file) and "serves the GGUF file of its model" in said(file)
    assert "serves the GGUF file of its model" in said(tmp_path)


def linked(folder: Path) -> Path:
    """A copy of the embedded target, which takes no space."""
    folder.mkdir()
    for path in EMBEDDED.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path)
    return folder


def test_a_head_is_found_in_the_folder_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle3_head, "verifies_cheaply", lambda: False)
    model = linked(tmp_path / "model")
    assert load(str(model), Runtime(dtype="float32")).head is None
    tensors = numbers(4)
    head = written(model / "head", speculators(), of_speculators(tensors))
    backend = load(str(model), Runtime(dtype="float32"))
    info = backend.info.head
    assert info is not None and backend.head is not None
    assert (info.name, info.depth, info.branches, info.drafts) == ("EAGLE-3", 8, True, True)
    assert info.parameters == sum(each.numel() for each in tensors.values())
    assert info.memory_bytes == 4 * info.parameters and info.fingerprint
    alone, both = (need(str(model), Runtime(head=wanted)) for wanted in ("off", "auto"))
    assert both.weights - alone.weights == 4 * info.parameters
    # A hidden state, a key and a value of each token.
    assert both.cache - alone.cache == 4 * backend.info.context_length * (
        HIDDEN + 2 * KV_HEADS * SIZE
    )
    assert need(str(model), Runtime(head=str(head))) == both
    for wanted in ("off", str(head)):
        other = load(str(model), Runtime(dtype="float32", head=wanted))
        assert other.info.head == (None if wanted == "off" else info)
    written(head, speculators(target_hidden_size=99), of_speculators(tensors))
    unfit = load(str(model), Runtime(dtype="float32"))
    assert unfit.head is None and unfit.info.head is not None
    assert "hidden states of 99 numbers" in unfit.info.head.note and not unfit.info.head.drafts
    with pytest.raises(ModelError, match="hidden states of 99 numbers"):
        load(str(model), Runtime(dtype="float32", head=str(head)))
    assert scan(str(tmp_path)) == [str(model)]


FLOOR = 1.5
"""Tokens per forward that the head that comes along is good for, at T 0.7 and 1."""


def test_the_head_that_comes_along_is_often_right(embedded: TransformersBackend) -> None:
    emitted = forwards = 0
    for text in ("Hi! How are you today?", "What is a river?", "How do I make a cake?"):
        for sampling in SAMPLINGS[1:]:
            backend = embedded.open()
            drafter = Guessing(backend.head, sampling, width=1, wrong=0.0)
            steps = answer(backend, ask(backend, text), sampling, drafter, tokens=60)
            emitted, forwards = emitted + len(tokens_of(steps)), forwards + len(steps)
            backend.close()
    assert emitted > FLOOR * forwards


@pytest.mark.gguf
def test_the_head_that_comes_along_guesses_the_same_in_both_formats(
    embedded: TransformersBackend, gguf_files: dict[str, Path]
) -> None:
    """Behind weights of the same type: those of the shipped file are rounded to eight bits."""
    shipped = EMBEDDED.parent / "eagle3-target.gguf"
    other = load(str(gguf_files["target-F16"]), Runtime(threads=1, head=str(shipped)))
    one, tokens = loaded(EMBEDDED / "head"), ask(embedded, "What is a river?")
    assert one.info.head is not None and other.info.head is not None
    assert other.info.head.name == one.info.head.name
    assert other.info.head.parameters == one.info.head.parameters
    for backend in (one, other):
        backend.head.listen(True)
        backend.prefill(tokens, never)
    left: Any = one.head.start(tokens, SAMPLINGS[0], never)
    right: Any = other.head.start(tokens, SAMPLINGS[0], never)
    for token in (310, 17, 900):
        for name, chance in left.likeliest(5):
            assert right.probability(name) == pytest.approx(chance, rel=0.05)
        left, right = (each.extend([0], [token])[0] for each in (one.head, other.head))
    one.close()


# Matrices of eight bits.


@pytest.mark.parametrize("shape", [(2048, 128), (1030, 256)])
def test_a_rounded_matrix_gives_nearly_the_same(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle3_head, "verifies_cheaply", lambda: True)
    made = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=made) * torch.rand((shape[0], 1), generator=made)
    weight[0] = 0.0
    states, bias = torch.randn(3, shape[1], generator=made), torch.randn(shape[0], generator=made)
    rounded = packed(weight)
    assert isinstance(rounded, PackedLinear)
    for more in ((), (bias,)):
        wanted, found = linear(states, weight, *more), linear(states, rounded, *more)
        assert found.dtype == torch.float32
        assert (found - wanted).norm() < 0.02 * wanted.norm()
    assert linear(states.bfloat16(), rounded).dtype == torch.bfloat16
    assert bytes_of(weight) == 4 * weight.numel()
    assert 1 <= bytes_of(rounded) / weight.numel() < 1.2


def test_other_matrices_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle3_head, "verifies_cheaply", lambda: True)
    large, few = torch.ones(LARGE // 64, 64), torch.ones(LARGE // 64 - 1, 64)
    odd = torch.ones(LARGE // 40 + 1, 40)
    assert isinstance(packed(large), PackedLinear)
    assert all(packed(each) is each for each in (few, odd))
    monkeypatch.setattr(eagle3_head, "verifies_cheaply", lambda: False)
    assert packed(large) is large
