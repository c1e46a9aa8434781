import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from segapp.errors import ConfigError, RunBusyError, StorageError
from segapp.run import folder as folders
from segapp.run.events import (
    Alert,
    Checkpoint,
    CommandAnswer,
    EventWriter,
    Heartbeat,
    Memory,
    RunEnd,
    RunStart,
    Step,
    Val,
)
from segapp.run.files import machine_id, machine_names
from segapp.run.folder import RunFolder, find_run, remove_failed_start, run_of_file
from segapp.run.lock import ProcessId, is_alive, this_process
from segapp.run.state import StateFacts, derive_state
from segapp.view.runs import list_runs, run_state, summarize


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create("a", root=tmp_path)


def test_new_run_never_reuses_an_existing_folder(tmp_path):
    paths = [RunFolder.create("camvid", root=tmp_path).path.name for _ in range(3)]
    assert paths == ["camvid", "camvid-2", "camvid-3"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-x", "a\nb", "x" * 101])
def test_run_name_unfit_as_folder_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="name="):
        RunFolder.create(name, root=tmp_path)


def test_given_folder_is_used_unless_files_would_be_lost(tmp_path):
    folder = RunFolder.create(path=tmp_path / "here")
    with folder:
        folder.write_info()
    # A run without a step, after a failed start, does not block the next one.
    RunFolder.create(path=tmp_path / "here")
    write(folder, step(1))
    with pytest.raises(ConfigError, match="add --resume"):
        RunFolder.create(path=folder.path)
    folder.events.unlink()
    (folder.checkpoints / "last.pt").write_bytes(b"x")
    with pytest.raises(ConfigError, match="add --resume"):
        RunFolder.create(path=tmp_path / "here")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder.create(path=folder.checkpoints / "last.pt")
    with pytest.raises(StorageError):
        RunFolder.create("x", root=folder.checkpoints / "last.pt" / "runs")


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("lock", lambda folder: folder.acquire(), "lock"),
        ("run.json", lambda folder: folder.write_info(), "run.json"),
        ("config.yaml", lambda folder: folder.write_config("name: x"), "config.yaml"),
    ],
)
def test_file_that_cannot_be_written_is_a_storage_error(tmp_path, name, write, message):
    folder = RunFolder.create(path=tmp_path / "a")
    (tmp_path / "a" / name).mkdir()
    with pytest.raises(StorageError, match=message):
        write(folder)


def test_run_json_is_written_once_with_contract_fields(folder):
    with folder:
        info = folder.write_info(versions={"torch": "2"}, gpus=[{"uuid": "GPU-1"}])
        assert folder.write_info(versions={"torch": "3"}) == info
    raw = json.loads(folder.run_json.read_text())
    assert {"schema", "id", "host", "pid", "process_start_s", "argv", "versions", "gpus"} <= raw.keys()
    assert raw["pid"] == os.getpid()
    assert raw["gpus"] == [{"uuid": "GPU-1"}]
    assert abs(raw["process_start_s"] - time.time()) < 24 * 3600
    assert RunFolder.open(folder.path).read_info() == info


# -- one trainer at a time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "held_by", "waits"),
    [
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, {}, True),
        ({"SLURM_RESTART_COUNT": "2"}, {"SLURM_JOB_ID": "1"}, True),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, {}, False),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}, False),
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "a"}, True),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none"}, False),
    ],
)
def test_restart_and_same_job_wait_for_the_holder(tmp_path, monkeypatch, environ, held_by, waits):
    monkeypatch.setattr(folders, "_BUSY_LOOK_S", 0.01)  # a look each second would make the test wait for it
    holder, other, said = RunFolder.create(path=tmp_path / "a"), RunFolder(tmp_path / "a"), []
    holder.acquire(environ=held_by)

    def say(line):
        said.append(line)
        threading.Timer(0.1, holder.release).start()

    if not waits:
        with pytest.raises(RunBusyError):
            other.acquire(say, environ=environ)
        assert said == []
        return
    other.acquire(say, environ=environ)
    assert said == [
        f"{other.path} is still held by process {os.getpid()} on {os.uname().nodename}: waiting up to 120 s for its end"
    ]
    monkeypatch.setattr(folders, "BUSY_S", 0.05)
    with pytest.raises(RunBusyError):
        RunFolder(tmp_path / "a").acquire(said.append, environ=environ)
    other.release()


def test_release_without_a_lock_closes_no_file(tmp_path, monkeypatch):
    held = RunFolder(tmp_path)
    held.acquire()
    held.release()
    monkeypatch.setattr(os, "close", lambda fd: pytest.fail(f"closed the file {fd} of others"))
    held.release()
    RunFolder(tmp_path).release()


