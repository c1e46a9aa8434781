"""One training step of the engine on three fake devices; unlike logical CPUs, mixing them is an error.

A fake tensor has a device but no values; the backend is torch's PrivateUse1 in Python. The backend cannot
be unregistered, so this runs in a process of its own. Prints JSON: "step", and torch's error for every seeded bug.
"""

import json
import warnings

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from segapp.parallel import DataParallelCriterion, DataParallelModel, convert_sync_batchnorm, gradient_penalty
from segapp.parallel.model_parallel import place_stages
from tests.support.parallel_cases import PlainCE, SmallNet


def rebuild_on(module: nn.Module, device: str) -> nn.Module:
    """Move a module by new parameters, because Module.to cannot swap data into fake tensors."""
    new: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                made = new.setdefault(id(parameter), nn.Parameter(torch.empty(parameter.shape, device=device)))
                part._parameters[key] = made
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return module


def full_step(gpu0_bsz: int | None) -> list[str]:
    net = rebuild_on(convert_sync_batchnorm(SmallNet()), "fake:0")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
    model = DataParallelModel(net, ["fake:0", "fake:1", "fake:2"], gpu0_bsz=gpu0_bsz)
    criterion = DataParallelCriterion(PlainCE(weight=torch.empty(4, device="fake:0")))
    outputs = model(torch.empty(7, 3, 11, 11))
    loss = criterion(outputs, torch.empty(7, 11, 11, dtype=torch.long))
    loss.backward()
    optimizer.step()
    assert all(p.grad is not None and p.grad.device == p.device == loss.device for p in net.parameters())
    assert loss.device == torch.device("fake:0")
    return [str(output[0].device) for output in outputs]


def other_roads() -> None:
    """Run penalties through replicas, and a model in stages."""
    critic = rebuild_on(convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))), "fake:0")
    model = DataParallelModel(critic, ["fake:0", "fake:1"])
    samples = torch.empty(4, 3, 8, 8, device="fake:0")
    gradient_penalty(model, samples, samples, alpha=torch.empty(4, device="fake:0")).backward()
    staged = SmallNet(has_aux=False)
    for name, device in (("stem", "fake:0"), ("dilated", "fake:1"), ("residual", "fake:0"), ("head", "fake:2")):
        rebuild_on(staged.get_submodule(name), device)
    place_stages(staged, {"stem": "fake:0", "dilated": "fake:1", "head": "fake:2"})
    (logits,) = staged(torch.empty(2, 3, 11, 11))
    assert str(logits.device) == "fake:2"
    logits.sum().backward()


def seeded_bugs() -> dict[str, str]:
    net = rebuild_on(SmallNet(), "fake:0")
    outputs = DataParallelModel(net, ["fake:0", "fake:1"], gpu0_bsz=2)(torch.empty(5, 3, 11, 11))
    target = torch.empty(5, 11, 11, dtype=torch.long, device="fake:0")
    bugs = {
        "a target that was not scattered": lambda: PlainCE().statistics(outputs[1], target[2:]),
        "sums added across devices": lambda: outputs[0][0].sum((0, 2, 3)) + outputs[1][0].sum((0, 2, 3)),
        "scalars added across devices": lambda: outputs[0][0].sum() + outputs[1][0].sum(),
        "the master's layer on a replica's input": lambda: net.stem[1](torch.empty(2, 4, 6, 6, device="fake:1")),
    }
    said = {}
    for name, bug in bugs.items():
        try:
            bug()
            said[name] = ""
        except RuntimeError as error:
            said[name] = str(error).splitlines()[0]
    return said


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _setup_privateuseone_for_python_backend("fake")
    torch.autograd.set_multithreading_enabled(False)
    with FakeTensorMode():
        steps = [full_step(gpu0_bsz) for gpu0_bsz in (None, 0, 1)]
        other_roads()
        print(json.dumps({"steps": steps, "bugs": seeded_bugs()}))
