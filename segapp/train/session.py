"""One training as a process: its folder, new or resumed, and how it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from segapp import __version__
from segapp.build.devices import DevicePlan, plan_devices
from segapp.build.trained import read_trained
from segapp.checkpoint.training_state import CheckpointStore, LoadedCheckpoint, load_checkpoint
from segapp.config import RunConfig, config_hash, dump_config, resume_differences
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
from segapp.memory.saved_plan import SavedMemoryPlan
from segapp.parallel import (
    DistributedSetupError,
    ReplicaError,
    init_from_env,
    is_launched,
    launch_local,
    shutdown,
)
from segapp.parallel.ranks import Ranks
from segapp.run.checkpoints import CheckpointFolder
from segapp.run.commands import CheckpointCommand, send_command
from segapp.run.events import Alert, EventWriter, RunEnd
from segapp.run.folder import RunFolder
from segapp.run.text import printable
from segapp.train.build import build_trainer
from segapp.train.control.inbox import Inbox, applied_after
from segapp.train.control.signals import EXIT_STOPPED_AND_SAVED, StopRequest, StopSignals
from segapp.train.malloc import keep_freed_memory
from segapp.train.planning.auto_settings import planned_advice, resolve_auto
from segapp.train.recovery.out_of_memory import fallbacks_after, is_out_of_memory
from segapp.train.request import ImageLimit, TrainRequest
from segapp.train.telemetry.console import PlainReporter
from segapp.train.telemetry.device_memory import DeviceInfo, DeviceMemoryTracker, device_info_of
from segapp.train.telemetry.event_log import EventLog
from segapp.train.telemetry.sampler import MemorySampler
from segapp.train.telemetry.trackers import make_trackers
from segapp.train.telemetry.watchdog import Watchdog
from segapp.train.trainer import Trainer

_OF_A_COLLECTIVE = re.compile(
    r"gloo|nccl|ProcessGroup|Connection closed by peer|Connection reset by peer", re.IGNORECASE
)

logger = logging.getLogger("segapp")


def run_session(plan: TrainRequest, arguments: Sequence[str] = ()) -> int:
    """Trains as planned.

    Args:
        plan: what to train and where.
        arguments: the words of the command line, for the ranks that `parallel.mode: ddp` starts.

    Returns:
        The exit code.

    Raises:
        SegappError: it could not begin, or it failed.
    """
    with StopSignals() as signals:
        devices = plan_devices(plan.config.parallel)
        if devices.mode == "ddp" and not is_launched():
            return _launch_ranks(plan, devices, arguments, signals)
        with _joined_ranks(plan.config, devices) as (ranks, own_devices):
            try:
                return _run_rank(plan, own_devices, ranks, signals)
            except (ConfigError, DataError) as error:
                if ranks.is_main:
                    raise
                return error.exit_code  # every rank finds the same; rank 0 says it


def _launch_ranks(plan: TrainRequest, devices: DevicePlan, arguments: Sequence[str], signals: StopSignals) -> int:
    """Starts the ranks and waits for them; a wish for a checkpoint that reaches this process goes to their inbox."""
    names = ", ".join(str(device) for device in devices.devices)
    print(f"devices: {names} ({devices.reason}), one rank each", flush=True)
    folder = plan.folder or RunFolder.create(plan.config.name, path=plan.run)
    run = [] if plan.folder is not None else ["--run", str(folder.path)]
    signals.forward_checkpoint_requests(lambda: _ask_for_checkpoint(folder))
    override = f"parallel.devices=[{names}]"
    return launch_local(["-m", "segapp", *arguments, *run, override], len(devices.devices))


def _ask_for_checkpoint(folder: RunFolder) -> None:
    with contextlib.suppress(CommandError):
        send_command(folder.path, CheckpointCommand(), "SIGUSR1")


@contextlib.contextmanager
def _joined_ranks(config: RunConfig, devices: DevicePlan) -> Iterator[tuple[Ranks, DevicePlan]]:
    """This process among the ranks that torchrun started, with the device that is its own; or alone."""
    if devices.mode != "ddp":
        yield Ranks(), devices
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    own = None if config.parallel.devices == "auto" else devices.devices[local_rank % len(devices.devices)]
    try:
        info = init_from_env(device=own)
    except DistributedSetupError as error:
        raise DistributedError(str(error)) from None
    try:
        ranks = Ranks(info)
        yield ranks, DevicePlan("ddp", (info.device,), f"rank {info.rank} of {info.world_size}")
    finally:
        shutdown()


def _run_rank(plan: TrainRequest, devices: DevicePlan, ranks: Ranks, signals: StopSignals) -> int:
    if plan.config.train.keep_freed_memory and devices.devices[0].type == "cpu":
        keep_freed_memory()
    if not ranks.is_main:
        folder = RunFolder(ranks.from_main(None))
        with _logging_to(folder, ranks.rank):
            return _run_in(folder, plan, devices, ranks, signals)
    if plan.note:
        print(plan.note)
    folder = plan.folder or RunFolder.create(plan.config.name, path=plan.run)
    with folder:
        print(f"run folder: {printable(str(folder.path))}", flush=True)
        if len(devices.devices) > 1 or devices.devices[0].type == "cuda":
            names = ", ".join(str(device) for device in devices.devices)
            print(f"devices: {names} ({devices.reason}), mode {devices.mode}", flush=True)
        ranks.from_main(str(folder.path))
        folder.write_info(versions=_versions(), gpus=_gpus())
        with _logging_to(folder):
            return _run_in(folder, plan, devices, ranks, signals)


def _with_resolved_auto(
    folder: RunFolder, config: RunConfig, devices: DevicePlan, device_infos: Sequence[DeviceInfo], ranks: Ranks
) -> tuple[RunConfig, SavedMemoryPlan | None]:
    """The config without any `auto` that has to be known now, kept in the folder; and the plan it comes from."""
    is_planned = not config.train.batch_size or config.parallel.gpu0_bsz == "auto"
    if is_planned and ranks.is_main and not folder.saved_plan.exists():
        print("planning the memory (some seconds)", flush=True)
    settled, saved_plan = resolve_auto(config, folder, devices, device_infos, ranks)
    if ranks.is_main:
        folder.write_config(dump_config(settled))
        for note in saved_plan.notes if saved_plan is not None else ():
            print(note, flush=True)
    return settled, saved_plan


def _device_infos(devices: DevicePlan, ranks: Ranks, budgets_mib: Sequence[float] | None) -> list[DeviceInfo]:
    """The devices of all ranks, as this process sees them; those with budgets have no more than that."""
    own = [device_info_of(device) for device in devices.devices]
    host = socket.gethostname()
    device_infos = []
    for rank, (theirs, there) in enumerate(ranks.gather((own, host))):
        for info in theirs:
            pid = info.pid if there == host else None
            device_infos.append(replace(info, is_own=rank == ranks.rank, pid=pid))
    if budgets_mib is not None:
        # Logical devices with budgets are told apart; a number too few is an error that the budgets' owner reports.
        device_infos = [
            replace(info, total_mib=min(mib, info.total_mib or mib), slot=i)
            for i, (info, mib) in enumerate(zip(device_infos, budgets_mib, strict=False))
        ] + device_infos[len(budgets_mib) :]
    return device_infos


@contextlib.contextmanager
def _logging_to(folder: RunFolder, rank: int = 0) -> Iterator[None]:
    handler = logging.FileHandler(folder.log)
    who = f" rank {rank}" if rank else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s{who} %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _run_in(folder: RunFolder, plan: TrainRequest, devices: DevicePlan, ranks: Ranks, signals: StopSignals) -> int:
    event_log = EventLog(EventWriter(folder.events), [PlainReporter()]) if ranks.is_main else EventLog(None)
    device_infos = _device_infos(devices, ranks, plan.config.parallel.memory_budget_mib)
    watch = DeviceMemoryTracker(device_infos)
    monitor = MemorySampler(event_log, watch, blocked_s=plan.config.checkpoint.grace_s)
    watchdog = _watchdog(folder, plan.config, event_log, watch, ranks)
    is_saved = False
    try:
        config, saved_plan = _with_resolved_auto(folder, plan.config, devices, device_infos, ranks)
        checkpoint = ranks.from_main(_checkpoint_to_resume(folder, plan) if ranks.is_main else None)
        is_saved = checkpoint is not None
        with watchdog, monitor if ranks.is_main else contextlib.nullcontext():
            inbox = Inbox(folder if ranks.is_main else None, event_log)
            trainer = _build(
                folder, config, devices, ranks, checkpoint, event_log, signals, inbox, watch, saved_plan, plan.limit
            )
            if trainer.is_complete:
                if ranks.is_main:
                    trainer.controller.answer_at_end(trainer.standing(), "the run is complete", is_finished=True)
                    print(f"already complete: {config.train.epochs} epochs; raise train.epochs to train on")
                return 0
            watchdog.first_step = trainer.position.step
            monitor.step = watchdog.step = lambda: trainer.position.step
            watchdog.save_last_boundary = trainer.save_last_boundary
            monitor.saving_s = trainer.saving.written_for_s
            is_saved = True  # from here on every way out saves first, or raises
            reason = trainer.fit()
        event_log.emit(RunEnd(status="finished", reason=reason, exit_code=0, step=monitor.step()))
        return 0
    except StopRequest as request:
        code = EXIT_STOPPED_AND_SAVED if is_saved else 128 + signals.number
        end = "a checkpoint was saved; --resume goes on from it" if is_saved else "nothing was there to save yet"
        event_log.emit(RunEnd(status="stopped", reason=f"{request}: {end}", exit_code=code, step=monitor.step()))
        return code
    except Exception as error:
        known = as_segapp_error(error)
        logger.exception("training failed")
        reason = str(known).partition("\n")[0]  # the report of an out-of-memory has an event of its own
        event_log.emit(RunEnd(status="failed", reason=reason, exit_code=known.exit_code, step=monitor.step()))
        if known is error:
            raise
        raise type(known)(f"{known}\n(traceback in {folder.log})") from error
    finally:
        event_log.close()


def _watchdog(
    folder: RunFolder, config: RunConfig, event_log: EventLog, watch: DeviceMemoryTracker, ranks: Ranks
) -> Watchdog:
    return Watchdog(
        folder.path,
        event_log,
        watch,
        timeout_s=config.train.hang_timeout_s,
        data_timeout_s=config.data.timeout_s,
        num_workers=config.data.workers,
        rank=ranks.rank,
        rank_pids=ranks.gather((socket.gethostname(), os.getpid())),
    )


def _build(
    folder: RunFolder,
    config: RunConfig,
    devices: DevicePlan,
    ranks: Ranks,
    checkpoint: LoadedCheckpoint | None,
    event_log: EventLog,
    signals: StopSignals,
    inbox: Inbox,
    watch: DeviceMemoryTracker,
    saved_plan: SavedMemoryPlan | None,
    limit: ImageLimit | None,
) -> Trainer:
    trainer = build_trainer(
        config,
        store=CheckpointStore(folder.checkpoints, keep=config.checkpoint.keep, config_hash=config_hash(config)),
        event_log=event_log,
        signals=signals,
        devices=devices,
        ranks=ranks,
        with_weights=checkpoint is None,
        inbox=inbox,
        watch=watch,
        folder=folder,
        saved_plan=saved_plan,
        advise=lambda: planned_advice(config, devices, watch.devices, saved_plan),
        limit=limit,
        teacher=None if config.distill is None else read_trained(config.distill.teacher),
    )
    step = 0 if checkpoint is None else checkpoint.step
    trainer.controller.schedule_replay(ranks.from_main(applied_after(folder.events, step) if ranks.is_main else []))
    trainer.learned_later = ranks.from_main(fallbacks_after(folder, step) if ranks.is_main else None)
    if checkpoint is None and event_log.writer is not None:
        event_log.writer.rewind(0, epoch=1, batch=0)  # a run that was killed before its first checkpoint begins anew
    if checkpoint is not None:
        check_resumable(checkpoint, config, trainer)
        trainer.load_state_dict(checkpoint.state)
        if event_log.writer is not None:
            at = checkpoint
            event_log.writer.rewind(at.step, epoch=at.epoch, batch=at.position, sha256=at.sha256)
        for message in checkpoint.messages:
            event_log.emit(Alert(kind="checkpoint", message=message, step=checkpoint.step))
    if ranks.is_main:
        at_step = None if checkpoint is None else checkpoint.step
        event_log.add_listeners(make_trackers(config, folder, trainer.description["classes"], at_step))
    return trainer


def _checkpoint_to_resume(folder: RunFolder, plan: TrainRequest) -> LoadedCheckpoint | None:
    """The state to go on from; None for a new training, or a run that was stopped before its first checkpoint."""
    if plan.checkpoint is not None:
        return load_checkpoint(plan.checkpoint)
    if plan.folder is None:
        return None
    if CheckpointFolder(folder.checkpoints).is_untouched():
        print("the run has no checkpoint yet: it begins anew")
        return None
    return load_checkpoint(folder.path, is_holder=True)


def check_resumable(checkpoint: LoadedCheckpoint, config: RunConfig, trainer: Trainer) -> None:
    """Refuses to go on where the course of the training would change.

    Raises:
        CheckpointError: names every difference.
    """
    saved = checkpoint.state.get("config")
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{checkpoint.path} holds no config: it was not written by segapp train")
    differences = resume_differences(saved, config)
    if differences:
        shown = "\n".join(f"  {line}" for line in differences)
        raise CheckpointError(
            f"{checkpoint.path} cannot be resumed with this config, these keys differ (saved -> now):\n{shown}\n"
            "  put them back, or start a new run"
        )
    data: Any = checkpoint.state["data"]
    num_train = len(trainer.train_loader.dataset)
    if data["num_train"] != num_train or list(checkpoint.state["classes"]) != trainer.description["classes"]:
        raise CheckpointError(
            f"{checkpoint.path} was trained on {data['num_train']} images of {len(checkpoint.state['classes'])} "
            f"classes; data.root now has {num_train} of {trainer.num_classes}: put the data back, or start a new run"
        )


def as_segapp_error(error: Exception) -> SegappError:
    """Any failure of a training as one of ours; those that nobody foresaw become a RunError that says their type."""
    if isinstance(error, SegappError):
        return error
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    if is_out_of_memory(error):
        return OutOfMemoryError(f"out of memory: {first}: lower train.batch_size or data.crop_px")
    if isinstance(error, OSError) and error.errno is not None:
        return StorageError(
            f"{error.filename or 'the run folder'}: {error.strerror}: free space or choose another folder"
        )
    if isinstance(error, ReplicaError):
        return DistributedError(first)
    if isinstance(error, (dist.DistError, ConnectionError)) or _OF_A_COLLECTIVE.search(str(error)):
        return DistributedError(f"another rank does not answer ({first}): look at its lines, and at stacks.log")
    return RunError(f"unexpected {type(error).__name__}: {first}")


def _versions() -> dict[str, str]:
    libraries = ("torchvision", "albumentations", "segmentation-models-pytorch", "numpy")
    return {
        "segapp": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        **{name: version(name) for name in libraries},
    }


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "uuid": str(getattr(properties, "uuid", "")),
                "total_mib": properties.total_memory / 2**20,
            }
        )
    return found
