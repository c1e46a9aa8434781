"""A training as a process: its new or resumed run folder, its ranks, its end, and any failure as a segapp error."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import platform
import re
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import PosixPath
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist

from segapp import __version__
from segapp.accelerator import GPUS, gpu_of
from segapp.assembly.data import data_timeout_s
from segapp.assembly.devices import DevicePlan, keep_freed_memory, numerics, plan_devices
from segapp.assembly.own_parts import changed_parts, check_parts, plain_loss_note
from segapp.assembly.pairs import build_scheme, count_images, split_names
from segapp.checkpoint.training_state import (
    LoadedCheckpoint,
    check_resumable,
    checkpoint_to_resume,
    load_on_every_rank,
    saved_state,
)
from segapp.compat.torch import group_store
from segapp.config import LiveSettings, RunConfig, dump_config, part_names
from segapp.config.trust import unnamed_trackers
from segapp.custom.loading import raised_at
from segapp.custom.names import keep_parts
from segapp.datasets.cache import CacheFiles
from segapp.errors import (
    CheckpointError,
    CommandError,
    ConfigError,
    DataError,
    DistributedError,
    OutOfMemoryError,
    RunError,
    SegappError,
    StorageError,
)
from segapp.losses import PlainLossError
from segapp.memory.counters import DeviceInfo, DeviceMemoryTracker, MemorySampler, device_info_of, limit_gpus
from segapp.memory.oom import is_out_of_memory
from segapp.memory.plan import SavedMemoryPlan
from segapp.models.inspection import ONE_VALUE
from segapp.parallel import ReplicaError
from segapp.parallel.distributed import (
    DistributedSetupError,
    Ranks,
    abandon,
    init_from_env,
    is_launched,
    shutdown,
)
from segapp.parallel.launch import Peers, launch_local, peer_limit_s
from segapp.planning.auto import is_planned, resolve_auto
from segapp.run.checkpoints import CheckpointFolder
from segapp.run.commands import CheckpointCommand, send_command
from segapp.run.events import Alert, EventListener, EventLog, EventWriter, Oom, RunEnd
from segapp.run.files import OTHERS_WRITE, append_to_run, machine_id, machine_names, storage_errors_of
from segapp.run.folder import RunFolder, remove_failed_start
from segapp.run.words import announce, first_line, printable
from segapp.session.request import TrainRequest, taken_note
from segapp.session.start_checks import changed_length_note
from segapp.session.trainer import build_trainer
from segapp.training.commands import PendingRequests
from segapp.training.console import PlainReporter
from segapp.training.context import Places, RunContext, shares_note, topology_event
from segapp.training.recovery import MemoryFallbacks, fallbacks_after, report_reverted_split
from segapp.training.signals import EXIT_STOPPED_AND_SAVED, StoppedBy, StopRequest, StopSignals
from segapp.training.trackers import make_trackers
from segapp.training.trainer import Trainer
from segapp.training.watchdog import Watchdog, exchange_timeout_s, rank_words

_DEVICES = "SEGAPP_RANK_DEVICES"
"""The devices of the ranks and the reasons for them, as JSON, from the process that starts the ranks."""

_FOLDER_S = 60.0

logger = logging.getLogger("segapp")


def run_session(
    request: TrainRequest,
    arguments: Sequence[str] = (),
    *,
    listener: EventListener | None = None,
    signals: StopSignals | None = None,
) -> int:
    """Train as requested, and return the exit code.

    Args:
        request: what to train and where.
        arguments: the words of the command line, for the ranks that `parallel.mode: ddp` starts.
        listener: gets the events instead of the console.
        signals: stop requests; None: from the signals to the process, which only the main thread can handle.

    Raises:
        SegappError: the training could not begin, or failed.
    """
    train = request.config.train
    switches = numerics(deterministic=train.deterministic, tf32=train.tf32)
    with signals or StopSignals() as signals, switches:
        devices = _devices_of_launcher() or plan_devices(request.config)
        if devices.mode == "ddp" and not is_launched():
            _check_before_start(request)
            return _launch_ranks(request, devices, arguments, signals)
        with _joined_ranks(request.config, devices) as (ranks, own_devices, peers):
            try:
                _check_before_start(request)
                with _opened_folder(request, own_devices, ranks) as folder:
                    return _run_in(folder, request, own_devices, ranks, peers, signals, listener)
            except (ConfigError, DataError, CheckpointError) as error:
                if ranks.is_main:
                    raise
                return error.exit_code  # every rank finds the same problem; rank 0 reports it


def _check_before_start(request: TrainRequest) -> None:
    """Refuse unusable custom components and impossible resumes before the run folder is changed."""
    config = request.config
    check_parts(config)
    saved = saved_state(request.folder, request.checkpoint)
    if saved is None:
        return
    path, state = saved
    config = _with_saved(config, state, "precision") if config.train.precision == "auto" else config
    if not config.train.batch_size or config.train.effective_batch_size is not None:
        config = _with_saved(config, state, "batch_size", "accumulate")
    is_limited = request.limit is not None  # with a limit, the number of images does not matter
    num_train = state["data"]["num_train"] if is_limited else count_images(config.data, split_names(config.data)[0])
    check_resumable(state, path, config, num_train, list(build_scheme(config.data).names))


def _with_saved(config: RunConfig, state: Mapping[str, Any], *keys: str) -> RunConfig:
    """Return the config with the values that a checkpoint's training had for automatic keys of `train`."""
    try:
        kept = {key: state["config"]["train"][key] for key in keys}
    except (KeyError, TypeError):  # `check_resumable` says what is wrong with the checkpoint
        return config
    return config.model_copy(update={"train": config.train.model_copy(update=kept)})


