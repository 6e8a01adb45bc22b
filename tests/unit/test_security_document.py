"""SECURITY.md names a test for each promise; the tests exist."""

import re

from tests.conftest import ROOT


def test_every_test_that_is_named_exists() -> None:
    document = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", document)
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*/test_*.py")]
    found = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.M)}
    assert len(named) > 25 and len(set(named)) == len(named)
    assert set(named) <= found, set(named) - found
    assert all(len(line) <= 100 for line in document.splitlines())
