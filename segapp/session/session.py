"""A training as a process: its new or resumed run folder, its ranks, its end, and any failure as a segapp error."""

import contextlib
import functools
import io
import logging
import os
import platform
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

from segapp import __version__
from segapp.accelerator import GPUS, gpu_of
from segapp.assembly.data import data_timeout_s
from segapp.assembly.devices import DevicePlan, plan_devices
from segapp.assembly.network import with_weights_defaults
from segapp.assembly.own_parts import changed_parts, check_parts, plain_loss_note
from segapp.assembly.pairs import build_scheme, check_monitor, count_images, split_names
from segapp.checkpoint.training_state import (
    LoadedCheckpoint,
    check_resumable,
    load_to_resume,
    saved_state,
)
from segapp.config import RunConfig, component_names, dump_config
from segapp.config.trust import unnamed_trackers
from segapp.custom.trust import accepted_sources, using_copies
from segapp.datasets.resources import freed_memory_kept
from segapp.errors import (
    ConfigError,
    DistributedError,
    SegappError,
    StorageError,
)
from segapp.memory.counters import DeviceInfo, DeviceMemoryTracker, MemorySampler, device_info_of, limit_gpus
from segapp.memory.plan import SavedMemoryPlan
from segapp.parallel.agreement import MachineFacts, compare
from segapp.parallel.distributed import (
    Ranks,
    is_launched,
)
from segapp.parallel.launch import Peers, end_process, leave_error
from segapp.planning.auto import resolve_auto, with_kept
from segapp.run.events import Alert, EventListener, EventLog, EventWriter, RunEnd
from segapp.run.files import append_to_run, machine_id, machine_names, storage_errors_of
from segapp.run.folder import RunFolder, remove_failed_start
from segapp.run.words import announce, printable, say
from segapp.session.build import build_trainer
from segapp.session.failures import Outcome, as_segapp_error, outcome_of
from segapp.session.process_state import process_state, sharing_random_numbers
from segapp.session.ranks import RANK_DEVICES, devices_of_launcher, joined_ranks, launch_ranks
from segapp.session.request import TrainRequest, open_folder
from segapp.session.start_checks import changed_length_note
from segapp.training.console import PlainReporter
from segapp.training.context import DeviceLocations, RunContext
from segapp.training.live.replay import report_reverted_split
from segapp.training.live.start import other_devices, shares_note
from segapp.training.pulse import Liveness
from segapp.training.signals import StopRequest, StopSignals
from segapp.training.trackers import make_trackers
from segapp.training.trainer import Trainer
from segapp.training.watchdog import Watchdog, rank_words
from segapp.waiting import lines_while, repeated

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
    with (
        signals or StopSignals(end_start=end_process) as signals,
        process_state(request.config.train),
        using_copies(request.copies),
    ):
        devices = devices_of_launcher() or plan_devices(request.config)
        if devices.mode == "ddp" and not is_launched():
            _check_before_start(request)
            return launch_ranks(request, devices, arguments, signals)
        with joined_ranks(request.config, devices) as (ranks, own_devices, peers):
            liveness = Liveness(blocked_s=request.config.checkpoint.grace_s)
            others = ", or waits for another rank" if ranks.world_size > 1 else ""

            def train(context: RunContext) -> str | None:
                with _restored_trainer(context, request, own_devices, liveness, peers.pids) as trainer:
                    return _fit(trainer)

            try:
                _check_before_start(request)
                with (
                    freed_memory_kept(own_devices.devices[0].type == "cpu"),
                    lines_while(lambda: "" if liveness.has_stepped else f"still starting{others}"),
                    _opened_folder(request, own_devices, ranks) as folder,
                ):
                    console = PlainReporter()
                    context = _context_of(folder, request.config, own_devices, ranks, signals, listener or console)
                    return _reported(train, context, request.config, peers, console, liveness).exit_code
            except Exception as error:
                known = as_segapp_error(error)
                is_own = not isinstance(known, DistributedError)
                is_said_here = ranks.world_size == 1 or leave_error(known.exit_code, str(known), is_own=is_own)
                if not isinstance(error, SegappError) and is_own:
                    raise
                if is_said_here:
                    raise known from error
                return known.exit_code  # another rank of this machine prints it