def _launch_ranks(request: TrainRequest, devices: DevicePlan, arguments: Sequence[str], signals: StopSignals) -> int:
    """Start the ranks and wait for them; a checkpoint request to this process is put into their inbox.

    A rank that runs out of memory ends all ranks, because the others wait for it in an exchange. If it has reported a
    way to continue with less memory, they start again and continue from the last checkpoint in that way.
    """
    print(f"{devices.description}, one rank each", flush=True)
    folder = request.folder or RunFolder.create(request.config.name, path=request.run)
    if note := taken_note(request, folder):
        print(note, flush=True)

    def ask_for_checkpoint() -> None:
        with contextlib.suppress(CommandError):
            send_command(folder.path, CheckpointCommand(), "SIGUSR1")

    signals.forward_checkpoint_requests(ask_for_checkpoint)
    command = ["-m", "segapp", *arguments, *([] if request.folder is not None else ["--run", str(folder.path)])]
    words = {"devices": [str(each) for each in devices.devices], "reasons": [devices.reason, devices.mode_reason]}
    environment = {_DEVICES: json.dumps(words)}
    while True:
        adopted = fallbacks_after(folder, 0)
        code = launch_local(command, len(devices.devices), env=environment)
        if code in (ConfigError.exit_code, DataError.exit_code, CheckpointError.exit_code) and folder.is_made:
            remove_failed_start(folder)
        if code != OutOfMemoryError.exit_code or signals.is_set or fallbacks_after(folder, 0) == adopted:
            return code
        if request.checkpoint is not None and CheckpointFolder(folder.checkpoints).is_untouched():
            return code  # it began from another run's checkpoint, and has none of its own to continue from
        print("the ranks start again, in the way that was reported", flush=True)
        debug = [word for word in arguments if word == "--debug"]
        command = ["-m", "segapp", *debug, "train", "--plain", "--resume", str(folder.path)]


def _devices_of_launcher() -> DevicePlan | None:
    """Return the devices that `_launch_ranks` chose; None in a process that it did not start."""
    if _DEVICES not in os.environ or not is_launched():
        return None
    words = json.loads(os.environ[_DEVICES])
    return DevicePlan("ddp", tuple(torch.device(name) for name in words["devices"]), *words["reasons"])


