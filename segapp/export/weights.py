"""Write the state dict of a network as a safetensors file, with the metadata of an export."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from segapp.errors import RunError, StorageError, cannot_be_written
from segapp.export.info import ExportInfo
from segapp.models import SegmentationModel
from segapp.run.files import remove_quietly, temporary_name

_PROGRAM_FIELDS = ("input", "output", "opset", "fixed_size_px")
"""Metadata that apply to executable formats only."""


def write_weights(model: SegmentationModel, info: ExportInfo, path: Path, more: Mapping[str, str] | None = None) -> int:
    """Write the state dict of a network under a temporary name, read it back, and rename it if it is unchanged.

    Args:
        model: the trained network.
        info: the metadata; with precision fp16 all floating-point tensors are stored in float16.
        path: the file.
        more: additional metadata, text by name.

    Returns:
        The number of tensors written.

    Raises:
        RunError: the tensors read back differ.
        StorageError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    dtype = torch.float16 if info.precision == "fp16" else torch.float32
    tensors = {
        # Copied because safetensors refuses tensors that share memory.
        name: value.detach().to("cpu", dtype if value.is_floating_point() else None, copy=True).contiguous()
        for name, value in model.state_dict().items()
    }
    properties = {name: text for name, text in info.as_properties().items() if name not in _PROGRAM_FIELDS}
    temporary = path.parent / f"{temporary_name()}.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, {"format": "pt", **properties, **(more or {})})
        back = load_file(temporary, device="cpu")
        if back.keys() != tensors.keys() or not all(torch.equal(back[name], tensors[name]) for name in tensors):
            raise RunError(
                f"{path.name}: the weights read back differ from those written: choose another --out", path=path
            )
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:  # SafetensorError: a full disk
        raise StorageError(cannot_be_written(path, error), path=path) from None
    finally:
        remove_quietly(temporary)
    return len(tensors)
