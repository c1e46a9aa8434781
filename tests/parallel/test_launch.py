"""Ranks are started, ended and outlived as promised. Launcher and ranks load no torch here; agents do."""

import json
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
from tests.support.live_runs import wait_for

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
    folder, what, rank, parent = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"], os.getppid()
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
    (folder / f"rank{rank}").write_text(str(os.getpid()))
    while is_late:  # it is still starting when its parent dies
        try:
            os.kill(parent, 0)
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
    time.sleep(60)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(LAUNCH + textwrap.dedent(RANK))
    return path


def is_alive(pid):
    """Whether it runs; a zombie that nobody has collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start(script, tmp_path, what):
    """A launcher in a process of its own; returns it with the pids of its ranks."""
    command = [str(script), str(tmp_path), what]
    code = f"""{LAUNCH}if True:
        import sys, time
        status = launch.launch_local({command!r}, 2, shutdown_s=5)
        time.sleep({60 if what == "stubborn" else 0})  # a program that goes on without its ranks
        sys.exit(status)"""
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    files = [tmp_path / f"rank{i}" for i in range(2)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return launcher, [int(file.read_text()) for file in files]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ["sleep", "stubborn"])  # the latter ignore SIGTERM, and one of them starts slowly
def test_sigkill_of_launcher_leaves_no_rank(script, tmp_path, what):
    launcher, ranks = start(script, tmp_path, what)
    launcher.kill()
    launcher.wait(20)
    wait_for(lambda: not any(is_alive(pid) for pid in ranks), 20)


def test_signal_to_launcher_reaches_every_rank_in_time_to_save(script, tmp_path):
    launcher, ranks = start(script, tmp_path, "sleep")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 75, "the launcher ends with the status of its ranks"
    assert [(tmp_path / f"saved{i}").read_text() for i in range(2)] == [str(int(signal.SIGTERM))] * 2
    assert not any(is_alive(pid) for pid in ranks)


def test_rank_that_ignores_signals_is_killed_in_the_end(tmp_path):
    program = """
import os, signal, sys, time
from pathlib import Path
ready = Path(sys.argv[1], "ready")
if os.environ["RANK"] == "1":
    while not ready.exists():
        time.sleep(0.01)
    sys.exit(6)
signal.signal(signal.SIGTERM, lambda number, _: Path(sys.argv[1], f"heard{number}").touch())
ready.touch()
end_s = time.monotonic() + 60
while time.monotonic() < end_s:
    time.sleep(1)
"""
    began = time.monotonic()
    assert launch_local(["-c", program, str(tmp_path)], 2, shutdown_s=1.5) == 6
    assert 1.5 < time.monotonic() - began < 30
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heard15", "ready"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_deaf_rank_ends_soon_after_its_peer_was_killed(script, tmp_path):
    launcher, ranks = start(script, tmp_path, "deaf")
    wait_for(lambda: all((tmp_path / f"deaf{i}").exists() for i in range(2)))
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    assert launcher.wait(60) == 137, "the first failure is the cause"
    assert time.monotonic() - began < 20, "torchrun alone waits 30 s for a rank that handles no signal"
    assert (tmp_path / "told0").exists()


WRITE_ENVIRON = """
import json, os, sys
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(
    {**os.environ, "mode": os.stat(os.path.dirname(os.environ["SEGAPP_RANK_STORE"])).st_mode & 0o777,
     "exists": os.path.exists(os.environ["SEGAPP_RANK_STORE"])}))
