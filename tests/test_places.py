"""Caches of the user, and the names of temporary files: nothing that another user could make first is used."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import re
import stat
import struct
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from segapp import places
from segapp.config import dump_config
from segapp.places import keep_compiled_code, own_folder
from tests.support import ROOT
from tests.support.runs import merged, segapp
from tests.test_api import small

NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that everyone may write, without a variable of this user or of an earlier test."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(places, "_temporary", [])
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # torch would take the current folder
    return tmp_path / "tmp"


def spoil(place: Path, kind: str) -> None:
    """Leaves at `place` what another user could have put there, or could change."""
    if kind == "link":
        place.with_name("elsewhere").mkdir()
        place.symlink_to(place.with_name("elsewhere"))
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir(exist_ok=True)
        place.chmod(int(kind, 8)) if kind.isdigit() else os.chown(place, NOBODY, NOBODY)


@root_only
@pytest.mark.parametrize(
    ("below", "kind", "problem"),
    [
        ("segapp/compiled", "theirs", "belongs to another user"),
        ("segapp/compiled", "link", "is a link or a file"),
        ("segapp/compiled", "1777", "other users can write to"),
        ("segapp", "theirs", "belongs to another user"),
        ("segapp", "link", "is a link or a file"),
        ("segapp", "pipe", "is a link or a file"),
        ("segapp", "1777", "other users can write to"),
        (".", "theirs", "belongs to another user"),
        (".", "0777", "other users can write to"),
        ("..", "theirs", "belongs to another user"),
        ("..", "0777", "other users can write to"),
    ],
)
def test_cache_that_another_user_could_write_is_not_used(
    below: str,
    kind: str,
    problem: str,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = temporary / "above" / "cache"
    (home / "segapp").parent.mkdir(parents=True)
    (home / below).parent.mkdir(exist_ok=True)
    spoil(home / below, kind)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert keep_compiled_code() == keep_compiled_code() == os.environ["TORCHINDUCTOR_CACHE_DIR"]
    (own,) = temporary.glob("segapp-compiled-*")
    assert [os.environ[name] for name in VARIABLES] == [f"{own}/inductor", f"{own}/triton"]
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert re.fullmatch(
        rf"compiled code is kept in \S+ until .*{problem}.* set XDG_CACHE_HOME.*\n", capsys.readouterr().err
    )


@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o775])
def test_cache_is_made_where_only_the_user_can_replace_it(
    mode: int, temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder such as /tmp too; and in one of the user's own group, as the umask 002 makes it."""
    monkeypatch.setattr(places, "has_own_group", lambda group: mode == 0o775)
    (temporary / "linked").symlink_to("above")  # the user's own: a cache on another disk
    (temporary / "above").mkdir()
    (temporary / "above").chmod(mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary / "linked" / "cache"))
    compiled = temporary / "above" / "cache" / "segapp" / "compiled"
    # As a parent left them: its own temporary folder, and torch's default, which torch writes into its variable.
    for before in (f"{temporary}/segapp-compiled-of_parent/x", f"{temporary}/torchinductor_me/triton/0"):
        for name in VARIABLES:
            monkeypatch.setenv(name, before)
        keep_compiled_code()
        assert [os.environ[name] for name in VARIABLES] == [f"{compiled}/inductor", f"{compiled}/triton"]
    assert [stat.S_IMODE(place.stat().st_mode) for place in (compiled, compiled.parent)] == [0o700, 0o700]
    monkeypatch.setenv("TRITON_CACHE_DIR", "/a/place/that/the/user/names")
    keep_compiled_code()
    assert os.environ["TRITON_CACHE_DIR"] == "/a/place/that/the/user/names"
    assert own_folder("XDG_CACHE_HOME", "compiled") == compiled
    assert capsys.readouterr().err == ""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for TMPDIR: data workers make sockets in it, whose paths may have 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@contextlib.contextmanager
def names_made_in(*folders: Path) -> Iterator[set[str]]:
    """Gives the names that any process made in the folders within the block, with those that are gone again."""
    libc, names = ctypes.CDLL(None), set[str]()
    fd = libc.inotify_init()
    for folder in folders:
        libc.inotify_add_watch(fd, os.fsencode(folder), 0x100 | 0x80)  # IN_CREATE, IN_MOVED_TO
    yield names
    os.set_blocking(fd, False)
    with open(fd, "rb") as file, contextlib.suppress(BlockingIOError):
        while head := file.read(16):
            names.add(os.fsdecode(file.read(struct.unpack("iIII", head)[3]).rstrip(b"\0")))


@pytest.mark.parametrize("kind", ["ddp", pytest.param("compiled", marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_temporary_names_are_those_of_the_table(
    kind: str, tiny: dict[str, Any], tmp_path: Path, short_folder: Path
) -> None:
    """The name that torch takes by default is another user's file or folder, and stays as it is."""
    page = (ROOT / "segapp" / "docs" / "explanation" / "trust.md").read_text()
    table = page.partition("## Temporary names")[2].partition("\n## ")[0]
    listed = [name.replace("RUN", "r") for name in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)]
    folder, runs = short_folder, tmp_path / "runs"
    runs.mkdir()
    theirs = folder / f"torchinductor_{getpass.getuser()}"
    theirs.mkdir(0o777) if kind == "compiled" else theirs.write_text("")
    settings: dict[str, Any] = (
        {"train": {"epochs": 1, "compile": True}}
        if kind == "compiled"
        else {"train": {"epochs": 1}, "parallel": {"mode": "ddp", "devices": ["cpu", "cpu"]}, "data": {"workers": 1}}
    )
    (tmp_path / "c.yaml").write_text(dump_config(merged(small(tiny), **settings)))
    environ = {**dict.fromkeys(VARIABLES), "TMPDIR": str(folder), "SEGAPP_TRUST_PARTS": "1", "SEGAPP_TEST_FORK": "1"}
    with names_made_in(folder, runs) as made:
        for words in (("train", "--plain", "--config", "c.yaml", "--run", "runs/r"), ("eval", "runs/r")):
            done = segapp(*words, cwd=tmp_path, **environ)
            assert done.returncode == 0, done.stderr
    assert [name for name in made - {"r"} if not any(fnmatch(name, pattern) for pattern in listed)] == []
    assert any(name.startswith("segapp-ranks-" if kind == "ddp" else "tmp") for name in made), made
    assert theirs.is_file() or os.listdir(theirs) == []
    assert os.listdir(folder) == [theirs.name]
