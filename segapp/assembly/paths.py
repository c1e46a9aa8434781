"""Look for the files and folders that a config or a command line names before torch is imported. No torch here."""

import os
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from segapp.assembly.pairs import build_location, split_names
from segapp.config import DataConfig, RunConfig, component_names, load_config
from segapp.custom.loading import part_file
from segapp.custom.names import is_component, is_file_name, split_name
from segapp.datasets.layouts.formats import check_split
from segapp.errors import CheckpointError, ConfigError
from segapp.run.folder import RunFolder, find_run, is_run
from segapp.run.words import printable

NETWORK_SUFFIXES = (".pt", ".pth", ".safetensors")


def check_paths(config: RunConfig, *, is_new: bool = True, copies: Container[str] = ()) -> None:
    """Look for what a training needs: the data, custom components and, if it `is_new`, the initial weights.

    The components in `copies` need no file.

    Raises:
        SegappError: a file or a folder is missing. The images themselves are not looked for.
    """
    for key, name in component_names(config).items():
        if is_file_name(split_name(name)[0]) and name not in copies:
            part_file(name, f"{key} = {name}")
    _check_data(config.data, split_names(config.data))
    for key in ("weights", "weights_backbone") if is_new else ():
        value = getattr(config.model, key) or ""
        # Another value is the name of weights, such as `imagenet`.
        is_path = "/" in value or Path(value).suffix.lower() in (".pt", ".pth", ".bin", ".safetensors")
        if is_path and not any(os.path.exists(path) for path in (value, Path("runs") / value)):
            message = f"model.{key}: no file {value}; give the path of a weights file"
            raise CheckpointError(message, key=f"model.{key}", path=value)


def check_data_of(targets: Iterable[str], root: str | None, split: str | None) -> None:
    """Look for runs, and for the data of the first one; `root` replaces its folder.

    Raises:
        SegappError: one is missing.
    """
    first, *_ = find_runs(targets)
    if first is not None and first.config_yaml.is_file():
        data = load_config(first.config_yaml).data
        _check_data(data if root is None else data.model_copy(update={"root": root}), [split or split_names(data)[1]])


def find_runs(targets: Iterable[str]) -> list[RunFolder | None]:
    """Return the run of each target; None for a file, which is left to its reader. Raise SegappError without a run."""
    return [None if Path(target).is_file() else find_run(target) for target in targets]


def _check_data(data: DataConfig, splits: Iterable[str]) -> None:
    for split in splits if not is_component(data.format) else ():
        check_split(build_location(data), split)


def split_networks(words: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Divide the words of a command line into networks, which come first, and paths of images.

    The first word is a network. Each following word is one too, up to the first word that is not a run, a checkpoint
    or weights.

    Raises:
        ConfigError: no path is left, or a word names both a run and a file or folder of images.
    """
    num_networks = 1
    while num_networks < len(words) and _names_network(words[num_networks]):
        num_networks += 1
    networks, paths = list(words[:num_networks]), [Path(word) for word in words[num_networks:]]
    if not paths:
        raise ConfigError(f"{printable(networks[-1])} is a model: name images or folders after it")
    return networks, paths


def _names_network(word: str) -> bool:
    path, run = Path(word), Path("runs") / word
    if path.is_file():
        return path.suffix.lower() in NETWORK_SUFFIXES
    # ./NAME means the folder here, and not the run of this name.
    is_name = not word.startswith((".", "/")) and is_run(run)
    if is_name and path.exists() and not is_run(path):
        raise ConfigError(f"{printable(word)} is a run and a folder here: name {run} or ./{printable(word)}")
    return is_name or is_run(path)
