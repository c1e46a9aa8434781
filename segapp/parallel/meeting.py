"""The meeting of the processes of a job: the one that hosts the store, its address, and why another one waits.

Addresses follow from the network interfaces, because files of host names often map a machine's own name to 127.0.1.1.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # not in __all__

from segapp.compat.torch import is_tcp_store

_PROBE_S = 3.0
"""Maximum time to connect to an address, and to get an answer there."""
_PAUSE_S = 0.5
"""Seconds between two attempts to connect."""


class MeetingError(RuntimeError):
    """The store of a job cannot be reached."""


def is_loopback(address: str) -> bool:
    """Return True for an address, or the name, of the interface that only this machine reaches."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def interface_addresses() -> dict[str, list[str]]:
    """Return the addresses of each network interface that is up, IPv4 first, without those that need a scope."""
    import psutil  # not needed by those who use `segapp.parallel` in their own programs

    is_up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    found = dict[str, list[str]]()
    for name, entries in sorted(psutil.net_if_addrs().items()):
        own = [each for each in entries if each.family in (socket.AF_INET, socket.AF_INET6) and "%" not in each.address]
        if own and name in is_up:
            found[name] = [each.address for each in sorted(own, key=lambda each: each.family != socket.AF_INET)]
    return found


def resolved(host: str) -> list[str]:
    """Return the addresses of a host name, or an address itself; none if the name is unknown."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(target[0]) for *_, target in found))
    return []


def is_here(host: str) -> bool:
    """Return True if this machine has a host name or address; a loopback address counts only for its own name."""
    if is_loopback(host) or host == socket.gethostname():
        return True
    found = resolved(host)
    if found and all(map(is_loopback, found)):
        return host.partition(".")[0] == socket.gethostname().partition(".")[0]
    own = {address for addresses in interface_addresses().values() for address in addresses}
    return any(address in own and not is_loopback(address) for address in found)


def local_address(host: str, port: int, wanted: str | None = None) -> str:
    """Return the address by which the others reach this machine, in a job that meets at a host.

    `wanted` is an interface, a name or an address. Without it, it is the address from which packets to the host would
    be sent; nothing is sent.

    Raises:
        ValueError: the machine has no such address, or has several and none leads to the host.
    """
    outside = {
        name: others
        for name, addresses in interface_addresses().items()
        # A loopback address reaches no other machine, and is right only in a job that meets at one.
        if (others := [address for address in addresses if is_loopback(address) == is_loopback(host)])
    }
    shown = ", ".join(f"{name} ({addresses[0]})" for name, addresses in outside.items()) or "none is up"
    if wanted is not None:
        own = {address for addresses in outside.values() for address in addresses}
        found = outside.get(wanted) or [address for address in resolved(wanted) if address in own]
        if not found:
            raise ValueError(f"--local-addr {wanted} is no address that other machines can reach: use one of {shown}")
        return found[0]
    sources = _sources(host, port)
    if not sources and not is_here(host):
        raise ValueError(
            f"{host} is no known host name, or no route leads there: use HOST:PORT with a name or address that every "
            "machine can reach"
        )
    if reachable := [source for source in sources if is_loopback(source) == is_loopback(host)]:
        return reachable[0]
    # /etc/hosts of Debian gives a machine's own name 127.0.1.1, so that the route to it says nothing.
    if len(outside) == 1:
        return next(iter(outside.values()))[0]
    raise ValueError(
        f"{host} is {', '.join(sources) or 'unknown'} on this machine, so the others do not know its address: name the "
        f"interface that they reach with --local-addr: {shown}"
    )


def listening_address(host: str, known: str) -> str:
    """Return the address on which this machine hosts the store: one of the host's that it has, else the `known` one."""
    own = {address for addresses in interface_addresses().values() for address in addresses}
    named = (each for each in resolved(host) if each in own and is_loopback(each) == is_loopback(host))
    return next(named, known)


def _sources(host: str, port: int) -> list[str]:
    """Return the addresses from which packets to a host would be sent."""
    sources = []
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, *_, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(target)
                sources.append(str(probe.getsockname()[0]))
    return sources


def probe(host: str, port: int) -> str | None:
    """Return why no store of torch answers at an address; None if one does."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=_PROBE_S) as connection:
            return None if is_tcp_store(connection) else f"what listens at {where} is no rendezvous: use another port"
    except socket.gaierror:
        return f"{host} is no known host name"
    except ConnectionRefusedError:
        return f"nothing listens at {where}"
    except TimeoutError:
        return f"{where} does not answer: its machine is off, or a firewall drops the packets"
    except OSError as error:
        return f"{where} cannot be reached: {error.strerror or error}"


def joined_store(
    host: str,
    port: int,
    *,
    limit_s: float,
    read_s: float,
    own_address: str | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> TCPStore:
    """Return the store that a process hosts, this one if it has the address and the port is free; wait for it.

    Args:
        host: name or address of the machine that hosts it.
        port: its port there.
        limit_s: maximum time to wait.
        read_s: timeout of the store's reads.
        own_address: the address of this machine at which the store is expected; None: another machine hosts it.
        note: called with the reason while it still waits.

    Raises:
        MeetingError: nothing has answered in time; it says why.
    """
    deadline_s = time.monotonic() + limit_s
    host = own_address or host
    while True:
        # Tried each time, because the process that hosts the store may end and leave the port to this one.
        if own_address is not None and (own := hosted_store(own_address, port, read_s)) is not None:
            return own
        problem = probe(host, port)
        if problem is None:
            # The store that answered the probe may end before the connection.
            with contextlib.suppress(DistError, RuntimeError, ValueError, TimeoutError):
                timeout = timedelta(seconds=_PROBE_S)
                store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
                # The short timeout was only for the connection.
                store.set_timeout(timedelta(seconds=read_s))
                return store
        problem = problem or f"{host}:{port} answers, and then ends the connection"
        note(problem)
        if time.monotonic() > deadline_s:
            raise MeetingError(problem)
        time.sleep(_PAUSE_S)


def hosted_store(address: str, port: int, read_s: float) -> TCPStore | None:
    """Return a store that this process hosts at one of its addresses; None if the port is in use there.

    Raises:
        MeetingError: the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise MeetingError(f"nothing can listen at {address}:{port}: {error.strerror}") from error
        listener.listen(2048)
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=read_s),
            master_listen_fd=listener.detach(),
        )
