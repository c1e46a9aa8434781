"""The ranks of a training: started, joined, watched, and what they send to each other."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import PosixPath

import torch

from segapp.assembly.devices import DevicePlan
from segapp.checkpoint.training_state import (
    LoadedCheckpoint,
)
from segapp.compat.torch import group_store
from segapp.config import LiveSettings, RunConfig
from segapp.datasets.cache import CacheFiles
from segapp.errors import (
    CheckpointError,
    CommandError,
    ConfigError,
    DataError,
    DistributedError,
    OutOfMemoryError,
    SegappError,
)
from segapp.memory.counters import DeviceInfo
from segapp.memory.plan import SavedMemoryPlan
from segapp.parallel.agreement import AGREED_VARIABLE, DATA_DIFFER, MachineFacts, compare
from segapp.parallel.distributed import (
    JOIN_S,
    DistributedSetupError,
    Ranks,
    abandon,
    init_from_env,
    is_launched,
    read_rank,
    shutdown,
)
from segapp.parallel.launch import STORE_VARIABLE, Peers, launch_local, peer_limit_s
from segapp.run.checkpoints import CheckpointFolder
from segapp.run.commands import CheckpointCommand, send_command
from segapp.run.events import Oom
from segapp.run.files import machine_id
from segapp.run.folder import remove_failed_start
from segapp.run.words import plural, say
from segapp.session.failures import as_segapp_error
from segapp.session.machine_facts import facts_of
from segapp.session.request import TrainRequest, open_folder
from segapp.training.live.changes import Replay
from segapp.training.live.controller import PendingRequests
from segapp.training.live.replay import Adopted, fallbacks_after
from segapp.training.signals import StopSignals
from segapp.training.watchdog import exchange_timeout_s
from segapp.waiting import FIRST_S, lines_while

RANK_DEVICES = "SEGAPP_RANK_DEVICES"
"""The devices of the ranks and the reasons for them, as JSON, from the process that starts the ranks."""


def launch_ranks(request: TrainRequest, devices: DevicePlan, arguments: Sequence[str], signals: StopSignals) -> int:
    """Start the ranks and wait for them; a checkpoint request to this process is put into their inbox.

    A rank that runs out of memory ends all ranks, because the others wait for it in an exchange. If it has reported a
    way to continue with less memory, they start again and continue from the last checkpoint in that way.
    """
    print(f"{devices.description}, one rank each", flush=True)
    folder = open_folder(request)

    def ask_for_checkpoint() -> None:
        with contextlib.suppress(CommandError):
            send_command(folder.path, CheckpointCommand(), "SIGUSR1")

    signals.forward_checkpoint_requests(ask_for_checkpoint)
    command = ["-m", "segapp", *arguments, *([] if request.folder is not None else ["--run", str(folder.path)])]
    words = {"devices": [str(each) for each in devices.devices], "reasons": [devices.reason, devices.mode_reason]}
    environment = {RANK_DEVICES: json.dumps(words)}
    folder.release()  # rank 0 takes it
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


def devices_of_launcher() -> DevicePlan | None:
    """Return the devices that `launch_ranks` chose; None in a process that it did not start."""
    if RANK_DEVICES not in os.environ or not is_launched():
        return None
    words = json.loads(os.environ[RANK_DEVICES])
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


def _compare_machines(config: RunConfig, ranks: Ranks, machines: Sequence[str]) -> None:
    """Compare what the machines of a job bring to it; the first rank of each describes its machine.

    Raises:
        ConfigError: settings or versions differ.
        DataError: the data differ.
    """
    if len(set(machines)) == 1:
        return
    is_first = machines.index(machines[ranks.rank]) == ranks.rank
    # A collective, so ranks that describe no machine call it, too.
    told = ranks.gather(facts_of(config).as_json() if is_first else None)
    agreement = compare([MachineFacts.from_json(text) for text in told if text is not None])
    if agreement.note and is_first:
        say(f"note: {agreement.note}")
    if agreement.code:
        raise (DataError if agreement.code == DATA_DIFFER else ConfigError)(agreement.reason).see("several-machines")


@contextlib.contextmanager
def joined_ranks(config: RunConfig, devices: DevicePlan) -> Iterator[tuple[Ranks, DevicePlan, Peers]]:
    """Join the ranks that were started; yield them, the device of this process, and the watch over the others.

    In modes other than ddp, this process is the only one.
    """
    if devices.mode != "ddp":
        yield Ranks(), devices, _find_peers(Ranks())
        return
    is_chosen = config.parallel.devices != "auto" or RANK_DEVICES in os.environ
    notes = [""]
    try:
        local_rank = read_rank(os.environ)[2]
        own = devices.devices[local_rank % len(devices.devices)] if is_chosen else None
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or len(devices.devices))
        is_shared = is_chosen and ranks_here > len(set(devices.devices))
        with lines_while(lambda: _waiting_line(notes[-1]), FIRST_S if STORE_VARIABLE in os.environ else 1.0):
            backend = "gloo" if is_shared else None  # NCCL refuses a GPU with two ranks
            info = init_from_env(device=own, backend=backend, note=lambda line: notes.append(f"{line}; "))
    except DistributedSetupError as error:
        raise DistributedError(str(error)) from None
    try:
        timeout_s = exchange_timeout_s(config.train.hang_timeout_s)
        ranks = Ranks(info, step_timeout_s=timeout_s, classes=exchanged_classes())
        reason = f"rank {info.rank} of {info.world_size}"
        with contextlib.closing(_find_peers(ranks)) as peers:
            if AGREED_VARIABLE not in os.environ:
                _compare_machines(config, ranks, [machine for machine, _ in peers.pids])
            yield ranks, DevicePlan("ddp", (info.device,), reason, devices.mode_reason), peers
    except BaseException as error:
        if info.backend == "nccl" and isinstance(error, Exception):
            abandon(as_segapp_error(error).exit_code)
        else:
            shutdown()
        raise
    shutdown()


def _waiting_line(reason: str) -> str:
    """Return a line about the ranks that this one waits for, from the variables of its launcher, and the reason."""
    rank, size, *address = map(os.environ.get, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    where = os.environ.get(STORE_VARIABLE) or ":".join(map(str, address))
    others = plural(int(size or 1) - 1, "other rank")
    return (
        f"rank {rank} of {size} waits for {others} at {where}, for at most {JOIN_S:g} s: {reason}start them all, or "
        "set parallel.mode=single to train in one process"
    )


def exchanged_classes() -> list[type]:
    """Return the classes of the values that ranks send to each other, besides tensors and plain values."""
    errors: list[type] = [SegappError]
    for error in errors:  # the list grows while it is read
        errors += error.__subclasses__()
    of_memory = (SavedMemoryPlan, DeviceInfo, Adopted, Replay, Oom)
    return [*errors, *of_memory, LoadedCheckpoint, LiveSettings, PendingRequests, CacheFiles, PosixPath]
