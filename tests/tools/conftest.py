"""The programs `python -m bench` and `python -m training`, run in this process."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from bench.__main__ import main as bench_main
from training.__main__ import main as training_main


class Program:
    def __init__(self, main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]):
        self.main, self.capsys = main, capsys

    def __call__(self, *arguments: object) -> list[str]:
        """The lines that a command prints, which succeeds."""
        self.capsys.readouterr()
        status = self.main([*map(str, arguments)])
        captured = self.capsys.readouterr()
        assert status == 0, captured.err
        return captured.out.strip().splitlines()

    def record(self, *arguments: object) -> dict[str, Any]:
        """The figures in the last line of a measurement."""
        found: dict[str, Any] = json.loads(self(*arguments)[-1])
        assert found["bench"] == str(arguments[0])
        return found

    def refusal(self, *arguments: object) -> str:
        """What a command says that ends with status 2; it prints no tables."""
        self.capsys.readouterr()
        assert self.main([*map(str, arguments)]) == 2
        captured = self.capsys.readouterr()
        assert captured.out == "" and "Traceback" not in captured.err
        return captured.err


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(bench_main, capsys)


@pytest.fixture
def training(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(training_main, capsys)
