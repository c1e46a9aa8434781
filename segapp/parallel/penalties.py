"""Gradient penalties of critics, exact for any batch split: second derivatives include replicas and ranks.

The penalty is computed in the caller's thread, over all replicas in one autograd call, because with synchronized
BatchNorm a sample's gradient depends on samples of the other replicas.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from segapp.accelerator import wide
from segapp.parallel.reductions import all_reduce_ranks, has_other_ranks
from segapp.parallel.scatter_gather import tensors_in

PenaltyKind = Literal["wgan-gp", "wgan-lp", "dragan"]


def gradient_penalty(
    critic: Callable[..., Any],
    real: Tensor,
    fake: Tensor | None = None,
    kind: PenaltyKind = "wgan-gp",
    *,
    alpha: Tensor | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Return the mean over all samples of a penalty on the critic's gradient norm, without a weight.

    With critic D and a point x between or near the samples:

    - "wgan-gp": (|grad D(x)| - 1)^2 between real and fake; Gulrajani et al. 2017, "Improved Training of Wasserstein
      GANs", section 4, with weight 10.
    - "wgan-lp": max(0, |grad D(x)| - 1)^2 between real and fake; Petzka et al. 2018, "On the regularization of
      Wasserstein GANs", equation 8.
    - "dragan": (|grad D(x)| - 1)^2 at real + 0.5 * std(real) * uniform noise; Kodali et al. 2017, "On Convergence and
      Stability of GANs", section 2.3.

    On several ranks, each passes its own samples; the result is the mean over all of them, the same on every rank, and
    `all_reduce_gradients` computes its exact gradient by default, the mean over the ranks. The parameters after `kind`
    can be fixed by tests and callers.

    Args:
        critic: a module, a `DataParallelModel`, or any function of the batch; the sum of all returned tensors is
            differentiated.
        real: (N, ...) real samples.
        fake: (N, ...) generated samples; not needed for "dragan".
        kind: kind of penalty.
        alpha: (N,) interpolation between fake (0) and real (1), not for "dragan"; None: drawn uniformly.
        noise: in [0, 1], shape of real, only for "dragan"; None: drawn uniformly.

    Returns:
        A scalar in float32 or better, differentiable with respect to the critic's parameters. For a gradient of exactly
        0, where the derivative of the norm would be NaN, the derivative is 0.

    Raises:
        ValueError: an unknown kind, an argument that the kind does not use, or shapes that do not fit.
        TypeError: the critic is wrapped in `DistributedDataParallel`, which would leave gradients unreduced.
    """
    if kind not in get_args(PenaltyKind):
        raise ValueError(f"kind={kind!r} is not known: use one of {', '.join(get_args(PenaltyKind))}")
    if isinstance(critic, DistributedDataParallel):
        raise TypeError(
            "the critic is wrapped in DistributedDataParallel, which does not reduce all gradients of a penalty: pass "
            "its module, and call all_reduce_gradients(module.parameters()) after backward()"
        )
    if (noise if kind != "dragan" else alpha) is not None:
        raise ValueError(f"kind={kind!r} does not use {'noise' if kind != 'dragan' else 'alpha'}: leave it out")
    # The penalty contains a gradient, so it needs a graph even under `no_grad`.
    with torch.enable_grad():
        points = _points(real, fake, kind, alpha, noise).detach().requires_grad_()
        scores = list(tensors_in(critic(points)))
        if not scores:
            raise ValueError("the critic returned no tensor: return its scores")
        (gradient,) = torch.autograd.grad(scores, points, [torch.ones_like(s) for s in scores], create_graph=True)
        excess = _norms(gradient) - 1.0
        if kind == "wgan-lp":
            excess = excess.clamp_min(0)
        return _mean_over_all(excess.square())


def _points(
    real: Tensor,
    fake: Tensor | None,
    kind: PenaltyKind,
    alpha: Tensor | None,
    noise: Tensor | None,
) -> Tensor:
    if kind == "dragan":
        if noise is None:
            noise = torch.rand(real.shape, dtype=real.dtype, device=real.device)
        if noise.shape != real.shape:
            raise ValueError(f"noise has shape {tuple(noise.shape)} and real {tuple(real.shape)}: make them equal")
        return real.detach() + 0.5 * _deviation(real.detach()).to(real.dtype) * noise
    if fake is None:
        raise ValueError(f"kind={kind!r} needs fake samples: pass the generator's output")
    if fake.shape != real.shape:
        raise ValueError(f"fake has shape {tuple(fake.shape)} and real {tuple(real.shape)}: make them equal")
    if alpha is None:
        alpha = torch.rand(real.size(0), dtype=real.dtype, device=real.device)
    if alpha.numel() != real.size(0):
        raise ValueError(f"alpha has {alpha.numel()} values for {real.size(0)} samples: give one per sample")
    alpha = alpha.to(real).view(-1, *[1] * (real.dim() - 1))
    return fake.detach().to(real).lerp(real.detach(), alpha)


def _deviation(values: Tensor) -> Tensor:
    """Return the sample standard deviation over all values of all ranks, like `Tensor.std`."""
    if not has_other_ranks():
        return values.to(torch.promote_types(values.dtype, torch.float32)).std()
    values = wide(values)
    total, count = all_reduce_ranks(torch.stack([values.sum(), values.new_tensor(float(values.numel()))]))
    variance: Tensor = all_reduce_ranks((values - total / count).square().sum()) / (count - 1)
    return variance.sqrt()


def _norms(gradient: Tensor) -> Tensor:
    """Return the Euclidean norms of the samples, (N,), with derivative 0 where they are 0."""
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    squares = wide.flatten(1).square().sum(1)
    is_zero = squares == 0
    return squares.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def _mean_over_all(values: Tensor) -> Tensor:
    if not has_other_ranks():
        return values.mean()
    total = all_reduce_ranks(torch.stack([values.sum(), values.new_tensor(float(values.numel()))]))
    return total[0] / total[1].detach()
