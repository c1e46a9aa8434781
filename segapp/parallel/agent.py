"""The agent of one machine: torch's elastic agent, with a policy that ends or restarts the ranks by their exit codes.

Agents meet in rounds. If a rank ends and the policy allows it, all agents stop their ranks, meet again, and start the
next round. Otherwise the job ends: the first agent to know its exit code writes it to the store of the rendezvous,
and every agent returns that code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import FrameType
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

STORE_S = 45.0
"""Seconds that an agent waits for a rendezvous that no longer answers, after its ranks have ended."""
LOST = 8
"""Exit code of an agent that cannot meet the others."""

_PATIENCE_S = 10.0  # of an agent for its ranks to end by themselves, and for the other agents, once the job has ended
_STORE_ERRORS = (RuntimeError, ValueError, TimeoutError)
_CODE, _ENDED, _REGROUPS = "segapp/code", "segapp/ended", "segapp/regroups"


class JobEndedError(Exception):
    """Ends the agent with the exit code of the job."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Policy:
    """What follows when a rank has ended: this policy ends the job with the exit code of that rank."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self.command = command

    def begin_round(self) -> Sequence[str]:
        """Return the arguments of Python for the ranks of the round that begins."""
        return self.command

    def code_of_job(self, code: int, *, regroups: bool) -> int | None:
        """Return the exit code of the job after one of its ranks has ended with `code`; None: another round follows.

        `regroups`: an agent has stopped the ranks because a machine joins or leaves.
        """
        return code

    def code_after_signal(self, number: int) -> int:
        """Return the exit code of the job if a signal has stopped it while no rank could save."""
        return 128 + number


class Agent(LocalElasticAgent):
    """The agent of this machine.

    Args:
        spec: the ranks of this machine and how they meet the others.
        logs_specs: where the output of the ranks goes.
        policy: what follows when a rank has ended.
        endpoint: address and port of the rendezvous; None if this process holds it for itself.
        shutdown_s: seconds between SIGTERM and SIGKILL for the ranks.
    """

    def __init__(
        self, spec: WorkerSpec, logs_specs: Any, policy: Policy, endpoint: tuple[str, int] | None, *, shutdown_s: float
    ) -> None:
        super().__init__(spec, logs_specs)
        self._policy, self._endpoint, self._shutdown_s = policy, endpoint, int(shutdown_s)
        self._shutdown_timeout = self._shutdown_s
        self._round, self._next_round = 0, 0
        self._pids: list[int] = []
        self._code: int | None = None
        self._looked_s = 0.0
        self._ended_s: float | None = None
        self._is_store_gone = False
        self._signal: int | None = None
        self._ask_for_new_machines = spec.rdzv_handler.num_nodes_waiting
        spec.rdzv_handler.num_nodes_waiting = self._num_nodes_waiting  # type: ignore[method-assign]

    def carry_out(self) -> int:
        """Run the job to its end and return its exit code; the same on every machine that can still ask for it."""
        if self._endpoint is not None:
            threading.Thread(
                target=self._end_without_store, args=self._endpoint, name="store-watch", daemon=True
            ).start()
        try:
            self.run()
            code = self._agreed(self._code or 0)
        except JobEndedError as end:
            code = end.code
        except RendezvousClosedError:  # another agent has ended the job
            code = self._agreed(LOST if self._code is None else self._code)
        except RendezvousTimeoutError:
            code = self._alone("too few machines came to the rendezvous")
        except RendezvousConnectionError:
            code = self._alone("the rendezvous does not answer any more")
        if not self._is_store_gone:
            self._part()
        return code

    def pass_on(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal: pass it on to the ranks, which save and end; without ranks, end the job."""
        if number != signal.SIGUSR1:
            self._signal = number
        if self._signal is not None and not any(_is_running(pid) for pid in self._pids):
            raise JobEndedError(self._agreed(self._policy.code_after_signal(number)))
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other agents and agree on the number of the round, which a machine that joins does not know."""
        self._pids = []
        super()._rendezvous(worker_group)
        store: Any = worker_group.store
        store.set(f"segapp/round/{worker_group.group_rank}", str(self._next_round))
        of_all = store.multi_get([f"segapp/round/{each}" for each in range(worker_group.group_world_size or 1)])
        self._round = max(int(each) for each in of_all)
        self._next_round = self._round + 1
        worker_group.spec.max_restarts = self._round + self._remaining_restarts  # torch tells the ranks the difference

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        worker_group.spec.args = tuple(self._policy.begin_round())
        self._code = self._ended_s = None
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self._pids = list(ids.values())
        ranks: Any = self._pcontext
        close = ranks.close  # torch ends the other ranks through it when one has failed, after 30 s
        ranks.close = lambda death_sig=None, timeout=self._shutdown_s: close(death_sig, timeout)
        return ids

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        """Stop the ranks for another round, with the time that they need to save."""
        if not self._is_store_gone:
            with contextlib.suppress(*_STORE_ERRORS):
                self._round_store().set(_REGROUPS, "1")
        self._shutdown(timeout=self._shutdown_s)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            self._look_for_end()
        elif result.state == WorkerState.SUCCEEDED:
            raise JobEndedError(self._agreed(0))
        elif result.state == WorkerState.FAILED:
            rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
            self._end_or_restart(rank, failure.exitcode)
            self._remaining_restarts = 1
        return result

    def _end_or_restart(self, rank: int, exitcode: int) -> None:
        """Raise JobEndedError unless another round follows after the end of a rank."""
        if exitcode < 0 and self._signal is None:
            name = signal.Signals(-exitcode).name
            print(f"error: rank {rank} was ended by {name}; the others were stopped", file=sys.stderr, flush=True)
        self._code = code = 128 - exitcode if exitcode < 0 else exitcode
        known = self._known()
        if known is not None:
            raise JobEndedError(known)
        if self._signal is not None:
            is_unsaved = code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
            raise JobEndedError(self._agreed(self._policy.code_after_signal(self._signal) if is_unsaved else code))
        of_job = self._policy.code_of_job(code, regroups=self._asked(lambda: self._round_store().check([_REGROUPS])))
        if of_job is not None:
            raise JobEndedError(self._agreed(of_job))

    def _look_for_end(self) -> None:
        """Raise JobEndedError some seconds after another agent has ended the job: the ranks may end by themselves."""
        now_s = time.monotonic()
        if now_s - self._looked_s < 1:
            return
        self._looked_s = now_s
        if (code := self._known()) is None:
            return
        self._ended_s = self._ended_s or now_s
        if now_s - self._ended_s > _PATIENCE_S:
            raise JobEndedError(code)

    def _num_nodes_waiting(self) -> int:
        """Return the machines that wait for another round; 0 without a store: the ranks notice if they need it."""
        if self._is_store_gone:
            return 0
        try:
            return self._ask_for_new_machines()
        except RendezvousError:
            self._is_store_gone = True
            return 0

    def _round_store(self) -> Any:
        """Return the store of this round."""
        return self._worker_group.store

    def _job_store(self) -> Any:
        """Return the store of all rounds."""
        store = self._round_store()
        return getattr(store, "underlying_store", store)

    def _job_key(self) -> str:
        return f"{_CODE}/{self._worker_group.spec.rdzv_handler.get_run_id()}"

    def _known(self) -> int | None:
        """Return the exit code of the job if an agent has ended it."""
        store, key = self._job_store(), self._job_key()
        code: int | None = self._asked(lambda: int(store.get(key)) if store.check([key]) else None)
        return code

    def _agreed(self, code: int) -> int:
        """End the job with an exit code, or with the one that another agent was first to write; return it."""
        store, key = self._job_store(), self._job_key()
        agreed: int | None = self._asked(lambda: int(store.compare_set(key, "", str(code))))
        if not self._is_store_gone:
            handler: Any = self._worker_group.spec.rdzv_handler
            with contextlib.suppress(RendezvousError):
                handler.set_closed()  # no machine waits for another round
        return code if agreed is None else agreed

    def _asked(self, question: Callable[[], Any]) -> Any:
        """Return the store's answer; None if there is no store, or it is gone."""
        if self._is_store_gone or self._round_store() is None:
            return None
        try:
            return question()
        except _STORE_ERRORS:
            self._is_store_gone = True
            return None

    def _part(self) -> None:
        """Wait until the other agents know the exit code: the store ends with the agent that holds it."""
        deadline_s = time.monotonic() + _PATIENCE_S + self._shutdown_s
        handler, store = self._worker_group.spec.rdzv_handler, self._round_store()
        with contextlib.suppress(*_STORE_ERRORS):
            if store is not None and store.add(_ENDED, 1):
                while store.add(_ENDED, 0) < self._worker_group.group_world_size and time.monotonic() < deadline_s:
                    time.sleep(0.1)
        with contextlib.suppress(*_STORE_ERRORS, RendezvousError):
            handler.shutdown()

    def _alone(self, what: str) -> int:
        code = LOST if self._code is None else self._code
        print(f"error: {what}: the agent ends with exit code {code}", file=sys.stderr, flush=True)
        return code

    def _end_without_store(self, host: str, port: int) -> None:
        """End this process if its ranks have ended and the rendezvous does not answer: the agent may wait for it."""
        gone_s: float | None = None
        while True:
            time.sleep(1)
            if not self._pids or any(_is_running(pid) for pid in self._pids) or _answers(host, port):
                gone_s = None
                continue
            gone_s = gone_s or time.monotonic()
            if time.monotonic() - gone_s > STORE_S:
                code = self._alone("the rendezvous does not answer any more")
                sys.stdout.flush()
                os._exit(code)


