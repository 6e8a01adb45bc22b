"""Prediction layers on transformers: they compute what their definition says, in the model's own
layer; they are found by themselves; and answers stay what they were."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from engine.backends.transformers import TransformersBackend
from engine.decode import never
from engine.drafting.ceiling import timed
from engine.heads.eagle3_head import CHUNK
from engine.heads.mtp import DeepMtpHead
from engine.models.loaders import need
from engine.settings import Runtime, Sampling
from tests.support.heads import SAMPLINGS, Guessing, answer, fresh, law, loaded
from tests.support.lossless import tokens_of
from tests.support.predicting import Tensors, put, save_deepseek, save_glm, save_qwen, tensors_of

pytestmark = pytest.mark.model

TEXT = [1, 3, 500, 41, 2000, 17, 3000, 12, 9, 700, 4, 31, 800, 5000]
PATH = (7, 900, 33)
"""Tokens that are guessed behind the text."""
QWENS = ("qwen3.5", "qwen3.5-moe", "qwen3-next")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with prediction layers: of random numbers, of some that know, and of several."""
    folder = tmp_path_factory.mktemp("predicting")
    made = {family: save_qwen(family, folder / family) for family in QWENS}
    made["knowing"] = save_qwen("qwen3.5", folder / "knowing", knowing=True)
    made["two"] = save_qwen("qwen3.5", folder / "two", layers=2)
    made["glm"] = save_glm(folder / "glm")
    made["deepseek"] = save_deepseek(folder / "deepseek")
    return made


@pytest.fixture(scope="module")
def backends(folders: dict[str, Path]) -> dict[str, TransformersBackend]:
    return {name: loaded(folder) for name, folder in folders.items()}