def _find_peers(ranks: Ranks) -> Peers:
    """Return the ranks of this job; every rank must call it.

    Raises:
        DistributedError: the variable with the time limit is no number.
    """
    try:
        limit_s = peer_limit_s()
    except ValueError as error:
        raise DistributedError(str(error)) from None
    places = ranks.gather((machine_id(), os.getpid(), socket.gethostname()))
    return Peers(ranks.rank, places, group_store, DistributedError.exit_code, limit_s)


@contextlib.contextmanager
def _joined_ranks(config: RunConfig, devices: DevicePlan) -> Iterator[tuple[Ranks, DevicePlan, Peers]]:
    """Join the ranks that were started; yield them, the device of this process, and the watch over the others.

    In modes other than ddp, this process is the only one.
    """
    if devices.mode != "ddp":
        yield Ranks(), devices, _find_peers(Ranks())
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    is_chosen = config.parallel.devices != "auto" or _DEVICES in os.environ
    own = devices.devices[local_rank % len(devices.devices)] if is_chosen else None
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or len(devices.devices))
    is_shared = is_chosen and ranks_here > len(set(devices.devices))
    try:
        info = init_from_env(device=own, backend="gloo" if is_shared else None)  # NCCL refuses a GPU with two ranks
    except DistributedSetupError as error:
        raise DistributedError(str(error)) from None
    try:
        timeout_s = exchange_timeout_s(config.train.hang_timeout_s)
        ranks = Ranks(info, step_timeout_s=timeout_s, classes=exchanged_classes())
        reason = f"rank {info.rank} of {info.world_size}"
        with contextlib.closing(_find_peers(ranks)) as peers:
            yield ranks, DevicePlan("ddp", (info.device,), reason, devices.mode_reason), peers
    except BaseException as error:
        if info.backend == "nccl" and isinstance(error, Exception):
            abandon(as_segapp_error(error).exit_code)
        else:
            shutdown()
        raise
    shutdown()


def exchanged_classes() -> list[type]:
    """Return the classes of the values that ranks send to each other, besides tensors and plain values."""
    errors: list[type] = [SegappError]
    for error in errors:  # the list grows while it is read
        errors += error.__subclasses__()
    of_memory = (SavedMemoryPlan, DeviceInfo, MemoryFallbacks, Oom)
    return [*errors, *of_memory, LoadedCheckpoint, LiveSettings, PendingRequests, CacheFiles, PosixPath]


@contextlib.contextmanager
def _opened_folder(request: TrainRequest, devices: DevicePlan, ranks: Ranks) -> Iterator[RunFolder]:
    """Create or reopen the run folder, on the main rank with its lock, and log into it."""
    if devices.devices[0].type == "cpu":
        keep_freed_memory()
    os.umask(os.umask(OTHERS_WRITE) | OTHERS_WRITE)
    if not ranks.is_main:
        folder = RunFolder(ranks.from_main(None))
        _wait_for_folder(folder, ranks.rank)
        with _logging_to(folder, ranks.rank, rank_words(ranks.rank)):
            yield folder
        return
    if request.note:
        print(request.note)
    folder = request.folder or RunFolder.create(request.config.name, path=request.run)
    if note := taken_note(request, folder):
        print(note)
    try:
        folder.acquire(functools.partial(print, flush=True))
        with folder:
            print(f"run folder: {printable(str(folder.path))}", flush=True)
            if (len(devices.devices) > 1 or gpu_of(devices.devices[0]) is not None) and _DEVICES not in os.environ:
                print(devices.description, flush=True)
            ranks.from_main(str(folder.path))
            folder.write_info(versions=_versions(), gpus=_gpus())
            with _logging_to(folder, 0, rank_words(0) if ranks.world_size > 1 else ""):
                yield folder
    except Exception as error:
        if folder.is_made and str(folder.log) not in str(error) and remove_failed_start(folder):
            print(f"removed {printable(str(folder.path))}: the training had not begun", flush=True)
        raise


