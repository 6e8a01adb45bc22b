"""Whether an inflated model is the model it was made of: both along the same texts, token by token.

No arrangement of sums is the same in both, so they may differ as far as rounding explains it: in
logits by little, and in tokens only where the original nearly ties.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from tqdm import tqdm

from bench.options import PROMPTS, Record
from bench.prompts import cut_prompt, read_prompts
from engine.backends.transformers import TransformersBackend
from engine.decode import never
from engine.models.load_transformers import TOLERANCE
from engine.prompt import Chat
from engine.settings import Sampling
from engine.tree import Tree

NEAR_TIE = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.03}
"""How far below its best logit the original may see the token that the inflated model prefers.

In bfloat16 the embedded model's logits differ by 0.1 when rows are computed together or alone.
"""
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Divergence:
    """A position where the two models prefer different tokens.

    `gap` is how far below its best logit the original sees the other's choice.
    """

    prompt: int
    position: int
    original: int
    inflated: int
    gap: float


@dataclass(slots=True)
class Comparison:
    """Two models of one dtype on the same texts, greedily, token by token."""

    dtype: torch.dtype
    tokens: int = 0
    logit_difference: float = 0.0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def largest_gap(self) -> float:
        """The clearest preference of the original that the other did not share."""
        return max((divergence.gap for divergence in self.divergences), default=0.0)

    @property
    def holds(self) -> bool:
        """Whether rounding explains every difference."""
        return (
            self.tokens > 0
            and self.logit_difference <= TOLERANCE[self.dtype]
            and self.largest_gap <= NEAR_TIE[self.dtype]
        )

    def figures(self) -> Record:
        """What the JSON line says of it."""
        first = asdict(self.divergences[0]) if self.divergences else None
        return {
            "verified": self.holds,
            "tokens": self.tokens,
            "identical": not self.divergences,
            "divergences": len(self.divergences),
            "first_divergence": first,
            "largest_gap": self.largest_gap,
            "max_logit_difference": self.logit_difference,
        }


def compare(
    original: TransformersBackend,
    inflated: TransformersBackend,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> Comparison:
    """Both models along the original's greedy answers, in lock step.

    As long as no position differs, the inflated model's own answer is the same text; after one
    that does, both go on with the original's token, so that every token counts.
    """
    result = Comparison(original.model.dtype)
    for number, prompt in enumerate(tqdm(prompts, desc="Verifying", leave=False)):
        tokens = list(prompt)
        for backend in (original, inflated):
            backend.reset()
            backend.prefill(tokens, never)
        for position in range(max_tokens):
            rows = []
            for backend in (original, inflated):
                rows.append(backend.score(Tree(tokens[-1]), GREEDY).row(0).copy())
                backend.accept([])
            best, other = (int(row.argmax()) for row in rows)
            # Not Python's max, which forgets a NaN.
            difference = np.maximum(result.logit_difference, np.abs(rows[0] - rows[1]).max())
            result.logit_difference = float(difference)
            result.tokens += 1
            if other != best:
                gap = float(rows[0][best] - rows[0][other])
                result.divergences.append(Divergence(number, position, best, other, gap))
            if best in original.info.eos_ids:
                break
            tokens.append(best)
    return result


def verify(
    original: TransformersBackend, inflated: TransformersBackend, options: argparse.Namespace
) -> Record:
    """Compare, and say whether the model may be used in the original's place.

    That also takes another fingerprint, so that what was learned is kept apart, and the same
    tokenizer, so that its statistics are found. With `exact`, leaves both models in float32.
    """
    room = original.info.context_length - options.max_new_tokens - 1
    questions = read_prompts(PROMPTS, options.limit)
    prompts = [cut_prompt(Chat(original), text, room) for _, text in questions]
    figures = compare(original, inflated, prompts, options.max_new_tokens).figures()
    old, new = original.info, inflated.info
    figures |= {
        "prompts": len(prompts),
        "fingerprints_differ": old.fingerprint != new.fingerprint,
        "same_tokenizer": old.tokenizer_fingerprint == new.tokenizer_fingerprint,
        "can_tree": new.can_tree,
    }
    figures["verified"] &= figures["fingerprints_differ"] and figures["same_tokenizer"]
    if options.exact:
        first, second = (
            TransformersBackend(backend.model.float(), backend.tokenizer, backend.info)
            for backend in (original, inflated)
        )
        figures["exact"] = compare(first, second, prompts, options.max_new_tokens).figures()
        figures["verified"] &= figures["exact"]["verified"]
    return figures
