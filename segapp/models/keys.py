"""Map the tensors of a weights file to the tensors of a network, only by names and shapes.

Libraries use different prefixes for the same names, and timm's feature extractors join names and numbers. All such
renamings are tried; the one that matches the most tensors is used.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile
from typing import NamedTuple

from segapp.errors import CheckpointError, some_names
from segapp.run.events import Weights

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

MAX_NAMES = 100
AUXILIARY = "aux_classifier."
"""Prefix of the tensors of torchvision's auxiliary head, which only a training uses."""
_WRAPPERS = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")  # torch 0.3 had dots in names of modules
_CLASSIFIERS = ("fc", "_fc", "linear", "classifier", "head", "heads", "last_linear", "head_drop", "head_norm")
_OTHER_HEAD = "of another head"
_OTHER_HEADS = ("classifier", "aux_classifier", "decoder", "segmentation_head", "decode_head", "auxiliary_head")


@dataclass(frozen=True)
class KeyMap:
    """Mapping between the tensors of a file and of a network."""

    convention: str  # description of the renaming that was used
    taken: Mapping[str, str]  # name in the network -> name in the file
    left_out: Mapping[str, str]  # name in the file -> reason why it is not used
    missing: Mapping[str, str]  # name in the network -> reason why it keeps its initialization
    classifier: Collection[str] = ()  # the missing ones that differ from the file only in the number of classes
    further: Collection[str] = ()  # the names that tensors of another head would have in the network


@dataclass(frozen=True)
class LoadReport:
    """Tensors that a network got from a weights file, and why it did not get the others."""

    source: str
    keys: KeyMap
    random: tuple[str, ...] = ()
    """Parameters and running statistics that stay random, although they are required, because of `partial_weights`."""
    notes: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        r"""Return the report as two lines of text, and one for each note.

        >>> keys = KeyMap("its own names", {"conv.weight": "conv.weight"}, {"fc.bias": "of another head"}, {})
        >>> print(*LoadReport("a.pt", keys).lines(), sep="\n")
        weights a.pt: 1 of 1 tensors of the model taken (its own names)
        weights a.pt: left out fc.bias (of another head); nothing left at initialization
        """
        keys = self.keys
        num_wanted = len(keys.taken) + len(keys.missing)
        left_out = f"left out {_by_reason(keys.left_out)}" if keys.left_out else "nothing left out"
        missing = (
            f"left at initialization {_by_reason(keys.missing)}" if keys.missing else "nothing left at initialization"
        )
        return (
            f"weights {self.source}: {len(keys.taken)} of {num_wanted} tensors of the model taken ({keys.convention})",
            f"weights {self.source}: {left_out}; {missing}",
            *(f"weights {self.source}: {note}" for note in self.notes),
        )

    def as_event(self) -> Weights:
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


def random_modules(reports: Iterable[LoadReport]) -> list[str]:
    """Return the outermost modules that got nothing from weights files of which only a part was wanted."""
    given = {module for report in reports for name in report.keys.taken for module in modules_of(name)}
    random = [name for report in reports for name in report.random if name not in given]
    return list(dict.fromkeys(next(m for m in modules_of(name) if m not in given) for name in random))


class _Renaming(NamedTuple):
    """A file's tensors under the names of a network."""

    convention: str
    names: Mapping[str, str]  # in the network -> in the file


