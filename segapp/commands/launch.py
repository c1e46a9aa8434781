"""`segapp launch`: the ranks of one machine in a training on one or several machines, and their restart policy."""

import contextlib
import logging
import os
import secrets
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun

from segapp.config import load_config
from segapp.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DistributedError,
    NonFiniteError,
    OutOfMemoryError,
    RunBusyError,
    SegappError,
    StorageError,
)
from segapp.memory.gpus import visible_gpus
from segapp.parallel.agent import join_job
from segapp.parallel.agreement import AGREED_VARIABLE, MachineFacts
from segapp.parallel.launch import launch_local, peer_limit_s
from segapp.parallel.meeting import MeetingError, interface_addresses, local_address
from segapp.run.checkpoints import CheckpointFolder
from segapp.run.files import open_new, remove_quietly, storage_errors_of, temporary_name
from segapp.run.folder import RunFolder
from segapp.run.state import read_tail
from segapp.session.machine_facts import facts_of
from segapp.session.request import plan_request
from segapp.training.live.replay import fallbacks_after
from segapp.training.signals import EXIT_STOPPED_AND_SAVED

_ERRORS = (ConfigError, DataError, CheckpointError, NonFiniteError, StorageError)
SECRET_VARIABLE = "SEGAPP_LAUNCH_SECRET"
"""The secret that the machines of a job share."""
_SHORTEST_SECRET = 16
"""Characters."""
_FINISH_S = 60.0
"""Maximum time until the end of a run is seen in its folder, which may be on a network file system."""
FINAL = {0, EXIT_STOPPED_AND_SAVED, 130, 143, *(error.exit_code for error in _ERRORS)}
"""Exit codes after which a restart would end in the same way, or that a person requested."""


@dataclass(frozen=True)
class LaunchRequest:
    """A `segapp launch` command."""

    words: Sequence[str]
    """The words behind `train`, without --resume."""
    run: Path
    config: str | None
    overrides: Sequence[str]
    resume: str | None
    """Checkpoint that the training starts from; None: the run itself, if it has begun."""
    nnodes: str
    nproc_per_node: str
    rdzv_endpoint: str | None
    rdzv_id: str | None
    secret_file: Path | None
    local_addr: str | None
    max_restarts: int
    """Maximum number of restarts without a new checkpoint."""
    others: Sequence[str]
    """Further options of torchrun."""


def launch(request: LaunchRequest) -> int:
    """Run the ranks of this machine until the run ends, and return its exit code."""
    policy, grace_s = RunPolicy(request), _grace_s(request)
    if request.rdzv_endpoint is None or request.nnodes in ("1", "1:1"):
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        code = launch_local(policy.begin_round(), _num_local_ranks(request), shutdown_s=grace_s, signals=signals)
        return policy.code_after_signal(code - 128) if code in (130, 143) else code
    if any("rdzv" in word and "backend" in word for word in request.others):
        raise ConfigError("--rdzv-backend: only c10d has a signed state: leave the option out").see("several-machines")
    try:
        peer_limit_s()
    except ValueError as error:
        raise DistributedError(str(error)) from None
    _say(
        f"the ranks trust everyone who can reach {request.rdzv_endpoint} and the ports of this machine: use a private "
        "network (segapp docs several-machines)"
    )
    address = own_address(request.rdzv_endpoint, request.local_addr)
    given = ["--nnodes", request.nnodes, "--nproc-per-node", request.nproc_per_node, *request.others]
    words = [*given, "--rdzv-backend", "c10d", "--rdzv-endpoint", request.rdzv_endpoint]
    words += ["--rdzv-id", request.rdzv_id or request.run.name, "--local-addr", address, "-m", "--", "segapp"]
    options = torchrun.parse_args(words)  # type: ignore[no-untyped-call]
    if options.nproc_per_node.isdecimal():
        share = (os.cpu_count() or 1) // int(options.nproc_per_node)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    for name, addresses in interface_addresses().items():
        if address in addresses:  # by default gloo uses the interface of the host name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ[AGREED_VARIABLE] = "1"
    os.environ["SEGAPP_PARENT_PID"] = str(os.getpid())  # the ranks end with this process
    logging.disable(logging.ERROR)  # the ranks print their errors themselves
    secret, port = shared_secret(request), fixed_port(request.others)
    try:
        agent = join_job(options, secret, policy, shutdown_s=grace_s, master_port=port)
    except MeetingError as error:
        raise DistributedError(
            f"{error}: start the machine of the endpoint, or wait longer with --rdzv-conf=join_timeout=SECONDS"
        ).see("several-machines") from None
    except ValueError as error:
        raise ConfigError(f"{' '.join(given)}: {error}: correct the option").see("several-machines") from None
    return agent.carry_out()


