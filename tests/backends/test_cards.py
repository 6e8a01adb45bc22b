"""The kernels of captured forwards, compiled for the GPUs that people have; none of them is needed.

tests/backends/conftest.py leaves this file out where there is no Triton, as on a Mac.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.backends.fused import kernels_for
from engine.errors import ModelError
from engine.models.load_transformers import pick_bits
from engine.models.quantised_files import kept_form
from tests.support.cards import CARDS

PRODUCTS = ("product", "attend")
KINDS_OF_UNITS = {"9.0": 2, "10.0": 2}
"""Kinds of matrix instructions that products and attention use, where they are not one."""
SPILLED = {"product_of_few_bits": 160}
"""Bytes of its registers that a thread may have in memory, where they are not 64."""


def compiled(
    capability: str, folder: Path, *options: str
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """How compiling ended, and the kernels that were compiled."""
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.cards", capability, *options],
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    lines = ended.stdout.splitlines()
    return ended, [json.loads(line) for line in lines if line.startswith('{"')]


def check(capability: str, folder: Path, *options: str) -> None:
    """All kernels can be started, those in 16 bits keep their numbers in registers, and what
    multiplies these uses the matrix units: where there is one kind, always by the same instruction,
    on which the same bits rest."""
    ended, found = compiled(capability, folder, *options)
    assert not ended.returncode, ended.stderr
    units = defaultdict[str, set[str]](set)
    for each in found:
        assert each["shared"] <= CARDS[capability].room, each
        kind = each["what"].partition(",")[0]
        if kind != "float32":
            assert each["spilled"] <= SPILLED.get(each["kernel"], 64), each
            assert each["units"] or not each["kernel"].startswith(PRODUCTS), each
            units[kind].update(each["units"])
    kinds = KINDS_OF_UNITS.get(capability, 1)
    assert units and all(len(each) == kinds for each in units.values()), units


def test_the_kernels_suit_a_desktop(tmp_path: Path) -> None:
    check("8.6", tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("capability", [each for each in CARDS if each != "7.5"])
def test_the_kernels_suit_all_gpus(capability: str, tmp_path: Path) -> None:
    check(capability, tmp_path, "--all")


@pytest.mark.soak
def test_triton_compiles_for_no_older_gpu(tmp_path: Path) -> None:
    """It multiplies without their matrix units, and has no instructions for pairs of bfloat16."""
    ended, found = compiled("7.5", tmp_path)
    assert ended.returncode and "'.bf16x2' requires .target sm_80" in ended.stdout + ended.stderr
    assert found and not any(each["units"] for each in found)
    assert max(each["spilled"] for each in found) > 1000


class Attention:
    layer_idx, head_dim = 0, 128


def test_older_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    model = SimpleNamespace(device=gpu, modules=lambda: [Attention()])
    folder = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert pick_bits("4", gpu) == 4 and kernels_for(model) and kept_form(folder, "cuda:0", "auto")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(
        ModelError, match=r"4 bits here: the GPU has .* capability 7\.5, .* leave the bits at"
    ):
        pick_bits("4", gpu)
    assert not kernels_for(model) and not kept_form(folder, "cuda:0", "auto")
