"""Forwards of Llama-like models of few bits, also with experts, as one call of the compiled core.

Torch computes norms, rotary embeddings, gates and attention as separate operations, which together
take as long as the products do. The core computes them between two products, in the same threads,
and stores keys and values in the order in which it reads them (native/src/forward.hpp).

Attention adds up in the order of the text, so the logits of a token are the same bits whether it is
decoded plainly or verified in a tree, and whatever other sequences have rows in the same forward.
Whether a model computes correctly in this way is tried when it is loaded, against its forwards in
torch (`attach`). Other models keep those.
"""

import gc
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.backends.base import SLICE, LogitScores, Wanted
from engine.backends.caches import TREE_ROWS, TreeCache
from engine.backends.captured import chain, path_to, random_tree
from engine.backends.quantised import PackedLinear
from engine.backends.transformers import TransformersBackend
from engine.decode import never
from engine.errors import first_line
from engine.native import core, has_tiles
from engine.settings import Sampling
from engine.tree import Tree

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe")
CLASSES = {f"{name}ForCausalLM" for name in FAMILIES}
HEAD_SIZES = (32, 64, 128, 256)
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHUNK = 64
"""Rows of a prompt that are read at a time; a cancelled prompt ends after one of these. Where the
core has tiles, twice as many are: they compute a row in so little time that reading the weights
counts. If the trees of several sequences have more rows, they are divided among forwards: further
rows save no time, and the memory for intermediate results, which is kept, grows with them."""
SHARE = 0.15
"""How far a row of logits may be from that of torch, as a share of its norm: where a sum rounds
differently, an input of a product may round to the next of its 8 bits. A wrong mask or position
differs by more than half."""
USUAL_ROWS = 0.75
"""The share of rows for which this holds in a mixture: a row whose router nearly hesitates between
two experts may take the other one."""
TRIED, ROWS = 40, 12
"""Tokens before the trees of the trial, and rows of each tree."""


