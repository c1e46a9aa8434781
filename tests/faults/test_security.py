"""Who may do what: files that carry code, the inbox, the network, what is shown (S01 to S12)."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import stat
import statistics
import struct
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from segapp.checkpoint.training_state import load_checkpoint
from segapp.errors import CheckpointError
from segapp.models.weights import read_weights_file
from segapp.run.commands import drain_commands, parse_command, send_command
from tests.support import ROOT
from tests.support.fault_runs import FaultRun, Invariants, case, needs
from tests.support.hostile_files import CONTROL, MARKUP, Canary, is_inert, pickles
from tests.support.programs import Program

NewRun = Callable[..., FaultRun]

PAYLOADS = [name for name, _ in pickles(Path("/nonexistent"))]


@pytest.fixture
def finished(new_run: NewRun) -> FaultRun:
    run = new_run(train={"epochs": 1})
    assert run.train().returncode == 0
    return run


def inert_canary(canary: Path) -> None:
    assert not canary.exists(), "code of the file was run"


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
    inert_canary(canary)


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
    inert_canary(canary)


@pytest.mark.faults
def test_payloads_run_in_an_unsafe_load(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    with open(tmp_path / "evil.pth", "wb") as file:
        torch.save({"x": Canary(canary)}, file)
    torch.load(tmp_path / "evil.pth", weights_only=False)
    assert canary.exists()


@pytest.mark.faults
@case("S02", how="archives that unpack to gigabytes; 60 mutants of a checkpoint", passes="refused; memory bounded")
def test_checkpoint_bombs_and_mutants_are_refused_or_read(finished: FaultRun) -> None:
    buffer = io.BytesIO()
    torch.save({"model": {"w": torch.zeros(2**26)}}, buffer)
    bomb = finished.work / "bomb.pth"
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    del buffer
    assert bomb.stat().st_size < 2**20
    for read in (read_weights_file, load_checkpoint):
        with pytest.raises(CheckpointError, match="compressed"):
            read(bomb)
    mutants(finished.newest().read_bytes(), finished.work / "mutant.pt", 60)


@pytest.mark.faults_long
@case("S02", how="2000 mutants of a checkpoint and of weights", passes="read or refused; no crash; memory bounded")
def test_2000_checkpoint_mutants_are_refused_or_read(finished: FaultRun) -> None:
    mutants(finished.newest().read_bytes(), finished.work / "mutant.pt", 2000)


def mutants(data: bytes, path: Path, count: int) -> None:
    rng = random.Random(0)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed)) if rng.random() < 0.5 else rng.randrange(4096)] = rng.randrange(256)
        path.write_bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.2 else changed)
        for read in (read_weights_file, load_checkpoint):
            try:
                read(path)
            except CheckpointError as error:
                assert str(error)  # noqa: PT017
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
@case("S03", how="no socket: umask 000; inbox as a link, with mode 0777", passes="0700 and 0600; the rest is refused")
def test_inbox_is_private_under_any_umask(new_run: NewRun) -> None:
    old = os.umask(0)
    try:
        run = new_run(train={"epochs": 1})
        assert run.train().returncode == 0
        send_command(run.folder, parse_command("checkpoint"))
    finally:
        os.umask(old)
    inbox = run.folder / "commands"
    assert stat.S_IMODE(inbox.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in inbox.iterdir()] == [0o600]
    inbox.chmod(0o777)
    assert run.train("train.epochs=2").returncode == 0
    assert stat.S_IMODE(inbox.stat().st_mode) == 0o700
    elsewhere = run.work / "elsewhere"
    elsewhere.mkdir()
    shutil.rmtree(inbox)
    inbox.symlink_to(elsewhere)
    Invariants.assert_clear(run.train("train.epochs=3"), 10, "run/commands is a symbolic link")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.faults
@case("S04", how="a command of uid 65534 in the inbox; uid 65534 at the inbox", passes="rejected; EACCES by its mode")
def test_command_of_another_user_is_refused(training: tuple[FaultRun, Program]) -> None:
    needs("root")
    run, program = training
    inbox = run.folder / "commands"
    body = {"v": 1, "id": "a" * 12, "by": "root@here", "t": time.time(), "command": {"kind": "stop"}}
    name = f"{time.time_ns():020d}-{'a' * 12}.json"
    outside = run.work.parent / f"{run.work.name}-drop"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    (outside / name).write_text(json.dumps(body))
    os.chown(outside / name, 65534, 65534)
    (outside / name).rename(inbox / name)
    answers = run.wait_for(lambda: [e for e in run.events("command") if e["id"] == "a" * 12], program)
    assert answers[-1]["status"] == "rejected"
    assert "another user (uid 65534 instead of" in answers[-1]["reason"]
    for parent in (run.folder, *run.folder.parents):
        if parent.stat().st_uid == os.getuid():
            parent.chmod(parent.stat().st_mode | 0o011)  # the way to the inbox is open: only its own mode is left
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "touch"]
    assert subprocess.run([*words, str(outside / "x")], check=False).returncode == 0
    closed = subprocess.run([*words, str(inbox / "x")], capture_output=True, text=True, check=False)
    assert closed.returncode != 0
    assert "Permission denied" in closed.stderr
    inbox.chmod(0o777)
    assert subprocess.run([*words, str(inbox / "x")], check=False).returncode == 0, "it is the mode that keeps it out"
    assert program.returncode is None


def sockets_of(run: FaultRun) -> Iterator[tuple[str, list[str]]]:
    """The sockets of the processes of a run: the table of the kernel in which each stands, and its row."""
    inodes = set()
    for pid in run.left_behind():
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd))
                inodes.update(match.groups() if match else ())
    for table in ("tcp", "tcp6", "udp", "udp6", "raw"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        yield from ((table, row) for row in rows if row[9] in inodes)
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    yield from (("unix", row) for row in rows if row[6] in inodes and len(row) > 7 and row[7].startswith("@"))


@pytest.mark.faults
@case("S05", how="the sockets of a live run, of its children too", passes="no listening socket, TCP, UDP or abstract")
def test_live_run_listens_on_no_port(training: tuple[FaultRun, Program]) -> None:
    assert list(sockets_of(training[0])) == []


@pytest.mark.faults
@case("S05", how="ranks of one machine: a client of torch's store and a pickle at each port", passes="inert")
def test_ranks_of_one_machine_tell_strangers_nothing(new_run: NewRun) -> None:
    run = new_run(train={"epochs": 1000}, parallel={"mode": "ddp", "devices": ["cpu"] * 2})
    program = run.start(GLOO_SOCKET_IFNAME="eth0")  # set for other jobs
    run.wait_for_step(2, program, 180)
    found = list(sockets_of(run))
    assert {(table, row[1].partition(":")[0]) for table, row in found} == {("tcp", "0100007F")}, "127.0.0.1"
    ports = {int(row[1].partition(":")[2], 16) for _, row in found if row[3] == "0A"}  # LISTEN
    canary = run.work / "canary"
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert answers_as_store(store.port)
    for port in ports:
        assert not answers_as_store(port)
        for number in range(4):  # gloo reads the number of the connection first
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(struct.pack("<q", number) + pickle.dumps(Canary(canary)) * 50)
    (folder,) = {Path(name).parent for name in map(store_of, run.left_behind()) if name}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    if os.getuid() == 0:
        words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "ls"]
        assert subprocess.run([*words, str(folder.parent)], capture_output=True, check=False).returncode == 0
        seen = subprocess.run([*words, str(folder)], capture_output=True, text=True, check=False)
        assert "Permission denied" in seen.stderr
    assert len(ports) >= 2, "each rank has a port"
    run.wait_for_step(run.events("step")[-1]["step"] + 20, program)
    program.send(signal.SIGTERM)
    assert run.ended(program, 120).returncode == 75, program.stderr
    assert not folder.exists()
    inert_canary(canary)


def answers_as_store(port: int) -> bool:
    """Whether a port answers a client of torch's store, whose first words are VALIDATE with a constant, and PING."""
    with socket.create_connection(("127.0.0.1", port), timeout=1) as client:
        client.sendall(struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 7))
        with contextlib.suppress(TimeoutError, ConnectionError):
            return client.recv(4) == struct.pack("<I", 7)
    return False


