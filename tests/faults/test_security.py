"""Who may do what: files that carry code, the inbox, the network, what is shown (S01 to S12)."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from segapp.checkpoint.training_state import load_checkpoint
from segapp.errors import CheckpointError
from segapp.models.weights import read_weights_file
from segapp.run.commands import parse_command, send_command
from tests.support import ROOT
from tests.support.fault_runs import FaultRun, Invariants, case, some
from tests.support.hostile_files import CONTROL, MARKUP, Canary, is_inert, pickles
from tests.support.programs import Program

NewRun = Callable[..., FaultRun]

PAYLOADS = [name for name, _ in pickles(Path("/nonexistent"))]


@pytest.fixture
def finished(left_by: NewRun) -> FaultRun:
    return left_by("", train={"epochs": 1})


@pytest.mark.sampled(3)
@pytest.mark.faults
@case("S01", how="pickles as checkpoint and weights: 7 containers, torch's opt-out set", passes="exit 4")
@pytest.mark.parametrize("payload", PAYLOADS)
def test_pickle_in_weights_is_never_executed(finished: FaultRun, payload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = finished.work / "canary"
    data = dict(pickles(canary))[payload]
    path = finished.work / "evil.pth"
    path.write_bytes(data)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for read in (read_weights_file, load_checkpoint):
        with pytest.raises(CheckpointError):
            read(path)
    if payload == PAYLOADS[0]:
        opt_out = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
        for words in (
            ("eval", "evil.pth"),
            ("predict", "evil.pth", finished.config.data.root, "--out", "out"),
            ("train", "--plain", "--config", "config.yaml", "--run", "new", "--resume", "evil.pth"),
            ("train", "--plain", "--config", "config.yaml", "--run", "new2", "model.weights=evil.pth"),
        ):
            done = finished.command(*words, **opt_out)
            Invariants.assert_clear(done, 4)
    assert not canary.exists(), "code of the file was run"


@pytest.mark.faults
@case("S01", how="a payload committed with a manifest that vouches for it", passes="exit 4; inert")
def test_pickle_with_valid_manifest_is_not_executed(finished: FaultRun) -> None:
    canary = finished.work / "canary"
    data = dict(pickles(canary))[PAYLOADS[0]]
    checkpoints = finished.folder / "checkpoints"
    manifest = json.loads((checkpoints / "manifest.json").read_text())
    entry = manifest["entries"][0]
    sha256 = hashlib.sha256(data).hexdigest()
    name = f"{entry['step']:08d}-{sha256[:16]}.pt"
    (checkpoints / "objects" / name).write_bytes(data)
    manifest["entries"] = [{**entry, "object": name, "sha256": sha256, "size_bytes": len(data)}]
    (checkpoints / "manifest.json").write_text(json.dumps(manifest))
    done = finished.command("train", "--plain", "--config", "config.yaml", "--run", "run", "--resume", "train.epochs=2")
    Invariants.assert_clear(done, 4, "refused, it could run code")
    assert not canary.exists(), "code of the file was run"


@pytest.mark.faults
def test_payloads_run_in_an_unsafe_load(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    with open(tmp_path / "evil.pth", "wb") as file:
        torch.save({"x": Canary(canary)}, file)
    torch.load(tmp_path / "evil.pth", weights_only=False)
    assert canary.exists()


@case("S02", how="archives that unpack to gigabytes; 60 mutants of a checkpoint", passes="refused; memory bounded")
@case("S02", how="2000 mutants of a checkpoint and of weights", passes="read or refused; no crash; memory bounded")
@pytest.mark.parametrize("count", some([60, 2000], 60))
def test_checkpoint_bombs_and_mutants_are_refused_or_read(finished: FaultRun, count: int) -> None:
    buffer = io.BytesIO()
    torch.save({"model": {"w": torch.zeros(2**23)}}, buffer)
    bomb = finished.work / "bomb.pth"
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    del buffer
    assert bomb.stat().st_size < 2**20
    for read in (read_weights_file, load_checkpoint):
        with pytest.raises(CheckpointError, match="compressed"):
            read(bomb)
    data, path, rng = finished.newest().read_bytes(), finished.work / "mutant.pt", random.Random(0)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed)) if rng.random() < 0.5 else rng.randrange(4096)] = rng.randrange(256)
        path.write_bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.2 else changed)
        for read in (read_weights_file, load_checkpoint):
            with contextlib.suppress(CheckpointError):
                read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 512 * 1024


@pytest.fixture
def training(new_run: NewRun) -> Iterator[tuple[FaultRun, Program]]:
    """A run that goes on until it is stopped."""
    run = new_run(train={"epochs": 100_000}, checkpoint={"every_steps": None, "every_epochs": 1000})
    program = run.start(SECRET_TOKEN=SECRET, AWS_SECRET_ACCESS_KEY=SECRET)
    run.wait_for_step(2, program)
    yield run, program
    program.kill()
    run.ended(program)


SECRET = "hunter2-5f3a9c"


@pytest.mark.faults
@case("S05", how="the sockets of a live run, of its children too", passes="no listening socket, TCP, UDP or abstract")
def test_live_run_listens_on_no_port(training: tuple[FaultRun, Program]) -> None:
    found = [each for pid in training[0].left_behind() for each in psutil.Process(pid).net_connections("all")]
    assert [s for s in found if s.family != socket.AF_UNIX or str(s.laddr).startswith("@")] == []
    server = socket.create_server(("127.0.0.1", 0))
    assert server.getsockname()[1] in [s.laddr.port for s in psutil.Process().net_connections("inet")]
    server.close()


@pytest.mark.faults
@case(
    "S06",
    how="no socket: inbox with 6,000 files, junk, 10 MB, links, FIFO; stop twice",
    passes="each answered once, pause before the others; exit 75",
)
def test_junk_files_in_the_inbox_are_each_answered_once(training: tuple[FaultRun, Program]) -> None:
    run, program = training
    inbox = run.folder / "commands"
    good = json.dumps({"v": 1, "id": "b" * 12, "by": "a@b", "t": 1.5, "command": {"kind": "set", "lr_factor": 0.5}})
    junk = [b"\x07\xff\0", b"[" * 60_000, b"[" * 10_000_000, good[:-9].encode(), good.replace("0.5", "NaN").encode()]
    junk += [good.replace("a@b", CONTROL[1]).encode(), good.replace("set", "\ud800").encode(errors="surrogatepass")]
    psutil.Process(program.pid).suspend()
    for i in range(6_000):
        path = inbox / f"{i:020d}-{i:012x}.json" if i % 7 else inbox / f"x{i}{MARKUP[1].replace('/', '_')}"
        odd = junk[i % len(junk) if i < 7 or i % 7 != 2 else 0]
        path.with_name(f".tmp-{i}").write_bytes(odd if i < 400 else good.replace("b" * 12, f"{i:012x}").encode())
        path.with_name(f".tmp-{i}").rename(path)
    (inbox / f"{401:020d}-{'d' * 12}.json").symlink_to("/etc/passwd")
    os.mkfifo(inbox / f"{402:020d}-{'e' * 12}.json")
    urgent = [send_command(run.folder, parse_command(word)) for word in ("pause", "resume")]
    psutil.Process(program.pid).resume()
    run.wait_for(lambda: not os.listdir(inbox), program, 200)
    answers = [event for event in run.events("command") if event["status"] != "accepted"]
    assert len({answer["id"] for answer in answers}) == len(answers) == 6_004, "each is answered once"
    assert sorted(urgent) == sorted(answer["id"] for answer in answers[:2]), "they do not wait for the others"
    assert sum(answer["status"] == "rejected" for answer in answers) >= 5_000
    assert all(is_inert(json.dumps(answer, ensure_ascii=False)) for answer in answers)
    assert is_inert(program.stdout + program.stderr)
    Invariants.assert_clear(run.command("ctl", "run", "stop", "\x1b[2J"), 2)
    before = run.events("step")[-1]["step"]
    run.wait_for(lambda: run.events("step")[-1]["step"] > before + 2, program)
    for _ in range(2):
        send_command(run.folder, parse_command("stop"))
    assert run.ended(program).returncode == 75
    stops = [e["status"] for e in run.events("command") if e["command"] == "stop" and e["status"] != "accepted"]
    assert len(stops) == 2
    assert "applied" in stops


@pytest.mark.faults
@case("S05", how="ranks of one machine: a pickle at each port", passes="loopback only, mode 0700, and inert")
def test_ranks_of_one_machine_tell_strangers_nothing(new_run: NewRun) -> None:
    run = new_run(train={"epochs": 1000}, parallel={"mode": "ddp", "devices": ["cpu"] * 2})
    (temporary := run.work / "tmp").mkdir()
    # The network interface is that of other jobs.
    program = run.start(GLOO_SOCKET_IFNAME="eth0", SEGAPP_TEST_FORK="1", TMPDIR=str(temporary))
    run.wait_for_step(2, program, 180)
    launcher = psutil.Process(program.pid)
    processes = [launcher, *(ranks := launcher.children(recursive=True))]
    assert len(ranks) == 2
    found = [connection for process in processes for connection in process.net_connections("inet")]
    assert {connection.laddr.ip for connection in found} == {"127.0.0.1"}
    ports = {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}
    assert len(ports) >= 2, "each rank has a port"
    canary = run.work / "canary"
    for port in ports:
        for number in range(4):  # gloo reads the number of the connection first
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(struct.pack("<q", number) + pickle.dumps(Canary(canary)) * 50)
    (folder,) = temporary.glob("segapp-ranks-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    run.wait_for_step(run.events("step")[-1]["step"] + 20, program)
    program.send(signal.SIGTERM)
    assert run.ended(program, 120).returncode == 75, program.stderr
    assert not folder.exists()
    assert not canary.exists(), "code of the file was run"


@pytest.mark.faults
@case("S07", how="no socket: the inbox is removed, replaced by a file, made again", passes="training goes on")
def test_training_continues_without_the_inbox(training: tuple[FaultRun, Program]) -> None:
    run, program = training
    inbox = run.folder / "commands"
    shutil.rmtree(inbox)
    at = run.events("step")[-1]["step"]
    run.wait_for_step(at + 5, program)
    Invariants.assert_clear(run.command("ctl", "run", "pause"), 2, "cannot send")
    inbox.write_text("x")
    run.wait_for_step(at + 10, program)
    inbox.unlink()
    inbox.mkdir(mode=0o700)
    assert run.command("ctl", "run", "stop", "--wait").returncode == 0
    assert run.ended(program).returncode == 75


@pytest.mark.faults
@case(
    "S09",
    how="class names with escapes, OSC 52, markup, RTL, 10 kB",
    passes="no payload byte in six commands",
)
def test_hostile_names_are_inert_on_a_plain_terminal(new_run: NewRun, tiny_root: Path) -> None:
    names = ["\x1b[2J[/]", "\x1b]52;c;b3du\x07[@click=app.quit]x[/]", "\u202egnp" + "x" * 10_000]
    run = new_run(name="work", data={"classes": names}, train={"epochs": 1})
    assert run.train().returncode == 0
    shown = [run.program("eval", "run"), run.program("status", "run"), run.program("ls")]
    shown += [run.program("check", "--config", "config.yaml"), run.program("ckpt", "list", "run")]
    texts = []
    for program in (*run.programs[:1], *shown):
        done = run.ended(program, 120)
        texts.append(done.stdout + done.stderr)
        assert "Traceback" not in texts[-1]
    assert all(is_inert(text) for text in texts)
    assert any("[@click=app.quit]x[/]" in text for text in texts), "markup is shown as it is written"
    log = run.folder / "trainer.log"
    assert is_inert(log.read_text() if log.exists() else "")


@pytest.mark.faults
@case("S09", how="secrets in the environment of a failing and of a finishing run", passes="in no file, in no line")
def test_secrets_stay_out_of_logs(new_run: NewRun) -> None:
    run = new_run(train={"epochs": 1}, log={"tensorboard": True})
    program = run.start(SECRET_TOKEN=SECRET, AWS_SECRET_ACCESS_KEY=SECRET, failpoints="train.step=3:raise")
    done = run.ended(program)
    finished = run.train(SECRET_TOKEN=SECRET, HF_TOKEN=SECRET)
    assert finished.returncode == 0, finished.stderr
    assert SECRET not in done.stdout + done.stderr + finished.stdout + finished.stderr
    for path in run.folder.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


FORBIDDEN_CALLS = {
    "eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pickle.load",
    "pickle.loads", "cv2.imread", "marshal.loads", "shelve.open", "torch.hub.load", "joblib.load", "decode_image",
    "torchvision.io.read_image", "torch.jit.load", "dist.all_gather_object", "dist.gather_object",
    "dist.broadcast_object_list", "dist.scatter_object_list", "dist.recv_object_list",
}  # fmt: skip


OWN_PIPES = {"segapp/planning/plan.py", "segapp/planning/simulate.py"}
"""Where `pickle.load` reads a pipe between the planner and the processes that it starts, and nobody else writes."""


@pytest.mark.faults
@case("S12", how="the source, as a syntax tree", passes="no eval, shell, pickle, unsafe YAML or torch.load, cv2.imread")
def test_source_has_no_call_that_can_run_code() -> None:
    found = []
    for path in sorted((ROOT / "segapp").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == "LOAD_TRUNCATED_IMAGES":
                found.append(f"{path}: {node.id}")
            if isinstance(node, ast.ImportFrom):
                taken = {f"{node.module}.{alias.name}" for alias in node.names}
                found += [f"{path}: from {name}" for name in taken & FORBIDDEN_CALLS]
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called == "pickle.load" and str(path.relative_to(ROOT)) in OWN_PIPES:
                continue
            is_bad = called in FORBIDDEN_CALLS or keywords.get("shell", "False") != "False"
            is_bad |= called == "torch.load" and keywords.get("weights_only") != "True"
            is_bad |= called.endswith("Image.open") and "formats" not in keywords
            if is_bad:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {called}")
    assert found == []
