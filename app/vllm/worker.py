"""What a worker of vLLM answers beside its own: `worker_extension_cls`, asked by collective_rpc.

vLLM calls these between two steps, in every worker. Those that do not draft answer None.
"""

from collections.abc import Sequence
from typing import Any


class Extension:
    """Becomes a base of vLLM's worker class, whose `model_runner` it uses."""

    model_runner: Any

    def strata_figures(self) -> dict[str, Any] | None:
        """What drafts here, and what came of it."""
        drafter: Any = getattr(self.model_runner, "drafter", None)
        return drafter.show(self.model_runner) if hasattr(drafter, "show") else None

    def strata_sources(self, prompt: Sequence[int], tokens: Sequence[int]) -> Any:
        """Who drafted each of the tokens behind a prompt."""
        drafter: Any = getattr(self.model_runner, "drafter", None)
        return drafter.sources(prompt, tokens) if hasattr(drafter, "sources") else None
