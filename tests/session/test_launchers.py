"""Tasks of launchers other than torchrun are ranks of one training, or refused: never a training each."""

from __future__ import annotations

import os
from typing import Any

import pytest

import segapp
from segapp.errors import ConfigError, DistributedError
from segapp.parallel.distributed import DistributedSetupError, is_launched, read_rank
from segapp.session.request import adopt_launcher, exit_code_for_launcher
from tests.support.gpu.fake_cuda import FakeCuda, FakeGpu
from tests.support.runs import merged

STEP = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
STEP |= {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[07-08,11]-ib"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def adopted(environ: dict[str, str]) -> tuple[str | None, list[str | None]]:
    environ = dict(environ)
    return adopt_launcher(environ), [environ.get(name) for name in RANK]


def test_tasks_of_srun_become_ranks() -> None:
    environ = dict(STEP)
    assert adopt_launcher(environ) == "srun"
    # The port follows from the numbers of job and step: 20000 + (16 * 4711 + 0) % 30000.
    assert [environ[name] for name in RANK] == ["3", "4", "1", "gpu07-ib", "35376"]
    assert environ["LOCAL_WORLD_SIZE"] == "2"
    assert is_launched(environ)
    assert adopted({**STEP, **MEETING})[1][3:] == ["10.0.0.1", "29500"], "what is set stays"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node2,node1", "node2"), ("a[1-3],b[5,6]", "a1"), ("rack[003]-x,other", "rack003-x")],
)
def test_first_machine_of_slurms_list(hosts: str, first: str) -> None:
    assert adopted({**STEP, "SLURM_STEP_NODELIST": hosts})[1][3] == first


def test_a_rank_alone_on_its_gpu_needs_no_local_rank(fake_cuda: FakeCuda) -> None:
    pod = {"RANK": "1", "WORLD_SIZE": "2", **MEETING}
    fake_cuda.gpus = [FakeGpu()]
    assert read_rank(pod) == (1, 2, 0)


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **MEETING, "TORCHELASTIC_RUN_ID": "none"}
NO_RESTARTS, RESTARTS = {"TORCHELASTIC_MAX_RESTARTS": "0"}, {"TORCHELASTIC_MAX_RESTARTS": "3"}
ALONE = "a training of its own"


def begun(environ: dict[str, str]) -> Any:
    """Return rank and number of ranks."""
    adopt_launcher(environ)
    return read_rank(environ)[:2] if is_launched(environ) else ALONE


@pytest.mark.parametrize(
    ("environ", "outcome", "stopped"),
    [
        ({}, ALONE, 75),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, ALONE, 75),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a"}, ALONE, 75),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, ALONE, 75),
        ({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1", **MEETING}, (0, 1), 75),
        (STEP, (3, 4), 75),
        ({**STEP, "SLURM_PROCID": "0"}, (0, 4), 75),
        ({**STEP, "SLURM_STEP_NODELIST": ""}, "srun started 4 tasks without MASTER_ADDR", None),
        (OPEN_MPI, "mpirun started several tasks.*with segapp launch", None),
        ({"PMIX_RANK": "1"}, "mpirun started several tasks", None),
        ({"PMIX_RANK": "0", "PMI_SIZE": "1"}, ALONE, 75),
        ({**STEP, "PMIX_RANK": "3"}, (3, 4), 75),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}, ALONE, 75),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", **MEETING}, "mpirun started several tasks", None),
        ({"RANK": "0", "WORLD_SIZE": "1", **MEETING}, (0, 1), 75),
        ({"RANK": "0", "WORLD_SIZE": "2", **MEETING}, "LOCAL_RANK not set", None),
        ({**TORCHRUN, **NO_RESTARTS}, (0, 2), 75),
        ({**TORCHRUN, **RESTARTS}, (0, 2), 0),
        ({**TORCHRUN, **RESTARTS, "RANK": "1"}, (1, 2), 0),
        ({**TORCHRUN, **RESTARTS, "SEGAPP_PARENT_PID": "7"}, (0, 2), 75),
    ],
    ids=lambda value: None,
)
def test_each_launcher_gives_one_training_or_a_refusal(
    environ: dict[str, str], outcome: Any, stopped: int | None
) -> None:
    """Several processes are never several trainings."""
    environ = dict(environ)
    if stopped is None:
        with pytest.raises((DistributedError, DistributedSetupError), match=outcome):
            begun(environ)
        return
    before = dict(environ)
    assert begun(environ) == outcome
    assert (environ == before) == (outcome not in ((3, 4), (0, 4))), "only tasks of srun become ranks"
    assert [exit_code_for_launcher(code, environ) for code in (0, 8, 75)] == [0, 8, stopped]


def test_tasks_that_call_train_from_python_are_refused(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process belongs to the caller: its environment stays as it was."""
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with pytest.raises(ConfigError, match="srun started several tasks, each of which would train the whole run"):
        segapp.train(merged(tiny))
    assert dict(os.environ) == before