def test_reading_the_lock_file_does_not_release_the_lock(folder):
    with folder:
        folder.lock.read_text()
        RunFolder(folder.path).read_holder()
        assert RunFolder(folder.path).is_locked()
        with pytest.raises(RunBusyError):
            RunFolder(folder.path).acquire()
    assert not folder.is_locked()


FORK_AND_DIE = """
import os, signal, sys, time
from segapp.run.folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.acquire()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""


def test_worker_outliving_its_trainer_does_not_hold_the_lock(folder):
    trainer = subprocess.Popen([sys.executable, "-c", FORK_AND_DIE, folder.path], stdout=subprocess.PIPE, text=True)
    worker = int(trainer.stdout.readline())
    try:
        assert folder.is_locked(), "the worker's start gives nothing away"
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
        os.kill(worker, 0)
        assert not folder.is_locked()
        folder.acquire()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_lock_release_holds_despite_a_forked_child(folder):
    """A new child may not have closed its copy yet."""
    for _ in range(10):
        folder.acquire()
        if (child := os.fork()) == 0:
            time.sleep(0.1)
            os._exit(0)
        folder.release()
        assert not folder.is_locked()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_is_alive_distinguishes_processes_of_equal_pid():
    here = this_process()
    assert is_alive(here) is True
    assert is_alive(here.model_copy(update={"start_ticks": here.start_ticks - 1})) is False
    assert is_alive(here.model_copy(update={"boot_id": "another"})) is False
    assert is_alive(here.model_copy(update={"host": "elsewhere"})) is None
    assert is_alive(here.model_copy(update={"machine": "a container of this kernel"})) is None
    assert is_alive(ProcessId(host=here.host, pid=2**30)) is False
    zombie = subprocess.Popen(["true"])
    time.sleep(0.3)
    assert is_alive(ProcessId(host=here.host, pid=zombie.pid)) is False
    zombie.wait()


# -- states -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (StateFacts(end_status="finished", is_trainer_alive=False), "finished"),
        (StateFacts(end_status="stopped", is_trainer_alive=True, step_age_s=1.0), "stopped"),
        (StateFacts(end_status="failed", is_trainer_alive=None), "failed"),
        (StateFacts(is_trainer_alive=True, event_age_s=1.0, step_age_s=1.0), "live"),
        (StateFacts(is_trainer_alive=True, event_age_s=1.0, step_age_s=100.0), "busy"),
        # Fresh for 15 s, or for five steps where that is longer.
        (StateFacts(is_trainer_alive=True, event_age_s=14.9, step_age_s=14.9, step_interval_s=2.9), "live"),
        (StateFacts(is_trainer_alive=True, event_age_s=15.1, step_age_s=15.1, step_interval_s=2.9), "stale"),
        (StateFacts(is_trainer_alive=True, event_age_s=49.0, step_age_s=49.0, step_interval_s=10.0), "live"),
        (StateFacts(is_trainer_alive=True, event_age_s=51.0, step_age_s=51.0, step_interval_s=10.0), "stale"),
        (StateFacts(is_trainer_alive=True), "busy"),
        (StateFacts(is_trainer_alive=False, event_age_s=1.0, step_age_s=1.0), "crashed"),
        (StateFacts(is_trainer_alive=None, event_age_s=1.0, step_age_s=1.0), "live"),
        (StateFacts(is_trainer_alive=None, event_age_s=1.0), "busy"),
        (StateFacts(is_trainer_alive=None, event_age_s=100.0, step_age_s=100.0), "lost"),
        (StateFacts(is_trainer_alive=None), "lost"),
    ],
)
def test_every_run_state_is_derived(facts, word):
    assert derive_state(facts) == word


def start(**fields):
    return RunStart(
        classes=["a", "b"], num_params=7, batch_size=4, epochs=2, steps_per_epoch=3, devices=["cpu"], **fields
    )


def start_of(folder, **fields):
    """The start of the process that holds the lock."""
    return start(acquired_s=folder.read_holder().acquired_s, **fields)


def step(number, loss=1.0):
    return Step(epoch=1, step=number, loss=loss, lr=0.1)


def write(folder, *events):
    with EventWriter(folder.events) as writer:
        for event in events:
            writer.write(event)


def test_ages_are_those_of_the_last_event_and_step(folder, monkeypatch):
    with EventWriter(folder.events) as writer:
        for t, event in (
            (100.0, start()),
            (104.0, step(1)),
            (106.0, step(2)),
            (108.0, CommandAnswer(id="0123456789ab", by="me", command="pause", status="applied")),
            (109.0, Heartbeat(phase="train", step=2)),
        ):
            monkeypatch.setattr(time, "time", lambda t=t: t)
            writer.write(event)
    facts = summarize(folder.path, now_s=110.0).facts
    assert (facts.event_age_s, facts.step_age_s) == (1.0, 4.0)


def test_run_states_from_start_to_resume(folder):
    folder.acquire()
    folder.write_info()
    now_s = time.time()
    assert run_state(folder.path) == "busy"
    with EventWriter(folder.events) as writer:
        writer.write(start_of(folder))
        writer.write(step(1))
        assert run_state(folder.path) == "live"
        assert run_state(folder.path, now_s + 1000) == "stale"
        assert run_state(folder.path, now_s - 1000) == "live", "a clock that runs behind"
        writer.write(RunEnd(status="stopped", reason="signal", exit_code=75))
        assert run_state(folder.path) == "stopped"
        assert [summarize(folder.path).as_json()[key] for key in ("reason", "exit_code")] == ["signal", 75]
        folder.release()
        time.sleep(0.02)
        folder.acquire()
        assert run_state(folder.path) != "stopped", "taken up again"
        assert [summarize(folder.path).as_json()[key] for key in ("reason", "exit_code")] == [None, None]
        writer.write(start_of(folder, resumed_from_step=1))
        assert run_state(folder.path) == "busy"
        writer.write(step(2))
        assert run_state(folder.path) == "live"
    folder.release()


def test_trainer_of_an_equal_host_name_is_not_crashed(folder):
    """Another boot id is a reboot of this machine, unless events were written since this machine started."""
    process = this_process().model_copy(update={"boot_id": "another", "machine": "another.1"})

    def write_maker(maker):
        info = {"id": "a", "name": "a", "created_s": 1.0, "process": maker.model_dump(mode="json")}
        folder.run_json.write_text(json.dumps(info))

    write_maker(process)
    assert run_state(folder.path) == "crashed"
    write(folder, start(), step(1))
    assert run_state(folder.path) == "live"
    assert run_state(folder.path, time.time() + 60) == "lost"
    write_maker(this_process().model_copy(update={"pid": 2**22 + 1}))
    assert run_state(folder.path) == "crashed"
    folder.lock.write_text(process.model_dump_json())
    assert run_state(folder.path) == "live", "another process continues what one of this machine began"
    os.utime(folder.events, (1.0, 1.0))
    assert run_state(folder.path) == "crashed"


def test_summary_has_every_field(folder, tmp_path):
    with folder:
        folder.write_info()
        write(folder, start_of(folder, gpu0_bsz=1, split=[1, 3]))
        for number in (1, 2, 3):
            memory = Memory(devices=[{"uuid": "GPU-1", "used_mib": 100.0 * number}])
            write(folder, step(number, loss=1.0 / number), memory, Heartbeat())
        write(
            folder,
            Val(epoch=1, step=3, loss=0.3, miou=0.6, iou=[0.6, None], pixel_accuracy=0.9),
            Checkpoint(path="checkpoints/last.pt", epoch=1, step=3),
            Val(epoch=2, step=6, loss=0.4, miou=0.5, iou=[0.5, None], pixel_accuracy=0.9),
            CommandAnswer(id="1", command="set gpu0_bsz=2", by="me", status="accepted"),
            Alert(kind="oom", message="GPU 0 is nearly full"),
        )
        found = summarize(folder.path).as_json()
        [listed] = list_runs(tmp_path)
    names = ("state", "epoch", "step", "steps_per_epoch", "epochs", "miou", "best_miou", "best_epoch", "pid")
    assert [found[name] for name in names] == ["live", 1, 3, 3, 2, 0.5, 0.6, 1, os.getpid()]
    assert (found["loss"], found["loss_epoch"]) == (pytest.approx((1 + 1 / 2 + 1 / 3) / 3), 1)
    assert (found["num_scored"], found["best_num_scored"], found["num_classes"]) == (1, 1, len(start().classes))
    assert found["devices"][0]["used_mib"] == 300.0
    assert found["checkpoint"] == {"path": "checkpoints/last.pt", "epoch": 1, "step": 3}
    assert found["pending"] == {"1": "set gpu0_bsz=2"}
    assert (found["num_alerts"], found["last_alert"]) == (1, "GPU 0 is nearly full")
    assert listed.folder.name == "a"


@pytest.mark.parametrize("num_bytes", [0, 300 * 2**10, 2 * 2**20], ids=["none", "block", "blocks"])
def test_last_events_are_found_before_much_damage(folder, num_bytes):
    write(folder, start(), RunEnd(status="finished", reason="done", exit_code=0))
    with folder.events.open("ab") as file:
        file.write(b"x" * num_bytes + b"\n")
    assert run_state(folder.path) == "finished"


def test_damaged_run_folder_is_summarized_without_traceback(folder, tmp_path):
    folder.run_json.write_bytes(b"\xff{")
    folder.lock.write_bytes(b"[1")
    folder.events.write_bytes(os.urandom(10_000) + b'\n{"v":1,"seq":1,"t":1,"type":"step","loss":"x"}\n{"torn')
    assert summarize(folder.path).state == "crashed"
    assert [run.state for run in list_runs(tmp_path)] == ["crashed"]
    assert list_runs(tmp_path / "missing") == []


# -- find_run ----------------------------------------------------------------------------------------------------


def test_runs_are_found_by_name_path_inner_file_and_age(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        with RunFolder.create(name) as folder:
            folder.write_info()
        os.utime(folder.lock, (folder.lock.stat().st_mtime + 10,) * 2)
    assert find_run().name == "two"
    assert find_run("one").name == "one"
    assert find_run("runs/one").name == "one"
    assert find_run(tmp_path / "runs" / "one").name == "one"
    assert find_run("runs/one/checkpoints/last.pt").name == find_run("runs/one/checkpoints/objects/1.pt").name == "one"
    monkeypatch.chdir(tmp_path / "runs" / "one")
    assert find_run(".").name == "one"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"tow: no such run: did you mean two\?"):
        find_run("tow")
    (tmp_path / "runs" / "lr-sweep").mkdir()
    (tmp_path / "runs" / "lr-sweep" / "sweep.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"lr-sweep is a sweep: name one of its runs \(`segapp ls lr-sweep` lists"):
        find_run("lr-sweep")
    with pytest.raises(ConfigError, match="no run in nowhere"):
        find_run(None, "nowhere")
    with pytest.raises(ConfigError, match="not a run"):
        RunFolder.open(tmp_path)


def failed_start(root, *events):
    folder = RunFolder.create("demo", root=root)
    with folder:
        folder.write_info()
        write(folder, *events, RunEnd(status="failed", reason="data.root is missing", exit_code=3, step=0))
    return folder


def test_failed_start_is_replaced_unless_held_or_trained(tmp_path):
    failed_start(tmp_path)
    second = RunFolder.create("demo", root=tmp_path)
    assert not second.events.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    with failed_start(tmp_path / "held"):
        assert RunFolder.create("demo", root=tmp_path / "held").name == "demo-2"
    trained = failed_start(tmp_path / "other", start())
    assert RunFolder.create("demo", root=tmp_path / "other").name == "demo-2"
    assert trained.events.exists()


def test_folder_without_a_run_is_removed_by_its_maker_alone(tmp_path):
    made = RunFolder.create("demo", root=tmp_path)
    made.log.write_text("error: no config\n")
    assert not remove_failed_start(RunFolder(made.path)), "another process may be about to begin there"
    with RunFolder(made.path):
        assert not remove_failed_start(made), "its trainer holds it"
    assert remove_failed_start(made)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    assert not remove_failed_start(RunFolder.create(path=tmp_path / "mine"))
    assert remove_failed_start(RunFolder.create(path=tmp_path / "new"))
    with RunFolder.create("demo", root=tmp_path) as saved:
        (saved.checkpoints / "last.pt").write_bytes(b"x")
    assert not remove_failed_start(saved)


def test_messages_name_a_run_outside_runs_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside, outside = RunFolder.create("tw"), RunFolder.create(path=tmp_path / "elsewhere" / "tw")
    assert inside.argument == "tw"
    assert outside.argument == str(tmp_path / "elsewhere" / "tw")
    with outside, pytest.raises(RunBusyError, match=rf"segapp attach {outside.path}"):
        RunFolder(outside.path).acquire()


def test_file_belongs_to_the_run_that_it_lies_in(tmp_path):
    for expected in ("demo", "demo-2"):
        folder = RunFolder.create("demo", root=tmp_path)
        folder.write_info()
        file = folder.checkpoints / "objects" / "00000001-0123456789abcdef.pt"
        file.parent.mkdir()
        file.write_bytes(b"")
        found = run_of_file(file)
        assert found is not None
        assert (found.name, found.read_info().id) == (expected, folder.read_info().id)
    assert run_of_file(tmp_path / "copy.pt") is None


def test_machines_with_one_host_name_are_told_apart():
    """Process ids of another namespace, such as a container's, are not those of this machine."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no namespaces of process ids")
    code = "import socket; from segapp.run.files import machine_id; print(socket.gethostname(), machine_id())"
    here, there = (
        subprocess.check_output([*prefix, sys.executable, "-c", code], text=True).split() for prefix in ([], unshare)
    )
    assert here[0] == there[0]
    assert here[1] == machine_id() != there[1]
    names = machine_names([(here[1], here[0])] * 2 + [(there[1], there[0])])
    assert names == {here[1]: here[0], there[1]: f"{here[0]} (2)"}
    assert machine_names([(here[1], here[0])] * 2) == {here[1]: None}
