"""The mutations of tests/support/mutate.py are of the code as it is now."""

import ast

import pytest

from tests.conftest import ROOT
from tests.support.mutate import MUTATIONS, Mutation, files_of, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: f"{each.path}: {each.old}")
def test_a_mutation_is_another_program_and_has_tests(mutation: Mutation) -> None:
    ast.parse(mutated(mutation))
    assert mutation.old != mutation.new and mutation.tests
    assert all((ROOT / name).is_file() for name in files_of(mutation))