def store_of(pid: int) -> str:
    """The file in which a rank meets the others; empty for other processes."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((word.partition(b"=")[2].decode() for word in environ if word.startswith(b"SEGAPP_RANK_STORE=")), "")


def junk(rng: random.Random) -> bytes:
    good = {"v": 1, "id": "b" * 12, "by": "a@b", "t": 1.5, "command": {"kind": "set", "lr_factor": 0.5}}
    text = json.dumps(good).encode()
    kind = rng.randrange(8)
    if kind == 0:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
    if kind == 1:
        return b"[" * rng.randrange(60_000)
    if kind == 2:
        return text[: rng.randrange(len(text))]
    if kind == 3:
        return text.replace(b"0.5", rng.choice([b"NaN", b"1e999", b"-1", b"null", b'"x"', b"[]", b"0", b"true"]))
    if kind == 4:
        return text.replace(b"set", rng.choice([b"shell", b"stop\\u0000", b"", b"\\ud800", b"__class__"]))
    if kind == 5:
        return text.replace(b"a@b", rng.choice(CONTROL).encode("utf-8", "surrogatepass"))
    changed = bytearray(text)
    for _ in range(3):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def throw(run: FaultRun, count: int, *, seed: int) -> int:
    """Puts junk into the inbox; how many of it are commands after all, by the parser's own word."""
    rng, inbox, fine = random.Random(seed), run.folder / "commands", 0
    scratch = run.work / "scratch" / "commands"
    scratch.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        name = f"{i:020d}-{rng.getrandbits(48):012x}.json" if rng.random() < 0.8 else f"x{i}{rng.choice(MARKUP[1:2])}"
        name = name.replace("/", "_")
        data = junk(rng)
        (scratch / name).write_bytes(data)
        (received,) = drain_commands(scratch.parent)
        (scratch / name).unlink()
        if received.command is not None:
            fine += 1
            continue
        temporary = inbox / f".tmp-{i}"
        temporary.write_bytes(data)
        temporary.rename(inbox / name)
    return fine


