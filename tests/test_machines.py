"""The machines of the tests: what one loses, the others keep, and what they share is only the disk."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import Machine, Machines, needs_machines

pytestmark = pytest.mark.faults
PORT = 7777
IDENTITY = "from segapp.run.files import machine_id; print(machine_id())"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    needs_machines()
    with Machines(2, tmp_path / "machines", same_name=True) as made:
        yield made


def serve(machine: Machine) -> None:
    """Open a port on a machine."""
    code = f"import socket, time; s = socket.create_server(('', {PORT})); print('up'); time.sleep(60)"
    server = machine.start(sys.executable, "-S", "-c", code, log=machine.folder / "server")
    while "up" not in server.text:
        time.sleep(0.02)


def reach(machine: Machine, other: Machine, timeout_s: float = 20) -> str:
    """Connect to that port from another machine, and say how it went."""
    code = f"""import socket
try:
    socket.create_connection(({other.address!r}, {PORT}), timeout={timeout_s})
    print("reached")
except OSError:
    print("not reached")"""
    return machine.run(sys.executable, "-S", "-c", code)


def test_machines_differ_in_all_but_the_disk(machines: Machines, tmp_path: Path) -> None:
    first, second = machines
    assert first.run("hostname") == second.run("hostname") == "node\n"
    identities = [machine.run(sys.executable, "-c", IDENTITY) for machine in machines]
    assert identities[0] != identities[1]
    assert {identity.partition(".")[0] for identity in identities} == {
        (machine.folder / "boot_id").read_text().strip() for machine in machines
    }
    serve(second)
    assert reach(first, second) == "reached\n"
    second.cut()
    assert reach(first, second, timeout_s=1) == "not reached\n"
    second.heal()
    assert reach(first, second) == "reached\n"
    first.run("touch", "/dev/shm/of-the-first", tmp_path / "of-all")
    assert second.run("ls", "/dev/shm") == ""
    assert (tmp_path / "of-all").exists()
    assert not Path("/dev/shm/of-the-first").exists()


def test_power_cut_ends_all_of_one_machine_alone(machines: Machines) -> None:
    programs = [machine.start("sleep", "60", log=machine.folder / "log", env={"RANK": "3"}) for machine in machines]
    assert [machine.ranks() for machine in machines] == [{3: program.pid} for program in programs]
    boot = (machines[2].folder / "boot_id").read_text()
    machines[2].power_cut()
    assert programs[1].wait(10) == -signal.SIGKILL
    os.kill(programs[0].pid, 0)
    machines[2].boot()
    assert (machines[2].folder / "boot_id").read_text() != boot
    assert machines[2].pids() == []