class NativeCache(TreeCache):
    """The keys and values of a sequence as the core reads them, in parts of PART tokens."""

    def __init__(self, shape: tuple[int, int, int], capacity: int) -> None:
        super().__init__([], capacity)
        self.shape = shape
        self.parts: list[torch.Tensor] = []

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def grow(self, rows: int) -> None:
        layers, heads, size = self.shape
        while len(self.parts) * core.PART < rows:
            self.parts.append(torch.zeros(layers * 2 * heads * core.PART * size))

    def row(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values of a row in all layers, each of shape (layers, heads, size)."""
        layers, heads, size = self.shape
        part, inside = self.parts[slot // core.PART], slot % core.PART
        keys, values = part.view(layers, 2, heads, core.PART * size).unbind(1)
        blocks = keys.view(layers, heads, -1, size, core.CHANNELS)
        rows = values.view(layers, heads, core.PART, size)
        return blocks[:, :, inside // core.CHANNELS, :, inside % core.CHANNELS], rows[:, :, inside]

    def keep(self, kept: Sequence[int], rows: int) -> None:
        for place, row in enumerate(kept):
            if row != place:
                target, source = self.row(self.length + place), self.row(self.length + row)
                for to, states in zip(target, source, strict=True):
                    to.copy_(states)
        self.length += len(kept)

    def copy(self, other: TreeCache, length: int) -> None:
        assert isinstance(other, NativeCache)
        self.parts = [part.clone() for part in other.parts[: -(-length // core.PART)]]
        self.length = length

    def stretch(self, length: int) -> None:
        self.grow(length + TREE_ROWS)
        for part in self.parts:
            part.zero_()
        self.length = length


class Span(NamedTuple):
    """The rows of one sequence in a forward; `parents` count from the first of them."""

    sequence: TransformersBackend
    tokens: Sequence[int]
    positions: Sequence[int]
    parents: Sequence[int]


class NativeForwards:
    """A model whose forwards the core computes, as OtherForwards of its sequences."""

    nodes: int | None = None
    chunk: int | None
    slice_size = SLICE
    exact = at_once = True

    def __init__(self, backend: TransformersBackend) -> None:
        model, context = backend.model, backend.info.context_length
        config = model.config.get_text_config()
        layers = list(model.model.layers)
        first = layers[0].self_attn
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.modules = {id(layer): number for number, layer in enumerate(layers)}
        self.modules[id(model.get_decoder())] = len(layers)
        self.modules[id(self.embedding)] = -1
        self.shape = len(layers), config.num_key_value_heads, int(first.head_dim)
        self.capacity = context + TREE_ROWS
        self.chunk = 2 * CHUNK if has_tiles() else CHUNK
        sizes = [
            *(config.hidden_size, config.intermediate_size),
            *(config.num_attention_heads, *self.shape[1:], config.vocab_size),
        ]
        experts, normalised = experts_of(model)
        self.decoder = core.Decoder(
            [*sizes, *experts],
            normalised,
            False,
            model.model.norm.variance_epsilon,
            first.scaling,
            [parts_of(layer) for layer in layers],
            model.model.norm.weight.data,
            self.head.matrix,
            *rotary_factors(model.model.rotary_emb, self.capacity, self.shape[2]),
            model,
        )

    def fresh_cache(self) -> NativeCache:
        return NativeCache(self.shape, self.capacity)

    def compute(self, spans: Sequence[Span], logits: torch.Tensor | None) -> None:
        """One forward over the rows of some sequences. `logits`, shape (rows, width of the head),
        takes those of all rows."""
        tokens: list[int] = []
        positions: list[int] = []
        parents: list[int] = []
        caches = []
        for span in spans:
            cache, rows = span.sequence.cache, len(span.tokens)
            cache.grow(cache.length + rows)
            caches.append((rows, cache.length, 0, cache.parts))
            tokens += span.tokens
            positions += span.positions
            parents += span.parents
        states = self.embedding(torch.tensor(tokens))
        heads = [span.sequence.head for span in spans]
        modules = next((head.weights.taps for head in heads if head and head.on), ())
        taps = [(self.modules[id(each)], states.clone()) for each in modules]
        self.decoder.compute(
            states,
            caches,
            np.array(positions, dtype=np.int64),
            np.array(parents, dtype=np.int64),
            logits,
            [(number, tap) for number, tap in taps if number >= 0],
            None,
            torch.get_num_threads(),
        )
        first = 0
        for head, span in zip(heads, spans, strict=True):
            end = first + len(span.tokens)
            if head is not None:
                head.found[:] = [tap[None, first:end] for _, tap in taps] if head.on else []
            first = end

    def score_all(self, wanted: Sequence[Wanted[TransformersBackend]]) -> list[LogitScores]:
        spans = []
        for sequence, tree, _ in wanted:
            positions = [sequence.cache.length + depth for depth in tree.depths]
            spans.append(Span(sequence, tree.tokens, positions, tree.parents))
        counts = [len(span.tokens) for span in spans]
        if sum(counts) > CHUNK and len(wanted) > 1:
            half = len(wanted) // 2
            return self.score_all(wanted[:half]) + self.score_all(wanted[half:])
        logits = torch.empty(sum(counts), self.head.width)
        self.compute(spans, logits)
        values, found, first = logits.numpy()[:, : self.head.out_features], [], 0
        for (_, _, sampling), span, count in zip(wanted, spans, counts, strict=True):
            rows = values[first : first + count]
            found.append(LogitScores(rows.__getitem__, [at + 1 for at in span.positions], sampling))
            first += count
        return found

    def read(self, sequence: TransformersBackend, tokens: Sequence[int]) -> bool:
        start, count = sequence.cache.length, len(tokens)
        positions, parents = range(start, start + count), range(-1, count - 1)
        self.compute([Span(sequence, tokens, positions, parents)], None)
        return True


def parts_of(layer: Any) -> list[Any]:
    """The norms, the router and the matrices of a layer, in the core's order."""
    attention, own = layer.self_attn, []
    mlp = getattr(layer.mlp, "experts", layer.mlp)
    router = None if mlp is layer.mlp else layer.mlp.gate.weight.data.view(-1)
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name, None)
        own.append(None if norm is None else norm.weight.data)
    modules = [getattr(attention, name, None) or getattr(mlp, name) for name in MATRICES]
    norms = layer.input_layernorm.weight.data, layer.post_attention_layernorm.weight.data
    return [*norms, *own, None, router, *(module.matrix for module in modules)]


