"""`segapp launch`: agents restart or end a training by the exit code of the run, and all return that code."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import re
import shlex
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from segapp.commands.launch import Course, LaunchRequest, RunPolicy, can_do_better, own_address, shared_secret
from segapp.commands.launch import launch as run_launch
from segapp.config import dump_config
from segapp.errors import ConfigError, StorageError
from segapp.parallel import agent as agents
from segapp.parallel.agreement import MachineFacts
from segapp.run.checkpoints import CheckpointFacts, CheckpointFolder
from segapp.run.events import EventWriter, RunEnd, RunStart, Step
from segapp.run.folder import RunFolder
from tests.support import ROOT
from tests.support.live_runs import wait_for
from tests.support.programs import Program, fork_server_name, start
from tests.support.rank_runs import ranks_of
from tests.support.runs import events

FIRST, SECOND = Course(step=10), Course(step=20)


@pytest.mark.parametrize(
    ("code", "after", "num_round", "restarts"),
    [
        *[(code, SECOND, 0, False) for code in (0, 75, 2, 3, 4, 5, 10, 130, 143)],
        *[(code, FIRST, 5, True) for code in (7, 8, 137, 139, 134)],
        (6, FIRST, 0, False),
        (6, Course(step=10, num_fallbacks=1), 0, True),
        (9, FIRST, 0, True),
        (9, FIRST, 1, False),
        (1, FIRST, 0, False),
        (1, SECOND, 0, True),
    ],
)
def test_exit_code_decides_about_a_restart(code: int, after: Course, num_round: int, restarts: bool) -> None:
    assert can_do_better(code, FIRST, after, num_round) is restarts


def request_for(run: Path, **changed: Any) -> LaunchRequest:
    values = {"words": ["--run", str(run)], "run": run, "config": None, "overrides": [], "resume": None, "nnodes": "2"}
    values |= {"nproc_per_node": "1", "rdzv_endpoint": None, "rdzv_id": None, "secret_file": None}
    values |= {"local_addr": None, "max_restarts": 2}
    return LaunchRequest(**{**values, "others": [], **changed})


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(path=tmp_path / "run") as folder:
        yield folder


def save(folder: RunFolder, step: int) -> None:
    CheckpointFolder(folder.checkpoints).commit(
        lambda file: file.write(f"state {step}".encode()), CheckpointFacts(step=step, epoch=1), need_bytes=9, keep=1
    )


def test_restarts_that_bring_no_checkpoint_are_counted(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    policy, codes = RunPolicy(request_for(run.path)), []
    for step in (1, None, 4, None):  # a checkpoint of that round
        policy.begin_round()
        if step is not None:
            save(run, step)
        codes.append(policy.code_of_job(137, regroups=False))
    assert codes == [None, None, None, None]
    policy.begin_round()
    assert policy.code_of_job(8, regroups=False) == 8
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "exit code 137: the ranks start again from step 1"
    assert said[-1] == "exit code 8: no restarts are left: the last 2 brought no new checkpoint"


def test_code_of_the_run_counts_and_not_that_of_a_rank(run: RunFolder) -> None:
    policy = RunPolicy(request_for(run.path))
    with EventWriter(run.events) as writer:
        writer.write(Step(epoch=1, step=7, loss=1.0, lr=0.1, images_per_s=1.0, data_wait_frac=0.0, split=[2]))
        writer.write(RunEnd(status="failed", reason="an earlier start", exit_code=10))
        policy.begin_round()
        assert policy.code_of_job(8, regroups=False) is None, "the end of an earlier start is not that of this round"
        policy.begin_round()
        assert writer.rewind(6, epoch=1, batch=6) == 1
        (end,) = events(run.path, "run_end")
        assert end["seq"] == 1, "the step before it is repeated: its number is another, and it is no end of this round"
        assert policy.code_of_job(137, regroups=False) is None
        policy.begin_round()
        writer.write(RunEnd(status="failed", reason="the disk is full", exit_code=10))
        assert policy.code_of_job(8, regroups=False) == 10


@pytest.mark.parametrize(
    ("by", "regroups", "code"), [("signal", True, None), ("command", True, 75), ("signal", False, 75)]
)
def test_stop_for_a_machine_that_joins_is_not_the_end(
    run: RunFolder, by: Any, regroups: bool, code: int | None
) -> None:
    policy = RunPolicy(request_for(run.path))
    policy.begin_round()
    with EventWriter(run.events) as writer:
        writer.write(RunEnd(status="stopped", reason="asked", exit_code=75, stopped_by=by))
    assert policy.code_of_job(75, regroups=regroups) == code


def test_other_start_of_a_run_holds_until_it_has_a_checkpoint(run: RunFolder) -> None:
    policy = RunPolicy(request_for(run.path, resume="other/last.pt"))
    command = ["-u", "-m", "segapp", "train", "--run", str(run.path), "--resume"]
    assert policy.begin_round() == [*command, "other/last.pt"]
    assert policy.code_after_signal(signal.SIGTERM) == 143
    save(run, 1)
    assert policy.begin_round() == [*command, "auto"]
    assert policy.code_after_signal(signal.SIGTERM) == 75


def test_address_of_a_machine_is_that_of_its_route() -> None:
    assert own_address("127.0.0.1:29500") == "127.0.0.1"
    assert own_address("[::1]:29500") == "::1"
    for endpoint in ("node1", "127.0.0.1:port", "no-such-host.invalid:1"):
        with pytest.raises(ConfigError, match=f"--rdzv-endpoint {endpoint}: .*use HOST:PORT"):
            own_address(endpoint)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "2", "--", "train", "--config", "x.yaml"], "starts a training in a named folder"),
        (["--nnodes", "2"], "Missing argument"),
        (["--nnodes", "2", "--", "train", "--run", "a", "--detach"], "--detach, --smoke and --print-config"),
        (["--nnodes", "1:4", "--", "train", "--run", "a"], "--nnodes 1:4 needs --rdzv-endpoint HOST:PORT"),
        (["--nproc-per-node", "many", "--", "train", "--run", "a"], "--nproc-per-node many: "),
        (
            ["--tee=3", "--rdzv-conf=is_host=0", "--", "train", "--run", "a"],
            "error: --tee=3: torchrun's options are for several machines",
        ),
        (["--nnodes=2", "--rdzv-endpoint=a:1", "--rdzv-backend=etcd", "--", "train", "--run", "a"], "only c10d"),
        (["--", "train", "--run", "a", "--confg", "b"], "No such option"),
    ],
)
def test_launch_that_cannot_start_is_refused(words: list[str], message: str, command: Any) -> None:
    code, _, said = command("launch", *words)
    assert (code, message in said) == (2, True), said


@pytest.mark.parametrize(
    ("options", "limit", "code", "message"),
    [
        (["--nnodes", "two"], "", 2, "--nnodes two --nproc-per-node 1: invalid literal .*'two': correct the option"),
        (["--rdzv-conf=read_timeout=9s"], "", 2, "--rdzv-conf=read_timeout=9s: .*: correct the option"),
        (["--rdzv-conf=join_timeout=9s"], "", 2, "--rdzv-conf=join_timeout=9s: .*: correct the option"),
        (["--rdzv-conf=is_host=0,join_timeout=1"], "", 8, "start the machine of the endpoint, or wait longer with"),
        ([], "30s", 8, "SEGAPP_PEER_TIMEOUT_S='30s' is not a number of seconds: use 30, or 0 for no watch"),
    ],
)
def test_job_that_cannot_meet_ends_before_its_ranks(
    options: list[str], limit: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    """In a wrong number, or since nothing listens at the endpoint."""
    variables = {"SEGAPP_LAUNCH_SECRET": "x" * 16, "SEGAPP_PEER_TIMEOUT_S": limit}
    monkeypatch.setattr(os, "environ", {**os.environ, **variables})
    monkeypatch.setattr("logging.disable", lambda _: None)
    words = ["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1", *options]
    found, _, said = command("launch", *words, "--", "train", "--config", "demo.yaml", "--run", "run")
    assert found == code
    assert re.search(f"^error: .*{message}", said, re.MULTILINE)


class Marker(str):
    """A value whose unpickling makes the folder of that name."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self),)


