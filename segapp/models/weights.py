"""Pretrained weights: fetch files, read their tensors, load them into a network.

Files cannot run code: pickles are read with `weights_only=True`. `keys` maps tensor names and says which tensors a
network requires.
"""

import contextlib
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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import torch
from torch import Tensor

from segapp.bounds import allowed_bytes, check_values
from segapp.errors import CheckpointError, some_names
from segapp.models.keys import AUXILIARY, LoadReport, Shape, check_complete, map_keys
from segapp.models.network import SegmentationModel
from segapp.models.surgery import RGB, fitted, position_grids
from segapp.run.folder import is_run

StateDict = dict[str, Tensor]

_WRAPPERS = ("model", "state_dict", "model_state_dict", "model_state", "network", "net", "module")
"""Keys under which training scripts store a state dict, the most likely first; up to four may be nested."""
_MAX_VALUES = 2**22  # in a file of tensors; a state of ten thousand tensors has two hundred thousand
HUB_FILE = "model.safetensors"
"""File of weights on the Hugging Face hub, and in a folder of `save_pretrained`."""
BACKBONE_KEY = "model.weights_backbone"
CONFIG_KEY = "config"
"""Key of the complete config, as JSON, in a safetensors file's metadata."""


def _refused(key: str, path: Path, reason: str, name: str | None = None) -> CheckpointError:
    """Return the error about a file that a config key, or a name as its value, refers to."""
    said = key if name is None else f"{key}={name}"
    return CheckpointError(f"{said}: {reason}", key=_config_key(key), value=name, path=path)


def _config_key(key: str) -> str | None:
    return key if "." in key else None  # "weights": a file of the command line


def fetch_url(url: str, name: str, key: str) -> Path:
    """Return the local file of a torchvision weights URL; downloaded to torch's hub folder if missing."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
    in_name = re.search(r"-([0-9a-f]{8,})\.", path.name)  # torch hub's convention: resnet50-0676ba61.pth
    sha256_prefix = in_name.group(1) if in_name else None
    if not path.exists():
        try:
            check_reachable(url)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), sha256_prefix, progress=sys.stderr.isatty())
        except (OSError, RuntimeError) as error:  # URLError and timeouts are OSError; RuntimeError: the hash is wrong
            advice = f"put the file into {path.parent}"
            raise _refused(key, path, _not_fetched(path.name, url, error, advice, key), name) from error
    elif sha256_prefix and not sha256_of(path, key).startswith(sha256_prefix):
        raise _refused(key, path, f"{path} is damaged (its sha256 is not {sha256_prefix}...); delete it", name)
    return path


def fetch_hub_file(repo_id: str, revision: str | None, name: str, key: str) -> Path:
    """Return the local file of encoder weights on the Hugging Face hub; downloaded if not cached."""
    import huggingface_hub
    from huggingface_hub import constants

    if (cached := _cached_hub_file(repo_id, revision)) is not None:
        return cached
    try:
        _reachable_hub_url(repo_id, revision)
        return Path(huggingface_hub.hf_hub_download(repo_id, filename=HUB_FILE, revision=revision))
    except Exception as error:  # the hub's client passes on exceptions of its HTTP library
        folder = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"
        advice = f"copy {folder} from a machine that has it"
        url = huggingface_hub.hf_hub_url(repo_id, HUB_FILE, revision=revision)
        raise _refused(key, folder, _not_fetched(f"{HUB_FILE} of {repo_id}", url, error, advice, key), name) from error


def check_reachable(url: str, timeout_s: float = 2.0) -> None:
    """Raise OSError if the server of a URL, or the proxy that leads to it, does not accept a connection.

    Otherwise libraries retry for a long time. The timeout includes the lookup of the name, which has no timeout itself.
    """
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        # Behind a proxy, only the proxy can be reached.
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    server = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    outcome: list[OSError | None] = [TimeoutError(f"no answer from {server[0]} within {timeout_s:g} s")]

    def connect() -> None:
        try:
            socket.create_connection(server, timeout_s).close()
            outcome[0] = None
        except OSError as error:
            outcome[0] = error

    thread = threading.Thread(target=connect, name="segapp-connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if outcome[0] is not None:
        raise outcome[0]


def hub_problem(repo_id: str, revision: str | None, timeout_s: float = 10.0) -> str | None:
    """Return why the weights of a repository on the Hugging Face hub cannot be had; None if they can.

    They can if they are cached, or if the hub names the commit of the file within the timeout, which a page that asks
    for a login does not.
    """
    import huggingface_hub

    outcome: list[str | None] = [f"no answer within {timeout_s:g} s"]

    def ask() -> None:
        try:
            if _cached_hub_file(repo_id, revision) is None:
                found = huggingface_hub.get_hf_file_metadata(_reachable_hub_url(repo_id, revision))
                outcome[0] = None if found.commit_hash and found.etag else "the answer is not from a hub"
            else:
                outcome[0] = None
        except Exception as error:  # as in `fetch_hub_file`
            outcome[0] = _reason(error)

    thread = threading.Thread(target=ask, name="segapp-hub", daemon=True)  # a server may send a byte now and then
    thread.start()
    thread.join(timeout_s)
    return outcome[0]


def _cached_hub_file(repo_id: str, revision: str | None) -> Path | None:
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(repo_id, HUB_FILE, revision=revision)
    return Path(cached) if isinstance(cached, str) else None


def _reachable_hub_url(repo_id: str, revision: str | None) -> str:
    """Return the address of the weights; raise OSError if the hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set")
    url = huggingface_hub.hf_hub_url(repo_id, HUB_FILE, revision=revision)
    check_reachable(url)
    return url


