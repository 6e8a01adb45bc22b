"""What drafts for a model, in words: all three kinds, with the reason where one does not."""

from dataclasses import replace

import pytest

from app.service.drafters import NO_HEAD, NO_MODELS, drafters, line
from engine.backends.base import BackendInfo
from engine.backends.toy import ToyBackend
from engine.heads.base import HeadInfo

INFO = ToyBackend().info
MTP = HeadInfo("MTP", 8, branches=False)


def info(**changes: object) -> BackendInfo:
    return replace(INFO, head=None, **changes)


@pytest.mark.parametrize(
    ("leaves", "depth", "words"),
    [
        (None, None, "trees"),
        (8, None, "trees of up to 8 branches"),
        (128, None, "trees"),
        (8, 5, "trees of up to 8 branches and 5 tokens"),
        (1, None, "chains"),
        (1, 8, "chains of up to 8 tokens"),
        (1, 1, "chains of up to 1 token"),
    ],
)
def test_the_form_of_what_the_databases_draft(
    leaves: int | None, depth: int | None, words: str
) -> None:
    databases, head, models = drafters(info(leaves=leaves, depth=depth))
    assert (databases.name, databases.how, databases.problem) == ("databases", words, "")
    assert (head.how, head.problem) == ("", NO_HEAD)
    assert (models.how, models.problem) == ("", NO_MODELS)


def test_a_head_is_told_with_its_depth_or_why_it_does_not_draft() -> None:
    _, head, _ = drafters(replace(INFO, head=MTP))
    assert head.how == "MTP, up to 8 tokens ahead, as far as it pays" and not head.problem
    broken = replace(MTP, depth=0, note="The head of m cannot be used: it has another vocabulary.")
    _, head, _ = drafters(replace(INFO, head=broken))
    assert not head.how and head.words == broken.note


def test_draft_models_are_named() -> None:
    assert drafters(INFO, ["small", "mid"])[2].how == "small, mid"


def test_a_model_that_decodes_plainly_is_drafted_for_by_nothing_and_says_so() -> None:
    plain = replace(INFO, can_tree=False, head=MTP)
    for each in drafters(plain, ["small"]):
        assert not each.how and "decodes plainly" in each.words
    assert drafters(info(can_tree=False))[1].words == NO_HEAD
    assert line(plain, ["small"]) == "Drafted by: nothing, it decodes plainly."


def test_the_line_names_what_drafts_alone() -> None:
    assert line(info()) == "Drafted by: databases (trees)."
    chain = replace(INFO, leaves=1, depth=8, head=MTP)
    assert line(chain, ["small"]) == (
        "Drafted by: databases (chains of up to 8 tokens), head (MTP, up to 8 tokens ahead, as far "
        "as it pays), draft models (small)."
    )
