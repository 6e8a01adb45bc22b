"""Runs made of steps alone, and what they come to."""

from collections.abc import Iterable
from typing import Any

from engine.metrics import Metrics, summarise
from engine.types import Learned, Prefill, Run, Step


def run_of(steps: Iterable[Step], **fields: Any) -> Run:
    return Run(steps=tuple(steps), **fields)


def summed(
    prefill: Prefill | None, steps: Iterable[Step], learned: Learned | None = None
) -> Metrics:
    return summarise(run_of(steps, prefill=prefill, learned=learned))
