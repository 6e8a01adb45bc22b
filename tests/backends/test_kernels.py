"""The kernels of captured forwards against the same sums in float64.

Triton's interpreter computes them where there is no GPU. tests/backends/conftest.py leaves this
file out where there is no Triton, as on a Mac.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from engine.backends import captured
from engine.backends.device_scores import (
    NEAR,
    DeviceScores,
    kind_of,
    numbers_of,
    states_of,
    survey,
)
from engine.backends.fused import OwnForwards
from engine.backends.pool import Table, first_seen
from engine.backends.rounded import FewBits, few_bits, rounded
from engine.sampling import Floats
from engine.settings import Sampling
from tests.support.backends import load, save_model
from tests.support.choices import KINDS, by_law, rows_of


@pytest.fixture(scope="module")
def kernels() -> Any:
    from engine.backends import kernels

    return kernels


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


TYPES = [torch.float16, *([torch.bfloat16] if device() == "cuda" else [])]
"""The types of products; the interpreter multiplies no bfloat16."""


def drawn(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device())


def off(found: Any, wanted: Any) -> float:
    """The error as a share of what was wanted."""
    return float((found.double() - wanted).norm() / wanted.norm())


def reference(
    queries: Any, keys: Any, values: Any, table: Any, visible: Any, scale: float, low: Any
) -> Any:
    """Row by row, over the tokens that it sees, in float64."""
    starts, lengths, places = table.tolist()
    _, heads, rows, size = queries.shape
    group, out = heads // keys.shape[1], torch.zeros(1, rows, heads, size, dtype=torch.float64)
    for row in range(rows):
        start, length, place = starts[row], lengths[row], places[row]
        seen = [*range(start, start + length)]
        for other in range(rows):
            if starts[other] == start and (
                places[other] <= place if visible is None else visible[row, other]
            ):
                seen.append(start + length + places[other])
        seen = seen[int(low[row]) :]
        for head in range(heads):
            key, value = (each[0, head // group, seen].double().cpu() for each in (keys, values))
            weights = (key @ queries[0, head, row].double().cpu() * scale).softmax(0)
            out[0, row, head] = weights @ value
    return out.to(queries.device)


CASES = {
    "one row, nothing cached": (4, 4, 16, [(0, 0, 1)]),
    "one row, a long text": (4, 1, 32, [(0, 500, 1)]),
    "a tree, groups of heads": (8, 2, 16, [(0, 130, 7)]),
    "a tree as long as a block": (2, 2, 16, [(0, 64, 33)]),
    "a tree across two parts": (6, 2, 16, [(0, 251, 9)]),
    "two sequences": (4, 2, 16, [(0, 20, 5), (256, 71, 3)]),
    "large heads": (4, 1, 256, [(0, 40, 5)]),
    "two sequences of several parts": (4, 2, 16, [(0, 300, 3), (512, 290, 4)]),
}


ROOM = 512
"""Rows of a sequence, two parts, in all of these."""


def case(name: str) -> tuple[Any, ...]:
    """Queries, keys, values and the table of the rows; a case lists (start, length, rows)."""
    heads, shared, size, sequences = CASES[name]
    table = [(start, length, place) for start, length, count in sequences for place in range(count)]
    pool = 64 + max(start + length + count for start, length, count in sequences)
    queries = drawn(1, len(table), heads, size).transpose(1, 2)
    keys, values = drawn(1, shared, pool, size, seed=1), drawn(1, shared, pool, size, seed=2)
    return queries, keys, values, torch.tensor(table).T.contiguous().to(device())


def paths_of(table: Any, visible: Any) -> Any:
    return Table(*table, visible, 0).with_paths().paths


KINDS_OF_LAYERS = {
    "full": ("full_attention", 0),
    "sliding": ("sliding_attention", 40),
    "sliding, few": ("sliding_attention", 3),
    "chunked": ("chunked_attention", 48),
}


@pytest.mark.soak(stay=8)
@pytest.mark.parametrize("layer", KINDS_OF_LAYERS)
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_row_attends_to_its_text_and_its_ancestors(
    kernels: Any, name: str, prompt: bool, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And to nothing that was not computed."""
    queries, keys, values, table = case(name)
    rows = queries.shape[2]
    visible = None
    if not prompt:
        drawn_rows = drawn(rows, rows) < 0.4
        of_one = table[0][:, None] == table[0]
        visible = (
            (drawn_rows.tril() | torch.eye(rows, dtype=torch.bool).to(device())) & of_one
        ).long()
    paths = paths_of(table, visible)
    positions = table[1] + (table[2] if visible is None else visible.sum(dim=1) - 1)
    low = first_seen(positions, *KINDS_OF_LAYERS[layer])
    nan = float("nan")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda shape, **how: torch.full(shape, nan, **how))
        patch.setattr(torch, "empty_like", lambda like: torch.full_like(like, nan))
        found = kernels.tree_attention(queries, keys, values, *table, low, paths, ROOM, 0.3)
    wanted = reference(queries, keys, values, table, visible, 0.3, low)
    assert off(found, wanted) < 1e-5


