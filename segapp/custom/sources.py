"""Source files of custom components, read once: the bytes that are compared with the record are the bytes that run.

A component's neighbors, which are the modules next to it that its import statements name, belong to its sources. A
module that Python finds elsewhere, such as an installed package, is no neighbor. Nothing is imported here.
"""

import ast
import contextlib
import hashlib
import importlib.util
import os
import stat
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType

from segapp.custom.names import find_source, is_file_name, is_installed, split_name
from segapp.errors import ConfigError

_MAX_BYTES = 2**24
"""Of all sources of a component; larger ones are not read."""

_NAME_LENGTH = 16
"""Of the names of folders of copies, in characters of a SHA-256."""


@dataclass(frozen=True)
class SourceFile:
    """The content of a module; a folder without `__init__.py` is a package with an empty one."""

    path: Path
    content: bytes
    is_package: bool
    is_copy: bool = False
    """True for a copy in a run folder."""


@dataclass(frozen=True)
class Sources:
    """The sources of a component."""

    module: str
    """Name of the component's module."""
    root: Path
    """The folder in which its top-level name and its neighbors lie."""
    files: dict[str, SourceFile]
    """Name of a module -> its source, for the component, its packages and its neighbors."""

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the names and contents of all files, hexadecimal."""
        digests = [f"{name} {hashlib.sha256(file.content).hexdigest()}\n" for name, file in sorted(self.files.items())]
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    @property
    def paths(self) -> list[Path]:
        """The files that have content; an empty `__init__.py` may be missing."""
        return [file.path for file in self.files.values() if file.content]

    def keep(self, parts: Path) -> None:
        """Copy the files below a folder, in one named after their SHA-256, where `kept_sources` finds them.

        Disk errors are ignored, because the run itself does not need the copies.
        """
        for file in self.files.values():
            copy = parts / self.sha256[:_NAME_LENGTH] / file.path.relative_to(self.root)
            with contextlib.suppress(OSError):
                if not copy.is_file() or copy.read_bytes() != file.content:
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(file.content)


def read_sources(name: str) -> Sources | None:
    """Return the sources of a component; None for a module of Python or of an installed package, and if none is found.

    Raises:
        ConfigError: a file cannot be read, is no Python source, or the files are too large.
    """
    where, source = split_name(name)[0], find_source(name)
    if source is None or (not is_file_name(where) and is_installed(source)):
        return None
    if source.suffix != ".py":
        raise ConfigError(f"{name}: {source} is no Python source: install its package").see("own-parts")
    module, above = where, where.count(".") + (source.name == "__init__.py")
    if is_file_name(where):
        module, above = source.stem, 0
        if not module.isidentifier() or module == "__main__":
            raise ConfigError(f"{name}: {module} is not a valid module name: rename the file, e.g. to my_parts.py")
    root, num_bytes = source.parents[above].resolve(), 0
    files, waiting = dict[str, SourceFile](), [module]
    while waiting:
        words = waiting.pop().split(".")
        for dotted in (".".join(words[: n + 1]) for n in range(len(words))):
            if dotted in files:
                continue
            is_neighbor = dotted != words[0] or words[0] == module.partition(".")[0] or not _is_elsewhere(dotted, root)
            if not is_neighbor or (file := _read(root, dotted, _MAX_BYTES - num_bytes)) is None:
                break  # installed, missing, or not a module but a name in one
            files[dotted] = file
            num_bytes += len(file.content)
            waiting += _imported_names(dotted, file)
    if module not in files or files[module].path.resolve() != source.resolve():
        raise ConfigError(f"{name}: Python finds another module {module} before {source}: rename the file")
    return Sources(module, root, files)


def kept_sources(name: str, parts: Path) -> dict[str, Sources]:
    """Return the intact copies of a component's sources that trainings have kept in a folder, by their SHA-256.

    Raises:
        ConfigError: a copy cannot be read, or is too large.
    """
    where, found = split_name(name)[0], dict[str, Sources]()
    module = Path(where).stem if is_file_name(where) else where
    for folder in sorted(parts.resolve().iterdir()) if parts.is_dir() else ():
        files, num_bytes = dict[str, SourceFile](), 0
        for path in sorted(folder.rglob("*.py")):
            words = path.relative_to(folder).with_suffix("").parts
            dotted = ".".join(words[:-1] if words[-1] == "__init__" else words)
            if (file := _read(folder, dotted, _MAX_BYTES - num_bytes)) is not None:
                files[dotted] = replace(file, is_copy=True)
                num_bytes += len(file.content)
        sources = Sources(module, folder, files)
        # A copy that was changed no longer has the hash in its folder's name.
        if module in files and sources.sha256[:_NAME_LENGTH] == folder.name:
            found[sources.sha256] = sources
    return found


def _is_elsewhere(module: str, root: Path) -> bool:
    """Return True if Python finds a top-level module, or has loaded it, from another place than below a folder."""
    if module == "segapp" or module in sys.stdlib_module_names:
        return True
    try:
        spec = _found(module)
    except (ImportError, ValueError):  # ValueError: loaded, but without a spec, such as __main__
        return True
    if spec is None or isinstance(spec.loader, _AcceptedLoader):  # `offer` compares two folders with such a file
        return False
    places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or [])
    return not any(Path(place).resolve().is_relative_to(root) for place in places)


def _found(module: str) -> ModuleSpec | None:
    """Return the spec of a top-level module; copies in run folders, which Python itself never finds, do not count."""
    is_copy = module in _modules.files and _modules.files[module].is_copy
    return PathFinder.find_spec(module) if is_copy else importlib.util.find_spec(module)


def _read(root: Path, module: str, max_bytes: int) -> SourceFile | None:
    """Return the source of a module below a folder; None if there is none."""
    base = root.joinpath(*module.split("."))
    package, path = base / "__init__.py", base.with_name(f"{base.name}.py")
    is_package = package.is_file() or (base.is_dir() and not path.is_file())
    if is_package:
        path = package
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        # A package needs no `__init__.py`.
        return SourceFile(path, b"", is_package) if is_package else None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: make it readable, or leave out its import", path=path) from error
    if len(content) > max_bytes:
        raise ConfigError(
            f"{path}: the component and the modules next to it that it imports have more than {_MAX_BYTES >> 20} MiB: "
            "install them as a package",
            path=path,
        ).see("own-parts")
    return SourceFile(path, content, is_package)


def _imported_names(module: str, file: SourceFile) -> Iterator[str]:
    """Yield the names that may be modules in the import statements of a source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, which reports them again when the code is imported
        try:
            nodes = list(ast.walk(ast.parse(file.content)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # reported when the code is imported
            return
    package = module.split(".") if file.is_package else module.split(".")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            where = ".".join([*base, *([node.module] if node.module else [])])
            yield from filter(None, [where, *(f"{where}.{alias.name}".removeprefix(".") for alias in node.names)])


class _AcceptedLoader(SourceFileLoader):
    """Compiles the accepted content of a file; neither the file nor a `__pycache__` is read."""

    def __init__(self, module: str, file: SourceFile) -> None:
        super().__init__(module, str(file.path))
        self._content = file.content

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the module."""
        return self.source_to_code(self._content, self.path)


class _AcceptedModules(MetaPathFinder):
    """Finds the modules of accepted sources, whose neighbors may be imported at any time, such as in a function."""

    def __init__(self) -> None:
        self.files: dict[str, SourceFile] = {}

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return the spec of an accepted module; its packages have no folder in which Python would look for others."""
        if (file := self.files.get(name)) is None:
            return None
        spec = ModuleSpec(name, _AcceptedLoader(name, file), origin=str(file.path), is_package=file.is_package)
        spec.has_location = True  # sets `__file__`
        return spec


_modules = _AcceptedModules()


def offer(sources: Sources, what: str) -> None:
    """Let this process import accepted sources from now on; modules of an earlier content are imported again.

    Raises:
        ConfigError: another module has one of their names. If one of both is a copy in a run folder, each gets its own
            module, except if a program has imported one of another content itself.
    """
    top = sources.module.partition(".")[0]
    files, earlier = sources.files, {name: _modules.files[name] for name in sources.files if name in _modules.files}
    specs = {name: sys.modules[name].__spec__ for name in files if name in sys.modules}
    own = {name for name, spec in specs.items() if spec is not None and isinstance(spec.loader, _AcceptedLoader)}
    specs = {name: spec for name, spec in specs.items() if name not in own}
    if top not in specs and not files[sources.module].is_copy and _is_elsewhere(top, sources.root):
        specs[top] = _found(top)
    # A package without `__init__.py` has no origin: it is no code, and may lie in several folders.
    places = [(name, Path(spec.origin)) for name, spec in specs.items() if spec is not None and spec.origin]
    places += [(name, file.path) for name, file in earlier.items() if not (file.is_copy or files[name].is_copy)]
    for name, place in places:
        file = files[name]
        if place.resolve() == file.path.resolve():
            continue
        problem = f"Python finds another module {name} ({place}) before {file.path}: rename the file"
        if file.is_copy:
            if place.is_file() and place.read_bytes() == file.content:
                continue
            problem = f"this program has imported another version of {name} ({place}): start a new one for this run"
        raise ConfigError(f"{what}: {problem}")  # nobody accepted the other file
    if any(file != files[name] for name, file in earlier.items()):
        for name in own:
            del sys.modules[name]
    _modules.files |= files
    if _modules not in sys.meta_path:
        sys.meta_path.insert(0, _modules)
