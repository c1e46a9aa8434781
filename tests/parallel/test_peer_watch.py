"""The watch over other machines, on a store of this process, with times of tenths of a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from segapp.parallel import launch
from segapp.parallel.launch import LIMIT_S, PeerWatch, peer_limit_s
from tests.support.live_runs import wait_for

LIMIT = 0.3


class Machine:
    """A machine whose watch reports what it lost instead of ending the process."""

    def __init__(self, store: Any, number: int, others: list[int]) -> None:
        self.lost: list[tuple[float, str]] = []
        self.began_s = time.monotonic()
        names = {str(other): f"machine {other}" for other in others}
        self.watch = PeerWatch(store, str(number), names, self._note, limit_s=LIMIT)

    def _note(self, reason: str) -> None:
        self.lost.append((time.monotonic() - self.began_s, reason))


class GoneStore:
    """A store that answers until its machine has lost its power."""

    def __init__(self) -> None:
        self._store, self.is_gone, self.is_over = HashStore(), threading.Event(), threading.Event()

    def add(self, key: str, amount: int) -> int:
        if self.is_gone.is_set():
            self.is_over.wait()
        return self._store.add(key, amount)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get(keys)


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    store = HashStore()
    made = [Machine(store, number, [other for other in range(3) if other != number]) for number in range(3)]
    yield made
    for machine in made:
        machine.watch.stop(has_left=True)


def test_silent_machine_is_lost_to_the_others_in_time(machines: list[Machine]) -> None:
    time.sleep(2 * LIMIT)
    assert not any(machine.lost for machine in machines)
    silent_s = time.monotonic()
    machines[1].watch.stop(has_left=False)
    for each in (machines[0], machines[2]):
        at_s, reason = wait_for(lambda each=each: each.lost)[0]
        assert reason == f"machine 1 has not answered for {LIMIT:g} s"
        assert at_s + each.began_s - silent_s > LIMIT * 5 / 6 - 0.05, "it was counted in its last beat"
    assert machines[1].lost == []


def test_machine_that_has_left_is_not_missed(machines: list[Machine]) -> None:
    machines[1].watch.stop(has_left=True)
    time.sleep(3 * LIMIT)
    assert not any(machine.lost for machine in machines)


def test_store_that_never_answers_again_is_lost_if_needed() -> None:
    store, lost = GoneStore(), []
    machine = Machine(store, 0, [])
    time.sleep(2 * LIMIT)
    assert machine.lost == []
    watch = PeerWatch(store, "0", {"1": "machine 1"}, lost.append, limit_s=LIMIT, needs_store=False)
    store.is_gone.set()
    _, reason = wait_for(lambda: machine.lost)[0]
    assert reason == f"the machine of rank 0, whose store all ranks use, has not answered for {LIMIT:g} s"
    time.sleep(LIMIT)
    assert lost == []
    store.is_over.set()
    watch.stop(has_left=True)


def test_time_of_a_stopped_process_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([0.0, 5.0, 10.0, 500.0, 505.0, 515.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s))
    silence, found = launch.Silence(longest_s=10.0), []
    for count in (b"1", b"1", b"1", b"1", b"2"):
        silence.note({"other": count})
        found.append(silence.longer_than(20.0))
    assert found == [[], [], [], ["other"], []]  # 5, 10 instead of 490, 5 s


def test_variable_sets_the_limit_if_it_is_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, limit_s in (("", LIMIT_S), ("0", 0.0), ("2.5", 2.5)):
        monkeypatch.setenv("SEGAPP_PEER_TIMEOUT_S", text)
        assert peer_limit_s() == limit_s
    for text in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv("SEGAPP_PEER_TIMEOUT_S", text)
        with pytest.raises(ValueError, match="is not a number of seconds: use 30, or 0 for no watch"):
            peer_limit_s()