def _not_fetched(what: str, url: str, error: Exception, advice: str, key: str) -> str:
    return (
        f"{what} is not on this machine and could not be downloaded from {url.partition('://')[2]} ({_reason(error)}); "
        f"{advice}, or give the path of a copy as {key}"
    )


def _reason(error: Exception) -> str:
    lines = str(getattr(error, "reason", None) or error).strip().splitlines()
    return re.sub(r"https?://\S+", "the address", lines[0]) if lines else type(error).__name__


def sha256_of(path: Path, key: str) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _refused(key, path, f"{path} cannot be read ({error.strerror})") from error


def weights_path(path: str | Path) -> Path:
    """Return the path of a weights file, in a folder of `save_pretrained` the one with the tensors."""
    inside = Path(path) / HUB_FILE
    return inside if inside.is_file() and not is_run(path) else Path(path)


def read_weights_file(path: str | Path, key: str = "model.weights") -> StateDict:
    """Return the tensors of a weights file, on the CPU.

    Accepts a state dict saved by torch.save, directly or under `model` (a segapp checkpoint), `state_dict` and other
    common keys; or a `.safetensors` file, also by the folder of `save_pretrained`. An average under `ema` is preferred.

    Raises:
        CheckpointError: the file is missing or damaged, has no tensors or several state dicts, or has objects other
            than tensors and plain values.
    """
    path = weights_path(path)
    if path.suffix.lower() == ".safetensors":
        from safetensors.torch import load_file

        with _reading(path, key, "safetensors"):
            content: Any = load_file(path, device="cpu")
    else:
        content = _read_torch(path, key)
    average = content.get("ema") if isinstance(content, Mapping) else None
    content = average if isinstance(average, Mapping) and "module" in average else content
    # A bound, because a pickled dict may contain itself.
    for _ in range(4):
        if not isinstance(content, Mapping):
            break
        inner = [name for name in _WRAPPERS if isinstance(content.get(name), Mapping)]
        # No key is a usual one: the only dict of tensors is meant.
        if not inner and not _tensors_in(content):
            inner = [name for name, value in content.items() if isinstance(value, Mapping) and _tensors_in(value)]
            if len(inner) > 1:
                names = some_names([str(name) for name in inner], 6)
                raise _refused(key, path, f"{path} holds several state dicts ({names}); save only the one you want")
        if not inner:
            break
        content = content[inner[0]]
    if isinstance(content, Mapping) and (state := _tensors_in(content)):
        return state
    raise _refused(key, path, f"{path} holds no state dict; save one with torch.save(model.state_dict(), path)")


