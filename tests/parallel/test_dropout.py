"""Masks of dropout follow from the samples' keys: equal at any division, like torch's in everything else."""

import copy
from itertools import pairwise

import pytest
import segmentation_models_pytorch as smp
import torch
from timm.layers import DropPath
from torch import nn
from torchvision.ops import StochasticDepth

from segapp.parallel import (
    BalancedDataParallel,
    DataParallelModel,
    SampleMasks,
    mask_by_sample,
    sample_masks,
    set_recompute,
)

LAYERS = {
    "Dropout": (nn.Dropout(0.3), (8, 5, 6)),
    "Dropout1d": (nn.Dropout1d(0.3), (8, 5, 6)),
    "Dropout2d": (nn.Dropout2d(0.3), (8, 5, 6, 7)),
    "Dropout3d": (nn.Dropout3d(0.3), (8, 5, 2, 3, 3)),
    "DropPath": (DropPath(0.3), (8, 5, 6)),
    "DropPath, not scaled": (DropPath(0.3, scale_by_keep=False), (8, 5, 6)),
    "StochasticDepth": (StochasticDepth(0.3, "row"), (8, 5, 6)),
    "rows of windows": (nn.Dropout(0.3), (24, 5, 6)),
}


def masked(*layers, seed=0):
    net = nn.Sequential(*copy.deepcopy(layers)).train()
    mask_by_sample(net)
    return net, SampleMasks(net, seed)


def splitmix(state, place):
    """Return number `place`, from 0, of SplitMix64, in Python's integers."""
    z = (state + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def lanes(key, count):
    """Return 16-bit numbers, -2^15 to 2^15 - 1, of a key: words of SplitMix64 whose shifts keep the sign."""

    def signed(z, bits=64):
        return (z + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)

    found = []
    for place in range(1, count // 4 + 2):
        z = signed(key + place * 0x9E3779B97F4A7C15)
        z = signed((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9)
        z = signed((z ^ (z >> 27)) * 0x94D049BB133111EB)
        found += [signed(z >> shift, 16) for shift in (0, 16, 32, 48)]
    return found[:count]


def test_mask_is_that_of_integers_worked_by_hand():
    net, masks = masked(nn.Dropout(0.4), nn.Dropout(0.1), seed=-7)
    with sample_masks(masks.keys(epoch=3, first=10, count=2)):
        found = net[1](torch.ones(2, 3, 3, dtype=torch.float64))
    for row, place in zip(found, (10, 11), strict=True):
        key = splitmix(splitmix(splitmix(-7, 3), 1), place)
        threshold = round(0.1 * 2**16)
        expected = [lane >= threshold - 2**15 for lane in lanes(key, 9)]
        assert (row.flatten() > 0).tolist() == expected
        assert row.max().item() == 2**16 / (2**16 - threshold)


@pytest.mark.parametrize("name", LAYERS)
def test_division_of_the_samples_changes_no_bit(name):
    layer, shape = LAYERS[name]
    net, masks = masked(layer)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    rows = shape[0] // 8
    before = torch.get_rng_state()
    with sample_masks(masks.keys(1, 0, 8)):
        whole = net(x)
    parts = []
    for first, end in pairwise((0, 1, 1, 6, 8)):
        with sample_masks(masks.keys(1, first, end - first)):
            parts.append(net(x[first * rows : end * rows]))
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < int((whole == 0).sum()) < whole.numel()
    (gradient,) = torch.autograd.grad(whole.sum(), x)
    torch.testing.assert_close(gradient * x, whole, rtol=1e-15, atol=0)


def test_masks_of_samples_layers_calls_and_epochs_are_unrelated():
    net, masks = masked(nn.Dropout(0.5), nn.Dropout(0.5))
    x = torch.ones(3, 40_000)
    rows = []
    for epoch in (0, 1):
        with sample_masks(masks.keys(epoch, 0, 3)):
            rows += [net[0](x), net[1](x), net[0](x), net[0](x)]
    signs = torch.cat(rows).double() - 1
    correlations = signs @ signs.T / 40_000 - torch.eye(len(signs))
    assert correlations.abs().max() < 5 / 40_000**0.5
    neighbors = (signs[:, 1:] * signs[:, :-1]).mean(1)
    assert neighbors.abs().max() < 5 / 40_000**0.5


def test_without_keys_layers_are_torchs_own():
    net, masks = masked(nn.Dropout(0.5), nn.Dropout2d(0.5), nn.Dropout(0.0))
    theirs = nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5))
    x = torch.randn(4, 6, 5, 7)
    for each in (net, theirs):
        torch.manual_seed(3)
        each.drawn = each(x)
    assert torch.equal(net.drawn, theirs.drawn)
    assert type(net[0]).__name__ == "Dropout"
    assert masks.keys(0, 0, 4).shape == (4, 2), "a layer that drops nothing has no keys"
    with sample_masks(masks.keys(0, 0, 4)):
        assert torch.equal(net.eval()(x), x)
    assert SampleMasks(nn.Linear(1, 1), 0).keys(0, 0, 4) is None


def test_blocks_of_smps_efficientnets_drop_what_they_add():
    encoder = smp.Unet("efficientnet-b0", encoder_weights=None).encoder.double()
    block = next(each for each in encoder._blocks if each._has_drop_connect)
    mask_by_sample(encoder)
    x = torch.randn(40, 24, 6, 6, dtype=torch.float64)
    for norm in (part for part in block.modules() if isinstance(part, nn.BatchNorm2d)):
        norm.eval()
    added = block(x, 0.0) - x
    with sample_masks(SampleMasks(encoder, 0).keys(1, 0, 40)):
        found = block(x, 0.25) - x
    is_dropped = found.flatten(1).abs().amax(1) == 0
    assert 3 < int(is_dropped.sum()) < 20
    torch.testing.assert_close(found[~is_dropped], added[~is_dropped] / 0.75, rtol=1e-9, atol=1e-12)


def three_calls():
    """Return a network that calls one of its layers three times, with its keys."""
    drop = nn.Dropout(0.4)
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), drop)
    net = nn.Sequential(nn.Linear(3, 6), drop, block, nn.Linear(6, 6), drop).double()
    mask_by_sample(net)
    return net, SampleMasks(net, 3)


