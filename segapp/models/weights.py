"""Pretrained weights: from a name to a file, from a file to tensors, from tensors into a network.

A file is data and never code: pickles are read with `weights_only=True`. Which tensor goes where is decided in `keys`;
what a file did not cover is told by name in a `LoadReport`.
"""

import hashlib
import os
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from segapp.errors import CheckpointError
from segapp.models.keys import KeyMap, map_keys
from segapp.run.events import Weights

StateDict = dict[str, Tensor]

_WRAPPERS = ("model", "state_dict", "model_state_dict", "model_state", "network", "net", "module")
"""Keys under which training scripts store a state dict, the likeliest first."""
MAX_NAMES = 100
"""Names of each kind that an event holds."""
_MAX_WRAPPERS = 4
"""One inside the other."""
_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.")  # torch hub's convention: resnet50-0676ba61.pth


@dataclass(frozen=True)
class LoadReport:
    """What a weights file gave to a network, by tensor name.

    Attributes:
        source: the file or the weights' name.
        keys: which of its tensors were copied into the network, and why the others were not.
    """

    source: str
    keys: KeyMap

    def lines(self) -> tuple[str, str]:
        r"""Two lines for a person.

        >>> keys = KeyMap("its own names", {"conv.weight": "conv.weight"}, {"fc.bias": "of another head"}, {})
        >>> print(*LoadReport("a.pt", keys).lines(), sep="\n")
        weights a.pt: 1 of 1 tensors of the network taken (its own names)
        weights a.pt: left out fc.bias (of another head); nothing left at initialisation
        """
        keys = self.keys
        num_wanted = len(keys.taken) + len(keys.missing)
        left_out = f"left out {_by_reason(keys.left_out)}" if keys.left_out else "nothing left out"
        missing = f"left at initialisation {_by_reason(keys.missing)}" if keys.missing else ""
        return (
            f"weights {self.source}: {len(keys.taken)} of {num_wanted} tensors of the network taken "
            f"({keys.convention})",
            f"weights {self.source}: {left_out}; {missing or 'nothing left at initialisation'}",
        )

    def as_event(self) -> Weights:
        """Return the report as a `weights` event."""
        keys = self.keys
        return Weights(
            source=self.source,
            message="\n".join(self.lines()),
            num_taken=len(keys.taken),
            num_tensors=len(keys.taken) + len(keys.missing),
            left_out=dict(islice(keys.left_out.items(), MAX_NAMES)),
            missing=dict(islice(keys.missing.items(), MAX_NAMES)),
        )


def _by_reason(reasons: Mapping[str, str], most: int = 3) -> str:
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    shown = [f"{_listed(names, 2)} ({reason})" for reason, names in groups.items()]
    return "; ".join(shown[:most]) + (f"; and {len(shown) - most} more reasons" if len(shown) > most else "")


def _listed(names: list[str], most: int) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


# From a name to a file


def looks_like_path(text: str) -> bool:
    """Whether a `weights` value can only mean a file: it exists, or has a folder or an extension."""
    return Path(text).is_file() or os.sep in text or "/" in text or bool(Path(text).suffix)


def fetch_url(url: str, name: str, key: str) -> Path:
    """The local file of a torchvision weights URL; downloaded into torch's hub folder when it is not there yet.

    Args:
        url: where the file is published.
        name: the weights' name, for messages.
        key: the config key that asked for them.

    Raises:
        CheckpointError: it is not there and cannot be downloaded, or the one that is there is damaged.
    """
    filename = url.rsplit("/", 1)[-1]
    path = Path(torch.hub.get_dir()) / "checkpoints" / filename
    in_name = _HASH_IN_NAME.search(filename)
    sha256_prefix = in_name.group(1) if in_name else None
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), sha256_prefix, progress=sys.stderr.isatty())
        except (OSError, RuntimeError) as error:  # URLError and timeouts are OSError; RuntimeError: the hash is wrong
            raise CheckpointError(
                f"{key}={name}: {filename} is not on this machine and could not be downloaded ({_reason(error)}); "
                f"put the file into {path.parent}, or give the path of a copy as {key}"
            ) from error
    elif sha256_prefix and not sha256_of(path, key).startswith(sha256_prefix):
        raise CheckpointError(f"{key}={name}: {path} is damaged (its sha256 is not {sha256_prefix}...); delete it")
    return path


def fetch_hub_file(repo_id: str, revision: str | None, name: str, key: str) -> Path:
    """The local file of encoder weights that segmentation_models_pytorch publishes on the Hugging Face hub.

    Raises:
        CheckpointError: it is not in the local cache and cannot be downloaded.
    """
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repo_id, filename="model.safetensors", revision=revision))
    except Exception as error:  # the hub's client lets its HTTP library's exceptions through, whichever that is
        raise CheckpointError(
            f"{key}={name}: model.safetensors of {repo_id} is not on this machine and could not be downloaded "
            f"({type(error).__name__}); give the path of a copy as {key}"
        ) from error


def _reason(error: Exception) -> str:
    """An error in a few words, without the host that a URL would name."""
    reason = getattr(error, "reason", None)
    text = str(reason) if reason is not None else str(error)
    return re.sub(r"https?://\S+", "the address", text) or type(error).__name__


