"""Private names of other libraries: each as segapp uses it, and none outside `segapp.compat`."""

from __future__ import annotations

import ast
import multiprocessing
import os
import pickle
import signal
import time
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import mobilenet_v3_small

from segapp.compat import models as compat_models
from segapp.compat import torch as compat
from tests.support import ROOT


class Recorder(compat.TorchDispatchMode):
    """Names of the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(compat.operator_name(func))
        return func(*args, **(kwargs or {}))


def private_imports(tree: ast.AST) -> list[str]:
    """Names and modules with a leading underscore that are imported from other libraries."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(("segapp", "__future__")):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if any(part.startswith("_") for part in name.split("."))]


def test_private_names_are_imported_in_compat_alone() -> None:
    found = {}
    for path in sorted((ROOT / "segapp").rglob("*.py")):
        names = private_imports(ast.parse(path.read_text()))
        if names:
            found[path.relative_to(ROOT / "segapp").parts[0]] = names
    assert set(found) == {"compat"}  # ruff's SLF001 holds the same for attributes


def test_operators_are_named_without_namespace_and_overload() -> None:
    x = torch.zeros(3)
    with Recorder() as recorder:
        x.add_(1)
        torch.mul(x, 2)
    assert recorder.found == ["add_", "mul"]


def test_dispatch_modes_are_listed_and_can_be_left() -> None:
    with Recorder() as recorder:
        assert compat.dispatch_modes() == [recorder]
        with compat.without_dispatch_modes():
            torch.ones(2)
        assert recorder.found == []
        torch.ones(2)
    assert recorder.found == ["ones"]
    assert compat.dispatch_modes() == []


def test_storage_key_is_shared_by_views_only() -> None:
    x, y = torch.zeros(4), torch.zeros(4)
    assert compat.storage_key(x) == compat.storage_key(x[1:].view(3, 1)) != compat.storage_key(y)
    with compat.FakeTensorMode():
        a, b = torch.empty(4), torch.empty(4)
        assert isinstance(a, compat.FakeTensor)
        assert compat.storage_key(a) == compat.storage_key(a[1:]) != compat.storage_key(b)


def test_sequence_numbers_count_the_nodes_of_the_graph() -> None:
    x = torch.ones(1, requires_grad=True)
    before = compat.next_sequence_number()
    x.exp().sin()
    assert compat.next_sequence_number() == before + 2


def test_traces_and_transforms_are_noticed() -> None:
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(compat.is_traced_or_transformed())
        return x + 1

    note(torch.ones(2))
    torch.func.vmap(note)(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.jit.trace(note, torch.ones(2), check_trace=False)
    assert seen == [False, True, True]


def test_innermost_saved_tensors_hooks_are_found() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    assert compat.saved_tensors_hooks() is None
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda t: t, lambda t: t), hooks(pack, unpack):
        assert compat.saved_tensors_hooks() == (pack, unpack)


def test_slots_hold_what_is_none_and_can_be_replaced() -> None:
    layer = nn.BatchNorm2d(2, affine=False)
    assert compat.parameter_slots(layer) == {"weight": None, "bias": None}
    assert set(compat.buffer_slots(layer)) == {"running_mean", "running_var", "num_batches_tracked"}
    compat.buffer_slots(layer)["running_mean"] = torch.full((2,), 5.0)
    assert layer.running_mean is not None
    assert layer.running_mean.tolist() == [5, 5]
    assert compat.module_slots(nn.Sequential(layer)) == {"0": layer}
    assert isinstance(layer, compat.BatchNorm)
    assert isinstance(nn.InstanceNorm2d(2), compat.BatchOrInstanceNorm)


def test_own_tensors_change_and_children_do_not() -> None:
    outer = nn.Linear(1, 1)
    outer.inner = nn.Linear(1, 1)
    compat.apply_to_own_tensors(outer, lambda tensor: tensor.double())
    assert (outer.weight.dtype, outer.inner.weight.dtype) == (torch.float64, torch.float32)


@pytest.mark.slow
def test_replicas_and_compiled_modules_are_recognized() -> None:
    class Counted(nn.Linear):
        def _replicate_for_data_parallel(self) -> nn.Linear:
            copied = super()._replicate_for_data_parallel()
            copied.num_copies = 1
            return copied

    layer = nn.Linear(1, 1)
    replica = compat.shallow_replica(layer)
    assert (compat.is_replica(layer), compat.is_replica(replica)) == (False, True)
    assert list(replica.parameters()) == []
    assert compat.shallow_replica(Counted(1, 1)).num_copies == 1
    assert not compat.is_compiled(layer)
    layer.compile()
    assert compat.is_compiled(layer)
    assert compat.is_compiled(torch.compile(nn.Linear(1, 1)))


def test_state_dicts_have_metadata() -> None:
    metadata = getattr(nn.BatchNorm2d(1).state_dict(), compat.STATE_DICT_METADATA)
    assert metadata == {"": {"version": 2}}


def test_fused_optimizers_take_found_inf() -> None:
    weight = nn.Parameter(torch.ones(1))
    assert compat.takes_found_inf(torch.optim.AdamW([weight], fused=True))
    assert not compat.takes_found_inf(torch.optim.AdamW([weight]))


def test_grouped_operators_compute_in_place() -> None:
    a, b = [torch.tensor([2.0]), torch.tensor([4.0])], [torch.tensor([3.0]), torch.tensor([6.0])]
    compat.foreach_mul_(a, torch.tensor(2.0))
    assert [float(x) for x in a] == [4, 8]
    compat.foreach_copy_(a, b)
    assert [float(x) for x in a] == [3, 6]
    compat.fused_sgd_(
        a, b, [], weight_decay=1.0, momentum=0.0, lr=0.5, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False, grad_scale=None, found_inf=torch.tensor(0.0),
    )  # fmt: skip
    assert [float(x) for x in a] == [0, 0]  # x - 0.5 (b + x) with x == b


