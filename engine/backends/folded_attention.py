"""Attention over grouped heads without a copy of the cache.

With grouped query heads several query heads read the same keys and values. Behind an explicit mask
the library repeats these to the number of query heads, in every layer of every forward: with a long
text in the cache that takes longer than the rest. Here the heads of a group become further rows of
one head instead, shape (key heads, group x rows, head size), which is the same sum.

Registered through the library's own interface, beside its "sdpa", whose results these are: where a
call has anything that the fold does not know, that function answers. Plain steps and trees go
through here alike, so both see the same logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from engine.drafting.costs import LARGEST

LIBRARY, FOLDED = "sdpa", "folded_sdpa"
"""The names of the library's attention and of this one."""
DEVICES = {"cpu", "cuda"}
"""Elsewhere the library has no copy to save, or nobody has looked."""
MOST_ROWS = LARGEST + 1
"""The largest tree and its root; more rows are a prompt."""
UNKNOWN = ("position_bias", "softcap", "cache")
"""What the library's function knows beside masks."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As the library's `sdpa_attention_forward`: queries (batch, heads, rows, size), keys and
    values (batch, key heads, tokens, size), to (batch, rows, heads, size)."""
    if dropout or others_known(others) or not same_for_groups(query, key, attention_mask):
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **others,
        )
        return result
    batch, heads, rows, _ = query.shape
    shared = key.shape[1]
    group = heads // shared
    if rows > MOST_ROWS:
        # As many rows fill the kernel's blocks without a fold, whose mask would be large.
        found = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
        )
    else:
        if attention_mask is not None:
            attention_mask = attention_mask.repeat(1, 1, group, 1)
        folded = query.reshape(batch, shared, group * rows, -1)
        found = scaled_dot_product_attention(
            folded, key, value, attn_mask=attention_mask, scale=scaling
        ).reshape(batch, heads, rows, -1)
    return found.transpose(1, 2).contiguous(), None


def others_known(others: dict[str, Any]) -> bool:
    """Whether a call has arguments that change the result."""
    return any(others.get(name) is not None for name in UNKNOWN)


def same_for_groups(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether heads come in groups that may be folded: all heads see the same, whole mask.

    A single row without a mask sees all. Several without one are a prompt from its beginning. On
    the processor alone the kernel takes groups and masks of prompts without copies.
    """
    rows, device = query.shape[2], query.device.type
    if device not in DEVICES or query.shape[1] == key.shape[1] or query.shape[1] % key.shape[1]:
        return False
    if mask is None:
        return rows == 1 and device == "cpu"
    if rows > MOST_ROWS and device != "cpu":
        return False
    return mask.ndim == 4 and mask.shape[1:] == (1, rows, key.shape[2])


AttentionInterface.register(FOLDED, attend)
AttentionMaskInterface.register(FOLDED, sdpa_mask)


def fold(model: Any) -> bool:
    """Give a model this attention in place of the library's; False where it has none of that."""
    takes = getattr(model, "_can_set_attn_implementation", None)
    if model.config._attn_implementation != LIBRARY or takes is None or not takes():
        return False
    model.set_attn_implementation(FOLDED)
    return True


def unfold(model: Any) -> None:
    """Give a model the library's attention back."""
    if model.config._attn_implementation == FOLDED:
        model.set_attn_implementation(LIBRARY)


@contextmanager
def unfolded(model: Any) -> Iterator[None]:
    """While it is entered, a model has the library's attention."""
    was = model.config._attn_implementation == FOLDED
    unfold(model)
    try:
        yield
    finally:
        if was:
            model.set_attn_implementation(FOLDED)
