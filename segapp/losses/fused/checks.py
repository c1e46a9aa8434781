"""Checks of the losses' inputs: shapes, dtypes and class ids, with errors that name the value and the next move.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from numbers import Integral

import torch
from torch import Tensor

from segapp.accelerator import accelerator_of
from segapp.compat.torch import is_traced_or_transformed

TARGET_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_tensors(**inputs: object) -> None:
    """Raise TypeError for an input that is not a tensor, such as a numpy array; the keywords are the reported names."""
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} of type {type(value).__name__}: give a tensor, such as torch.as_tensor(array)")


def check_logits(logits: Tensor) -> None:
    """Raise TypeError or ValueError unless logits are a floating-point tensor (N, C, h, w)."""
    check_tensors(logits=logits)
    if logits.dim() != 4 or 0 in logits.shape[1:]:
        raise ValueError(f"logits have shape {tuple(logits.shape)}: give (N, C, h, w) with C, h, w of at least 1")
    if not logits.is_floating_point():
        raise TypeError(f"logits are {logits.dtype}: give a floating-point tensor")


def check_stride(logits: Tensor, target: Tensor) -> None:
    """Raise ValueError if no stride explains the sizes of logits (N, C, h, w) and of a target (..., H, W).

    Padding changes the number of logits of a side by less than one. So the stride of the height, which may be below 1,
    is between H / (h + 1) and H / (h - 1), both excluded, and the interval of the width must overlap this one.
    """
    check_tensors(logits=logits, target=target)
    if logits.dim() != 4 or target.dim() < 3 or 0 in logits.shape[1:]:
        return  # `check_inputs` reports it
    N, C, h, w = logits.shape
    H, W = target.shape[-2:]

    def fits(h: int, w: int) -> bool:
        return H * (w - 1) < W * (h + 1) and W * (h - 1) < H * (w + 1)

    if fits(h, w):
        return
    cause = "if the images were squashed, first resize the logits to the target's size with F.interpolate"
    if fits(C, h):
        cause = "the channels seem to be last: give logits.permute(0, 3, 1, 2)"
    elif fits(w, h):
        cause = "height and width of one of them seem to be swapped: transpose it"
    raise ValueError(f"logits of shape {(N, C, h, w)} do not fit a target of shape {tuple(target.shape)}: {cause}")


def check_inputs(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
    """Check shapes, dtypes and devices, but no values, so the host never waits for the device.

    Args:
        logits: (N, C, h, w), floating point.
        target: (N, H, W), integers.
        weight: class weights (C,), or None.

    Raises:
        TypeError: one is no tensor, the logits are not floating point, or the target is not integer.
        ValueError: the shapes or devices do not fit together.
    """
    check_tensors(target=target)
    check_logits(logits)
    if target.dtype not in TARGET_DTYPES:
        raise TypeError(f"target is {target.dtype}: give class ids as uint8, int16, int32 or int64")
    if target.dim() != 3 or 0 in target.shape[1:]:
        raise ValueError(f"target has shape {tuple(target.shape)}: give (N, H, W) with H, W of at least 1")
    check_fit(logits, target, weight)


def check_soft_inputs(logits: Tensor, target: Tensor, weight: Tensor | None) -> None:
    """Check logits (N, C, h, w), a target of probabilities (N, C, H, W) and class weights, as `check_inputs` does."""
    check_fit(logits, target, weight)
    if target.shape[1] != logits.shape[1] or 0 in target.shape[1:]:
        num_classes, shape = logits.shape[1], tuple(target.shape)
        raise ValueError(f"target has shape {shape}: give (N, C, H, W) with C = {num_classes}, as of the logits")


def check_fit(logits: Tensor, target: Tensor, weight: Tensor | None) -> None:
    """Check that images, devices and class weights of logits (N, C, ...) and a target (N, ...) fit together."""
    if target.shape[0] != logits.shape[0]:
        raise ValueError(f"logits hold {logits.shape[0]} images and the target {target.shape[0]}: give the same number")
    if target.device != logits.device:
        raise ValueError(f"logits are on {logits.device} and the target on {target.device}: move one to the other")
    if weight is not None:
        check_tensors(weight=weight)
        if weight.shape != (logits.shape[1],):
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}: give one weight for each of {logits.shape[1]} classes"
            )
        if weight.is_cpu:  # on a device, the host would wait for the values
            check_weights(weight)


def check_num_ids(num_ids: int) -> None:
    """Raise ValueError for one class that excludes no other: whatever the logits are, its softmax is 1."""
    if num_ids < 2:
        move = "for one logit per pixel, use CriterionBCE, CriterionDice or another criterion with multilabel=True"
        raise ValueError(f"logits have one class, which every pixel then has: {move}")


def check_ignore_index(ignore_index: object) -> None:
    """Raise TypeError unless ignore_index is an integer; torch's losses have the class weights in its place."""
    if not isinstance(ignore_index, (int, Integral)) or isinstance(ignore_index, bool):
        given = "None" if ignore_index is None else f"a {type(ignore_index).__name__}"
        raise TypeError(f"ignore_index is {given}: give an integer (-1 ignores no id), and class weights as weight=")


