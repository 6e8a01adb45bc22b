"""Which port to listen on."""

import socket

from app.arguments import FIRST_PORT, PORTS_TRIED
from engine.errors import SettingError


def is_free(host: str, port: int) -> bool:
    """Whether the port can be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def pick_port(host: str, wanted: int | None) -> int:
    """The wanted port, or a free one for None and 0. Raises SettingError when there is none."""
    if wanted:
        if not is_free(host, wanted):
            raise SettingError(
                f"{host}:{wanted} cannot be listened on: the port is in use, or the address is "
                "not this machine's. Choose another with --port, or leave it out."
            )
        return wanted
    if wanted is None:
        for port in range(FIRST_PORT, FIRST_PORT + PORTS_TRIED):
            if is_free(host, port):
                return port
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise SettingError(
            f"The address {host!r} cannot be listened on ({error.strerror or error}). "
            "Give an address of this machine with --host."
        ) from error
