"""The interface that leads to another machine."""

from __future__ import annotations

import socket

from notebook_accel.launching import interfaces


def test_loopback_leads_to_this_machine() -> None:
    for host in ("127.0.0.1", "127.0.0.2", "localhost"):
        address = interfaces.address_towards(host, 29500)
        assert interfaces.interface_of(address) == "lo"


def test_each_address_has_its_interface_and_loopback_comes_last() -> None:
    *others, last = interfaces.own_addresses()
    assert last == "127.0.0.1"
    names = {name for _, name in socket.if_nameindex()}
    for address in others:
        assert interfaces.interface_of(address) in names - {"lo"}
        assert interfaces.address_towards(address, 29500) == address


def test_where_no_way_leads_there_is_no_interface() -> None:
    assert interfaces.interface_of("203.0.113.7") == ""
    assert interfaces.address_towards("no-such-host.invalid", 29500) == "127.0.0.1"
