"""Steps of the engine on fake devices, which have no values, in a process of its own; prints JSON for tests/parallel.

`Recording` notes each operator of a step with the thread that issues it, its devices and the tensors that it reads and
writes. On CUDA every device has one stream here: an operator waits for what was issued to its stream before; a copy
between two devices waits for both streams, and both wait for it (torch's `copy_` records two events). Such a step
cannot wait in a circle. A collective could, because its launches on the devices are not one unit, so a step must issue
none. `unordered_reads` finds the reads that do not wait for the write: an operator that reads another device's tensor
without a copy, and a read in one thread of a value from another that no exchange, start or end orders after the write.

An operator on tensors of two devices is an error of torch here, unlike on logical CPUs.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from segapp.parallel import (
    BalancedDataParallel,
    DataParallelCriterion,
    DataParallelModel,
    allreduce,
    convert_sync_batchnorm,
    current_replica,
    gradient_penalty,
    replicas,
)
from segapp.parallel.model_parallel import place_stages
from segapp.parallel.replica_threads import ReplicaThreads
from tests.support.parallel_cases import PlainCE, SmallNet

COPIES = ("_to_copy", "copy_")


@dataclass(frozen=True)
class Action:
    """Something that a thread issues to the streams of devices.

    It reads (value, its device) and writes values, `after` the actions of other threads that the host has waited for.
    """

    thread: str
    devices: tuple[int, ...]
    kind: str = "operator"
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[int, ...] = ()
    after: frozenset[int] = frozenset()
    what: str = ""


def unordered_reads(actions: Sequence[Action]) -> list[str]:
    """Return the reads that nothing orders after the write; empty if there is none."""
    found: list[str] = []
    before: list[int] = []  # for each action the set of actions that the host always issues before it, as bits
    latest: dict[str, int] = {}
    writers: dict[int, int] = {}
    for number, action in enumerate(actions):
        bits = 0
        for other in {*action.after, *([latest[action.thread]] if action.thread in latest else [])}:
            bits |= before[other] | 1 << other
        before.append(bits)
        latest[action.thread] = number
        for value, device in action.reads:
            if device not in action.devices:
                found.append(f"{action.what} of {action.thread} on {list(action.devices)} reads from device {device}")
            writer = writers.get(value)
            if writer is not None and not bits >> writer & 1:
                found.append(f"{action.what} of {action.thread} reads what {actions[writer].thread} may still issue")
        writers.update(dict.fromkeys(action.writes, number))
    return found


class Recording(TorchDispatchMode):
    """Notes what each thread issues; a thread of autograd is that of its node's device, as on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Action] = []
        self._latest: dict[str, int] = {}
        self._awaited: defaultdict[str, set[int]] = defaultdict(set)
        self._kept: list[Any] = []  # so that no storage's address is used again
        self._earlier_nodes: dict[Any, set[Any]] = {}
        self._of_node: dict[Any, int] = {}
        self._is_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        self._kept += [inputs, outputs]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        devices = dict.fromkeys(t.device.index for t in (*inputs, *outputs) if t.device.type == "fake")
        if devices and outputs and not is_view:
            kind = "copy" if func._opname in COPIES and len(devices) > 1 else "operator"
            where = tuple(devices) if kind == "copy" else (next(t.device.index for t in outputs or inputs),)
            self.note(kind, where, inputs, outputs, func._opname)
        return out

    def note(
        self, kind: str, devices: tuple[int, ...], inputs: Sequence[Tensor], outputs: Sequence[Tensor], what: str
    ) -> None:
        """Add an action of the present thread."""
        node = torch._C._current_autograd_node() if self._is_backward else None
        thread, after = self._thread(node), set()
        if node is not None:
            after |= {self._of_node[each] for each in self._earlier_nodes.get(node, ()) if each in self._of_node}
        after |= self._awaited.pop(thread, set())
        reads = tuple((t.untyped_storage()._cdata, t.device.index) for t in inputs if t.device.type == "fake")
        writes = tuple(t.untyped_storage()._cdata for t in outputs if t.device.type == "fake")
        self._latest[thread] = len(self.actions)
        if node is not None:
            self._of_node[node] = len(self.actions)
        self.actions.append(Action(thread, devices, kind, reads, writes, frozenset(after), what))

    def _thread(self, node: Any) -> str:
        if node is not None:
            return f"autograd {next(m.device.index for m in node._input_metadata if m.device.type == 'fake')}"
        replica = current_replica()
        return "main" if replica is None else f"replica {replica.index}"

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Note where the threads of replica groups wait for each other."""
        run, exchange = ReplicaThreads.run, ReplicaThreads.exchange
        arrived: dict[int, set[int]] = {}

        def noted_run(group: Any, calls: Sequence[Any]) -> Any:
            names = [f"replica {i}" for i in range(len(calls))]
            for name in names:
                self._awaited[name] |= self._latest_of("main")
            results = run(group, calls)
            self._awaited["main"] |= set().union(*map(self._latest_of, names))
            return results

        def noted_exchange(group: Any, index: int, key: str, value: Any, combine: Callable[..., Any]) -> Any:
            arrived[index] = self._latest_of(f"replica {index}")

            def noted_combine(values: Any) -> Any:
                self._awaited["replica 0"] |= set().union(*arrived.values())
                answers = combine(values)
                arrived[-1] = self._latest_of("replica 0")
                return answers

            answer = exchange(group, index, key, value, noted_combine)
            self._awaited[f"replica {index}"] |= arrived[-1]
            return answer

        with (
            mock.patch.object(ReplicaThreads, "run", noted_run),
            mock.patch.object(ReplicaThreads, "exchange", noted_exchange),
        ):
            yield

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """Note the collectives of `torch.cuda.nccl`, which all of `torch.cuda.comm` uses on distinct devices."""

        def noted(what: str) -> Callable[..., None]:
            return lambda inputs, *_, **__: self.note("collective", (0,), inputs, (), what)

        with contextlib.ExitStack() as stack:
            for name in ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"):
                stack.enter_context(mock.patch.object(torch.cuda.nccl, name, noted(name)))
            yield

    def _latest_of(self, thread: str) -> set[int]:
        return {self._latest[thread]} if thread in self._latest else set()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; a node waits for the nodes before it only."""
        gradient = torch.ones_like(loss)
        later: dict[Any, list[Any]] = {}
        todo = [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in later:
                later[node] = [each for each, _ in node.next_functions if each is not None]
                todo += later[node]
        self._earlier_nodes = {node: set() for node in later}
        for node in self._by_dependency(loss.grad_fn, later):
            for each in later[node]:
                self._earlier_nodes[each] |= self._earlier_nodes[node] | {node}
        for thread in {f"autograd {i}" for i in range(8)}:
            self._awaited[thread] |= self._latest_of("main")
        self._is_backward = True
        loss.backward(gradient)
        self._is_backward = False

    @staticmethod
    def _by_dependency(root: Any, later: dict[Any, list[Any]]) -> list[Any]:
        waiting: defaultdict[Any, int] = defaultdict(int)
        for nodes in later.values():
            for node in nodes:
                waiting[node] += 1
        ordered, ready = [], [root]
        while ready:
            ordered.append(node := ready.pop())
            for each in later[node]:
                waiting[each] -= 1
                if not waiting[each]:
                    ready.append(each)
        return ordered


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


def record(num_devices: int, sync_bn: bool = True, gpu0_bsz: int | None = None) -> tuple[list[Action], list[str]]:
    """Return the actions of one step of the engine, and the devices of its outputs."""
    net = rebuild_on(SmallNet(), "fake:0")
    if sync_bn:
        convert_sync_batchnorm(net)
    else:
        net.eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
    model = DataParallelModel(net, [f"fake:{i}" for i in range(num_devices)], gpu0_bsz=gpu0_bsz)
    criterion = DataParallelCriterion(PlainCE(weight=torch.empty(4, device="fake:0")))
    recording = Recording()
    with mock.patch.object(replicas, "_BUCKET_BYTES", 100), recording.waits(), recording.collectives(), recording:
        outputs = model(torch.empty(9, 3, 11, 11))
        loss = criterion(outputs, torch.empty(9, 11, 11, dtype=torch.long))
        recording.backward(loss)
    optimizer.step()
    assert all(p.grad is not None and p.grad.device == p.device == loss.device for p in net.parameters())
    assert loss.device == torch.device("fake:0")
    return recording.actions, [str(output[0].device) for output in outputs]


class Summed(nn.Module):
    """Its outputs are on the input's device, though the sum was computed on another one."""

    def forward(self, x: Tensor) -> Tensor:
        return x + allreduce(x.sum())[0]


def other_roads() -> None:
    """Run sums and penalties through replicas, gather outputs on another device, and run a model in stages."""
    for outputs in (None, "fake:2"):
        summed = BalancedDataParallel(1, Summed(), ["fake:1", "fake:0"], outputs)(torch.empty(5, 2))
        assert str(summed.device) == (outputs or "fake:1")
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


# ---------------------------------------------------------------------------------------------------- seeded defects
def with_collectives(num_devices: int) -> list[Action]:
    """Return the actions of a step that sums each bucket of gradients with NCCL."""

    def reduce(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        sums = [None if grad is None else torch.empty_like(grad) for grad in grads[: len(ctx.layouts)]]
        torch.cuda.nccl.reduce(
            [grad for grad in grads if grad is not None], [each for each in sums if each is not None]
        )
        return (None, *sums)

    with mock.patch.object(replicas._CopyToDevices, "backward", staticmethod(reduce)):
        return record(num_devices, sync_bn=False)[0]


def without_waiting(actions: Sequence[Action]) -> list[Action]:
    """A step whose exchanges give tensors to replica 0 before the others have issued what computes them."""
    others = {n for n, action in enumerate(actions) if action.thread.startswith("replica") and action.thread[-1] != "0"}
    return [replace(a, after=a.after - others) if a.thread == "replica 0" else a for a in actions]


def without_copies(actions: Sequence[Action]) -> list[Action]:
    """A step that reads the other devices' tensors in place, as peer access would let a kernel do."""
    return [replace(a, devices=a.devices[-1:], kind="operator") for a in actions]


def mixed_devices() -> str:
    """Return what torch says of a target that was not scattered."""
    model = DataParallelModel(rebuild_on(SmallNet(), "fake:0"), ["fake:0", "fake:1"], gpu0_bsz=2)
    try:
        PlainCE().statistics(model(torch.empty(5, 3, 11, 11))[1], torch.empty(3, 11, 11, device="fake:0").long())
    except RuntimeError as error:
        return str(error)
    return ""


def findings(actions: Sequence[Action], outputs: Sequence[str] = ()) -> dict[str, Any]:
    kinds = [action.kind for action in actions]
    return {
        "unordered": unordered_reads(actions)[:3],
        "threads": sorted({action.thread for action in actions}),
        "outputs": outputs,
        **{kind: kinds.count(kind) for kind in ("copy", "collective")},
    }


def main() -> None:
    """Print what is found; the process knows the fake devices from here on."""
    warnings.simplefilter("ignore")
    _setup_privateuseone_for_python_backend("fake")
    torch.autograd.set_multithreading_enabled(False)
    with FakeTensorMode():
        print(json.dumps(all_findings()))


def all_findings() -> dict[str, Any]:
    actions, outputs = record(3)
    said = {
        "dp": findings(actions, outputs),
        "dp on 5 devices": findings(*record(5, gpu0_bsz=1)),
        "dp without gpu 0": findings(*record(3, gpu0_bsz=0)),
        "dp, sync_bn off": findings(*record(3, sync_bn=False)),
        "with collectives": findings(with_collectives(3)),
        "without waiting": findings(without_waiting(actions)),
        "without copies": findings(without_copies(actions)),
        "mixed devices": mixed_devices(),
    }
    other_roads()
    return said