def read_metadata(path: Path, key: str = "model.weights") -> dict[str, str]:
    from safetensors import safe_open

    with _reading(path, key, "safetensors"), safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def _tensors_in(content: Mapping[Any, Any]) -> StateDict:
    return {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}


def load_tensors(file: BinaryIO) -> Any:
    """Return the tensors and plain values in a file of `torch.save`, on the CPU.

    torch writes archives without compression; an archive that unpacks to more than its size is refused as a memory
    bomb.

    Raises:
        CheckpointError: the file unpacks to more than its size.
        Exception: torch's own, of many types, if a file is damaged or contains other objects.
    """
    size = _refuse_compressed(file)
    return _loaded(file, size)


def load_mapped_tensors(file: BinaryIO) -> Any:
    """Do the same as `load_tensors`, with the tensors mapped from the file: pages are read when they are used.

    The tensors need no memory, and processes on one machine share their pages. If the file system or the operating
    system cannot map the file, the tensors are read.
    """
    size = _refuse_compressed(file)
    try:
        return _loaded(Path(f"/dev/fd/{file.fileno()}"), size, mmap=True)
    except (OSError, RuntimeError):
        file.seek(0)
        return _loaded(file, size)


def peek_tensors(path: Path) -> Any:
    """Do the same as `load_tensors`, with the tensors mapped from the file and not read."""
    with path.open("rb") as file:
        return load_mapped_tensors(file)


