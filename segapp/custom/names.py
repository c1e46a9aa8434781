"""Names of custom components and their source files. Nothing is imported here.

`package.module:factory` is a module on the Python path or in the current folder. `file.py:factory` is a file, relative
to the current folder; `./file.py:factory` in a config file is first searched next to the config (`resolved_near`).
"""

import os
import re
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

_WORDS = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
COMPONENT_PATTERN = rf"^([^:\s]+\.py|{_WORDS}):{_WORDS}$"
"""Regular expression of the name of a custom component."""


def is_component(name: object) -> bool:
    """Return True if a value is the name of a custom component.

    >>> is_component("torch.optim:RMSprop"), is_component("./nets/small.py:Net"), is_component("deeplabv3_resnet50")
    (True, True, False)
    """
    return isinstance(name, str) and re.fullmatch(COMPONENT_PATTERN, name) is not None


def split_name(name: str) -> tuple[str, str]:
    """Return the module or file, and the name inside it.

    >>> split_name("nets/small.py:Net")
    ('nets/small.py', 'Net')
    """
    where, _, attribute = name.rpartition(":")
    return where, attribute


def is_file_name(where: str) -> bool:
    """Return True if a component is in a named file, not in a named module."""
    return where.endswith(".py")


def resolved_near(name: str, folder: Path) -> str:
    """Return `./file.py:factory` with the path from the current folder if the file is in `folder`.

    The path is absolute if it would begin with `..`: a run stores it, and its folder would be taken for `folder` then.
    Names that do not begin with `./` or `../` are returned as they are.
    """
    where, attribute = split_name(name)
    if not (is_file_name(where) and where.startswith(("./", "../"))):
        return name
    found = os.path.normpath(path if (path := folder / where).is_file() else where)
    return f"{os.path.abspath(found) if path.is_file() and found.startswith('..') else found}:{attribute}"


def find_source(name: str) -> Path | None:
    """Return the source file of a component without importing anything; None if it is not found."""
    where, _ = split_name(name)
    if is_file_name(where):
        path = Path(where).expanduser()
        return path.resolve() if path.is_file() else None
    folders: list[str] | None = [*sys.path, os.getcwd()]
    found = None
    for word in where.split("."):
        try:
            spec = PathFinder.find_spec(word, folders)
        except (ImportError, ValueError, OSError):
            return None
        if spec is None:
            return None
        found, folders = spec.origin, list(spec.submodule_search_locations or [])
    return Path(found).absolute() if found is not None and os.path.isfile(found) else None


def is_installed(source: Path) -> bool:
    """Return True for a file of Python, of an installed package or of segapp, whose version determines its content."""
    segapp, source, paths = Path(__file__).resolve().parents[1], source.resolve(), sysconfig.get_paths()
    if source.is_relative_to(segapp) and not source.is_relative_to(segapp / "docs"):  # docs has examples
        return True
    return any(source.is_relative_to(os.path.realpath(paths[key])) for key in ("stdlib", "purelib", "platlib"))
