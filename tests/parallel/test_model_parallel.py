import copy

import pytest
import torch
from torch import nn

from segapp.parallel.model_parallel import balance_stages, measure_stages, place_stages, plan_stages
from segapp.parallel.scatter_gather import to_device
from tests.support.parallel_cases import PlainCE, SmallNet, grads_of, make_batch, relative_error


def test_placed_stages_match_numbers_and_keys_of_one_device():
    images, target = make_batch(4)
    torch.manual_seed(0)
    truth = SmallNet(has_aux=False).double()
    net = copy.deepcopy(truth)
    place_stages(net, {"stem": "cpu", "residual": "cpu", "head": "cpu"}, output_device="cpu")
    for model in (truth, net):
        PlainCE()(model(images), target).backward()
    assert relative_error(grads_of(net), grads_of(truth)) == 0
    assert list(net.state_dict()) == list(truth.state_dict())


@pytest.fixture
def with_meta(monkeypatch):
    """Allow stages on the meta device, which computes shapes only, so that a tensor left behind is an error."""
    monkeypatch.setattr(
        "segapp.parallel.model_parallel.resolve_devices", lambda ids: tuple(torch.device(device) for device in ids)
    )


@pytest.mark.usefixtures("with_meta")
def test_inputs_are_moved_at_every_stage_border():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)))
    place_stages(net, {"0": "cpu", "2.1": "meta"})
    assert net(torch.randn(2, 3, 2, 2)).device.type == "meta"
    assert net[2][0].weight.device.type == "cpu"
    assert net[2][1].weight.device.type == "meta"


@pytest.mark.usefixtures("with_meta")
def test_parts_move_to_their_stage_and_outputs_to_theirs():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    place_stages(net, {"1": "meta"}, rest="cpu")
    assert {name: tensor.device.type for name, tensor in net.state_dict().items() if "weight" in name} == {
        "0.weight": "cpu", "1.weight": "meta", "2.weight": "cpu"
    }  # fmt: skip
    assert net[1].running_mean.device.type == "meta"
    net = nn.Sequential(nn.Conv2d(3, 4, 1))
    place_stages(net, {"0": "cpu"}, output_device="meta")
    assert net(torch.randn(1, 3, 2, 2)).device.type == "meta"
    net = SmallNet(has_aux=False)
    place_stages(net, {"stem": "cpu", "stem.0": "meta"})
    assert [net.stem[0].weight.device.type, net.head.weight.device.type] == ["meta", "cpu"], "the inner stage counts"


@pytest.mark.usefixtures("with_meta")
def test_parameter_shared_between_devices_is_refused():
    with pytest.raises(ValueError, match=r"aux\.weight on cpu is the same parameter as head\.weight on meta"):
        place_stages(SmallNet(), {"head": "meta"}, rest="cpu")


def brute_force(costs, num_devices):
    def best(costs, num_devices):
        if num_devices == 1 or len(costs) <= 1:
            return sum(costs)
        return min(max(sum(costs[:i]), best(costs[i:], num_devices - 1)) for i in range(len(costs) + 1))

    return best(list(costs), num_devices)


def test_planned_stages_are_the_best_balanced_in_order():
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        costs = torch.randint(0, 9, (int(torch.randint(1, 8, (), generator=generator)),), generator=generator).tolist()
        for num_devices in (1, 2, 3, 4):
            numbers = plan_stages(costs, num_devices)
            assert list(numbers) == sorted(numbers)
            assert all(0 <= number < num_devices for number in numbers)
            loads = [sum(c for c, n in zip(costs, numbers, strict=True) if n == d) for d in range(num_devices)]
            assert max(loads) == brute_force(costs, num_devices)
    assert plan_stages([], 2) == ()


def test_measured_memory_counts_parameters_and_activations():
    net = nn.Sequential(nn.Linear(10, 20, bias=False), nn.ReLU(), nn.Linear(20, 5, bias=False))
    x = torch.randn(7, 10)
    costs = measure_stages(net, ["0", "1", "2"], x)
    assert costs == {
        "0": 2 * 200 * 4 + 7 * 10 * 4,
        "1": 7 * 20 * 4,  # ReLU keeps its output, which the next layer shares
        "2": 2 * 100 * 4,
    }
    net[0].requires_grad_(False)
    assert measure_stages(net, ["0", "1", "2"], x) == {"0": 200 * 4, "1": 0, "2": 2 * 100 * 4 + 7 * 20 * 4}
    assert balance_stages(net, ["cpu", "cpu"], x) == {name: torch.device("cpu") for name in "012"}


def test_only_children_and_lists_are_divided_further():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.blocks = nn.Linear(9, 9), nn.ModuleList(nn.Sequential(nn.Linear(9, 9)) for _ in range(3))
            self.empty, self.head = nn.ModuleList(), nn.Linear(9, 30)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    custom = nn.Module()
    custom.network = nn.Sequential(Listed())
    custom.forward = lambda x, shift: custom.network(x) + shift
    names = [f"network.0.{name}" for name in ("stem", "blocks.0", "blocks.1", "blocks.2", "head")]
    stages = balance_stages(custom, ["cpu", "cpu"], torch.randn(5, 9), torch.randn(30))
    assert list(stages) == names
    place_stages(custom, stages)


def test_measuring_needs_no_values_and_changes_nothing():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).half()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    example = torch.randn(2, 3, 5, 5).half()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    costs = measure_stages(net, ["0", "1", "2"], example)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert measure_stages(net.to("meta"), ["0", "1", "2"], example) == costs  # the example is on another device


def test_copies_to_the_host_wait_for_their_values():
    class Noted(torch.Tensor):
        def to(self, device, non_blocking=False):
            copies.append((device.type, non_blocking))
            return self

    copies = []
    for device in ("cpu", "cuda:0"):
        to_device([Noted()], torch.device(device))
    assert copies == [("cpu", False), ("cuda", True)]
