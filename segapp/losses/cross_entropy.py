"""Cross-entropy of low-resolution logits with a full-resolution target, without materializing the upsampled logits.

In plain torch:

    full = F.interpolate(logits, (H, W), mode="bilinear", align_corners=align_corners)
    loss_sum = F.cross_entropy(full, target, weight, ignore_index=ignore_index, reduction="sum")
    loss = loss_sum / weight[target[target != ignore_index]].sum()

On CUDA, kernels compute the loss and its gradient with respect to the low-resolution logits together, in the forward
pass; the backward pass only scales the gradient. It is the only saved tensor, and it has low resolution. On other
devices, torch's operators compute both band by band (`pixel_sums`).

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.accelerator import wide_dtype
from segapp.chunks import check_choice, check_flag, check_number
from segapp.losses.additive import MeanCriterion, as_whole
from segapp.losses.fused.block_sizes import MAX_CLASSES, KernelError
from segapp.losses.fused.checks import (
    as_class_weight,
    check_ignore_index,
    check_inputs,
    check_logits,
    check_num_ids,
    check_soft_inputs,
    is_simulated,
    needs_plain_operators,
    recordable,
)
from segapp.losses.fused.kernels import has_kernels, load_kernels, note_failure
from segapp.losses.fused.pixel_sums import PixelOptions, cross_entropy_sums_of, upsampled_sums
from segapp.losses.fused.reference import compute_dtype, target_weight_sum, upsample

Implementation = Literal["auto", "reference", "triton", "sums"]
"""Implementation of the loss; "auto" chooses by device, sizes and number of classes."""

BAND_DEVICES = frozenset({"cpu"})
"""Types of devices on which torch's operators compute the loss in bands; the others use the Triton kernels."""


