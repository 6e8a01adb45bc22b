"""The mutations of tests/support/mutate.py are of the code as it is now."""

import ast

from tests.conftest import ROOT
from tests.support.mutate import MUTATIONS, files_of, mutated


def test_mutations_are_other_programs_and_have_tests() -> None:
    for mutation in MUTATIONS:
        ast.parse(mutated(mutation))
        assert mutation.old != mutation.new and mutation.tests, mutation
        assert all((ROOT / name).is_file() for name in files_of(mutation)), mutation
