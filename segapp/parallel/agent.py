"""The agent of one of several machines: torch's elastic agent, with a policy that ends or restarts ranks by exit codes.

Agents meet in rounds. In the first one they compare what their machines bring to the job (`agreement`), and keep it in
the store of the rendezvous, with which a machine that comes later is compared before it joins. When a rank has ended,
the agents either stop their ranks, meet again and start the next round, or end the job: the first agent that knows the
job's exit code writes it to the store, and all agents return that code. The first error of a rank that no lost peer has
caused is the cause of a round's end; all agents print it.

Everyone who can reach the store can write to it, and torch unpickles the state of the rendezvous. So the agents sign
that state, and every value by which they decide, with a secret that they share.
"""

import contextlib
import hmac
import json
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from types import FrameType
from typing import Any, NoReturn, Protocol

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
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from segapp.compat.torch import rendezvous_handler, rendezvous_members, rendezvous_round, rendezvous_store
from segapp.parallel.agreement import Agreement, MachineFacts, compare
from segapp.parallel.launch import LIMIT_S, PeerWatch, RankError, first_error, peer_limit_s
from segapp.parallel.meeting import is_here, joined_store, listening_address, probe
from segapp.waiting import lines_while

LOST = 8
"""Exit code of an agent that cannot reach the others."""

_PATIENCE_S = 10.0
"""Seconds after the end of the job in which ranks can end on their own and other agents can follow."""
_LOOK_S = 1.0
"""Seconds between reads of the store."""
_JOIN_S = 600
"""Maximum time to wait for the machine that holds the rendezvous, unless `join_timeout` sets another one."""
_MOMENTS_S = 2.0
"""Seconds in which agents that wait for others can read that the job has ended."""
_LOST_VARIABLE = "SEGAPP_LOST_SINCE_S"
"""When this machine lost the rendezvous, for the command that it starts again."""
_CAUSE_S = 3.0
"""Maximum time to wait for the error of another machine's rank after a rank here has lost a peer."""
_ANSWER_S = 60.0
"""Maximum time in which the machines of a meeting tell each other what they bring."""
_STORE_ERRORS = (RuntimeError, ValueError, TimeoutError, RendezvousError)


class JobEndedError(Exception):
    """Ends the agent with the exit code of the job."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Policy(Protocol):
    """What the ranks of a round run, and what follows after the end of one."""

    def facts(self) -> MachineFacts:
        """Return the facts that this machine brings to the job."""

    def begin_round(self) -> Sequence[str]:
        """Return Python's arguments for the ranks of the next round."""

    def code_of_job(self, code: int, *, regroups: bool, is_cause: bool) -> int | None:
        """Return the exit code of the job after one of its ranks has ended with `code`; None: another round follows.

        `regroups`: an agent has stopped its ranks for another round, for example because a machine wants to join.
        `is_cause`: the code belongs to the first error, which the end of the run may not know.
        """

    def code_of_success(self) -> int:
        """Return 0 if the run has finished, as its folder says, and the code of a lost job if not."""

    def code_after_signal(self, number: int) -> int:
        """Return the exit code of the job if a signal has stopped it before a rank could save."""