def upsample_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    align_corners: bool = True,
    ignore_index: int = 255,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of bilinearly upsampled logits, as two sums.

    `loss_sum / weight_sum` equals `F.cross_entropy(full, target)` with the same weights, smoothing and ignored pixels,
    for `full = F.interpolate(logits, size=(H, W), mode="bilinear", align_corners=align_corners)`. You may add the sums
    of chunks of a batch before the division. No tensor of size (N, C, H, W) is allocated, unless the target holds
    probabilities or is not larger than the logits, or bands would save nothing because it is small. Second derivatives
    are exact, and computed at full resolution. The result is deterministic.

    Args:
        logits: (N, C, h, w), any floating dtype and memory layout; half precision is accumulated in float32.
        target: (N, H, W) class ids, uint8 or a signed integer type; or (N, C, H, W) probabilities.
        align_corners: as in `F.interpolate`, but True by default. Use the value with which the model was trained.
        ignore_index: id of the pixels that are left out.
        weight: (C,) factor of each class, or None.
        label_smoothing: share of the target spread evenly over the classes, 0 to 1.
        implementation: "auto"; "triton" (CUDA; if "auto" chooses it and it fails, "sums" is used instead); "sums" (any
            device: torch's operators on bands, gradient by recomputation); "reference" (interpolate + cross-entropy).

    Returns:
        loss_sum: scalar, float32 (float64 for float64 logits), differentiable.
        weight_sum: scalar, float64, a constant.

    Raises:
        TypeError: dtypes other than the above.
        ValueError: shapes that do not fit, ids that are no class. On a CUDA device ids are checked asynchronously: the
            loss is NaN and a later call raises the error (none while a CUDA graph is captured).
        KernelError: implementation="triton", and its kernels cannot run.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> from segapp.losses import upsample_cross_entropy
        >>> logits, target = torch.randn(1, 2, 4, 4), torch.ones(1, 32, 32, dtype=torch.int64)
        >>> loss_sum, weight_sum = upsample_cross_entropy(logits, target)
        >>> full = F.interpolate(logits, size=(32, 32), mode="bilinear", align_corners=True)
        >>> torch.allclose(loss_sum / weight_sum.float(), F.cross_entropy(full, target), atol=1e-5)
        True
    """
    check_logits(as_whole(logits))
    check_ignore_index(ignore_index)
    check_flag("align_corners", align_corners)
    check_number("label_smoothing", label_smoothing, most=1)
    check_choice("implementation", implementation, get_args(Implementation))
    check_num_ids(logits.shape[1])
    if isinstance(target, Tensor) and target.is_floating_point() and target.dim() == 4:
        check_soft_inputs(logits, target, weight)
        with torch.autocast(logits.device.type, enabled=False):
            values = upsample(logits, (target.shape[2], target.shape[3]), align_corners)
            weight = None if weight is None else weight.to(values.device, values.dtype)
            soft = target.to(values.dtype)
            loss_sum = F.cross_entropy(values, soft, weight, reduction="sum", label_smoothing=label_smoothing)
            return loss_sum, _num_pixels(target)
    check_inputs(logits, target, weight)
    options = PixelOptions(align_corners, ignore_index, label_smoothing=label_smoothing)
    chosen = choose_implementation(logits, target) if implementation == "auto" else implementation
    if chosen == "triton" and len(logits):  # a rank may have no samples, and kernels refuse empty batches
        try:
            return _by_kernels(logits, target, weight, options)
        except KernelError as error:
            if implementation == "triton" or torch.compiler.is_compiling():
                raise
            note_failure(logits.device, error)
    return _sums(logits, target, weight, options, is_whole=chosen == "reference")


def choose_implementation(logits: Tensor, target: Tensor) -> Implementation:
    """Return the implementation that "auto" uses for logits (N, C, h, w) and a target (N, H, W).

    A simulated accelerator is treated as CUDA, so that memory plans match. The kernels only enlarge; logits of the
    target's size are at full resolution already.
    """
    N, C, h, w = logits.shape
    if logits.device.type in BAND_DEVICES or N == 0 or C > MAX_CLASSES or needs_plain_operators():
        return "sums"
    H, W = target.shape[-2:]
    if h > H or w > W or (h, w) == (H, W):
        return "reference"
    return "triton" if is_simulated(logits) or has_kernels(logits.device) else "sums"


def _num_pixels(target: Tensor) -> Tensor:
    """Return the number of pixels of a target of probabilities (N, C, H, W)."""
    return torch.tensor(target[:, 0].numel(), dtype=wide_dtype(target.device), device=target.device)


def _sums(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: PixelOptions,
    *,
    is_whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the sums by torch's operators; with `is_whole`, at full resolution."""
    function = partial(cross_entropy_sums_of, label_smoothing=options.label_smoothing)
    loss_sum, weight_sum = upsampled_sums(function, logits, target, options, weight, is_whole=is_whole)
    return loss_sum.to(compute_dtype(logits)), weight_sum


def _by_kernels(logits: Tensor, target: Tensor, weight: Tensor | None, options: PixelOptions) -> tuple[Tensor, Tensor]:
    with_gradient, target = torch.is_grad_enabled() and logits.requires_grad, recordable(target)
    if weight is not None:
        weight = weight.detach().to(logits.device, compute_dtype(logits))
    loss_sum, weight_sum, _ = _operator(
        logits, target, weight, options.align_corners, options.ignore_index, options.label_smoothing, with_gradient
    )
    return loss_sum, weight_sum.detach()


@torch.library.custom_op(
    "segapp::upsample_cross_entropy",
    mutates_args=(),
    schema=(
        "(Tensor logits, Tensor target, Tensor? weight, bool align_corners, int ignore_index, float label_smoothing,"
        " bool with_gradient) -> (Tensor, Tensor, Tensor)"
    ),
)
def _operator(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    align_corners: bool,
    ignore_index: int,
    label_smoothing: float,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss sum, weight sum, gradient of the loss sum) from one pass; the gradient may be empty.

    Its parameters are flat because a custom operator takes only tensors and plain values.
    """
    options = PixelOptions(align_corners, ignore_index, label_smoothing=label_smoothing)
    compute = load_kernels(logits.device).cross_entropy_by_triton
    loss_sum, weight_sum, gradient = compute(logits, target, weight, options, with_gradient=with_gradient)
    dtype = compute_dtype(logits)
    return loss_sum.to(dtype), weight_sum, logits.new_empty(0, dtype=dtype) if gradient is None else gradient


@_operator.register_fake
def _(logits: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    _align_corners, _ignore_index, _label_smoothing, with_gradient = options
    dtype = compute_dtype(logits)
    gradient = logits.new_empty(logits.shape if with_gradient else (0,), dtype=dtype)
    return logits.new_empty((), dtype=dtype), logits.new_empty((), dtype=wide_dtype(logits.device)), gradient


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, weight, align_corners, ignore_index, label_smoothing, _ = inputs
    ctx.save_for_backward(logits, target, weight, output[2].detach())
    ctx.options = PixelOptions(align_corners, ignore_index, label_smoothing=label_smoothing)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, slope: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, target, weight, gradient = ctx.saved_tensors
    others: tuple[None, ...] = (None,) * 6
    if slope is None:
        return None, *others
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # The saved gradient has no graph; a second derivative needs the graph that computes it.
        loss_sum = _sums(logits, target, weight, ctx.options, is_whole=True)[0]
        (exact,) = torch.autograd.grad(loss_sum, logits, slope, create_graph=True)
        return exact, *others
    # Out of place, because the graph may be kept for another backward pass; in float32, because 1 / count underflows in
    # half precision.
    return (gradient * slope).to(logits.dtype), *others


_operator.register_autograd(_backward, setup_context=_keep_for_backward)


class CriterionCE(MeanCriterion):
    """Cross-entropy on bilinearly upsampled logits: the class-weighted mean over all valid pixels of a step.

    Use it first: it is stable, fast, and small in memory. It takes logits (N, C, h, w) and class ids (N, H, W), or
    probabilities (N, C, H, W). Statistics: (loss sum, weight sum). Auxiliary heads share the denominator.

    Args:
        ignore_index: target id of the pixels that are left out.
        weight: factor of each class, (C,), or None for equal factors.
        align_corners: as in `F.interpolate`, but True by default.
        label_smoothing: share of the target spread evenly over the classes, 0 to 1.
        aux_weight: weight of the loss of each auxiliary head.
        implementation: "auto", or another one of `upsample_cross_entropy`, to compare them.

    Raises:
        ValueError: weight, label_smoothing or aux_weight out of range, or an implementation of another name.

    Example:
        >>> import torch
        >>> from segapp.losses import CriterionCE
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionCE()(logits, target)), 4)
        1.0986
    """

    weight: Tensor | None

    def __init__(
        self,
        ignore_index: int = 255,
        weight: Tensor | Sequence[float] | None = None,
        align_corners: bool = True,
        label_smoothing: float = 0.0,
        aux_weight: float = 0.4,
        *,
        implementation: Implementation = "auto",
    ) -> None:
        super().__init__(aux_weight)
        self._set_options(ignore_index=ignore_index, align_corners=align_corners)
        self.label_smoothing = check_number("label_smoothing", label_smoothing, most=1)
        check_choice("implementation", implementation, get_args(Implementation))
        self.implementation: Implementation = implementation
        self.register_buffer("weight", as_class_weight(weight))

    def head_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss sum, weight sum) of one head."""
        return upsample_cross_entropy(
            logits,
            target,
            align_corners=self.align_corners,
            ignore_index=self.ignore_index,
            weight=self.weight,
            label_smoothing=self.label_smoothing,
            implementation=self.implementation,
        )

    def denominator(self, target: Tensor) -> Tensor:
        """Return the weight sum; for a target of probabilities (N, C, H, W) the number of pixels."""
        if target.is_floating_point():
            return _num_pixels(target)
        return target_weight_sum(target, self.ignore_index, self.weight)