def mixtures_of(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def experts_of(model: Any) -> tuple[list[int], bool]:
    """The number of experts, of those chosen for a row, and their inner width, zeros without any;
    and whether the weights of those chosen add up to 1."""
    mixture = next(iter(mixtures_of(model)), None)
    if mixture is None:
        return [0, 0, 0], False
    experts, router = mixture.experts, mixture.gate
    sizes = [experts.count, router.top_k, experts.down_proj.in_features]
    return sizes, getattr(router, "norm_topk_prob", True)


def rotary_factors(rotary: Any, positions: int, size: int) -> list[torch.Tensor]:
    """Cosines and sines by position, each of shape (positions, size / 2). Raises ValueError for a
    module that rotates in another way."""
    states = torch.zeros((1, positions, 1))
    found = []
    for factors in rotary(states, torch.arange(positions)[None]):
        left, right = factors[0].float().split(size // 2, dim=-1)
        if not torch.equal(left, right):
            raise ValueError("its rotary factors have another order")
        found.append(left.contiguous())
    return found


# Whether a model is computed by the core.


@torch.inference_mode()
def attach(backend: TransformersBackend) -> str:
    """Let the core compute a checked model of few bits, if that gives what torch gives. Returns the
    reason if not. Leaves the cache empty."""
    problem = obstacle(backend) or tried(backend)
    if problem:
        backend.captured = None
        gc.collect()
    backend.close()
    return problem


def obstacle(backend: TransformersBackend) -> str:
    """Why a model is not tried, "" if it is."""
    info, model = backend.info, backend.model
    config = model.config.get_text_config()
    name = type(model).__name__
    if name not in CLASSES:
        return f"the core does not know {name}"
    if not info.can_tree or info.leaves is not None:
        return "it does not verify trees"
    reach = min(backend.spans.values(), default=info.context_length)
    if reach < info.context_length:
        return f"its layers see {reach:,} tokens at most"
    if backend.rotary.switches:
        return "its rotary factors depend on the length of the text"
    if config.hidden_act != "silu" or model.model.layers[0].self_attn.head_dim not in HEAD_SIZES:
        return "its activations or the size of its heads are not known"
    left = (
        isinstance(each, torch.nn.Linear) or hasattr(each, "gate_up_proj")
        for each in model.modules()
    )
    if not isinstance(model.get_output_embeddings(), PackedLinear) or any(left):
        return "some of its matrices could not be converted"
    if any(getattr(each, "places", None) is not None for each in model.modules()):
        return "the inputs of its matrices have orders of their own (desc_act)"
    return ""


def tried(backend: TransformersBackend) -> str:
    """What is wrong with native forwards of a model, "" for nothing."""
    draw, size = Random(0), backend.info.vocabulary_size
    prompt = draw.choices(range(size), k=min(TRIED, backend.info.context_length // 2))
    trees = [random_tree(draw, size, ROWS) for _ in range(2)]
    path = path_to(trees[0], ROWS - 1)
    outside = logits_of(backend, prompt, trees)
    try:
        backend.captured = NativeForwards(backend)
        backend.close()
        inside = logits_of(backend, prompt, trees)
        alone = logits_of(backend, prompt, [chain([trees[0].tokens[row] for row in path])])
    except Exception as error:
        # An unknown module lacks attributes; the core raises ValueError and TypeError.
        return f"its forwards fail ({first_line(error).rstrip('.')})"
    gaps = (outside - inside).norm(dim=1) / outside.norm(dim=1)
    gap = float(gaps.quantile(USUAL_ROWS if mixtures_of(backend.model) else 1.0))
    if not gap <= SHARE:
        return f"its logits are off by {gap:.2g} of their norm"
    return "" if torch.equal(inside[path], alone) else "a row depends on those beside it"


def logits_of(
    backend: TransformersBackend, prompt: Sequence[int], trees: Sequence[Tree]
) -> torch.Tensor:
    """The logits of some trees after a prompt, shape (rows of all, vocabulary); each follows the
    path to the last row of the one before it."""
    backend.prefill([*prompt, trees[0].tokens[0]], never)
    found = []
    for tree in trees:
        scores = backend.score(tree, Sampling())
        found += [torch.tensor(scores.row(row)) for row in range(len(tree) + 1)]
        backend.accept(path_to(tree, len(tree))[1:])
    backend.reset()
    return torch.stack(found)
