import pytest
import torch
from torch import nn

from segapp.parallel import batchnorm_single_value_problem, check_batchnorm, convert_sync_batchnorm, smallest_chunk


class Pooled(nn.Module):
    """Global pooling after a convolution, as in DeepLab's ASPP."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        x = self.body(x)
        return x + self.pooled(x)


def test_layer_with_one_value_is_named_and_model_unchanged():
    net = Pooled()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    x = torch.randn(5, 3, 9, 9)
    problem = batchnorm_single_value_problem(net, (1, 2, 2), x)
    assert "'pooled.2'" in problem
    assert "convert_sync_batchnorm" in problem
    assert smallest_chunk(net, x) == 2
    with pytest.raises(ValueError, match="single value per channel"):
        check_batchnorm(net, (1, 4), x)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert not net.pooled[2]._forward_pre_hooks


@pytest.mark.parametrize(
    "build",
    [
        lambda: convert_sync_batchnorm(Pooled()),
        lambda: Pooled().eval(),
        lambda: Pooled().body,
    ],
)
def test_synchronised_and_frozen_layers_take_any_split(build):
    net = build()
    assert smallest_chunk(net, torch.randn(2, 3, 9, 9)) == 1
    check_batchnorm(net, (1, 1, 0), torch.randn(2, 3, 9, 9))


def test_split_without_chunk_of_one_is_allowed():
    assert batchnorm_single_value_problem(Pooled(), (0, 2, 3), torch.randn(5, 3, 9, 9)) is None


def test_spatial_size_decides_whether_one_sample_suffices():
    net = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.BatchNorm2d(4))
    assert smallest_chunk(net, torch.randn(2, 3, 8, 8)) == 2
    assert smallest_chunk(net, torch.randn(2, 3, 16, 16)) == 1


def test_model_reading_values_is_assumed_to_need_two_samples():
    class NeedsValues(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            return self.norm(x) if x.sum().item() > -1e9 else x

    assert smallest_chunk(NeedsValues(), torch.randn(2, 3, 8, 8)) == 2
