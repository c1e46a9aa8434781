"""The agent of one of several machines: torch's elastic agent, with a policy that ends or restarts ranks by exit codes.

Agents meet in rounds. When a rank has ended, the agents either stop their ranks, meet again and start the next round,
or end the job: the first agent that knows the job's exit code writes it to the store of the rendezvous, and all agents
return that code.

Everyone who can reach the store can write to it, and torch unpickles the state of the rendezvous. So the agents sign
that state with a secret that they share.
"""

import contextlib
import hmac
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
from typing import Any, Protocol

from torch.distributed import run
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from segapp.compat.torch import rendezvous_store
from segapp.parallel.launch import LIMIT_S, PeerWatch, peer_limit_s
from segapp.waiting import lines_while

LOST = 8
"""Exit code of an agent that cannot reach the others."""

_PATIENCE_S = 10.0
"""Seconds after the end of the job in which ranks can end on their own and other agents can follow."""
_LOOK_S = 1.0
"""Seconds between reads of the store."""
_JOIN_S = 600.0
"""Maximum time to wait for the machine that holds the rendezvous."""
_STORE_ERRORS = (RuntimeError, ValueError, TimeoutError, RendezvousError)


class JobEndedError(Exception):
    """Ends the agent with the exit code of the job."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Policy(Protocol):
    """What the ranks of a round run, and what follows after the end of one."""

    def begin_round(self) -> Sequence[str]:
        """Return Python's arguments for the ranks of the next round."""

    def code_of_job(self, code: int, *, regroups: bool) -> int | None:
        """Return the exit code of the job after one of its ranks has ended with `code`; None: another round follows.

        `regroups`: an agent has stopped its ranks for another round, for example because a machine wants to join.
        """

    def code_after_signal(self, number: int) -> int:
        """Return the exit code of the job if a signal has stopped it before a rank could save."""


