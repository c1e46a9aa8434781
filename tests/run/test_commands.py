"""Commands as typed text and as files of the inbox: parsing, order, crashes, damaged and foreign files."""

import itertools
import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segapp import failpoints
from segapp.errors import CommandError
from segapp.run.commands import (
    CancelCommand,
    CheckpointCommand,
    PauseCommand,
    ResumeCommand,
    SetCommand,
    StopCommand,
    drain_commands,
    format_command,
    parse_command,
    remove_answered,
    send_command,
    sender,
)
from segapp.run.folder import RunFolder
from tests.support.fault_table import case


@pytest.fixture
def run(tmp_path):
    (tmp_path / "commands").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("set gpu0_bsz=3", SetCommand(gpu0_bsz=3)),
        ("set gpu0_bsz=auto", SetCommand(gpu0_bsz="auto")),
        ("set gpu0_bsz=even", SetCommand(gpu0_bsz=None)),
        ("set gpu0_bsz=AUTO recompute=All", SetCommand(gpu0_bsz="auto", recompute="all")),
        ("set  lr_factor=5e-1", SetCommand(lr_factor=0.5)),
        ("set lr_factor=2 gpu0_bsz=1", SetCommand(lr_factor=2.0, gpu0_bsz=1)),
        ("set shares=2,3,3", SetCommand(shares=[2, 3, 3])),
        ("set shares=[0,3]", SetCommand(shares=[0, 3])),
        ("set gpu0_bsz=7 --force", SetCommand(gpu0_bsz=7, force=True)),
        ("pause", PauseCommand()),
        (" resume ", ResumeCommand()),
        ("checkpoint", CheckpointCommand()),
        ("stop now", StopCommand(when="now")),
        ("stop when=epoch", StopCommand(when="epoch")),
        ("cancel", CancelCommand()),
        ("cancel 0123456789ab", CancelCommand(id="0123456789ab")),
    ],
)
def test_typed_commands_are_parsed(text, command):
    assert parse_command(text) == command
    assert parse_command(format_command(command)) == command


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "nothing: no such command: use one of set, pause"),
        ("puase", "did you mean pause"),
        ("set", "set changes nothing"),
        ("set gpu_bsz=3", "did you mean gpu0_bsz"),
        ("set gpu0_bsz", "write set gpu0_bsz=VALUE"),
        ("set gpu0_bsz=-1", "gpu0_bsz=-1: write a whole number"),
        ("set gpu0_bsz=1 gpu0_bsz=2", "given twice"),
        ("set lr_factor=0", "above 0"),
        ("set lr_factor=1e999", "above 0"),
        ("set lr_factor=true", "above 0"),
        ("set shares=0,0", "one whole number"),
        ("set shares=1,2 gpu0_bsz=1", "both set the split"),
        ("stop tomorrow", "stop epoch"),
        ("pause 3", "pause takes no argument"),
        ("cancel me", "the id of one command"),
        ("\x1b[2J", r"\x1b[2J: no such command"),
        ("x" * 60, f"{'x' * 60}: no such command"),
        ("x" * 61, f"{'x' * 57}...: no such command"),
        ("stop now epoch", "stop now epoch: write stop, stop now or stop epoch"),
    ],
)
def test_unknown_command_error_names_the_next_move(text, part):
    with pytest.raises(CommandError) as caught:
        parse_command(text)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        (f"gpu0_bsz={2**20}", f"gpu0_bsz={2**20 + 1}"),
        ("lr_factor=100", "lr_factor=100.001"),
        ("shares=0,1", "shares=-1,2"),
        (f"shares={2**20}", f"shares={2**20 + 1}"),
        (f"shares={','.join(['1'] * 1024)}", f"shares={','.join(['1'] * 1025)}"),
    ],
)
def test_settings_are_accepted_up_to_their_bounds(accepted, refused):
    assert parse_command(f"set {accepted}").changes
    with pytest.raises(CommandError, match=refused.partition("=")[0]):
        parse_command(f"set {refused}")


@settings(deadline=None)
@given(st.text(max_size=60) | st.from_regex(r"set [a-z0_]{1,9}=[-0-9a-z.,]{0,12}", fullmatch=True))
def test_any_text_gives_a_command_or_a_command_error(text):
    try:
        command = parse_command(text)
    except CommandError:
        return
    assert parse_command(format_command(command)) == command


