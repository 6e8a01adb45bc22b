"""What vLLM loads to draft: `speculative_config={"method": "custom_class", "model": ...}`.

vLLM makes one of these in each of its workers. After each step it asks for drafts for all rows of
the batch. Drafts are linear there: each is the best path of the databases' calibrated tree
(engine/drafting/chains.py), as long as it pays beside those of all other rows.

Ranks that share a model have to agree, so nothing in here looks at a clock or at chance: what a
worker decides follows from the rows it was shown. Drafts decide nothing: a fault in drafting costs
speed alone, so it switches drafting off and is told.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.vllm.attached import NAME, OFF, Attached, attached
from app.vllm.followed import Followed, Sequences, Tokens
from app.vllm.learned import Learned
from app.vllm.mends import mend_sampler
from engine.drafting.calibration import Calibration
from engine.drafting.chains import Chain, Room, StepCost, grow_chains
from engine.drafting.databases import Databases
from engine.drafting.hierarchy import Hierarchy
from engine.drafting.model import ModelTier
from engine.errors import StorageError
from engine.types import STATISTICS, TARGET
from storage.statistics import StatisticsTable

LOG = logging.getLogger(__name__)
FLOOR = 0.02
"""The least probability of a path that is drafted: less never pays."""


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
        """Why nothing is drafted; "" while drafting goes on."""
        self.runner: Any = None
        """vLLM's own bookkeeping of requests, once it was shown."""
        self.drafted = dict.fromkeys(self.attached.databases, 0)
        self.accepted = dict.fromkeys(self.attached.databases, 0)
        ranks = vllm_config.parallel_config
        self.learned = Learned(self.attached, ranks.rank == ranks.data_parallel_rank == 0)
        self.table = table_of(self.attached.table)
        self.databases = Databases(
            None,
            ModelTier(self.learned.grams(), self.keep),
            self.table,
            Calibration(self.learned.calibration()),
        )
        self.sequences = Sequences(self.hierarchy, self.over)

    def load_model(self, *_: Any, **__: Any) -> None:
        """vLLM asks for it. All tables are in memory afterwards, as all ranks have to agree."""
        if self.on_processor:
            mend_sampler()
        if self.table is not None:
            self.table.in_memory()
            if self.table.reader is not None:
                self.table.reader.join()

    def hierarchy(self) -> Hierarchy:
        """What drafts for a new sequence: a context of its own, the rest is shared."""
        (made,) = self.databases.next_conversation().hierarchy(self.attached.databases)
        assert isinstance(made, Hierarchy)
        return made

    @property
    def names(self) -> list[str]:
        """The databases that are there."""
        missing = {STATISTICS} if self.table is None else set()
        return [name for name in self.attached.databases if name not in missing]

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: Tokens,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """The drafts for each row: none where its prompt is still being read."""
        if self.problem:
            return [[] for _ in sampled_token_ids]
        try:
            return self.drafts(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception as error:
            # Whatever a damaged database raises, the model can go on without it.
            self.problem = f"{type(error).__name__}: {error}"
            LOG.exception("Drafting failed and is switched off. The texts are not affected.")
            return [[] for _ in sampled_token_ids]

    def drafts(
        self,
        sampled: Sequence[Sequence[int]],
        lengths: NDArray[np.int32],
        rows: Tokens,
    ) -> list[list[int]]:
        """The same, while nothing fails."""
        self.sequences.begin()
        made: list[list[int]] = [[] for _ in sampled]
        asked: list[tuple[int, Followed, Hierarchy]] = []
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
                asked.append((number, sequence, drafter))
        self.sequences.sweep()
        chains = grow_chains(
            [(drafter, each.tokens, self.room(each)) for _, each, drafter in asked], self.cost
        )
        for (number, sequence, _), chain in zip(asked, chains, strict=True):
            sequence.chain, made[number] = chain, chain.tokens
        return made

    def off(self, number: int) -> bool:
        """Whether the request in a row does not want drafts."""
        if self.runner is None:
            return False
        batch = self.runner.input_batch
        request = self.runner.requests.get(batch.req_ids[number])
        sampling = getattr(request, "sampling_params", None)
        return ((getattr(sampling, "extra_args", None) or {}).get(NAME)) == OFF

    def count(self, sequence: Followed, accepted: Chain) -> None:
        """A sequence's chain was verified, and that much of it was kept."""
        drafted = sequence.chain.sources if sequence.chain else ()
        for source in drafted:
            self.drafted[source] += 1
        for source in accepted.sources:
            self.accepted[source] += 1
        sequence.drafted += len(drafted)
        sequence.chain = None

    def room(self, sequence: Followed) -> Room:
        """What may be drafted for a sequence: its text ends where the model's context does."""
        left = self.longest - len(sequence.tokens) - 1
        return Room(max(0, min(self.length, left)), self.vocabulary, FLOOR)

    def over(self, sequence: Followed) -> None:
        """An answer seems to be over: what it said is among the past answers from now on."""
        new, sequence.learned = len(sequence.tokens) - sequence.learned, len(sequence.tokens)
        if new and sequence.drafter is not None:
            sequence.drafter.finish(sequence.tokens, new)

    def keep(self, grams: Iterable[tuple[int, ...]]) -> None:
        """The past answers have learned one more."""
        self.learned.keep(grams, self.databases.calibration)

    # what the server asks

    def show(self, runner: Any) -> dict[str, Any]:
        """What drafts here, and what came of it; from now on requests may say that they want
        none."""
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
        """Who drafted each of the tokens behind a prompt, by what was seen lately."""
        found, known = self.sequences.asked(prompt, tokens)
        told = found.sources_of(len(prompt), known) if found is not None else []
        return {
            "sources": told + [None] * (len(tokens) - len(told)),
            "steps": steps_of(told),
            "drafted": found.drafted if found is not None else 0,
        }


def steps_of(sources: Sequence[str | None]) -> list[int]:
    """How many tokens each forward emitted: the last one of each is the target's own."""
    steps, size = [], 0
    for source in sources:
        size += source is not None
        if source == TARGET:
            steps.append(size)
            size = 0
    return [*steps, size] if size else steps


def table_of(path: Path | None) -> StatisticsTable | None:
    """The statistics; none where the file cannot be used."""
    if path is None:
        return None
    try:
        return StatisticsTable(path)
    except StorageError:
        return None
