"""Comparing two runs: where each starts, and what their times may say."""

from dataclasses import replace

import pytest

from engine.compare import (
    FEWEST,
    UNKNOWN,
    Speedup,
    gain,
    interval,
    live,
    overall,
    reruns,
    reset_caches,
    speedup,
)
from engine.decode import decode
from engine.metrics import Metrics
from engine.settings import Drafting, Generation, Sampling
from engine.types import Learned, Prefill, Step, Token
from tests.support.runs import summed
from tests.support.toy import ToyBackend


def run(
    prefill: float, decoding: float, learning: float, tokens: int = 10, kept: int = 5
) -> Metrics:
    """A run of these seconds. One step is enough, as the sums are what is compared."""
    said = tuple(Token(1, at, "context") for at in range(tokens))
    step = Step(0, said, accepted={"context": kept} if kept else {}, verify_seconds=decoding)
    return summed(Prefill(1, 0, prefill), [step], Learned(learning))


def test_a_cold_start_leaves_no_cache() -> None:
    models = [ToyBackend(), ToyBackend()]
    wanted, prompt = Generation(Sampling(0.7, seed=1), 20), list(b"hello")
    for model in models:
        assert len(list(decode(model, prompt, (), wanted, Drafting()))) > 2
    reset_caches(models)
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


def test_nothing_is_made_of_runs_without_tokens_or_time() -> None:
    empty = summed(None, [])
    assert speedup([]) == speedup([(empty, run(1.0, 1.0, 1.0))]) == UNKNOWN
    assert overall([], []) == overall([empty], [empty]) == UNKNOWN
    assert reruns([(empty, empty)], run(0.0, 8.0, 0.0)).speedup == UNKNOWN
    steps = [Step(at, (Token(1, at, "target"),), plain_seconds=0.0) for at in range(20)]
    assert live(summed(None, steps)) == Speedup(plain_steps=20)


def paced(
    plain: float | None, kept: int = 5, tokens: int = 20, idle: int = 0, learning: float = 0.5
) -> Metrics:
    """An answer of 1 s of prompt and 4 s of decoding that knows its plain seconds."""
    said = tuple(Token(1, at, "context") for at in range(tokens))
    accepted = {"context": kept} if kept else {}
    drafting = Step(0, said, {"context": 9}, accepted, verify_seconds=4.0, plain_seconds=plain)
    steps = [Step(1 + at, said[:1], plain_seconds=0.0) for at in range(idle)]
    return summed(Prefill(1, 0, 1.0), [drafting, *steps], Learned(learning))


def test_a_live_speedup_is_of_the_whole_answer_at_the_load_of_its_steps() -> None:
    assert live(paced(8.0, idle=3)) == Speedup(9.0 / 5.5, 2.0, plain_steps=3)
    assert live(paced(8.0, learning=0.0)).whole == 9.0 / 5.0, "what is not over costs nothing yet"


def test_a_live_speedup_charges_what_the_drafters_read_and_learn_of_the_prompt() -> None:
    answer = paced(8.0)
    known = replace(answer, plain_prefill_seconds=0.7)
    assert live(known) == Speedup(8.7 / 5.5, 2.0, plain_steps=0) != live(answer)


def test_a_live_speedup_is_told_once_it_means_something() -> None:
    early = live(paced(8.0, tokens=FEWEST - 1, idle=0))
    assert early == Speedup(plain_steps=0)
    assert live(paced(8.0, tokens=FEWEST)).whole is not None
    assert live(paced(None)) == Speedup(plain_steps=0)
    assert live(summed(None, [])) == Speedup(plain_steps=0)


@pytest.mark.parametrize("plain", [0.4, 3.9, 4.0, 4.1, 400.0])
def test_no_answer_without_an_accepted_draft_is_shown_faster(plain: float) -> None:
    found = live(paced(plain, kept=0))
    assert found.decoding == pytest.approx(min(plain / 4.0, 1.0))
    assert found.whole == pytest.approx(min((1.0 + plain) / 5.5, 1.0))
    assert live(paced(plain)).decoding == pytest.approx(plain / 4.0), "with drafts as it is"


# reruns of an answer


def again(*ratios: float, kept: int = 5) -> list[tuple[Metrics, Metrics]]:
    """Pairs of reruns whose decoding differs by such factors; they read a long prompt anew."""
    return [(run(50.0, 8.0 * r, 0.0), run(50.0, 7.5, 0.5, kept=kept)) for r in ratios]


@pytest.mark.parametrize(
    ("count", "left_out"), [(1, 0), (3, 0), (7, 0), (8, 1), (10, 1), (15, 3), (25, 7), (31, 10)]
)
def test_the_range_of_a_median_leaves_out_what_it_may(count: int, left_out: int) -> None:
    """The ranks are those of the usual table for nine cases of ten."""
    assert interval(range(count)) == (left_out, count - 1 - left_out)


def test_the_speedup_of_reruns_is_of_the_answer_as_it_was_shown() -> None:
    """What an answer found in the cache is read anew by its reruns, and counts for neither."""
    shown = run(1.0, 9.0, 0.5)
    found = reruns(again(2.0, 1.9, 2.1, 9.0, 2.0), shown)
    assert (found.pairs, found.middle) in ((5, 0), (5, 4))
    assert (found.plain_seconds, found.seconds) == (17.0, 9.0)
    whole, decoding = 17.0 / 9.0, 16.0 / 7.5
    assert found.speedup == Speedup(whole, decoding, None, 16.2 / 9.0, 73.0 / 9.0)
    assert reruns(again(2.0), shown).speedup == Speedup(whole, decoding, None, whole, whole)


def test_reruns_that_cannot_tell_a_difference_show_none() -> None:
    found = reruns(again(0.9, 1.0, 1.1, 1.05, 1.2), run(0.0, 8.0, 0.0))
    assert found.speedup.whole is None and found.speedup.decoding is None
    assert found.speedup.low == pytest.approx(0.9) and found.speedup.high == pytest.approx(1.2)


@pytest.mark.parametrize(("shown", "kept"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_reruns_without_an_accepted_draft_have_no_speedup(
    shown: int, kept: int, ratio: float
) -> None:
    found = reruns(again(*[ratio] * 5, kept=kept), run(0.0, 8.0, 0.0, kept=shown))
    assert found.speedup == UNKNOWN and found.pairs == 5


def test_one_rerun_of_many_that_accepts_nothing_takes_no_speedup_away() -> None:
    pairs = [*again(2.0, 2.0, 2.0, 2.0), *again(1.9, kept=0)]
    assert reruns(pairs, run(0.0, 8.0, 0.0)).speedup.whole == 2.0
