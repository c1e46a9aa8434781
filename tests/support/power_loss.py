"""A model of a disk that replays a trace of system calls: the states that a power cut may leave of a folder.

After the method of ALICE (OSDI'14). A file's bytes are durable once the file was synced; a name (made, renamed, linked,
removed) once its directory was. What was not synced may be there or not, in any combination: here nothing, all, each
alone and all but each of the names, with the bytes that were not synced there or lost; `torn` has one file's bytes
there in part. A directory is a name with a slash at its end; what lies in one that is lost is lost too.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"(?P<pid>\d+) +(?P<rest>.*)")
_UNFINISHED = re.compile(r"(?P<begin>.*) <unfinished \.\.\.>")
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(?P<end>.*)")
_CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)(?:<(?P<path>[^>]*)>)?.*", re.DOTALL)
_PLACE = re.compile(r'(?:\w+<(?P<directory>[^>]*)>, )?"(?P<name>(?:[^"\\]|\\.)*)"')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_FD = re.compile(r"^(\d+)<")


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
        """The file descriptor in the first argument."""
        match = _FD.match(self.arguments)
        assert match, self.arguments
        return int(match[1])


def read_trace(path: Path) -> Iterator[Call]:
    """Yields the successful calls of a trace in the order of their ends."""
    begun: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines():
        if (match := _LINE.fullmatch(line)) is None:
            continue
        pid, rest = match["pid"], match["rest"]
        if unfinished := _UNFINISHED.fullmatch(rest):
            begun[pid] = unfinished["begin"]
            continue
        if resumed := _RESUMED.fullmatch(rest):
            rest = begun.pop(pid, "") + resumed["end"]
        if (call := _CALL.fullmatch(rest)) and int(call["result"]) >= 0:
            yield Call(call["name"], call["arguments"], int(call["result"]))


@dataclass
class _File:
    content: bytes = b""
    durable: bytes = b""


@dataclass(frozen=True)
class _NameChange:
    """The names changed by one directory operation, with the file of each afterwards; None if it is removed."""

    directory: str
    names: tuple[tuple[str, _File | None], ...]


class Disk:
    """The files below a folder, as they are and as a power cut may leave them.

    Args:
        root: the folder; what lies in it now is durable.
        only: a folder in `root`, which may not exist yet: only what lies in it is looked at.
    """

    def __init__(self, root: Path, only: str = "") -> None:
        self.root, self._only = root, only
        self._names: dict[str, _File] = {}
        for path in (root, *sorted((root / only).rglob("*")), root / only):
            name = str(path.relative_to(root))
            if path.is_dir():
                self._names[name + "/"] = _File()
            elif path.is_file():
                known = next((f for n, f in self._names.items() if (root / n).samefile(path)), None)
                content = path.read_bytes()
                self._names[name] = known or _File(content, content)
        self._durable = dict(self._names)
        self._pending: list[_NameChange] = []
        self._fds: dict[int, _File | str] = {}

    def apply(self, call: Call, cwd: Path) -> bool:
        """Applies one call; returns True if it changed the folder."""
        apply = getattr(self, f"_on_{call.name.removesuffix('2').removesuffix('at')}", None)
        return bool(apply and apply(call, cwd))

    def states(self) -> Iterator[dict[str, bytes]]:
        """Yields the states that a power cut now may leave: the content of each name."""
        pending = self._pending
        kept = [
            [],
            pending,
            *([each] for each in pending),
            *([e for e in pending if e is not each] for each in pending),
        ]
        for changes in kept:
            names = dict(self._durable)
            for change in changes:
                _rename(names, change)
            files = {name: file for name, file in names.items() if _is_reachable(name, names)}
            yield {name: file.content for name, file in files.items()}
            yield {name: file.durable for name, file in files.items()}

    def torn(self, name: str) -> Iterator[bytes]:
        """Yields the contents that a power cut now may leave of a file: each part of what is not synced.

        What was cut off or appended is there up to any byte; what follows is missing, or zeros.
        """
        if name not in self._names:
            return
        file = self._names[name]
        pairs = zip(file.durable, file.content, strict=False)
        num_same = next((i for i, (old, new) in enumerate(pairs) if old != new), len(file.durable))
        yield file.durable
        for end in range(num_same, len(file.content)):
            yield file.content[:end]
            yield file.content[:end] + bytes(len(file.content) - end)
        yield file.content

    def files(self) -> dict[str, bytes]:
        """Returns the present files."""
        return {name: file.content for name, file in self._names.items() if _is_reachable(name, self._names)}

    def _on_open(self, call: Call, cwd: Path) -> bool:
        (name, *_) = self._inside(call, cwd)
        self._fds.pop(call.result, None)
        if name is None:
            return False
        if "O_DIRECTORY" in call.arguments:
            self._fds[call.result] = name
            return False
        if name not in self._names:
            if "O_CREAT" not in call.arguments:
                return False
            self._change((name, _File()))
        self._fds[call.result] = self._names[name]
        if "O_TRUNC" in call.arguments:
            self._names[name].content = b""
        return True

    def _on_write(self, call: Call, cwd: Path) -> bool:
        file = self._fds.get(call.fd)
        if not isinstance(file, _File):
            return False
        file.content += call.strings[0][: call.result]  # every file here is written from its start, or appended to
        return True

    def _on_pwrite64(self, call: Call, cwd: Path) -> bool:
        file, begin = self._fds.get(call.fd), int(call.arguments.rpartition(", ")[2])
        if not isinstance(file, _File):
            return False
        data = call.strings[0][: call.result]
        file.content = file.content[:begin].ljust(begin, b"\0") + data + file.content[begin + len(data) :]
        return True

    def _on_ftruncate(self, call: Call, cwd: Path) -> bool:
        file, size = self._fds.get(call.fd), int(call.arguments.rpartition(", ")[2])
        if not isinstance(file, _File):
            return False
        file.content = file.content[:size].ljust(size, b"\0")
        return True

    def _on_mkdir(self, call: Call, cwd: Path) -> bool:
        (name,) = self._inside(call, cwd)
        if name is None:
            return False
        self._change((name + "/", _File()))
        return True

    def _on_fsync(self, call: Call, cwd: Path) -> bool:
        opened = self._fds.get(call.fd)
        if isinstance(opened, _File):
            opened.durable = opened.content
        elif opened is not None:
            for change in self._pending:
                if change.directory == opened:
                    _rename(self._durable, change)
            self._pending = [change for change in self._pending if change.directory != opened]
        return opened is not None

    _on_fdatasync = _on_fsync

    def _on_close(self, call: Call, cwd: Path) -> bool:
        self._fds.pop(call.fd, None)
        return False

    def _on_fcntl(self, call: Call, cwd: Path) -> bool:
        if "F_DUPFD" in call.arguments and call.fd in self._fds:
            self._fds[call.result] = self._fds[call.fd]
        return False

    def _on_rename(self, call: Call, cwd: Path) -> bool:
        old, new = self._inside(call, cwd)
        if old is None or new is None:
            return False
        self._change((new, self._names[old]), (old, None))
        return True

    def _on_link(self, call: Call, cwd: Path) -> bool:
        old, new = self._inside(call, cwd)
        if old is None or new is None:
            return False
        self._change((new, self._names[old]))
        return True

    def _on_unlink(self, call: Call, cwd: Path) -> bool:
        (name,) = self._inside(call, cwd)
        if name is None:
            return False
        self._change((name, None))
        return True

    def _change(self, *names: tuple[str, _File | None]) -> None:
        change = _NameChange(str(Path(names[0][0]).parent), names)
        _rename(self._names, change)
        self._pending.append(change)

    def _inside(self, call: Call, cwd: Path) -> list[str | None]:
        """Returns the names in a call, each below the directory whose descriptor is before it; None outside."""
        places = _PLACE.finditer(call.arguments)
        return [
            self._name_of(cwd / (place["directory"] or "") / path.decode(errors="surrogateescape"))
            for place, path in zip(places, call.strings, strict=True)
        ]

    def _name_of(self, path: Path) -> str | None:
        whole = Path(os.path.normpath(path))
        if not whole.is_relative_to(self.root):
            return None
        name = whole.relative_to(self.root)
        return str(name) if not self._only or name.parts[:1] in ((), (self._only,)) else None


def _is_reachable(name: str, names: dict[str, _File]) -> bool:
    """Whether a name is that of a file whose folders are all there."""
    return not name.endswith("/") and all(f"{parent}/" in names for parent in Path(name).parents)


def _rename(names: dict[str, _File], change: _NameChange) -> None:
    for name, file in change.names:
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file
