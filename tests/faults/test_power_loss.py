"""A power cut at every moment of a start, a save and a command: what was promised is there, intact (F04)."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from segapp.run.checkpoints import CheckpointFolder
from segapp.run.events import EventReader
from tests.support.fault_runs import SHORT, SYNCHRONOUS, FaultRun, case, needs, traced

CALLS = "openat,write,pwrite64,ftruncate,fsync,fdatasync,close,fcntl,"
CALLS += "rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat"
MANIFEST = "run/checkpoints/manifest.json"

# --- a model of a disk that replays a trace ---------------------------------------------------------------------------

_CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)(?:<[^>]*>)?.*", re.DOTALL)
_PLACE = re.compile(r'(?:\w+<(?P<directory>[^>]*)>, )?"(?:[^"\\]|\\.)*"')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Call:
    """A system call that succeeded: its name, arguments as strace prints them, and its result."""

    name: str
    arguments: str
    result: int

    @property
    def strings(self) -> list[bytes]:
        """The arguments in quotes: paths, or the bytes written."""
        return [ast.literal_eval(f'b"{text}"') for text in _STRING.findall(self.arguments)]

    @property
    def fd(self) -> int:
        """The file descriptor in the first argument; -1 if there is none."""
        match = re.match(r"(\d+)<", self.arguments)
        return int(match[1]) if match else -1


def read_trace(path: Path) -> Iterator[Call]:
    """Yields the successful calls of a trace in the order of their ends."""
    begun: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines():
        pid, _, rest = line.partition(" ")
        rest = rest.lstrip()
        if rest.endswith(" <unfinished ...>"):
            begun[pid] = rest.removesuffix(" <unfinished ...>")
            continue
        if resumed := re.fullmatch(r"<\.\.\. \w+ resumed>(.*)", rest):
            rest = begun.pop(pid, "") + resumed[1]
        if (call := _CALL.fullmatch(rest)) and int(call["result"]) >= 0:
            yield Call(call["name"], call["arguments"], int(call["result"]))


@dataclass
class File:
    """The bytes of a file, and those that a power cut leaves."""

    content: bytes = b""
    durable: bytes = b""


Names = dict[str, File]
Change = tuple[str, tuple[tuple[str, File | None], ...]]
"""A directory, and the names in it that one call changed, with the file of each afterwards; None if it is removed."""


class Disk:
    """The files below a folder, as they are and as a power cut may leave them, after the method of ALICE (OSDI'14).

    A file's bytes are durable once the file was synced; a name (made, renamed, linked, removed) once its directory was.
    What was not synced may be there or not: here nothing, all, each alone and all but each of the names, with the bytes
    that were not synced there or lost. A directory is a name with a slash at its end; what lies in one that is lost is
    lost too.

    Args:
        root: the folder; what lies in it now is durable.
        only: a folder in `root`, which may not exist yet: only what lies in it is looked at.
    """

    def __init__(self, root: Path, only: str = "") -> None:
        self.root, self._only = root, only
        self._names: Names = {}
        for path in (root, *sorted((root / only).rglob("*")), root / only):
            name = str(path.relative_to(root))
            if path.is_dir():
                self._names[name + "/"] = File()
            elif path.is_file():
                known = next((f for n, f in self._names.items() if (root / n).samefile(path)), None)
                self._names[name] = known or File(path.read_bytes(), path.read_bytes())
        self._durable = dict(self._names)
        self._pending: list[Change] = []
        self._fds: dict[int, File | str] = {}

    def apply(self, call: Call, cwd: Path) -> bool:
        """Applies one call; returns True if it changed the folder."""
        opened = self._fds.get(call.fd)
        match call.name.removesuffix("2").removesuffix("at"):
            case "open":
                return self._open(call, self._inside(call, cwd)[0])
            case "close":
                self._fds.pop(call.fd, None)
            case "fcntl" if "F_DUPFD" in call.arguments and opened is not None:
                self._fds[call.result] = opened
            case "write" | "pwrite64" | "ftruncate" as name if isinstance(opened, File):
                size = int(call.arguments.rpartition(", ")[2])
                if name == "ftruncate":
                    opened.content = opened.content[:size].ljust(size, b"\0")
                else:  # every file here is written from its start, or appended to
                    begin = len(opened.content) if name == "write" else size
                    data = call.strings[0][: call.result]
                    opened.content = (
                        opened.content[:begin].ljust(begin, b"\0") + data + opened.content[begin + len(data) :]
                    )
                return True
            case "fsync" | "fdatasync" if isinstance(opened, File):
                opened.durable = opened.content
                return True
            case "fsync" if opened is not None:
                for change in self._pending:
                    if change[0] == opened:
                        _rename(self._durable, change)
                self._pending = [change for change in self._pending if change[0] != opened]
                return True
            case "mkdir" | "rename" | "link" | "unlink" as name:
                return self._change_names(name, self._inside(call, cwd))
        return False

    def states(self) -> Iterator[dict[str, bytes]]:
        """Yields the states that a power cut now may leave: the content of each name."""
        pending = self._pending
        but_one = [[other for other in pending if other is not each] for each in pending]
        for changes in ([], pending, *([each] for each in pending), *but_one):
            names = dict(self._durable)
            for change in changes:
                _rename(names, change)
            files = {name: file for name, file in names.items() if _is_reachable(name, names)}
            yield {name: file.content for name, file in files.items()}
            yield {name: file.durable for name, file in files.items()}

    def assert_same(self) -> None:
        """The present files are those of the model."""
        names = {name: file.content for name, file in self._names.items() if _is_reachable(name, self._names)}
        paths = [path for path in (self.root / self._only).rglob("*") if path.is_file()]
        assert names == {str(path.relative_to(self.root)): path.read_bytes() for path in paths}

    def _open(self, call: Call, name: str | None) -> bool:
        self._fds.pop(call.result, None)
        if name is None:
            return False
        if "O_DIRECTORY" in call.arguments:
            self._fds[call.result] = name
            return False
        if name not in self._names:
            if "O_CREAT" not in call.arguments:
                return False
            self._change((name, File()))
        self._fds[call.result] = self._names[name]
        if "O_TRUNC" in call.arguments:
            self._names[name].content = b""
        return True

    def _change_names(self, call: str, places: list[str | None]) -> bool:
        names = [place for place in places if place is not None]
        if len(names) < len(places):
            return False
        match call:
            case "mkdir":
                self._change((names[0] + "/", File()))
            case "unlink":
                self._change((names[0], None))
            case "link":
                self._change((names[1], self._names[names[0]]))
            case "rename":
                self._change((names[1], self._names[names[0]]), (names[0], None))
        return True

    def _change(self, *names: tuple[str, File | None]) -> None:
        change = str(Path(names[0][0]).parent), names
        _rename(self._names, change)
        self._pending.append(change)

    def _inside(self, call: Call, cwd: Path) -> list[str | None]:
        """Returns the names in a call, each below the directory whose descriptor is before it; None outside."""
        found: list[str | None] = []
        for place, text in zip(_PLACE.finditer(call.arguments), call.strings, strict=True):
            path = Path(os.path.normpath(cwd / (place["directory"] or "") / text.decode(errors="surrogateescape")))
            name = path.relative_to(self.root) if path.is_relative_to(self.root) else None
            is_looked_at = name is not None and (not self._only or name.parts[:1] in ((), (self._only,)))
            found.append(str(name) if is_looked_at else None)
        return found


def _is_reachable(name: str, names: Names) -> bool:
    """True for the name of a file whose folders are all there."""
    return not name.endswith("/") and all(f"{parent}/" in names for parent in Path(name).parents)


def _rename(names: Names, change: Change) -> None:
    for name, file in change[1]:
        names.pop(name, None)
        if file is not None:
            names[name] = file


def put(state: dict[str, bytes], folder: Path) -> None:
    """Makes a folder hold these files, and no other ones."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in state.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


# --- what it leaves ---------------------------------------------------------------------------------------------------


def promised_by(call: Call) -> int:
    """The step of a `checkpoint` event that a call writes; 0 where it writes none."""
    if call.name != "write" or "events.jsonl" not in call.arguments.partition(",")[0]:
        return 0
    events = [json.loads(line) for line in call.strings[0].splitlines()]
    return max((event["step"] for event in events if event["type"] == "checkpoint"), default=0)


@case(
    "F04",
    how="strace: a power cut after each call of a start and its saves; what was not synced is kept, lost, kept in part",
    passes="every committed checkpoint intact, the newest not older than the last promise, no event before it missing",
)
@pytest.mark.faults
def test_power_cut_at_any_call_keeps_committed_checkpoints(
    new_run: Callable[..., FaultRun], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    needs("strace")
    run = new_run(**{**SHORT, "checkpoint": {"every_steps": 3}})
    program = run.start(failpoints=f"train.step=6:kill;{SYNCHRONOUS}", is_stopped=True)
    disk, found = Disk(run.work, only="run"), tmp_path / "found"
    with traced(run, program, "-s", str(2**24), "-e", f"trace={CALLS}") as trace:
        run.ended(program)
    num_calls, promised, seen = 0, 0, set()
    for call in read_trace(trace):
        promised = max(promised, promised_by(call))
        num_calls += disk.apply(call, run.work)
        if call.name == "write" and not promised_by(call):
            continue  # it only adds to bytes that the next call but one still finds unsynced
        for state in disk.states():
            key = (promised, frozenset(state.items()))
            if key not in seen:
                seen.add(key)
                put(state, found)
                newest = 0
                if promised or (found / MANIFEST).exists():
                    rows = CheckpointFolder(found / "run" / "checkpoints").verify()
                    assert [row.problem for row in rows] == [None] * len(rows), (call.name, call.arguments[:200])
                    newest = rows[0].entry.step
                assert newest >= promised, (call.name, call.arguments[:200])
                events = EventReader(found / "run" / "events.jsonl").read_raw()
                assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
                steps = {event["step"] for event in events if event["type"] == "step"}
                assert steps >= set(range(1, newest + 1)), "a checkpoint is there, and events of before it are not"
    assert promised == 5
    disk.assert_same()
    record_property("figure", f"{num_calls} calls, {len(seen)} states of the disk")