def join(backend: Any) -> None:
    """Begin a rendezvous as an agent does, which reads the state at once."""
    parameters = RendezvousParameters("c10d", "127.0.0.1:1", "job", 1, 1, join_timeout=1, last_call_timeout=1)
    create_handler(HashStore(), backend, parameters).num_nodes_waiting()


def test_state_of_a_stranger_is_not_unpickled(tmp_path: Path) -> None:
    """A client of the store needs no secret to write there, nor to find the key."""
    refused = pytest.raises(RendezvousStateError, match="not written with the secret of this machine: use the same")
    store, key = HashStore(), "torch.rendezvous.job"
    backend = agents.SignedBackend(store, "job", b"a secret")
    assert backend.get_state() is None
    first, token, was_set = backend.set_state(b"state 1") or (b"", b"", False)
    assert (first, was_set, backend.get_state()) == (b"state 1", True, (b"state 1", token))
    assert (backend.set_state(b"state 2", token) or ())[::2] == (b"state 2", True)
    assert (backend.set_state(b"state 3", token) or ())[::2] == (b"state 2", False), "another agent was first"
    elsewhere = HashStore()
    agents.SignedBackend(elsewhere, "job", b"another secret").set_state(b"state")
    payload = pickle.dumps(Marker(tmp_path / "ran"))
    strange = [base64.b64encode(text) for text in (payload, b"\0" * 32 + payload)]
    for state in (*strange, elsewhere.get(key)):
        store.set(key, state)
        with refused:
            join(agents.SignedBackend(store, "job", b"a secret"))
        with refused:  # another agent was first
            agents.SignedBackend(store, "job", b"a secret").set_state(b"state", b"an older token")
    assert not (tmp_path / "ran").exists()
    store.set(key, strange[0])
    with contextlib.suppress(Exception):
        join(C10dRendezvousBackend(store, "job"))
    assert (tmp_path / "ran").exists(), "torch's own state would have run code"


