"""Metrics: the field's definitions on a run small enough to count by hand."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from engine.metrics import Metrics, Tally
from engine.types import Event, Learned, Prefill, Step, Token
from tests.support.runs import summed


def step(index: int, *sources: str, **fields: object) -> Step:
    tokens = tuple(Token(5, index, source) for source in sources)
    return Step(index, tokens, **fields)  # type: ignore[arg-type]


RUN = [
    step(
        0, "context", "context", "target",
        proposed={"context": 3, "model": 2}, accepted={"context": 2},
        by_depth=((3, 1), (2, 1)), draft_seconds=0.1, verify_seconds=0.5, sample_seconds=0.2,
        other_seconds=0.2, look_ups={"context": 0.01, "model": 0.02},
    ),
    step(1, "target", proposed={"model": 4}, accepted={}, verify_seconds=1.0,
         look_ups={"context": 0.03}),
    step(2, "model", "target", proposed={"model": 1}, accepted={"model": 1}, verify_seconds=1.0),
]  # fmt: skip


def test_levels_of_a_stack_add_up() -> None:
    steps = [
        step(0, "target", levels={"draft:small": (4, 0, 0), "draft:mid": (2, 8, 5)}),
        step(1, "target"),
        step(2, "target", levels={"draft:small": (3, 6, 1)}),
    ]
    levels = summed(None, steps).levels
    assert levels == {"draft:small": (7, 6, 1), "draft:mid": (2, 8, 5)}
    assert summed(None, RUN).levels == {}


def test_a_run_counted_by_hand() -> None:
    metrics = summed(Prefill(10, 4, 0.5), RUN)
    assert (metrics.tokens, metrics.forwards) == (6, 3)
    assert metrics.mean_acceptance_length == 2.0
    assert metrics.acceptance_rate == pytest.approx(3 / 10)
    assert metrics.acceptance_ratio == pytest.approx(5 / 6)
    assert metrics.proposed == {"context": 3, "model": 7}
    assert metrics.accepted == {"context": 2, "model": 1}
    assert metrics.share == pytest.approx({"context": 2 / 6, "model": 1 / 6, "target": 3 / 6})
    assert metrics.look_up_seconds == pytest.approx({"context": 0.04, "model": 0.02})
    assert metrics.lengths == {1: 1, 2: 1, 3: 1}
    assert (metrics.rate("context"), metrics.rate("model")) == pytest.approx((2 / 3, 1 / 7))


def test_times_add_up() -> None:
    metrics = summed(Prefill(10, 4, 0.5), RUN)
    assert metrics.ttft_seconds == pytest.approx(0.5 + 1.0)
    assert metrics.decode_seconds == pytest.approx(3.0)
    assert (metrics.draft_seconds, metrics.verify_seconds) == pytest.approx((0.1, 2.5))
    assert (metrics.sample_seconds, metrics.other_seconds) == pytest.approx((0.2, 0.2))
    assert metrics.tokens_per_second == pytest.approx(2.0)
    assert metrics.end_to_end_tokens_per_second == pytest.approx(6 / 3.5)
    whole = summed(Prefill(10, 4, 0.5), RUN, Learned(0.25))
    assert whole.seconds == pytest.approx(0.5 + 3.0 + 0.25)
    assert whole.decode_seconds == metrics.decode_seconds and whole.kept == 3
    assert whole.end_to_end_tokens_per_second == pytest.approx(6 / 3.75)


def test_a_run_cancelled_before_its_first_token_divides_by_nothing() -> None:
    metrics = summed(Prefill(3, 0, 0.25), [Step(0, (), finish="cancelled")])
    assert (metrics.tokens, metrics.forwards, metrics.ttft_seconds) == (0, 0, 0.25)
    assert metrics.tokens_per_second == metrics.end_to_end_tokens_per_second == 0.0
    assert metrics.mean_acceptance_length == metrics.acceptance_rate == 0.0
    assert metrics.acceptance_ratio == metrics.rate("context") == 0.0
    assert metrics.share == metrics.lengths == {}


def test_no_events_at_all() -> None:
    assert summed(None, []).end_to_end_tokens_per_second == 0.0


def test_a_cancelled_step_is_not_a_forward() -> None:
    assert summed(None, [*RUN, Step(3, (), finish="cancelled")]) == summed(None, RUN)


def test_shares_sum_to_one() -> None:
    metrics: Metrics = summed(None, RUN)
    assert sum(metrics.share.values()) == pytest.approx(1.0)
    assert sum(size * count for size, count in metrics.lengths.items()) == metrics.tokens


STAGES = ("draft_seconds", "verify_seconds", "sample_seconds", "other_seconds")


def random_run(seed: int, known: bool) -> list[Event]:
    """A run with everything in it, cancelled steps too; `known` ones know their plain seconds."""
    chance = random.Random(seed)
    names = ("context", "model", "draft:small", "draft:<b>")
    prompt = Prefill(10, 4, chance.random(), chance.random() if known else None)
    events: list[Event] = [prompt] if chance.random() < 0.9 else []
    for index in range(chance.randrange(40)):
        kept = [chance.choice(names) for _ in range(chance.choice((0, 0, 1, 3)))]
        drafted = Counter(chance.choices(names, k=chance.choice((0, 4, 9)))) + Counter(kept)
        fields: dict[str, object] = {
            name: chance.random() for name in STAGES if chance.random() < 0.9
        }
        if known or chance.random() < 0.8:
            fields["plain_seconds"] = chance.random()
        events.append(
            step(
                index, *kept, *(["target"] if chance.random() < 0.9 else []),
                proposed=dict(drafted), accepted=dict(Counter(kept)),
                look_ups={name: chance.random() for name in names[: chance.randrange(5)]},
                levels={names[2]: (chance.randrange(5), 3, 1)} if drafted else {}, **fields,
                by_depth=tuple((chance.randrange(5), 1) for _ in range(chance.randrange(4))),
            )
        )  # fmt: skip
    return [*events, Learned(chance.random())]


def by_the_book(events: list[Event]) -> Metrics:
    """The figures by their definitions, each from all steps at once."""
    steps = [event for event in events if isinstance(event, Step) and event.tokens]
    tokens = [token for one in steps for token in one.tokens]
    prefill = sum(event.seconds for event in events if isinstance(event, Prefill))

    def summed(field: str) -> dict[str, Any]:
        found: Counter[str] = Counter()
        for one in steps:
            found.update(getattr(one, field))
        return dict(found)

    proposed, accepted = summed("proposed"), summed("accepted")
    drafted = sum(proposed.values())
    named = {name for one in steps for name in one.levels}
    plain = [one.plain_seconds for one in steps]
    times = {name: sum(getattr(one, name) for one in steps) for name in STAGES}
    return Metrics(
        tokens=len(tokens),
        forwards=len(steps),
        ttft_seconds=prefill + sum(one.seconds for one in steps[:1]),
        decode_seconds=sum(one.seconds for one in steps),
        **times,
        mean_acceptance_length=len(tokens) / len(steps) if steps else 0.0,
        acceptance_rate=sum(accepted.values()) / drafted if drafted else 0.0,
        acceptance_ratio=(
            sum(len(one.tokens) for one in steps if len(one.tokens) > 1) / len(tokens)
            if tokens
            else 0.0
        ),
        proposed=proposed,
        accepted=accepted,
        share={s: n / len(tokens) for s, n in Counter(t.source for t in tokens).items()},
        look_up_seconds=summed("look_ups"),
        lengths=dict(sorted(Counter(len(one.tokens) for one in steps).items())),
        prefill_seconds=prefill,
        learning_seconds=sum(event.seconds for event in events if isinstance(event, Learned)),
        levels={
            name: tuple(
                map(sum, zip(*(o.levels[name] for o in steps if name in o.levels), strict=True))
            )
            for name in named
        },
        plain_prefill_seconds=next(
            (event.plain_seconds for event in events if isinstance(event, Prefill)), None
        ),
        plain_seconds=sum(plain) if steps and None not in plain else None,  # type: ignore[arg-type]
        plain_steps=sum(not sum(one.proposed.values()) for one in steps),
        kept_lengths=dict(
            Counter(sum(one.accepted.values()) for one in steps if sum(one.proposed.values()))
        ),
        by_depth=tuple(
            (
                sum(one.by_depth[d][0] for one in steps if d < len(one.by_depth)),
                sum(one.by_depth[d][1] for one in steps if d < len(one.by_depth)),
            )
            for d in range(max((len(one.by_depth) for one in steps), default=0))
        ),
    )


@pytest.mark.parametrize("seed", range(12))
def test_every_beginning_of_a_run_has_the_figures_of_its_steps(seed: int) -> None:
    events = random_run(seed, known=seed % 2 == 0)
    tally = Tally()
    for at, event in enumerate([*events, None]):
        figures, wanted = tally.metrics(), by_the_book(events[:at])
        for name in Metrics.__dataclass_fields__:
            got, meant = getattr(figures, name), getattr(wanted, name)
            plain = isinstance(meant, dict) and any(isinstance(v, tuple) for v in meant.values())
            exact = plain or meant is None or isinstance(meant, tuple)
            assert got == (meant if exact else pytest.approx(meant)), name
        if event is not None:
            tally.add(event)


def test_figures_that_were_asked_for_do_not_change_with_later_events() -> None:
    tally = Tally()
    for event in RUN[:2]:
        tally.add(event)
    early = tally.metrics()
    tally.add(RUN[2])
    assert early == summed(None, RUN[:2]) != tally.metrics()


class Counted(tuple[Token, ...]):
    """Tokens that count how often they are gone through."""

    looks = 0

    def __iter__(self) -> Iterator[Token]:
        Counted.looks += 1
        return super().__iter__()


def test_asking_for_the_figures_looks_at_no_step_again() -> None:
    tally = Tally()
    for index in range(300):
        tally.add(Step(index, Counted((Token(1, index, "target"),))))
    looks = Counted.looks
    assert looks >= 300
    for _ in range(5):
        assert tally.metrics().tokens == 300
    assert Counted.looks == looks, "the figures are counted when a step comes, and not again"


def test_plain_seconds_are_known_when_every_step_knows_them() -> None:
    known = [step(i, "target", plain_seconds=0.5) for i in range(3)]
    assert summed(None, known).plain_seconds == pytest.approx(1.5)
    assert summed(None, []).plain_seconds is None
    for at in range(3):
        steps = [*known]
        steps[at] = step(at, "target")
        assert summed(None, steps).plain_seconds is None
    cancelled = Step(3, (), finish="cancelled")
    assert summed(None, [*known, cancelled]).plain_seconds == pytest.approx(1.5)


def test_plain_steps_are_those_that_drafted_nothing() -> None:
    assert summed(None, RUN).plain_steps == 0
    steps = [step(0, "target"), step(1, "target", proposed={"context": 0}), RUN[1]]
    assert summed(None, steps).plain_steps == 2
