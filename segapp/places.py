"""Folders of this user below $XDG_CACHE_HOME and $XDG_STATE_HOME, in which nobody else can place or replace a file.

Whoever writes into a cache of compiled code decides what the next training executes. torch's default is a folder below
TMPDIR, which is open to everyone, with a name that everyone knows.
"""

import contextlib
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Literal

Home = Literal["XDG_CACHE_HOME", "XDG_STATE_HOME"]

_DEFAULTS: dict[Home, str] = {"XDG_CACHE_HOME": "~/.cache", "XDG_STATE_HOME": "~/.local/state"}
_COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
_PREFIX = "segapp-compiled-"
_temporary: list[tempfile.TemporaryDirectory[str]] = []


def place_of(home: Home, *names: str) -> Path:
    """Return the real path of a file or folder below `segapp` in a home; OSError if there is no home."""
    path = os.environ.get(home) or os.path.expanduser(_DEFAULTS[home])
    if not os.path.isabs(path):
        raise OSError(f"{path} is no absolute path: set {home} to one")
    return Path(os.path.realpath(path), "segapp", *names)


def own_folder(home: Home, *names: str) -> Path:
    """Return `place_of` a folder, which is created with mode 0700 if it is missing.

    Raises:
        OSError: it cannot be created, or another user can write to it or replace it.
    """
    top, folder = place_of(home), place_of(home, *names)
    for place in (*reversed(folder.parents), folder):
        if not os.path.lexists(place):
            place.mkdir(0o700, exist_ok=True)
        facts, is_inside = place.lstat(), place.is_relative_to(top)
        is_sticky = facts.st_mode & stat.S_ISVTX and not is_inside  # as /tmp: only the owner can replace a folder in it
        others = 0o002 if has_own_group(facts.st_gid) else 0o022
        if not stat.S_ISDIR(facts.st_mode):
            raise NotADirectoryError(f"{place} is a link or a file: remove it, or set {home}")
        if facts.st_uid not in ({os.geteuid()} if is_inside else {os.geteuid(), 0}):
            raise PermissionError(f"{place} belongs to another user: set {home} to a folder of your own")
        if facts.st_mode & others and not is_sticky:
            raise PermissionError(f"other users can write to {place}: run `chmod go-w` on it, or set {home}")
    return folder


def keep_compiled_code() -> str:
    """Name folders of this user in the variables of torch and Triton, unless the user has; return torch's.

    Without such a folder, a temporary one is used until this process ends, and a line says so.
    """
    defaults = tuple(os.path.join(tempfile.gettempdir(), begin) for begin in ("torchinductor_", _PREFIX))
    for variable, name in _COMPILED.items():
        # torch writes its default into its variable, and a parent its temporary folder, which ends with the parent.
        if (os.environ.get(variable) or defaults[0]).startswith(defaults):
            os.environ[variable] = os.path.join(_compiled_folder(), name)
    return os.environ["TORCHINDUCTOR_CACHE_DIR"]


def _compiled_folder() -> str:
    try:
        return str(own_folder("XDG_CACHE_HOME", "compiled"))
    except OSError as error:
        if not _temporary:
            _temporary.append(tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True))
            print(f"compiled code is kept in {_temporary[0].name} until this process ends: {error}", file=sys.stderr)
        return _temporary[0].name


def has_own_group(group_id: int) -> bool:
    """Return True if the user is the only member of a group, which many systems give each user, with the umask 002."""
    import grp  # only Unix has them, and `segapp.losses` needs no Unix
    import pwd

    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group_id)
        return group.gr_name == user and {*group.gr_mem} <= {user}
    return False