def _wait_for_folder(folder: RunFolder, rank: int) -> None:
    """Wait until this machine sees the folder that the main rank created: network file systems may take seconds."""
    deadline_s = time.monotonic() + _FOLDER_S
    while not folder.path.is_dir():
        if time.monotonic() >= deadline_s:
            raise StorageError(
                f"{folder.path}: rank {rank}, on {socket.gethostname()}, cannot see this run folder of rank 0: "
                "name a folder with --run that all machines share",
                path=folder.path,
            )
        time.sleep(0.5)


def _places(devices: DevicePlan, ranks: Ranks) -> Places:
    """Return the locations of the devices of all ranks."""
    found = ranks.gather((machine_id(), socket.gethostname(), devices.devices))
    names = tuple(f"{host} {device}" for _, host, theirs in found for device in theirs)
    return Places(names, len({machine for machine, _, _ in found}))


def _device_infos(devices: DevicePlan, ranks: Ranks, budgets_mib: Sequence[float] | None) -> list[DeviceInfo]:
    """Return the devices of all ranks, as this process sees them; a budget limits a device's total."""
    if budgets_mib is not None:
        limit_gpus(budgets_mib, devices.devices, first=ranks.rank)
    own = [device_info_of(device) for device in devices.devices]
    own = [replace(info, usable_mib=mib) for info, mib in zip(own, DeviceMemoryTracker(own).usable_mib(), strict=True)]
    here = machine_id()
    gathered = ranks.gather((own, here, socket.gethostname()))
    names = machine_names([(there, name) for _, there, name in gathered])
    device_infos = [
        replace(info, is_own=rank == ranks.rank, pid=info.pid if there == here else None, machine=names[there])
        for rank, (theirs, there, _) in enumerate(gathered)
        for info in theirs
    ]
    if budgets_mib is None:
        return device_infos
    return [
        replace(info, total_mib=min(mib, info.total_mib or mib), usable_mib=None)
        for info, mib in zip(device_infos, budgets_mib, strict=False)
    ]