class Agent(LocalElasticAgent):
    """The agent of this machine: `spec` has its ranks, and how they meet the others."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: Any,
        policy: Policy,
        endpoint: tuple[str, int],
        shutdown_s: float,
        waiting: str,
    ) -> None:
        super().__init__(spec, logs_specs)
        self._policy, self._endpoint, self._waiting = policy, endpoint, waiting
        self._shutdown_timeout = int(shutdown_s)
        handler: Any = spec.rdzv_handler
        self._handler, self._num_waiting = handler, handler.num_nodes_waiting
        handler.num_nodes_waiting = lambda: self._ask(self._num_waiting) or 0  # without a store the ranks continue
        self._job: Any = None  # the store of all rounds; None if it no longer answers
        if (store := rendezvous_store(handler)) is not None:
            self._job = PrefixStore(f"segapp/{handler.get_run_id()}", store)
        self._round = -1
        self._pids: list[int] = []
        self._code: int | None = None  # exit code of the first rank that ended here
        self._signal: int | None = None
        self._last_look_s, self._job_end_s = 0.0, 0.0
        self._watch: PeerWatch | None = None

    def carry_out(self) -> int:
        """Run the job to its end and return its exit code: the same on every machine that can still read it."""
        threading.Thread(target=self._end_without_store, args=self._endpoint, daemon=True).start()
        code = 0
        try:
            self.run()  # returns if this machine was one too many, and the job has ended without it
        except JobEndedError as end:
            code = self._end_job(end.code)
        except RendezvousClosedError:
            code = self._fail("the job had ended when this machine came") if self._job is None else self._end_job(LOST)
        except RendezvousTimeoutError:
            code = self._fail("too few machines came to the rendezvous")
        except RendezvousConnectionError:
            code = self._fail("the rendezvous does not answer any more")
        except RendezvousStateError as error:
            code = self._fail(str(error))
        if self._signal is None and code not in (self._code, 0, 75):
            print(f"this machine ends with exit code {code}, as the others do", file=sys.stderr, flush=True)
        self._wait_for_agents()
        return code

    def pass_on(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal: pass it on to the ranks, which save and end; if there are none, end the job."""
        if number != signal.SIGUSR1:
            self._signal = number
            if not any(map(_is_running, self._pids)):
                if self._round < 0:
                    self._job = None  # the others do not need a machine that has not begun
                raise JobEndedError(self._policy.code_after_signal(number))
        for pid in filter(_is_running, self._pids):
            os.kill(pid, number)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other agents and agree on the number of the round, which a joining machine does not know."""
        self._end_watch()
        with lines_while(lambda: self._waiting, 1.0):
            super()._rendezvous(worker_group)
        store: Any = worker_group.store
        store.set(f"round/{worker_group.group_rank}", str(self._round + 1))
        rounds = store.multi_get([f"round/{i}" for i in range(worker_group.group_world_size or 1)])
        self._round = max(map(int, rounds))
        self._job = PrefixStore(f"segapp/{self._handler.get_run_id()}", store.underlying_store)
        worker_group.spec.max_restarts = self._round + self._remaining_restarts  # torch passes on the difference

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        worker_group.spec.args = ("-P", *self._policy.begin_round())
        self._code = None
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self._pids = list(ids.values())
        self._watch_agents(worker_group)
        ranks: Any = self._pcontext
        close = ranks.close  # with it, torch ends the other ranks if one has failed, after 30 s
        ranks.close = lambda death_sig=None, timeout=self._shutdown_timeout: close(death_sig, timeout)
        return ids

    def _watch_agents(self, worker_group: WorkerGroup) -> None:
        """Start to watch the other machines of the round: starting ranks would wait for a lost one for minutes."""
        names = {f"alive/{self._round}/{i}": f"machine {i}" for i in range(worker_group.group_world_size or 1)}
        key, limit_s = f"alive/{self._round}/{worker_group.group_rank}", peer_limit_s()
        del names[key]
        if names and limit_s:
            limit_s += _PATIENCE_S  # ranks that watch themselves end earlier, and report it
            with contextlib.suppress(*_STORE_ERRORS):
                store = self._job.clone()
                self._watch = PeerWatch(store, key, names, self._end_ranks, limit_s=limit_s, needs_store=False)

    def _end_ranks(self, reason: str) -> None:
        print(f"error: {reason}: the ranks of this machine end", file=sys.stderr, flush=True)
        for pid in filter(_is_running, self._pids):
            os.kill(pid, signal.SIGKILL)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop(has_left=True)
            self._watch = None

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        """Stop the ranks for another round, after the time that they need to save."""
        if self._code is None:
            print("other machines join or start again: the ranks of this one follow", file=sys.stderr, flush=True)
        self._ask(lambda: self._job.set(f"regroups/{self._round}", "1"))
        self._shutdown(timeout=self._shutdown_timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            self._look_for_end()
        elif result.state == WorkerState.SUCCEEDED:
            raise JobEndedError(0)
        elif result.state == WorkerState.FAILED:
            rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
            self._end_or_restart(rank, failure.exitcode)
            self._remaining_restarts = 1
        return result

    def _end_or_restart(self, rank: int, exitcode: int) -> None:
        """Raise JobEndedError unless another round follows after the end of a rank."""
        self._code = code = 128 - exitcode if exitcode < 0 else exitcode
        if exitcode < 0 and self._signal is None:
            name = signal.Signals(-exitcode).name
            print(f"error: rank {rank} was ended by {name}; the others were stopped", file=sys.stderr, flush=True)
        job_code = self._read_job_code()
        if job_code is None and self._signal is not None:
            is_unsaved = code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
            job_code = self._policy.code_after_signal(self._signal) if is_unsaved else code
        elif job_code is None:
            regroups = self._ask(lambda: self._job.check([f"regroups/{self._round}"]))
            job_code = self._policy.code_of_job(code, regroups=bool(regroups))
        if job_code is not None:
            raise JobEndedError(job_code)

    def _look_for_end(self) -> None:
        """Raise JobEndedError some seconds after another agent has ended the job: the ranks may end on their own."""
        now_s = time.monotonic()
        if now_s - self._last_look_s < _LOOK_S:
            return
        self._last_look_s = now_s
        if (code := self._read_job_code()) is not None:
            self._job_end_s = self._job_end_s or now_s
            if now_s - self._job_end_s > _PATIENCE_S:
                self._shutdown_timeout = min(self._shutdown_timeout, int(_PATIENCE_S))  # nothing is left to save
                raise JobEndedError(code)

    def _read_job_code(self) -> int | None:
        """Return the exit code of the job if an agent has ended it."""
        code: int | None = self._ask(lambda: int(self._job.get("code")) if self._job.check(["code"]) else None)
        return code

    def _end_job(self, code: int) -> int:
        """End the job with an exit code, or with the one that another agent wrote first; return it."""
        agreed: int | None = self._ask(lambda: int(self._job.compare_set("code", "", str(code))))
        self._ask(self._handler.set_closed)  # no machine waits for another round
        return code if agreed is None else agreed

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return the answer of the store; None if it does not answer."""
        try:
            return None if self._job is None else question()
        except _STORE_ERRORS:
            self._job = None
            return None

    def _wait_for_agents(self) -> None:
        """Wait until the other agents know the exit code, because the store ends with the agent that holds it."""
        self._end_watch()
        deadline_s = time.monotonic() + _PATIENCE_S + self._shutdown_timeout
        self._ask(lambda: self._job.add("ended", 1))
        num_machines = self._worker_group.group_world_size or 1
        while (self._ask(lambda: self._job.add("ended", 0)) or num_machines) < num_machines:
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.1)
        self._ask(self._handler.shutdown)

    def _fail(self, what: str) -> int:
        self._job = None
        code = self._code = LOST if self._code is None else self._code
        print(f"error: {what}: this machine ends with exit code {code}", file=sys.stderr, flush=True)
        return code

    def _end_without_store(self, host: str, port: int) -> None:
        """End this process if its ranks have ended and the rendezvous does not answer; the agent may wait for it."""
        answered_s = ran_s = time.monotonic()
        limit_s = peer_limit_s() or LIMIT_S
        while time.monotonic() - answered_s < limit_s or time.monotonic() - ran_s < _PATIENCE_S:
            time.sleep(_LOOK_S)
            if not self._pids or any(map(_is_running, self._pids)):
                ran_s = time.monotonic()
            if not self._pids or _answers(host, port):
                answered_s = time.monotonic()
        os._exit(self._fail("the rendezvous does not answer any more"))


