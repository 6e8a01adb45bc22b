"""Whose program a server is, as the list of its models tells, and what follows from that."""

from typing import Any

VLLM, STRATA, LLAMA = "vllm", "strata", "llamacpp"
OFF: dict[str, dict[str, Any]] = {
    VLLM: {"vllm_xargs": {"strata": "off"}},
    STRATA: {"speculative": {"method": "plain"}},
}
"""What has a server answer without drafts. vLLM understands it where our drafter runs in it."""
FULL = (VLLM, STRATA, LLAMA)
"""Servers that know all of our sampler settings, and have defaults of their own for them."""
GOES_ON = (VLLM, STRATA, LLAMA)
"""Servers that go on with an answer that has begun."""
GUARANTEE = (
    "With drafts a server promises its own greedy text at temperature 0, up to rounding, and above "
    "0 the distribution, not the text of a seed."
)
"""What a server that drafts promises."""