def _check_before_start(request: TrainRequest) -> None:
    """Refuse unusable custom components and impossible resumes before the run folder is changed."""
    config = request.config
    check_parts(config)
    check_monitor(config)
    saved = saved_state(request.folder, request.checkpoint)
    if saved is None:
        return
    path, state = saved
    config, _ = with_weights_defaults(config, path)
    config = with_kept(config, state)
    is_limited = request.limit is not None  # with a limit, the number of images does not matter
    num_train = state["data"]["num_train"] if is_limited else count_images(config.data, split_names(config.data)[0])
    check_resumable(state, path, config, num_train, list(build_scheme(config.data).names))


@contextlib.contextmanager
def _opened_folder(request: TrainRequest, devices: DevicePlan, ranks: Ranks) -> Iterator[RunFolder]:
    """Create or reopen the run folder, on the main rank with its lock, and log into it."""
    if not ranks.is_main:
        folder = RunFolder(ranks.from_main(None))
        _wait_for_folder(folder, ranks.rank)
        with _logging_to(folder, ranks.rank, rank_words(ranks.rank)):
            yield folder
        return
    if request.note:
        say(request.note)
    folder = open_folder(request)
    try:
        folder.acquire(functools.partial(print, flush=True))
        with folder:
            say(f"run folder: {printable(str(folder.path))}")
            if (len(devices.devices) > 1 or gpu_of(devices.devices[0]) is not None) and RANK_DEVICES not in os.environ:
                say(devices.description)
            # The other ranks wait for the path, and so begin only when the lock is held.
            ranks.from_main(str(folder.path))
            folder.write_info(versions=_versions(), gpus=_gpus())
            with _logging_to(folder, 0, rank_words(0) if ranks.world_size > 1 else ""):
                yield folder
    except Exception as error:
        # An error that refers to the log would lose it with the folder.
        if folder.is_made and str(folder.log) not in str(error) and remove_failed_start(folder):
            say(f"removed {printable(str(folder.path))}: the training had not begun")
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


def _device_infos(
    devices: DevicePlan, ranks: Ranks, budgets_mib: Sequence[float] | None
) -> tuple[list[DeviceInfo], DeviceLocations]:
    """Return the devices of all ranks, as this process sees them, and their places; a budget limits a total."""
    if budgets_mib is not None:
        limit_gpus(budgets_mib, devices.devices, first=ranks.rank)
    own = [device_info_of(device) for device in devices.devices]
    own = [replace(info, usable_mib=mib) for info, mib in zip(own, DeviceMemoryTracker(own).usable_mib(), strict=True)]
    here = machine_id()
    gathered = ranks.gather((own, here, socket.gethostname()))
    names = machine_names([(there, name) for _, there, name in gathered])
    # A pid says nothing on another machine, where another process may have it.
    device_infos = [
        replace(info, is_own=rank == ranks.rank, pid=info.pid if there == here else None, machine=names[there])
        for rank, (theirs, there, _) in enumerate(gathered)
        for info in theirs
    ]
    places = tuple(f"{host} {info.device}" for theirs, _, host in gathered for info in theirs)
    locations = DeviceLocations(places, len({there for _, there, _ in gathered}))
    if budgets_mib is not None:
        device_infos = [
            replace(info, total_mib=min(mib, info.total_mib or mib), usable_mib=None)
            for info, mib in zip(device_infos, budgets_mib, strict=False)
        ]
    return device_infos, locations


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


def _context_of(
    folder: RunFolder,
    config: RunConfig,
    devices: DevicePlan,
    ranks: Ranks,
    signals: StopSignals,
    listener: EventListener,
) -> RunContext:
    event_log = EventLog(None)
    if ranks.is_main:
        event_log = EventLog(EventWriter(folder.events), [listener])
    device_infos, locations = _device_infos(devices, ranks, config.parallel.memory_budget_mib)
    return RunContext(folder, event_log, ranks, signals, DeviceMemoryTracker(device_infos), locations)


