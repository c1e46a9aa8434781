"""Run folders from strangers: nothing outside them is read or written, and the message names what is refused."""

import contextlib
import io
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from segapp.commands.runs import control_run, print_checkpoints, print_runs, print_status
from segapp.commands.sweep import save_sweep
from segapp.errors import RunBusyError, StorageError
from segapp.report.compare import compare_runs
from segapp.report.page import write_report
from segapp.run.checkpoints import CheckpointFacts, CheckpointFolder
from segapp.run.events import EventReader, EventWriter
from segapp.run.files import append_to_run, check_tree, open_of_run, read_of_run
from segapp.run.folder import RunFolder, find_run
from segapp.run.state import is_trainer_alive
from segapp.session.request import plan_request
from segapp.session.session import run_session
from segapp.view.runs import run_state, summarize
from tests.support.fault_runs import state_of, tiny_config
from tests.support.runs import train

NOBODY = 65534
OWN = sorted(
    path.name for path in vars(RunFolder("run")).values() if isinstance(path, Path) and path.name not in ("run",)
)
"""Every entry of a run folder, those of later versions too."""
NESTED = (
    "checkpoints/manifest.json", "checkpoints/objects", "checkpoints/last.pt", "checkpoints/epoch_0009.pt",
    "events.rewound.jsonl", "logs/rank-0001.log", "logs/rank-0001-stacks.log", "parts/own.py",
    "parts/commands/own.py", "reports/rank_1_step_3.json", "samples/epoch_0001_0.png",
    "stacks.log", "tensorboard/events.out.tfevents.1", "wandb",
)  # fmt: skip
FOLDERS = ("checkpoints", "commands", "logs", "objects", "parts", "reports", "samples", "tensorboard", "wandb")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_root):
    """A finished run with everything that a training on one device writes."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    sections = {"train": {"epochs": 1}, "log": {"tensorboard": True}, "checkpoint": {"every_steps": None}}
    config = tiny_config(tiny_root, **sections)
    before = os.umask(0)
    try:
        assert train(config, folder) == 0
    finally:
        os.umask(before)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the finished run."""
    (tmp_path / "runs").mkdir()
    subprocess.run(["cp", "-a", trained, tmp_path / "runs" / "run"], check=True)
    return tmp_path / "runs" / "run"


@pytest.fixture
def victim(tmp_path, trained):
    """A folder outside the run, with the files of another run and one that a shell reads."""
    folder = tmp_path / "victim"
    shutil.copytree(trained / "checkpoints" / "objects", folder)
    (folder / "00000001-0123456789abcdef.pt").write_text("a checkpoint of another run")
    (folder / ".bashrc").write_text("alias ls='ls --color'\n")
    return folder


def replace(path, make):
    """Removes a path of a run, if it is there, and puts something else in its place."""
    path.parent.mkdir(exist_ok=True, parents=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)


def refused(name, act, error=StorageError):
    """Runs `act`, which must be refused with a message that names the entry."""
    with pytest.raises(error) as raised:
        act()
    assert name in str(raised.value), raised.value
    assert "\n" not in str(raised.value)


def resume(run):
    return run_session(plan_request(None, ["train.epochs=2"], None, str(run)))


def check_all_roads(run, name, out):
    """Resumes, reads and reports a run in every way, each of which must name the entry."""
    for act in (
        lambda: resume(run),
        RunFolder(run).acquire,
        lambda: print_status(str(run), as_json=False),
        lambda: print_checkpoints(str(run), as_json=False, hashes=True),
        lambda: write_report(str(run), out / "report.html"),
        lambda: compare_runs([str(run), str(run)]),
        lambda: control_run(str(run), ["stop"], wait=False, timeout_s=1),
    ):
        refused(name, act)
    refused(name, lambda: RunFolder.create(path=run))
    assert not (out / "report.html").exists()


@pytest.mark.parametrize("entry", [*OWN, *NESTED])
def test_entry_that_is_a_link_is_refused_by_name(run, victim, tmp_path, capsys, entry):
    target = victim if entry.rpartition("/")[2] in FOLDERS else victim / ".bashrc"
    good = shutil.copytree(run, run.with_name("good"))
    replace(run / entry, lambda path: path.symlink_to(target))
    before = state_of(victim)
    check_all_roads(run, entry, tmp_path)
    capsys.readouterr()
    print_runs(run.parent, as_json=False)
    bad, others = sorted(capsys.readouterr().out.splitlines()[1:], key=lambda line: line.startswith(good.name))
    assert others.split()[:2] == ["good", "finished"]
    assert bad.split()[:2] == ["run", "failed"]
    assert summarize(run).as_json()["reason"].startswith(str(run / entry))
    assert state_of(victim) == before


