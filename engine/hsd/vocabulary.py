"""Whether one model can draft for another: a draft is made of token ids, so they must agree."""

from collections.abc import Sequence

from engine.backends.base import Backend
from engine.errors import ModelError


def check_vocabulary(target: Backend, draft: Backend) -> None:
    """Raise ModelError, saying in what they differ, unless the two vocabularies match.

    Weights may be padded beyond the vocabulary: such ids are never drafted.
    """
    one, other = target.info, draft.info
    if one.tokenizer_fingerprint == other.tokenizer_fingerprint:
        return
    mine, theirs = target.vocabulary(), draft.vocabulary()
    if one.tokenizer_type == other.tokenizer_type and list(mine) == list(theirs):
        return
    reasons = []
    if one.tokenizer_type != other.tokenizer_type:
        reasons.append(f"its tokenizer is {other.tokenizer_type}, not {one.tokenizer_type}")
    if len(mine) != len(theirs):
        reasons.append(f"it has {len(theirs):,} tokens, not {len(mine):,}")
    at = first_difference(mine, theirs)
    if at is not None:
        reasons.append(f"the first token that differs is {at:,}: {theirs[at]!r}, not {mine[at]!r}")
    raise ModelError(
        f"{other.name} cannot draft for {one.name}: {'; '.join(reasons)}. Choose a smaller model "
        "of the same family. The databases draft without one."
    )


def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> int | None:
    """The first id that stands for two tokens."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((at for at, (one, other) in pairs if one != other), None)
