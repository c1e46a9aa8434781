"""Ranks are started, ended and outlived as promised. Launcher and ranks load no torch here; the agent does."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from segapp.parallel import launch
from segapp.parallel.launch import launch_local
from tests.support import ROOT

LAUNCH = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("launch", {launch.__file__!r})  # the package would load torch
launch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)
"""
RANK = """
    import os, signal, sys, time
    from pathlib import Path
    die_with_parent = launch.die_with_parent
    folder, what, rank, agent = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"], os.getppid()
    is_late = what == "stubborn" and rank == "1"
    if not is_late:
        die_with_parent(poll_s=0.2, grace_s=1)
    def save(number, frame):
        (folder / f"saved{rank}").write_text(str(number))
        sys.exit(75)
    if what != "stubborn":
        signal.signal(signal.SIGTERM, save)
        signal.signal(signal.SIGINT, save)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"agent{rank}").write_text(str(agent))
    (folder / f"rank{rank}").write_text(str(os.getpid()))
    while is_late:  # it is still starting when the agent dies
        try:
            os.kill(agent, 0)
            time.sleep(0.05)
        except ProcessLookupError:
            die_with_parent(poll_s=0.2, grace_s=1)
            break
    if what == "deaf":
        pids, other = [], folder / f"rank{1 - int(rank)}"
        while not pids:
            time.sleep(0.05)
            pids = [int(other.read_text())] if other.exists() and other.read_text() else []
        launch.end_with_peers(pids, 8, lambda: (folder / f"told{rank}").write_text(""), grace_s=0.5)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # as a thread that waits for a GPU
        (folder / f"deaf{rank}").write_text("")
    if what == "exit" and rank == "1":
        sys.exit(6)
    if what == "die" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(LAUNCH + textwrap.dedent(RANK))
    return path


def wait_until(is_true, within_s=60.0):
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def is_alive(pid):
    """Whether it runs; a zombie that nobody has collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("what", "status"), [("exit", 6), pytest.param("die", 137, marks=pytest.mark.slow)])
def test_launcher_exits_with_status_of_the_failed_rank(script, tmp_path, what, status):
    assert launch_local([str(script), str(tmp_path), what], 2, shutdown_s=5) == status


def test_agent_gives_its_ranks_time_and_ends_with_its_parent(monkeypatch):
    agent = pytest.importorskip("segapp.parallel.agent", reason="this torch has no torchrun")

    def ranks(options, *, shutdown_s):
        seen.append((options.nproc_per_node, options.training_script, os.environ["SEGAPP_PARENT_PID"], shutdown_s))
        return 6

    seen: list[object] = []
    monkeypatch.setenv("SEGAPP_PARENT_PID", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")
    monkeypatch.setattr(launch, "die_with_parent", lambda grace_s: seen.append(grace_s))
    monkeypatch.setattr("segapp.parallel.launch.logging.disable", lambda *_: None)
    monkeypatch.setattr(agent, "run_job", ranks)
    assert launch.run_agent(["--standalone", "--nproc-per-node=2", "--", "x.py", "--run", "a"]) == 6
    own = str(os.getpid())  # a rank ends with this process, not with the one above it
    assert seen == [65.0, ("2", "x.py", own, 60.0)], "its ranks have a minute to save before it is killed"


def test_launch_without_ranks_is_refused():
    with pytest.raises(ValueError, match="num_ranks=0"):
        launch_local(["x.py"], 0)
    with pytest.raises(ValueError, match="command is empty"):
        launch_local([], 1)


def start(script, tmp_path, what):
    """A launcher in a process of its own; returns it with the pids of its agent and ranks."""
    command = [str(script), str(tmp_path), what]
    code = f"""{LAUNCH}if True:
        import sys, time
        status = launch.launch_local({command!r}, 2, shutdown_s=5)
        time.sleep({60 if what == "stubborn" else 0})  # a program that goes on without its ranks
        sys.exit(status)"""
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    files = [tmp_path / f"rank{i}" for i in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    return launcher, int((tmp_path / "agent0").read_text()), [int(file.read_text()) for file in files]


@pytest.mark.sampled(2)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_sigkill_of_launcher_or_agent_leaves_no_rank(script, tmp_path, victim):
    what = "sleep" if victim == "launcher" else "stubborn"  # the latter ignore SIGTERM, and one of them starts slowly
    launcher, agent, ranks = start(script, tmp_path, what)
    os.kill(launcher.pid if victim == "launcher" else agent, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in [agent, *ranks]), within_s=20)
    launcher.kill()
    launcher.wait(20)


def test_signal_to_launcher_reaches_every_rank_in_time_to_save(script, tmp_path):
    launcher, agent, ranks = start(script, tmp_path, "sleep")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 75, "the launcher ends with the status of its ranks"
    assert [(tmp_path / f"saved{i}").read_text() for i in range(2)] == [str(int(signal.SIGTERM))] * 2
    assert not any(is_alive(pid) for pid in [agent, *ranks])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_deaf_rank_ends_soon_after_its_peer_was_killed(script, tmp_path):
    launcher, _, ranks = start(script, tmp_path, "deaf")
    wait_until(lambda: all((tmp_path / f"deaf{i}").exists() for i in range(2)))
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    assert launcher.wait(60) == 137, "the first failure is the cause"
    assert time.monotonic() - began < 20, "torchrun alone waits 30 s for a rank that handles no signal"
    assert (tmp_path / "told0").exists()


def test_peers_are_looked_for_without_a_busy_loop(monkeypatch):
    looks = []
    monkeypatch.setattr(launch, "_is_alive", lambda pid: looks.append(pid) or True)
    end_watch = launch.end_with_peers([1], 8, grace_s=1.0)
    time.sleep(0.6)
    end_watch()
    assert 1 <= len(looks) <= 4  # after 0, 0.25, 0.5 s


@pytest.mark.parametrize(("cpus", "ranks", "threads"), [(8, 2, "4"), (2, 4, "1"), (None, 1, "1")])
def test_ranks_share_the_processors(cpus, ranks, threads, monkeypatch):
    started = []

    class Started:
        def __init__(self, command, env, start_new_session):
            started.append(env)

        def wait(self):
            return 0

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(subprocess, "Popen", Started)
    assert launch_local(["program.py"], num_ranks=ranks) == 0
    assert [env["OMP_NUM_THREADS"] for env in started] == [threads]


@pytest.mark.slow
def test_two_agents_on_one_host_form_a_two_node_job(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", launch.AGENT, "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=two"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    command += ["-m", "tests.support.rank_checks", str(tmp_path / "figures.json")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = [subprocess.Popen(command, env=environ, cwd=ROOT) for _ in range(2)]
    assert [agent.wait(240) for agent in agents] == [0, 0]
    assert '"exact, training"' in (tmp_path / "figures.json").read_text()
