"""Prompt lookup beside the one of transformers: both draft the same."""

import pytest
import torch
from hypothesis import given, settings
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from engine.drafting.baselines import LONGEST_COPY, LONGEST_MATCH, LookupDrafter
from tests.unit.test_baselines import TEXTS, draft


@pytest.mark.model
@settings(deadline=None, derandomize=True)
@given(TEXTS)
def test_it_drafts_what_the_library_drafts(tokens: list[int]) -> None:
    library = PromptLookupCandidateGenerator(
        num_output_tokens=LONGEST_COPY, max_matching_ngram_size=LONGEST_MATCH, max_length=999
    )
    drafter = LookupDrafter()
    drafter.observe(tokens, len(tokens))
    wanted, _ = library.get_candidates(torch.tensor([tokens]))
    assert [*tokens, *draft(drafter, tokens)[0]] == wanted[0].tolist()