def _loaded(file: BinaryIO | Path, num_bytes: int, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about formats that are refused
        content = torch.load(file, map_location="cpu", weights_only=True, **options)
    try:
        check_values(content, min(num_bytes, _MAX_VALUES), allowed_bytes(file_bytes=num_bytes))
    except ValueError as error:
        raise CheckpointError(f"the file cannot be used: {error}; save the tensors again with torch.save") from None
    return content


def _refuse_compressed(file: BinaryIO) -> int:
    """Return the size of a file in bytes; raise CheckpointError if it unpacks to more."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if zipfile.is_zipfile(file):
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        if any("/code/" in entry.filename for entry in entries):
            raise CheckpointError(
                "it is a program of TorchScript: save its weights with "
                "torch.save(dict(torch.jit.load(path).state_dict()), new_path)"
            )
        if any(e.compress_type != zipfile.ZIP_STORED for e in entries) or sum(e.file_size for e in entries) > size:
            raise CheckpointError(
                "the file is compressed and would unpack to more than its size: "
                "save it again with torch.save, which does not compress"
            )
    file.seek(0)
    return size


def _read_torch(path: Path, key: str) -> Any:
    with _reading(path, key, "weights"):
        try:
            with path.open("rb") as file:
                return load_tensors(file)
        except CheckpointError as error:
            raise _refused(key, path, f"{path}: {error}") from error
        except pickle.UnpicklingError as error:
            if "global" not in str(error).lower():
                raise
            raise _refused(
                key,
                path,
                f"{path} holds more than tensors and plain values, and loading it would run code, so it was "
                f"not loaded; save only the tensors with torch.save(model.state_dict(), path)",
            ) from error


@contextlib.contextmanager
def _reading(path: Path, key: str, kind: str) -> Iterator[None]:
    """Turn the exceptions of a reader for a missing or damaged file, of any type, into CheckpointErrors."""
    if not path.is_file():
        raise _refused(key, path, f"no file {path}; give the path of a weights file")
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        problem = f"is damaged or not a {kind} file ({type(error).__name__}); copy or download it again"
        if isinstance(error, OSError):
            problem = f"cannot be read ({error.strerror or error})"
        raise _refused(key, path, f"{path} {problem}") from error


def load_weights(
    model: SegmentationModel, state: StateDict, source: str, key: str, *, is_partial: bool = False
) -> None:
    """Copy the matching tensors of `state` into a network or its backbone, in place, and record the report.

    Every parameter and every running statistic is required. Counters and tables of indices, which the network computes,
    may be missing, and so may an auxiliary head and, for a training, the classifier of a file with other classes. They
    keep their initialization.

    Args:
        model: the network.
        state: tensors by name, of the network or its backbone, in any naming that `map_keys` knows.
        source: origin of the tensors, for messages.
        key: the config key that refers to them; for `model.weights_backbone`, only the backbone gets tensors.
        is_partial: load all tensors that match, also from another network.

    Raises:
        CheckpointError: required tensors are missing, or have values that no training can begin with.
    """
    backbone, in_channels, is_whole = model.backbone_prefix, model.in_channels, key != BACKBONE_KEY
    own = {n: value for n, value in model.state_dict(keep_vars=True).items() if is_whole or n.startswith(backbone)}
    counters = {name for name, value in own.items() if not value.is_floating_point()}
    found, wanted = ({name: tuple(value.shape) for name, value in each.items()} for each in (state, own))
    grids = position_grids(model)

    def fit(name: str, value: Tensor) -> Tensor | None:
        bands = in_channels if name.startswith(backbone) else RGB  # no other convolution sees the image
        return fitted(value, wanted[name], bands, grids.get(name))

    def fits(name: str, there: Shape, here: Shape) -> bool:
        return there == here or fit(name, torch.empty(there, device="meta")) is not None

    try:
        num_classes = model.num_classes if is_whole else None
        keys = map_keys(found, wanted, backbone, counters, num_classes=num_classes, fits=fits)
        # A module that is used at several places has a name for each, of which a file may hold one.
        given = {id(own[name]) for name in keys.taken}
        keys = replace(keys, missing={n: reason for n, reason in keys.missing.items() if id(own[n]) not in given})
        heads = tuple(f"{name}." for name, _ in model.named_children())
        keys = replace(keys, further=[name for name in keys.further if name.startswith(heads)])
        if not is_partial:
            required = [name for name in own if name not in counters and not name.startswith(AUXILIARY)]
            check_complete(keys, found, required, backbone, is_trained=_config_key(key) is not None)
        taken = {name: value for name, there in keys.taken.items() if (value := fit(name, state[there])) is not None}
        _check_values(taken, own)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {source} {error}", key=_config_key(key), value=source) from None
    changed = [name for name, there in keys.taken.items() if found[there] != wanted[name]]
    for names, how in (
        ([name for name in changed if name not in grids], f"adapted from RGB to {in_channels} bands"),
        ([name for name in changed if name in grids], "resampled to the grid of this model"),
    ):
        if names:
            keys = replace(keys, convention=f"{keys.convention}, {some_names(names)} {how}")
    model.load_state_dict(taken, strict=False)  # of the whole model: some encoders of smp override theirs
    random = tuple(name for name in keys.missing if is_partial and name not in counters)
    model.load_reports += (LoadReport(source, keys, random),)


def _check_values(taken: StateDict, own: StateDict) -> None:
    """Raise CheckpointError for values other than floats, as of quantized weights, and for NaN or infinite ones."""
    for name, value in taken.items():
        if not own[name].is_floating_point():
            continue
        if not value.is_floating_point() or value.layout != torch.strided:
            kind = value.layout if value.layout != torch.strided else value.dtype
            raise CheckpointError(f"has {kind} as {name}, for floats: save the weights before they are converted")
        is_finite = value.to(own[name].dtype).isfinite()
        if not is_finite.all() and not (is_finite | ~own[name].isfinite()).all():  # of some networks, inf means unset
            raise CheckpointError(f"has NaN or infinite values in {name}: give weights from before they diverged")
