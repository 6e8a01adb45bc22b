"""Forwards that a GPU repeats without being told each operation again.

A forward of a large model in torch is over a thousand operations. Starting them takes the processor
three times as long as the GPU needs to compute them. A CUDA graph records them once and repeats
them with one call. A recording has a fixed number of rows, fixed addresses, and no decision on the
host: keys and values lie in a pool (pool.py), and all that differs between two steps is in one
buffer of whole numbers, which is copied before a forward. The survey of the logits
(device_scores.py) is recorded too, so that one small copy back is the only wait of a step.

Trees are padded to one of the sizes in TREES, prompts to one in PROMPTS. Where there is no CUDA,
the same code computes without a recording; tests use this. Whether a model computes correctly in
this way is tried at load, against its forwards outside (`capture`). Whatever does not fit is left
to those.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, count, pairwise, takewhile
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.backends.base import LogitScores, Wanted
from engine.backends.caches import TREE_ROWS
from engine.backends.device_scores import (
    KEPT,
    KINDS,
    DeviceScores,
    Kind,
    kind_of,
    numbers_of,
    states_of,
    survey,
)
from engine.backends.fused import OwnForwards, Products, fused, join, kernels_for
from engine.backends.pool import Pool, PoolCache, Table, first_seen
from engine.backends.transformers import TransformersBackend, ancestors, row_of
from engine.errors import first_line
from engine.heads.eagle3 import tapped
from engine.settings import Sampling
from engine.tree import Tree

TREES = (1, 4, 16, 32, 64)
"""Rows of captured trees, roots included."""
PROMPTS = (128, 256, 384, 512)
"""Rows of captured parts of prompts; shorter parts are computed as trees."""
REACH = 512
"""The least rows of the pool that the library's attention reads; it reads a power of two times as
many, because its shapes are fixed."""
WARM = 2
"""Forwards before a recording, in which libraries prepare what they need."""
SHARES = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.04}
"""How far a row of logits of a captured forward may be from that of another, as a share of its
norm. In a model of 32 layers rounding gave a third of it, and a wrong mask or position four times
as much."""
SLICE = 256
"""Tokens of a prompt that are read between two steps of other answers: a GPU reads them in the time
of two steps."""
TRIED = 512
"""The most tokens that are read for the trial; longer texts repeat their keys and values."""
GREEDY = Sampling(temperature=0.0)


class Inputs(NamedTuple):
    """Everything that a captured forward is told: parts of one buffer of whole numbers, on the host
    and on the device.

    Each has an entry per row. `numbers` are those of `device_scores.numbers_of`, as the bits of
    float32, in two lines; `states` are the noise states. For the others, see Table.
    """

    numbers: Any
    tokens: Any
    positions: Any
    starts: Any
    lengths: Any
    places: Any
    states: Any
    visible: Any

    @classmethod
    def of(cls, buffer: Any, rows: int) -> "Inputs":
        square = None if rows in PROMPTS else buffer[8 * rows :].reshape(rows, rows)
        lines = buffer[: 8 * rows].reshape(8, rows)
        one, two, three, four, five, six = lines[2:]
        return cls(lines[:2], one, two, three, four, five, six, square)

    @staticmethod
    def size(rows: int) -> int:
        return 8 * rows + (0 if rows in PROMPTS else rows * rows)


class Recorder:
    """Records computations as CUDA graphs, which share memory; without CUDA it records nothing, and
    they are computed each time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.memory = torch.cuda.graph_pool_handle()
            # One stream for all recordings: each stream has its own workspaces.
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def recorded(self, compute: Callable[[], None]) -> Callable[[], None]:
        """A function that does what `compute` does, and leaves its results where it left them.
        Also without CUDA, `compute` runs before it is returned."""
        if not self.cuda:
            compute()
            return compute
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for _ in range(WARM):
                compute()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may ask for the free memory meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, self.memory, self.stream, capture_error_mode=mode):
            compute()
        return graph.replay

    def close(self) -> None:
        """Free what only the forwards before the recordings needed."""
        if self.cuda:
            torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()


