"""What there is to say of an answer that came from a server: what its counters tell.

The counters are the server's as a whole. While others ask it, theirs are in them as well.
"""

from collections.abc import Mapping
from typing import Any

from engine.engine import ServerCounted
from engine.runs import from_server
from engine.types import Run


def counted_words(counted: ServerCounted) -> str:
    """What a server drafted and accepted while it answered."""
    if not counted.drafted:
        return "The server as a whole drafted nothing while it answered."
    share = 100 * counted.accepted / counted.drafted
    words = (
        f"The server as a whole accepted {counted.accepted:,} of {counted.drafted:,} drafted "
        f"tokens ({share:.0f} %) while it answered."
    )
    return (
        words if counted.own is None else f"{words} {counted.own:,} were drafted for this answer."
    )


def server_words(run: Run, counted: ServerCounted | None = None) -> str | None:
    """The same of a run, with what was counted by now or what was stored; None for one of this
    machine, "" where the server counts nothing."""
    server = from_server(run)
    if server is None:
        return None
    found = counted or stored(server.get("counted"))
    return "" if found is None else counted_words(found)


def stored(value: Any) -> ServerCounted | None:
    """What was stored of the counters; None where that is damaged."""
    if not isinstance(value, Mapping):
        return None
    drafted, accepted, own = (value.get(name) for name in ("drafted", "accepted", "own"))
    if not isinstance(drafted, int) or not isinstance(accepted, int):
        return None
    return ServerCounted(drafted, accepted, own if isinstance(own, int) else None)
