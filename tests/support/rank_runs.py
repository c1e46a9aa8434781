"""Real trainings over two ranks, checked from outside; on logical CPU devices, or on GPUs."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from segapp.config import RunConfig, dump_config
from segapp.run.commands import parse_command, send_command
from tests.support.live_runs import assert_answered_once, background, seen, small, wait_for
from tests.support.programs import start
from tests.support.runs import events, final_state, losses, segapp, train

Devices = list[str | int]


def ranks_of(tiny: dict[str, Any], epochs: int, devices: Devices, **parallel: Any) -> RunConfig:
    """Return the config of ranks that share batches of 5; two steps an epoch."""
    return small(tiny, epochs, parallel={"mode": "ddp", "devices": devices, **parallel}, train={"batch_size": 5})


def run_ranks(*arguments: str, cwd: Path, num_ranks: int = 2, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the program as ranks that torchrun's agent would start, forked, and return what rank 0 came to.

    The launcher and its agent have tests of their own; without them no process imports torch.
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as logs:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        shared = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port}
        names = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", **{k: str(v) for k, v in shared.items()}}
        names |= options
        ranks = [
            start(*arguments, cwd=cwd, logs=Path(logs), **names, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(num_ranks)
        ]
        done = [rank.finish() for rank in ranks]
    assert [each.returncode for each in done] == [0] * num_ranks, [each.stderr for each in done]
    return done[0]


def trained_by_ranks(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `segapp train` by `run_ranks`."""
    return run_ranks("train", *arguments, **options)


def check_split_change(tiny: dict[str, Any], folder: Path, devices: Devices, rel: float = 1e-5) -> None:
    """Change the split of two ranks by a command; the losses are those of one device."""
    (folder / "ddp.yaml").write_text(dump_config(ranks_of(tiny, 5, devices, gpu0_bsz=1)))
    run = folder / "run"
    with background(folder / "ddp.yaml", cwd=folder, SEGAPP_FAILPOINTS="train.step=sleep:0.2") as process:
        wait_for(lambda: seen(run, "step"), process=process)
        command_id = send_command(run, parse_command("set gpu0_bsz=0"))
        assert process.wait(240) == 0
    splits = [event["split"] for event in events(run, "step")]
    assert splits[0] == [1, 4]
    assert splits[-1] == [0, 5]
    applied = next(event for event in events(run, "gpu0_bsz") if event["status"] == "applied")
    assert (applied["id"], applied["old"], applied["new"], applied["split"]) == (command_id, 1, 0, [0, 5])
    assert assert_answered_once(run)["set gpu0_bsz=0"]["status"] == "applied"
    start = events(run, "run_start")[0]
    assert (start["split"], start["mode"], start.get("mode_reason")) == ([1, 4], "ddp", None)
    parallel = {"mode": "single", "devices": devices[:1]}
    assert train(small(tiny, 5, parallel=parallel, train={"batch_size": 5}), folder / "alone") == 0
    assert losses(run) == pytest.approx(losses(folder / "alone"), rel=rel)


def check_other_numbers_of_ranks(tiny: dict[str, Any], folder: Path, device: str | int, rel: float = 1e-5) -> None:
    """Resume a run of two ranks with three, with dp and with one device; the losses are those of one device."""
    constant = {"name": "constant", "warmup_steps": 0}  # the other schedules depend on the number of epochs
    single = {"mode": "single", "devices": [device]}
    alone = small(tiny, 4, parallel=single, train={"batch_size": 5}, schedule=constant)
    assert train(alone, folder / "alone") == 0
    parts = [
        {"mode": "ddp", "devices": [device] * 2, "shares": [4, 1]},
        {"mode": "ddp", "devices": [device] * 3},
        {"mode": "dp", "devices": [device] * 2, "gpu0_bsz": 2},
        single,
    ]
    (folder / "run.yaml").write_text(dump_config(alone))
    for epochs, parallel in enumerate(parts, start=1):
        settings = {"mode": "auto", "shares": None, "gpu0_bsz": None, **parallel}
        words = [f"train.epochs={epochs}", *(f"parallel.{key}={json.dumps(value)}" for key, value in settings.items())]
        run = "--resume" if epochs > 1 else "--run"
        done = segapp("train", "--plain", "--config", "run.yaml", run, "run", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
    assert losses(folder / "run") == pytest.approx(losses(folder / "alone"), rel=rel)


def check_restart_after_out_of_memory(tiny: dict[str, Any], folder: Path, devices: Devices) -> None:
    """Rank 1 fails in the fourth step; the second start has fewer passes left than the failpoint counts to."""
    (folder / "ddp.yaml").write_text(dump_config(ranks_of(tiny, 2, devices)))
    points = "train.backward.rank1=4:oom"
    done = segapp("train", "--plain", "--config", "ddp.yaml", "--run", "run", cwd=folder, SEGAPP_FAILPOINTS=points)
    assert done.returncode == 0, done.stderr
    assert "the ranks start again" in done.stdout
    run = folder / "run"
    assert [event["step"] for event in events(run, "step")] == [1, 2, 3, 4]
    assert [event.get("resumed_from_step") for event in events(run, "run_start")] == [None, 2]
    assert events(run, "run_end")[-1]["status"] == "finished"
    assert (run / "reports" / "rank_1_step_3.json").exists()
    settings = final_state(run)["live"]["settings"]
    assert (settings["recompute"], settings["is_recomputed"], settings["num_pieces"]) == ("all", True, 1)
    (change,) = events(run, "settings")
    assert change["reason"] == "out of memory"
    assert [len(names) for names in change["blocks"]] == [change["num_blocks"]] * 2