def _reported(
    train: Callable[[RunContext], str | None],
    context: RunContext,
    config: RunConfig,
    peers: Peers,
    console: PlainReporter,
    liveness: Liveness,
) -> Outcome:
    """Train, and report the end as an event; `train` returns the reason, or None if the run was complete before.

    Raises:
        SegappError: the training failed.
    """
    event_log, ranks, signals = context.event_log, context.ranks, context.signals
    liveness.event_log, liveness.device_memory = event_log, context.device_memory
    reported: list[Outcome] = []

    def ended(by: BaseException | str | None) -> Outcome:
        return outcome_of(by, is_saved=liveness.is_saved, signal_number=signals.number)

    def report(outcome: Outcome) -> Outcome:
        console.is_error_shown = outcome.status == "failed"  # on stderr, by the code that catches the error
        if not reported and outcome.reason is not None:  # a listener may raise at the end
            reported.append(outcome)
            end = RunEnd.model_validate(outcome, from_attributes=True)
            event_log.emit(end.model_copy(update={"step": liveness.step()}))
        return outcome

    def report_lost(reason: str) -> None:
        report(Outcome("failed", reason, DistributedError.exit_code))
        event_log.close()

    def end_start(_code: int) -> None:
        if liveness.training is None and not reported:
            outcome = ended(StopRequest(signals.signal_name, "signal"))
            end_process(outcome.exit_code, lambda: report(outcome), report_s=0.5)

    signals.where = lambda: liveness.activity
    if signals.end_start is not None:
        signals.end_start = end_start
    is_elsewhere = False  # True if this rank failed, so that the others may be elsewhere
    with peers.watched(report_lost):
        try:
            return report(ended(train(context)))
        except StopRequest as stop:
            return report(ended(stop))
        except BaseException as error:  # also of a kernel or a program, such as KeyboardInterrupt and SystemExit
            is_elsewhere, known = True, error
            if isinstance(error, Exception):
                logger.exception("training failed")
                known = as_segapp_error(error, component_names(config))
            report(ended(known))  # an out-of-memory error has an event of its own, too
            if known is error or not isinstance(known, SegappError):
                raise
            shown = type(known)(f"{known}\n(traceback in {context.folder.log_of(ranks.rank)})")
            shown.topic = known.topic
            raise shown from error
        finally:
            event_log.close()
            if liveness.training is not None and not is_elsewhere:
                with lines_while(lambda: "waiting for the other ranks to end"):
                    ranks.any_of(False)  # the last exchange: no rank ends while another one still writes


def _fit(trainer: Trainer) -> str | None:
    """Train until the end that the config asks for, and return the reason; None if the run has reached it before."""
    is_main = trainer.ranks.is_main
    if (reason := trainer.end_reason) is not None:
        if is_main:
            trainer.answer_commands("the run is complete", is_finished=True)
            key = "train.epochs" if trainer.settings.timetable.total_steps is None else "train.steps"
            key = key if reason == trainer.length else "train.early_stop"  # which would end a longer run, too
            say(f"already complete: {reason}; raise {key} to train on")
        return None
    trainer.liveness.is_saved = True
    if is_main:
        for note in trainer.facts.notes:
            say(printable(note))
        announce("first step (loads images, compiles kernels)")
    return trainer.fit()


@contextlib.contextmanager
def _restored_trainer(
    context: RunContext,
    request: TrainRequest,
    devices: DevicePlan,
    liveness: Liveness,
    rank_pids: Sequence[tuple[str, int]],
) -> Iterator[Trainer]:
    """Resolve the config, build the trainer and restore its state; yield it under watch."""
    folder, ranks = context.folder, context.ranks
    checkpoint = load_to_resume(ranks, folder, is_resumed=request.folder is not None, checkpoint=request.checkpoint)
    file, state = (None, None) if checkpoint is None else (checkpoint.file, checkpoint.state)
    config, notes = with_weights_defaults(request.config, file)
    config, saved_plan = resolve_auto(config, state, folder, devices, context.device_memory.devices, ranks)
    if ranks.is_main:
        _note_plan(folder, config, saved_plan, notes)
    liveness.is_saved = checkpoint is not None
    if ranks.world_size > 1 and ranks.is_main:
        report_reverted_split(folder, context.event_log)

    with (
        _watched(context, config, liveness, rank_pids),
        contextlib.closing(
            build_trainer(
                config,
                context,
                devices,
                liveness,
                checkpoint=checkpoint,
                saved_plan=saved_plan,
                limit=request.limit,
            )
        ) as trainer,
        sharing_random_numbers(trainer.engine.model, trainer.engine.criterion),
    ):
        _check_same_split(trainer.controller.batch_split.current, ranks)
        if checkpoint is not None:
            num_train = len(trainer.train_loader.dataset)
            check_resumable(checkpoint.state, checkpoint.path, config, num_train, trainer.facts.start.classes)
            trainer.load_state_dict(checkpoint.state)
        _prepare_events(trainer, context, config, checkpoint)
        if checkpoint is not None:
            checkpoint.state.clear()  # it is as large as weights and optimizer, and would exist as long as the training
        yield trainer


def _check_same_split(split: tuple[int, ...] | None, ranks: Ranks) -> None:
    """Raise ConfigError on every rank unless all divide a full batch in the same way."""
    told = dict.fromkeys(ranks.gather((socket.gethostname(), split)))
    name = "the batch split of section parallel"
    agreement = compare([MachineFacts(host, {name: str(list(theirs or ()))}) for host, theirs in told])
    if agreement.code:
        raise ConfigError(agreement.reason, key="parallel.shares")