def test_nothing_else_is_read(kernels: Any) -> None:
    """Neither rows of the pool that a row does not see, nor rows that were not drafted."""
    queries, keys, values, table = case("a tree, groups of heads")
    paths = paths_of(table, torch.eye(7, dtype=torch.int64).to(device()))
    seen = *table, torch.zeros_like(table[0]), paths
    wanted = kernels.tree_attention(queries, keys, values, *seen, ROOM, 0.3)
    keys[:, :, 137:], values[:, :, 137:] = 1e4, 1e4
    assert torch.equal(kernels.tree_attention(queries, keys, values, *seen, ROOM, 0.3), wanted)


@pytest.mark.parametrize("span", [0, 35])
@pytest.mark.parametrize("length", [0, 31, 251])
def test_a_row_sums_up_alike_in_a_tree_alone_and_in_a_prompt(
    kernels: Any, length: int, span: int
) -> None:
    """In the order of the text, wherever its ancestors lie; on a GPU to the last bit."""
    rows, path = 9, [0, 2, 5, 8]
    queries, keys, values, _ = case("a tree across two parts")
    size = queries.shape[3]
    text = keys[:, :, : length + len(path)], values[:, :, : length + len(path)]
    visible = torch.eye(rows, dtype=torch.int64)
    for at, row in enumerate(path):
        visible[row, path[:at]] = 1
    pool = [drawn(*keys.shape, seed=5) for _ in text]
    drafts = drawn(1, rows, 6, size, seed=6).transpose(1, 2)
    for held, known in zip(pool, text, strict=True):
        held[:, :, :length] = known[:, :, :length]
        held[:, :, [length + row for row in path]] = known[:, :, length:]
    drafts[:, :, path] = queries[:, :, : len(path)]

    def attended(rows: Any, pool: Any, places: list[int], length: int, visible: Any) -> Any:
        table = torch.tensor([[0, length, place] for place in places]).T.contiguous().to(device())
        paths = None if visible is None else paths_of(table, visible.to(device()))
        positions = table[1] + (table[2] if paths is None else paths[1] - 1)
        low = first_seen(positions, "sliding_attention" if span else "full_attention", span)
        return kernels.tree_attention(rows, *pool, *table, low, paths, ROOM, 0.3)

    in_tree = attended(drafts, pool, [*range(rows)], length, visible)[:, path]
    in_prompt = attended(queries[:, :, : len(path)], text, [*range(len(path))], length, None)
    alone = [
        attended(queries[:, :, [at]], text, [0], length + at, torch.ones(1, 1, dtype=torch.int64))
        for at in range(len(path))
    ]
    for found in (in_tree, torch.cat(alone, dim=1)):
        if device() == "cuda":
            assert torch.equal(found, in_prompt)
        assert off(found, in_prompt.double()) < 1e-6


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize(
    ("rows", "width", "outputs"), [(1, 64, 48), (20, 200, 130), (70, 136, 64), (3, 1100, 48)]
)
def test_a_product_is_that_of_its_weights(
    kernels: Any, rows: int, width: int, outputs: int, bits: int
) -> None:
    states, weight = drawn(1, rows, width).half(), drawn(outputs, width, seed=1).half()
    matrix: Any = weight
    if bits < 16:
        matrix = rounded(weight, bits, device())
        weight = matrix.weight
    for bias in (None, drawn(outputs).half()):
        found = kernels.linear(states, matrix, bias)
        wanted = torch.nn.functional.linear(
            states.double(), weight.double(), None if bias is None else bias.double()
        )
        assert found.shape == wanted.shape and off(found, wanted) < 1e-3


