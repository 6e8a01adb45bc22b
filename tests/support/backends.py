"""Tiny models behind both libraries, with what the tests of backends ask of each.

`Subject` is a model with a reference for its logits; `SUBJECTS` names those of the contract in
tests/backends/test_contract.py. The weights are random, and large enough that what a row sees
decides what is said.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.decode import never
from engine.errors import ModelError
from engine.models.memory import memory_need
from engine.sampling import Floats
from engine.settings import Generation, Runtime, Sampling
from engine.tree import Tree, graft
from engine.types import Step
from tests.support.gguf_files import alone, opened_gguf, window_gguf
from tests.support.lossless import Adversary, assert_lossless, events_of, tokens_of
from tests.support.tiny_gguf import ARCHITECTURES, tiny
from tests.support.tiny_hybrids import FAMILIES, save_hybrid, save_random

GREEDY = Sampling(temperature=0.0)
PATHS = [(3,), (3, 5), (4,), (3, 5, 9), (4, 6), (3, 8), (4, 6, 7), (4, 6, 7, 1)]
SMALL = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
LENGTH = {"max_position_embeddings": 1024}
WINDOW = {**WIDE, **LENGTH, "sliding_window": 8}
PLAIN = "mamba-unknown"
"""One whose layers count as unknown, so that its states cannot be rolled back."""
CAPTURED = "llama-captured"
"""One that computes in captured forwards."""
PACKED = "llama-4-bits"
"""One of few bits, whose forwards the compiled core computes."""
BROAD = {**WIDE, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""The sizes of a model whose matrices can have few bits."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("LlamaConfig", {**WIDE, **LENGTH}),
    "qwen2": ("Qwen2Config", {**WIDE, **LENGTH}),
    "qwen3": ("Qwen3Config", {**WIDE, **LENGTH}),
    "mistral-window": ("MistralConfig", WINDOW),
    "gemma2-mixed": ("Gemma2Config", WINDOW),
    "gemma3-mixed": (
        "Gemma3TextConfig", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "llama4-chunks": (
        "Llama4TextConfig",
        {**WIDE, **LENGTH, "num_hidden_layers": 4, "intermediate_size_mlp": 64,
         "attention_chunk_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
         "interleave_moe_layer_step": 2},
    ),
    "phi3": ("Phi3Config", {**SMALL, **LENGTH, "intermediate_size": 64}),
    "gpt-neox": ("GPTNeoXConfig", {**SMALL, **LENGTH, "intermediate_size": 64}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 160, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024},
    ),
    PLAIN: (
        "MambaConfig",
        {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
}  # fmt: skip
"""Models of transformers, by the library's class of their config and its settings."""
EXPERTS = {
    **BROAD, **LENGTH, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
}  # fmt: skip
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {**EXPERTS, "num_local_experts": 8}),
    "qwen3-moe": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True}),
    "qwen2-moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 160}),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
}  # fmt: skip
"""The same of mixtures of experts, in sizes that can have few bits."""


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters, with a chat template, small enough to write down."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", *(chr(code) for code in range(32, 127)), "\n"]
    words = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
    )  # fmt: skip
    wrapped.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}assistant: "
    )
    wrapped.save_pretrained(folder)


def save_model(kind: str, folder: Path, **changes: Any) -> Path:
    name, settings = (KINDS | MIXTURES)[kind]
    # So sharp that attention, and therefore its mask, matters.
    save_random(name, {**settings, **changes}, folder, 2.0 if kind == PLAIN else 8.0)
    save_tokenizer(folder)
    return folder


def load(folder: Path, device: str = "cpu", **options: Any) -> Any:
    from engine.models.load_transformers import load_transformers

    return load_transformers(str(folder), Runtime(**{"device": device, "parallel": 2, **options}))


