"""What a machine brings to a job: its settings, custom components, weights, versions and data. No torch here.

The data are described by their names, as the trainer lists them, and by the size and the first MiB of 64 files, chosen
by a hash of their names. So another file of a large set may differ unseen.
"""

import hashlib
import heapq
import os
import platform
import socket
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from segapp import __version__
from segapp.assembly.pairs import build_pairs, split_names
from segapp.chunks import SPLIT_NAMES
from segapp.config import DataConfig, RunConfig
from segapp.config.trust import named_code
from segapp.custom.names import is_component, is_file_name, split_name
from segapp.datasets.files import ImagePair
from segapp.errors import SegappError
from segapp.parallel.agreement import MachineFacts
from segapp.run.checkpoints import BEST, CheckpointFolder
from segapp.run.files import storage_errors_of
from segapp.run.folder import find_run

MAY_DIFFER = frozenset(
    {
        *(f"data.{key}" for key in ("root", "image_dir", "mask_dir", "list_dir", "valid_area", "workers", "cache")),
        *(f"parallel.{key}" for key in ("devices", "memory_budget_mib", *SPLIT_NAMES)),
        "log",
    }
)
"""Keys of the config that belong to a machine. The ranks compare how they divide a batch."""
_FILES = ("model.weights", "model.weights_backbone", "distill.teacher")
"""Keys with paths, whose content is compared."""
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 2**20
_OTHER_PACKAGES = ("numpy", "opencv-python-headless", "albumentations")


def facts_of(config: RunConfig) -> MachineFacts:
    """Return the facts that this machine brings to a job with a config; `problem` is an error in finding them."""
    machine = socket.gethostname()
    settings, others = dict[str, str](), {"Python": platform.python_version()}
    others |= {name: _version(name) for name in ("torch", *_OTHER_PACKAGES)}
    try:
        settings |= _settings_of(config)
        settings |= {"the version of segapp": __version__, "the version of torch": _version("torch").partition("+")[0]}
        settings |= {f"the source of {_short(name)}": sha256 for name, sha256 in _source_hashes(config)}
        return MachineFacts(machine, settings, _data_of(config.data), others)
    except SegappError as error:
        return MachineFacts(machine, settings, {}, others, (error.exit_code, str(error)))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _settings_of(config: RunConfig) -> dict[str, str]:
    """Return key -> value of what all machines must share."""
    values = dict(_flat(config.model_dump(mode="json"), ""))
    for key in _FILES:
        if values.get(key, "None") != "None":
            values[key] = _content_of(values[key])
    return values | {"the batch split": "automatic" if config.parallel.is_auto else "not automatic"}


def _flat(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if key in MAY_DIFFER:
        return
    inner: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else ()
    # Sections in a list are compared key by key; another list is one value.
    if isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        inner = enumerate(value)
    elif not isinstance(value, Mapping):
        yield key, _short(value) if is_component(value) else str(value)
    for name, each in inner:
        name = _short(name) if is_component(name) else name
        yield from _flat(each, f"{key}.{name}" if key else str(name))


def _short(component: str) -> str:
    """Return the name of a component without the folder of its file, which machines may keep elsewhere."""
    where, factory = split_name(component)
    return f"{Path(where).name}:{factory}" if is_file_name(where) else component


def _source_hashes(config: RunConfig) -> Iterator[tuple[str, str]]:
    for code in named_code(config).values():
        if (sources := code.sources) is not None:
            yield code.name, sources.sha256[:12]


def _content_of(name: str) -> str:
    """Return the SHA-256 of a weights file or of the checkpoint that a run gives; any other name stays as it is."""
    path = Path(name)
    if path.is_file():
        with storage_errors_of("read", path), open(path, "rb") as file:
            return f"a file with SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"
    try:
        manifest = CheckpointFolder(find_run(name).checkpoints).read_manifest()
    except SegappError:
        return name
    entry = manifest.entry_named(BEST) or next(iter(manifest.entries), None)
    return name if entry is None else f"a file with SHA-256 {entry.sha256[:12]}"


def _data_of(data: DataConfig) -> dict[str, str]:
    """Return names and contents of the files of both splits; nothing for a custom data set, whose code lists them.

    Raises:
        DataError: they cannot be found.
    """
    if is_component(data.format):
        return {}
    facts, files = dict[str, str](), dict[str, Path]()
    for split in split_names(data):
        named = dict(_named(build_pairs(data, split), data))
        digest = hashlib.sha256("\n".join(named).encode(errors="surrogateescape")).hexdigest()
        facts[f"the number of files of {split}"] = str(len(named))
        facts[f"the SHA-256 of the file names of {split}"] = digest[:12]
        files |= {f"{split} {name}": path for name, path in named.items()}
    chosen = heapq.nsmallest(_NUM_SAMPLES, files, key=lambda name: zlib.crc32(name.encode(errors="surrogateescape")))
    return facts | {f"the content of {name}": _sample(files[name]) for name in chosen}


def _named(pairs: Sequence[ImagePair], data: DataConfig) -> Iterator[tuple[str, Path]]:
    """Yield each file with a name that does not depend on the folders of the config, such as "mask berlin/7.png".

    The name of a mask has as many parts as the name of its image, because the folders of both may differ.
    """
    places = [Path(data.root) / below for below in (data.mask_dir or "", "")]
    folders = [os.path.join(form, "") for place in places for form in (str(place), os.path.normpath(place))]
    for pair in pairs:
        yield f"image {pair.name}{pair.image.suffix}", pair.image
        others = [(f"mask {i or ''}".rstrip(), mask) for i, mask in enumerate(pair.masks)]
        for kind, path in [*others, *([("valid area", pair.valid_area)] if pair.valid_area else [])]:
            text = str(path)
            below = next((text[len(folder) :] for folder in folders if text.startswith(folder)), text)
            yield f"{kind} {'/'.join(below.split('/')[-1 - pair.name.count('/') :])}", path


def _sample(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            start = file.read(_SAMPLE_BYTES)
            return f"{file.seek(0, 2)} bytes with SHA-256 {hashlib.sha256(start).hexdigest()[:12]}"
    except OSError as error:
        return f"not readable ({error.strerror})"
