"""The diagnosis: it names the cause there is, and the break-even points it gives are true."""

import random
import re
from dataclasses import replace

from engine.hsd.planner import LONGEST, Plan, StackLevel, best, latency
from engine.hsd.profile import Profile, Rounds
from engine.hsd.trials import why
from tests.unit.test_planner import RULE, family, geometric, invented, model

SMALL = Plan((StackLevel("small", 4),))
MS = 1e-3


def pair(
    a: float, small: float, large: float = 4.0, each: float = 0.0, choice: float = 0.0
) -> Profile:
    """Two models, their times in milliseconds, and the acceptance of each token."""
    models = [model("small", small * MS), model("large", large * MS, each * MS, choice * MS)]
    return family(models, lambda i, j: geometric(a))


def test_where_all_is_well_nothing_is_said() -> None:
    profile = pair(0.8, 0.5)
    seconds = latency(profile, SMALL, RULE)
    assert seconds < 4 * MS
    for plan, measured in (
        (SMALL, None),
        (SMALL, 1.09 * seconds),
        (Plan(), None),
        (Plan(), 4 * MS),
    ):
        assert why(profile, plan, RULE, measured) == []


def test_where_a_measurement_is_not_what_was_predicted_the_profile_is_in_doubt() -> None:
    found = why(pair(1.0, 1.0), SMALL, RULE, 2 * MS)
    assert found == [
        "small@4 takes 2 ms per token, and 1.6 ms were predicted. The profile was measured on "
        "other text or under another load. Profile again."
    ]
    assert len(why(pair(1.0, 1.0), Plan(), RULE, 4.5 * MS)) == 1, "plain decoding as well"


def test_a_target_that_verifies_at_too_high_a_cost() -> None:
    _, cause, last = why(pair(1.0, 0.001, 4.0, 4.5), SMALL, RULE)
    assert cause == (
        "large takes 4 ms per token alone, and 8.5 ms to check one draft. No draft model can make "
        "it faster."
    )
    assert last == "Plain decoding is the fastest here."
    assert best(pair(1.0, 1e-9, 4.0, 4.5), RULE) == Plan()


def test_databases_whose_rounds_take_longer_than_they_save() -> None:
    alone = replace(model("large", 4 * MS), databases=Rounds((0.75, 0.25), 6 * MS))
    profile = family([alone], lambda i, j: ())
    assert why(profile, Plan(databases=True), RULE) == [
        "databases takes 4.8 ms per token, plain decoding 4 ms.",
        "With the databases large gives 1.25 tokens per step. It would need 1.50 to be faster than "
        "without.",
        "Plain decoding is the fastest here.",
    ]


def test_every_part_of_a_stack_that_does_not_pay_is_named() -> None:
    """Databases pay for the small one, and that for the mid one; the large one accepts too few."""
    models = [
        replace(model("small", 1 * MS), databases=Rounds((0.0, 1.0), 1 * MS)),
        model("mid", 4 * MS),
        model("large", 9 * MS),
    ]
    shares = {(0, 1): 0.9, (0, 2): 0.9, (1, 2): 0.01}
    profile = family(models, lambda i, j: geometric(shares[i, j]))
    plan = Plan((StackLevel("small", 4), StackLevel("mid", 2)), databases=True)
    first, cause, last = why(profile, plan, RULE)
    assert first.startswith("databases/small@4/mid@2 takes ")
    assert re.match(r"large accepts 1 % of the tokens of mid. These take 1.\d+ ms each", cause)
    assert last.startswith("The fastest here is databases/small@")
    nothing = why(profile, plan, "match")
    assert [sentence.split()[0] for sentence in nothing[1:-1]] == ["mid", "large"]


def test_a_draft_alone_that_does_not_pay_has_one_cause_and_its_numbers_agree() -> None:
    rng, seen = random.Random(1), set()
    for _ in range(60):
        profile = invented(rng, 2, databases=0.0)
        small, large = profile.models
        slower = {n: seconds * rng.uniform(0.5, 2.0) for n, seconds in small.costs.items()}
        profile = replace(profile, models=(replace(small, costs=slower), large))
        plan = Plan((StackLevel("m0", rng.randint(1, LONGEST)),))
        found = why(profile, plan, RULE)
        if latency(profile, plan, RULE) < profile.target.seconds(0):
            assert found == []
            continue
        assert len(found) == 3
        seen.add(found[1].split()[1])
        if limit := re.search(r"less than (\S+) ms", found[1]):
            for share, pays in ((0.99, True), (1.01, False)):
                small = model("m0", float(limit[1]) * MS * share)
                same = family([small, profile.target], lambda i, j: [1.0])
                assert (best(same, RULE) != Plan()) == pays
        if shares := re.findall(r"(\d+) %", found[1]):
            accepted, needed = map(int, shares)
            assert accepted < needed <= 100
            for a, pays in ((needed / 100, True), (needed / 100 - 0.011, False)):
                same = family(profile.models, lambda i, j, a=a: geometric(a, LONGEST))
                assert (best(same, RULE) != Plan()) == pays
    assert seen == {"accepts", "drafts", "takes"}
