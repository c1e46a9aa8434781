"""Every criterion gives the whole step's loss and gradient for any split of the step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segapp.losses import CriterionCE, CriterionDice, CriterionLovasz, CriterionSum, surrogate
from tests.support.loss_cases import criteria, draw, loss_and_gradient, relative_error

pytestmark = pytest.mark.usefixtures("resolution")
NAMES = list(criteria())


def chunks_of(sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [slice(a, a + n) for a, n in zip(starts, sizes, strict=True)]


def add(parts):
    return tuple(sum(entries[1:], entries[0]) for entries in zip(*parts, strict=True))


sizes_of_chunks = st.lists(st.integers(1, 3), min_size=1, max_size=4)
shares = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]), min_size=12, max_size=12)


@pytest.mark.sampled(7)  # other criteria at full resolution than on bands
@pytest.mark.parametrize("name", NAMES)
@given(sizes=sizes_of_chunks, ignored=shares, seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_loss_of_any_split_equals_the_whole_batch(name, sizes, ignored, seed):
    criterion = criteria()[name]
    logits, target = draw(sum(sizes), low=(3, 4), high=(9, 11), ignored=ignored[: sum(sizes)], seed=seed)
    loss, gradient = loss_and_gradient(criterion, logits, target)
    assert math.isfinite(loss)

    summed = logits.clone().requires_grad_()
    parts = [criterion.statistics(summed[chunk], target[chunk]) for chunk in chunks_of(sizes)]
    split = criterion.finalize(add(parts))
    (split_gradient,) = torch.autograd.grad(split, summed)
    assert relative_error(split.detach(), loss) < 1e-12
    assert relative_error(split_gradient, gradient) < 1e-12

    accumulated = logits.clone().requires_grad_()
    with torch.no_grad():
        totals = add([criterion.statistics(logits[chunk], target[chunk]) for chunk in chunks_of(sizes)])
    for chunk in chunks_of(sizes):
        surrogate(criterion, criterion.statistics(accumulated[chunk], target[chunk]), totals).backward()
    assert relative_error(accumulated.grad, gradient) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_auxiliary_heads_are_added_with_their_weight(name):
    criterion = criteria()[name]
    logits, target = draw(ignored=0.5)
    other, third = (draw(low=low, seed=low[0])[0] for low in ((3, 4), (6, 8)))
    expected = criterion(logits, target) + 0.4 * (criterion(other, target) + criterion(third, target))
    named = {"aux": other, "out": logits, "more": third}
    for outputs in ((logits, other, third), named, dict(sorted(named.items(), reverse=True))):
        assert torch.allclose(criterion(outputs, target), expected, rtol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_target_statistics_equal_statistics_without_numerators(name):
    criterion = criteria()[name]
    logits, target = draw(ignored=[0.0, 0.2, 1.0, 0.5, 0.9])
    entries = criterion.statistics(logits.requires_grad_(), target)
    assert len(entries) == criterion.num_statistics
    if not criterion.is_linear:
        with pytest.raises(TypeError, match="not linear"):
            criterion.target_statistics(target)
        return
    for entry, known in zip(entries, criterion.target_statistics(target), strict=True):
        assert known.shape == entry.shape
        assert float(known) == (0.0 if entry.requires_grad else float(entry))
    _, expected = loss_and_gradient(criterion, logits, target)
    (gradient,) = torch.autograd.grad(surrogate(criterion, entries, criterion.target_statistics(target)), logits)
    assert relative_error(gradient, expected) <= 1e-13, "numerators of float32 zeros round no slope"


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_float64_and_losses_at_least_float32(name):
    criterion = criteria()[name]
    for dtype in (torch.float16, torch.float32, torch.float64):
        logits, target = draw(dtype=dtype)
        entries = criterion.statistics(logits.requires_grad_(), target)
        assert all(e.dtype == torch.float64 for e in entries if not e.requires_grad)
        loss = criterion.finalize(entries)
        assert loss.shape == ()
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_surrogate_without_gradient_is_zero():
    logits, target = draw()
    criterion = CriterionCE()
    entries = criterion.statistics(logits, target)
    assert surrogate(criterion, entries, entries).item() == 0.0


def test_statistics_sum_adds_and_scales():
    logits, target = draw()
    total = CriterionSum([(1.0, CriterionCE()), (0.5, CriterionDice())])
    expected = CriterionCE()(logits, target) + 0.5 * CriterionDice()(logits, target)
    assert torch.allclose(total(logits, target), expected, rtol=1e-14)
    assert not total.is_linear
    terms = [(1.0, CriterionCE()), (2.0, CriterionLovasz()), (3.0, CriterionSum([(0.5, CriterionCE())]))]
    from_a_generator = CriterionSum(term for term in terms)
    assert torch.equal(from_a_generator(logits, target), CriterionSum(terms)(logits, target))
    assert from_a_generator.is_linear
