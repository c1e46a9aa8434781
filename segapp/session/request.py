"""The request of a `segapp train` command: config, run folder, new or resumed, and its launcher. No torch here."""

import contextlib
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from segapp.config import RunConfig, changed_keys, check_code, kept_on_resume, load_config, load_runnable, named_config
from segapp.config.load import find_config, parse_overrides
from segapp.config.trust import TRACKERS, name_trackers, named_code
from segapp.custom.sources import Sources, kept_sources
from segapp.errors import ConfigError, DistributedError, SegappError
from segapp.run.checkpoints import CheckpointFolder
from segapp.run.folder import RunFolder, find_run, is_run, is_sweep, run_folders, run_of_file
from segapp.run.words import printable, say
from segapp.training.signals import EXIT_STOPPED_AND_SAVED

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Numbers of tasks of Open MPI, MPICH and Intel MPI."""
_FIRST_HOST = re.compile(r"(?P<start>[^\[,]*)(?:\[(?P<number>\d+)[^\]]*\](?P<end>[^\[,]*))?")


@dataclass(frozen=True)
class ImageLimit:
    """Limits of a training on only a few images."""

    num_batches: int
    num_val: int


@dataclass(frozen=True)
class TrainRequest:
    """A training to start or to resume."""

    config: RunConfig
    folder: RunFolder | None = None
    """An existing run to resume; None: a new one."""
    run: Path | None = None
    """Folder of a new run; None: runs/NAME."""
    checkpoint: Path | None = None
    """The file to resume from; None: the folder's newest intact checkpoint."""
    note: str | None = None
    limit: ImageLimit | None = None
    copies: Mapping[str, Sources] = field(default_factory=dict)
    """The run's copies of components whose files are missing here, by name."""

    @property
    def is_new(self) -> bool:
        """True if no checkpoint is there to continue from."""
        return self.checkpoint is None and (
            self.folder is None or CheckpointFolder(self.folder.checkpoints).is_untouched()
        )


def plan_request(config: str | None, overrides: Sequence[str], run: Path | None, resume: str | None) -> TrainRequest:
    """Decide what to train and where; nothing is changed on disk.

    `resume` is auto, a run, or a checkpoint file; None: a new training. The config may be left out if a run is resumed.

    Raises:
        ConfigError: the config, or the run or file, does not exist or is invalid.
    """
    request = _plan(config, overrides, run, resume)
    name_trackers(request.config.log, [key for key in TRACKERS if ("log", key) in parse_overrides(overrides)])
    # A config in a run folder may be another user's, whose trackers this user has not chosen.
    if config is not None and not any(is_run(each) or is_sweep(each) for each in find_config(config).resolve().parents):
        name_trackers(load_config(config, overrides).log)
    distill = request.config.distill
    if distill is not None and not Path(distill.teacher).is_file():
        try:
            find_run(distill.teacher)
        except SegappError as error:
            raise error.reworded(
                f"distill.teacher: {error}; train the teacher first, or name its checkpoint file"
            ) from None
    return request


def _plan(config: str | None, overrides: Sequence[str], run: Path | None, resume: str | None) -> TrainRequest:
    if resume is None or resume == "auto":
        folder = None
        if resume == "auto":
            name = None if run is not None or config is None else load_config(config, overrides).name
            folder = _newest_run(name, run)
        if folder is None:
            note = None if resume is None else "nothing to resume yet: a new training begins"
            return TrainRequest(load_runnable(named_config(config, overrides), overrides), run=run, note=note)
        return _resumed(folder, config, overrides, note=f"resuming {printable(str(folder.path))}")
    path = Path(resume)
    if not path.is_file():
        folder = find_run(resume)
        if run is not None and run.resolve() != folder.path.resolve():
            raise ConfigError(
                f"--run {run}: --resume {resume} continues in its own folder: leave --run out, or give one of its "
                "checkpoints to --resume for another run",
                path=run,
            )
        return _resumed(folder, config, overrides)
    # A checkpoint continues its own run; with --run it begins another one.
    owner = run_of_file(path.resolve())
    if run is None and owner is not None and path.resolve().is_relative_to(owner.checkpoints):
        return _resumed(owner, config, overrides, checkpoint=path)
    return TrainRequest(load_runnable(named_config(config, overrides), overrides), run=run, checkpoint=path)