class Recorded:
    """A computation whose inputs lie in one buffer of `size` integers. It is recorded once per
    reach: the number of rows whose keys and values it reads."""

    def __init__(self, size: int, recorder: Recorder, reaches: Sequence[int]) -> None:
        self.recorder, self.reaches = recorder, reaches
        self.host = torch.zeros(size, dtype=torch.int64, pin_memory=recorder.cuda)
        self.buffer = torch.zeros(size, dtype=torch.int64, device=recorder.device)
        self.forwards: dict[int, Callable[[], None]] = {}

    def record_all(self, compute: Callable[[int], None]) -> None:
        self.buffer.copy_(self.host)
        for reach in reversed(self.reaches):
            self.forwards[reach] = self.recorder.recorded(partial(compute, reach))

    def repeat(self, rows: int) -> None:
        """Repeat the recording with the inputs in `host`, over at least `rows` rows of keys and
        values."""
        self.buffer.copy_(self.host, non_blocking=True)
        rows = min(rows, self.reaches[-1])
        self.forwards[next(reach for reach in self.reaches if reach >= rows)]()


def reaches_to(rows: int) -> list[int]:
    """The reaches up to `rows`: REACH, doubled as long as it is smaller, and `rows` itself."""
    return [*takewhile(lambda reach: reach < rows, (REACH << n for n in count())), rows]


def survey_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """The survey by kernels if they can be compiled here, else by the library's operations."""
    if device.type != "cuda" or find_spec("triton") is None:
        return survey
    kernels: Any = import_module("engine.backends.kernels")
    numbers, states = torch.ones(2, device=device), torch.zeros(1, dtype=torch.long, device=device)
    try:
        kernels.survey(numbers[None], "sampled", numbers[:, None], states)
    except Exception:
        # Triton compiles with what the system has, and raises many types where that is not enough.
        return survey
    found: Callable[..., torch.Tensor] = kernels.survey
    return found