def test_machines_share_the_secret_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEGAPP_LAUNCH_SECRET", raising=False)
    request, other = request_for(tmp_path / "runs" / "a"), request_for(tmp_path / "runs" / "b")
    with ThreadPoolExecutor(8) as machines:
        found = set(machines.map(lambda _: shared_secret(request), range(40)))
    (secret,) = found
    assert len(secret) == 32
    assert shared_secret(other) != secret
    path = tmp_path / "runs" / ".a.secret"
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == (secret.decode(), 0o600)
    assert sorted(each.name for each in path.parent.iterdir()) == [".a.secret", ".b.secret"]
    own = tmp_path / "own"
    own.write_text("chosen by a scheduler\n")
    own.chmod(0o600)
    assert shared_secret(request_for(tmp_path / "runs" / "a", secret_file=own)) == b"chosen by a scheduler"
    own.chmod(0o640)
    refusal = "belongs to another user or can be read by others: .* run `chmod 600`"
    with pytest.raises(ConfigError, match=refusal):
        shared_secret(request_for(tmp_path / "runs" / "a", secret_file=own))
    if os.getuid() == 0:
        own.chmod(0o600)
        os.chown(own, 65534, 65534)  # a stranger has made it, and knows it
        with pytest.raises(ConfigError, match=refusal):
            shared_secret(request_for(tmp_path / "runs" / "a", secret_file=own))
    path.unlink()
    os.mkfifo(path, 0o600)  # nobody will ever write into it
    with pytest.raises(ConfigError, match=refusal):
        shared_secret(request)
    path.unlink()
    path.symlink_to(own)
    with pytest.raises(StorageError, match=r"\.a\.secret"):
        shared_secret(request)
    monkeypatch.setenv("SEGAPP_LAUNCH_SECRET", "of the job, in its environment")
    assert shared_secret(request) == b"of the job, in its environment"
    monkeypatch.setenv("SEGAPP_LAUNCH_SECRET", "short")
    with pytest.raises(ConfigError, match="SEGAPP_LAUNCH_SECRET has 5 characters: use a secret of at least 16"):
        shared_secret(request)


OWN = MachineFacts("node2", {"optim.lr": "0.014"}, {"the number of files of train": "144"})


def late_agent(store: HashStore) -> agents.Agent:
    """Return an agent whose rendezvous was closed by another one; `_store` is torch's name."""
    meeting = Mock(_store=store, next_rendezvous=Mock(side_effect=RendezvousClosedError))
    meeting.get_run_id.return_value, meeting.get_backend.return_value = "run", "c10d"
    meeting.num_nodes_waiting.return_value = 0
    spec = WorkerSpec("segapp", 1, meeting, entrypoint="true")
    policy = RunPolicy(request_for(Path("run")))
    policy._facts = OWN
    return agents.Agent(spec, DefaultLogsSpecs(), policy, b"secret", ("127.0.0.1", 29500), shutdown_s=5.0)