class SignedStore:
    """The values by which agents decide, each signed (HMAC-SHA256) over the job, its key and the value.

    A value without a valid signature counts as absent. It is reported once, and its writer replaces it.
    """

    def __init__(self, store: Any, job: str, secret: bytes) -> None:
        self.store: Any = PrefixStore(f"segapp/{job}", store)
        self._job, self._secret = job, secret

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if there is none."""
        return self._verified(key, self.store.get(key)) if self.store.check([key]) else None

    def set(self, key: str, value: str) -> None:
        """Set the value of a key that only this process writes."""
        self.store.set(key, self._signed(key, value))

    def first(self, key: str, value: str) -> str:
        """Set a value unless the key has one; return the one that it has."""
        own, replaced = self._signed(key, value), b""
        while (now := self.store.compare_set(key, replaced, own)) != own.encode():
            if (valid := self._verified(key, now)) is not None:
                return valid
            replaced = b"" if now == replaced else now  # the store answers with this if the key is gone
        return value

    def _signed(self, key: str, value: str) -> str:
        text = "\0".join((self._job, key, value))
        return f"{hmac.digest(self._secret, text.encode(), 'sha256').hex()} {value}"

    def _verified(self, key: str, signed: bytes) -> str | None:
        value = signed.decode(errors="replace").partition(" ")[2]
        if hmac.compare_digest(signed, self._signed(key, value).encode()):
            return value
        _report_forged(self._job, key)
        return None


@cache
def _report_forged(job: str, key: str) -> None:
    line = f"{key} of the job {job} was written without its secret, and is ignored: others can reach the rendezvous"
    print(f"error: {line}", file=sys.stderr, flush=True)


class Agent(LocalElasticAgent):
    """The agent of this machine: `spec` has its ranks, and how they meet the others.

    Args:
        endpoint: host and port of the rendezvous.
        shutdown_s: seconds between SIGTERM and SIGKILL for the ranks.
        waiting: what a line about a long wait begins with.
        join_s: maximum time to wait for a rendezvous that no longer answers.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: Any,
        policy: Policy,
        secret: bytes,
        endpoint: tuple[str, int],
        *,
        shutdown_s: float = 30.0,
        waiting: str = "",
        join_s: float = _JOIN_S,
    ) -> None:
        super().__init__(spec, logs_specs)
        self._policy, self._secret, self._endpoint, self._waiting = policy, secret, endpoint, waiting
        self._shutdown_timeout, self._join_s, self._limit_s = int(shutdown_s), join_s, peer_limit_s()
        handler: Any = spec.rdzv_handler
        self._handler, self._num_waiting = handler, handler.num_nodes_waiting
        handler.num_nodes_waiting = lambda: self._ask(self._num_waiting) or 0  # without a store the ranks continue
        self._job: SignedStore | None = None  # of all rounds; None if it no longer answers
        if (store := rendezvous_store(handler)) is not None:
            self._job = SignedStore(store, handler.get_run_id(), secret)
        self._round = -1
        self._pids: list[int] = []
        self._code: int | None = None  # exit code of the first rank that ended here
        self._cause: RankError | None = None  # of the end of this round
        self._is_over = self._is_lost = self._is_meeting = False
        self._signal: int | None = None
        self._last_look_s, self._job_end_s = 0.0, 0.0
        self._watch: PeerWatch | None = None

    def carry_out(self) -> int:
        """Run the job to its end and return its exit code: the same on every machine that can still read it."""
        threading.Thread(target=self._follow_endpoint, name="endpoint", daemon=True).start()
        code = 0
        try:
            self._compare_with_job()
            self.run()  # returns if this machine was one too many, and the job has ended without it
        except JobEndedError as end:
            code = self._end_job(end.code)
        except RendezvousClosedError:
            code = self._fail("the job had ended when this machine came") if self._job is None else self._end_job(LOST)
        except RendezvousTimeoutError:
            code = self._fail("too few machines came to the rendezvous")
        except RendezvousConnectionError:
            self._wait_for_endpoint()
        except RendezvousStateError as error:
            code = self._fail(str(error))
        if self._signal is None and code not in (self._code, 0, 75):
            print(f"this machine ends with exit code {code}, as the others do", file=sys.stderr, flush=True)
        self._wait_for_agents()
        return self._policy.code_of_success() if code == 0 else code

    def pass_on(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal: pass it on to the ranks, which save and end; if there are none, end the job."""
        if number != signal.SIGUSR1:
            self._signal = number
            if self._is_lost:
                os._exit(self._policy.code_after_signal(number))
            if not any(map(_is_running, self._pids)):
                if self._round < 0:
                    self._job = None  # the others do not need a machine that has not begun
                raise JobEndedError(self._policy.code_after_signal(number))
        for pid in filter(_is_running, self._pids):
            os.kill(pid, number)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other agents; compare what they bring, and agree on the number of the round.

        A joining machine does not know that number. Raise JobEndedError if the machines disagree.
        """
        self._end_watch()
        self._is_meeting = True
        with lines_while(self._waiting_line, 1.0):
            while True:
                try:
                    super()._rendezvous(worker_group)
                    break
                except KeyError:  # the others began without this machine, which was silent: it joins their next round
                    continue
        settings, number = self._handler.settings, worker_group.group_rank or 0
        num_machines = worker_group.group_world_size or 0
        if not settings.min_nodes <= num_machines <= settings.max_nodes or number >= num_machines:
            raise RendezvousStateError(
                f"the meeting ended with {num_machines} machines, of which this is number {number}, instead of "
                f"{settings.min_nodes} to {settings.max_nodes} machines: start the job again"
            )
        store: Any = worker_group.store
        self._job = SignedStore(store.underlying_store, self._handler.get_run_id(), self._secret)
        try:
            told = self._sent_by_all(self._job, number, num_machines)
            self._agree(self._job, [facts for _, facts in told], number)
        except RendezvousStateError:
            raise
        except _STORE_ERRORS as error:
            raise RendezvousConnectionError(str(error)) from error
        self._is_meeting = False
        os.environ.pop(_LOST_VARIABLE, None)
        self._round, self._cause = max(num_round for num_round, _ in told), None
        worker_group.spec.max_restarts = self._round + self._remaining_restarts  # torch passes on the difference

    def _waiting_line(self) -> str:
        members = rendezvous_members(self._handler)
        return f"{self._waiting}; there so far: {', '.join(members) or 'none'}"

    def _sent_by_all(self, job: SignedStore, number: int, num_machines: int) -> list[tuple[int, MachineFacts]]:
        """Return the number of the round and the facts that each machine of a meeting has."""
        place = f"here/{rendezvous_round(self._handler)}"
        own, deadline_s = json.dumps([self._round + 1, self._policy.facts().as_json()]), time.monotonic() + _ANSWER_S
        while True:
            if job.get(f"{place}/{number}") is None:
                job.set(f"{place}/{number}", own)
            told = [job.get(f"{place}/{i}") for i in range(num_machines)]
            if None not in told:
                break
            if time.monotonic() > deadline_s:
                raise RendezvousStateError(
                    f"machine {told.index(None)} of the meeting has said nothing, or not with the secret of this job"
                )
            time.sleep(0.1)
        return [
            (int(num_round), MachineFacts.from_json(facts)) for num_round, facts in map(json.loads, filter(None, told))
        ]

    def _agree(self, job: SignedStore, machines: Sequence[MachineFacts], number: int) -> None:
        """Raise JobEndedError if the machines of the job's first meeting disagree; record what they agree on."""
        if job.get("record") is not None:
            self._compare_with_job()
            return
        agreement = compare(machines)
        self._print(agreement)
        if agreement.code:
            self._code = agreement.code
            raise JobEndedError(agreement.code)
        if number == 0:
            job.first("record", machines[0].as_json())

    def _compare_with_job(self) -> None:
        """End this machine, but not the job, if it brings something else than the machines of the first meeting."""
        record: str | None = self._ask(lambda: self._job and self._job.get("record"))
        if record is None:
            return
        began = replace(MachineFacts.from_json(record), machine="the machines that began the job")
        agreement = compare([began, self._policy.facts()])
        self._print(agreement)
        if agreement.code:
            self._job, self._code = None, agreement.code  # the others continue
            raise JobEndedError(agreement.code)

    def _print(self, agreement: Agreement) -> None:
        if agreement.note:
            print(f"note: {agreement.note}", file=sys.stderr, flush=True)
        if agreement.code:
            print(f"error: {agreement.reason}", file=sys.stderr, flush=True)

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
        key = f"alive/{self._round}/{worker_group.group_rank}"
        del names[key]
        if names and self._limit_s and self._job is not None:
            limit_s = self._limit_s + _PATIENCE_S  # ranks that watch themselves end earlier, and report it
            with contextlib.suppress(*_STORE_ERRORS):
                store = self._job.store.clone()
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
        self._ask(lambda: self._job and self._job.first(f"regroups/{self._round}", "1"))
        self._shutdown(timeout=self._shutdown_timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            self._look_for_cause()
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
        was_killed = exitcode < 0 and self._signal is None
        name = f"rank {rank} was ended by {signal.Signals(-exitcode).name}" if was_killed else ""
        if was_killed:
            print(f"error: {name}; the others were stopped", file=sys.stderr, flush=True)
        self._look_for_cause(RankError(code, name) if was_killed else None)
        # A rank with this code has only lost its peers, and the agent of the first one names the cause a moment later.
        deadline_s = time.monotonic() + _CAUSE_S
        while code == LOST and self._cause is None and self._job is not None and time.monotonic() < deadline_s:
            time.sleep(0.1)
            self._look_for_cause()
        job_code = self._read_job_code()
        if job_code is None and self._signal is not None:
            # Killed by the signal itself, a rank could not choose its code.
            is_unsaved = code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
            job_code = self._policy.code_after_signal(self._signal) if is_unsaved else code
        elif job_code is None:
            regroups = self._ask(lambda: self._job and self._job.get(f"regroups/{self._round}"))
            is_cause = self._cause is not None
            code = code if self._cause is None else self._cause.code
            job_code = self._policy.code_of_job(code, regroups=bool(regroups), is_cause=is_cause)
        if job_code is not None:
            raise JobEndedError(job_code)

    def _look_for_cause(self, error: RankError | None = None) -> None:
        """Find the first error of the round, of a rank here or on another machine, and print it.

        `error` belongs to a rank here that could not write it.
        """
        if self._cause is not None:
            return
        ranks: Any = self._pcontext
        found, key = first_error(ranks.error_files.values()) or error, f"cause/{self._round}"
        facts = self._policy.facts()
        # `first` keeps the cause that is written first, so that every machine names the same one.
        told: str | None = self._ask(
            lambda: self._job and (self._job.first(key, found.sent_by(facts.machine)) if found else self._job.get(key))
        )
        if told is not None:
            machine, self._cause = RankError.from_sent(told)
            print(f"the first error was on {machine}: {self._cause.message}", file=sys.stderr, flush=True)

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
        code: str | None = self._ask(lambda: self._job and self._job.get("code"))
        return None if code is None else int(code)

    def _end_job(self, code: int) -> int:
        """End the job with an exit code, or with the one that another agent wrote first; return it."""
        agreed: str | None = self._ask(lambda: self._job and self._job.first("code", str(code)))
        self._ask(self._handler.set_closed)  # no machine waits for another round
        return code if agreed is None else int(agreed)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return the answer of the store; None if it does not answer."""
        try:
            return None if self._job is None else question()
        except _STORE_ERRORS:
            self._job = None
            return None

    def _wait_for_agents(self) -> None:
        """Wait until the other agents know the exit code, because the store ends with the agent that holds it."""
        self._is_over = True
        self._end_watch()
        # While this machine meets others, it is in no round: those that wait, too, need only moments to read the code.
        deadline_s = time.monotonic() + (_MOMENTS_S if self._is_meeting else _PATIENCE_S + self._shutdown_timeout)
        self._ask(lambda: self._job and self._job.store.add("ended", 1))
        num_machines = self._worker_group.group_world_size or 1
        while (self._ask(lambda: self._job and self._job.store.add("ended", 0)) or num_machines) < num_machines:
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.1)
        self._ask(self._handler.shutdown)

    def _fail(self, what: str) -> int:
        self._job = None
        code = self._code = LOST if self._code is None else self._code
        print(f"error: {what}: this machine ends with exit code {code}", file=sys.stderr, flush=True)
        return code

    def _follow_endpoint(self) -> None:
        """Wait for the rendezvous if it no longer answers and the ranks have ended; the agent may hang in a call."""
        answered_s = ran_s = time.monotonic()
        limit_s = self._limit_s or LIMIT_S
        # Ranks that still run may end the training without the rendezvous.
        while time.monotonic() - answered_s < limit_s or time.monotonic() - ran_s < _PATIENCE_S:
            time.sleep(_LOOK_S)
            if not self._pids or any(map(_is_running, self._pids)):
                ran_s = time.monotonic()
            if not self._pids or probe(*self._endpoint) is None:
                answered_s = time.monotonic()
        # The agent's own thread may hang in a call of torch, which an exception here would not end.
        if self._is_over:
            os._exit(self._fail("the rendezvous does not answer any more"))
        self._wait_for_endpoint()

    def _wait_for_endpoint(self) -> NoReturn:
        """Start this command again once the rendezvous answers, so that this machine joins as one that comes back."""
        self._is_lost = True
        lost_s = float(os.environ.setdefault(_LOST_VARIABLE, str(time.monotonic())))  # no restart begins a new time
        deadline_s = lost_s + self._join_s
        line = "lost: {}; this machine waits for it, for at most {:.0f} s"
        while (left_s := deadline_s - time.monotonic()) > 0:
            said_s = time.monotonic()
            problem = probe(*self._endpoint)
            if problem is None:
                os.execv(sys.executable, [sys.executable, "-P", "-m", "segapp", *sys.argv[1:]])
            print(line.format(problem, left_s), file=sys.stderr, flush=True)
            while time.monotonic() - said_s < min(_PATIENCE_S, left_s) and probe(*self._endpoint) is not None:
                time.sleep(_LOOK_S)
        os._exit(self._fail("the rendezvous does not answer any more"))


def _is_running(pid: int) -> bool:
    """Return True while a child runs, without collecting its status."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
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
                "same secret on all machines (SEGAPP_LAUNCH_SECRET, unless they share the folder of the run, in which "
                "the first one makes it), and another --rdzv-id for each job"
            )
        return state


def join_job(
    options: Namespace, secret: bytes, policy: Policy, *, shutdown_s: float, master_port: int | None = None
) -> Agent:
    """Return the agent of this machine once the machine that holds the rendezvous has started.

    It passes SIGINT and SIGTERM on to the ranks, which save and end; SIGUSR1 is passed on, too.

    Args:
        options: the options of torchrun.
        secret: the secret that the agents of the job share.
        policy: the arguments of the ranks, and the decision after the end of one.
        shutdown_s: seconds between SIGTERM and SIGKILL for the ranks.
        master_port: port of the store of the ranks, the same on all machines; None: a free one.

    Raises:
        MeetingError: that machine has not started within `join_timeout`.
        ValueError: an option has a value that it cannot have.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # pytorch issue 135712: a restart joins the old store
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # torch's own handling loses the ranks' exit codes
    config, program, _ = run.config_from_args(options)
    machines = " to ".join(map(str, sorted({config.min_nodes, config.max_nodes})))
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    join_s = parameters.get_as_int("join_timeout", _JOIN_S) or _JOIN_S
    waiting = f"waiting at {config.rdzv_endpoint} for {machines} machines, for at most {join_s} s"
    endpoint = parse_rendezvous_endpoint(config.rdzv_endpoint, 29400)
    shared = {field.name for field in fields(WorkerSpec)} & {field.name for field in fields(config)}
    spec = WorkerSpec(
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        rdzv_handler=_handler_of(parameters, endpoint, secret, waiting, join_s),
        master_port=master_port,
        **{name: getattr(config, name) for name in shared},
    )
    agent = Agent(
        spec, config.logs_specs, policy, secret, endpoint, shutdown_s=shutdown_s, waiting=waiting, join_s=join_s
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, agent.pass_on)
    return agent


def _handler_of(
    parameters: RendezvousParameters, endpoint: tuple[str, int], secret: bytes, waiting: str, join_s: float
) -> Any:
    """Return the handler that meets the other agents; wait until the machine that holds the rendezvous has started.

    Raises:
        MeetingError: it has not.
    """
    host, port = endpoint
    is_host = parameters.get_as_bool("is_host")
    is_host = is_here(host) if is_host is None else is_host
    read_s, problems = parameters.get_as_int("read_timeout", 60) or 60, [""]
    with lines_while(lambda: waiting + problems[-1], 1.0):
        own_address = listening_address(host, parameters.local_addr or host) if is_host else None
        store = joined_store(
            host,
            port,
            limit_s=join_s,
            read_s=read_s,
            own_address=own_address,  # another agent on this machine may host it
            note=lambda problem: problems.append(f"; {problem}"),
        )
    return rendezvous_handler(store, SignedBackend(store, parameters.run_id, secret), parameters)
