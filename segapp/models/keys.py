"""Map the tensors of a weights file to the tensors of a network, only by names and shapes.

Libraries use different prefixes for the same names, and timm's feature extractors join names and numbers. All such
renamings are tried; the one that matches the most tensors is used.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from segapp.errors import CheckpointError, some_names

Shapes = Mapping[str, tuple[int, ...]]

_WRAPPERS = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_CLASSIFIERS = ("fc", "classifier", "head", "heads", "last_linear", "head_drop", "head_norm")
_OTHER_HEADS = ("classifier", "aux_classifier", "decoder", "segmentation_head", "decode_head", "auxiliary_head")


@dataclass(frozen=True)
class KeyMap:
    """Mapping between the tensors of a file and of a network."""

    convention: str  # description of the renaming that was used
    taken: Mapping[str, str]  # name in the network -> name in the file
    left_out: Mapping[str, str]  # name in the file -> reason why it is not used
    missing: Mapping[str, str]  # name in the network -> reason why it keeps its initialization


class _Renaming(NamedTuple):
    """A file's tensors under the names of a network."""

    convention: str
    names: Mapping[str, str]  # in the network -> in the file


def map_keys(
    found: Shapes, wanted: Shapes, backbone: str = "", optional: Collection[str] = (), *, is_partial: bool = False
) -> KeyMap:
    """Return the mapping between the tensors of a file and of a network.

    Args:
        found: shape of each tensor of the file.
        wanted: shape of each tensor of the network, or of only its backbone.
        backbone: prefix of the backbone's names in `wanted`, with the dot; "" if it is all backbone.
        optional: names in `wanted` that older or other programs do not save (buffers).
        is_partial: accept any matching tensors, also a part of a backbone or of a head.

    Raises:
        CheckpointError: too few tensors match, they belong to another backbone, or the file has several networks that
            match equally well. The message is the rest of a sentence that begins with the file's name.

    Example:
        >>> file = {"module.fc.weight": (9, 4), "module.conv1.weight": (4, 3, 7, 7)}
        >>> mapped = map_keys(file, {"backbone.conv1.weight": (4, 3, 7, 7), "head.weight": (2, 4)}, "backbone.")
        >>> mapped.taken, mapped.left_out
        ({'backbone.conv1.weight': 'module.conv1.weight'}, {'module.fc.weight': "the backbone's own classifier"})
    """
    renaming = _best_renaming(found, wanted, backbone)
    taken = _fitting(renaming, found, wanted)
    if not any(name not in optional for name in taken):
        raise CheckpointError(
            f"holds no tensor of this model (it has {some_names(found)}, the model {some_names(wanted)}"
            f"{_nearest(found, wanted)}); give weights of this model, or a backbone's as model.weights_backbone"
        )
    if not is_partial:
        own = [name for name in wanted if name not in optional]
        has_backbone = bool(backbone) and any(name.startswith(backbone) for name in renaming.names)
        _check_backbone(taken, found, [name for name in own if name.startswith(backbone)], has_backbone)
        if not any(name.startswith(backbone) for name in taken):
            _check_head(taken, found, wanted, [name for name in own if not name.startswith(backbone)])
    shapes = _shape_reasons(renaming, found, wanted, backbone)
    used = set(taken.values())
    targets = {name: target for target, name in renaming.names.items()}
    left_out = {
        name: shapes.get(targets.get(name, "")) or _unused_reason(name, targets.get(name), backbone)
        for name in found
        if name not in used
    }
    missing = {name: shapes.get(name, "not in the file") for name in wanted if name not in taken}
    return KeyMap(renaming.convention, taken, left_out, missing)


def _best_renaming(found: Shapes, wanted: Shapes, backbone: str) -> _Renaming:
    """Return the first renaming with the most matches; refuse a file if another one matches as many other tensors."""
    best, best_taken = _Renaming("its own names", {}), dict[str, str]()
    rival: Mapping[str, str] | None = None
    for renaming in _renamings(found, wanted, backbone):
        taken = _fitting(renaming, found, wanted)
        if len(taken) > len(best_taken):
            best, best_taken, rival = renaming, taken, None
        elif taken and len(taken) == len(best_taken) and set(taken.values()).isdisjoint(best_taken.values()):
            rival = taken
    if rival is not None:
        pair = " and ".join(next(iter(names.values())) for names in (best_taken, rival))
        raise CheckpointError(
            f"holds several models that fit equally well (tensors such as {pair}): save only the one you want, "
            "with torch.save"
        )
    return best


def _renamings(found: Shapes, wanted: Shapes, backbone: str) -> Iterator[_Renaming]:
    deeper = backbone + "model."  # smp's encoders hold timm's networks in `model`
    adds = ["", *([backbone] if backbone else []), *([deeper] if any(n.startswith(deeper) for n in wanted) else [])]
    for strip in _prefixes(found):
        inner = {_WRAPPERS.sub("", n.removeprefix(strip)): n for n in found if n.startswith(strip)}
        for add in adds:
            where = f"{strip or 'no prefix'} there, {add or 'no prefix'} here" if strip != add else "the same names"
            yield _Renaming(where, {add + name: file_name for name, file_name in inner.items()})
            # timm's feature extractors have `stages_0` for `stages.0`.
            flattened = {add + re.sub(r"^([a-z]+)\.(\d+)", r"\1_\2", name): n for name, n in inner.items()}
            if flattened.keys() != {add + name for name in inner}:
                yield _Renaming(f"{where}, numbers after an underscore", flattened)


