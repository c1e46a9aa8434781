"""Where the processes of a job meet: addresses follow from the interfaces, and whoever waits knows why."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest

from segapp.parallel import distributed, meeting
from segapp.parallel.meeting import (
    MeetingError,
    hosted_store,
    is_here,
    joined_store,
    listening_address,
    local_address,
    probe,
)

INTERFACES = {
    "docker0": ["172.17.0.1", "172.17.0.2"],
    "eth0": ["192.168.77.1", "fd00:77::1"],
    "lo": ["127.0.0.1", "::1"],
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this machine `node1`, with interfaces, names and routes: `machine(hosts, routes, interfaces)`."""

    def make(
        hosts: Mapping[str, Sequence[str]],
        routes: Mapping[str, Sequence[str]],
        interfaces: Mapping[str, list[str]] = INTERFACES,
    ) -> None:
        def found(host: str, port: None, **_: Any) -> list[Any]:  # each address once for each protocol
            addresses = hosts.get(host, [host] if "." in host else [])
            return [(0, 0, protocol, "", (address, port)) for address in addresses for protocol in (6, 17)]

        monkeypatch.setattr(meeting, "interface_addresses", lambda: dict(interfaces))
        monkeypatch.setattr(socket, "getaddrinfo", found)
        monkeypatch.setattr(meeting, "_sources", lambda host, _port: list(routes.get(host, [])))
        monkeypatch.setattr(socket, "gethostname", lambda: "node1")

    return make


@pytest.mark.parametrize(
    ("host", "addresses", "is_own"),
    [
        ("node1", ["192.168.77.1"], True),
        ("node1", ["127.0.1.1"], True),  # as Debian writes it
        ("node1", [], True),  # its own name does not resolve
        ("node1.cluster", ["127.0.1.1"], True),
        ("node2", ["127.0.1.1"], False),  # a wrong file of host names
        ("node2", ["192.168.77.2"], False),
        ("head", ["192.168.77.1"], True),  # another name for this machine
        ("head", ["10.0.0.9", "fd00:77::1"], True),
        ("head", ["127.0.1.1", "192.168.77.1"], True),
        ("head", ["127.0.1.1", "10.0.0.9"], False),
        ("192.168.77.1", ["192.168.77.1"], True),
        ("fd00:77::1", ["fd00:77::1"], True),
        ("192.168.77.2", ["192.168.77.2"], False),
        ("localhost", ["127.0.0.1"], True),
        ("nowhere", [], False),
    ],
)
def test_host_is_the_machine_with_its_name_or_address(
    machine: Any, host: str, addresses: list[str], is_own: bool
) -> None:
    machine({host: addresses}, {})
    assert is_here(host) is is_own


ONE = {"eth0": INTERFACES["eth0"], "lo": INTERFACES["lo"]}


@pytest.mark.parametrize(
    ("host", "hosts", "routes", "interfaces", "wanted", "address"),
    [
        (
            "node2",
            {"node2": ["192.168.77.2"]},
            {"node2": ["127.0.0.1", "192.168.77.1", "172.17.0.1"]},
            INTERFACES,
            None,
            "192.168.77.1",
        ),
        ("node1", {"node1": ["127.0.1.1"]}, {"node1": ["127.0.0.1"]}, ONE, None, "192.168.77.1"),
        ("node1", {}, {}, ONE, None, "192.168.77.1"),
        ("fd00:77::2", {}, {"fd00:77::2": ["fd00:77::1"]}, ONE, None, "fd00:77::1"),
        ("127.0.0.1", {}, {"127.0.0.1": ["127.0.0.1"]}, INTERFACES, None, "127.0.0.1"),
        ("node2", {}, {"node2": ["192.168.77.1"]}, INTERFACES, "docker0", "172.17.0.1"),
        (
            "node2",
            {"n1-ib": ["10.9.9.9", "172.17.0.2"]},
            {"node2": ["192.168.77.1"]},
            INTERFACES,
            "n1-ib",
            "172.17.0.2",
        ),
        ("node2", {}, {"node2": ["192.168.77.1"]}, INTERFACES, "192.168.77.1", "192.168.77.1"),
    ],
)
def test_others_get_an_address_that_leads_here(
    machine: Any, host: str, hosts: Any, routes: Any, interfaces: Any, wanted: str | None, address: str
) -> None:
    machine(hosts, routes, interfaces)
    assert local_address(host, 29500, wanted) == address


