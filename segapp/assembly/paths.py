"""Look for the files and folders that a config names before torch is imported, which takes seconds. No torch here."""

import os
from collections.abc import Iterable
from pathlib import Path

from segapp.assembly.pairs import build_location, split_names
from segapp.config import DataConfig, RunConfig, component_names, load_config
from segapp.custom.loading import part_file
from segapp.custom.names import is_component, is_file_name, split_name
from segapp.datasets.layouts.formats import check_split
from segapp.errors import CheckpointError
from segapp.run.folder import find_run


def check_paths(config: RunConfig, *, is_new: bool = True) -> None:
    """Look for what a training needs: the data, custom components and, if it `is_new`, the initial weights.

    Raises:
        SegappError: a file or a folder is missing. The images themselves are not looked for.
    """
    for key, name in component_names(config).items():
        if is_file_name(split_name(name)[0]):
            part_file(name, f"{key} = {name}")
    _check_data(config.data, split_names(config.data))
    for key in ("weights", "weights_backbone") if is_new else ():
        value = getattr(config.model, key) or ""
        is_path = "/" in value or Path(value).suffix.lower() in (".pt", ".pth", ".bin", ".safetensors")
        if is_path and not any(os.path.exists(path) for path in (value, Path("runs") / value)):
            message = f"model.{key}: no file {value}; give the path of a weights file"
            raise CheckpointError(message, key=f"model.{key}", path=value)


def check_data_of(targets: Iterable[str], root: str | None, split: str | None) -> None:
    """Look for runs, and for the data of the first one; `root` replaces its folder. Files are left to their reader.

    Raises:
        SegappError: one is missing.
    """
    first, *_ = [None if Path(target).is_file() else find_run(target).config_yaml for target in targets]
    if first is not None and first.is_file():
        data = load_config(first).data
        _check_data(data if root is None else data.model_copy(update={"root": root}), [split or split_names(data)[1]])


def _check_data(data: DataConfig, splits: Iterable[str]) -> None:
    for split in splits if not is_component(data.format) else ():
        check_split(build_location(data), split)