def test_machine_that_differs_from_the_job_ends_alone(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    job = agents.SignedStore(store, "run", b"secret")
    job.set("record", replace(OWN, machine="node1", settings={"optim.lr": "0.5"}).as_json())
    assert late_agent(store).carry_out() == 2
    began = "the machines that began the job"
    assert f"error: optim.lr is 0.014 on node2 and 0.5 on {began}: start all" in capsys.readouterr().err
    assert job.get("code") is None, "the others go on"
    job.set("record", replace(OWN, data={}).as_json())  # this machine has begun the job, and comes back
    assert late_agent(store).carry_out() == 3
    assert f"files of train is 144 on node2 and not there on {began}: copy" in capsys.readouterr().err
    job.set("record", replace(OWN, machine="node1").as_json())
    job.set("code", "75")
    assert late_agent(store).carry_out() == 75, "it agrees with the record"


def met(num: int, number: int, monkeypatch: pytest.MonkeyPatch) -> agents.Agent:
    """Let an agent meet others once more after it was dropped, in a meeting of `num` machines, and return it."""
    store, agent, ends = HashStore(), late_agent(HashStore()), iter([KeyError("dropped"), None])
    agent._handler.settings, agent._handler._state_holder = Mock(min_nodes=2, max_nodes=3), Mock()
    agent._handler._state_holder.state = Mock(round=4, participants=[])
    group = Mock(group_world_size=num, group_rank=number, store=Mock(underlying_store=store))

    def meet(*_: Any) -> None:
        if error := next(ends):
            raise error

    monkeypatch.setattr(LocalElasticAgent, "_rendezvous", meet)
    job = agents.SignedStore(store, "run", b"secret")
    for other in range(num):
        if other != number:
            job.set(f"here/4/{other}", json.dumps([6 + other, replace(OWN, machine=f"node{other}").as_json()]))
    agent._rendezvous(group)
    return agent


@pytest.mark.parametrize(("num", "number"), [(1, 0), (4, 2), (2, 2)])
def test_meeting_of_too_few_or_too_many_machines_ends(num: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch drops machines that it has not heard, and then begins without them."""
    said = f"the meeting ended with {num} machines, of which this is number {number}, instead of 2 to 3 machines: start"
    with pytest.raises(RendezvousStateError, match=f"{said} the job again"):
        met(num, number, monkeypatch)


def test_machines_of_a_meeting_agree_on_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest number that one of them knows; this machine has just joined."""
    agent = met(3, 1, monkeypatch)
    assert agent._round == 8
    assert agent._job is not None
    assert agent._job.get("record") is None, "machine 0 writes it"


@pytest.mark.parametrize(
    ("others", "port"),
    [([], None), (["--master-port=29501"], 29501), (["--master-port=5", "--tee=3", "--master_port=7"], 7)],
)
def test_port_of_the_ranks_can_be_fixed(
    others: list[str], port: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(os, "environ", {**os.environ, "SEGAPP_LAUNCH_SECRET": "x" * 16})
    monkeypatch.setattr("logging.disable", lambda _: None)
    agent = Mock(carry_out=lambda: 0)
    monkeypatch.setattr(
        "segapp.commands.launch.join_job", lambda *args, **words: seen.update(words, policy=args[2]) or agent
    )
    request = request_for(tmp_path / "run", rdzv_endpoint="127.0.0.1:29500", others=others, config="demo.yaml")
    assert run_launch(request) == 0
    assert seen["master_port"] == port
    monkeypatch.setattr("segapp.commands.launch.facts_of", lambda _config: OWN)
    assert seen["policy"].facts().settings == {**OWN.settings, "--master-port": str(port or "a free one")}


def test_values_without_the_secret_are_ignored_and_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    job, stranger = agents.SignedStore(store, "a", b"secret"), agents.SignedStore(store, "a", b"guessed")
    for forged in ("0", f"{'0' * 64} 0", "\x00 \xff"):
        job.store.set("code", forged)
        assert job.get("code") is None
    stranger.set("code", "0")
    assert job.get("code") is None
    assert job.first("code", "75") == "75"
    assert (job.get("code"), job.first("code", "8")) == ("75", "75"), "the first one stays"
    job.store.set("cause/1", job.store.get("code"))
    assert job.get("cause/1") is None, "a signature is for one key"
    other = agents.SignedStore(store, "b", b"secret")
    other.store.set("code", job.store.get("code"))
    assert other.get("code") is None, "and for one job"
    said = capsys.readouterr().err.splitlines()
    assert [line[:28] for line in said] == [
        "error: code of the job a was",
        "error: cause/1 of the job a ",
        "error: code of the job b was",
    ]


def test_forged_value_is_replaced_and_a_valid_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other agent replaces the forged value after this one has read it."""
    store = HashStore()
    here, there = (agents.SignedStore(store, "a", b"secret") for _ in range(2))
    here.store.set("code", "forged")
    verified, told = here._verified, list[str]()

    def slowly(key: str, signed: bytes) -> str | None:
        if not told:
            told.append(there.first("code", "3"))
        return verified(key, signed)

    monkeypatch.setattr(here, "_verified", slowly)
    assert (here.first("code", "8"), told, here.get("code")) == ("3", ["3"], "3")


START = RunStart(classes=["road"], num_params=9, batch_size=2, epochs=3, steps_per_epoch=5, devices=[])


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (["finished"], 0),
        (["stopped"], 8),
        (["finished", "stopped"], 8),
        (["failed", "finished"], 0),
        (["finished", None], 8),
        ([None, "finished"], 0),
        ([], 8),
    ],
)
def test_success_is_what_the_run_says(
    ends: list[Any], code: int, run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("segapp.commands.launch._FINISH_S", 0.0)
    with EventWriter(run.events) as writer:
        for status in ends:
            writer.write(START if status is None else RunEnd(status=status, reason="", exit_code=0))
    assert RunPolicy(request_for(run.path)).code_of_success() == code
    assert ("does not say that the run has finished" in capsys.readouterr().err) == (code == 8)


def test_code_of_the_first_error_beats_the_end_of_the_run(run: RunFolder) -> None:
    """Rank 0 of another machine has only lost the rank that failed."""
    policy = RunPolicy(request_for(run.path))
    policy.begin_round()
    with EventWriter(run.events) as writer:
        writer.write(RunEnd(status="failed", reason="another rank does not answer", exit_code=8))
    assert policy.code_of_job(3, regroups=False, is_cause=True) == 3
    assert policy.code_of_job(3, regroups=False, is_cause=False) is None


@pytest.fixture
def launch(tiny: dict[str, Any], tmp_path: Path) -> Callable[..., Program]:
    """Start one of the two agents of a job on this host, whose ranks are forked, with words for `train`."""
    (tmp_path / "ranks.yaml").write_text(dump_config(ranks_of(tiny, 4, ["cpu", "cpu"])))
    python = tmp_path / "python"
    command = shlex.join([sys.executable, "-S", "-E", f"{ROOT}/tests/support/forked_python.py"])
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    python.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        options = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{probe.getsockname()[1]}", "--"]
    names = {"PYTHON_EXEC": str(python), "SEGAPP_TEST_RANK_LOGS": str(tmp_path)}
    names["SEGAPP_TEST_FORK_SERVER"] = fork_server_name()
    train = ["launch", *options, "train", "--config", "ranks.yaml", "--run", "run"]
    return lambda *words: start(*train, *words, cwd=tmp_path, logs=tmp_path, **names)


@pytest.mark.faults
def test_config_error_ends_all_agents_at_once_with_its_code(launch: Callable[..., Program], tmp_path: Path) -> None:
    both = launch("train.epohcs=3"), launch("train.epohcs=3")
    assert [agent.wait(120) for agent in both] == [2, 2]
    assert not (tmp_path / "run").exists()
    assert all("unknown key train.epohcs" in agent.stderr for agent in both)
    assert not [*tmp_path.glob("rank*.txt")], "no rank was started"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ["optim.lr=0.5", "optim.lr=0.25"],
            2,
            r"optim.lr is 0.\d+ on \S+ \(machine 1\) and 0.\d+ on \S+ \(machine 0\)",
        ),
        (["seed=3", "data.root=nothing"], 3, r"nothing does not exist"),
    ],
)
def test_machines_that_differ_end_before_a_rank_starts(
    words: list[str], code: int, said: str, launch: Callable[..., Program], tmp_path: Path
) -> None:
    both = launch(words[0]), launch(words[1])
    assert [agent.wait(120) for agent in both] == [code, code]
    errors = [[line for line in agent.stderr.splitlines() if line.startswith("error: ")] for agent in both]
    assert errors[0] == errors[1]
    assert re.search(said, errors[0][0])
    assert not [*tmp_path.glob("rank*.txt")], "no rank was started"
    assert not (tmp_path / "run").exists()


def test_signal_ends_an_agent_that_waits_for_others(launch: Callable[..., Program]) -> None:
    agent = launch()
    wait_for(lambda: _handles(agent.pid, signal.SIGTERM))  # its imports are done
    waiting = r"waiting at 127\.0\.0\.1:\d+ for 2 machines, for at most 600 s"
    wait_for(lambda: re.search(waiting, agent.stderr), 60)
    agent.send(signal.SIGTERM)
    assert agent.wait(120) == 143


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(lines["SigCgt"], 16) >> (number - 1) & 1)