def load_kind(kind: str, folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if kind == PLAIN:
            for module in ("engine.backends.transformers", "engine.models.load_transformers"):
                patch.setattr(f"{module}.kinds_of", lambda config: None)
        return load(save_model(kind, folder))


# What is asked of a model.


def prompt_of(size: int, vocabulary: int = 6144) -> list[int]:
    return [(37 * i + i * i) % (vocabulary - 10) + 5 for i in range(size)]


def tree_of(root: int, paths: Sequence[tuple[int, ...]] = PATHS) -> Tree:
    tree = Tree(root)
    for path in paths:
        graft(tree, path, "context", 1, len(paths))
    assert len(tree) == len(paths)
    return tree


def chain_of(root: int, tokens: Sequence[int]) -> Tree:
    tree = Tree(root)
    graft(tree, tokens, "context", 1, len(tokens))
    return tree


def numbers(*shape: int, seed: int = 0) -> Any:
    """Random numbers of the normal distribution, as a tensor."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_counted(
    folder: Path, info: Any, bits: str = "auto", ahead: bool = True, device: str = "cpu"
) -> None:
    """The memory that is told before a model is loaded is what it takes."""
    need = memory_need(str(folder), device, "auto", 1024, ahead=ahead, bits=bits)
    assert (need.weights, need.parameters) == (info.memory_bytes, info.parameters)


def gap(left: Floats, right: Floats) -> float:
    return float(np.abs(left - right).max())


def after(backend: Any, text: Sequence[int]) -> Floats:
    backend.prefill(text, never)
    row: Floats = backend.score(Tree(text[-1]), GREEDY).row(0).copy()
    backend.accept([])
    return row


class Stop:
    """Turns true at the n-th time it is asked, and stays so."""

    def __init__(self, at: int) -> None:
        self.at, self.asked = at, 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked >= self.at


def counted(backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every forward from now on, whichever sequence they belong to."""
    rows: list[int] = []
    if backend.info.kind == "llama.cpp":
        import llama_cpp

        decode = llama_cpp.llama_decode

        def call(context: Any, batch: Any) -> int:
            rows.append(batch.n_tokens)
            return int(decode(context, batch))

        monkeypatch.setattr(llama_cpp, "llama_decode", call)
        return rows
    forward, captured = type(backend).forward, backend.captured

    if captured is not None:
        read = captured.read

        def read_captured(own: Any, tokens: Sequence[int]) -> bool:
            rows.append(len(tokens))
            return bool(read(own, tokens))

        monkeypatch.setattr(captured, "read", read_captured)

    def run(own: Any, tokens: Sequence[int], *rest: Any, **named: Any) -> Any:
        rows.append(len(tokens))
        return forward(own, tokens, *rest, **named)

    monkeypatch.setattr(type(backend), "forward", run)
    return rows


class Trees:
    """Random trees of random shapes, with few different tokens, so that many are repeated."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def token(self) -> int:
        return self.draw.randrange(12) if self.draw.random() < 0.7 else self.draw.randrange(6144)

    def tree(self, root: int) -> Tree:
        draw, tree = self.draw, Tree(root)
        size = draw.choice((0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 40, 64, 128))
        shape = draw.choice(("chain", "star", "comb", "any", "any", "twins"))
        spine = 0
        for number in range(size):
            rows = len(tree.tokens)
            parent = {
                "chain": rows - 1,
                "star": 0,
                "comb": spine,
                "any": draw.randrange(rows),
                "twins": draw.randrange(max(0, rows - 4), rows),
            }[shape]
            row = tree.add(parent, self.token(), "")
            if number % 3 == 0:
                spine = row
        return tree

    def path(self, tree: Tree) -> list[int]:
        """Rows that are accepted: none, some, or all down to a leaf."""
        stay, row, rows = self.draw.choice((0.0, 0.5, 0.8, 1.0)), 0, list[int]()
        while tree.children[row] and self.draw.random() < stay:
            row = self.draw.choice([*tree.children[row].values()])
            rows.append(row)
        return rows

    def prompt(self, text: Sequence[int]) -> list[int]:
        """What is asked next: the text, now and then shortened, changed or a new one."""
        chance, tokens = self.draw.random(), [*text]
        if len(tokens) > 250 or chance < 0.06:
            tokens = tokens[: self.draw.randrange(1, 120)]
        if chance < 0.03 or (tokens and chance > 0.98):
            tokens += [self.token() for _ in range(self.draw.randrange(40))]
        return tokens or [self.token()]


class Broken(RuntimeError):
    """What a forward raises here."""


def failing(backend: Any, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Have the next forwards of the model fail after they were computed; what is raised then."""
    if backend.info.kind == "llama.cpp":
        import llama_cpp

        run = llama_cpp.llama_decode
        monkeypatch.setattr(llama_cpp, "llama_decode", lambda *given: run(*given) or -3)
        return ModelError
    owner, name = backend.model, "forward"
    if hasattr(backend.captured, "compute"):
        owner, name = backend.captured, "compute"
    inner = getattr(owner, name)

    def broken(*given: Any, **named: Any) -> Any:
        inner(*given, **named)
        raise Broken

    monkeypatch.setattr(owner, name, broken)
    return Broken


def wrong_at(
    truth: Sequence[int], vocabulary: int, seed: int = 0, share: float = 0.3, branches: bool = False
) -> Adversary:
    """Drafts the truth, where each token is wrong with some probability: short and long chains.
    With `branches`, wrong tokens stand beside it."""
    draw = random.Random(seed)

    def say(tokens: Sequence[int]) -> list[tuple[int, ...]]:
        rest = truth[len(tokens) : len(tokens) + draw.choice((1, 3, 8, 20))]
        chain = tuple(t if draw.random() > share else (t + 1) % vocabulary for t in rest)
        if not branches or not rest:
            return [chain]
        wrong = (rest[0] + 1) % vocabulary
        return [(wrong,), chain, (wrong, wrong), (rest[0], wrong), tuple(rest[:3])]

    return Adversary(say, obedient=False)


def assert_exact(model: Any, prompt: Sequence[int], wanted: Generation) -> None:
    """Wrong and right drafts change neither a token nor a bit of its probability."""
    plain = events_of(model.open(), prompt, wanted)
    truth = [*prompt, *(token.id for token in tokens_of(plain))]
    drafter = wrong_at(truth, model.info.vocabulary_size, branches=True)
    fast = events_of(model.open(), prompt, wanted, [drafter])
    assert len(fast) < len(plain)
    assert_lossless(plain, fast)
    chances = [[token.probability for token in tokens_of(each)] for each in (plain, fast)]
    assert chances[0] == chances[1]


def interleaved(runs: Sequence[Iterator[Any]], seed: int) -> list[list[Step]]:
    """The steps of runs that take turns at random, one event at a time."""
    draw, left, steps = random.Random(seed), dict(enumerate(runs)), [list[Step]() for _ in runs]
    while left:
        number = draw.choice([*left])
        event = next(left[number], None)
        if event is None:
            del left[number]
        elif isinstance(event, Step):
            steps[number].append(event)
    return steps


# The models of the contract.


@dataclass(frozen=True)
class Subject:
    """A model, and what its logits are by other means, up to `close`."""

    model: Any
    alone: Callable[[Sequence[int]], Floats]
    close: float

    def assert_verifies(self, leaves: int | None) -> None:
        """Loading would restrict a model that computes trees wrongly, and then every test of it
        passes."""
        info = self.model.info
        assert info.can_tree is (leaves != 0), info.note
        assert leaves == 0 or info.leaves == leaves, info.note

    @property
    def vocabulary(self) -> int:
        return int(self.model.info.vocabulary_size)

    def prompt(self, size: int) -> list[int]:
        return prompt_of(size, self.vocabulary)

    def tree(self, sequence: Any, root: int, length: int) -> Tree:
        """A tree as large as the model may verify behind so many tokens."""
        info = sequence.info
        if not info.can_tree:
            return Tree(root)
        return tree_of(root).within(info.leaves, sequence.depth_limit(length))


def subject(model: Any, alone: Callable[[Sequence[int]], Floats], close: float) -> Subject:
    model.info = replace(model.info, eos_ids=frozenset())
    return Subject(model, alone, close)


def of_transformers(model: Any) -> Subject:
    """Against the library's own forward, without a cache."""
    return subject(model, model.alone, 1e-3)


def of_core(model: Any) -> Subject:
    """Against the same text read into an empty cache, bit for bit."""
    twin = model.open()

    def alone(tokens: Sequence[int]) -> Floats:
        twin.reset()
        return after(twin, tokens)

    return subject(model, alone, 1e-30)


def of_llamacpp(path: Path, close: float = 1e-4, parallel: int = 1) -> Subject:
    """Against the same text read into the empty cache of another model."""
    twin = opened_gguf(path)
    return subject(opened_gguf(path, parallel=parallel), lambda tokens: alone(twin, tokens), close)


MODEL, GGUF = pytest.mark.model, pytest.mark.gguf
JOINT = "gguf-joint"
"""One with places for two conversations."""
WINDOWS = {"gguf-window-8": 8, "gguf-window-64": 64}
SUBJECTS = [
    *(pytest.param(kind, marks=MODEL) for kind in (*KINDS, CAPTURED, PACKED, *FAMILIES)),
    *(pytest.param(f"gguf-{name}", marks=GGUF) for name in ("small", "joint", *ARCHITECTURES)),
    *(pytest.param(name, marks=GGUF) for name in WINDOWS),
]


def leaves_of(name: str) -> int | None:
    """How many branches the model of that name verifies, 0 where it decodes plainly."""
    if name == PLAIN:
        return 0
    if name in KINDS or name in (CAPTURED, PACKED):
        return None
    return 128 if name in ("gguf-small", JOINT) or name in WINDOWS else 1


def subject_of(name: str, folder: Path, small: Callable[[], Path]) -> Subject:
    """The model of that name, made in a folder. `small` gives the embedded smallest one as a GGUF
    file in float32."""
    if name in KINDS:
        return of_transformers(load_kind(name, folder))
    if name == CAPTURED:
        from engine.backends.captured import tried

        model = load_kind("llama-gqa", folder)
        assert tried(model, None, answers=3) == ""
        return of_transformers(model)
    if name == PACKED:
        model = load(save_model("llama-gqa", folder, **BROAD), bits="4")
        assert model.captured is not None, model.info.note
        return of_core(model)
    if name in FAMILIES:
        return of_transformers(load(save_hybrid(name, folder)))
    if name in WINDOWS:
        path = window_gguf(small(), folder / f"{name}.gguf", WINDOWS[name])
        return of_llamacpp(path, close=1e-3)
    if name == "gguf-small":
        return of_llamacpp(small())
    if name == JOINT:
        return of_llamacpp(small(), parallel=2)
    # Logits reach 17. Without AVX-512, rounding moves one row of this model by 1.6e-4, but no row
    # of the others by more than 8.2e-5.
    close = 3e-4 if name == "gguf-qwen35moe" else 1e-4
    return of_llamacpp(tiny(folder, name.removeprefix("gguf-")), close)