def copied_into(before: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """`found`, copied to the memory of `before`; new memory if that is empty. What reads the result
    of a recording therefore finds each one at the same address."""
    return (before if before.numel() else torch.empty_like(found)).copy_(found)


class CapturedForward(Recorded):
    """The forward over `rows` rows. After `run`, `logits` are those of a tree, shape (rows,
    vocabulary), and `taps` the outputs of the modules that a head reads."""

    def __init__(self, rows: int, model: "CapturedModel") -> None:
        super().__init__(Inputs.size(rows), model.recorder, model.reaches)
        self.rows, self.model, self.prompt = rows, model, rows in PROMPTS
        self.given, self.inputs = Inputs.of(self.host.numpy(), rows), Inputs.of(self.buffer, rows)
        self.order, self.itself = np.arange(rows), np.eye(rows, dtype=np.int64)
        self.end = 0
        """The end of the rows of the pool that are read."""
        self.logits = torch.empty(0)
        self.taps: list[torch.Tensor] = []
        self.surveys: dict[Kind, torch.Tensor] = {}
        self.surveying: dict[Kind, Callable[[], None]] = {}

    def record(self, length: int) -> None:
        """Record the forward for every reach, and the surveys. This writes rows after `length`
        cached tokens, or earlier ones if there is no room for all."""
        self.fill(0, [0], [0], 0, min(length, self.model.pool.rows - self.rows))
        self.sample(0, Sampling(), [1])
        self.record_all(self.compute)
        for kind in () if self.prompt else self.model.kinds:
            self.surveying[kind] = self.recorder.recorded(partial(self.look, kind))

    def fill(
        self,
        first: int,
        tokens: Sequence[int],
        depths: Sequence[int],
        start: int,
        length: int,
        visible: NDArray[np.bool_] | None = None,
    ) -> None:
        """Write down some tokens, from row `first` on, after `length` cached ones of a sequence
        that begins at `start` in the pool; row i of these sees the rows of these in `visible[i]`,
        and without `visible` those up to its own. All rows behind them are padding of the same
        sequence."""
        given, last = self.given, first + len(tokens)
        given.tokens[first:last] = tokens
        given.positions[first:] = length
        given.positions[first:last] += np.asarray(depths)
        given.starts[first:], given.lengths[first:] = start, length
        given.places[first:] = self.order[: self.rows - first]
        self.end = max(self.end if first else 0, start + length + self.rows - first)
        if not self.prompt:
            # A row of padding sees itself: a row that saw nothing would not be a number.
            given.visible[first:] = self.itself[first:]
            square = np.tri(len(tokens), dtype=bool) if visible is None else visible
            given.visible[first:last, first:last] = square

    def sample(self, first: int, sampling: Sampling, positions: Sequence[int]) -> None:
        """Write down the sampler of the rows from `first` on, for tokens at some positions."""
        numbers = np.array(numbers_of(sampling), dtype=np.float32)
        self.given.numbers[:, first:] = numbers.view(np.int32)[:, None]
        self.given.states[first : first + len(positions)] = states_of(sampling.seed, positions)

    def run(self) -> None:
        """Compute what was written down."""
        self.repeat(self.end)

    def survey(self, kind: Kind) -> NDArray[np.float32]:
        """The survey of the logits, with which the host has waited for the forward."""
        self.surveying[kind]()
        found: NDArray[np.float32] = self.surveys[kind].to("cpu", copy=True).numpy()
        return found

    def compute(self, reach: int) -> None:
        given, model, found = self.inputs, self.model, list[torch.Tensor]()
        table = Table(given.starts, given.lengths, given.places, given.visible, reach)
        table = model.for_kernels(table, given.positions) if model.kernels else table
        with model.computing(table) as forward, tapped(model.taps, found):
            output = forward(
                input_ids=given.tokens[None],
                position_ids=given.positions[None],
                attention_mask=None if model.kernels else model.masks(table, given.positions),
                use_cache=True,
                logits_to_keep=1 if self.prompt else 0,
            )
        self.logits = copied_into(self.logits, output.logits[0])
        before = self.taps or [torch.empty(0)] * len(found)
        self.taps = [copied_into(*each) for each in zip(before, found, strict=True)]

    def look(self, kind: Kind) -> None:
        numbers = self.inputs.numbers.int().view(torch.float32)
        found = self.model.survey(self.logits, kind, numbers, self.inputs.states)
        self.surveys[kind] = copied_into(self.surveys.get(kind, torch.empty(0)), found)


class CapturedModel:
    """All captured forwards of a model, which its sequences share; `sequence` is one of those that
    compute.

    Without `kernels` the library's attention reads a part of the pool, and there is a recording for
    each such part. The pool has places for so many `answers`. `exact` is that of BackendInfo,
    `at_once` that of Batching.
    """

    chunk: int | None = None
    slice_size = SLICE
    exact = False

    def __init__(
        self, backend: TransformersBackend, kernels: ModuleType | None, answers: int
    ) -> None:
        assert backend.kinds is not None
        self.sequence, self.model, self.layers = backend, backend.model, backend.kinds
        rows = backend.info.context_length + TREE_ROWS
        self.joined = join(self.model, self.model.device)
        self.kernels = kernels
        self.own = None if kernels is None else OwnForwards(self.model, kernels)
        if kernels is not None and answers > 1:
            # A place begins with a part of the text.
            rows = -rows // (unit := kernels.part_of(rows)) * -unit
        self.pool, self.at_once = Pool(len(self.layers), rows, answers), answers > 1
        self.products = Products(self.kernels, self.model.dtype)
        self.taps = backend.head.weights.taps if backend.head else ()
        self.recorder = Recorder(self.model.device)
        self.kinds = KINDS if backend.info.vocabulary_size > KEPT else KINDS[:1]
        self.survey = survey_on(self.model.device)
        whole = rows * answers
        self.reaches = reaches_to(whole) if self.kernels is None else [whole]
        # A longer text than the context is never padded to a size.
        sizes = pairwise((0, *TREES, *PROMPTS))
        usable = [rows for less, rows in sizes if less < backend.info.context_length]
        self.forwards = {rows: CapturedForward(rows, self) for rows in usable}
        self.most = max(rows for rows in usable if rows in TREES)
        self.nodes: int | None = self.most - 1

    def fresh_cache(self) -> PoolCache:
        return PoolCache(self.layers, self.pool)

    def record(self) -> None:
        """Record all forwards, the largest first, whose memory the others use again. The pool must
        hold some rows of `sequence`."""
        for rows in sorted(self.forwards, reverse=True):
            self.forwards[rows].record(len(self.sequence.cached))
        self.recorder.close()

    @contextmanager
    def computing(self, table: Table) -> Iterator[Callable[..., Any]]:
        """The model, to be called with the rows of a table."""
        cache: PoolCache = self.sequence.cache
        own = fused(self.model, self.joined, self.products, self.own)
        with cache.computing(verifying=True), own:
            self.pool.table = table
            try:
                yield partial(self.model, **{self.sequence.cache_name: cache})
            finally:
                self.pool.table = None

    def masks(
        self, table: Table, positions: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        spans, dtype = self.sequence.spans, self.model.dtype
        kinds = self.sequence.layer_kinds
        found = {kind: table.mask(dtype, positions, kind, spans.get(kind, 0)) for kind in kinds}
        return found if len(found) > 1 else found[kinds[0]]

    def for_kernels(self, table: Table, positions: torch.Tensor) -> Table:
        """The table with what the kernels read, for rows at some positions."""
        config, sequence = self.model.config.get_text_config(), self.sequence
        # A model that does not name its layers has layers of one kind.
        kinds = getattr(config, "layer_types", None) or sequence.layer_kinds * len(self.layers)
        spans = sequence.spans
        lows = {kind: first_seen(positions, kind, spans.get(kind, 0)) for kind in set(kinds)}
        return table.with_paths()._replace(lows=[lows[kind] for kind in kinds])

    def forward(self, rows: int) -> CapturedForward | None:
        """The smallest forward over so many rows; None if all are smaller."""
        fitting = next((size for size in self.forwards if size >= rows), None)
        return None if fitting is None else self.forwards[fitting]

    def score_all(self, wanted: Sequence[Wanted[TransformersBackend]]) -> list[LogitScores | None]:
        found: list[LogitScores | None] = [None] * len(wanted)
        for group in self.groups(wanted):
            scores = self.together([wanted[number] for number in group], len(wanted) > 1)
            for number, each in zip(group, scores, strict=True):
                found[number] = each
        return found

    def groups(self, wanted: Sequence[Wanted[TransformersBackend]]) -> Iterator[list[int]]:
        """The numbers of the trees that are computed together, those first whose sequences have a
        place; without those that have more rows than any captured forward."""
        group, total = list[int](), 0
        away = [each.sequence.cache.start is None for each in wanted]
        for number in sorted(range(len(wanted)), key=away.__getitem__):
            rows = len(wanted[number].tree) + 1
            if rows > self.most or self.pool.states is None:
                continue
            total += rows
            if group and (total > self.most or len(group) == self.pool.places):
                yield group
                group, total = [], rows
            group.append(number)
        if group:
            yield group

    def together(
        self, wanted: Sequence[Wanted[TransformersBackend]], copied: bool
    ) -> Iterator[DeviceScores]:
        """The scores of some trees by one forward. They end with the next forward unless they are
        `copied`."""
        counts = [len(each.tree) + 1 for each in wanted]
        spans = [
            slice(end - rows, end) for rows, end in zip(counts, accumulate(counts), strict=True)
        ]
        forward = self.forward(spans[-1].stop)
        assert forward is not None
        self.pool.hold([each.sequence.cache for each in wanted])
        for (sequence, tree, sampling), span in zip(wanted, spans, strict=True):
            cache = sequence.cache
            cache.written = cache.length + len(tree) + 1
            place = cache.start, cache.length
            forward.fill(span.start, tree.tokens, tree.depths, *place, ancestors(tree.parents))
            forward.sample(span.start, sampling, sequence.positions(tree))
        self.sequence = wanted[0].sequence
        forward.run()
        kinds = [self.kind(each.sampling) for each in wanted]
        surveys = {kind: forward.survey(kind) for kind in dict.fromkeys(kinds)}
        for (sequence, tree, sampling), span, kind in zip(wanted, spans, kinds, strict=True):
            self.tell(sequence, forward, span, copied)
            logits = forward.logits[span].clone() if copied else forward.logits[span]
            positions, row = sequence.positions(tree), partial(row_of, logits)
            yield DeviceScores(logits, row, positions, sampling, surveys[kind][span])

    def kind(self, sampling: Sampling) -> Kind:
        """The kind of survey for a sampler; without surveys for it, the first one, unused."""
        kind = kind_of(sampling)
        return kind if kind in self.kinds else self.kinds[0]

    def read(self, sequence: TransformersBackend, tokens: Sequence[int]) -> bool:
        """Compute a part of a prompt; returns False if it is longer than any captured forward."""
        forward = self.forward(len(tokens))
        if forward is None or self.pool.states is None:
            return False
        self.sequence, cache = sequence, sequence.cache
        start = cache.hold(len(tokens))
        forward.fill(0, tokens, range(len(tokens)), start, cache.length)
        forward.run()
        self.tell(sequence, forward, slice(None), False)
        self.recorder.wait()
        return True

    def tell(
        self, sequence: TransformersBackend, forward: CapturedForward, rows: slice, copied: bool
    ) -> None:
        """Let the head of a sequence have what the forward found in some of its rows."""
        head = sequence.head
        if head is not None:
            found = [tap[:, rows] for tap in forward.taps] if head.on else []
            head.found[:] = [tap.clone() for tap in found] if copied else found


# Whether a model can be captured.


@torch.inference_mode()
def capture(backend: TransformersBackend, answers: int = 1) -> str:
    """Let a checked model compute in captured forwards, of so many answers together if kernels
    compute its attention, if these give what its others give. Returns the reason if not. Leaves the
    cache empty."""
    problem = obstacle(backend)
    if problem:
        return problem
    kernels = kernels_for(backend.model)
    # The library's attention would read the places of all answers for each.
    ways = [(kernels, answers), (kernels, 1)] if kernels else []
    for way in dict.fromkeys([*ways, (None, 1)]):
        problem = tried(backend, *way)
        if not problem:
            break
    return problem


def tried(backend: TransformersBackend, kernels: ModuleType | None, answers: int) -> str:
    """Let a model compute in captured forwards; returns what is wrong with them, after which it
    does not, and "" for nothing."""
    problem = problem_with(backend, kernels, answers)
    if problem:
        backend.captured = None
    backend.close()
    gc.collect()  # frees a failed pool and its recordings, which refer to each other
    return problem


def problem_with(backend: TransformersBackend, kernels: ModuleType | None, answers: int) -> str:
    try:
        backend.captured = model = CapturedModel(backend, kernels, answers)
        backend.close()
        read_some(backend, min(TRIED, backend.info.context_length // 2))
        model.record()
        found = largest_gap(backend, model)
        model.exact = model.products.kernels is not None and same_bits(backend, model)
        if answers > 1:
            gap, same = shared_gap(backend, model)
            found, model.exact = float(np.max([gap, found])), model.exact and same
        assert model.pool.states is not None
        model.pool.states.zero_()
    except Exception as error:
        # Much cannot be recorded, and the libraries raise many types then.
        return f"its forwards fail ({first_line(error).rstrip('.')})"
    allowed = SHARES[backend.model.dtype]
    return "" if found <= allowed else f"its logits are off by {found:.2g} of their norm"


def obstacle(backend: TransformersBackend) -> str:
    """Why a model is not tried, "" if it is."""
    info, model = backend.info, backend.model
    if not info.can_tree or info.leaves is not None:
        return "it does not verify trees"
    if backend.rotary.switches:
        return "its rotary factors depend on the length of the text"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or any(hasattr(each, "_hf_hook") for each in model.modules()):
        return "its layers lie on several devices"
    return ""


def read_some(backend: TransformersBackend, length: int) -> None:
    size = backend.info.vocabulary_size
    text = [(7 + 13 * at) % size for at in range(length)]
    backend.forward(text, range(length), logits=1)
    backend.cached = text
    backend.cache.keep(range(length), length)


def trials(
    backend: TransformersBackend, model: CapturedModel, draw: Random
) -> Iterator[tuple[int, int, int]]:
    """Every size of captured forwards, rows of it that are used, and a length: of an empty pool, of
    one in its middle and at its end. All other rows of the pool and of the buffers hold something
    else. The pool must hold some rows."""
    states, cached = model.pool.states, len(backend.cached)
    assert states is not None
    context, known = backend.info.context_length, states[:, :, :cached].clone()
    sizes = sorted(model.forwards)
    for less, rows in zip([0, *sizes], sizes, strict=False):
        used = draw.randint(less + 1, min(rows, context))
        last = max(0, context - 2 * used - 2)
        for length in sorted({0, last // 2, last}):
            states.normal_(std=float(known.float().std()))
            for at in range(0, length, cached):
                states[:, :, at : min(at + cached, length)] = known[:, :, : length - at]
            given = model.forwards[rows].given
            given.tokens[:] = draw.choices(range(backend.info.vocabulary_size), k=rows)
            yield rows, used, length


def largest_gap(backend: TransformersBackend, model: CapturedModel) -> float:
    """The largest difference between captured forwards and others, as a share of the norm of a row
    of logits; nan if any are not numbers."""
    draw, gaps = Random(0), []
    for rows, used, length in trials(backend, model, draw):
        trees = [random_tree(draw, backend.info.vocabulary_size, used) for _ in range(2)]
        outside, inside = (
            logits_of(backend, other, length, trees, prompt=rows in PROMPTS)
            for other in (None, model)
        )
        gaps.append((outside - inside).norm(dim=1) / outside.norm(dim=1))
    return float(torch.cat(gaps).max())


def same_bits(backend: TransformersBackend, model: CapturedModel) -> bool:
    """Whether logits have the same bits when their tokens are computed one by one, in a tree, and
    after a prompt that was read at once or in trees of one branch."""
    draw, size, most = Random(1), backend.info.vocabulary_size, TREES[-1]
    for rows, used, length in trials(backend, model, draw):
        claim(backend, length)
        if rows in PROMPTS:
            tokens, last = draw.choices(range(size), k=used), [Tree(draw.randrange(size))]
            read(backend, model, tokens)
            found = followed(backend, model, last)
            claim(backend, length)
            chains = [chain(tokens[at : at + most]) for at in range(0, used, most)]
            other = followed(backend, model, chains + last)[-1:]
        else:
            tree = random_tree(draw, size, used)
            path = path_to(tree, len(tree))
            found = followed(backend, model, [tree])
            claim(backend, length)
            other = followed(backend, model, [Tree(tree.tokens[row]) for row in path])
        if not torch.equal(found, other):
            return False
    return True


def followed(
    backend: TransformersBackend, model: CapturedModel, trees: Sequence[Tree]
) -> torch.Tensor:
    """The logits along the paths to the last rows of some trees, each after the path of the one
    before."""
    paths = [path_to(tree, len(tree)) for tree in trees]
    found = in_turn(backend, model, trees)
    return torch.cat([logits[path] for logits, path in zip(found, paths, strict=True)])


def shared_gap(backend: TransformersBackend, model: CapturedModel) -> tuple[float, bool]:
    """The largest difference between forwards that two sequences share, in two places of the pool,
    and those of each alone in the first place, as a share of the norm of a row of logits; and
    whether all bits are the same."""
    draw, size, other = Random(2), backend.info.vocabulary_size, backend.open()
    gaps, same = [torch.zeros(1)], True
    for rows, used, length in trials(backend, model, draw):
        if rows == 1 or rows in PROMPTS:
            continue
        halves = -(-used // 2), max(1, used // 2)
        wanted = [
            Wanted(sequence, random_tree(draw, size, each), GREEDY)
            for sequence, each in zip((backend, other), halves, strict=True)
        ]
        alone = list[torch.Tensor]()
        for sequence, tree, _ in wanted[::-1]:
            claim(sequence, length // 2 if sequence is other else length)
            alone.insert(0, scored(sequence, tree, model))
            if sequence is other:
                sequence.cache.leave()
        for logits, scores in zip(alone, model.score_all(wanted), strict=True):
            assert isinstance(scores, DeviceScores)
            found = scores.logits.float()
            gaps.append((found - logits).norm(dim=1).cpu() / logits.norm(dim=1).cpu())
            same = same and torch.equal(found, logits)
        other.cache.drop()
    other.close()
    return float(torch.cat(gaps).max()), same


def claim(backend: TransformersBackend, length: int) -> None:
    """Let a sequence hold the first rows of the first free place."""
    backend.cache.drop()
    backend.cache.hold(length)
    backend.cached, backend.cache.length = [0] * length, length


def keep(backend: TransformersBackend, kept: Sequence[int], rows: int) -> None:
    """Accept some of the last rows."""
    backend.cache.keep(kept, rows)
    backend.cached += [0] * len(kept)


def path_to(tree: Tree, row: int) -> list[int]:
    """The rows from the root to a row."""
    path = [row]
    while row:
        row = tree.parents[row]
        path.insert(0, row)
    return path


def chain(tokens: Sequence[int]) -> Tree:
    tree = Tree(tokens[0])
    for row, token in enumerate(tokens[1:]):
        tree.add(row, token, "")
    return tree


def random_tree(draw: Random, vocabulary: int, rows: int) -> Tree:
    tree = Tree(draw.randrange(vocabulary))
    while len(tree) + 1 < rows:
        parent = draw.randrange(max(0, len(tree) - 6), len(tree) + 1)
        tree.add(parent, draw.randrange(vocabulary), "")
    return tree


def logits_of(
    backend: TransformersBackend,
    model: CapturedModel | None,
    length: int,
    trees: Sequence[Tree],
    prompt: bool,
) -> torch.Tensor:
    """The logits of two trees after `length` tokens, shape (rows of both, vocabulary), by a
    captured model or outside of it. With `prompt`, the tokens of the first are a prompt instead,
    which has no logits, and the second is its root alone."""
    claim(backend, length)
    if prompt:
        read(backend, model, trees[0].tokens)
        trees = [Tree(trees[1].tokens[0])]
    return torch.cat(in_turn(backend, model, trees))


def read(backend: TransformersBackend, model: CapturedModel | None, tokens: Sequence[int]) -> None:
    if model is None or not model.read(backend, tokens):
        backend.forward(tokens, range(len(tokens)), logits=1)
    keep(backend, range(len(tokens)), len(tokens))


def in_turn(
    backend: TransformersBackend, model: CapturedModel | None, trees: Sequence[Tree]
) -> list[torch.Tensor]:
    """The logits of all rows of some trees, each after the path to the last row of the one
    before."""
    found = []
    for tree in trees:
        found.append(scored(backend, tree, model))
        keep(backend, path_to(tree, len(tree)), len(tree) + 1)
    return found


def scored(backend: TransformersBackend, tree: Tree, model: CapturedModel | None) -> torch.Tensor:
    if model is None:
        visible = ancestors(tree.parents)
        logits = backend.forward(tree.tokens, tree.depths, visible, verifying=True)
    else:
        scores = model.score_all([Wanted(backend, tree, GREEDY)])[0]
        assert isinstance(scores, DeviceScores)
        logits = scores.logits
    return logits.float().clone()
