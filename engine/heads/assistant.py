"""Gemma 4's assistant: a few layers that read the keys and values of their model's cache.

Each of its rows combines a token with the state that the model had at the token before it. All rows
have the position of the last decided token and see the model's cache, never each other. Therefore
only the model's states are kept for a sequence, the nodes of one level of a tree are computed
together, and there is no cache to update.

Invariant: while guesses are made, the model's cache holds all decided tokens but the last one.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma4TextConfig, Gemma4UnifiedTextConfig

from engine.heads.base import LogitGuess
from engine.heads.eagle3_head import DirectNetwork, Eagle3Head, Eagle3Weights
from engine.settings import Sampling

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
"""The `model_type` in config.json of an assistant."""
SLIDING = "sliding_attention"
READING = "reuse"
"""The library's name for layers that write no keys."""


class Assistant(DirectNetwork):
    """The library's assistant, and its target's embedding. `places` are the target's layers whose
    keys and values it reads, by the kind of attention."""

    def __init__(self, model: Any, embedding: nn.Module, places: Mapping[str, int]) -> None:
        super().__init__()
        self.model: Any = model
        self.places = dict(places)
        self.embed = [embedding]  # in a list, so that it is not registered as a part of this module
        self.window = int(model.config.get_text_config().sliding_window or 0)

    def forward(
        self, tokens: Sequence[int], before: torch.Tensor, place: int, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits after some tokens, shape (rows, vocabulary), and the states that replace the
        model's at these tokens, shape (rows, width). `before` are the states before the tokens."""
        own = self.model
        ids = torch.tensor([list(tokens)], device=before.device)
        joined = own.pre_projection(torch.cat([self.embed[0](ids), before[None]], dim=-1))
        kept = {kind: cache.layers[at] for kind, at in self.places.items()}
        shared = {
            kind: (each.keys[:, :, :place], each.values[:, :, :place])
            for kind, each in kept.items()
        }
        masks = {kind: self.mask(kind, len(tokens), place, joined) for kind in shared}
        found = own.model(
            inputs_embeds=joined,
            attention_mask=masks,
            position_ids=torch.full_like(ids, place),
            shared_kv_states=shared,
            use_cache=False,
            logits_to_keep=None,
        ).last_hidden_state
        ordered = own.config.use_ordered_embeddings
        logits = own.masked_embedding(found, own.lm_head.weight) if ordered else own.lm_head(found)
        return logits[0], own.post_projection(found)[0]

    def mask(self, kind: str, rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
        """The mask that excludes tokens outside of the window, in layers that have one."""
        mask = like.new_zeros((1, 1, rows, columns))
        if kind == SLIDING:
            mask[..., : max(0, columns - self.window - 1)] = torch.finfo(like.dtype).min
        return mask


class AssistantHead(Eagle3Head):
    """The head of one sequence, whose backend is `owner`; see the module's docstring."""

    def __init__(self, weights: Eagle3Weights, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        super().__init__(weights)

    def open(self, owner: Any) -> Self:
        return type(self)(self.weights, owner)

    def record(self, start: int, rows: Sequence[int]) -> None:
        # The target's last layers may compute only the last row of a prompt.
        if self.found and self.found[0].shape[1] <= rows[-1]:
            start, rows = start + len(rows) - 1, [self.found[0].shape[1] - 1]
        super().record(start, rows)

    @torch.inference_mode()
    def start(
        self, tokens: Sequence[int], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> LogitGuess | None:
        self.place = len(tokens) - 1
        if not self.rows or self.rows[-1] != self.place - 1 or cancelled():
            return None
        self.join()
        states, at = self.levels[0].states.values, len(self.rows)
        assert states is not None
        return self.guesses_after(tokens[-1:], states[at - 1 : at])[0]

    @torch.inference_mode()
    def extend(self, parents: Sequence[int], tokens: Sequence[int]) -> list[LogitGuess]:
        return self.guesses_after(
            tokens, self.level[torch.tensor(parents, device=self.level.device)]
        )

    def guesses_after(self, tokens: Sequence[int], before: torch.Tensor) -> list[LogitGuess]:
        """The distributions after some tokens; the next level continues from these tokens."""
        owner = self.owner()
        assert owner is not None, "a head is used by its backend"
        network: Any = self.weights.head
        logits, self.level = network(tokens, before, self.place, owner.cache)
        return [LogitGuess(row) for row in logits.float().cpu().numpy()]


@contextmanager
def sharing() -> Iterator[None]:
    """Let the library build models in this block whose layers all read the cache of another model.
    transformers 5.23 refuses this, because it looks for layers that write, and an assistant has
    none."""
    kinds: tuple[Any, ...] = (Gemma4TextConfig, Gemma4UnifiedTextConfig)
    known = [kind.kv_sharing_modes for kind in kinds]

    def modes_of(own: property) -> property:
        def modes(config: Any) -> Any:
            count = config.num_hidden_layers
            every = config.num_kv_shared_layers == count
            return [READING] * count if every else own.__get__(config)

        return property(modes)

    for kind, own in zip(kinds, known, strict=True):
        kind.kv_sharing_modes = modes_of(own)
    try:
        yield
    finally:
        for kind, own in zip(kinds, known, strict=True):
            kind.kv_sharing_modes = own


def read_assistant(folder: Path, target: Any) -> Assistant:
    """The assistant in a folder, on the device and in the dtype of its target. Raises ValueError if
    it does not fit, and any exception of the library."""
    places = {
        layer.self_attn.layer_type: number
        for number, layer in enumerate(target.get_decoder().layers)
        if not getattr(getattr(layer, "self_attn", None), "is_kv_shared_layer", True)
    }
    config = target.config.get_text_config()
    if not places:
        raise ValueError(f"it reads the cache of a Gemma 4, and the model is a {config.model_type}")
    with sharing():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=target.dtype,
            attn_implementation=target.config._attn_implementation,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"its tensor {missing[0]} is missing")
    own = model.config.get_text_config()
    for what, found, expected in (
        ("reads states of {} numbers", model.config.backbone_hidden_size, config.hidden_size),
        ("was made for a vocabulary of {} tokens", own.vocab_size, config.vocab_size),
    ):
        if found != expected:
            raise ValueError(f"it {what.format(f'{found:,}')}, and the model has {expected:,}")
    if unknown := sorted(set(own.layer_types) - places.keys()):
        raise ValueError(f"it reads layers of {unknown[0]}, and the model has none")
    places = {kind: places[kind] for kind in sorted(set(own.layer_types))}
    assistant = Assistant(model, target.get_input_embeddings(), places)
    return assistant.to(target.device).eval().requires_grad_(False)