def whole_numbers(bits: int, group: int, zeroed: bool, outputs: int, inputs: int) -> FewBits:
    """A matrix with numbers and zeros from the lowest to the highest, and scales of 1 and 2."""
    draw = torch.Generator().manual_seed(bits + group)
    most, groups = 1 << bits, -(-inputs // group)

    def drawn(*shape: int, of: int = most) -> Any:
        return torch.randint(of, shape, generator=draw, dtype=torch.int16).to(device())

    zeros = drawn(outputs, groups) if zeroed else None
    scales = 1.0 + drawn(outputs, groups, of=2)
    return few_bits(drawn(outputs, inputs).to(torch.uint8), scales, bits, group, zeros)


@pytest.mark.grid
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("inputs", [96, 640])
def test_whole_numbers_are_multiplied_exactly(
    kernels: Any, kind: torch.dtype, bits: int, group: int, zeroed: bool, inputs: int
) -> None:
    """Sums of whole numbers have no rounding errors, in whatever order they are added up. So a row
    has the same bits beside others, as they are computed in other tiles."""
    matrix = whole_numbers(bits, group, zeroed, 70, inputs)
    assert float(matrix.weight.min()) < -(1 << bits - 1) - 1 or not zeroed
    states = torch.randint(-3, 4, (70, inputs), generator=torch.Generator().manual_seed(1))
    states = states.to(device(), kind)
    exact = torch.nn.functional.linear(states.double(), matrix.weight.double()).to(kind)
    assert exact.isfinite().all()
    for rows in (1, 20, 70):
        assert torch.equal(kernels.linear(states[:rows], matrix), exact[:rows])


@pytest.mark.parametrize("zeroed", [False, True])
def test_inputs_are_brought_into_the_order_of_the_numbers(kernels: Any, zeroed: bool) -> None:
    matrix = whole_numbers(4, 64, zeroed, 48, 200)
    mixed = torch.randperm(200, generator=torch.Generator().manual_seed(2)).to(device())
    states = drawn(1, 3, 200).half()
    found = kernels.linear(states, matrix._replace(places=mixed))
    assert torch.equal(found, kernels.linear(states[..., mixed], matrix))
    weight = matrix._replace(places=mixed).weight
    assert torch.equal(weight[:, mixed], matrix.weight)
    assert off(found, torch.nn.functional.linear(states.double(), weight.double())) < 1e-3


def test_norm_gate_and_rotation_are_the_librarys(kernels: Any) -> None:
    states = drawn(1, 5, 96)
    norm = LlamaRMSNorm(96, 1e-5).to(device())
    norm.requires_grad_(False)
    norm.weight.data = drawn(96)
    assert off(kernels.rms_norm(states, norm.weight, 1e-5), norm(states).double()) < 1e-6
    both = drawn(1, 5, 3000)
    gates, ups = both[..., :1500], both[..., 1500:]
    wanted = (torch.nn.functional.silu(gates) * ups).double()
    assert off(kernels.silu_times(gates, ups), wanted) < 1e-6
    queries, keys = (drawn(1, 5, heads, 32).transpose(1, 2) for heads in (4, 2))
    cos, sin = drawn(1, 5, 32, seed=3), drawn(1, 5, 32, seed=4)
    for found, known in zip(
        kernels.rotate(queries, keys, cos, sin),
        apply_rotary_pos_emb(queries, keys, cos, sin),
        strict=True,
    ):
        assert found.shape == known.shape and off(found, known.double()) < 1e-6


PARTS = {
    "llama-gqa": {"LlamaRMSNorm", "LlamaMLP", "modeling_llama"},
    "qwen3": {"Qwen3RMSNorm", "Qwen3MLP", "modeling_qwen3"},
    "mistral-window": {"MistralRMSNorm", "MistralMLP", "modeling_mistral"},
    "gemma2-mixed": {"modeling_gemma2"},
    "gemma3-mixed": {"modeling_gemma3"},
    "llama4-chunks": {"Llama4TextRMSNorm", "Llama4TextMLP"},
    "phi3": {"Phi3RMSNorm", "modeling_phi3"},
    "gpt-neox": set[str](),
    "gpt2": set[str](),
}
"""What the kernels compute in a family beside attention and products: classes, and the files whose
rotary embedding is replaced."""


@pytest.mark.parametrize("family", PARTS)
def test_kernels_take_the_place_of_what_computes_the_same(
    kernels: Any, family: str, tmp_path: Path
) -> None:
    backend = load(save_model(family, tmp_path), device(), context_length=64)
    own = OwnForwards(backend.model, kernels)
    found = {type(module).__name__ for module, _ in own.modules}
    found |= {library.__name__.split(".")[-1] for library, _ in own.rotations}
    assert found == PARTS[family]


SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1}
WHOLE = {
    "qwen3": {**SMALL, "num_hidden_layers": 1},
    "mistral-window": {**SMALL, "num_hidden_layers": 1},
    "gemma3-mixed": SMALL,
    "gemma2-mixed": SMALL,
    "llama4-chunks": SMALL,
    "phi3": {"num_attention_heads": 2, "num_hidden_layers": 1},
}


