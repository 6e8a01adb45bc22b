"""Any causal language model that the transformers library loads, verified as a tree in torch.

The library's own model class computes the forward; this file gives it a cache that is written in
place, a 4-D mask that shows each tree row its ancestors only, and explicit positions. Accepting a
path moves its rows together; rolling back is setting a length. Whether a model computes such a
forward correctly is not assumed but checked at load: one that fails decodes plainly. Sequences
share all but the cache, which grows with what they hold.

Invariant between calls: the cache holds the `cached` tokens, with the rotary factors of `regime`.
`dirty` says that it may hold more, as rows were computed and not yet settled: where it cannot roll
back, the next prompt then begins with an empty one. After an error it is empty.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from inspect import signature
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache

from engine.backends.base import BackendInfo, Filled, common_prefix
from engine.backends.caches import TREE_ROWS, Name, TreeCache, bytes_of, is_recurrent, kinds_of
from engine.backends.device_scores import DeviceScores
from engine.backends.folded_attention import unfolded
from engine.backends.rotary import Rotary
from engine.backends.scans import follow_rows
from engine.backends.scores import LogitScores
from engine.backends.transformers_tokenizer import TransformersTokenizer
from engine.heads.eagle3_head import Eagle3Head
from engine.models.state_memory import CHAIN
from engine.sampling import Floats
from engine.settings import Sampling
from engine.tree import Tree

PREFILL_CHUNK = 512
PARALLEL = 16
"""Tokens that are read in one forward in the time of about one forward for each alone."""
TAIL = 16
"""Tokens at the end of a prompt in which the next one often differs: those that open an answer."""
MIXED = -1
"""The regime of a cache whose tokens have different rotary factors: no other text can use it."""


class Stopped(Exception):
    """A forward was cancelled between two of its layers."""


def layers_of(model: Any) -> list[torch.nn.Module]:
    """The layers of a model, and what else it keeps in lists."""
    stacks = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    return [layer for stack in stacks for layer in stack]


@contextmanager
def stopping(layers: Sequence[torch.nn.Module], cancelled: Callable[[], bool]) -> Iterator[None]:
    """While it is entered, a forward raises Stopped before its next layer once it is cancelled."""

    def ask(*_: Any) -> None:
        if cancelled():
            raise Stopped

    hooks = [layer.register_forward_pre_hook(ask) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class TransformersBackend(TransformersTokenizer):
    """A loaded model and its tokenizer behind the Backend protocol: one sequence of it.

    `resumes` says whether layers that keep a state go on from it with several tokens at a time.
    `offset` is the position of the first token: 0 but while a model is checked. `on_device` says
    that logits are not on the host, so that whole rows of them are dear.
    """

    info: BackendInfo
    unread = 0

    def __init__(self, model: Any, tokenizer: Any, info: BackendInfo) -> None:
        super().__init__(tokenizer, info)
        self.model = model
        self.head: Eagle3Head | None = None
        config = model.config.get_text_config()
        self.window: int | None = getattr(config, "sliding_window", None)
        self.chunk: int | None = getattr(config, "attention_chunk_size", None)
        kinds = getattr(config, "layer_types", None)
        self.layer_kinds = sorted(set(kinds or [usual_kind(self.window, self.chunk)]))
        self.kinds, self.recurrent = kinds_of(config), is_recurrent(config)
        self.resumes = not self.recurrent
        self.chain: int | None = CHAIN if self.recurrent else None
        if self.recurrent:
            follow_rows(model)
        takes = signature(model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in takes else "past_key_values"
        self.layers = layers_of(model)
        self.rotary = Rotary(model)
        self.restarts = any(starts_again(model, each) for each in self.rotary.switches)
        self.offset = 0
        self.on_device = model.device.type != "cpu"
        self.cached: list[int] = []
        self.regime = 0
        self.tree: Tree | None = None
        self.dirty = False
        self.cache: Any = None
        self.reset()

    def reset(self) -> None:
        """An empty cache: ours where trees can be verified, else the library's own.

        Ours keeps its rows for what follows; empty means a length of 0.
        """
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
        """A cache of ours, with room for the context and a tree."""
        assert self.kinds is not None, "trees need layers that are known"
        return TreeCache(self.kinds, self.info.context_length + TREE_ROWS)

    @property
    def bytes(self) -> int:
        return bytes_of(self.cache) + (self.head.bytes if self.head else 0)

    def open(self) -> Self:
        other = copy(self)
        other.head = self.head and self.head.open(other)
        other.close()
        return other

    def close(self) -> None:
        self.cache = None
        self.reset()

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """While it is entered, an error leaves an empty cache: what it would hold is not known."""
        try:
            yield
        except Stopped:
            raise
        except BaseException:
            self.close()
            raise

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Filled:
        wanted, length = list(tokens[:-1]), self.offset + len(tokens)
        regime = self.rotary.regime(length)
        self.keep(common_prefix(self.cached, wanted) if regime == self.regime else 0)
        if not self.resumes and 1 + len(wanted) / PARALLEL < len(wanted) - len(self.cached):
            # Such layers begin several tokens from an empty state: go on one by one, or, where that
            # takes less, read all again at once.
            self.reset()
        self.regime, reused = regime, len(self.cached)
        with suppress(Stopped), self.reading(length, cancelled):
            for number, chunk in enumerate(self.chunks(wanted)):
                if cancelled():
                    break
                self.mark("tail" if number else "begin")
                self.read(chunk)
        complete = len(self.cached) == len(wanted)
        if complete:
            self.mark("end")
        limit = self.rotary.switch(length) if self.restarts else None
        return Filled(reused, complete, limit and limit - self.offset)

    @contextmanager
    def reading(self, length: int, cancelled: Callable[[], bool]) -> Iterator[None]:
        """While it is entered, every forward is of a part of a text of that length, and raises
        Stopped once it is cancelled."""
        with stopping(self.layers, cancelled), self.rotary.reading(length):
            yield

    def chunks(self, wanted: Sequence[int]) -> list[Sequence[int]]:
        """What is not in the cache yet, in parts for a forward each.

        Where states are kept, a long text ends in a short part: the next prompt is often the same
        but for the last few tokens, which open an answer.
        """
        start, end, size = len(self.cached), len(wanted), PREFILL_CHUNK
        if not self.resumes:
            size = 1 if start else max(1, end)
        tail = TAIL if self.resumes and self.recurrent and end - start > 4 * TAIL else 0
        cuts = [*range(start, end - tail, size), *([end - tail] if tail else []), end]
        return [wanted[left:right] for left, right in pairwise(cuts) if right > left]

    def mark(self, name: Name) -> None:
        """Have the cache keep its states as they are, where it has any."""
        if self.info.can_tree:
            self.cache.mark(name)

    def read(self, chunk: Sequence[int]) -> None:
        """Run decided tokens and keep them."""
        self.dirty = True
        with self.emptied():
            self.forward(chunk, range(len(chunk)), logits=1)
            if self.head:
                self.head.saw(len(self.cached), range(len(chunk)))
        self.cached += chunk
        if self.info.can_tree:
            self.cache.keep(range(len(chunk)), len(chunk))
        self.dirty = False

    @torch.inference_mode()
    def stretch(self, tokens: Sequence[int]) -> None:
        """Let the cache say that it holds these tokens, to time what follows: its rows are zeros.

        It has to have held some. A cache that is not ours reads them.
        """
        if not self.info.can_tree:
            self.prefill([*tokens, 0], lambda: False)
            return
        self.tree, self.dirty = None, False
        if self.head:
            self.head.keep(0)
        self.cached, self.regime = list(tokens), self.rotary.regime(self.offset + len(tokens) + 1)
        self.cache.stretch(len(tokens))

    def keep(self, length: int) -> None:
        """Shorten the cache to so many decided tokens, or as many before them as it can go back to:
        none where it cannot roll back."""
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

    @torch.inference_mode()
    def score(self, tree: Tree, sampling: Sampling) -> LogitScores:
        self.tree, self.dirty = tree, True
        start = len(self.cached) + 1
        regime = self.rotary.regime(self.offset + start + max(tree.depths))
        if regime != self.regime:
            self.regime = MIXED if self.cached else regime
        visible = None if self.recurrent else ancestors(tree.parents)
        with self.emptied():
            logits = self.forward(tree.tokens, tree.depths, visible, verifying=True)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)  # else the wait would count as sampling

        def read(row: int) -> Floats:
            # A view where the model computes on the host in float32.
            values: Floats = logits[row].float().cpu().numpy()
            return values

        positions = [start + depth for depth in tree.depths]
        if self.on_device:
            return DeviceScores(logits, read, positions, sampling)
        return LogitScores(read, positions, sampling)

    @torch.inference_mode()
    def accept(self, rows: Sequence[int]) -> None:
        assert self.tree is not None, "accept follows score"
        with self.emptied():
            if self.info.can_tree:
                self.cache.keep((0, *rows), len(self.tree) + 1)
            if self.head:
                self.head.saw(len(self.cached), (0, *rows))
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
        """Run `tokens` behind the cache; row i sees the cache and the rows in `visible[i]`.

        Without `visible` the rows are a chain, which the library masks by itself. Returns logits
        of shape (rows, vocabulary), of the last `logits` rows when that is not 0. What is computed
        `verifying` may be accepted in part.
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

    def embeddings(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedding and the output matrix, for a head that has none of its own."""
        model = self.model
        return model.get_input_embeddings().weight, model.get_output_embeddings().weight

    def mask(
        self, start: int, depths: NDArray[np.int_], visible: NDArray[np.bool_]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The additive mask, shape (1, 1, rows, start + rows), per kind of attention layer.

        A layer of sliding attention also hides what is out of its window, one of chunked attention
        what is in another chunk.
        """
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
        """What rows at some positions do not see for the kind of their layer, None for nothing;
        shape (rows, start + rows)."""
        reach = {"sliding_attention": self.window, "chunked_attention": self.chunk}.get(kind)
        if not reach or int(positions.max()) < reach:
            return None
        rows, columns = positions[:, None], np.concatenate([np.arange(start), positions])[None, :]
        far: NDArray[np.bool_] = (
            columns <= rows - reach
            if kind == "sliding_attention"
            else columns // reach != rows // reach
        )
        return far


def usual_kind(window: int | None, chunk: int | None) -> str:
    """The kind of all layers of a model that does not list them."""
    if window:
        return "sliding_attention"
    return "chunked_attention" if chunk else "full_attention"


def starts_again(model: Any, switch: int) -> bool:
    """Whether the library's own decoding drops its cache when a text outgrows `switch`.

    Some models do, for the rotary factors of the cached keys. Asked of the library with a cache
    that says to hold so many tokens.
    """
    cache, tokens = (
        TreeCache([("full_attention", 1)], 0),
        torch.zeros((1, switch + 1), dtype=torch.long),
    )
    cache.length = switch
    inputs = model.prepare_inputs_for_generation(
        tokens,
        past_key_values=cache,
        attention_mask=torch.ones_like(tokens),
        next_sequence_length=1,
    )
    return bool(inputs["input_ids"].shape[1] > 1)


def ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Which rows each tree row may see: itself and its ancestors; shape (rows, rows)."""
    visible = np.eye(len(parents), dtype=bool)
    for row in range(1, len(parents)):
        visible[row] |= visible[parents[row]]
    return visible
