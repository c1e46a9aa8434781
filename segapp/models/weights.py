"""Pretrained weights: from a name to a file, from a file to tensors, from tensors into a network.

A file is data and never code: pickles are read with `weights_only=True`. What a file did not cover is told by name
in a `LoadReport`.
"""

import hashlib
import os
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from segapp.errors import CheckpointError

StateDict = dict[str, Tensor]

_WRAPPERS = ("model", "state_dict", "model_state_dict")  # keys under which training scripts store a state dict
_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.")  # torch hub's convention: resnet50-0676ba61.pth


@dataclass(frozen=True)
class LoadReport:
    """What a weights file gave to a network, by tensor name.

    Attributes:
        source: the file or the weights' name.
        loaded: tensors copied into the network.
        missing: tensors of the network that the file lacks; they keep their initialisation.
        unexpected: tensors of the file that the network lacks; they were not used.
        mismatched: tensors of another shape in the file, as a head for other classes has; they keep their
            initialisation.
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]

    def summary(self) -> str:
        """One line for the log.

        >>> LoadReport("a.pt", ("conv.weight",), ("head.bias",), (), ("head.weight",)).summary()
        'a.pt: 1 tensor loaded; left at initialisation: head.bias (not in the file), head.weight (other shape)'
        """
        plural = "" if len(self.loaded) == 1 else "s"
        parts = [f"{self.source}: {len(self.loaded)} tensor{plural} loaded"]
        fresh = [f"{name} (not in the file)" for name in self.missing]
        fresh += [f"{name} (other shape)" for name in self.mismatched]
        if fresh:
            parts.append("left at initialisation: " + _listed(fresh))
        if self.unexpected:
            parts.append("not used: " + _listed(self.unexpected))
        return "; ".join(parts)


def _listed(names: list[str] | tuple[str, ...], most: int = 6) -> str:
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
    elif sha256_prefix and not _sha256(path, key).startswith(sha256_prefix):
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


def _sha256(path: Path, key: str) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{key}: {path} cannot be read ({error.strerror})") from error


# From a file to tensors


def read_weights_file(path: str | Path, key: str = "model.weights") -> StateDict:
    """The tensors of a weights file, on the CPU.

    Takes a state dict or a dict that holds one under `model` (a checkpoint of this project) or `state_dict`, saved by
    torch.save, or a `.safetensors` file. Prefixes that wrappers add (`module.`, `_orig_mod.`) are taken off.

    Raises:
        CheckpointError: the file is missing, damaged, holds no tensors, or holds objects that only code can make.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{key}: no file {path}; give the path of a weights file")
    content: Any = _read_safetensors(path, key) if path.suffix == ".safetensors" else _read_torch(path, key)
    if isinstance(content, Mapping):
        content = next((content[w] for w in _WRAPPERS if isinstance(content.get(w), Mapping)), content)
        state = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
        if state:
            return _without_wrapper_prefix(state)
    raise CheckpointError(f"{key}: {path} holds no state dict; save one with torch.save(model.state_dict(), path)")


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
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(f"{key}: {path} needs the package safetensors; install it, or give a .pt file") from error
    try:
        return dict(load_file(path, device="cpu"))
    except Exception as error:  # as above
        raise CheckpointError(
            f"{key}: {path} is damaged or not a safetensors file ({type(error).__name__}); copy or download it again"
        ) from error


def _without_wrapper_prefix(state: StateDict) -> StateDict:
    for prefix in ("module.", "_orig_mod.", "module."):  # DataParallel, torch.compile, and one inside the other
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


# From tensors into a network


def load_weights(network: nn.Module, backbone_prefix: str, state: StateDict, source: str, key: str) -> LoadReport:
    """Copies what fits of `state` into a whole network.

    Args:
        network: the network; its tensors are overwritten in place.
        backbone_prefix: what the names of its backbone's tensors begin with.
        state: tensors by name.
        source: where they come from, for messages.
        key: the config key that asked for them.

    Returns:
        What was loaded and what was not. A head for other classes, or an absent one, stays at its initialisation.

    Raises:
        CheckpointError: nothing fits, or the backbone is another one.
    """
    report = _copy_matching(network, state, source, key, strips=("", "model.", "net."))
    _check_backbone(report, network, backbone_prefix, key)
    return report


def load_backbone_weights(backbone: nn.Module, state: StateDict, source: str, key: str) -> LoadReport:
    """Copies `state`, as the backbone's own library publishes it, into a backbone.

    Names are matched with and without the prefixes that libraries put before them. The classifier that such a file
    also holds is not used.

    Raises:
        CheckpointError: the file's tensors are not those of this backbone.
    """
    report = _copy_matching(
        backbone,
        state,
        source,
        key,
        strips=("", "features.", "backbone.", "encoder.", "encoder.model.", "model."),
        adds=("", "model."),  # timm's networks lie one level deeper inside smp's encoders
    )
    _check_backbone(report, backbone, "", key)
    return report


def _copy_matching(
    module: nn.Module, state: StateDict, source: str, key: str, strips: tuple[str, ...], adds: tuple[str, ...] = ("",)
) -> LoadReport:
    own = module.state_dict()
    spellings = list(_spellings(state, strips, adds))
    state = max(spellings, key=lambda spelled: _num_fitting(own, spelled))  # the first of the best
    loaded = tuple(name for name in own if name in state and state[name].shape == own[name].shape)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if parameters.isdisjoint(loaded):
        raise CheckpointError(
            f"{key}: {source} holds no tensor of this model (it has {_listed(list(state), 2)}, the model "
            f"{_listed(list(own), 2)}); give weights of this model, or a backbone's as model.weights_backbone"
        )
    module.load_state_dict({name: state[name] for name in loaded}, strict=False)
    return LoadReport(
        source=source,
        loaded=loaded,
        missing=tuple(name for name in own if name not in state),
        unexpected=tuple(name for name in state if name not in own),
        mismatched=tuple(name for name in own if name in state and state[name].shape != own[name].shape),
    )


def _spellings(state: StateDict, strips: tuple[str, ...], adds: tuple[str, ...]) -> Iterator[StateDict]:
    """The same tensors under the names that other libraries would give them."""
    for strip in strips:
        kept = {n.removeprefix(strip): v for n, v in state.items() if n.startswith(strip)}
        for add in adds:
            yield {add + name: value for name, value in kept.items()}
            if add:  # timm's feature extractors flatten `stages.0` to `stages_0`
                yield {add + re.sub(r"^([a-z]+)\.(\d+)", r"\1_\2", name): value for name, value in kept.items()}


def _num_fitting(own: Mapping[str, Tensor], state: StateDict) -> int:
    return sum(name in own and own[name].shape == value.shape for name, value in state.items())


def _check_backbone(report: LoadReport, module: nn.Module, prefix: str, key: str) -> None:
    """Refuses weights that cover a part of the backbone: they are another model's, and half of them is worth nothing.

    Weights without any tensor of the backbone's are somebody's head; that is fine.
    """
    names = [n for n, _ in module.named_parameters(remove_duplicate=False) if n.startswith(prefix)]
    absent = [n for n in names if n not in set(report.loaded)]
    if absent and (len(absent) < len(names) or not set(report.mismatched).isdisjoint(absent)):
        raise CheckpointError(
            f"{key}: {report.source} is of another backbone: {len(absent)} of {len(names)} tensors are missing or of "
            f"another shape, such as {_listed(absent, 2)}; give weights of this backbone, or change the model"
        )