@pytest.mark.soak(stay=2)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("family", WHOLE)
def test_the_kernels_compute_whole_models(
    kernels: Any, family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for two sequences at once. Triton's interpreter sums up in an order that depends on the
    shape. Where the kernels do not fit, the library computes."""
    gaps, largest, shared = list[float](), captured.largest_gap, captured.shared_gap
    starts, run = list[set[int]](), captured.CapturedForward.run

    def noted(*given: Any) -> float:
        gaps.append(largest(*given))
        return gaps[-1]

    def noted_of_two(*given: Any) -> tuple[float, bool]:
        gaps.append(shared(*given)[0])
        return gaps[-1], True

    def run_noted(forward: Any) -> None:
        starts.append({*forward.given.starts.tolist()})
        run(forward)

    monkeypatch.setattr(captured, "largest_gap", noted)
    monkeypatch.setattr(captured, "shared_gap", noted_of_two)
    monkeypatch.setattr(captured.CapturedForward, "run", run_noted)
    monkeypatch.setattr(kernels, "PART", 32)
    monkeypatch.setattr(captured, "kernels_for", lambda model: kernels)
    monkeypatch.setattr(captured, "same_bits", lambda *of: True)
    monkeypatch.setattr(captured, "TREES", (4,))
    monkeypatch.setattr(captured, "PROMPTS", (6,))
    folder = save_model(family, tmp_path, **WHOLE[family])
    backend = load(folder, device(), context_length=64, dtype=dtype)
    assert captured.capture(backend, answers=2) == ""
    used = family != "gemma2-mixed"  # It caps its logits.
    assert (backend.captured.kernels is not None) == used == backend.at_once
    assert backend.captured.exact == (used and dtype == "float16")
    assert ({0, backend.captured.pool.rows} in starts) == used
    assert gaps[0] > 0 and max(gaps) < {"float16": 0.02, "float32": 1e-5}[dtype]


@pytest.mark.soak(stay=27)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sampler",
    [
        (0.0, 0, 1.0, 0.0), (0.3, 0, 1.0, 0.05), (0.7, 0, 1.0, 0.0), (0.7, 0, 1.0, 1.0),
        (1.5, 0, 1.0, 0.02), (0.6, 20, 0.95, 0.0), (1.2, 0, 0.8, 0.05),
    ],
    ids=str,
)  # fmt: skip
def test_choices_from_a_survey_by_kernels(
    kernels: Any, kind: str, sampler: tuple[float, int, float, float]
) -> None:
    """They are those from whole rows, and no row is read that the library's operations decide."""
    stream = np.random.default_rng(1)
    rows, positions = rows_of(kind, stream, 2_500, 3), [5, 6, 2**20]
    logits = torch.from_numpy(np.stack(rows)).to(device())
    sampling = Sampling(*sampler, seed=int(stream.integers(2**63)))
    numbers = torch.tensor(numbers_of(sampling), device=logits.device)[:, None].expand(2, 3)
    states = torch.tensor(states_of(sampling.seed, positions), device=logits.device)
    found = kernels.survey(logits, kind_of(sampling), numbers, states).cpu().numpy()
    known = survey(logits.cpu(), kind_of(sampling), numbers.cpu(), states.cpu()).numpy()
    assert (found[:, 0] == known[:, 0]).all()
    masses = slice(1, 3) if kind_of(sampling) == "cut" else slice(1, 2)
    assert found[:, masses] == pytest.approx(known[:, masses], rel=1e-5)
    reads = []
    for survey_of_rows in (found, known):
        read: list[int] = []
        scores = DeviceScores(
            logits, partial(noted, rows, read), positions, sampling, survey_of_rows
        )
        choices = [scores.choose(row) for row in range(3)]
        assert choices == [by_law(rows[at], sampling, positions[at]) for at in range(3)]
        reads.append(read)
    assert reads[0] == reads[1]


def noted(rows: list[Floats], read: list[int], row: int) -> Floats:
    read.append(row)
    return rows[row]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_odd_logits_are_left_to_the_host(kernels: Any) -> None:
    logits = torch.zeros(4, 1_500)
    for row, value in enumerate((float("nan"), float("inf"))):
        logits[row, 1_200] = value
    logits[2] = float("-inf")
    numbers = torch.tensor([0.7, float("-inf")])[:, None].expand(2, 4)
    states = torch.tensor(states_of(1, [1, 2, 3, 4]))
    given = (each.to(device()) for each in (numbers, states))
    found = kernels.survey(logits.to(device()), "sampled", *given).cpu()
    assert found[:, 1].isfinite().tolist() == [False, False, False, True]
    tokens = found[:, 4 + NEAR :].contiguous().view(torch.int32)
    assert ((tokens >= 0) & (tokens < 1_500)).all()