"""


@pytest.mark.parametrize(("cpus", "ranks", "threads"), [(8, 2, "4"), (2, 4, "1"), (None, 3, "1")])
def test_ranks_share_a_store_and_the_processors(cpus, ranks, threads, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # of the jobs on several machines
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(7, "eth7"), (1, "lo"), (9, "docker0")])
    assert launch_local(["-c", WRITE_ENVIRON, str(tmp_path)], ranks, env={"OWN": "7"}) == 0
    seen = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(seen) == {str(rank) for rank in range(ranks)}
    for name, environ in seen.items():
        assert (environ["RANK"], environ["LOCAL_RANK"]) == (name, name)
        assert (environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"], environ["OWN"]) == (str(ranks), str(ranks), "7")
        assert (environ["OMP_NUM_THREADS"], environ["SEGAPP_PARENT_PID"]) == (threads, str(os.getpid()))
        assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
        assert (environ["NCCL_RAS_ENABLE"], environ["mode"], environ["exists"]) == ("0", 0o700, False)
    (store,) = {environ["SEGAPP_RANK_STORE"] for environ in seen.values()}
    assert not Path(store).parent.exists()


def test_peers_are_looked_for_without_a_busy_loop(monkeypatch):
    looks = []
    monkeypatch.setattr(launch, "is_pid_alive", lambda pid: looks.append(pid) or True)
    end_watch = launch.end_with_peers([1], 8, grace_s=1.0)
    time.sleep(0.6)
    end_watch()
    assert 1 <= len(looks) <= 4  # after 0, 0.25, 0.5 s


OWN_ERROR = """
import os, signal, sys, time
from pathlib import Path
rank, code = int(os.environ["RANK"]), int(sys.argv[1 + int(os.environ["RANK"])])
said, order = Path(sys.argv[-1]), [1, 2, 0]  # rank 1 fails first
def wait_for(others):
    while not all(said.with_suffix(f".{other}").exists() for other in others):
        time.sleep(0.01)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others after the first
wait_for(order[: order.index(rank)])
message = "another rank does not answer" if code == 8 else f"rank {rank} cannot read a file"
is_printed = code in (0, 75) or launch.leave_error(code, message, is_own=code != 8)
with said.open("a") as file:
    print(f"{message}: {is_printed}", file=file)
said.with_suffix(f".{rank}").touch()
wait_for(order)
time.sleep(0.2 * order[::-1].index(rank))  # the one that failed first ends last
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("codes", "found"),
    [([8, 3, 8], 3), ([8, 3, 2], 3), ([10, 8, 8], 10), ([8, 8, 8], 8), ([75, 75, 75], 75), ([3, 0, 0], 3)],
)
def test_first_error_that_no_lost_rank_caused_decides(tmp_path: Path, codes: list[int], found: int) -> None:
    path = tmp_path / "rank.py"
    path.write_text(LAUNCH + OWN_ERROR)
    said = tmp_path / "said.txt"
    assert launch_local([str(path), *map(str, codes), str(said)], 3) == found
    lost = [line for line in said.read_text().splitlines() if line.startswith("another")]
    assert [line.partition(": ")[2] for line in lost] == ["True", "False", "False"][: codes.count(8)], "printed once"


def test_errors_of_ranks_are_read_in_the_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / str(rank) / "error.json" for rank in range(4)]
    for rank, at_s in ((2, 7.0), (0, 9.0), (1, 8.0)):
        paths[rank].parent.mkdir()
        monkeypatch.setenv(launch.ERROR_VARIABLE, str(paths[rank]))
        monkeypatch.setattr(time, "monotonic", lambda at_s=at_s: at_s)
        assert launch.leave_error(rank + 2, f"error {rank}", is_own=True)
    error = launch.first_error(paths)
    assert error == launch.RankError(4, "error 2", 7.0)
    assert json.loads(paths[1].read_text())["message"] == "error 1", "torchrun shows it"
    assert launch.RankError.from_sent(error.sent_by("node2")) == ("node2", launch.RankError(4, "error 2"))
    paths[2].write_text("half a fi")
    assert launch.first_error(paths) == launch.RankError(3, "error 1", 8.0)
    assert launch.first_error([]) is None


def test_killed_rank_decides_among_ranks_that_ended_together(capfd: pytest.CaptureFixture[str]) -> None:
    shells = ("exit 0", "exit 9", "kill -KILL $$", "exit 5")
    ranks = [subprocess.Popen(["sh", "-c", shell]) for shell in shells]
    for rank in ranks:
        rank.wait()
    assert launch._wait(ranks, (), ()) == 128 + signal.SIGKILL
    assert "rank 2 was ended by SIGKILL" in capfd.readouterr().err
    assert launch._wait(ranks[:2] + ranks[3:], (), ()) == 5