class Reference:
    """Prediction layers by the library's own layers, over whole texts, without a cache.

    Each stands in for the model's last layer in a copy of its files, so that it is loaded by the
    library alone.
    """

    def __init__(self, folder: Path, copies: Path, layers: int = 1) -> None:
        self.tensors = tensors_of(folder)
        self.layers: list[Any] = []
        for number in range(layers):
            own = f"mtp.layers.{number}."
            parts = {
                f"model.layers.3.{name.removeprefix(own)}": each
                for name, each in self.tensors.items()
                if name.startswith(own)
            }
            copy = copies / str(number)
            copy.mkdir()
            (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
            put(copy, self.tensors | parts)
            model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
            self.layers.append(model.model.layers[3])
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def norm(self, values: Any, name: str) -> Any:
        scale = values.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        return values * scale * (1 + self.tensors[f"mtp.{name}.weight"])

    def step(self, number: int, tokens: Sequence[int], states: Any) -> Any:
        """What a layer makes of tokens and the states before them, all from the first on."""
        embedded = self.model.get_input_embeddings()(torch.tensor([list(tokens)]))
        both = (
            self.norm(embedded, "pre_fc_norm_embedding"),
            self.norm(states, "pre_fc_norm_hidden"),
        )
        joined = torch.cat(both, dim=-1) @ self.tensors["mtp.fc.weight"].T
        rows = len(tokens)
        turn = self.model.model.rotary_emb(joined, torch.arange(rows)[None])
        mask = torch.full((1, 1, rows, rows), -1e9).triu(1)
        layer = self.layers[number]
        return self.norm(layer(joined, position_embeddings=turn, attention_mask=mask), "norm")

    def laws(self, text: Sequence[int], path: Sequence[int]) -> list[Any]:
        """What may follow the text, and each token of a path behind it.

        One layer goes on from its own states behind the text. Of several, layer k takes those that
        layer k - 1 left at all rows.
        """
        found, several = [], len(self.layers) > 1
        with torch.no_grad():
            states = self.model.model(torch.tensor([list(text)])).last_hidden_state[:, :-1]
            tokens = [*text[1:], *path]
            for at in range(len(path) + 1):
                count = states.shape[1]
                said = tokens[at : at + count] if several else tokens[:count]
                out = self.step(at if several else 0, said, states)
                found.append((out[0, -1] @ self.model.lm_head.weight.T).numpy())
                states = out if several else torch.cat([states, out[:, -1:]], dim=1)
        return found


def guessed(backend: TransformersBackend, text: Sequence[int], path: Sequence[int]) -> list[Any]:
    """The head's logits behind a text and behind each token of a path."""
    own = backend.open()
    own.head.listen(True)
    own.prefill(text, never)
    guess: Any = own.head.start(text, SAMPLINGS[0], never)
    found = [guess.logits]
    for token in path:
        (guess,) = own.head.extend([0], [token])
        found.append(guess.logits)
    own.close()
    return found


def assert_near(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    assert len(found) == len(wanted)
    for left, right in zip(found, wanted, strict=True):
        assert np.abs(left - right).max() < 1e-4 * np.abs(right).max()


@pytest.mark.parametrize("name", [*QWENS, "knowing"])
def test_a_layer_computes_its_definition(
    name: str,
    folders: dict[str, Path],
    backends: dict[str, TransformersBackend],
    tmp_path: Path,
) -> None:
    reference = Reference(folders[name], tmp_path)
    assert_near(guessed(backends[name], TEXT, PATH), reference.laws(TEXT, PATH))


def test_of_several_layers_each_guesses_at_its_own_depth(
    folders: dict[str, Path], backends: dict[str, TransformersBackend], tmp_path: Path
) -> None:
    reference = Reference(folders["two"], tmp_path, layers=2)
    assert_near(guessed(backends["two"], TEXT, PATH[:1]), reference.laws(TEXT, PATH[:1]))


@pytest.mark.parametrize("name", ["glm", "deepseek"])
def test_layers_behind_those_of_the_model_guess_as_the_library_does(
    name: str, folders: dict[str, Path], backends: dict[str, TransformersBackend]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[345]\."]
    ahead = MtpModel.from_pretrained(model)
    with torch.no_grad():
        states = model.model(torch.tensor([TEXT])).last_hidden_state[:, :-1]
        path, logits, _ = ahead(
            torch.tensor([TEXT[1:]]),
            states,
            None,
            torch.arange(1, len(TEXT))[None],
            MtpCache(config=model.config.get_mtp_config()),
        )
    found = guessed(backends[name], TEXT, path[0, :-1].tolist())
    assert_near(found, list(logits[0].numpy()))


def test_branches_of_deep_layers_do_not_see_each_other(
    backends: dict[str, TransformersBackend],
) -> None:
    backend = backends["glm"].open()
    head = backend.head
    assert head is not None and head.info.branches
    head.listen(True)
    backend.prefill(TEXT, never)
    head.start(TEXT, SAMPLINGS[0], never)
    one = head.extend([0, 0, 0], [7, 900, 31])
    two = head.extend([2, 0, 0], [5, 33, 8])
    for at, token in enumerate((7, 900, 31)):
        assert_near([one[at].logits], guessed(backend, TEXT, [token])[1:])
    for at, path in enumerate(([31, 5], [7, 33], [7, 8])):
        assert_near([two[at].logits], guessed(backend, TEXT, path)[2:])
    backend.close()


def test_deep_layers_catch_up_in_parts_and_over_gaps(
    backends: dict[str, TransformersBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.heads.eagle3_head.LATEST", 2000)
    backend = backends["glm"].open()
    head = backend.head
    assert isinstance(head, DeepMtpHead)
    tokens = [3 + at * 37 % 6000 for at in range(1300)]
    head.listen(True)
    backend.prefill(tokens, never)
    asked = [False] * 4 + [True]
    assert head.start(tokens, SAMPLINGS[0], lambda: asked.pop(0)) is None
    assert head.done == len(tokens) - 1 and head.levels[1].done == CHUNK
    assert np.abs(law(backend, tokens) - fresh(backend, tokens)).max() < 1e-4
    head.forget()
    for path in ([5, 6], [9, 8]):
        (one,), (two,) = (head.extend([0], [token]) for token in path)
        assert_near([one.logits, two.logits], guessed(backend, tokens, path)[1:])
        law(backend, tokens)
    # What was read without listening is a gap; guesses go on behind it.
    head.listen(False)
    backend.prefill([*tokens, 4, 5, 6], never)
    head.listen(True)
    longer = [*tokens, 4, 5, 6, 7]
    backend.prefill(longer, never)
    law(backend, longer)
    for token in (8, 9):
        (guess,) = head.extend([0], [token])
        assert np.isfinite(guess.logits).all()
    assert head.bytes > 0
    backend.close()
    assert not head.bytes


FLOOR = 1.5
"""Tokens per forward that a layer is good for which was made to know what follows."""


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda each: f"{each.temperature}")
def test_layers_that_know_are_right(
    sampling: Sampling, backends: dict[str, TransformersBackend]
) -> None:
    backend = backends["knowing"].open()
    drafter = Guessing(backend.head, sampling, width=1, wrong=0.0)
    steps = answer(backend, TEXT, sampling, drafter, tokens=60)
    assert len(tokens_of(steps)) > FLOOR * len(steps)
    backend.close()


def test_layers_are_found_counted_and_left_out(folders: dict[str, Path]) -> None:
    for name, depth, branches in (("qwen3.5", 8, False), ("two", 2, False), ("glm", 3, True)):
        folder = folders[name]
        backend = loaded(folder)
        info = backend.info.head
        assert info is not None and backend.head is not None
        assert (info.name, info.depth, info.branches) == ("MTP", depth, branches)
        assert timed(backend, backend.head, rounds=1) is not None
        assert info.drafts and info.fingerprint and info.memory_bytes == 4 * info.parameters
        with_them, alone = (need(str(folder), Runtime(head=each)) for each in ("auto", "off"))
        assert with_them.weights - alone.weights == info.memory_bytes
        assert with_them.cache > alone.cache
        assert with_them.parameters - alone.parameters == info.parameters
        # Beside its parameters a file of a GLM holds what corrects the choice of experts.
        assert alone.parameters - backend.info.parameters == (8 if name == "glm" else 0)
        assert with_them.forecast is not None
        assert with_them.forecast.head == "MTP, in its files" and not with_them.forecast.problem
        off = loaded(folder, head="off")
        assert off.head is None and off.info.head is None


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: each for name, each in tensors.items() if part not in name}


def halved(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: each[: len(each) // 2] if part in name else each for name, each in tensors.items()
    }


def of_bytes(tensors: Tensors) -> Tensors:
    name = "mtp.layers.0.self_attn.q_proj.weight"
    return tensors | {name: tensors[name].to(torch.int8)}


WRONG: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no projection": (without("mtp.fc"), "layer 0 has no tensor fc.weight or eh_proj.weight"),
    "no norm": (without("mtp.norm"), "norm.weight"),
    "no layer": (without("mtp.layers"), "layer 0 has no tensors of its own"),
    "half a layer": (without("mtp.layers.0.mlp.up"), "layers.0.mlp.up_proj.weight is missing"),
    "short": (halved("mtp.layers.0.self_attn.k_proj"), "k_proj.weight has the shape (8, 32)"),
    "narrow": (halved("mtp.fc"), "fc has the shape (16, 64), expected (32, 64)"),
    "quantised": (of_bytes, "is quantised (torch.int8)"),
    "unknown": (
        lambda tensors: {
            name.replace("mtp.", "mtp_block."): each for name, each in tensors.items()
        },
        "names that are not known here (mtp_block.fc.weight, ...)",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_layers_that_cannot_be_used_are_told_and_all_else_works(
    wrong: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    change, words = WRONG[wrong]
    for path in folders["qwen3.5"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    put(tmp_path, change(tensors_of(tmp_path)))
    backend = loaded(tmp_path)
    info = backend.info.head
    assert info is not None and backend.head is None and not info.drafts
    assert words in info.note and "prediction layers" in info.note
    assert len(tokens_of(answer(backend, TEXT, SAMPLINGS[0], tokens=5))) == 5
    told = need(str(tmp_path), Runtime()).forecast
    assert told is not None
    assert need(str(tmp_path), Runtime(head="off")).parameters == backend.info.parameters