def _is_running(pid: int) -> bool:
    """Return True while a child runs; does not collect its status."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def run_job(
    options: Namespace, policy: Policy | None = None, *, shutdown_s: float = 30.0, join_s: float = 600.0
) -> int:
    """Run the ranks of this machine, and return the exit code of the job.

    SIGINT and SIGTERM are passed on to the ranks, which save and end; SIGUSR1 is passed on, too.

    Args:
        options: the options of torchrun, and the program of the ranks.
        policy: what follows when a rank has ended, and the program; by default the one of the options, which ends with
            the first rank that fails.
        shutdown_s: seconds between SIGTERM and SIGKILL for the ranks.
        join_s: seconds to wait for the machine that holds the rendezvous.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # pytorch issue 135712: a restart joins the old store
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # torch's own handling loses the ranks' exit codes
    if options.standalone:
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", "127.0.0.1:0", str(os.getpid())
    config, program, command = run.config_from_args(options)
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    shared = {field.name for field in fields(WorkerSpec)} & {field.name for field in fields(config)}
    spec = WorkerSpec(
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        rdzv_handler=_handler_of(parameters, join_s),
        **{name: getattr(config, name) for name in shared},
    )
    endpoint = None if options.standalone else parse_rendezvous_endpoint(config.rdzv_endpoint, 29400)
    agent = Agent(spec, config.logs_specs, policy or Policy(command), endpoint, shutdown_s=shutdown_s)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, agent.pass_on)
    return agent.carry_out()


def _handler_of(parameters: RendezvousParameters, join_s: float) -> Any:
    """Return what meets the other agents; waits until the machine that holds the rendezvous has started."""
    deadline_s = time.monotonic() + join_s
    while True:
        try:
            return rendezvous_handler_registry.create_handler(parameters)
        except RendezvousConnectionError:
            if time.monotonic() > deadline_s:
                raise
            print(f"waiting for the rendezvous at {parameters.endpoint}", flush=True)
