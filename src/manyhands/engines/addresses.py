"""Which of a host's addresses, and so which interface, the workers of the other hosts can reach.

A host has several (loopback, a cluster's fast network, a container's bridge), and its name may lead
to any of them, or to none: Debian gives a host's own name 127.0.1.1. So names are not asked. Each
worker says which addresses it has; that of the main worker is chosen from these, and a worker
listens on the address from which it would send to it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence

from manyhands.errors import ConfigError

LOOPBACK = "127.0.0.1"
# Whoever has set one of them has chosen an interface himself.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
Networks = list[str]  # `10.0.0.1/24`: an address, and the network that it is in


def address_towards(host: str) -> str:
    """This host's own address on the route to another; "" where there is none."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)  # UDP: nothing is sent, the kernel only looks up the route
                return str(probe.getsockname()[0]).partition("%")[0]
    return ""


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return not address


def interface_of(address: str) -> str:
    """The name of the interface that has that address; "" where none has."""
    import psutil  # slow to import, and for several hosts only

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return ""


def choose_interface(address: str) -> str:
    """Let gloo and nccl use the interface with that address, unless somebody has chosen one.

    WHY: they bind what this host's own name resolves to. On Debian that is 127.0.1.1, where nobody
    else can reach them; elsewhere it may resolve to nothing at all.
    """
    chosen = next((os.environ[name] for name in INTERFACES if os.environ.get(name)), "")
    name = chosen or interface_of(address)
    for variable in INTERFACES if name else ():
        os.environ.setdefault(variable, name)
    return name


def own_networks() -> Networks:
    """This host's addresses, but for the loopback; those of interfaces that are up."""
    import psutil  # slow to import, and of use with several hosts only

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses if name in up else []:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                found.append(f"{one.address}/{one.netmask or '255.255.255.255'}")
    return sorted(found)


def main_address(hosts: Sequence[str], networks: Sequence[Networks], given: str = "") -> str:
    """Where the others reach the main worker, by what each worker has said; on all the same.

    Args:
        hosts: the name of each worker's host, by rank.
        networks: `own_networks()` of each, by rank.
        given: the address of the rendezvous, if there is one: it wins if it is the main worker's.
    """
    first = [ipaddress.ip_interface(text) for text in networks[0]]
    others = {host: nets for host, nets in zip(hosts, networks, strict=True) if host != hosts[0]}
    theirs = {h: [ipaddress.ip_interface(t).ip for t in nets] for h, nets in others.items()}
    # A container's bridge has the same address on every host, and leads nowhere.
    everywhere = {ip for ips in theirs.values() for ip in ips}
    mine = [own for own in first if own.ip not in everywhere]
    for own in mine:
        if str(own.ip) == given:
            return given
    for own in mine:
        if all(any(ip in own.network for ip in ips) for ips in theirs.values()):
            return str(own.ip)
    if not mine:
        raise ConfigError(
            f"the workers are on {len(set(hosts))} hosts, and that of the main worker, {hosts[0]}, "
            "has no address that the others could reach; is its network up?"
        )
    return str(mine[0].ip)