def test_timeout_of_the_default_group_is_set(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        compat.set_group_timeout(timedelta(seconds=7))
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()


def test_workers_of_a_loader_end_by_the_replaced_event() -> None:
    calls = []

    class Event:
        def __init__(self, event, workers) -> None:
            self.event, self.workers = event, workers

        def is_set(self) -> bool:
            return self.event.is_set()

        def set(self) -> None:
            calls.append("set")
            assert compat.set_within(self.event, 1.0)

    iterator = iter(DataLoader(TensorDataset(torch.arange(4)), num_workers=1, persistent_workers=True))
    compat.replace_done_event(iterator, Event)
    (worker,) = compat.loader_workers(iterator)
    assert worker.is_alive()
    assert compat.shut_down_workers(iterator)
    assert calls == ["set"]
    assert not worker.is_alive()
    assert not compat.shut_down_workers(None)
    assert list(compat.loader_workers(None)) == []


def test_event_whose_lock_a_killed_process_holds() -> None:
    def hold(event, held) -> None:
        with event._cond:
            held.set()
            os.kill(os.getpid(), signal.SIGKILL)

    context = multiprocessing.get_context("fork")
    event, held = context.Event(), context.Event()
    process = context.Process(target=hold, args=(event, held))
    process.start()
    process.join(20)
    assert held.is_set()
    assert not compat.set_within(event, 0.05)


def test_example_sizes_are_no_constraint_of_an_export() -> None:
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    network, example = nn.Linear(2, 2), (torch.zeros(1, 2),)
    with pytest.raises(ValueError, match="specialized"):
        torch.export.export(network, example, dynamic_shapes=shapes)
    with compat.size_oblivious_export():
        program = torch.export.export(network, example, dynamic_shapes=shapes)
    assert program.module()(torch.zeros(5, 2)).shape == (5, 2)


@pytest.mark.slow
def test_dynamic_dimensions_of_onnx_get_their_names() -> None:
    pytest.importorskip("onnxscript")
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(nn.Linear(2, 2), (torch.zeros(3, 2),), dynamic_shapes=shapes)
    program = torch.onnx.export(exported, dynamo=True, verbose=False)
    assert program is not None
    compat.rename_dynamic_axes(program, {0: "batch"})
    assert str(program.model.graph.inputs[0].shape[0]) == "batch"


def test_positions_of_timm_are_embedded() -> None:
    encoder = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    tokens, rope = compat_models.embed_positions(encoder, encoder.patch_embed(torch.zeros(1, 3, 32, 32)))
    assert tokens.shape == (1, 5, 192)
    assert rope is None


def test_stages_and_feature_maps_of_torchvision() -> None:
    net = mobilenet_v3_small(weights=None).features
    assert compat_models.strided_blocks(net) == [1, 2, 4, 9]
    with torch.no_grad():
        maps = compat_models.feature_maps_of(net, {"1": "low", "12": "out"})(torch.zeros(2, 3, 64, 64))
    assert {name: tuple(each.shape[1:]) for name, each in maps.items()} == {"low": (16, 16, 16), "out": (576, 2, 2)}


class SharedState:
    """A backend that keeps the state of a rendezvous in memory."""

    name, state = "memory", b""

    def get_state(self) -> tuple[bytes, int] | None:
        return (self.state, 0) if self.state else None

    def set_state(self, state: bytes, _token: Any = None) -> tuple[bytes, int, bool]:
        self.state = state
        return state, 0, True


@pytest.mark.parametrize("shift_s", [-120.0, -20.0, 0.0, 20.0, 120.0])
def test_other_clocks_decide_nothing_in_a_rendezvous(shift_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine is dropped 15 s after its last new heartbeat, and a round ends after its last call, by this clock."""
    backend, now_s = SharedState(), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    parameters = RendezvousParameters("c10d", "127.0.0.1:1", "job", 2, 3, last_call_timeout=30, local_addr="node1")
    handler = compat.rendezvous_handler(dist.HashStore(), backend, parameters)
    holder, other = handler._state_holder, dynamic_rendezvous._NodeDesc("node2", 7, 0)

    def read() -> Any:
        now_s[0] += 2  # later than the holder keeps a state
        holder.sync()
        return holder.state

    def write(beat: float) -> None:
        state = pickle.loads(backend.state) if backend.state else dynamic_rendezvous._RendezvousState()
        sent = datetime.now(UTC) + timedelta(seconds=shift_s + beat)
        state.participants, state.last_heartbeats[other] = {other: 0}, sent
        state.deadline = sent + timedelta(seconds=30)
        backend.state = pickle.dumps(state)

    write(0)
    first = read()
    assert compat.rendezvous_members(handler) == ["node2"]
    assert abs((first.deadline - datetime.now(UTC)).total_seconds() - 30) < 1
    now_s[0] += 10
    write(5)
    assert other in read().participants
    now_s[0] += 10
    assert other in read().participants, "14 s after its last new heartbeat"
    assert abs((holder.state.deadline - datetime.now(UTC)).total_seconds() - 6) < 1, "30 s from the first sight"
    sent = pickle.loads(backend.state).last_heartbeats[other]
    holder.mark_dirty()
    holder.sync()
    assert pickle.loads(backend.state).last_heartbeats[other] == sent, "what another one wrote stays as it is"
    now_s[0] += 4
    assert other not in read().participants