def test_commands_arrive_in_order_with_sender(run):
    texts = ["set gpu0_bsz=none", "pause", "resume", "set lr_factor=0.25", "stop epoch"]
    ids = [send_command(run, parse_command(text), by=f"user{index}@host") for index, text in enumerate(texts)]
    received = drain_commands(run)
    assert [item.id for item in received] == ids
    assert len(set(ids)) == 5
    assert [item.command for item in received] == [parse_command(text) for text in texts]
    assert [item.by for item in received] == [f"user{index}@host" for index in range(5)]
    assert received[0].command.changes == {"gpu0_bsz": None}


def test_command_is_synced_before_its_name_and_its_name_then(run, monkeypatch):
    """A power cut leaves the whole command or none: content, then name, then the folder that holds the name."""
    log, real_fsync, real_rename = [], os.fsync, os.rename

    def spy_fsync(fd):
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        log.append(("sync", path.name if path.is_dir() else json.loads(path.read_bytes())["command"]["kind"]))
        return real_fsync(fd)

    def spy_rename(source, target):
        log.append(("rename", Path(target).parent.name))
        return real_rename(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    send_command(run, PauseCommand())
    assert log == [("sync", "pause"), ("rename", "commands"), ("sync", "commands")]


def good_body(command_id: str, **changes: object) -> str:
    return json.dumps({"v": 1, "id": command_id, "by": "me", "t": 1.0, "command": {"kind": "pause"}, **changes})


NAME = f"{5:020d}-0123456789ab.json"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not JSON"),
        ("[" * 10_000, "not JSON"),
        ("[]", "not a command of version 1"),
        (good_body("0123456789ab", v=2), "not a command of version 1"),
        (good_body("ffffffffffff"), "its id is not the one"),
        (good_body("0123456789ab", by=3), "sender or time"),
        (good_body("0123456789ab", t="now"), "sender or time"),
        (good_body("0123456789ab", command={"kind": "reboot"}), "does not match any of the expected tags"),
        (good_body("0123456789ab", command={"kind": "set"}), "changes nothing"),
        (good_body("0123456789ab", command={"kind": "set", "gpu0_bsz": 1.0, "lr_factor": -1}), "whole number"),
        (good_body("0123456789ab", command={"kind": "set", "lr_factor": True}), "above 0"),
        (good_body("0123456789ab", command={"kind": "pause", "extra": 1}), "Extra inputs"),
        ("x" * 70_000, "too large"),
    ],
)
def test_bad_command_file_gets_a_rejected_answer(run, content, reason):
    (run / "commands" / NAME).write_text(content)
    [received] = drain_commands(run)
    assert received.id == "0123456789ab"
    assert received.command is None
    assert reason in received.problem
    remove_answered(run, {received.id})
    assert drain_commands(run) == []


def test_command_file_is_read_up_to_64_kib(run):
    refused = f"{run}/commands/{NAME} is too large: 65537 bytes, 65536 are accepted: move it away"
    for size, problem in ((65536, None), (65537, refused)):
        (run / "commands" / NAME).write_text(good_body("0123456789ab").ljust(size))
        assert [item.problem for item in drain_commands(run)] == [problem]


def test_links_pipes_folders_and_odd_names_are_refused_unread(run):
    inbox = run / "commands"
    secret = run / "secret"
    secret.write_text(good_body("0123456789ab"))
    (inbox / NAME).symlink_to(secret)
    os.mkfifo(inbox / f"{6:020d}-0123456789ac.json")
    (inbox / f"{7:020d}-0123456789ad.json").mkdir()
    (inbox / "evil\x1b[2J.json").write_text(good_body("0123456789ab"))
    received = drain_commands(run)
    link, pipe, folder = (item.problem for item in received[:3])
    assert link == "Too many levels of symbolic links"
    assert pipe.endswith("is neither a plain file nor a folder: remove it")
    assert folder == "Is a directory"
    assert received[3].id == r"evil\x1b[2J.json"
    assert all(item.command is None for item in received)