def from_chunks(net):
    before = DataParallelModel(nn.Identity(), ["cpu"] * 3, gpu0_bsz=1)
    model = BalancedDataParallel(4, net, ["cpu"] * 3)
    return lambda x: model(before(x))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: BalancedDataParallel(None, net, ["cpu"] * 3, shares=[0, 3, 2]),
        lambda net: BalancedDataParallel(1, net, ["cpu"] * 3, mode="lockstep"),
        lambda net: BalancedDataParallel(5, net, ["cpu"] * 2),
        from_chunks,
    ],
    ids=["uneven", "lockstep", "one device used", "chunks"],
)
def test_masks_around_a_model_reach_its_replicas(wrap):
    """The network runs three times in one `with` statement, in the middle as a bare module, with a recomputed block."""
    net, masks = three_calls()
    x, found, model = torch.randn(5, 3, dtype=torch.float64), [], wrap(net)
    for sets, networks in (([], (net, net, net)), ([["2"]], (net, net, net)), ([["2"]], (model, net, model))):
        set_recompute(net, sets)
        with sample_masks(masks.keys(epoch=2, first=3, count=5)):
            outputs = torch.cat([each(x) for each in networks])
        found.append([outputs, *torch.autograd.grad((outputs**2).sum(), list(net.parameters()))])
    assert all(map(torch.equal, *found[:2]))
    for value, truth in zip(*found[1:], strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-12)
    assert found[0][0].eq(0).any()


def test_keys_of_another_number_of_samples_are_refused():
    net, masks = three_calls()
    x = torch.ones(8, 3, dtype=torch.float64)
    keys = masks.keys(1, 0, 4)
    for devices, gpu0_bsz in ((2, 1), (2, 5), (1, None), (0, None)):
        model = BalancedDataParallel(gpu0_bsz, net.train(), ["cpu"] * devices)
        with sample_masks(keys):
            with pytest.raises(
                ValueError, match="keys of 4 samples, and the batch has 5: give one row per sample, or None"
            ):
                model(x[:5])
            assert model.eval()(x[:5]).shape == (5, 6), "nothing is dropped"
    torch.manual_seed(3)
    drawn = net.train()(x[:5])
    torch.manual_seed(3)
    with sample_masks(keys):
        assert torch.equal(net(x[:5]), drawn), "a layer cannot tell samples from tokens, which may come first"


@pytest.mark.parametrize(
    ("layer", "shape", "dims"),
    [
        ("Dropout", (64, 50, 1), 2),
        ("Dropout1d", (64, 5, 6), 2),
        ("Dropout2d", (64, 5, 6, 7), 2),
        ("Dropout3d", (64, 5, 2, 3, 3), 2),
        ("DropPath", (320, 4, 6), 1),
        ("StochasticDepth", (320, 4, 6), 1),
    ],
)
def test_values_are_dropped_together_as_torch_does(layer, shape, dims):
    net, masks = masked(LAYERS[layer][0])
    with sample_masks(masks.keys(1, 0, shape[0])):
        kept = net(torch.ones(shape)).flatten(dims)
    assert (kept == kept[..., :1]).all()
    share = (kept != 0).double().mean().item()
    num = kept.flatten(0, dims - 1).shape[0]
    assert abs(share - 0.7) < 4 * (0.21 / num) ** 0.5
    assert kept.max().item() == pytest.approx(1 / 0.7, rel=1e-4)


def test_memory_format_and_in_place_change_no_mask():
    net, masks = masked(nn.Dropout(0.5), nn.Dropout(0.5, inplace=True))
    x = torch.randn(4, 6, 5, 7)
    with sample_masks(masks.keys(1, 0, 4)):
        plain = net(x)
    with sample_masks(masks.keys(1, 0, 4)):
        other = net(x.contiguous(memory_format=torch.channels_last))
    assert torch.equal(plain, other)
    assert other.is_contiguous(memory_format=torch.channels_last)
