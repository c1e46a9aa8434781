import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segapp import failpoints
from segapp.run.files import file_system_of, remove_dead_temporaries, temporary_name, write_atomic, write_json
from segapp.run.words import announce, encodable, first_line, last_announced, outlast_readers, printable, size
from tests.support.fault_table import case


@pytest.mark.parametrize("place", ["before_write", "before_fsync", "before_rename"])
@pytest.mark.parametrize("what", ["ENOSPC", "EIO", "EACCES", "KeyboardInterrupt"])
def test_failed_write_leaves_only_the_old_file(tmp_path, place, what):
    write_atomic(tmp_path / "f", "old")
    failpoints.arm(f"file.{place}=raise:{what}")
    with pytest.raises((OSError, KeyboardInterrupt)):
        write_atomic(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]
    failpoints.arm("")
    write_json(tmp_path / "f", {"new": 1})
    assert (tmp_path / "f").read_text() == '{\n "new": 1\n}\n'


def test_only_temporaries_of_dead_processes_are_removed(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = temporary_name().partition("@")[2]
    own, of_an_earlier_life, of_the_dead, of_a_live = (
        temporary_name(3, ".tif"),
        *(
            f".tmp-3-{pid}-abcd@{host}{end}"
            for pid, end in ((os.getpid(), ""), (dead.pid, "+.tif"), (os.getppid(), ""))
        ),
    )
    elsewhere, old_elsewhere, odd = ".tmp-3-1-abcd@elsewhere+.png", ".tmp-4-1-abcd@elsewhere", ".tmp-odd"
    below = f"inner/{of_the_dead}"
    (tmp_path / "inner").mkdir()
    for name in (own, of_an_earlier_life, of_the_dead, of_a_live, elsewhere, old_elsewhere, odd, "kept", below):
        (tmp_path / name).write_text("")
    os.utime(tmp_path / old_elsewhere, (time.time() - 7200,) * 2)
    os.utime(tmp_path / own, (0, 0))  # as after a clock was set forward by decades
    assert remove_dead_temporaries(tmp_path) == 3
    assert sorted(os.listdir(tmp_path)) == sorted([own, of_a_live, elsewhere, odd, "kept", "inner"])
    assert remove_dead_temporaries(tmp_path, is_recursive=True) == 1
    assert os.listdir(tmp_path / "inner") == []
    assert remove_dead_temporaries(tmp_path / "missing") == 0


@given(st.text(alphabet=st.characters(codec=None, categories=None) | st.sampled_from("\x1b\x9b\u202e\udc80[")))
def test_printable_text_is_idempotent_without_control_codes(text):
    shown = printable(text)
    assert not any(
        ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 or c in "\u202e\u2066" for c in shown
    )
    assert printable(shown) == shown
    assert len(encodable(text).encode()) >= len(text)


def test_failpoints_trigger_at_their_count():
    failpoints.arm("a=2:nan; b=oom*2; c=raise:ENOSPC; d=sleep:0")
    assert [failpoints.failpoint("a") for _ in range(4)] == [None, "nan", None, None]
    assert [failpoints.failpoint("b") for _ in range(3)] == ["oom", "oom", None]
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            failpoints.failpoint("c")
    assert failpoints.failpoint("d") is failpoints.failpoint("unarmed") is None
    with pytest.raises(ValueError, match="cannot read"):
        failpoints.arm("a=?")
    failpoints.arm("a=raise:Nonsense")
    with pytest.raises(ValueError, match="neither an errno"):
        failpoints.failpoint("a")


def test_file_system_is_that_of_the_innermost_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"30 22 0:41 / {tmp_path}/home\\040dir rw shared:2 - nfs4 server:/home rw\n"
        f"31 30 8:2 / {tmp_path}/home\\040dir/local rw - xfs /dev/sdb1 rw\n"
        f"32 31 0:42 / {tmp_path}/home\\040dir/local rw - tmpfs tmpfs rw\n"
    )
    assert file_system_of(tmp_path / "home dir" / "x", mounts) == "nfs4"
    assert file_system_of(tmp_path / "home dir" / "local", mounts) == "tmpfs", "the later mount hides the earlier one"
    assert file_system_of(tmp_path / "home dirs", mounts) == "ext4"


@case(
    "F39",
    how="stdout or stderr whose reader leaves after a line",
    passes="the program goes on and writes, no BrokenPipe traceback",
)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_goes_on_after_its_reader_has_left(monkeypatch, stream):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", sys.stdout)
        monkeypatch.setattr(sys, "stderr", sys.stderr)
        monkeypatch.setattr(sys, stream, pipe)
        outlast_readers()
        print("read", file=getattr(sys, stream), flush=True)
        assert os.read(reading, 100) == b"read\n"
        os.close(reading)
        for line in ("lost", "lost too", 2**17 * "x"):
            print(line, file=getattr(sys, stream), flush=True)
        assert getattr(sys, stream).fileno() == writing


def test_last_announced_line_is_found(capsys):
    announce("finding the images")
    announce("first step")
    lines = capsys.readouterr().out.splitlines()
    assert last_announced([*lines, "epoch 1"]) == "first step"
    assert last_announced(["epoch 1"]) is None


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.0 MiB"), (1.5 * 2**20, "1.5 MiB"), (117 * 2**20, "117 MiB"), (2.25 * 2**30, "2.2 GiB")],
)
def test_sizes(num_bytes, text):
    assert size(num_bytes) == text


def test_first_line_is_the_message_or_the_type():
    assert first_line(ValueError("\n abc\nd")) == "abc"
    assert first_line(ValueError()) == "ValueError"