def _num_local_ranks(request: LaunchRequest) -> int:
    """Return the number of ranks of a job on one machine, which needs no rendezvous.

    Raises:
        ConfigError: the options need several machines.
    """
    if request.nnodes not in ("1", "1:1"):
        raise ConfigError(
            f"--nnodes {request.nnodes} needs --rdzv-endpoint HOST:PORT: one of the machines, and a free port there"
        ).see("several-machines")
    others = [word for word in request.others if not word.startswith("--rdzv")]  # a scheduler's script gives them too
    if others:
        raise ConfigError(
            f"{' '.join(others)}: torchrun's options are for several machines: leave them out with --nnodes 1"
        ).see("several-machines")
    try:
        return int(torchrun.determine_local_world_size(request.nproc_per_node))
    except ValueError as error:
        found = visible_gpus().problem if request.nproc_per_node == "gpu" else ""
        problem = "; ".join(filter(None, (str(error), found)))
        raise ConfigError(f"--nproc-per-node {request.nproc_per_node}: {problem}: use a number or gpu") from None


def shared_secret(request: LaunchRequest) -> bytes:
    """Return the secret with which the machines of a job sign what they tell each other.

    It comes from SEGAPP_LAUNCH_SECRET, or from a file that only its owner can read: `--secret-file`, by default next to
    the run folder, which all machines share. The first machine makes the file.

    Raises:
        ConfigError: the file can be read by others or belongs to them, or holds too few characters.
        StorageError: it cannot be made or read.
    """
    where: str | Path = SECRET_VARIABLE
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        run = request.run.absolute()
        where = path = request.secret_file or run.with_name(f".{run.name}.secret")
        with storage_errors_of("share a secret in", path):
            secret = _secret_in(path)
    if len(secret) < _SHORTEST_SECRET:
        raise ConfigError(
            f"{where} has {len(secret)} characters: use a secret of at least {_SHORTEST_SECRET}, such as the output of "
            "`openssl rand -hex 16`"
        ).see("several-machines")
    return secret.encode()


def _secret_in(path: Path) -> str:
    """Return the secret in a file; make both if there is no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(temporary_name())
    try:
        with open(open_new(made, 0o600), "w") as file:
            file.write(secrets.token_hex(16))
        with contextlib.suppress(FileExistsError):  # another machine was first
            os.link(made, path)
    finally:
        remove_quietly(made)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), errors="replace") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o077 or facts.st_uid != os.geteuid():
            raise ConfigError(
                f"{path} is no plain file, belongs to another user or can be read by others: use a file of your own, "
                "and run `chmod 600`",
                path=path,
            )
        return file.read(2**12).strip()


def own_address(endpoint: str, wanted: str | None = None) -> str:
    """Return the address by which the others reach this machine; `wanted` is an interface, a name or an address.

    Raises:
        ConfigError: the endpoint is not HOST:PORT, its host name is unknown, or the address does not follow from it.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"--rdzv-endpoint {endpoint}: use HOST:PORT with a name or address that every machine can reach"
        ).see("several-machines")
    try:
        return local_address(host.strip("[]"), int(port), wanted)
    except ValueError as error:
        raise ConfigError(f"--rdzv-endpoint {endpoint}: {error}").see("several-machines") from None


def fixed_port(words: Sequence[str]) -> int | None:
    """Return the port of `--master-port=PORT` among the options of torchrun, which has a default for it; None: none."""
    ports = [word.partition("=")[2] for word in words if word.replace("_", "-").startswith("--master-port=")]
    return int(ports[-1]) if ports and ports[-1].isdecimal() else None


def _grace_s(request: LaunchRequest) -> float:
    """Return the seconds that ranks have to save. If the config cannot be used, the ranks report it."""
    try:
        return plan_request(request.config, request.overrides, request.run, "auto").config.checkpoint.grace_s
    except SegappError:
        return 30.0


@dataclass(frozen=True)
class Course:
    """State of a run as its folder shows it."""

    step: int | None = None
    """Step of the newest checkpoint."""
    end: dict[str, Any] | None = None
    """The `run_end`; None if the run has started again since then."""
    num_fallbacks: int = 0
    """Number of times that the run has found a way to continue with less memory."""


