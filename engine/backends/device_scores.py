"""The scores of logits on a device: one small copy per step transfers what a choice needs to the
host.

For each row the device finds the largest logit, the normaliser, and a few tokens among which the
choice must be: those with the largest sums of logit and noise or, if top-k or top-p cut, the
largest logits. The host then chooses among these as it would in the whole row, from the same
float32 numbers. The device's own sums are inexact and decide nothing: if the other tokens might
matter, as they can in ties, the whole row is read.
"""

from collections.abc import Callable, Sequence
from math import inf, log
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from engine.backends.base import LogitScores
from engine.sampling import (
    BITS,
    COLDEST,
    FIRST,
    GAMMA,
    SECOND,
    WORD,
    Choice,
    Floats,
    Part,
    noise_key,
)
from engine.settings import Sampling

NEAR, KEPT = 16, 1024
"""How many tokens of a row are transferred: those of the largest sums, or of the largest logits."""
SLACK = 1e-4, 1e-6
"""The error of a sum on the device: an absolute part, and a share of the sum."""


def signed(word: int) -> int:
    """A word of 64 bits as a signed integer of torch, which wraps as words do."""
    return word - 2**64 if word >= 2**63 else word


def shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    moved: torch.Tensor = (words >> bits) & (2 ** (64 - bits) - 1)
    return moved


def states_of(seed: int, positions: Sequence[int]) -> list[int]:
    """The states of the noise generator for the first token at some positions."""
    found = {at: signed((noise_key(seed, at) + GAMMA) & WORD) for at in set(positions)}
    return [found[position] for position in positions]


def draws_on(states: torch.Tensor, size: int) -> torch.Tensor:
    """The draws of engine/sampling.py of `size` tokens from some states; shape (states, size)."""
    words = torch.arange(size, device=states.device) * signed(GAMMA)
    words = words + states[:, None]
    words = (words ^ shifted(words, 30)) * signed(FIRST)
    words = (words ^ shifted(words, 27)) * signed(SECOND)
    return shifted(words ^ shifted(words, 31), 64 - BITS)


def noise_on(draws: torch.Tensor) -> torch.Tensor:
    low = draws < 2 ** (BITS - 1)
    # Either number has 24 bits: nothing is rounded away where the logarithm would show it.
    near = torch.where(low, draws, 2**BITS - 1 - draws).float().add_(0.5).mul_(2.0**-BITS)
    return -torch.log(-torch.where(low, torch.log(near), torch.log1p(-near)))


Kind = Literal["greedy", "sampled", "cut"]
"""How the sampler chooses, which decides what a survey transfers."""
KINDS: tuple[Kind, ...] = ("greedy", "sampled", "cut")


def kind_of(sampling: Sampling) -> Kind:
    if sampling.temperature < COLDEST:
        return "greedy"
    # With such a cut the sampler has to know the largest logits.
    return "cut" if sampling.top_k > 0 or sampling.top_p < 1.0 else "sampled"


def numbers_of(sampling: Sampling) -> tuple[float, float]:
    """The sampler's numbers that a survey needs: the temperature, or 1 if it is not used, and the
    logarithm of min-p."""
    temperature = 1.0 if kind_of(sampling) == "greedy" else sampling.temperature
    return temperature, log(sampling.min_p) if sampling.min_p > 0.0 else -inf