def map_keys(
    found: Shapes,
    wanted: Shapes,
    backbone: str = "",
    optional: Collection[str] = (),
    *,
    num_classes: int | None = None,
    fits: Callable[[str, Shape, Shape], bool] = lambda name, there, here: there == here,
) -> KeyMap:
    """Return the mapping between the tensors of a file and of a network.

    Args:
        found: shape of each tensor of the file.
        wanted: shape of each tensor of the network, or of only its backbone.
        backbone: prefix of the backbone's names in `wanted`, with the dot; "" if it is all backbone.
        optional: names in `wanted` that do not show whether the file belongs to the network.
        num_classes: C of the network; None: its classifier is not in `wanted`.
        fits: whether a tensor of the network, by name, can be made from one of the file, by their shapes.

    Raises:
        CheckpointError: no tensor matches, or the file has several networks that match equally well. The message is the
            rest of a sentence that begins with the file's name.

    Example:
        >>> file = {"module.fc.weight": (9, 4), "module.conv1.weight": (4, 3, 7, 7)}
        >>> mapped = map_keys(file, {"backbone.conv1.weight": (4, 3, 7, 7), "head.weight": (2, 4)}, "backbone.")
        >>> mapped.taken, mapped.left_out
        ({'backbone.conv1.weight': 'module.conv1.weight'}, {'module.fc.weight': "the backbone's own classifier"})
    """
    renaming, taken = _best_renaming(found, wanted, backbone, fits)
    if not any(name not in optional for name in taken):
        raise CheckpointError(
            f"holds no tensor of this model (it has {some_names(found)}, the model {some_names(wanted)}"
            f"{_nearest(found, wanted)}); give weights of this model, or a backbone's as model.weights_backbone"
        )
    pairs = {
        name: (found[file_name], wanted[name])
        for name, file_name in renaming.names.items()
        if name in wanted and name not in taken
    }
    shapes = {name: f"{_by(there)} there, {_by(here)} here" for name, (there, here) in pairs.items()}
    classes = _other_classes(list(pairs.values()), num_classes)
    if classes is not None:
        shapes = dict.fromkeys(pairs, f"for {classes} classes there, {num_classes} here")
    used = set(taken.values())
    targets = {name: target for target, name in renaming.names.items()}
    left_out = {
        name: shapes.get(targets.get(name, "")) or _unused_reason(name, targets.get(name), backbone)
        for name in found
        if name not in used
    }
    missing = {name: shapes.get(name, "not in the file") for name in wanted if name not in taken}
    further = [targets[name] for name, reason in left_out.items() if reason == _OTHER_HEAD]
    return KeyMap(renaming.convention, taken, left_out, missing, () if classes is None else tuple(pairs), further)


def check_complete(keys: KeyMap, found: Shapes, required: Sequence[str], backbone: str, *, is_trained: bool) -> None:
    """Raise CheckpointError if a file does not give each of the `required` tensors of a network, or of its backbone.

    If the network `is_trained` next, the file may have another number of classes: the classifier is left out. The
    message is the rest of a sentence that begins with the file's name.
    """
    lacking = [n for n in required if n in keys.missing and not (is_trained and n in keys.classifier)]
    what = "backbone" if all(name.startswith(backbone) for name in required) else "model"
    advice = ", or set model.partial_weights: true to take what matches" if is_trained else ""
    if lacking:
        problem = f"lacks {len(lacking)} of the {len(required)} tensors of this {what}, such as {lacking[0]} "
        problem += f"({keys.missing[lacking[0]]})"
        if any(name.startswith(backbone) for name in lacking):
            raise CheckpointError(f"{problem}; give weights of this {what}, change the model{advice}")
        key = "model.weights" if set(lacking) <= {*keys.classifier} else "model.weights_backbone"
        raise CheckpointError(f"{problem}; train with it as {key}{advice}")
    taken = {name: there for name, there in keys.taken.items() if name.startswith(backbone)}
    # All tensors are there, but the last block would get the weights of one in the middle.
    if further := _further_blocks(taken, found):
        problem = f"is of a deeper backbone, with further blocks: {some_names(further)}"
        raise CheckpointError(f"{problem}; give weights of this {what}, change the model{advice}")
    if what == "model" and keys.further:
        problem = f"is of a larger head, with further tensors: {some_names([*keys.further])}"
        raise CheckpointError(f"{problem}; give weights of this {what}, change the model{advice}")