def read_course(path: Path) -> Course:
    """Return the state in the folder of a run; empty if there is no folder."""
    folder = RunFolder(path)
    manifest = CheckpointFolder(folder.checkpoints).read_manifest()
    # Without its number, which changes if a resume removes events before it.
    known = [raw | {"seq": None} for raw in read_tail(folder.events) if raw["type"] in ("run_start", "run_end")]
    end = known[-1] if known and known[-1]["type"] == "run_end" else None
    step = manifest.entries[0].step if manifest.entries else None
    return Course(step, end, len(fallbacks_after(folder, 0)))


def can_do_better(code: int, before: Course, after: Course, num_round: int) -> bool:
    """Return True if another round can end differently from the one that ended with `code`.

    Args:
        code: exit code of the run, 128 + n for signal n.
        before: the run at the start of the round.
        after: the run now.
        num_round: number of the round, from 0.
    """
    if code == OutOfMemoryError.exit_code:
        return after.num_fallbacks > before.num_fallbacks
    if code == RunBusyError.exit_code:
        return num_round == 0  # a restart waits for the lock, which a lost machine may have left
    if code == SegappError.exit_code:
        return after.step != before.step  # an error of the program occurs again, unless something has changed
    return code not in FINAL


class RunPolicy:
    """Ends or restarts a training depending on the exit code of its run."""

    def __init__(self, request: LaunchRequest) -> None:
        self._request = request
        self._num_rounds, self._num_vain, self._before = 0, 0, Course()
        self._facts: MachineFacts | None = None

    def facts(self) -> MachineFacts:
        """Return the facts that this machine brings to the job, by the config as the user has given it.

        A run that has begun changes that config, such as a batch size of auto, and machines may join later.
        """
        if self._facts is None:
            request = self._request
            try:
                config = (
                    load_config(request.config, request.overrides)
                    if request.config is not None
                    else plan_request(None, request.overrides, request.run, request.resume or "auto").config
                )
                facts = facts_of(config)
                port = {"--master-port": str(fixed_port(request.others) or "a free one")}
                self._facts = replace(facts, settings={**facts.settings, **port})
            except SegappError as error:
                self._facts = MachineFacts(socket.gethostname(), problem=(error.exit_code, str(error)))
        return self._facts

    def begin_round(self) -> Sequence[str]:
        """Return the command of the ranks, which continue the run if it has begun."""
        self._before = read_course(self._request.run)
        self._num_rounds += 1
        resume = self._request.resume if self._before.step is None else None
        return ["-u", "-m", "segapp", "train", *self._request.words, "--resume", resume or "auto"]

    def code_of_job(self, code: int, *, regroups: bool, is_cause: bool = False) -> int | None:
        """Return the exit code of the run if it has ended; None if it starts again.

        Unless the code belongs to the first error, the one in the run's end counts.
        """
        now = read_course(self._request.run)
        # An end from before this round belongs to an earlier training.
        end = now.end if now.end != self._before.end else None
        if end is not None and end.get("exit_code") is not None and not is_cause:
            code = int(end["exit_code"])
        # The ranks were stopped to start again with other machines, so the run has not ended.
        if regroups and code in (EXIT_STOPPED_AND_SAVED, 143) and (end or {}).get("stopped_by") != "command":
            return None
        if not can_do_better(code, self._before, now, self._num_rounds - 1):
            return code
        # A new checkpoint is progress, after which the count begins again.
        self._num_vain = 1 if now.step != self._before.step else self._num_vain + 1
        if self._num_vain > self._request.max_restarts:
            _say(f"exit code {code}: no restarts are left: the last {self._num_vain - 1} brought no new checkpoint")
            return code
        where = "from the start" if now.step is None else f"from step {now.step}"
        _say(f"exit code {code}: the ranks start again {where}")
        return None

    def code_of_success(self) -> int:
        """Return 0 once the folder of the run says that it has finished; otherwise the code of DistributedError."""
        deadline_s = time.monotonic() + _FINISH_S
        while (read_course(self._request.run).end or {}).get("status") != "finished":
            if time.monotonic() > deadline_s:
                code = DistributedError.exit_code
                _say(f"error: all ranks ended with 0, but {self._request.run} does not say that the run has finished")
                return code
            time.sleep(0.2)
        return 0

    def code_after_signal(self, number: int) -> int:
        """Return the exit code of a run if a signal ended it before a rank could save."""
        return 128 + number if read_course(self._request.run).step is None else EXIT_STOPPED_AND_SAVED


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