@pytest.mark.faults
@case("S04", how="a command of uid 65534 in the inbox; uid 65534 at the inbox", passes="rejected; EACCES by its mode")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_command_of_another_user_is_refused():
    with tempfile.TemporaryDirectory() as folder:  # every user may come as far as the inbox
        run = RunFolder.create(path=Path(folder) / "run").path
        os.chmod(folder, 0o755)
        (run / "commands" / NAME).write_text(good_body("0123456789ab"))
        os.chown(run / "commands" / NAME, 65534, 65534)
        [received] = drain_commands(run)
        assert "belongs to another user (uid 65534 instead of" in received.problem
        touch = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "touch", run / "commands" / "x"]
        closed = subprocess.run(touch, capture_output=True, text=True, check=False)
        assert "Permission denied" in closed.stderr
        (run / "commands").chmod(0o777)
        assert subprocess.run(touch, check=False).returncode == 0, "it is the mode that keeps it out"


def test_long_sender_is_cut_and_answered_commands_are_removed(run):
    (run / "commands" / NAME).write_text(good_body("0123456789ab", by="x" * 300, t=2))
    sent = send_command(run, PauseCommand(), by="y" * 300)
    first, second = drain_commands(run)
    assert (first.by, second.by, second.id) == ("x" * 200, "y" * 200, sent)
    assert not remove_answered(run, {"0123456789ab", sent}, limit_s=-1)
    assert remove_answered(run, {"0123456789ab", "ffffffffffff"})
    assert [item.id for item in drain_commands(run)] == [sent]


def test_command_that_cannot_be_sent_leaves_nothing(run):
    failpoints.arm("command.before_rename=raise:ENOSPC")
    with pytest.raises(CommandError, match=r"cannot send to .*No space left"):
        send_command(run, PauseCommand())
    assert list((run / "commands").iterdir()) == []
    (run / "commands" / ".tmp-0-1-abcd").write_text('{"v":1')  # of a sender that was killed
    assert drain_commands(run) == []


def test_sender_without_a_name_is_a_number(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: (_ for _ in ()).throw(KeyError("no such user")))
    assert sender() == f"{os.getuid()}@{socket.gethostname()}"


def test_crowd_is_refused_newest_first_but_for_urgent_ones(run, monkeypatch):
    kinds = {7: "pause", 1050: "cancel", 1060: "stop epoch", 1070: "resume", 1101: "stop"}
    for number in range(1, 1103):
        command = parse_command(kinds.get(number, "checkpoint")).model_dump()
        body = good_body(f"{number:012x}", command=command)
        (run / "commands" / f"{number:020d}-{number:012x}.json").write_text(body)
    (run / "commands" / f"{2000:020d}-{5:012x}.json").write_text(good_body(f"{5:012x}"))  # has the id of another
    (run / "commands" / "x").mkdir()
    urgent = drain_commands(run)
    assert [each.text for each in urgent] == ["pause", "resume", "stop"]
    others = drain_commands(run, {each.id for each in urgent})
    carried_out = [int(each.id, 16) for each in others if each.command is not None]
    assert carried_out == [*range(1, 7), *range(8, 1002), 1050, 1060]
    assert len(others) - len(carried_out) == 98
    why = "1100 files wait in the inbox, and at most 1000 may: send it again when they are answered"
    assert {each.problem for each in others if each.command is None} == {why}
    with pytest.raises(CommandError, match=r"set was not sent: 1104 files wait in .*, and at most 1000 may: wait for"):
        send_command(run, SetCommand(lr_factor=1))
    assert send_command(run, StopCommand(when="epoch")) == drain_commands(run, {each.id for each in urgent})[-2].id
    assert drain_commands(Path("/nowhere")) == []
    with pytest.raises(CommandError, match="cannot send"):
        send_command("/nowhere", PauseCommand())
    # A second for each file: there is time for the folder, the stop of an epoch, one checkpoint and the stop
    monkeypatch.setattr("segapp.run.commands.time", SimpleNamespace(monotonic=itertools.count(step=1.0).__next__))
    monkeypatch.setattr("segapp.run.commands._MAX_READ_S", 5.0)
    assert [each.text for each in drain_commands(run)] == ["stop"], "of a flood, the newest are read first"