def test_dangling_link_makes_no_file(run, tmp_path):
    replace(run / "trainer.log", lambda path: path.symlink_to(tmp_path / "new"))
    refused("trainer.log", lambda: resume(run))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("entry", ["run.json", "config.yaml", "events.jsonl", "lock", "trainer.log"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_pipes_sockets_and_devices_are_refused_without_waiting(run, tmp_path, monkeypatch, entry, kind):
    if kind == "device" and os.geteuid() != 0:
        pytest.skip("only root can make a device")
    monkeypatch.chdir(run)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as end:
        makers = {"pipe": os.mkfifo, "socket": lambda path: end.bind(path.name)}
        make = makers.get(kind, lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5)))  # /dev/zero
        replace(run / entry, make)
        began_s = time.monotonic()
        check_all_roads(run, entry, tmp_path)
        assert summarize(run).state == "failed"
        assert EventReader(run / entry).read_raw() == []
        assert time.monotonic() - began_s < 20


@pytest.mark.parametrize("entry", ["events.jsonl", "lock", "trainer.log", "events.rewound.jsonl"])
def test_second_name_of_a_file_outside_is_not_written(run, victim, entry):
    """A hard link: what is appended or truncated here would change the victim's file."""
    replace(run / entry, lambda path: path.hardlink_to(victim / ".bashrc"))
    before = state_of(victim)
    acts = {
        "events.jsonl": lambda: EventWriter(run / entry),
        "lock": RunFolder(run).acquire,
        "trainer.log": lambda: resume(run),
        "events.rewound.jsonl": lambda: append_to_run(run / entry),
    }
    refused(entry, acts[entry], OSError if entry == "events.rewound.jsonl" else StorageError)
    assert state_of(victim) == before


def test_second_names_of_checkpoints_and_links_to_runs_are_kept(run, tmp_path):
    """`last.pt` is a second name of an object; the run's folder, and the folder of the runs, may be links."""
    (tmp_path / "elsewhere").mkdir()
    shutil.move(run, tmp_path / "elsewhere" / "moved")
    run.symlink_to(tmp_path / "elsewhere" / "moved")
    (tmp_path / "all").symlink_to(run.parent)
    reached = tmp_path / "all" / "run"
    assert find_run(str(reached)).read_info() is not None
    assert (run / "checkpoints" / "last.pt").stat().st_nlink > 1
    assert resume(reached) == 0
    assert len(CheckpointFolder(run / "checkpoints").read_manifest().entries) == 2


def test_links_of_weights_and_biases_are_its_own(run):
    (run / "wandb").mkdir()
    (run / "wandb" / "latest-run").symlink_to("run-1")
    RunFolder(run).check(is_writer=True)


def test_objects_of_another_folder_are_not_removed(run, victim):
    """Even after the check, the objects are removed below a handle of their own folder."""
    store = CheckpointFolder(run / "checkpoints")
    replace(store.objects, lambda path: path.symlink_to(victim))
    before = [path.name for path in sorted(victim.iterdir())]
    with contextlib.suppress(StorageError):
        store.commit(lambda file: file.write(b"x"), CheckpointFacts(step=9, epoch=3), keep=1, need_bytes=1)
    assert set(before) <= {path.name for path in victim.iterdir()}


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ["run.json", "events.jsonl", "checkpoints/manifest.json", "lock"])
def test_file_that_is_a_hole_of_thirty_gib_ends_at_once(run, entry):
    before = run_state(run)
    os.truncate(run / entry, 30 * 2**30) if (run / entry).exists() else replace(
        run / entry, lambda path: (path.touch(), os.truncate(path, 30 * 2**30)))  # fmt: skip
    began_s = time.monotonic()
    summary = summarize(run)
    with contextlib.redirect_stdout(io.StringIO()):
        print_runs(run.parent, as_json=True)
    assert time.monotonic() - began_s < 5
    if entry == "events.jsonl":
        assert summary.as_json()["reason"].startswith(f"{run / entry} is too large: {30 * 2**30} bytes")
        refused(entry, lambda: resume(run))
    else:
        assert (before, summary.state) == ("finished", "finished")


@pytest.mark.parametrize("entry", ["sweep.json", "configs"])
def test_sweep_with_links_is_refused(tmp_path, victim, entry):
    sweep = tmp_path / "sweep"
    save_sweep(sweep, [])
    replace(sweep / entry, lambda path: path.symlink_to(victim / ".bashrc" if "." in entry else victim))
    before = state_of(victim)
    refused(f"sweep/{entry} is a symbolic link", lambda: save_sweep(sweep, []))
    assert state_of(victim) == before


# -- other users ------------------------------------------------------------------------------------------------------


