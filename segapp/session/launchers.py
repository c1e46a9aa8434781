"""The ranks of launchers that do not set torchrun's variables, such as SLURM's srun. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from segapp.errors import DistributedError
from segapp.training.signals import EXIT_STOPPED_AND_SAVED

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Numbers of tasks of Open MPI, MPICH and Intel MPI."""
_FIRST_HOST = re.compile(r"(?P<start>[^\[,]*)(?:\[(?P<number>\d+)[^\]]*\](?P<end>[^\[,]*))?")


def adopt_launcher(environ: MutableMapping[str, str]) -> str | None:
    """Set torchrun's variables from srun's, in place; return its name, None if this is no task of srun.

    Several tasks without RANK would otherwise each train the whole run. A single task is not changed.

    Raises:
        DistributedError: a variable that the ranks need is missing, or MPI started several tasks.

    Example:
        >>> environ = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
        >>> environ |= {"SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "7"}
        >>> adopt_launcher(environ), environ["RANK"], environ["WORLD_SIZE"], environ["MASTER_ADDR"]
        ('srun', '1', '2', 'gpu03')
    """
    if "RANK" in environ:
        return None
    if any(environ.get(name, "1") != "1" for name in _MPI_SIZES):
        raise DistributedError(
            "mpirun started several tasks, each of which would train the whole run: start one task per machine with "
            "segapp launch, or set parallel.mode=single for separate runs"
        ).see("several-machines")
    num_tasks = _num_tasks(environ)
    if num_tasks < 2:
        return None
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": environ.get("SLURM_LOCALID"),
        **_meeting_point(environ),
    }
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise DistributedError(
            f"srun started {num_tasks} tasks without {', '.join(missing)}: "
            f"each task would train the whole run on its own: set {', '.join(missing)} for all tasks, "
            "start one task per machine with torchrun, or set parallel.mode=single for separate runs"
        ).see("several-machines")
    environ.update({name: value for name, value in found.items() if value})
    if here := re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        environ.setdefault("LOCAL_WORLD_SIZE", here[0])
    return "srun"


def exit_code_for_launcher(code: int, environ: Mapping[str, str]) -> int:
    """Return the exit code of a rank: 0 for a stop if torchrun would start the training again."""
    is_of_torchrun = "RANK" in environ and "SEGAPP_PARENT_PID" not in environ
    is_restarted = is_of_torchrun and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return 0 if code == EXIT_STOPPED_AND_SAVED and is_restarted else code


def _num_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of tasks that srun announces; 0 if it did not start this process, like a batch script."""
    text = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "")
    return int(text) if text.isdecimal() and "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ else 0


def _meeting_point(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return address and port of rank 0, from SLURM's list of machines and job number."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    first = _FIRST_HOST.match(hosts)
    if first and not address:
        address = "".join(first.group("start", "number", "end")) if first["number"] else first["start"]
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    if not port and job.isdecimal() and step.isdecimal():
        port = str(20000 + (16 * int(job) + int(step)) % 30000)
    return {"MASTER_ADDR": address, "MASTER_PORT": port}