@pytest.mark.faults
@case(
    "S06",
    how="no socket: inbox with 400 junk files, 10 MB, links, FIFO; stop twice",
    passes="each answered once; exit 75",
)
def test_junk_files_in_the_inbox_are_each_answered_once(training: tuple[FaultRun, Program]) -> None:
    _junk_in_the_inbox(training, 400)


@pytest.mark.faults_long
@case("S06", how="the same with 5000 junk files", passes="each answered once; exit 75")
def test_5000_junk_files_in_the_inbox_are_answered_once(training: tuple[FaultRun, Program]) -> None:
    _junk_in_the_inbox(training, 5000)


def _junk_in_the_inbox(training: tuple[FaultRun, Program], count: int) -> None:
    run, program = training
    inbox = run.folder / "commands"
    (run.work / "large").write_bytes(b"[" * 10_000_000)
    (run.work / "large").rename(inbox / f"{0:020d}-{'c' * 12}.json")
    (inbox / f"{1:020d}-{'d' * 12}.json").symlink_to("/etc/passwd")
    os.mkfifo(inbox / f"{2:020d}-{'e' * 12}.json")
    num_fine = throw(run, count, seed=1)
    run.wait_for(lambda: len(run.events("command")) >= count - num_fine + 3, program, 200)
    answers = run.events("command")
    assert len({answer["id"] for answer in answers}) == len(answers), "each is answered once"
    assert {answer["status"] for answer in answers} == {"rejected"}
    assert all(is_inert(json.dumps(answer, ensure_ascii=False)) for answer in answers)
    assert is_inert(program.stdout + program.stderr)
    for text in ("set lr_factor=nan", "set lr_factor=inf", "set lr_factor=1e999", "shell ls", "stop \x1b[2J"):
        done = run.command("ctl", "run", *text.split())
        Invariants.assert_clear(done, 2)
    before = run.events("step")[-1]["step"]
    run.wait_for(lambda: run.events("step")[-1]["step"] > before + 2, program)
    for _ in range(2):
        send_command(run.folder, parse_command("stop"))
    done = run.ended(program)
    assert done.returncode == 75
    stops = [e["status"] for e in run.events("command") if e["command"] == "stop" and e["status"] != "accepted"]
    assert len(stops) == 2
    assert "applied" in stops