def as_nobody(act):
    """Runs `act` in a child process of another user; returns True if it did not fail."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.fixture
def shared(trained, tmp_path_factory):
    """A copy of the run in a place that every user can reach."""
    place = Path("/tmp") / f"segapp-shared-{os.getpid()}-{time.time_ns()}"
    place.mkdir()
    place.chmod(0o755)
    yield Path(shutil.copytree(trained, place / "run"))
    shutil.rmtree(place)


def test_files_and_folders_are_never_writable_by_others(trained):
    """The run was trained under umask 000."""
    modes = {path: path.lstat().st_mode for path in (trained, *trained.rglob("*"))}
    assert len(modes) > 15
    assert [path for path, mode in modes.items() if mode & 0o022] == []


def test_folder_that_others_could_write_is_taken_from_them(run):
    """Old runs made under umask 000 or 002; nobody can replace what was checked."""
    for path in (run, run / "checkpoints", run / "events.jsonl"):
        path.chmod(0o777)
    with RunFolder(run):
        assert [stat.S_IMODE(path.stat().st_mode) for path in (run, run / "events.jsonl")] == [0o755, 0o755]
        assert stat.S_IMODE((run / "checkpoints").stat().st_mode) == 0o755


@root_only
def test_another_user_reads_a_run_and_changes_nothing(shared):
    before = state_of(shared)

    def read():
        with contextlib.redirect_stdout(io.StringIO()):
            print_status(str(shared), as_json=True)
        assert summarize(shared).state == "finished"
        write_report(str(shared), Path(f"/tmp/report-{os.getpid()}.html"), has_pictures=False)
        os.unlink(f"/tmp/report-{os.getpid()}.html")

    assert as_nobody(read)
    assert state_of(shared) == before


@root_only
def test_run_of_another_user_is_not_resumed(shared):
    for path in (shared, *shared.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    assert find_run(str(shared)).read_info() is not None
    refused(
        f"{shared} belongs to another user (uid {NOBODY} instead of 0): use a copy of the run (cp -r)",
        RunFolder(shared).acquire,
    )
    copy = shared.with_name("copy")
    subprocess.run(["cp", "-r", shared, copy], check=True)
    RunFolder(copy).check(is_writer=True)


@root_only
@pytest.mark.parametrize("entry", ["events.jsonl", "samples", "checkpoints/objects", "lock"])
def test_file_or_folder_of_another_user_is_refused_by_name(run, tmp_path, entry):
    os.chown(run / entry, NOBODY, NOBODY)
    check_all_roads(run, entry, tmp_path)


@root_only
def test_another_user_cannot_lock_a_run(shared):
    """A read lock, for which reading is enough, kept the owner from resuming."""
    (shared / "lock").chmod(0o644)  # of an older version
    with RunFolder(shared):
        assert not as_nobody(lambda: os.open(shared / "lock", os.O_RDONLY))
        assert not as_nobody(lambda: os.open(shared / "lock", os.O_RDWR))
        assert is_trainer_alive(RunFolder(shared)) is True

        def look():
            assert is_trainer_alive(RunFolder(shared)) is None

        assert as_nobody(look)
    with RunFolder(shared):
        pass


def test_message_about_a_lock_names_no_process_that_has_none(run):
    """A process that reads the file holds a read lock; the last trainer ended long ago."""
    lock = "fcntl.fcntl(file, 37, struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 0, 0, 0))"  # F_OFD_SETLK
    code = f"import fcntl, struct; file = open({str(run / 'lock')!r}); {lock}; print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as reader:
        assert reader.stdout.readline() == "1\n"
        with pytest.raises(RunBusyError, match="lock is held by a process that is no trainer"):
            RunFolder(run).acquire()
        reader.communicate("\n")
    with RunFolder(run):
        assert RunFolder(run).is_locked()


# -- the door ---------------------------------------------------------------------------------------------------------


def test_door_takes_plain_files_of_their_size(tmp_path):
    path = tmp_path / "file"
    with append_to_run(path) as file:
        file.write(b"abc")
    assert read_of_run(path, 3) == b"abc"
    with pytest.raises(OSError, match="too large: 3 bytes, 2 are accepted"):
        read_of_run(path, 2)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic link"):
        open_of_run(tmp_path / "link")
    before = len(os.listdir("/proc/self/fd"))
    os.mkfifo(tmp_path / "pipe")
    for _ in range(3):
        with pytest.raises(OSError, match="neither a plain file nor a folder"):
            open_of_run(tmp_path / "pipe")
    assert len(os.listdir("/proc/self/fd")) == before


def test_tree_is_checked_as_deep_as_a_run_has_folders(tmp_path):
    """Without a bound, a tree of a thousand folders ends in a traceback."""
    deep = tmp_path.joinpath(*["d"] * 40)
    deep.mkdir(parents=True)
    (deep / "link").symlink_to("/")
    check_tree(tmp_path)
    (tmp_path / "d" / "d" / "link").symlink_to("/")
    with pytest.raises(OSError, match="d/d/link is a symbolic link"):
        check_tree(tmp_path)
