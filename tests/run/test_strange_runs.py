"""Run folders from strangers: nothing outside them is read or written, and the message names what is refused."""

import contextlib
import io
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from segapp.commands.runs import control_run, print_checkpoints, print_runs, print_status
from segapp.commands.sweep import save_sweep
from segapp.config import dump_config
from segapp.errors import RunBusyError, StorageError
from segapp.report.compare import compare_runs
from segapp.report.page import write_report
from segapp.run.checkpoints import CheckpointFacts, CheckpointFolder
from segapp.run.commands import CheckpointCommand, send_command
from segapp.run.events import EventReader, EventWriter
from segapp.run.files import append_to_run, check_tree, open_of_run, read_of_run
from segapp.run.folder import RunFolder, find_run
from segapp.run.state import is_trainer_alive
from segapp.session.request import plan_request
from segapp.session.session import run_session
from segapp.view.runs import run_state, summarize
from tests.support.fault_runs import case, state_of, tiny_config
from tests.support.programs import readable_copy
from tests.support.runs import draw_tiny_data, events, segapp, train

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
ONE_EPOCH = {"train": {"epochs": 1}, "log": {"tensorboard": True}, "checkpoint": {"every_steps": None}}
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_root):
    """A finished run with everything that a training on one device writes."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = tiny_config(tiny_root, **ONE_EPOCH)
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


@contextlib.contextmanager
def as_nobody():
    """Gives this process the rights of another user."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def place():
    """A folder that every user can enter, with a data set and a config; the folders of a test are private."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        config = tiny_config(draw_tiny_data(Path(folder) / "data"), **ONE_EPOCH)
        (Path(folder) / "config.yaml").write_text(dump_config(config))
        subprocess.run(["chmod", "-R", "u=rwX,go=rX", folder], check=True)
        yield Path(folder)


@pytest.fixture
def shared(trained, place):
    """A copy of the run in a place that every user can reach."""
    return Path(shutil.copytree(trained, place / "run"))


def wrong_modes(folder, umask):
    """The modes below a folder that are not those of a new file or folder, without writing by others; by name."""
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}
    right = {path: (0o755 if path.is_dir() else 0o644) & ~umask for path in modes} | {folder / "run" / "lock": 0o600}
    return {str(path.relative_to(folder)): oct(mode) for path, mode in modes.items() if mode != right[path]}


TRAIN = ("train", "--plain", "--config", "../config.yaml", "--run", "run")
READERS = (
    ("ls", "RUNS"),
    ("status", "RUN", "--json"),
    ("ckpt", "verify", "RUN"),
    ("report", "RUN", "--out", "report.html"),
    ("compare", "RUN", "RUN", "--html", "compare.html"),
    ("eval", "RUN", "--json", "numbers/eval.json"),
    ("predict", "RUN", "../data/images/val", "--out", "maps", "--save", "labels", "--save", "probabilities"),
    ("predict", "RUN", "../data/images/val", "--out", "shapes", "--polygons", "gpkg"),
    ("suspects", "RUN", "--out", "suspects"),
    ("export", "RUN", "--format", "safetensors", "--out", "files/model.safetensors"),
)
"""Commands that read a run, and write everything that they can."""
PROGRAMS = (
    ("export", "RUN", "--format", "pt2", "--out", "files/model.pt2"),
    ("export", "RUN", "--format", "onnx", "--out", "files/model.onnx"),
)


def run_all(commands, runs, out, **options):
    """Runs commands in the folder `out`, which must succeed."""
    for words in commands:
        named = [str({"RUN": runs / "run", "RUNS": runs}.get(word, word)) for word in words]
        done = segapp(*named, cwd=out, **options)
        assert done.returncode == 0, (words, done.stderr)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000, 0o002])
def test_files_have_the_umasks_modes_and_others_never_write(place, umask):
    own = place / "own"
    own.mkdir()
    run_all([TRAIN, *READERS], own, own, umask=umask)
    before = os.umask(umask)
    try:
        send_command(own / "run", CheckpointCommand())
    finally:
        os.umask(before)
    assert len(list(own.rglob("*"))) > 40
    assert wrong_modes(own, umask) == {}


def test_run_of_a_function_is_never_writable_by_others(trained):
    """The run was trained in this process, under umask 000."""
    assert wrong_modes(trained.parent, 0) == {}


@case("S03", how="no socket: umask 000 and 002; a run and its inbox with mode 0777", passes="0755, and files 0644")
def test_folder_that_others_could_write_is_taken_from_them(run):
    """Old runs made under umask 000 or 002; nobody can replace what was checked."""
    paths = (run, run / "checkpoints", run / "commands", run / "events.jsonl")
    for path in paths:
        path.chmod(0o777)
    with RunFolder(run):
        assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o755] * 4


@root_only
@pytest.mark.slow
def test_another_user_uses_a_run_and_changes_nothing(place):
    own, other = place / "own", place / "other"
    for folder, uid in ((own, 0), (other, NOBODY)):
        folder.mkdir()
        os.chown(folder, uid, uid)
    run_all([TRAIN], own, own, umask=0o022)
    send_command(own / "run", CheckpointCommand())
    before = state_of(own)
    as_other = {"uid": NOBODY, "umask": 0o022, "root": readable_copy(place / "code"), "HOME": str(place / "home")}
    run_all([*READERS, *PROGRAMS], own, other, **as_other)
    copy = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "cp", "-r", own / "run", other]
    copied = subprocess.run(copy, capture_output=True, text=True, check=False)
    assert copied.stderr.count("\n") == copied.stderr.count("run/lock' for reading: Permission denied") == 1
    run_all([("train", "--plain", "--resume", "RUN", "train.epochs=2")], other, other, **as_other)
    assert [event["step"] for event in events(other / "run", "step")] == [*range(1, 11)]
    assert [str(path) for path in other.rglob("*") if path.stat().st_uid != NOBODY] == []
    assert wrong_modes(other, 0o022) == {}
    assert state_of(own) == before
    os.chmod(own / "run" / "events.jsonl", 0o600)
    refused = segapp("status", own / "run", cwd=other, **as_other)
    assert (refused.returncode, refused.stderr[:7]) == (10, "error: "), "it was the modes that let the other user read"


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
        with as_nobody():
            for flags in (os.O_RDONLY, os.O_RDWR):
                with pytest.raises(PermissionError):
                    os.open(shared / "lock", flags)
            assert is_trainer_alive(RunFolder(shared)) is None
        assert is_trainer_alive(RunFolder(shared)) is True
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
