"""A run on two machines of one host name, which is watched and stopped from the one that does not have rank 0."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from segapp.config import dump_config
from tests.support.live_runs import seen, small, wait_for
from tests.support.machines import Machines, needs_machines

SEGAPP = (sys.executable, "-m", "segapp")


@pytest.mark.slow
def test_run_is_watched_and_stopped_from_another_machine(tiny: dict[str, Any], tmp_path: Path) -> None:
    needs_machines()
    config = small(tiny, 10_000, parallel={"mode": "ddp", "devices": ["cpu"]})
    (tmp_path / "tiny.yaml").write_text(dump_config(config))
    run = tmp_path / "run"
    with Machines(2, tmp_path / "machines", same_name=True) as machines:
        options = ("--nnodes", "2", "--rdzv-endpoint", f"{machines[1].address}:29500")
        train = ("--", "train", "--config", "tiny.yaml", "--run", "run")
        launchers = [
            machine.start(*SEGAPP, "launch", *options, *train, log=tmp_path / f"log{machine.number}", cwd=tmp_path)
            for machine in machines
        ]

        def are_stepping() -> bool:
            assert all(launcher.returncode is None for launcher in launchers), launchers[0].text + launchers[1].text
            return len(seen(run, "step")) > 3 and bool(seen(run, "memory"))

        wait_for(are_stepping)
        status = json.loads(machines[2].run("env", "-C", tmp_path, *SEGAPP, "status", "run", "--json"))
        assert status["state"] in ("live", "busy")
        names = [device["machine"] for device in status["devices"]]
        assert names == ["node", "node (2)"]
        answer = machines[2].run("env", "-C", tmp_path, *SEGAPP, "ctl", "run", "stop", "--wait")
        assert answer.splitlines()[-1].startswith("applied")
        assert [launcher.wait(60) for launcher in launchers] == [75, 75]
        status = json.loads(machines[2].run("env", "-C", tmp_path, *SEGAPP, "status", "run", "--json"))
        assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert seen(run, "run_end")[-1]["stopped_by"] == "command"