@contextlib.contextmanager
def _watched(
    context: RunContext, config: RunConfig, liveness: Liveness, rank_pids: Sequence[tuple[str, int]]
) -> Iterator[None]:
    """Run the body under the watchdog and, on the main rank, the threads of heartbeats and memory events."""
    sampler = MemorySampler(context.event_log.emit, context.device_memory, step=liveness.step)
    watched = Watchdog(
        context,
        liveness,
        timeout_s=config.train.hang_timeout_s,
        data_timeout_s=data_timeout_s(config.train),
        num_workers=1 if config.data.workers == "auto" else config.data.workers,  # auto is at least 1
        rank_pids=rank_pids,
    ).watching()
    with watched, contextlib.ExitStack() as stack:
        if context.ranks.is_main:
            stack.enter_context(repeated("heartbeats", liveness.poll))
            stack.enter_context(repeated("memory sampler", sampler.poll))
        yield


def _note_plan(folder: RunFolder, config: RunConfig, saved_plan: SavedMemoryPlan | None, notes: Sequence[str]) -> None:
    """Save the config without its `auto`, and print the notes and what the plan chose."""
    folder.write_config(dump_config(config))
    for note in (*notes, *(saved_plan.notes if saved_plan is not None else ())):
        say(printable(note))
    if config.train.recompute == "auto" and (saved_plan is None or saved_plan.recompute is None):
        say("train.recompute = auto: the memory of the devices is unknown, so nothing is recomputed")


def _prepare_events(
    trainer: Trainer, context: RunContext, config: RunConfig, checkpoint: LoadedCheckpoint | None
) -> None:
    """Remove the events that will be repeated, report what differs from the checkpoint, and add the trackers."""
    event_log = context.event_log
    if checkpoint is None and event_log.writer is not None:
        event_log.writer.rewind(0, epoch=1, batch=0)  # a run that was killed before its first checkpoint begins anew
    if checkpoint is not None:
        if event_log.writer is not None:
            event_log.writer.rewind(
                checkpoint.step,
                epoch=checkpoint.facts.epoch,
                batch=checkpoint.facts.position,
                sha256=checkpoint.sha256,
                is_evaluated=trainer.position.is_evaluated,
            )
        for message in checkpoint.messages:
            event_log.emit(Alert(kind="checkpoint", message=message, step=checkpoint.step))
        split = trainer.controller.batch_split.current
        saved_devices = checkpoint.state["live"]["devices"]
        if (change := other_devices(saved_devices, context.locations, split, checkpoint.step)) is not None:
            event_log.emit(change)
        if (note := shares_note(config, context.locations, split)) is not None:
            event_log.emit(Alert(kind="settings", message=note, step=checkpoint.step))
        for message in changed_parts(checkpoint.state.get("parts"), config):
            event_log.emit(Alert(kind="parts", message=message, step=checkpoint.step))
        saved, num_batches = checkpoint.state["config"]["train"], len(trainer.train_loader)
        note = changed_length_note(saved, config, num_batches, checkpoint.step, trainer.lr_factor)
        if note is not None and not (trainer.end_reason is not None or trainer.facts.is_trial):
            event_log.emit(Alert(kind="schedule", message=note, step=checkpoint.step))
    is_divided = context.ranks.world_size > 1 or len(trainer.facts.start.devices) > 1 or config.train.accumulate > 1
    if is_divided and (note := plain_loss_note(config, trainer.engine.criterion)):
        event_log.emit(Alert(kind="parts", message=note))
    if context.ranks.is_main:
        for name in component_names(config).values():
            if (sources := accepted_sources(name)) is not None:
                sources.keep(context.folder.parts)
        at_step = None if checkpoint is None else checkpoint.step
        for key, override in (unnamed := unnamed_trackers(config.log)).items():
            message = (
                f"log.{key} is in the config of this run, but you have not named it on this machine: the training "
                f"continues without it; if you know it, stop and resume with {shlex.quote(override)}"
            )
            event_log.emit(Alert(kind="trackers", message=message))
        log = config.log.model_copy(update=dict.fromkeys(unnamed))
        config = config.model_copy(update={"log": log})
        if trainer.end_reason is None:  # else they would note that the run has failed
            best = trainer.progress.best.value
            event_log.add_listeners(make_trackers(config, context.folder, trainer.facts.start.classes, at_step, best))


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
