"""Attention over grouped heads without a copy of the cache.

With grouped query heads several query heads read the same keys and values. If there is an explicit
mask, the library repeats these to the number of query heads, in every layer of every forward; with
a long text in the cache that takes longer than everything else. Here the heads of a group become
additional rows of one head instead, shape (key heads, group x rows, head size), which gives the
same sums.

This is registered through the library's own interface, in addition to its "sdpa", and has the same
results. Calls with anything that the fold does not support are passed on to that function. Plain
steps and trees both use the fold, so both see the same logits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from engine.backends.joint import Apart
from engine.drafting.costs import LARGEST

LIBRARY, FOLDED = "sdpa", "folded_sdpa"
"""The names of the library's attention and of this one."""
DEVICES = {"cpu", "cuda"}
"""Other devices were not examined, or the library makes no copy on them."""
MOST_ROWS = LARGEST + 1
"""The largest tree and its root; more rows are a prompt."""
UNKNOWN = ("position_bias", "softcap", "cache")
"""Arguments of the library's function that the fold does not support."""


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
    """As the library's `sdpa_attention_forward`: maps queries (batch, heads, rows, size), keys and
    values (batch, key heads, tokens, size) to outputs (batch, rows, heads, size). Keys and values
    of several sequences belong to the queries of each in turn."""
    if isinstance(key, Apart):
        how = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **others}
        return attend_apart(module, query, key, value, attention_mask, **how), None
    unknown = dropout or any(others.get(name) is not None for name in UNKNOWN)
    if unknown or not same_for_groups(query, key, attention_mask):
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
        # So many rows fill the kernel's blocks without a fold, whose mask would be large.
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


def attend_apart(
    module: torch.nn.Module,
    query: torch.Tensor,
    keys: Apart,
    values: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    **how: Any,
) -> torch.Tensor:
    assert mask is not None, "rows of several sequences have a mask"
    found, first = [], 0
    for key, value, rows in zip(keys, values, keys.rows, strict=True):
        part = slice(first, first + rows)
        own = mask[:, :, part, : key.shape[2]]
        found.append(attend(module, query[:, :, part], key, value, own, **how)[0])
        first += rows
    return torch.cat(found, dim=1)


def same_for_groups(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether the heads form groups that may be folded, with the same complete mask for all heads.

    A single row without a mask sees everything. Several rows without a mask are the beginning of a
    prompt. Only on a processor does the kernel accept groups and masks of prompts without copies.
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
    """Replace a model's attention by this one; returns False if it does not use the library's."""
    takes = getattr(model, "_can_set_attn_implementation", None)
    if model.config._attn_implementation != LIBRARY or takes is None or not takes():
        return False
    model.set_attn_implementation(FOLDED)
    return True


def unfold(model: Any) -> None:
    if model.config._attn_implementation == FOLDED:
        model.set_attn_implementation(LIBRARY)


@contextmanager
def unfolded(model: Any) -> Iterator[None]:
    was = model.config._attn_implementation == FOLDED
    unfold(model)
    try:
        yield
    finally:
        if was:
            model.set_attn_implementation(FOLDED)
