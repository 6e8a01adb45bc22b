"""Any causal language model that the transformers library loads, verified as a tree in torch.

The library's own model class computes the forward; this file gives it a cache that is written in
place, a 4-D mask that shows each tree row only its ancestors, and explicit positions. Accepting a
path moves its rows together; rolling back sets a length. Whether a model computes such a forward
correctly is checked at load; a model that fails decodes plainly. Sequences share everything but the
cache, which grows with its content.

Most models rotate a key by its position alone. With "longrope" (Phi-3 and Phi-4 of 128k) a text
that is longer than the length that the model was first trained for uses other rotary factors, at
all of its positions. The library decides by the largest position of one forward. A text must
therefore be read with its length known, a cache serves texts of only one side of the switch, and no
forward may reach across it. "dynamic" factors change with every token beyond
`max_position_embeddings`. They need nothing here, because no model is loaded with a longer context.

Invariant between calls: the cache holds the `cached` tokens, with the rotary factors of `regime`.
With `dirty` it may hold more rows, which were computed but not yet settled; if it cannot roll back,
the next prompt then starts with an empty cache. After an error the cache is empty.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache

from engine.backends.base import SLICE, BackendInfo, Filled, LogitScores, Wanted, common_prefix
from engine.backends.caches import (
    TREE_ROWS,
    Name,
    TreeCache,
    bytes_of,
    cache_argument,
    follow_rows,
    is_recurrent,
    kinds_of,
)
from engine.backends.device_scores import DeviceScores
from engine.backends.folded_attention import unfolded
from engine.backends.joint import JointCache, joint_mask
from engine.backends.pool import PoolCache
from engine.backends.quantised import PackedLinear
from engine.backends.rounded import RoundedLinear
from engine.backends.transformers_tokenizer import TransformersTokenizer
from engine.heads.eagle3_head import Eagle3Head, Embedding, Matrix
from engine.models.memory import CHAIN
from engine.sampling import Floats
from engine.settings import Sampling
from engine.tree import Tree

PREFILL_CHUNK = 512
PARALLEL = 16
"""Tokens that are read in one forward in the time of about one forward for each alone."""
TAIL = 16
"""Tokens at the end of a prompt that open an answer: the next prompt often differs in these."""
COPIED = 32
"""The fewest tokens that are copied from another sequence instead of being read."""
MIXED = -1
"""The regime of a cache whose tokens have different rotary factors: no other text can use it."""


class Stopped(Exception):
    """A forward was cancelled between two of its layers."""


def layers_of(model: Any) -> list[torch.nn.Module]:
    """The layers of a model: all modules that it keeps in lists."""
    stacks = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    return [layer for stack in stacks for layer in stack]


@contextmanager
def stopping(layers: Sequence[torch.nn.Module], cancelled: Callable[[], bool]) -> Iterator[None]:
    """Make forwards in this block raise Stopped before their next layer once they are cancelled."""

    def check(*_: Any) -> None:
        if cancelled():
            raise Stopped

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(check))
        yield


class Rotary:
    """The rotary embeddings of a model that depend on the length of the text; most have none.

    `switches` are the lengths beyond which a text has other factors, in rising order.
    """

    def __init__(self, model: Any) -> None:
        self.modules: list[torch.nn.Module] = []
        found: set[int] = set()
        for module in model.modules():
            lengths = switches_of(module)
            self.modules += [module] if lengths else []
            found |= lengths
        self.switches = sorted(found)

    def regime(self, length: int) -> int:
        """The number of the factors for a text of that length, from 0."""
        return bisect_left(self.switches, length)

    def switch(self, length: int) -> int | None:
        """The longest text with the same factors; None if all longer ones have them."""
        at = self.regime(length)
        return self.switches[at] if at < len(self.switches) else None

    @contextmanager
    def reading(self, length: int) -> Iterator[None]:
        """Run forwards in this block as parts of a text of that length."""

        def lengthen(
            module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if "position_ids" in named:
                return given, {**named, "position_ids": with_last(named["position_ids"], length)}
            states, positions, *rest = given
            return (states, with_last(positions, length), *rest), named

        with ExitStack() as hooks:
            for module in self.modules:
                hooks.enter_context(module.register_forward_pre_hook(lengthen, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(without_last))
            yield


def switches_of(module: torch.nn.Module) -> set[int]:
    """The lengths at which the factors of one module change; none for most kinds of module."""
    kinds = getattr(module, "rope_type", None)
    if not isinstance(kinds, dict):
        kinds = {None: kinds}
    found = set()
    for layer, kind in kinds.items():
        if kind == "longrope":
            config: Any = module.config
            own = config.rope_parameters if layer is None else config.rope_parameters[layer]
            found.add(int(own["original_max_position_embeddings"]))
    return found


def with_last(positions: torch.Tensor, length: int) -> torch.Tensor:
    """The positions, shape (..., tokens), followed by the last one of a text."""
    last = positions.new_full((*positions.shape[:-1], 1), length - 1)
    return torch.cat([positions, last], dim=-1)


def without_last(module: torch.nn.Module, given: Any, angles: Any) -> Any:
    """The angles of all positions but the last; shapes (..., tokens, size)."""
    if isinstance(angles, tuple):
        return tuple(each[..., :-1, :] for each in angles)
    return angles[..., :-1, :]


class OtherForwards(Protocol):
    """Another way to compute some forwards of a model, for all of its sequences (captured.py).
    `nodes` is the size of the largest tree that it computes, None for any, and `chunk` the number
    of tokens of a prompt that it reads at a time, None for the usual one. `exact` is that of
    BackendInfo; `at_once` and `slice_size` are those of Batching."""

    nodes: int | None
    chunk: int | None
    exact: bool
    at_once: bool
    slice_size: int

    def fresh_cache(self) -> TreeCache: ...

    def score_all(
        self, wanted: Sequence[Wanted["TransformersBackend"]]
    ) -> Sequence[LogitScores | None]:
        """As TransformersBackend.score_all; None for a tree that it cannot compute."""

    def read(self, sequence: "TransformersBackend", tokens: Sequence[int]) -> bool:
        """Compute a part of a prompt; returns False if it cannot."""


class TransformersBackend(TransformersTokenizer):
    """One sequence of a loaded model, with its tokenizer, as a Backend.

    With `resumes`, layers that keep a state can continue from it with several tokens at a time.
    `offset` is the position of the first token: 0 except while a model is checked. With `on_device`
    the logits are not on the host, so reading whole rows of them is expensive.
    """

    info: BackendInfo
    unread = 0

    def __init__(self, model: Any, tokenizer: Any, info: BackendInfo) -> None:
        super().__init__(tokenizer, info)
        self.prepare(model)

    def prepare(self, model: Any) -> None:
        self.model = model
        self.head: Eagle3Head | None = None
        self.captured: OtherForwards | None = None
        config = model.config.get_text_config()
        spans = {
            "sliding_attention": getattr(config, "sliding_window", None) or 0,
            "chunked_attention": getattr(config, "attention_chunk_size", None) or 0,
        }
        usual = next((kind for kind, span in spans.items() if span), "full_attention")
        self.layer_kinds = sorted(set(getattr(config, "layer_types", None) or [usual]))
        self.spans = {kind: spans[kind] for kind in self.layer_kinds if spans.get(kind)}
        self.kinds, self.recurrent = kinds_of(config), is_recurrent(config)
        self.resumes = not self.recurrent
        self.chain: int | None = CHAIN if self.recurrent else None
        if self.recurrent:
            follow_rows(model)
        self.cache_name = cache_argument(model.forward)
        self.layers = layers_of(model)
        self.rotary = Rotary(model)
        self.restarts = any(starts_again(model, each) for each in self.rotary.switches)
        self.joins = False
        """Whether the sequences of this model were found to share forwards correctly."""
        self.offset = 0
        self.on_device = model.device.type != "cpu"
        self.cached: list[int] = []
        self.regime = 0
        self.tree: Tree | None = None
        self.dirty = False
        self.cache: Any = None
        self.reset()

    def reset(self) -> None:
        """Empty the cache: our own if trees can be verified, otherwise the library's. Our cache
        keeps its memory for later rows; it is empty when its length is 0."""
        self.cached = []
        self.tree, self.dirty = None, False
        if self.head:
            self.head.reset()
        config = self.model.config.get_text_config()
        if not self.info.can_tree:
            self.cache = DynamicCache(config=config)
        elif isinstance(self.cache, TreeCache):
            self.cache.shorten(0, dirty=True)
        else:
            self.cache = self.fresh_cache()

    def fresh_cache(self) -> TreeCache:
        """A cache with room for the context and a tree."""
        if self.captured is not None:
            return self.captured.fresh_cache()
        assert self.kinds is not None, "trees need layers that are known"
        return TreeCache(self.kinds, self.info.context_length + TREE_ROWS)

    @property
    def at_once(self) -> bool:
        return self.captured is None or self.captured.at_once

    @property
    def slice_size(self) -> int:
        return SLICE if self.captured is None else self.captured.slice_size

    @property
    def bytes(self) -> int:
        own = self.cache.bytes if self.info.can_tree else bytes_of(self.cache)
        return int(own) + (self.head.bytes if self.head else 0)

    def open(self) -> Self:
        other = copy(self)
        other.head = self.head and self.head.open(other)
        other.cache = None
        other.reset()
        return other

    def close(self) -> None:
        if isinstance(self.cache, PoolCache):
            self.cache.drop()
        self.cache = None
        self.reset()

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Empty the cache after an error in this block, because its content is unknown then."""
        try:
            yield
        except Stopped:
            raise
        except BaseException:
            self.close()
            raise

    @torch.inference_mode()
    def prefill(
        self, tokens: Sequence[int], cancelled: Callable[[], bool], most: int | None = None
    ) -> Filled:
        decided, length = list(tokens[:-1]), self.offset + len(tokens)
        regime = self.rotary.regime(length)
        self.keep(common_prefix(self.cached, decided) if regime == self.regime else 0)
        if not self.resumes and 1 + len(decided) / PARALLEL < len(decided) - len(self.cached):
            # Such layers read several tokens from an empty state only. Continue token by token, or
            # read everything again at once if that takes less time.
            self.reset()
        self.regime, reused = regime, len(self.cached)
        whole = len(decided)
        if most is not None and self.resumes and not self.recurrent:
            decided = decided[: reused + most]
        with suppress(Stopped), stopping(self.layers, cancelled), self.rotary.reading(length):
            for number, chunk in enumerate(self.chunks(decided)):
                if cancelled():
                    break
                self.mark("tail" if number else "begin")
                self.read(chunk)
        complete = len(self.cached) == whole
        if complete:
            self.mark("end")
        limit = self.rotary.switch(length) if self.restarts else None
        return Filled(reused, complete, limit and limit - self.offset)

    @torch.inference_mode()
    def begin_as(self, other: "TransformersBackend", tokens: Sequence[int]) -> None:
        own, shared = (common_prefix(each.cached, tokens[:-1]) for each in (self, other))
        switches = self.recurrent or self.rotary.switches
        if shared < own + COPIED or not self.info.can_tree or switches:
            return
        self.close()
        with self.emptied():
            self.cache.copy(other.cache, shared)
        self.cached = list(tokens[:shared])

    def chunks(self, decided: Sequence[int]) -> list[Sequence[int]]:
        """The tokens that are not in the cache yet, divided into one part per forward. If states
        are kept, a long text ends in a short part: the next prompt is often the same except for the
        last few tokens, which open an answer."""
        start, end = len(self.cached), len(decided)
        size = (self.captured and self.captured.chunk) or PREFILL_CHUNK
        if not self.resumes:
            size = 1 if start else max(1, end)
        tail = TAIL if self.resumes and self.recurrent and end - start > 4 * TAIL else 0
        cuts = [*range(start, end - tail, size), *([end - tail] if tail else []), end]
        return [decided[left:right] for left, right in pairwise(cuts) if right > left]

    def mark(self, name: Name) -> None:
        """Mark the states of the cache, if it has any."""
        if self.info.can_tree:
            self.cache.mark(name)

    def read(self, chunk: Sequence[int]) -> None:
        """Run decided tokens and keep them."""
        self.dirty = True
        with self.emptied():
            if self.captured is None or not self.captured.read(self, chunk):
                self.forward(chunk, range(len(chunk)), logits=1)
            if self.head:
                self.head.record(len(self.cached), range(len(chunk)))
        self.cached += chunk
        if self.info.can_tree:
            self.cache.keep(range(len(chunk)), len(chunk))
        self.dirty = False

    @torch.inference_mode()
    def stretch(self, tokens: Sequence[int]) -> None:
        """Make the cache claim to hold these tokens, with rows of zeros, so that later forwards can
        be timed; it must have held some before. The library's own cache reads the tokens
        instead."""
        if not self.info.can_tree:
            self.prefill([*tokens, 0], lambda: False)
            return
        self.tree, self.dirty = None, False
        if self.head:
            self.head.keep(0)
        self.cached, self.regime = list(tokens), self.rotary.regime(self.offset + len(tokens) + 1)
        self.cache.stretch(len(tokens))

    def keep(self, length: int) -> None:
        """Shorten the cache to so many decided tokens, or to the nearest smaller number that it can
        go back to: none if it cannot roll back."""
        if self.info.can_tree:
            self.cache.shorten(length, self.dirty)
            length = self.cache.length
        elif self.dirty or length < len(self.cached):
            self.reset()
        del self.cached[length:]
        if self.head:
            self.head.keep(len(self.cached))
        self.tree, self.dirty = None, False

    def depth_limit(self, length: int) -> int | None:
        switch = self.rotary.switch(self.offset + length)
        own = None if switch is None else switch - self.offset - length
        return min((limit for limit in (own, self.chain) if limit is not None), default=None)

    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        return self.score_all([Wanted(self, tree, sampling)])[0]

    def begin(self, tree: Tree) -> None:
        """Begin a forward over a tree."""
        self.tree, self.dirty = tree, True
        regime = self.rotary.regime(self.offset + len(self.cached) + 1 + max(tree.depths))
        if regime != self.regime:
            self.regime = MIXED if self.cached else regime

    @torch.inference_mode()
    def score_all(self, wanted: Sequence[Wanted["TransformersBackend"]]) -> list[LogitScores]:
        with ExitStack() as all_emptied:
            for each in wanted:
                each.sequence.begin(each.tree)
                all_emptied.enter_context(each.sequence.emptied())
            if self.captured is not None:
                found = zip(wanted, self.captured.score_all(wanted), strict=True)
                return [scores or each.sequence.score_alone(*each[1:]) for each, scores in found]
            if self.joins and len(wanted) > 1:
                return self.score_joined(wanted)
            return [each.sequence.score_alone(*each[1:]) for each in wanted]

    def score_alone(self, tree: Tree, sampling: Sampling) -> LogitScores:
        """Score a tree in a forward of its own."""
        visible = None if self.recurrent else ancestors(tree.parents)
        logits = self.forward(tree.tokens, tree.depths, visible, verifying=True)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # otherwise the wait would count as sampling
        return self.scores(logits, tree, sampling)

    def positions(self, tree: Tree) -> list[int]:
        """The positions of the tokens that follow the rows of a tree."""
        return [len(self.cached) + 1 + depth for depth in tree.depths]

    def scores(self, logits: torch.Tensor, tree: Tree, sampling: Sampling) -> LogitScores:
        """The scores of a tree by its logits, shape (rows, vocabulary)."""
        if self.on_device:
            return DeviceScores(logits, partial(row_of, logits), self.positions(tree), sampling)
        return LogitScores(partial(row_of, logits), self.positions(tree), sampling)

    def score_joined(self, wanted: Sequence[Wanted["TransformersBackend"]]) -> list[LogitScores]:
        """Score the trees of several sequences in one forward."""
        device = self.model.device
        counts = [len(each.tree) + 1 for each in wanted]
        tokens, positions, masks = [], [], []
        for each in wanted:
            sequence, tree = each.sequence, each.tree
            start, depths = len(sequence.cached), np.asarray(tree.depths)
            tokens += tree.tokens
            positions += (depths + start + self.offset).tolist()
            masks.append(self.mask(start, depths, ancestors(tree.parents)))
        inputs = {
            "input_ids": torch.tensor([tokens], device=device),
            "position_ids": torch.tensor([positions], device=device),
            "attention_mask": joint_mask(masks),
            self.cache_name: JointCache([each.sequence.cache for each in wanted], counts),
        }
        heads = [each.sequence.head for each in wanted if each.sequence.head]
        for head in heads:
            head.found.clear()
        listening = next((head for head in heads if head.on), None)
        with listening.tapped() if listening is not None else nullcontext():
            output = self.model(**inputs, use_cache=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if listening is not None:
            found = [torch.split(states, counts, dim=1) for states in listening.found]
            for number, each in enumerate(wanted):
                if each.sequence.head and each.sequence.head.on:
                    each.sequence.head.found[:] = [states[number] for states in found]
        logits = torch.split(output.logits[0], counts)
        return [
            each.sequence.scores(part, each.tree, each.sampling)
            for each, part in zip(wanted, logits, strict=True)
        ]

    @torch.inference_mode()
    def accept(self, rows: Sequence[int]) -> None:
        assert self.tree is not None, "accept follows score"
        with self.emptied():
            if self.info.can_tree:
                self.cache.keep((0, *rows), len(self.tree) + 1)
            if self.head:
                self.head.record(len(self.cached), (0, *rows))
        self.cached += [self.tree.tokens[row] for row in (0, *rows)]
        self.tree, self.dirty = None, False

    def forward(
        self,
        tokens: Sequence[int],
        depths: Sequence[int],
        visible: NDArray[np.bool_] | None = None,
        logits: int = 0,
        verifying: bool = False,
    ) -> torch.Tensor:
        """Run `tokens` after those in the cache; row i sees the cache and the rows in `visible[i]`.

        Without `visible` the rows are a chain, which the library masks by itself. Returns logits of
        shape (rows, vocabulary), those of the last `logits` rows if that is not 0. With `verifying`
        the rows may later be accepted in part.
        """
        inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens], device=self.model.device)}
        start = len(self.cached)
        if self.info.can_tree or self.offset:
            positions = torch.tensor([depths], device=self.model.device) + start + self.offset
            inputs["position_ids"] = positions
            if self.info.can_tree and visible is not None:
                inputs["attention_mask"] = self.mask(start, np.asarray(depths), visible)
        inputs[self.cache_name] = self.cache
        computing = self.cache.computing(verifying) if self.info.can_tree else nullcontext()
        with computing, self.head.tapped() if self.head else nullcontext():
            output = self.model(**inputs, use_cache=True, logits_to_keep=logits)
        logits_of_rows: torch.Tensor = output.logits[0]
        return logits_of_rows

    def alone(self, tokens: Sequence[int]) -> Floats:
        """The logits after `tokens` by the library alone, without a cache and with its own
        attention; shape (vocabulary,)."""
        inputs = {"input_ids": torch.tensor([list(tokens)], device=self.model.device)}
        if self.offset:
            inputs["position_ids"] = torch.arange(len(tokens), device=self.model.device)[None]
            inputs["position_ids"] += self.offset
        with torch.inference_mode(), unfolded(self.model):
            output = self.model(**inputs, use_cache=False)
        logits: Floats = output.logits[0, -1].float().cpu().numpy()
        return logits

    def embeddings(self) -> tuple[Embedding, Matrix]:
        """The embedding and the output matrix, for a head without its own. A matrix of few bits
        stays as it is: its numbers would take four times the memory."""
        output = self.model.get_output_embeddings()
        few = isinstance(output, PackedLinear | RoundedLinear)
        found = output if few else output.weight
        return self.model.get_input_embeddings().weight, found

    def mask(
        self, start: int, depths: NDArray[np.int_], visible: NDArray[np.bool_]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The additive mask, shape (1, 1, rows, start + rows), per kind of attention layer. A layer
        of sliding attention also hides rows outside its window, and one of chunked attention rows
        of other chunks."""
        dtype, device = self.model.dtype, self.model.device
        hidden = torch.finfo(dtype).min
        full = torch.zeros((1, 1, len(visible), start + len(visible)), dtype=dtype)
        full[0, 0, :, start:].masked_fill_(torch.from_numpy(~visible), hidden)
        masks = {}
        for kind in self.layer_kinds:
            far = self.far(kind, start, start + depths)
            mask = full if far is None else full.masked_fill(torch.from_numpy(far), hidden)
            masks[kind] = mask.to(device)
        return masks if len(masks) > 1 else masks[self.layer_kinds[0]]

    def far(self, kind: str, start: int, positions: NDArray[np.int_]) -> NDArray[np.bool_] | None:
        """The rows that rows at some positions do not see because of the kind of layer, None if
        they see all; shape (rows, start + rows)."""
        reach = self.spans.get(kind)
        if not reach or int(positions.max()) < reach:
            return None
        rows, columns = positions[:, None], np.concatenate([np.arange(start), positions])[None, :]
        far: NDArray[np.bool_] = (
            columns <= rows - reach
            if kind == "sliding_attention"
            else columns // reach != rows // reach
        )
        return far


def starts_again(model: Any, switch: int) -> bool:
    """Whether the library's own decoding drops its cache when a text outgrows `switch`. Some models
    do, because the cached keys have other rotary factors. This queries the library with a cache
    that claims to hold so many tokens."""
    cache = TreeCache([("full_attention", 1)], 0)
    cache.length = switch
    tokens = torch.zeros((1, switch + 1), dtype=torch.long)
    prepare = model.prepare_inputs_for_generation
    inputs = prepare(
        tokens,
        **{cache_argument(prepare): cache},
        attention_mask=torch.ones_like(tokens),
        next_sequence_length=1,
    )
    return bool(inputs["input_ids"].shape[1] > 1)


def row_of(logits: torch.Tensor, row: int) -> Floats:
    """A row on the host; only a view if the model computes there in float32."""
    values: Floats = logits[row].float().cpu().numpy()
    return values


def ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """The rows that each tree row sees: itself and its ancestors; shape (rows, rows)."""
    visible = np.eye(len(parents), dtype=bool)
    for row in range(1, len(parents)):
        visible[row] |= visible[parents[row]]
    return visible