def survey(
    logits: torch.Tensor, kind: Kind, numbers: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """What is transferred of rows of logits, shape (rows, vocabulary): per row the largest logit,
    both masses, the lowest transferred sum or logit, the transferred logits, and their tokens, as
    the bits of integers.

    `numbers` are those of `numbers_of` for each row, float32 of shape (2, rows), and `states` those
    of `states_of`, shape (rows,). A row of fewer than KEPT tokens has no survey for the kind "cut".
    """
    wide = logits.float()
    top = wide.amax(dim=1, keepdim=True)
    mass = (wide - top).exp_().sum(dim=1, keepdim=True)
    if kind == "greedy":
        places = torch.arange(wide.shape[1], device=wide.device)
        tokens = torch.where(wide == top, places, wide.shape[1]).amin(dim=1, keepdim=True)
        return torch.cat([top, mass, mass, top, *transferred(wide, tokens)], dim=1)
    temperatures, log_min_p = numbers[:, :, None]
    # Dividing by a number on the host, a device multiplies by its inverse, which differs.
    warped = wide / temperatures
    peak = warped.amax(dim=1, keepdim=True)
    warped_mass = (warped - peak).exp_().sum(dim=1, keepdim=True)
    if kind == "cut":
        return torch.cat([top, mass, warped_mass, *largest(logits)], dim=1)
    rest, tokens = sums(warped, peak, log_min_p, states).topk(NEAR, dim=1)
    parts = transferred(wide, tokens.sort(dim=1).values)
    return torch.cat([top, mass, warped_mass, rest[:, -1:], *parts], dim=1)


def transferred(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of some tokens, and the tokens as the bits of integers."""
    return logits.gather(1, tokens).float(), tokens.int().view(torch.float32)


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The lowest of the KEPT largest logits, these logits, and their tokens in rising order."""
    # In 16 bits, they are found in half the time.
    found, tokens = logits.topk(KEPT, dim=1, sorted=False)
    lowest = found.amin(dim=1, keepdim=True).float()
    return lowest, *transferred(logits, tokens.sort(dim=1).values)


def sums(
    warped: torch.Tensor, peak: torch.Tensor, log_min_p: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """The approximate sums of warped logit and noise. The largest logit, which min-p refers to,
    gets the largest sum."""
    found = warped + noise_on(draws_on(states, warped.shape[1]))
    least = peak + log_min_p
    least = least - (SLACK[0] + SLACK[1] * least.abs())
    found = torch.where(warped < least, -inf, found)
    return found.scatter_(1, warped.argmax(dim=1, keepdim=True), inf)


class DeviceScores(LogitScores):
    """Scores over `logits`, shape (rows, vocabulary), on a device. `read` copies a whole row.
    `found` is their survey, if it was transferred already."""

    def __init__(
        self,
        logits: torch.Tensor,
        read: Callable[[int], Floats],
        positions: Sequence[int],
        sampling: Sampling,
        found: NDArray[np.float32] | None = None,
    ) -> None:
        super().__init__(read, positions, sampling)
        self.logits, self.found = logits, found
        self.kind = kind_of(sampling)
        self.chosen: dict[int, float] = {}

    def selected(self, row: int) -> Choice:
        if row not in self.choices:
            choice = self.from_survey(row)
            self.choices[row] = super().selected(row) if choice is None else choice
        return self.choices[row]

    def probability(self, row: int, token: int) -> float:
        choice = self.selected(row)
        if row in self.chosen and token == choice.token:
            return choice.probability(self.chosen[row])
        return super().probability(row, token)

    @torch.inference_mode()
    def survey(self) -> NDArray[np.float32]:
        """Transfer the survey of all rows."""
        device = self.logits.device
        numbers = torch.tensor(numbers_of(self.sampling), device=device)
        numbers = numbers[:, None].expand(2, len(self.positions))
        states = torch.tensor(states_of(self.sampling.seed, self.positions), device=device)
        values: NDArray[np.float32]
        values = survey(self.logits, self.kind, numbers, states).cpu().numpy()
        return values

    def from_survey(self, row: int) -> Choice | None:
        """The choice for a row from the transferred values, None if they do not suffice."""
        if self.logits.shape[1] <= KEPT or row in self.rows:
            return None
        if self.found is None:
            self.found = self.survey()
        (top, mass, warped_mass, rest), found = self.found[row, :4], self.found[row, 4:]
        if not np.isfinite(mass):
            return None
        logits, tokens = np.split(found, 2)
        part = Part(logits, tokens.view(np.int32).astype(np.int64))
        token: int | None = int(part.tokens[0])
        if self.kind != "greedy":
            if self.kind == "cut":
                part = part._replace(mass=float(warped_mass), rest=float(rest))
            token = self.token(part, row, float(rest))
        if token is None:
            return None
        self.chosen[row] = float(logits[np.searchsorted(part.tokens, token)])
        return Choice(token, float(top), float(mass))

    def token(self, part: Part, row: int, rest: float) -> int | None:
        """The token chosen among the transferred values, None if it may be another one."""
        found = part.select(self.sampling, self.positions[row])
        if found is None:
            return None
        token, score = found
        wrong = SLACK[0] + SLACK[1] * abs(score)
        return token if self.kind == "cut" or score > rest + 2 * wrong else None
