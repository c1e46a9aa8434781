"""The copy of a model's buffers: restored by a flag on the device, in common storages that nothing else notices."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from segapp.checkpoint.snapshot import snapshot
from segapp.parallel import DataParallelModel
from segapp.precision import half_except_batchnorm
from segapp.training.step.rollback import BufferGuard


class Odd(nn.Module):
    """Buffers that cannot move into a common storage, or only with care."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("as_weight", self.weight.data)
        self.register_buffer("expanded", torch.arange(3.0).expand(2, 3), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("not_saved", torch.randn(5), persistent=False)
        self.register_buffer("nhwc", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), Odd(), nn.BatchNorm2d(6))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def disturb(model: nn.Module) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "expanded" not in name:
                buffer.fill_(float("nan") if buffer.is_floating_point() else 7)


def assert_values(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].stride() == value.stride() or "expanded" in name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("restore", "is_undone"),
    [
        (BufferGuard.restore, True),
        (lambda guard: guard.restore_where(torch.tensor(1.0)), True),
        (lambda guard: guard.restore_where(torch.tensor(0.0)), False),
    ],
    ids=["by hand", "bad step", "good step"],
)
def test_restore_gives_the_remembered_values(restore: Callable[[BufferGuard], None], is_undone: bool) -> None:
    """Three times, each with other values."""
    model = half_except_batchnorm(network())
    guard = BufferGuard(model)
    for number in (1, 2, 3):
        with torch.no_grad():
            model[1].running_mean.add_(number)
            model[3].num_batches_tracked.add_(number)
        remembered = values(model)
        guard.remember()
        with torch.no_grad():
            model[1].running_mean.mul_(2)
            model[3].running_var.fill_(number + 5)
            model[3].num_batches_tracked.add_(7)
        expected = remembered if is_undone else values(model)
        restore(guard)
        assert_values(model, expected)


def test_buffers_keep_identity_values_and_layout() -> None:
    model = network()
    before, objects = values(model), [id(buffer) for buffer in model.buffers()]
    guard = BufferGuard(model)
    assert_values(model, before)
    assert [id(buffer) for buffer in model.buffers()] == objects
    assert model[2].as_weight.data_ptr() == model[2].weight.data_ptr()  # shared as before
    assert all(buffer.data_ptr() % 8 == 0 for buffer in model.buffers())
    model[1](torch.randn(2, 6, 4, 4))
    assert int(model[1].num_batches_tracked) == 1
    disturb(model)
    guard.restore()
    assert_values(model, before)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.load_state_dict(network().state_dict()),
        lambda model: model.load_state_dict(network().state_dict(), assign=True),
        lambda model: model.__setitem__(3, nn.BatchNorm2d(6)),
        lambda model: setattr(model[2], "none", torch.ones(3)),
        nn.Module.double,
    ],
    ids=["loaded", "assigned", "replaced", "filled", "converted"],
)
def test_guard_follows_a_changed_model(change: Callable[[Any], Any]) -> None:
    model = network()
    guard = BufferGuard(model)
    with torch.no_grad():
        model[1].running_mean.add_(3.0)
    change(model)
    expected = values(model)
    guard.remember()
    disturb(model)
    guard.restore_where(torch.tensor(1.0))
    assert_values(model, expected)


def test_deep_copy_is_apart_from_the_original() -> None:
    model = network()
    guard = BufferGuard(model)
    guard.remember()
    other = copy.deepcopy(model)
    expected = values(other)
    disturb(model)
    assert_values(other, expected)
    disturb(other)
    guard.restore()
    assert_values(model, expected)


def _num_bytes(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getvalue())


def test_checkpoint_has_the_bytes_of_separate_buffers() -> None:
    plain, guarded = network(), network()
    BufferGuard(guarded)
    assert _num_bytes(snapshot(guarded.state_dict())) == _num_bytes(snapshot(plain.state_dict()))
    one = snapshot({"mean": guarded[1].running_mean})
    assert one["mean"].untyped_storage().nbytes() == 6 * 4


@pytest.mark.parametrize("gpu0_bsz", [None, 0, 1])
def test_replicas_update_the_common_storage(gpu0_bsz: int | None) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)).train()
    ours = copy.deepcopy(plain)
    guard = BufferGuard(ours)
    guard.remember()
    before = values(ours)
    images = torch.randn(6, 3, 8, 8)
    networks = [DataParallelModel(module, ["cpu"] * 3, gpu0_bsz=gpu0_bsz, full_batch=6) for module in (plain, ours)]
    outputs = [network(images) for network in networks]
    for theirs, found in zip(*outputs, strict=True):
        assert torch.equal(theirs, found)
    assert_values(ours, values(plain))
    assert not torch.equal(ours[1].running_mean, before["1.running_mean"])
    guard.restore()
    assert_values(ours, before)