@pytest.mark.faults_long
@case(
    "S06",
    how="junk files at 100 a second, in turns with quiet, 8 turns of 3 s",
    passes="a step takes < twice as long",
)
def test_inbox_junk_does_not_slow_the_steps(
    training: tuple[FaultRun, Program], record_property: Callable[[str, object], None]
) -> None:
    run, program = training
    inbox, rng = run.folder / "commands", random.Random(2)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(8):
        is_noisy = turn % 2 == 1
        begin_s, end_s = time.time(), time.monotonic() + 3
        while time.monotonic() < end_s:
            if is_noisy:
                name = f"{rng.getrandbits(48):020d}-{rng.getrandbits(48):012x}.json"
                (inbox / f".tmp-{name}").write_bytes(b"[" * rng.randrange(5000))
                (inbox / f".tmp-{name}").rename(inbox / name)
            time.sleep(0.01)
        found = [e["t"] for e in run.events("step") if e["t"] > begin_s]
        times_s[is_noisy] += [later - earlier for earlier, later in itertools.pairwise(found)]
    ratio = statistics.median(times_s[True]) / statistics.median(times_s[False])
    record_property("figure", f"step time x {ratio:.3f} ({len(times_s[True])} and {len(times_s[False])} steps)")
    print(f"step time under junk x {ratio:.3f}")
    assert ratio < 2
    assert program.returncode is None


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


@pytest.mark.slow
@pytest.mark.faults
@case("S11", how="events: torn, NUL, NaN, Infinity, 64 MB line, rotated", passes="status reads on; bounded")
def test_status_reads_on_after_hostile_events(finished: FaultRun) -> None:
    events = finished.folder / "events.jsonl"
    whole = events.read_bytes()
    junk = [b"\0" * 1000 + b"\n", b'{"v":1,"seq":NaN}\n', b'{"v":1,"seq":9,"t":1e999', b"x" * 2**26 + b"\n"]
    junk += [b"\0" * 300_000, b"\xff" * 2**22 + b"\n", b"{}\n" * 2**21]
    for junk_bytes in junk:
        events.write_bytes(whole + junk_bytes)
        done = finished.command("status", "run", "--json")
        assert done.returncode == 0, done.stderr
        is_long = len(junk_bytes) > 2**24  # of the end only so much is read: what a run said before it is not seen
        assert json.loads(done.stdout)["state"] in ({"finished", "crashed"} if is_long else {"finished"})
    events.rename(events.with_suffix(".1"))
    assert finished.command("status", "run", "--json").returncode == 0
    os.mkfifo(events)
    assert finished.command("status", "run", "--json", timeout_s=20).returncode in (0, 2)


FORBIDDEN_CALLS = {
    "eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pickle.load",
    "pickle.loads", "cv2.imread", "marshal.loads", "shelve.open", "torch.hub.load", "joblib.load", "decode_image",
    "torchvision.io.read_image", "torch.jit.load", "dist.all_gather_object", "dist.gather_object",
    "dist.broadcast_object_list", "dist.scatter_object_list", "dist.recv_object_list",
}  # fmt: skip


OWN_PIPES = {"segapp/planning/pool.py", "segapp/planning/simulate.py"}
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
            if is_bad:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {called}")
    assert found == []


@pytest.mark.faults
@case(
    "S12",
    how="what is given to the screen's widgets, variables too",
    passes="literals, or markup=False",
)
def test_screen_widgets_get_no_markup_strings() -> None:
    found = []
    for path in sorted((ROOT / "segapp" / "tui").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                called = ast.unparse(node.func).rpartition(".")[2]
                is_literal = isinstance(node.args[0], ast.Constant)
                if called in {"Static", "Label", "Button", "notify"} and not is_literal:
                    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    if keywords.get("markup") != "False":
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert found == []