def modules_of(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a tensor, the outermost first, and its own.

    >>> list(modules_of("encoder.layer1.weight"))
    ['encoder', 'encoder.layer1', 'encoder.layer1.weight']
    """
    return accumulate(name.split("."), lambda outer, inner: f"{outer}.{inner}")


def _best_renaming(
    found: Shapes, wanted: Shapes, backbone: str, fits: Callable[[str, Shape, Shape], bool]
) -> tuple[_Renaming, dict[str, str]]:
    """Return the first renaming with the most matches, and these; refuse a file if another matches other tensors."""
    best, best_taken = _Renaming("its own names", {}), dict[str, str]()
    rival: Mapping[str, str] | None = None
    for renaming in _renamings(found, wanted, backbone):
        pairs = ((name, renaming.names[name]) for name in wanted if name in renaming.names)
        taken = {name: there for name, there in pairs if fits(name, found[there], wanted[name])}
        if len(taken) > len(best_taken):
            best, best_taken, rival = renaming, taken, None
        # The same tensors under two names are no second model.
        elif taken and len(taken) == len(best_taken) and set(taken.values()).isdisjoint(best_taken.values()):
            rival = taken
    if rival is not None:
        pair = " and ".join(next(iter(names.values())) for names in (best_taken, rival))
        raise CheckpointError(
            f"holds several models that fit equally well (tensors such as {pair}): save only the one you want, "
            "with torch.save"
        )
    return best, best_taken


def _renamings(found: Shapes, wanted: Shapes, backbone: str) -> Iterator[_Renaming]:
    inside = [name for name in wanted if name.startswith(backbone)]
    adds = dict.fromkeys(["", *_shared_prefixes(list(wanted)), *_shared_prefixes(inside)])
    for strip in _prefixes(found):
        inner = {_WRAPPERS.sub("", n.removeprefix(strip)): n for n in found if n.startswith(strip)}
        for add in adds:
            names = {_spelled(add, name, wanted): file_name for name, file_name in inner.items()}
            where = f"{strip or 'no prefix'} there, {add or 'no prefix'} here" if strip != add else "the same names"
            yield _Renaming(where, names)


def _shared_prefixes(names: Sequence[str]) -> list[str]:
    """Return the prefixes that all names share: the backbone's, and a wrapper's around a network of a library.

    >>> _shared_prefixes(["encoder.model.stem.weight", "encoder.model.stem.bias", "encoder.model.norm.weight"])
    ['encoder.', 'encoder.model.']
    """
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)  # the first modules, the second ones, ...
    shared = [f"{level[0]}." for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    return list(accumulate(shared))


def _spelled(add: str, name: str, wanted: Shapes) -> str:
    """Return the name in the network for one in a file: timm's feature extractors have `stages_0` for `stages.0`."""
    name = add + _OLD_DENSENET.sub(r"\1\2", name)
    joined = add + name.removeprefix(add).replace(".", "_", 1)
    return joined if name not in wanted and joined in wanted else name


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


def _nearest(found: Shapes, wanted: Shapes) -> str:
    """Return a text with the file's name that is closest to one of the network's, and shapes; "" if none is close."""
    for name in list(wanted)[:8]:
        near = difflib.get_close_matches(name, list(found)[:2000], n=1, cutoff=0.5)
        if near:
            return f"; nearest: {near[0]} ({_by(found[near[0]])}) there, {name} ({_by(wanted[name])}) here"
    return ""


def _other_classes(pairs: Sequence[tuple[Shape, Shape]], num_classes: int | None) -> int | None:
    """Return the number of classes of a file if different shapes, there and here, differ only in it; else None.

    >>> _other_classes([((19, 64, 1, 1), (5, 64, 1, 1)), ((19,), (5,))], num_classes=5)
    19
    """
    outputs = {(there[:1], here[:1]) for there, here in pairs if there[1:] == here[1:]}
    if num_classes is None or len(outputs) != 1 or any(there[1:] != here[1:] or not there for there, here in pairs):
        return None
    ((there,), (here,)) = outputs.pop()
    extra = here - num_classes  # EoMT has one output more than classes, for "no object"
    return there - extra if extra in (0, 1) else None


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _unused_reason(name: str, target: str | None, backbone: str) -> str:
    if target is None:
        return "of another part of the file"
    first = re.sub(r"^(?:model\.)+", "", target.removeprefix(backbone)).partition(".")[0]
    if first in _CLASSIFIERS and (target.startswith(backbone) or not backbone):
        return "the backbone's own classifier"
    if first == AUXILIARY.rstrip("."):
        return "this model has no auxiliary head (model.aux)"
    return _OTHER_HEAD if first in _OTHER_HEADS else "this model has no such tensor"
