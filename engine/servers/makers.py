"""Whose program a server is, as the list of its models tells, and what follows from that."""

from typing import Any

VLLM, STRATA, LLAMA = "vllm", "strata", "llamacpp"
OFF: dict[str, dict[str, Any]] = {
    VLLM: {"vllm_xargs": {"strata": "off"}},
    STRATA: {"speculative": {"method": "plain"}},
}
"""What has a server answer without drafts. vLLM understands it where our drafter runs in it."""
GOES_ON = (VLLM, STRATA, LLAMA)
"""Servers that go on with an answer that has begun."""
GUARANTEE = (
    "At temperature 0 drafts keep the server's own greedy text, up to rounding. Above 0 they keep "
    "the distribution there, not the text of a seed."
)
"""What a server that drafts promises."""