def _is_running(pid: int) -> bool:
    """Return True while a child runs, without collecting its status."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


class SignedBackend(C10dRendezvousBackend):
    """A rendezvous with a signed state (HMAC-SHA256): nobody without the secret of the job can send it a pickle."""

    def __init__(self, store: Any, run_id: str, secret: bytes) -> None:
        super().__init__(store, run_id)
        self._run_id, self._secret = run_id, secret

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token; None if there is none.

        Raises:
            RendezvousStateError: the state was not signed with the secret.
        """
        signed = super().get_state()
        return None if signed is None else (self._verified(signed[0]), signed[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state that has this token; return the present state, its token, and if it was replaced."""
        signed = super().set_state(self._signature(state) + state, token)
        return None if signed is None else (self._verified(signed[0]), *signed[1:])

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._secret, self._run_id.encode() + b"\0" + state, "sha256")

    def _verified(self, signed: bytes) -> bytes:
        signature, state = signed[:32], signed[32:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError(
                f"the state of the rendezvous {self._run_id} was not written with the secret of this machine: use the "
                "same secret on all machines, and another --rdzv-id for each job"
            )
        return state


def run_job(options: Namespace, secret: bytes, policy: Policy, *, shutdown_s: float) -> int:
    """Run the ranks of this machine, and return the exit code of the job.

    SIGINT and SIGTERM are passed on to the ranks, which save and end; SIGUSR1 is passed on, too.

    Args:
        options: the options of torchrun.
        secret: the secret that the agents of the job share.
        policy: the arguments of the ranks, and the decision after the end of one.
        shutdown_s: seconds between SIGTERM and SIGKILL for the ranks.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # pytorch issue 135712: a restart joins the old store
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # torch's own handling loses the ranks' exit codes
    config, program, _ = run.config_from_args(options)
    machines = "{0}" if config.min_nodes == config.max_nodes else "{0} to {1}"
    machines = machines.format(config.min_nodes, config.max_nodes)
    limit_s = config.rdzv_configs.get("join_timeout", _JOIN_S)
    waiting = f"waiting at {config.rdzv_endpoint} for {machines} machines, for at most {float(limit_s):g} s"
    parameters = RendezvousParameters(
        backend="c10d",
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
        rdzv_handler=_handler_of(parameters, secret, waiting),
        **{name: getattr(config, name) for name in shared},
    )
    endpoint = parse_rendezvous_endpoint(config.rdzv_endpoint, 29400)
    agent = Agent(spec, config.logs_specs, policy, endpoint, shutdown_s, waiting)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, agent.pass_on)
    return agent.carry_out()


def _handler_of(parameters: RendezvousParameters, secret: bytes, waiting: str) -> Any:
    """Return the handler that meets the other agents; wait until the machine that holds the rendezvous has started."""
    deadline_s = time.monotonic() + _JOIN_S
    with lines_while(lambda: waiting, 1.0):
        while True:
            try:
                _, store = create_backend(parameters)
                return create_handler(store, SignedBackend(store, parameters.run_id, secret), parameters)
            except RendezvousConnectionError:
                if time.monotonic() > deadline_s:
                    raise