def _resumed(
    folder: RunFolder,
    config: str | None,
    overrides: Sequence[str],
    *,
    checkpoint: Path | None = None,
    note: str | None = None,
) -> TrainRequest:
    """Return the request to resume a run, with a note about keys that change or that keep the run's values."""
    folder.check()
    own_file = folder.config_yaml.resolve()
    if config is not None and not own_file.is_file():
        return TrainRequest(load_runnable(config, overrides), folder, checkpoint=checkpoint, note=note)
    before, own = load_config(own_file), load_config(own_file, overrides)
    notes = [note] if note is not None else []
    notes += [f"changed: {line}" for line in changed_keys(before, own)]
    if config is not None:
        own, kept = kept_on_resume(own, load_runnable(config, overrides))
        notes += [f"kept from the run: {line}; name the key on the command line to change it" for line in kept]
    copies = _copies_of_missing(own, folder)
    check_code(own, folder.config_yaml, overrides, copies=copies)
    return TrainRequest(own, folder, checkpoint=checkpoint, note="\n".join(notes) or None, copies=copies)


def _copies_of_missing(config: RunConfig, folder: RunFolder) -> dict[str, Sources]:
    """Return the run's copies of the components that are not found here; ConfigError if there are several versions."""
    copies = dict[str, Sources]()
    for key, code in named_code(config).items():
        kept = [*kept_sources(code.name, folder.parts).values()] if code.source is None else []
        if len(kept) > 1:
            folders = ", ".join(printable(str(sources.root)) for sources in kept)
            raise ConfigError(
                f"{key} = {code.name} is not found here, and the run has {len(kept)} versions of it ({folders}): copy "
                "the files of one of them to the current folder",
                key=key,
                value=code.name,
            )
        if kept:
            copies[code.name] = kept[0]
    return copies


def _newest_run(name: str | None, run: Path | None) -> RunFolder | None:
    """Return the newest run with a name (or with any) that has a checkpoint; otherwise the newest that has begun."""
    if run is not None:
        return RunFolder(run) if is_run(run) else None
    runs = [each for each in run_folders() if _has_name(each, name) and not each.is_failed_start()]
    saved = (each for each in runs if not CheckpointFolder(each.checkpoints).is_untouched())
    return next(saved, runs[0] if runs else None)


def _has_name(folder: RunFolder, name: str | None) -> bool:
    if name is None or folder.path.name == name:
        return True
    # The second run of a name is NAME-2, and another config may be named so.
    with contextlib.suppress(ConfigError):
        return bool(re.fullmatch(re.escape(name) + r"-\d+", folder.path.name)) and (
            load_config(folder.config_yaml).name == name
        )
    return False


def open_folder(request: TrainRequest) -> RunFolder:
    """Return the folder of a training; a new one is created, with a number if another run has its name."""
    if request.folder is not None:
        return request.folder
    folder, name = RunFolder.create(request.config.name, path=request.run), request.config.name
    if request.run is None and folder.path.name != name:
        taken, number = folder.path.with_name(name), folder.path.name
        say(printable(f"{taken} is another run: this one is {number}; to continue the other, add --resume"))
    return folder


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
    # Some launchers set a rank and no number of tasks, so one task cannot be distinguished from several.
    is_sizeless = "PMIX_RANK" in environ and not _num_tasks(environ) and not any(map(environ.get, _MPI_SIZES))
    if is_sizeless or any(environ.get(name, "1") != "1" for name in _MPI_SIZES):
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
        # Steps of jobs on the same machine need different ports, and every task must compute the same one.
        port = str(20000 + (16 * int(job) + int(step)) % 30000)
    return {"MASTER_ADDR": address, "MASTER_PORT": port}