@pytest.mark.parametrize(
    ("host", "hosts", "routes", "wanted", "problem"),
    [
        (
            "node1",
            {"node1": ["127.0.1.1"]},
            {"node1": ["127.0.0.1", "127.0.1.1"]},
            None,
            r"node1 is 127\.0\.0\.1, 127\.0\.1\.1 on this machine, so the others do not know its address: name the "
            r"interface that they reach with --local-addr: docker0 \(172\.17\.0\.1\), eth0 \(192\.168\.77\.1\)",
        ),
        (
            "nowhere",
            {},
            {},
            None,
            "nowhere is no known host name, or no route leads there: use HOST:PORT with a name or",
        ),
        *(
            ("node2", {}, {"node2": ["192.168.77.1"]}, wanted, f"{wanted} is no address that other machines can reach")
            for wanted in ("lo", "127.0.0.1", "10.9.9.9")
        ),
    ],
)
def test_address_that_others_cannot_use_is_refused(
    machine: Any, host: str, hosts: Any, routes: Any, wanted: str | None, problem: str
) -> None:
    machine(hosts, routes)
    with pytest.raises(ValueError, match=problem):
        local_address(host, 29500, wanted)


def test_store_listens_at_the_address_of_the_endpoint(machine: Any) -> None:
    machine({"node1": ["127.0.1.1"], "mgmt": ["10.9.9.9", "172.17.0.2", "192.168.77.1"]}, {})
    assert listening_address("mgmt", "192.168.77.1") == "172.17.0.2", "not at the address of --local-addr"
    assert listening_address("node1", "192.168.77.1") == "192.168.77.1"
    assert distributed._address_to_listen_on("service", 1) == "0.0.0.0", "a name of no machine"


@pytest.fixture
def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def deaf(free_port: int) -> Iterator[int]:
    """A port on which a program accepts connections and never answers."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", free_port))
        listener.listen()
        yield free_port


@pytest.fixture
def is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets probes wait for tenths of a second."""
    monkeypatch.setattr(meeting, "_PROBE_S", 0.3)
    monkeypatch.setattr(meeting, "_PAUSE_S", 0.05)


@pytest.mark.usefixtures("is_quick")
def test_probe_says_what_is_at_an_address(deaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe("127.0.0.1", deaf) == f"what listens at 127.0.0.1:{deaf} is no rendezvous: use another port"
    assert probe("no-such-host.invalid", 1) == "no-such-host.invalid is no known host name"
    assert probe("127.0.0.1", 1) == "nothing listens at 127.0.0.1:1"

    def silent(*_: Any, **__: Any) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    assert probe("fd00::1", 7) == "[fd00::1]:7 does not answer: its machine is off, or a firewall drops the packets"


@pytest.mark.usefixtures("is_quick")
def test_store_is_reached_once_it_is_there(free_port: int) -> None:
    notes, found = list[str](), list[Any]()

    def join() -> None:
        found.append(joined_store("127.0.0.1", free_port, limit_s=20, read_s=7, note=notes.append))

    joining = threading.Thread(target=join)
    joining.start()
    while len(notes) < 3:
        time.sleep(0.01)
    store = hosted_store("127.0.0.1", free_port, 7)
    joining.join(20)
    assert store is not None
    store.set("key", "value")
    assert found[0].get("key") == b"value"
    assert set(notes) == {f"nothing listens at 127.0.0.1:{free_port}"}
    assert (found[0].timeout, store.timeout) == (timedelta(seconds=7), timedelta(seconds=7))
    assert hosted_store("127.0.0.1", free_port, 7) is None, "another process hosts it"
    with pytest.raises(MeetingError, match=r"nothing can listen at 10\.255\.255\.9:\d+: "):
        hosted_store("10.255.255.9", free_port, 7)


@pytest.mark.usefixtures("is_quick")
def test_host_takes_its_port_once_it_is_free(deaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher that held it before may need some seconds to end."""
    notes = list[str]()
    monkeypatch.setattr(meeting, "hosted_store", lambda *_: "hosted here" if len(notes) == 3 else None)
    store: Any = joined_store("node1", deaf, limit_s=20, read_s=7, own_address="127.0.0.1", note=notes.append)
    assert (store, len(notes)) == ("hosted here", 3)
    assert "what listens at 127.0.0.1" in notes[0]


def test_store_that_never_comes_is_named(free_port: int) -> None:
    with pytest.raises(MeetingError, match=f"nothing listens at 127.0.0.1:{free_port}"):
        joined_store("127.0.0.1", free_port, limit_s=0.0, read_s=7)


def test_ranks_that_are_missing_are_named(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    notes = list[str]()

    def join(rank: int) -> None:
        with contextlib.suppress(MeetingError):
            distributed._meeting_store(rank, 4, 3, print)

    ranks = [threading.Thread(target=join, args=(rank,)) for rank in (1, 3)]
    for thread in ranks:
        thread.start()
    with pytest.raises(MeetingError, match="missing: rank 2") as failed:
        distributed._meeting_store(0, 4, 3, notes.append)
    for thread in ranks:
        thread.join()
    assert notes[-1] == "missing: rank 2"
    del failed  # until here, its traceback keeps the store of rank 0, which the other ranks ask


def test_port_of_rank_0_that_is_taken_is_named(deaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(deaf))
    with pytest.raises(MeetingError, match=rf"port {deaf} is in use at 127\.0\.0\.1: set MASTER_PORT to a free one"):
        distributed._meeting_store(0, 2, 3, print)