def valid_pixels(target: Tensor, ignore_index: int) -> Tensor:
    """Return the mask target != ignore_index; an ignore_index outside the dtype's range ignores nothing."""
    check_ignore_index(ignore_index)
    bounds = torch.iinfo(target.dtype)
    if not bounds.min <= ignore_index <= bounds.max:
        return torch.ones_like(target, dtype=torch.bool)
    return target != ignore_index


def class_ids(target: Tensor, num_classes: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return int64 ids that are safe to index with, and the bool mask of valid pixels, in the target's shape.

    An id that is no class becomes 0 and is not valid; `check_target_range` reports it.
    """
    valid = valid_pixels(target, ignore_index) & (target >= 0)
    if num_classes <= torch.iinfo(target.dtype).max:
        valid = valid & (target < num_classes)
    return torch.where(valid, target, 0).long(), valid


def class_masks(ids: Tensor, num_classes: int, *, multilabel: bool) -> Tensor:
    """Return for each class which pixels have it, (N, C, ...) bool.

    Args:
        ids: (N, 1, ...) int64 class ids; with `multilabel` sets of classes, bit c for class c.
        num_classes: C.
        multilabel: a pixel may have several classes, or none.
    """
    classes = torch.arange(num_classes, device=ids.device).view(1, -1, *(1,) * (ids.dim() - 2))
    return (ids >> classes) & 1 == 1 if multilabel else ids == classes


def check_target_range(target: Tensor, num_classes: int, ignore_index: int) -> Tensor | None:
    """Check that every valid id is a class: immediately on the CPU, asynchronously on a device.

    On a device, the wrong ids are copied to the host asynchronously. The error is raised by the first later call that
    finds the copy finished. Until then, the returned scalar makes the loss NaN, so the step is skipped. While a graph
    is captured, compiled or traced, and under a functional transform, there is only the NaN, also on the CPU.

    Returns:
        None, or a scalar to add to the loss: 0, or NaN if an id is no class.

    Raises:
        ValueError: an id outside 0..num_classes - 1 that is not ignore_index, in this call or an earlier one.
    """
    if not target.numel() or is_simulated(target):
        return None
    if target.is_cpu and has_values(target):
        low, high = torch.aminmax(target)
        # The usual 255 hides the largest class, so only then a second pass leaves the ignored pixels out.
        if int(high) >= num_classes and int(high) == ignore_index:
            low, high = torch.aminmax(torch.where(target == ignore_index, 0, target))
        if int(low) < 0 or int(high) >= num_classes:
            bad = target[_is_bad(target, num_classes, ignore_index)]
            if bad.numel():
                raise ValueError(out_of_range_message(torch.unique(bad).tolist(), num_classes, ignore_index))
        return None
    bad, ids = _is_bad(target, num_classes, ignore_index), target.long()
    # Both bounds are in one tensor, so that one copy brings them to the host.
    bounds = torch.stack([torch.where(bad, ids, NO_ID).amin(), torch.where(bad, ids, -NO_ID).amax()])
    if has_values(target):
        raise_reported()
        return report_range(bounds, num_classes, ignore_index)
    return poison_of(bounds)


def has_values(tensor: Tensor) -> bool:
    """Return True if the values can be read: the tensor is not fake, traced, transformed or being captured."""
    return is_eager(tensor) and not is_simulated(tensor)


def is_eager(tensor: Tensor) -> bool:
    """Return True if operators run one by one: none is being compiled, traced, transformed or captured."""
    return not (torch.compiler.is_compiling() or needs_plain_operators() or is_capturing(tensor))


def is_capturing(tensor: Tensor) -> bool:
    """Return True while a graph is captured: the host may neither wait for the device nor query it."""
    return accelerator_of(tensor.device).is_capturing()


def is_simulated(tensor: Tensor) -> bool:
    """Return True if the tensor is fake or meta, without values; False for a tensor that is being compiled."""
    return not torch.compiler.is_compiling() and (
        tensor.is_meta or (type(tensor) not in (Tensor, torch.nn.Parameter) and not needs_plain_operators())
    )


def needs_plain_operators() -> bool:
    """Return True if a functional transform or a trace is active, which supports only torch's own operators."""
    if torch.compiler.is_compiling():
        return False
    return is_traced_or_transformed()


def _is_bad(target: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    return valid_pixels(target, ignore_index) & ~class_ids(target, num_classes, ignore_index)[1]


def recordable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it was made in inference mode, so that autograd can save it outside that mode."""
    is_recorded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return tensor.clone() if is_recorded and tensor.is_inference() else tensor


NO_ID = 1 << 62
"""Larger than every id; the minimum if there are no bad ids."""


_Report = tuple[Tensor, Callable[[], bool], int, int]
"""Smallest and largest bad id, which are being copied to the host; if they have arrived; C, and the ignored id."""

_reports: deque[_Report] = deque(maxlen=64)
"""Pending checks, oldest first; global, because devices run asynchronously."""
_reports_lock = threading.Lock()
"""Replicas run in threads, and each adds and removes reports."""


def checked_target(
    logits: Tensor, target: Tensor, num_ids: int, ignore_index: int, weight: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the target, as autograd can save it, and the scalar of `check_target_range`, after all checks."""
    check_inputs(logits, target, weight)
    check_num_ids(num_ids)
    return recordable(target), check_target_range(target, num_ids, ignore_index)


def poisoned(total: Tensor, poison: Tensor | None) -> Tensor:
    """Return a sum with the scalar of `check_target_range`; if no later call raises, its gradient becomes NaN too."""
    if poison is None:
        return total
    return total * (1 + poison) if torch.compiler.is_compiling() or needs_plain_operators() else total + poison


def report_range(bounds: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    """Start the copy of the bad ids' bounds to the host.

    Args:
        bounds: (2,) int64 smallest and largest bad id; smallest > largest if there is none.
        num_classes: C.
        ignore_index: id of the pixels that are left out.

    Returns:
        Scalar on the bounds' device: 0, or NaN if there is a bad id.
    """
    copied = accelerator_of(bounds.device).copy_to_host(bounds)
    with _reports_lock:
        _reports.append((*copied, num_classes, ignore_index))
    return poison_of(bounds)


def poison_of(bounds: Tensor) -> Tensor:
    """Return scalar 0, or NaN if `bounds`, as in `report_range`, contain a bad id."""
    return torch.where(bounds[0] <= bounds[1], torch.nan, 0.0)


def raise_reported() -> None:
    """Raise ValueError for a bad id that an earlier call found on a device."""
    while True:
        with _reports_lock:
            if not _reports or not _reports[0][1]():
                return
            bounds, _, num_classes, ignore_index = _reports.popleft()
        low, high = bounds.tolist()
        if low <= high:
            ids = [low] if low == high else [low, high]
            raise ValueError(out_of_range_message(ids, num_classes, ignore_index))


def out_of_range_message(ids: Sequence[int], num_classes: int, ignore_index: int) -> str:
    """Return the error message for ids that are no classes."""
    named = ", ".join(map(str, ids[:10])) + (", ..." if len(ids) > 10 else "")
    classes = f"classes are 0 to {num_classes - 1} and {ignore_index} is ignored"
    return f"target holds the ids {named}: {classes}; map the labels or change the number of classes"


@torch.inference_mode(False)
def as_class_weight(weight: Tensor | Sequence[float] | None) -> Tensor | None:
    """Return a copy of class weights as a float tensor (C,).

    Raises:
        ValueError: they are not one-dimensional, negative or not finite.
    """
    if weight is None:
        return None
    values = torch.as_tensor(weight).detach().clone()
    if not values.is_floating_point():
        values = values.float()
    if values.dim() != 1 or not values.numel():
        raise ValueError(f"weight has shape {tuple(values.shape)}: give one number for each class")
    check_weights(values)
    return values


def check_weights(weight: Tensor) -> None:
    """Raise ValueError for a class weight that is negative or not finite."""
    if has_values(weight) and not bool((torch.isfinite(weight) & (weight >= 0)).all()):
        raise ValueError(f"weight={weight.tolist()}: give finite numbers of at least 0")
