"""Which of this machine's network interfaces leads to another machine, and what addresses this machine has."""

from __future__ import annotations

import contextlib
import importlib
import socket
import struct

__all__ = ["address_towards", "interface_of", "own_addresses"]

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another one; loopback if there is no way. Nothing is sent."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """The interface that has an address, such as ``eth0``; empty if that can't be told."""
    if address.startswith("127.") or address == "::1":
        return "lo"
    return next((name for name, its in _addresses() if its == address), "")


def own_addresses() -> list[str]:
    """This machine's addresses, loopback last."""
    return [address for _, address in sorted(_addresses(), key=lambda pair: pair[0] == "lo")] or ["127.0.0.1"]


def _addresses() -> list[tuple[str, str]]:
    fcntl = importlib.import_module("fcntl")  # not above: this can be imported where only Linux's calls are missing
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found
