"""A family of models: who may draft for whom, what is planned, and the stack that is made of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import ModelError, SettingError
from engine.hsd.family import Family, LevelDrafter, Stack, check_drafts, check_vocabulary
from engine.settings import Sampling
from engine.types import RULES, Rule
from engine.verify import Match, Rejection, verifier
from tests.support.lossless import toy_family
from tests.support.toy import VOCABULARY, ToyBackend


def toy(name: str, **changes: Any) -> ToyBackend:
    backend = ToyBackend(name=name)
    backend.info = replace(backend.info, **changes)
    return backend


def levels_of(stack: Stack) -> list[LevelDrafter]:
    """The lowest first."""
    found, level = list[LevelDrafter](), stack.top
    while isinstance(level, LevelDrafter):
        found.insert(0, level)
        level = level.below  # type: ignore[assignment]
    return found


def test_draft_models_come_in_their_order_of_size() -> None:
    sizes = {"mid": 50, "tiny": 1, "small": 7}
    drafts = {name: toy(name, parameters=size) for name, size in sizes.items()}
    assert list(Family(toy("toy"), drafts).drafts) == ["tiny", "small", "mid"]


def test_the_common_vocabulary_is_the_smallest() -> None:
    drafts = {"small": toy("small", vocabulary_size=300), "mid": toy("mid", vocabulary_size=280)}
    assert Family(toy("toy"), drafts).vocabulary == VOCABULARY
    assert Family(toy("toy", vocabulary_size=400), drafts).vocabulary == 280
    assert Family(toy("toy"), {}).vocabulary == VOCABULARY


def test_a_draft_model_cannot_have_the_name_of_the_target() -> None:
    with pytest.raises(ModelError, match="A draft model cannot be called 'toy'"):
        Family(toy("toy"), {"toy": toy("toy")})


@pytest.mark.parametrize("note", ["", "It keeps a state, so it decodes plainly."])
def test_models_that_cannot_roll_back_neither_draft_nor_are_drafted_for(note: str) -> None:
    stuck, able = toy("stuck", can_tree=False, note=note), toy("able")
    with pytest.raises(ModelError) as caught:
        Family(stuck, {"able": able})
    assert str(caught.value) == (
        f"stuck cannot verify drafts: {note or 'it cannot roll back.'} Choose another model to "
        "answer, or do without draft models."
    )
    with pytest.raises(ModelError) as caught:
        check_drafts(able, "stuck", stuck)
    assert str(caught.value) == (
        f"stuck cannot draft: {note or 'it cannot roll back.'} Choose a model that can, or leave "
        "it out."
    )


def test_a_family_that_was_not_profiled_plans_nothing() -> None:
    for drafts, names in (({}, "none"), ({"a": toy("a"), "b": toy("b")}, "a, b")):
        family = Family(toy("toy"), drafts)
        for ask in (family.profiled, lambda: family.plan("a@3", "match")):  # noqa: B023
            with pytest.raises(SettingError, match=rf"\({names}\) were not profiled with toy"):
                ask()


def test_a_plan_with_a_model_that_is_not_loaded_is_refused() -> None:
    whole = toy_family()
    some = Family(whole.target, {"tiny": whole.drafts["tiny"]}, whole.profile)
    plan = some.plan("tiny@3/mid@2", "match")
    with pytest.raises(SettingError, match="'mid' of the plan tiny@3/mid@2 is not loaded.*tiny"):
        some.stack(plan, Sampling(), "match", None)


@pytest.mark.parametrize("rule", RULES)
def test_a_stack_is_made_as_planned(rule: Rule) -> None:
    family, sampling = toy_family(), Sampling(0.6, top_k=9, seed=77)
    plan = family.plan("tiny@5/small@3/mid@2", rule)
    stack = family.stack(plan, sampling, rule, None)
    levels = levels_of(stack)
    assert [(level.name, level.batch) for level in levels] == [
        ("tiny", 5), ("small", 3), ("mid", 2),
    ]  # fmt: skip
    profile = family.profiled()
    for level in levels:
        assert level.backend is family.drafts[level.name]
        assert level.sampling == sampling and level.vocabulary == family.vocabulary
        assert level.costs is not None
        assert level.costs.points == profile.models[profile.index(level.name)].costs
        assert isinstance(level.rule, Match if rule == "match" else Rejection)
    assert levels[0].below is None


def test_every_model_has_random_numbers_of_its_own() -> None:
    family = toy_family()
    plan = family.plan("tiny@5/small@3/mid@2", "rejection")
    levels = levels_of(family.stack(plan, Sampling(seed=4), "rejection", None))
    rules = [verifier("rejection", 4, 0, VOCABULARY), *(level.rule for level in levels)]
    drawn = [tuple(rule.random.random(4)) for rule in rules]  # type: ignore[attr-defined]
    assert len({*drawn}) == 4
    again = levels_of(family.stack(plan, Sampling(seed=4), "rejection", None))
    assert [tuple(level.rule.random.random(4)) for level in again] == drawn[1:]  # type: ignore[attr-defined]


# vocabularies


class Speaker(ToyBackend):
    """A model with any vocabulary."""

    def __init__(
        self, name: str, words: Sequence[str], fingerprint: str = "", kind: str = "BPE"
    ) -> None:
        super().__init__(name=name)
        self.words = words
        fingerprint = fingerprint or repr(words)
        self.info = replace(
            self.info,
            tokenizer_type=kind,
            tokenizer_fingerprint=fingerprint,
            vocabulary_size=64 * len(name),
        )

    def vocabulary(self) -> list[str]:
        return list(self.words)


WORDS = ("a", "b", "c")


def test_equal_tokenizers_match_and_so_do_equal_tokens_whatever_else_differs() -> None:
    """A tokenizer's file also holds its template, and weights are padded."""
    check_vocabulary(Speaker("large", WORDS, "same"), Speaker("small", ("z",), "same"))
    check_vocabulary(Speaker("big", WORDS, "one"), Speaker("small", list(WORDS), "other"))


MANY = [str(number) for number in range(150_000)]


@pytest.mark.parametrize(
    ("large", "small", "reasons"),
    [
        (Speaker("large", WORDS), Speaker("small", "axy"), ["1: 'x', not 'b'"]),
        (Speaker("large", WORDS), Speaker("small", "ab"), ["it has 2 tokens, not 3"]),
        (
            Speaker("large", WORDS, "one"),
            Speaker("small", WORDS, "other", "Unigram"),
            ["its tokenizer is Unigram, not BPE"],
        ),
        (
            Speaker("large", MANY),
            Speaker("small", [*MANY[:12_345], "x", *MANY[12_346:32_000]], kind="WordPiece"),
            [
                "its tokenizer is WordPiece, not BPE",
                "it has 32,000 tokens, not 150,000",
                "12,345: 'x', not '12345'",
            ],
        ),
    ],
)
def test_what_differs_between_two_vocabularies_is_named(
    large: Speaker, small: Speaker, reasons: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        Family(large, {"small": small})
    said = [
        f"the first token that differs is {each}" if each[0].isdigit() else each for each in reasons
    ]
    assert str(caught.value) == (
        f"small cannot draft for large: {'; '.join(said)}. Choose a smaller model of the same "
        "family. The databases draft without one."
    )
