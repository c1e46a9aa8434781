"""Which ranks and machines a rank watches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore

from segapp.assembly.devices import DevicePlan
from segapp.errors import DistributedError
from segapp.parallel import launch
from segapp.parallel.distributed import Ranks
from segapp.parallel.launch import Peers
from segapp.run.files import machine_id
from segapp.session.ranks import joined_ranks
from segapp.training.step.engine import StepEngine
from segapp.training.watchdog import exchange_timeout_s
from tests.support.runs import merged, train


def test_only_other_ranks_of_this_machine_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[tuple[list[int], int]] = []
    monkeypatch.setattr(
        launch, "end_with_peers", lambda pids, code, _before: watched.append((pids, code)) or (lambda: None)
    )
    here, own = machine_id(), os.getpid()

    def watch(rank: int, places: list[tuple[str, int]]) -> None:
        with Peers(rank, [(*place, "node1") for place in places], HashStore, 8, 0).watched(print):
            pass

    for elsewhere in ([], [("elsewhere", own + 1), ("elsewhere", own)]):
        watch(0, [(here, own), *elsewhere])
    assert watched == []
    watch(2, [(here, own + 1), ("elsewhere", own + 2), (here, own), (here, own + 3)])
    assert watched == [([own + 1, own + 3], 8)]


@pytest.mark.parametrize(
    ("hosts", "rank", "names"),
    [
        ("aabcc", 0, [["machine b (rank 2)", "machine c (ranks 3 to 4)"]]),
        ("aabcc", 1, []),
        ("aabcc", 2, [["machine a (ranks 0 to 1)", "machine c (ranks 3 to 4)"]]),
        ("abacba", 0, [["machine b (ranks 1, 4)", "machine c (rank 3)"]]),  # srun --distribution=cyclic
        ("abacba", 3, [["machine a (ranks 0, 2, 5)", "machine b (ranks 1, 4)"]]),
    ],
)
def test_first_rank_of_a_machine_watches_the_other_machines(
    hosts: str, rank: int, names: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Mock()
    monkeypatch.setattr(launch, "PeerWatch", watch)  # which would need the store of a job
    Peers(rank, [(f"id-{host}", 7, host) for host in hosts], HashStore, 8, 30.0)
    assert [sorted(call.args[2].values()) for call in watch.call_args_list] == names
    assert all(call.args[1] not in call.args[2] and call.kwargs["limit_s"] == 30.0 for call in watch.call_args_list)


@pytest.mark.parametrize(("hang_timeout_s", "expected_s"), [(600.0, 660.0), (5.0, 65.0), (0.0, 604800.0)])
def test_exchange_times_out_after_the_watchdog(hang_timeout_s: float, expected_s: float) -> None:
    assert exchange_timeout_s(hang_timeout_s) == expected_s  # a minute for the stacks and the save; 0: a week


def test_timeout_of_exchanges_is_set_once_after_a_step(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    step = StepEngine.step
    monkeypatch.setattr(StepEngine, "step", lambda *args, **named: order.append("step") or step(*args, **named))
    monkeypatch.setattr(Ranks, "tighten_timeout", lambda _: order.append("timeout"))
    assert train(merged(tiny, train={"epochs": 1, "batch_size": 3}), tmp_path / "run") == 0
    assert order == ["step", "timeout", "step", "step"]


def test_wrong_time_limit_is_named(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEGAPP_PEER_TIMEOUT_S", "soon")
    refused = pytest.raises(DistributedError, match="SEGAPP_PEER_TIMEOUT_S='soon' is not a number of seconds")
    with refused, joined_ranks(merged(tiny), DevicePlan("single", (torch.device("cpu"),), "")):
        pass
