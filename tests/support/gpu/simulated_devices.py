"""What tensors on simulated devices are, in a process of their own; prints one JSON object."""

import copy
import json

import torch
from torch import Tensor, nn

from segapp.losses import CriterionCE
from segapp.memory.ledger import StorageLedger
from segapp.memory.simulated_devices import place, simulation, skeleton
from segapp.planning.simulate import StepTimes


def facts(tensor: Tensor) -> list[object]:
    """Return device, dtype, shape and whether it is a trained parameter."""
    is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    return [str(tensor.device), str(tensor.dtype).removeprefix("torch."), list(tensor.shape), is_trained]


def network() -> nn.Module:
    """Return two convolutions with one weight, between them a frozen BatchNorm."""
    net = nn.Sequential(nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1, bias=False))
    net[2].weight = net[0].weight
    net[1].requires_grad_(False)
    return skeleton(net)


def casts(ledger: StorageLedger) -> int:
    """Return how often the convolutions' weight has been cast."""
    return sum(each.what == "_to_copy 2x2x1x1 bfloat16" for each in ledger.allocations)


def attention_bytes(*, masked: bool) -> list[int]:
    """Return the bytes that attention of 2 heads over 20 tokens creates and keeps for its backward pass, sorted."""
    ledger = StorageLedger(alloc_unit_bytes=1)
    with simulation(ledger):
        query, key, value = (torch.empty(1, 2, 20, 8, device="simgpu:0", requires_grad=True) for _ in range(3))
        mask = torch.ones(1, 1, 20, 20, dtype=torch.bool, device="simgpu:0") if masked else None
        first = len(ledger.allocations)
        out = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        alive = sorted(number for number, _ in ledger._alive.values())
        kept = [ledger.allocations[number].num_bytes for number in alive if number >= first]
        out.sum().backward()
    return sorted(kept)


def seconds_of_a_step() -> dict[str, float]:
    """Return the estimated seconds of four convolutions and a sum."""
    layers = [nn.Conv2d(2, 2, 1, bias=False) for _ in range(4)]
    ledger = StorageLedger(alloc_unit_bytes=1)
    times = StepTimes(ledger)
    with simulation(ledger, times):
        net = place(skeleton(nn.Sequential(*layers)), lambda _: "simgpu:0")
        images = torch.empty(3, 2, 4, 4, device="simgpu:0")
        ledger.mark("forward")
        out = net(images)
        ledger.mark("loss")
        out.sum()
    return {phase: times.seconds["simgpu:0"][phase] for phase in ("forward", "loss")}


def main() -> None:
    """Print the facts."""
    model, ledger = network(), StorageLedger(alloc_unit_bytes=1)
    found: dict[str, object] = {}
    with simulation(ledger):
        net = place(model, lambda name: "simgpu:1" if name == "1" else "simgpu:0")
        found["placed"] = {key: facts(tensor) for key, tensor in (*net.named_parameters(), *net.named_buffers())}
        found["is shared"] = net[0].weight is net[2].weight

        images = torch.empty(3, 2, 4, 4, device="simgpu:0")
        with torch.autocast("simgpu", torch.bfloat16):
            logits = net[2](net[0](images))
            found["autocast"] = [facts(logits)[:2], facts(logits.softmax(1))[:2]]
            found["casts"] = [casts(ledger)]
        with torch.autocast("simgpu", torch.bfloat16):
            net[0](images)
        found["casts"] += [casts(ledger)]
        found["without autocast"] = facts(net[0](images))[:2]
        net[0](images).sum().backward()
        found["gradient"] = facts(net[0].weight.grad)

        weight = torch.empty(4, 2, 3, 3, device="simgpu:0").to(memory_format=torch.channels_last).requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.conv2d(images, weight).sum(), weight)
        found["channels last"] = [list(weight.stride()), list(gradient.stride())]

        copied = copy.deepcopy(net)
        found["copied"] = [facts(copied[0].weight), facts(copied[1].weight), facts(copied[1].running_mean)]
        found["of the copy"] = facts(copied[0](images))[:2]
        found["is copied"] = copied[0].weight is not net[0].weight and copied[2].weight is copied[0].weight
        net.half()
        found["is shared in half"] = net[0].weight is net[2].weight
        found["half"] = [facts(net[0].weight), facts(net[1].weight), facts(net[1].num_batches_tracked)]
        found["made"] = [facts(torch.tensor([1.5, 2.5], device="simgpu:0")), facts(torch.tensor([3]))]
        criterion = CriterionCE(weight=[1.0, 3.0]).to("simgpu:1")
        found["real weight"] = facts(criterion.weight)
    found["attention"] = [attention_bytes(masked=False), attention_bytes(masked=True)]
    found["seconds"] = seconds_of_a_step()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
