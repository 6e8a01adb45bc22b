"""Comparing two runs: where each starts, and what their times may say."""

from dataclasses import replace

import pytest

from engine.backends.toy import ToyBackend
from engine.compare import FEWEST, UNKNOWN, Speedup, cold, gain, live, overall, speedup
from engine.decode import decode
from engine.metrics import Metrics
from engine.settings import Drafting, Generation, Sampling
from engine.types import Learned, Prefill, Step, Token
from tests.support.runs import summed


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
    cold(models)
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
    empty = summed(None, [])
    assert speedup([]) == speedup([(empty, run(1.0, 1.0, 1.0))]) == UNKNOWN
    assert overall([], []) == overall([empty], [empty]) == UNKNOWN


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


def test_an_answer_that_rests_reads_about_one() -> None:
    """A plain step knows its own time, which is what it would have taken plainly."""
    steps = [
        Step(at, (Token(1, at, "target"),), verify_seconds=0.01, plain_seconds=0.01)
        for at in range(40)
    ]
    found = live(summed(Prefill(9, 0, 0.02), steps))
    assert found == Speedup(pytest.approx(1.0), pytest.approx(1.0), 40)


def test_nothing_is_divided_by_steps_that_took_no_time() -> None:
    steps = [Step(at, (Token(1, at, "target"),), plain_seconds=0.0) for at in range(20)]
    assert live(summed(None, steps)) == Speedup(plain_steps=20)
