"""The blocks of a network: modules whose activations can be recomputed in the backward pass instead of kept."""

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from segapp.compat.torch import BatchOrInstanceNorm
from segapp.errors import ConfigError
from segapp.models.names import unknown_name

MOST_LAYERS = 8
"""A module with more weights of two or more dimensions is a stage; if it contains blocks, these are used instead."""

CHECKPOINT_BLOCKS = "checkpoint_blocks"
"""Attribute of a custom network: the names of its blocks, or patterns of names, relative to the network."""


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a network by name, in the order of definition; no block lies within another.

    A block is one of several modules of the same class and parent, with two layers or more, such as the residual blocks
    of a ResNet or the layers of a transformer. Plain containers (`nn.Sequential` and its subclasses) are not blocks;
    for a stage, its blocks are used. A custom network can name its blocks in an attribute `checkpoint_blocks`.

    Raises:
        ConfigError: `checkpoint_blocks` names no module of the network.
    """
    for name, part in model.named_modules():
        wanted = getattr(part, CHECKPOINT_BLOCKS, None)
        if isinstance(wanted, Sequence) and not isinstance(wanted, str):
            inner = {each: block for each, block in part.named_modules() if each}
            chosen = names_matching(wanted, list(inner), f"{CHECKPOINT_BLOCKS} of {type(part).__name__}")
            outermost = [each for each in chosen if not any(each.startswith(f"{other}.") for other in chosen)]
            return {f"{name}.{each}" if name else each: inner[each] for each in outermost}
    return dict(_blocks_within(model, ""))


def names_matching(patterns: Sequence[str], names: Sequence[str], key: str = "train.recompute") -> list[str]:
    """Return the names that equal or match one of some names and patterns, or lie within a match, in their own order.

    Raises:
        ConfigError: a pattern matches none; the message suggests similar names.
    """
    chosen = set()
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
        if not found:
            raise unknown_name(key, pattern, "the name, or a pattern of names, of a block of the model", names)
        chosen.update(found)
    return [name for name in names if name in chosen]


def block_names(model: nn.Module, patterns: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names of the blocks that patterns match; all of them without patterns.

    Raises:
        ConfigError: the network has no blocks, or a pattern matches none.
    """
    names = list(find_blocks(model))
    if not names:
        raise ConfigError(
            "train.recompute: the model has no blocks, parts of the same class that follow one another: use off, or "
            f"name the parts of a custom model in its attribute {CHECKPOINT_BLOCKS}",
            key="train.recompute",
        )
    return tuple(names if patterns is None else names_matching(patterns, names))


def _blocks_within(part: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    children = list(_children(part, prefix))
    kinds = Counter(type(child) for _, child in children)
    found: list[tuple[str, nn.Module]] = []
    for name, child in children:
        # The matrices that adapters add to a layer (peft names them lora_A and lora_B) are not layers.
        num_layers = sum(p.dim() > 1 and "lora_" not in key for key, p in child.named_parameters())
        inner = _blocks_within(child, f"{name}.")
        is_block = kinds[type(child)] > 1 and num_layers > 1
        found += [(name, child)] if is_block and (num_layers <= MOST_LAYERS or not inner) else inner
    return found


def _children(part: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a module that have layers, by name; plain containers are replaced by their children."""
    for name, child in part.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from _children(child, f"{prefix}{name}.")
        elif not isinstance(child, BatchOrInstanceNorm) and next(child.children(), None) is not None:
            yield f"{prefix}{name}", child