def _prefixes(found: Shapes) -> list[str]:
    """Return prefixes of the file's names, "" first: module names without numbers, at most four deep."""
    prefixes = dict.fromkeys([""])
    for name in found:
        parts = name.split(".")[:-1]
        for depth in range(1, min(len(parts), 4) + 1):
            if parts[depth - 1].isdecimal():
                break
            prefixes[".".join(parts[:depth]) + "."] = None
    return list(prefixes)


def _fitting(renaming: _Renaming, found: Shapes, wanted: Shapes) -> dict[str, str]:
    names = renaming.names
    return {name: names[name] for name in wanted if name in names and found[names[name]] == wanted[name]}


def _check_backbone(taken: Mapping[str, str], found: Shapes, own: Sequence[str], has_backbone: bool) -> None:
    """Raise CheckpointError if the file's backbone matches only in part; without a backbone, a head is enough."""
    absent = [name for name in own if name not in taken]
    if absent and (has_backbone or len(absent) < len(own)):
        problem = f"{len(absent)} of {len(own)} tensors are missing or of another shape, such as {some_names(absent)}"
    elif not absent and (further := _further_blocks({n: taken[n] for n in own}, found)):
        problem = f"it has further blocks: {some_names(further)}"
    else:
        return
    raise CheckpointError(
        f"is of another backbone: {problem}; give weights of this backbone, change the "
        "model, or set model.partial_weights: true to take what matches"
    )


def _further_blocks(taken: Mapping[str, str], found: Shapes) -> list[str]:
    """Return blocks of the file between the loaded ones, because a ResNet-34 has all names of a ResNet-18.

    Blocks after the last loaded one are ignored: modules that a network never runs were removed from it.
    """
    last_of_list: dict[str, int] = {}
    last_of_kind: dict[str, tuple[int, ...]] = {}
    for name in taken.values():
        for list_name, kind, numbers in _list_indices(name):
            last_of_list[list_name] = max(numbers[-1], last_of_list.get(list_name, -1))
            last_of_kind[kind] = max(numbers, last_of_kind.get(kind, ()))
    used = set(taken.values())
    return [
        name
        for name in found
        if name not in used
        and any(
            list_name in last_of_list and numbers[-1] > last_of_list[list_name] and numbers < last_of_kind[kind]
            for list_name, kind, numbers in _list_indices(name)
        )
    ]


def _list_indices(name: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield each list index in a name: `layer1.2.conv1.weight` -> ("layer1.", "layer#.#", (1, 2))."""
    for at in re.finditer(r"(?<=\.)\d+(?=\.)", name):
        head = name[: at.end()]
        yield name[: at.start()], re.sub(r"\d+", "#", head), tuple(map(int, re.findall(r"\d+", head)))


def _check_head(taken: Mapping[str, str], found: Shapes, wanted: Shapes, own: Collection[str]) -> None:
    """Raise CheckpointError if a file without a backbone has less than half of the head."""
    num_taken = sum(name in taken for name in own)
    if num_taken >= len(own) / 2:
        return
    raise CheckpointError(
        f"gives {num_taken} of the {len(own)} tensors of this model's head and none of its backbone"
        f"{_nearest(found, [n for n in wanted if n not in taken])}: too few to load; give weights of "
        "this model, or a backbone's as model.weights_backbone"
    )


def _nearest(found: Shapes, names: Collection[str]) -> str:
    """Return a text with the file's name that is closest to one of the network's; "" if none is close."""
    for name in list(names)[:8]:
        near = difflib.get_close_matches(name, list(found)[:2000], n=1, cutoff=0.5)
        if near:
            return f"; nearest: {near[0]} there, {name} here"
    return ""


def _shape_reasons(renaming: _Renaming, found: Shapes, wanted: Shapes, backbone: str) -> dict[str, str]:
    """Return name in the network -> difference of the shapes, for equal names with different shapes."""
    pairs = {
        name: (found[file_name], wanted[name])
        for name, file_name in renaming.names.items()
        if name in wanted and found[file_name] != wanted[name]
    }
    counts = {(there[:1], here[:1]) for there, here in pairs.values() if there[1:] == here[1:]}
    is_classes = len(counts) == 1 and all(there[1:] == here[1:] and there for there, here in pairs.values())
    if is_classes and not any(backbone and name.startswith(backbone) for name in pairs):
        return {name: f"for {there[0]} classes there, {here[0]} here" for name, (there, here) in pairs.items()}
    return {name: f"{_by(there)} there, {_by(here)} here" for name, (there, here) in pairs.items()}


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _unused_reason(name: str, target: str | None, backbone: str) -> str:
    first = (name if target is None else target.removeprefix(backbone).removeprefix("model.")).partition(".")[0]
    if target is None:
        return "of another part of the file"
    if first in _CLASSIFIERS and (target.startswith(backbone) or not backbone):
        return "the backbone's own classifier"
    if first == "aux_classifier":
        return "this model has no auxiliary head (model.aux)"
    return "of another head" if first in _OTHER_HEADS else "this model has no such tensor"
