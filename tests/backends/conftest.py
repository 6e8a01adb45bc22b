"""Models that several files of tests use: each is made and loaded once."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.support.backends import Subject, subject_of


@pytest.fixture(scope="session")
def subjects(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], Subject]:
    """The models of the contract by name; what a test needs of them it opens for itself."""

    @cache
    def made(name: str) -> Subject:
        folder = tmp_path_factory.mktemp("subject")
        return subject_of(name, folder, lambda: request.getfixturevalue("gguf_files")["small-F32"])

    return made
