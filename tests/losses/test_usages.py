"""Every criterion in the ways in which PyTorch code uses a loss, at full resolution and on bands."""

import contextlib
import copy
import functools
import itertools
import pickle
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, functional, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from segapp.losses import overlap
from segapp.losses.fused import pixel_sums
from tests.support.loss_cases import criteria, draw

pytestmark = pytest.mark.usefixtures("resolution")


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13, equal_nan=True)


def gradient_of(criterion, logits, target, change=lambda: None):
    logits = logits.detach().clone().requires_grad_()
    loss = criterion(logits, target)
    change()
    loss.backward()
    return logits.grad


def derivatives(name, logits, target):
    logits = logits[..., :2, :3].clone().requires_grad_()  # each costs several evaluations
    assert gradcheck(lambda x: criteria()[name](x, target), (logits,))
    assert gradgradcheck(lambda x: criteria()[name](x, target), (logits,))


def transforms(name, logits, target):
    criterion, batches, direction = (
        criteria()[name],
        torch.stack([logits, -logits, logits / 2]),
        torch.randn_like(logits),
    )
    gradients = torch.stack([gradient_of(criterion, batch, target) for batch in batches])
    close(torch.func.vmap(torch.func.grad(criterion), (0, None))(batches, target), gradients)
    close(torch.func.vmap(torch.func.grad(criterion))(batches, torch.stack([target] * 3)), gradients)
    slope = (gradients[0] * direction).sum()
    close(torch.func.jvp(lambda x: criterion(x, target), (logits,), (direction,))[1], slope)
    with forward_ad.dual_level():
        close(forward_ad.unpack_dual(criterion(forward_ad.make_dual(logits, direction), target)).tangent, slope)


def batched_gradients(name, logits, target):
    criterion = criteria()[name]
    logits.requires_grad_()
    for entry in criterion.statistics(logits, target):
        if not entry.requires_grad:
            continue
        slopes = torch.randn(3, *entry.shape, dtype=entry.dtype)
        expected = torch.stack([torch.autograd.grad(entry, logits, each, retain_graph=True)[0] for each in slopes])
        for more in ({"retain_graph": True}, {"create_graph": True}):
            close(torch.autograd.grad(entry, logits, slopes, is_grads_batched=True, **more)[0], expected)
        backward = functools.partial(torch.autograd.grad, entry, logits, retain_graph=True)
        close(torch.func.vmap(backward)(slopes)[0], expected)
    hessians = [functional.hessian(lambda x: criterion(x, target), logits, vectorize=each) for each in (True, False)]
    close(*hessians)


def copies(name, logits, target):
    criterion = criteria()[name]
    expected = gradient_of(criterion, logits, target)
    torch._dynamo.reset()
    for again in (torch.compile(criterion, backend="aot_eager"), pickle.loads(pickle.dumps(criterion))):
        close(gradient_of(again, logits, target), expected)
    for is_reentrant in (True, False):
        recomputed = functools.partial(checkpoint, criterion, use_reentrant=is_reentrant)
        close(gradient_of(recomputed, logits, target), expected)


def inference_mode(name, logits, target):
    expected, gradient = criteria()[name](logits, target), gradient_of(criteria()[name], logits, target)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        made, inputs = criteria()[name], (logits.clone(), target.clone())
        for each in (inputs, (logits, target), (logits.clone().requires_grad_(), target)):
            close(criteria()[name](*each), expected)
    close(criteria()[name](*inputs), expected)
    close(gradient_of(made, logits, inputs[1]), gradient)
    tracked = logits.clone().requires_grad_()
    loss = criteria()[name](tracked, target)
    with torch.inference_mode():
        loss.backward()
    close(tracked.grad, gradient)


def change_settings(criterion):
    """Assign another value to every attribute of a criterion and its terms, and another tensor to every buffer."""
    for module in criterion.modules():
        for key, value in vars(module).items():
            if isinstance(value, bool):
                setattr(module, key, not value)
            elif isinstance(value, (float, int)):
                setattr(module, key, type(value)(value / 3 + 0.25))
            elif key == "classes":
                setattr(module, key, {"all": "present", "present": "all"}[value])
        for key, value in module.named_buffers(recurse=False):
            setattr(module, key, value * 3 + 1)


