"""`segapp launch`: the agent of one machine of a training on several, and its policy by the exit code of the run."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from segapp.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    OutOfMemoryError,
    RunBusyError,
    SegappError,
    StorageError,
)
from segapp.parallel.agent import Policy, run_job
from segapp.run.checkpoints import CheckpointFolder
from segapp.run.events import EventReader
from segapp.run.folder import RunFolder
from segapp.training.recovery import fallbacks_after
from segapp.training.request import plan_request
from segapp.training.signals import EXIT_STOPPED_AND_SAVED

MAX_RESTARTS = 3
"""Restarts without a new checkpoint between them, unless `--max-restarts` is given."""

_TAIL_BYTES = 256 * 2**10
_ERRORS = (ConfigError, DataError, CheckpointError, NonFiniteError, StorageError)
FINAL = {0, EXIT_STOPPED_AND_SAVED, 130, 143, *(error.exit_code for error in _ERRORS)}
"""Exit codes after which a restart would end in the same way, or that a person wanted."""


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `segapp launch`."""

    nnodes: str
    nproc_per_node: str
    rdzv_endpoint: str | None
    rdzv_id: str | None
    local_addr: str | None
    max_restarts: int
    others: Sequence[str] = ()
    """Further options of torchrun."""


@dataclass(frozen=True)
class TrainCommand:
    """The `train` command that the ranks run."""

    words: Sequence[str]
    """The words behind `train`."""
    run: Path
    config: str | None = None
    resume: str | None = None
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class Course:
    """What a run folder shows of the course of a run."""

    step: int | None = None
    """Step of the newest checkpoint."""
    end: dict[str, Any] | None = None
    """The last `run_end`."""
    num_fallbacks: int = 0
    """Ways to continue with less memory after out-of-memory errors."""


def read_course(path: Path) -> Course:
    """Return what the folder of a run shows; nothing if there is none."""
    folder = RunFolder(path)
    manifest = CheckpointFolder(folder.checkpoints).read_manifest()
    ends = [raw for raw in EventReader(folder.events, last_bytes=_TAIL_BYTES).read_raw() if raw["type"] == "run_end"]
    step = manifest.entries[0].step if manifest.entries else None
    return Course(step, ends[-1] if ends else None, len(fallbacks_after(folder, 0)))


def restarts(code: int, before: Course, after: Course, num_round: int) -> bool:
    """Return True if a job whose round ended with `code` can do better in another round.

    Args:
        code: exit code of the run, 128 + n for signal n.
        before: the run at the start of the round.
        after: the run now.
        num_round: number of the round, from 0.
    """
    if code in FINAL:
        return False
    if code == OutOfMemoryError.exit_code:
        return after.num_fallbacks > before.num_fallbacks
    if code == RunBusyError.exit_code:
        return num_round == 0  # the lock may be that of a machine that is gone: a restart waits for it
    if code == SegappError.exit_code:
        return after.step != before.step  # an error of the program, which comes again unless something has changed
    return True


class RunPolicy(Policy):
    """Ends or restarts a training by the exit code of its run.

    Args:
        train: the command of the ranks.
        max_restarts: restarts without a new checkpoint between them.
    """

    def __init__(self, train: TrainCommand, max_restarts: int) -> None:
        super().__init__()
        self._train, self._max_restarts = train, max_restarts
        self._num_round, self._num_vain = -1, 0
        self._before = Course()

    def begin_round(self) -> Sequence[str]:
        """Return the command of the ranks, which resume the run if it has begun."""
        self._before = read_course(self._train.run)
        self._num_round += 1
        resume = self._train.resume
        if resume is None or self._before.step is not None:
            resume = "auto"
        return ["-u", "-m", "segapp", "train", *self._train.words, "--resume", resume]

    def code_of_job(self, code: int, *, regroups: bool) -> int | None:
        """Return the exit code of the run if it ends; None if it restarts."""
        now = read_course(self._train.run)
        if now.end is not None and now.end != self._before.end:
            code = int(now.end["exit_code"])
        if regroups and code in (EXIT_STOPPED_AND_SAVED, 128 + 15):
            return None
        if not restarts(code, self._before, now, self._num_round):
            return code
        self._num_vain = 1 if now.step != self._before.step else self._num_vain + 1
        if self._num_vain > self._max_restarts:
            _say(f"error: exit code {code} again, {self._max_restarts} restarts have brought no new checkpoint")
            return code
        where = "from the start" if now.step is None else f"from step {now.step}"
        _say(f"exit code {code}: the ranks start again, {where}")
        return None

    def code_after_signal(self, number: int) -> int:
        """Return the exit code of a job that a signal ended while no rank could save."""
        is_saved = read_course(self._train.run).step is not None
        return EXIT_STOPPED_AND_SAVED if is_saved else 128 + number


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def launch(train: TrainCommand, options: LaunchOptions) -> int:
    """Run the ranks of this machine until the run ends, and return its exit code."""
    from torch.distributed import run

    words = ["--nnodes", options.nnodes, "--nproc-per-node", options.nproc_per_node]
    is_alone = options.nnodes in ("1", "1:1") and options.rdzv_endpoint is None
    if is_alone:
        words += ["--standalone", "--local-addr", "127.0.0.1"]
        _meet_on("127.0.0.1")
    elif options.rdzv_endpoint is None:
        raise ConfigError(
            f"--nnodes {options.nnodes} needs --rdzv-endpoint HOST:PORT: the name of one machine and a free port there"
        ).see("several-machines")
    else:
        address = options.local_addr or own_address(options.rdzv_endpoint)
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", options.rdzv_endpoint, "--local-addr", address]
        words += ["--rdzv-id", options.rdzv_id or train.run.name]
        _meet_on(address)
    words += [*options.others, "-m", "--", "segapp"]
    parsed = run.parse_args(words)  # type: ignore[no-untyped-call]
    if parsed.nproc_per_node.isdecimal():
        share = max(1, (os.cpu_count() or 1) // int(parsed.nproc_per_node))
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
    os.environ["SEGAPP_PARENT_PID"] = str(os.getpid())
    logging.disable(logging.ERROR)  # the ranks print their errors themselves
    policy = RunPolicy(train, options.max_restarts)
    return run_job(parsed, policy, shutdown_s=_grace_s(train))


def own_address(endpoint: str) -> str:
    """Return the address of this machine from which packets to the endpoint start; nothing is sent.

    Raises:
        ConfigError: the endpoint is no HOST:PORT, or no machine has its name.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        (family, kind, *_, target), *_ = socket.getaddrinfo(
            host or port, int(port) if host else 29400, type=socket.SOCK_DGRAM
        )
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--rdzv-endpoint {endpoint}: {error}: use HOST:PORT with an address that every machine can reach",
            value=endpoint,
        ).see("several-machines") from None


def _meet_on(address: str) -> None:
    """Let gloo use the network interface of an address: by default it takes that of the host name."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if address.startswith("127."):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _grace_s(train: TrainCommand) -> float:
    """Return the seconds that ranks have to save; where the config cannot be used, they say so themselves."""
    try:
        return plan_request(train.config, train.overrides, train.run, "auto").config.checkpoint.grace_s
    except SegappError:
        return 30.0
