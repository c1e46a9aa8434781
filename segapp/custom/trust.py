"""Decision about the code that a config names: it runs if the user named it on this machine, with these options.

The place of a file shows nothing, because a stranger's folder has its own config and its own `.py` next to it. So code
is known if the command line names it, or if a question or `--trust-parts` has accepted it before. Name, source file,
options and content of the file and of its neighbors must be the accepted ones; the record has their SHA-256. Files of
Python and of installed packages count without content, because their version determines it: `subprocess:getoutput` is
known only with the command that was accepted. There is one exception, for work on one's own code: in the config in
which code was accepted, its options and its files may change if they lie in the folder of the config or in the current
folder, and they and the config belong to the user and nobody else may write them. It does not apply to the configs of
run folders and checkpoints.

The files are read once. What was compared is kept, and `segapp.custom.loading` compiles it.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from segapp.custom.names import find_source, is_file_name, split_name
from segapp.custom.sources import Sources, read_sources
from segapp.errors import ConfigError
from segapp.places import has_own_group, own_folder

TRUST_VARIABLE = "SEGAPP_TRUST_PARTS"
"""Environment variable: 1 if any code may run, or the marks of the code that this process and its children may run."""

_accepted: dict[str, Sources | None] = {}
"""First mark of accepted code -> its sources as they were compared; None for installed code."""

_copies: ContextVar[Mapping[str, Sources]] = ContextVar("segapp_copies")
"""Name of a component -> the copy from which it is built; see `using_copies`."""

_PINNED = frozenset(os.environ.get(TRUST_VARIABLE, "").split())
"""Marks of the code that a parent process has accepted, which this process runs with the same content only."""


@dataclass(frozen=True)
class NamedCode:
    """A custom component that a config names, with its options."""

    name: str
    options: Mapping[str, Any]
    copy: Sources | None = None
    """The copy in a run folder that is to run; None: the user's file, or installed code."""

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"

    @cached_property
    def source(self) -> Path | None:
        """The source file; None if no file is found, as for modules that are built into Python."""
        return find_source(self.name) if self.copy is None else self.copy.files[self.copy.module].path

    @cached_property
    def sources(self) -> Sources | None:
        """The sources as they are at the first use; None if their version determines them, or there is no file."""
        return read_sources(self.name) if self.copy is None else self.copy

    @property
    def shown_source(self) -> str:
        """The source file and the neighbors that belong to it, for the user who is asked."""
        if self.sources is None:
            return str(self.source or "in no file")
        others = (os.path.relpath(path, self.sources.root) for path in self.sources.paths if path != self.source)
        return " with ".join(filter(None, [str(self.source), ", ".join(others)]))

    @property
    def first_mark(self) -> str:
        """Hash of name and source file; a copy counts as the user's file, which may have had its content."""
        where, attribute = split_name(self.name)  # a file has several names, such as ./parts.py and parts.py
        source = find_source(self.name) or self.source
        return _hash_of([attribute if is_file_name(where) else self.name, str(source)])

    @cached_property
    def marks(self) -> tuple[str, str, str]:
        """The first mark, its hash with the content of the sources, and the hash of both with the options."""
        plain = json.loads(json.dumps(self.options, default=str))  # all keys as text, so that they can be sorted
        content = _hash_of([self.first_mark, None if self.sources is None else self.sources.sha256])
        return self.first_mark, content, _hash_of([content, plain])

    def check_content(self) -> None:
        """Raise ConfigError if a parent of this process has accepted it with another content; a copy is of one only."""
        if self.copy is None and self.first_mark in _PINNED and self.marks[1] not in _PINNED:
            raise ConfigError(f"{self.name} has changed since it was accepted, so it does not run: start again")

    def is_users_own(self, config: Path) -> bool:
        """Return True if it lies in the project's folder, and only the user may write it and the config."""
        if self.sources is None:
            return False
        folders, paths = (Path.cwd().resolve(), config.parent), [path.resolve() for path in self.sources.paths]
        are_inside = all(any(map(path.is_relative_to, folders)) for path in paths)
        return are_inside and all(map(_is_only_ones_own, (*paths, config)))


class UnknownCodeError(ConfigError):
    """A config names code that the user has not named on this machine: its keys, and the code of each."""

    named: Mapping[str, NamedCode]
    origin: Path