def settings(name, logits, target):
    changed, kept = criteria()[name], criteria()[name]
    expected = gradient_of(kept, logits, target)
    close(gradient_of(changed, logits, target, lambda: change_settings(changed)), expected)
    ids = target.clamp(max=3)  # the other ids are ignored no more
    assert not torch.allclose(gradient_of(changed, logits, ids), gradient_of(kept, logits, ids))
    second = []
    for criterion, change in ((copy.deepcopy(kept), change_settings), (kept, id)):
        loss = criterion(logits.requires_grad_(), target)
        change(criterion)
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), logits)[0])
    close(*second)


def weights_in_place(name, logits, target):
    """As in torch, autograd refuses it, unless the backward pass does not use the weights."""
    criterion = criteria()[name]
    expected = gradient_of(criterion, logits, target)
    with contextlib.suppress(RuntimeError):
        found = gradient_of(criterion, logits, target, lambda: [each.mul_(each) for each in criterion.buffers()])
        close(found, expected)


def masked_classes(name, logits, target):
    """The truth interpolates large finite numbers, which no weight of 0 turns into NaN."""
    criterion = criteria()[name]
    is_aligned = name == "sum" or criterion.align_corners
    whole = (
        mock.patch.object(pixel_sums, "FULL_BYTES", 1 << 60),
        mock.patch.object(overlap, "is_eager", return_value=False),
    )
    for place in ((slice(None), 0), (slice(None), -1), (slice(None), 2, slice(2)), (1, 1, 1, 2)):
        masked = logits.clone()
        masked[place] = -torch.inf
        finite = masked.clamp_min(-1e200).requires_grad_()
        for factor, is_target in itertools.product((1, 2, 4, 16), (True, False)):
            size = [factor * side for side in logits.shape[2:]]
            values = F.interpolate(finite, size, mode="bilinear", align_corners=is_aligned)
            full = torch.where(values < -1e100, -torch.inf, values.detach())
            ids = draw(2, high=size)[1]
            if not is_target:  # the loss of a masked target is infinite
                ids[full.gather(1, ids.clamp(max=3)[:, None])[:, 0].isinf()] = 255
            with whole[0], whole[1]:
                truth, slope = criterion(full, ids), gradient_of(criterion, full, ids)
            # Label smoothing and sets with the masked class make the loss infinite.
            is_finite = truth.isfinite() and slope.isfinite().all()
            assert is_target or is_finite or criterion.is_sigmoid or "weighted" in name
            close(criterion(masked, ids), truth)
            found = gradient_of(criterion, masked, ids)
            if slope.isfinite().all():
                close(found, torch.autograd.grad(values, finite, slope)[0])
            else:
                assert not found.isfinite().all()


def bad_ids(name, logits, target):
    loss = criteria()[name]
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager")
    for bad in (16, -3, 1 << 40):
        wrong, only_wrong = target.clone(), torch.full_like(target, 255)
        wrong[1, 2, 3] = only_wrong[1, 2, 3] = bad
        with pytest.raises(ValueError, match=f"ids {bad}"):
            loss(logits, wrong)
        for ids in (wrong, only_wrong):
            assert compiled(logits, ids).isnan()
            assert torch.func.vmap(loss)(logits[None], ids[None]).isnan().all()
        assert torch.func.grad(loss)(logits, wrong).isnan().any()
        assert torch.func.vmap(torch.func.grad(loss))(logits[None], wrong[None]).isnan().any()


def fake_tensors(name, logits, target):
    with FakeTensorMode():
        tracked = torch.empty(logits.shape, requires_grad=True)
        criteria()[name](tracked, torch.empty(target.shape, dtype=torch.uint8)).backward()
        assert tracked.grad.shape == logits.shape


USAGES = [
    derivatives,
    transforms,
    batched_gradients,
    copies,
    inference_mode,
    settings,
    weights_in_place,
    masked_classes,
    bad_ids,
    fake_tensors,
]


@pytest.mark.sampled(13)  # no divisor of the number of usages
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("usage", USAGES, ids=lambda usage: usage.__name__)
@pytest.mark.parametrize("name", criteria())
def test_criterion_serves(name, usage):
    usage(name, *draw(2, low=(3, 4), high=(10, 11)))