@contextlib.contextmanager
def _logging_to(folder: RunFolder, rank: int = 0, first_line: str = "") -> Iterator[None]:
    """Write the log of this process to the file of its rank; `first_line` identifies the rank."""
    path = folder.log_of(rank)
    with storage_errors_of("write", path):
        path.parent.mkdir(exist_ok=True)
        file = io.TextIOWrapper(append_to_run(path))
    handler = logging.StreamHandler(file)
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # alerts report a full disk
    if first_line:
        with contextlib.suppress(OSError):
            print(time.strftime("%F %T"), first_line, file=file, flush=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        with contextlib.suppress(OSError):  # lines that the disk had no space for
            file.close()


@dataclass
class Stage:
    """Progress of a training process, for the threads that watch it and for its end."""

    trainer: Trainer | None = None
    """None before the training itself begins."""
    is_saved: bool = False
    """True if there is a checkpoint to continue from; from the first step on, every end saves first."""
    is_failed: bool = False
    """True if this rank failed, so that the others may be elsewhere."""

    def step(self) -> int | None:
        """Return the steps done; None before the training begins."""
        return None if self.trainer is None else self.trainer.position.step

    def has_stepped(self) -> bool:
        """Return True once this process has made a step."""
        return self.trainer is not None and self.step() != (self.trainer.progress.resumed_from_step or 0)

    def saving_s(self) -> float | None:
        """Return the seconds since the running checkpoint write began; None while none runs."""
        return None if self.trainer is None else self.trainer.saver.written_for_s()


def _run_in(
    folder: RunFolder,
    request: TrainRequest,
    devices: DevicePlan,
    ranks: Ranks,
    peers: Peers,
    signals: StopSignals,
    listener: EventListener | None,
) -> int:
    console, stage = PlainReporter(), Stage()
    event_log = EventLog(None)
    if ranks.is_main:
        event_log = EventLog(EventWriter(folder.events), [listener or console])
    device_infos = _device_infos(devices, ranks, request.config.parallel.memory_budget_mib)
    memory, places = DeviceMemoryTracker(device_infos), _places(devices, ranks)
    context = RunContext(folder, event_log, ranks, signals, memory, places)

    def end(
        status: Literal["finished", "stopped", "failed"], reason: str, code: int, by: StoppedBy | None = None
    ) -> int:
        event_log.emit(RunEnd(status=status, reason=reason, exit_code=code, step=stage.step(), stopped_by=by))
        return code

    def report(reason: str) -> None:
        console.is_error_shown = True
        end("failed", reason, DistributedError.exit_code)
        event_log.close()

    with peers.watched(report):
        try:
            with _restored_trainer(context, request, devices, stage, peers.pids) as trainer:
                if trainer.progress.is_complete:
                    if ranks.is_main:
                        trainer.answer_commands("the run is complete", is_finished=True)
                        key = "train.epochs" if trainer.settings.timetable.total_steps is None else "train.steps"
                        print(f"already complete: {trainer.length}; raise {key} to train on")
                    return 0
                stage.trainer, stage.is_saved = trainer, True
                if ranks.is_main:
                    for note in trainer.facts.notes:
                        print(printable(note), flush=True)
                    announce("first step (loads images, compiles kernels)")
                reason = trainer.fit()
            return end("finished", reason, 0)
        except StopRequest as stop:
            outcome = "a checkpoint was saved" if stage.is_saved else "nothing was there to save yet"
            code = EXIT_STOPPED_AND_SAVED if stage.is_saved else 128 + signals.number
            return end("stopped", f"{stop}: {outcome}", code, stop.by)
        except Exception as error:
            known = as_segapp_error(error, part_names(request.config), num_devices=len(devices.devices))
            logger.exception("training failed")
            stage.is_failed = True
            console.is_error_shown = True  # on stderr, by the code that catches the error raised here
            # The report of an out-of-memory error is a separate event.
            end("failed", first_line(known), known.exit_code)
            if known is error:
                raise
            shown = type(known)(f"{known}\n(traceback in {folder.log_of(ranks.rank)})")
            shown.topic = known.topic
            raise shown from error
        finally:
            event_log.close()
            if stage.trainer is not None and not stage.is_failed:
                ranks.any_of(False)  # the last exchange: no rank ends while another one still writes


@contextlib.contextmanager
def _restored_trainer(
    context: RunContext,
    request: TrainRequest,
    devices: DevicePlan,
    stage: Stage,
    rank_pids: Sequence[tuple[str, int]],
) -> Iterator[Trainer]:
    """Resolve the config, build the trainer and restore its state; yield it under watch."""
    folder, ranks = context.folder, context.ranks
    checkpoint = load_on_every_rank(
        ranks,
        lambda: checkpoint_to_resume(folder, is_resumed=request.folder is not None, checkpoint=request.checkpoint),
    )
    config = request.config
    if checkpoint is not None and config.train.precision == "auto":
        config = _with_saved(config, checkpoint.state, "precision")
    config, saved_plan = _with_resolved_auto(folder, config, devices, context.device_memory.devices, ranks)
    stage.is_saved = checkpoint is not None
    if ranks.world_size > 1 and ranks.is_main:
        report_reverted_split(folder, context.event_log)

    with (
        _watched(context, config, stage, rank_pids, DP_ADVICE if devices.mode == "dp" else None),
        contextlib.closing(
            build_trainer(
                config,
                context,
                devices,
                checkpoint=checkpoint,
                saved_plan=saved_plan,
                limit=request.limit,
            )
        ) as trainer,
    ):
        _restore(trainer, context, config, checkpoint)
        if checkpoint is not None:
            checkpoint.state.clear()  # it is as large as weights and optimizer, and would exist as long as the training
        yield trainer


DP_ADVICE = "in dp one process dispatches the operators of all GPUs; parallel.mode=ddp has a process for each of them"


@contextlib.contextmanager
def _watched(
    context: RunContext,
    config: RunConfig,
    stage: Stage,
    rank_pids: Sequence[tuple[str, int]],
    idle_advice: str | None,
) -> Iterator[None]:
    """Run the body under the watchdog and, on the main rank, the sampler of memory and heartbeats."""
    sampler = MemorySampler(
        context.event_log.emit,
        context.device_memory,
        step=stage.step,
        saving_s=stage.saving_s,
        blocked_s=config.checkpoint.grace_s,
        idle_advice=idle_advice,
    )
    watchdog = Watchdog(
        context.folder,
        context.event_log,
        context.device_memory,
        timeout_s=config.train.hang_timeout_s,
        data_timeout_s=data_timeout_s(config.train),
        num_workers=1 if config.data.workers == "auto" else config.data.workers,  # auto is at least 1
        step=stage.step,
        has_stepped=stage.has_stepped,
        is_writing=lambda: stage.saving_s() is not None,
        rank=context.ranks.rank,
        rank_pids=rank_pids,
    )
    with watchdog, sampler if context.ranks.is_main else contextlib.nullcontext():
        yield


def _with_resolved_auto(
    folder: RunFolder, config: RunConfig, devices: DevicePlan, device_infos: Sequence[DeviceInfo], ranks: Ranks
) -> tuple[RunConfig, SavedMemoryPlan | None]:
    """Replace every `auto` that must be known now, from a plan of the devices; save both in the run folder."""
    if is_planned(config) and ranks.is_main and not folder.saved_plan.exists():
        print("planning the memory (some seconds)", flush=True)
    resolved, saved_plan = resolve_auto(config, folder, devices, device_infos, ranks)
    if ranks.is_main:
        folder.write_config(dump_config(resolved))
        for note in saved_plan.notes if saved_plan is not None else ():
            print(note, flush=True)
        if config.train.recompute == "auto" and (saved_plan is None or saved_plan.recompute is None):
            print("train.recompute = auto: the memory of the devices is unknown, so nothing is recomputed", flush=True)
    return resolved, saved_plan


def _restore(trainer: Trainer, context: RunContext, config: RunConfig, checkpoint: LoadedCheckpoint | None) -> None:
    """Load the checkpoint, remove the events that will be repeated, and add the trackers."""
    event_log = context.event_log
    if checkpoint is None and event_log.writer is not None:
        event_log.writer.rewind(0, epoch=1, batch=0)  # a run that was killed before its first checkpoint begins anew
    if checkpoint is not None:
        num_train = len(trainer.train_loader.dataset)
        check_resumable(checkpoint.state, checkpoint.path, config, num_train, trainer.facts.start.classes)
        trainer.load_state_dict(checkpoint.state)
        if event_log.writer is not None:
            event_log.writer.rewind(
                checkpoint.step,
                epoch=checkpoint.epoch,
                batch=checkpoint.position,
                sha256=checkpoint.sha256,
                is_evaluated=trainer.position.is_evaluated,
            )
        for message in checkpoint.messages:
            event_log.emit(Alert(kind="checkpoint", message=message, step=checkpoint.step))
        split = trainer.controller.batch_split.current
        topology = topology_event(checkpoint.state.get("topology"), context.places, split, checkpoint.step)
        if topology is not None:
            event_log.emit(topology)
        if (note := shares_note(config, context.places, split)) is not None:
            event_log.emit(Alert(kind="settings", message=note, step=checkpoint.step))
        for message in changed_parts(checkpoint.state.get("parts"), config):
            event_log.emit(Alert(kind="parts", message=message, step=checkpoint.step))
        saved, num_batches = checkpoint.state["config"]["train"], len(trainer.train_loader)
        note = changed_length_note(saved, config, num_batches, checkpoint.step, trainer.lr_factor)
        if note is not None and not trainer.progress.is_complete:
            event_log.emit(Alert(kind="schedule", message=note, step=checkpoint.step))
    is_divided = context.ranks.world_size > 1 or len(trainer.facts.start.devices) > 1 or config.train.accumulate > 1
    if is_divided and (note := plain_loss_note(config, trainer.engine.criterion)):
        event_log.emit(Alert(kind="parts", message=note))
    if context.ranks.is_main:
        keep_parts(part_names(config).values(), context.folder.parts)
        at_step = None if checkpoint is None else checkpoint.step
        for key, override in (unnamed := unnamed_trackers(config.log)).items():
            message = (
                f"log.{key} is in the config of this run, but you have not named it on this machine: the training "
                f"continues without it; if you know it, stop and resume with {shlex.quote(override)}"
            )
            event_log.emit(Alert(kind="trackers", message=message))
        log = config.log.model_copy(update=dict.fromkeys(unnamed))
        config = config.model_copy(update={"log": log})
        event_log.add_listeners(make_trackers(config, context.folder, trainer.facts.start.classes, at_step))


def _versions() -> dict[str, str]:
    libraries = ("torchvision", "albumentations", "segmentation-models-pytorch", "numpy")
    return {
        "segapp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else "none"),
        **{name: version(name) for name in libraries},
    }


def _gpus() -> list[dict[str, Any]]:
    infos = [device_info_of(device) for gpu in GPUS for device in gpu.devices()]
    names = ("device", "name", "uuid", "total_mib")
    return [{name: getattr(info, name) for name in names} for info in infos]


_OF_A_COLLECTIVE = re.compile(
    r"gloo|nccl|ProcessGroup|Connection closed by peer|Connection reset by peer", re.IGNORECASE
)


def as_segapp_error(
    error: Exception, parts: Mapping[str, str] = MappingProxyType({}), *, num_devices: int = 1
) -> SegappError:
    """Return the error that tells a user what failed; an unexpected error becomes a RunError with its type.

    `parts` has the custom component of each key of the config. If the process has one device, the error within a
    replica is shown instead of the replica's.
    """
    if isinstance(error, SegappError):
        return error
    first = str(error).strip().partition("\n")[0]
    if is_out_of_memory(error):
        return OutOfMemoryError(f"out of memory: {first}: lower train.batch_size or data.crop_px")
    if "does not have a deterministic implementation" in str(error):
        return ConfigError(
            f"train.deterministic = true: {first}: choose another model or loss, or set it to false",
            key="train.deterministic",
        )
    if ONE_VALUE in str(error):
        return ConfigError(
            "train.batch_size: a BatchNorm layer gets only one value per channel from a single image: give every "
            "device at least 2 images in each step, or choose another model",
            key="train.batch_size",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return StorageError(
            f"{error.filename or 'the run folder'}: {error.strerror}: free space or choose another folder"
        )
    cause = error.__cause__ if isinstance(error, ReplicaError) and isinstance(error.__cause__, Exception) else error
    if isinstance(cause, PlainLossError):
        losses = " or ".join(f"{key} = {name}" for key, name in parts.items() if key.startswith("loss."))
        return RunError(f"{losses or 'the loss'}: {cause}: segapp check-part --config FILE checks it").see("own-parts")
    place = raised_at(cause, parts)
    if place is not None:
        part, line = place
        said = str(cause).strip().partition("\n")[0]
        return RunError(
            f"{part} raised {type(cause).__name__} at {line}: {said}: correct it; segapp check-part --config FILE "
            "shows the component in every way that a training uses it"
        ).see("own-parts")
    if isinstance(error, ReplicaError):
        is_alone = cause is not error and num_devices == 1
        return as_segapp_error(cause) if is_alone else DistributedError(first)
    if isinstance(error, (dist.DistError, ConnectionError)) or _OF_A_COLLECTIVE.search(str(error)):
        return DistributedError(f"another rank does not answer ({first}): read its output and stacks.log")
    return RunError(f"unexpected {type(error).__name__}: {first}")