@contextlib.contextmanager
def trusting(is_trusted: bool) -> Iterator[None]:
    """Accept the code of any config during the body, in this process and in children that it starts."""
    if not is_trusted or "1" in _marks():
        yield
        return
    os.environ[TRUST_VARIABLE] = " ".join(["1", *_marks()])
    try:
        yield
    finally:
        os.environ[TRUST_VARIABLE] = " ".join(mark for mark in _marks() if mark != "1")


def check_known(named: Mapping[str, NamedCode], origin: Path, typed: Collection[str], *, is_stored: bool) -> None:
    """Let this process and its children import the code of a config, by key; UnknownCodeError if some is not known.

    `origin` is the config's file, run or checkpoint; with `is_stored`, the config is in a run folder or a checkpoint.
    `typed` has the names of code on the command line.
    """
    accepted, record, here = {*_marks()}, _record(), _hash_of(origin)

    def is_known(code: NamedCode) -> bool:
        first, _, exact = code.marks
        if code.name in typed or accepted & {"1", exact}:
            return True
        known = [line[1:] for line in record if line[0] == first]
        # Users change their own components, so one that this config named before stays known.
        was_here = not is_stored and any(where == here for _, where in known)
        return any(each == exact for each, _ in known) or (was_here and code.is_users_own(origin))

    for code in named.values():
        code.check_content()
    unknown = {key: code for key, code in named.items() if not is_known(code)}
    if not unknown:
        accept_code(named.values(), origin)
        return
    shown = ", ".join(f"{key} = {str(code)[:200]}" for key, code in unknown.items())
    error = UnknownCodeError(
        f"{origin} names code that would run: {shown[:1000]}: add --trust-parts (in Python trust_parts=True) if you "
        "know that code (once; segapp remembers it), or do not use this file",
        path=origin,
    )
    error.named, error.origin = unknown, origin
    raise error.see("own-parts")


def accept_code(named: Iterable[NamedCode], origin: Path | str = "python") -> None:
    """Record code that the user has named; without a disk, only this process and its children know it."""
    record, lines = _record(), dict[str, None]()
    for code in named:
        first, _, exact = code.marks
        if code.copy is None:
            _accepted[first] = code.sources
        marks = dict.fromkeys([*code.marks, *_marks()])
        os.environ[TRUST_VARIABLE] = " ".join([*marks][:3000])  # at most 128 KiB; the record has the others
        if [first, exact, _hash_of(origin)] not in record:
            lines[f"{first} {exact} {_hash_of(origin)} {code.name}\n"] = None
    with contextlib.suppress(OSError):
        path = _record_file()
        with open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.writelines(lines)


def accepted_sources(name: str) -> Sources | None:
    """Return the sources of a component as they were compared; None for installed code.

    Raises:
        ConfigError: this process has not found the component to be known.
    """
    code, marks = NamedCode(name, {}, _copies.get({}).get(name)), _marks()
    first = code.first_mark
    if code.copy is None and first in marks and first in _accepted:
        return _accepted[first]
    code.check_content()
    if not {"1", code.marks[1]} & {*marks}:  # in a child, the parent has compared it
        raise ConfigError(f"{name} is code that was not accepted: add --trust-parts if you know it").see("own-parts")
    if code.copy is None:
        _accepted[first] = code.sources
    return code.sources


@contextlib.contextmanager
def using_copies(copies: Mapping[str, Sources]) -> Iterator[None]:
    """Build components from these copies in the body, in this thread, by name; others from the user's files."""
    token = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(token)


def _is_only_ones_own(path: Path) -> bool:
    """Return True for a file of the user that nobody else may write."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (0o002 if has_own_group(status.st_gid) else 0o022)


def _hash_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _marks() -> list[str]:
    return os.environ.get(TRUST_VARIABLE, "").split()


def _record_file() -> Path:
    return own_folder("XDG_STATE_HOME") / "parts"


def _record() -> list[list[str]]:
    """Return two marks of accepted code, and the hash of the config that named it, for each line of the record."""
    with contextlib.suppress(OSError):
        lines = [line.split() for line in _record_file().read_text(errors="replace").splitlines()]
        return [line[:3] for line in lines if len(line) == 4]  # not a torn line, nor one of an older version
    return []
