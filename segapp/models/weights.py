"""Pretrained weights: fetch files, read their tensors, load them into a network.

Files cannot run code: pickles are read with `weights_only=True`. `keys` maps tensor names; a `LoadReport` names the
tensors that a file does not have.
"""

import hashlib
import os
import pickle
import re
import socket
import sys
import threading
import urllib.request
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from segapp.errors import CheckpointError
from segapp.models.keys import KeyMap, Shapes, map_keys
from segapp.models.names import some_names
from segapp.models.surgery import RGB, adapt_first_conv, first_conv_name
from segapp.run.events import Weights

StateDict = dict[str, Tensor]

_WRAPPERS = ("model", "state_dict", "model_state_dict", "model_state", "network", "net", "module")
"""Keys under which training scripts store a state dict, the most likely first."""
MAX_NAMES = 100
"""Largest number of names of each kind in an event."""
_MAX_WRAPPERS = 4
"""Largest depth of nested state dicts."""

CONNECT_TIMEOUT_S = 2.0
"""Longest time in which a server must accept a connection, before a library tries again and again."""
HUB_FILE = "model.safetensors"
_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.")  # torch hub's convention: resnet50-0676ba61.pth


@dataclass(frozen=True)
class LoadReport:
    """Tensors that a weights file contributed to a network, by name.

    Attributes:
        source: the file or the weights' name.
        keys: the tensors copied into the network, and why the others were not.
    """

    source: str
    keys: KeyMap

    def lines(self) -> tuple[str, str]:
        r"""Return the report as two lines of text.

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
    shown = [f"{some_names(names)} ({reason})" for reason, names in groups.items()]
    return "; ".join(shown[:most]) + (f"; and {len(shown) - most} more reasons" if len(shown) > most else "")


def _refused(key: str, path: Path, reason: str, name: str | None = None) -> CheckpointError:
    """Return the error about a file that a config key, or a name as its value, asks for."""
    said = key if name is None else f"{key}={name}"
    return CheckpointError(f"{said}: {reason}", key=_config_key(key), value=name, path=path)


def _config_key(key: str) -> str | None:
    return key if "." in key else None  # "weights": a file of the command line


# From a name to a file


def looks_like_path(text: str) -> bool:
    """Return True if a `weights` value is a file: it exists, or has a folder or an extension."""
    return Path(text).is_file() or os.sep in text or "/" in text or bool(Path(text).suffix)


def fetch_url(url: str, name: str, key: str) -> Path:
    """Return the local file of a torchvision weights URL; downloaded into torch's hub folder if missing.

    Raises:
        CheckpointError: the file cannot be downloaded, or the local one is damaged.
    """
    filename = url.rsplit("/", 1)[-1]
    path = Path(torch.hub.get_dir()) / "checkpoints" / filename
    in_name = _HASH_IN_NAME.search(filename)
    sha256_prefix = in_name.group(1) if in_name else None
    if not path.exists():
        try:
            check_reachable(url)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), sha256_prefix, progress=sys.stderr.isatty())
        except (OSError, RuntimeError) as error:  # URLError and timeouts are OSError; RuntimeError: the hash is wrong
            raise _refused(
                key,
                path,
                f"{filename} is not on this machine and could not be downloaded from {_address(url)} "
                f"({_reason(error)}); put the file into {path.parent}, or give the path of a copy as {key}",
                name,
            ) from error
    elif sha256_prefix and not sha256_of(path, key).startswith(sha256_prefix):
        raise _refused(key, path, f"{path} is damaged (its sha256 is not {sha256_prefix}...); delete it", name)
    return path


def fetch_hub_file(repo_id: str, revision: str | None, name: str, key: str) -> Path:
    """Return the local file of encoder weights on the Hugging Face hub; downloaded if not cached.

    Raises:
        CheckpointError: the file is not cached and cannot be downloaded.
    """
    import huggingface_hub
    from huggingface_hub import constants

    cached = huggingface_hub.try_to_load_from_cache(repo_id, HUB_FILE, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    url = huggingface_hub.hf_hub_url(repo_id, HUB_FILE, revision=revision)
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        check_reachable(url)
        return Path(huggingface_hub.hf_hub_download(repo_id, filename=HUB_FILE, revision=revision))
    except Exception as error:  # the hub's client passes on exceptions of its HTTP library
        folder = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"
        raise _refused(
            key,
            folder,
            f"{HUB_FILE} of {repo_id} is not on this machine and could not be downloaded from "
            f"{_address(url)} ({_reason(error)}); copy {folder} from a machine that has it, or give the path of a copy "
            f"as {key}",
            name,
        ) from error


def cached_url(url: str) -> bool:
    """Return True if the file of a torchvision weights URL lies in torch's hub folder."""
    return (Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]).is_file()


