"""Comparing two runs: where each starts, and what their times may say."""

import pytest

from engine.backends.toy import ToyBackend
from engine.compare import UNKNOWN, Speedup, cold, gain, overall, speedup
from engine.decode import decode
from engine.metrics import Metrics, summarise
from engine.sampling import gumbel
from engine.settings import Drafting, Generation, Sampling
from engine.types import Learned, Prefill, Step, Token


def run(
    prefill: float, decoding: float, learning: float, tokens: int = 10, kept: int = 5
) -> Metrics:
    """A run of these seconds. One step is enough, as the sums are what is compared."""
    said = tuple(Token(1, at, "context") for at in range(tokens))
    step = Step(0, said, accepted={"context": kept} if kept else {}, verify_seconds=decoding)
    return summarise(Prefill(1, 0, prefill), [step], Learned(learning))


def test_a_cold_start_leaves_no_cache_and_no_noise() -> None:
    models = [ToyBackend(), ToyBackend()]
    wanted, prompt = Generation(Sampling(0.7, seed=1), 20), list(b"hello")
    for model in models:
        assert len(list(decode(model, prompt, (), wanted, Drafting()))) > 2
    assert gumbel.kept
    cold(models)
    assert not gumbel.kept
    for model in models:
        first = next(decode(model, prompt, (), wanted, Drafting()))
        assert isinstance(first, Prefill) and first.reused == 0


def test_a_speedup_is_of_whole_answers_and_beside_it_of_decoding() -> None:
    plain, fast = run(1.0, 8.0, 0.0), run(1.5, 4.0, 0.5)
    assert speedup([(plain, fast)]) == Speedup(9.0 / 6.0, 2.0) == overall([plain], [fast])


def test_answers_of_other_lengths_are_compared_by_the_time_of_a_token() -> None:
    plain, fast = run(0.0, 10.0, 0.0, tokens=10), run(0.0, 10.0, 0.0, tokens=20)
    assert speedup([(plain, fast)]) == Speedup(2.0, 2.0) == overall([plain], [fast])


def test_repeats_have_a_median_and_prompts_a_sum() -> None:
    plain = [run(0.0, seconds, 0.0) for seconds in (4.0, 4.0, 40.0)]
    fast = [run(0.0, seconds, 0.0) for seconds in (2.0, 4.0, 10.0)]
    assert speedup(list(zip(plain, fast, strict=True))).whole == 2.0
    assert overall(plain, fast).whole == 3.0


@pytest.mark.parametrize(
    ("plain", "fast", "accepted", "told"),
    [
        (2.0, 1.0, 1, 2.0),
        (2.0, 1.0, 0, None),
        (1.0, 1.0, 0, 1.0),
        (1.0, 2.0, 0, 0.5),
        (1.0, 2.0, 3, 0.5),
        (0.0, 1.0, 3, None),
        (1.0, 0.0, 3, None),
    ],
)
def test_a_gain_needs_an_accepted_draft_and_a_loss_is_always_told(
    plain: float, fast: float, accepted: int, told: float | None
) -> None:
    assert gain(plain, fast, accepted) == told


def test_no_run_is_faster_for_drafts_that_it_did_not_accept() -> None:
    plain, idle = run(1.0, 8.0, 0.0, kept=0), run(1.0, 4.0, 0.0, kept=0)
    assert speedup([(plain, idle)] * 3) == UNKNOWN == overall([plain] * 3, [idle] * 3)
    worse = run(1.0, 16.0, 0.0, kept=0)
    assert speedup([(plain, worse)]) == Speedup(9.0 / 17.0, 0.5)
    assert speedup([(plain, run(1.0, 4.0, 0.0))], accepted=0) == UNKNOWN


def test_nothing_is_made_of_runs_without_tokens() -> None:
    empty = summarise(None, [])
    assert speedup([]) == speedup([(empty, run(1.0, 1.0, 1.0))]) == UNKNOWN
    assert overall([], []) == overall([empty], [empty]) == UNKNOWN