def sha256_of(path: Path, key: str) -> str:
    """The hash of a file's bytes, hexadecimal.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{key}: {path} cannot be read ({error.strerror})") from error


# From a file to tensors


def read_weights_file(path: str | Path, key: str = "model.weights") -> StateDict:
    """The tensors of a weights file, on the CPU.

    Takes a state dict, or a dict that holds one under `model` (a checkpoint of this project), `state_dict` and other
    usual keys, saved by torch.save; or a `.safetensors` file.

    Raises:
        CheckpointError: the file is missing, damaged, holds no tensors or several state dicts, or holds objects that
            only code can make.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{key}: no file {path}; give the path of a weights file")
    content: Any = _read_safetensors(path, key) if path.suffix.lower() == ".safetensors" else _read_torch(path, key)
    for _ in range(_MAX_WRAPPERS):
        if not isinstance(content, Mapping):
            break
        inner = [name for name in _WRAPPERS if isinstance(content.get(name), Mapping)]
        if not inner and not _tensors_in(content):
            inner = [name for name, value in content.items() if isinstance(value, Mapping) and _tensors_in(value)]
            if len(inner) > 1:
                names = _listed([str(name) for name in inner], 6)
                raise CheckpointError(
                    f"{key}: {path} holds several state dicts ({names}); save the one that is meant alone"
                )
        if not inner:
            break
        content = content[inner[0]]
    if isinstance(content, Mapping) and (state := _tensors_in(content)):
        return state
    raise CheckpointError(f"{key}: {path} holds no state dict; save one with torch.save(model.state_dict(), path)")


def read_metadata(path: Path, key: str = "model.weights") -> dict[str, str]:
    """The metadata of a safetensors file, text by name.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    from safetensors import safe_open

    if not path.is_file():
        raise CheckpointError(f"{key}: no file {path}; give the path of a weights file")
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except Exception as error:  # as for its tensors
        raise _no_safetensors(path, key, error) from error


def _tensors_in(content: Mapping[Any, Any]) -> StateDict:
    return {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}


def load_tensors(file: BinaryIO) -> Any:
    """What `torch.save` put into a file: tensors and plain values on the CPU, and never more bytes than the file has.

    torch writes its archives without compression; one that unpacks to more than it weighs was made to fill the memory.

    Raises:
        CheckpointError: the file unpacks to more than its size.
        Exception: torch's own, of a dozen types, for a file that is damaged or holds other objects.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if zipfile.is_zipfile(file):
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        if any(e.compress_type != zipfile.ZIP_STORED for e in entries) or sum(e.file_size for e in entries) > size:
            raise CheckpointError("it is packed and would unpack to more than its size: torch.save packs nothing")
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about formats that are refused right after
        return torch.load(file, map_location="cpu", weights_only=True)


def _read_torch(path: Path, key: str) -> Any:
    try:
        with path.open("rb") as file:
            return load_tensors(file)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {path}: {error}; save the tensors again with torch.save") from error
    except OSError as error:
        raise CheckpointError(f"{key}: {path} cannot be read ({error.strerror or error})") from error
    except Exception as error:  # a damaged file shows as any of a dozen exceptions
        if isinstance(error, pickle.UnpicklingError) and "global" in str(error).lower():
            raise CheckpointError(
                f"{key}: {path} holds more than tensors and plain values, and loading it would run code, so it was "
                f"not loaded; save the tensors alone with torch.save(model.state_dict(), path)"
            ) from error
        raise CheckpointError(
            f"{key}: {path} is damaged or not a weights file ({type(error).__name__}); copy or download it again"
        ) from error


def _read_safetensors(path: Path, key: str) -> StateDict:
    from safetensors.torch import load_file

    try:
        return dict(load_file(path, device="cpu"))
    except Exception as error:  # as above
        raise _no_safetensors(path, key, error) from error


def _no_safetensors(path: Path, key: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{key}: {path} is damaged or not a safetensors file ({type(error).__name__}); copy or download it again"
    )


# From tensors into a network


def load_weights(network: nn.Module, backbone_prefix: str, state: StateDict, source: str, key: str) -> LoadReport:
    """Copies what fits of `state` into a whole network.

    Args:
        network: the network; its tensors are overwritten in place.
        backbone_prefix: what the names of its backbone's tensors begin with.
        state: tensors by name; of the whole network in the naming of any library that `map_keys` knows, or of its
            backbone alone.
        source: where they come from, for messages.
        key: the config key that asked for them.

    Returns:
        What was loaded and what was not. A head for other classes, or an absent one, stays at its initialisation.

    Raises:
        CheckpointError: too little fits, or the backbone is another one.
    """
    return _copy(network, state, source, key, backbone_prefix)


def load_backbone_weights(backbone: nn.Module, state: StateDict, source: str, key: str) -> LoadReport:
    """Copies `state`, as the backbone's own library publishes it, into a backbone.

    The classifier that such a file also holds is not used.

    Raises:
        CheckpointError: the file's tensors are not those of this backbone.
    """
    return _copy(backbone, state, source, key, "")


def _copy(module: nn.Module, state: StateDict, source: str, key: str, backbone_prefix: str) -> LoadReport:
    own = module.state_dict()
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    found = {name: tuple(value.shape) for name, value in state.items()}
    try:
        keys = map_keys(found, {name: tuple(v.shape) for name, v in own.items()}, backbone_prefix, buffers)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {source} {error}") from None
    module.load_state_dict({name: state[file_name] for name, file_name in keys.taken.items()}, strict=False)
    return LoadReport(source, keys)