def cached_hub_file(repo_id: str, revision: str | None) -> bool:
    """Return True if encoder weights lie in the Hugging Face cache."""
    import huggingface_hub

    return isinstance(huggingface_hub.try_to_load_from_cache(repo_id, HUB_FILE, revision=revision), str)


def check_reachable(url: str, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Check that the server of a URL, or the proxy that leads to it, accepts a connection.

    Args:
        url: with its scheme.
        timeout_s: includes the lookup of the server's name, which has no timeout of its own.

    Raises:
        OSError: it does not.
    """
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    server = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    results: list[OSError | None] = []

    def connect() -> None:
        try:
            socket.create_connection(server, timeout_s).close()
            results.append(None)
        except OSError as error:
            results.append(error)

    thread = threading.Thread(target=connect, name="segapp-connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not results:
        raise TimeoutError(f"no answer from {server[0]} within {timeout_s:g} s")
    if results[0] is not None:
        raise results[0]


def _address(url: str) -> str:
    return url.partition("://")[2]


def _reason(error: Exception) -> str:
    """Return an error's reason in one line, without URLs."""
    reason = getattr(error, "reason", None)
    lines = str(reason if reason is not None else error).strip().splitlines()
    return re.sub(r"https?://\S+", "the address", lines[0]) if lines else type(error).__name__


def sha256_of(path: Path, key: str) -> str:
    """Return the hexadecimal sha256 of a file.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _refused(key, path, f"{path} cannot be read ({error.strerror})") from error


# From a file to tensors


def read_weights_file(path: str | Path, key: str = "model.weights") -> StateDict:
    """Return the tensors of a weights file, on the CPU.

    Accepts a state dict saved by torch.save, alone or under `model` (a checkpoint of this project), `state_dict` and
    other usual keys; or a `.safetensors` file.

    Raises:
        CheckpointError: the file is missing or damaged, holds no tensors or several state dicts, or holds other
            objects than tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise _refused(key, path, f"no file {path}; give the path of a weights file")
    content: Any = _read_safetensors(path, key) if path.suffix.lower() == ".safetensors" else _read_torch(path, key)
    for _ in range(_MAX_WRAPPERS):
        if not isinstance(content, Mapping):
            break
        inner = [name for name in _WRAPPERS if isinstance(content.get(name), Mapping)]
        if not inner and not _tensors_in(content):
            inner = [name for name, value in content.items() if isinstance(value, Mapping) and _tensors_in(value)]
            if len(inner) > 1:
                names = some_names([str(name) for name in inner], 6)
                raise _refused(
                    key, path, f"{path} holds several state dicts ({names}); save the one that is meant alone"
                )
        if not inner:
            break
        content = content[inner[0]]
    if isinstance(content, Mapping) and (state := _tensors_in(content)):
        return state
    raise _refused(key, path, f"{path} holds no state dict; save one with torch.save(model.state_dict(), path)")


def read_metadata(path: Path, key: str = "model.weights") -> dict[str, str]:
    """Return the metadata of a safetensors file, text by name.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    from safetensors import safe_open

    if not path.is_file():
        raise _refused(key, path, f"no file {path}; give the path of a weights file")
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except Exception as error:  # as for its tensors
        raise _no_safetensors(path, key, error) from error


def _tensors_in(content: Mapping[Any, Any]) -> StateDict:
    return {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}


def load_tensors(file: BinaryIO) -> Any:
    """Return the tensors and plain values of a file of `torch.save`, on the CPU.

    torch writes archives without compression; one that unpacks to more than its size is refused as a memory bomb.

    Raises:
        CheckpointError: the file unpacks to more than its size.
        Exception: torch's own, of many types, for a file that is damaged or holds other objects.
    """
    _refuse_compressed(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about formats that are refused below
        return torch.load(file, map_location="cpu", weights_only=True)


def peek_tensors(path: Path) -> Any:
    """Return what `load_tensors` returns, the tensors mapped from the file and not read.

    Raises:
        Exception: as `load_tensors`.
    """
    with path.open("rb") as file:
        _refuse_compressed(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _refuse_compressed(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if zipfile.is_zipfile(file):
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        if any(e.compress_type != zipfile.ZIP_STORED for e in entries) or sum(e.file_size for e in entries) > size:
            raise CheckpointError(
                "the file is compressed and would unpack to more than its size; torch.save does not compress"
            )
    file.seek(0)


def _read_torch(path: Path, key: str) -> Any:
    try:
        with path.open("rb") as file:
            return load_tensors(file)
    except CheckpointError as error:
        raise _refused(key, path, f"{path}: {error}; save the tensors again with torch.save") from error
    except OSError as error:
        raise _refused(key, path, f"{path} cannot be read ({error.strerror or error})") from error
    except Exception as error:  # a damaged file shows as any of a dozen exceptions
        if isinstance(error, pickle.UnpicklingError) and "global" in str(error).lower():
            raise _refused(
                key,
                path,
                f"{path} holds more than tensors and plain values, and loading it would run code, so it was "
                f"not loaded; save the tensors alone with torch.save(model.state_dict(), path)",
            ) from error
        raise _refused(
            key, path, f"{path} is damaged or not a weights file ({type(error).__name__}); copy or download it again"
        ) from error


def _read_safetensors(path: Path, key: str) -> StateDict:
    from safetensors.torch import load_file

    try:
        return dict(load_file(path, device="cpu"))
    except Exception as error:  # as above
        raise _no_safetensors(path, key, error) from error


def _no_safetensors(path: Path, key: str, error: Exception) -> CheckpointError:
    return _refused(
        key, path, f"{path} is damaged or not a safetensors file ({type(error).__name__}); copy or download it again"
    )


# From tensors into a network


def load_weights(
    module: nn.Module,
    state: StateDict,
    source: str,
    key: str,
    backbone_prefix: str = "",
    *,
    is_partial: bool = False,
    in_channels: int = RGB,
) -> LoadReport:
    """Copy the matching tensors of `state` into a network or a backbone, in place.

    Args:
        module: a whole network, or a backbone alone.
        state: tensors by name; of the whole network in the naming of any library that `map_keys` knows, or of its
            backbone alone. The classifier in a backbone's file is not used.
        source: where the tensors are from, for messages.
        key: the config key that asked for them.
        backbone_prefix: prefix of the backbone's tensors in `module`; "" for a backbone alone.
        is_partial: take whatever matches, also of another backbone.
        in_channels: B of the network; the first convolution of a file for RGB is adapted to it.

    Returns:
        The loaded and the unused tensors. A missing head, or one for other classes, keeps its initialisation.

    Raises:
        CheckpointError: too few tensors match, or they are of another backbone.
    """
    own = module.state_dict()
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    found = {name: tuple(value.shape) for name, value in state.items()}
    try:
        wanted = {name: tuple(value.shape) for name, value in own.items()}
        keys, stem = _map_keys_and_stem(
            module, found, wanted, in_channels, backbone=backbone_prefix, optional=buffers, is_partial=is_partial
        )
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {source} {error}", key=_config_key(key), value=source) from None
    taken = {name: state[file_name] for name, file_name in keys.taken.items()}
    if stem is not None:
        taken[stem] = adapt_first_conv(taken[stem], in_channels)
        keys = replace(keys, convention=f"{keys.convention}, first convolution adapted from RGB to {in_channels} bands")
    module.load_state_dict(taken, strict=False)
    return LoadReport(source, keys)


def _map_keys_and_stem(
    module: nn.Module, found: Shapes, wanted: Shapes, in_channels: int, **options: Any
) -> tuple[KeyMap, str | None]:
    """Return the mapping, and the name of the first convolution's weight where the file has it for RGB instead."""
    name = None if in_channels == RGB else first_conv_name(module, in_channels)
    if name is None:
        return map_keys(found, wanted, **options), None
    stem = f"{name}.weight"
    problem: CheckpointError | None = None
    try:
        keys = map_keys(found, wanted, **options)
        if stem in keys.taken:
            return keys, None
    except CheckpointError as error:
        problem = error
    shape = wanted[stem]
    try:
        adapted = map_keys(found, {**wanted, stem: (shape[0], RGB, *shape[2:])}, **options)
    except CheckpointError:
        raise problem or AssertionError("unreachable: more tensors match than before") from None
    if stem in adapted.taken:
        return adapted, stem
    if problem is not None:
        raise problem
    return keys, None
