"""Exactness over gloo processes started with torchrun, and errors at the start."""

import json

import pytest
import torch
from torch import nn

from segapp.parallel import DistributedSetupError, init_from_env, is_launched, launch_local, wrap_ddp
from tests.support import ROOT


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids=["2 ranks", "3 ranks"])
def figures(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "figures.json"
    status = launch_local(
        ["-m", "tests.support.rank_checks", str(path)],
        request.param,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert status == 0
    return json.loads(path.read_text())


def test_ranks_match_one_device_also_without_samples(figures):
    for loss, grads, state in figures["exact, training"] + figures["exact, evaluation"]:
        assert loss <= 1e-12
        assert grads <= 1e-10
        assert state <= 1e-12


def test_mean_of_rank_means_fails_the_exactness_check(figures):
    losses, grads = zip(*figures["mean of means"], strict=True)
    assert max(losses) > 1e-3
    assert min(grads) > 1e-2
    assert float("inf") in losses, "a rank with ignored pixels only makes it NaN"


def test_accumulation_and_ignored_pixels_are_exact(figures):
    assert max(max(row) for row in figures["accumulation"]) <= 1e-10
    assert max(figures["no valid pixel"]) <= 1e-10


@pytest.mark.parametrize("kind", ["wgan-gp", "wgan-lp", "dragan"])
def test_rank_penalties_match_one_device_in_second_order(figures, kind):
    for penalty, grads in figures["penalties"][kind]:
        assert penalty <= 1e-12
        assert grads <= 1e-9


def test_penalty_through_ddp_reducer_is_wrong(figures):
    penalty, grads = figures["penalty through DDP"]
    assert penalty <= 1e-12
    assert grads > 1e-2


def test_ranks_agree_on_the_remaining_values(figures):
    assert max(figures["gradients"]) == 0
    assert figures["differentiated twice"] == [1.0]
    assert figures["any rank"] == [True, False]
    assert "call init_from_env() once, or shutdown()" in figures["set up twice"]
    rank, _, local_rank, _, backend, is_main = figures["info"]
    assert (rank, local_rank, is_main) == (0, 0, True)
    assert backend in ("gloo", "nccl")


FULL = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR not set in the environment: start the program with `torchrun"),
        ({"RANK": None, "LOCAL_RANK": None}, "RANK, LOCAL_RANK not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number"),
        ({"RANK": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
    ],
)
def test_missing_or_wrong_environment_variable_is_named(monkeypatch, change, words):
    for name, value in {**FULL, **change}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(DistributedSetupError, match=words):
        init_from_env()


def test_absent_device_of_a_rank_is_named(monkeypatch):
    for name, value in FULL.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedSetupError, match="cuda:63"):
        init_from_env(device="cuda:63")


def test_failed_rendezvous_error_names_the_address(monkeypatch):
    for name, value in {**FULL, "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("segapp.parallel.distributed.die_with_parent", lambda *_: None)
    with pytest.raises(
        DistributedSetupError, match=r"rank 1 of 2 could not join the others at 127\.0\.0\.1:29999 within"
    ):
        init_from_env(device="cpu", start_timeout_s=1)
    assert not torch.distributed.is_initialized()


def test_is_launched_reads_the_environment():
    assert is_launched(FULL)
    assert not is_launched({})


def test_wrapping_without_process_group_error_names_next_move():
    with pytest.raises(DistributedSetupError, match=r"call init_from_env\(\)"):
        wrap_ddp(nn.Linear(1, 1))
