"""The order in which a data-parallel step issues its operators on 2 to 8 fake devices, for tests/parallel.

`Recording` runs a step on fake devices, where a tensor has a device but no values, and notes each operator with the
thread that issues it, its devices and the tensors that it reads and writes. On CUDA every device has one stream here:
an operator on one device waits for what was issued to its stream before; a copy between two devices waits for both
streams, and both wait for it (torch's `copy_` records two events). Such a step cannot wait in a circle: events only
point to what was issued before. A collective could, because its launches on the devices are not one unit, so a step
must issue none.

`unordered_reads` finds the reads that do not wait for the write: an operator that reads another device's tensor without
a copy, and a read in one thread of a value from another that no exchange, start or end orders after the write.

Fake devices cannot be removed from a process, so this runs in one of its own and prints JSON: the findings in a step
of the engine on 2, 3 and 8 devices, and in steps with seeded defects.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from segapp.parallel import DataParallelCriterion, DataParallelModel, convert_sync_batchnorm, current_replica, replicas
from segapp.parallel.replica_threads import ReplicaThreads
from tests.support.gpu.fake_device_step import rebuild_on
from tests.support.parallel_cases import PlainCE

COPIES = ("_to_copy", "copy_")


@dataclass(frozen=True)
class Action:
    """Something that a thread issues to the streams of devices.

    Attributes:
        thread: name of the issuing thread.
        devices: whose streams it is issued to.
        kind: "operator", "copy" or "collective".
        reads: (value, its device) of what it reads.
        writes: values it writes.
        after: numbers of the actions of other threads that the host has waited for.
        what: name, for messages.
    """

    thread: str
    devices: tuple[int, ...]
    kind: str = "operator"
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[int, ...] = ()
    after: frozenset[int] = frozenset()
    what: str = ""


@dataclass
class Order:
    """Actions in an order in which they were issued once, and what the host orders in all runs."""

    actions: Sequence[Action]
    before: list[int] = field(default_factory=list)
    """For each action the set of actions that the host always issues before it, as bits."""

    def __post_init__(self) -> None:
        latest: dict[str, int] = {}
        for number, action in enumerate(self.actions):
            earlier = set(action.after) | ({latest[action.thread]} if action.thread in latest else set())
            bits = 0
            for other in earlier:
                bits |= self.before[other] | 1 << other
            self.before.append(bits)
            latest[action.thread] = number

    def are_concurrent(self, one: int, other: int) -> bool:
        """Return True if threads may issue the two in either order."""
        first, second = min(one, other), max(one, other)
        return not self.before[second] >> first & 1


def unordered_reads(actions: Sequence[Action]) -> list[str]:
    """Return the reads that nothing orders after the write; empty if there is none."""
    order, found = Order(actions), []
    writers: dict[int, int] = {}
    for number, action in enumerate(actions):
        for value, device in action.reads:
            if device not in action.devices:
                found.append(f"{action.what} of {action.thread} on {list(action.devices)} reads from device {device}")
            writer = writers.get(value)
            if writer is not None and order.are_concurrent(writer, number):
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


class Net(nn.Module):
    """Two layers of BatchNorm, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        )
        self.layers[5].weight = self.layers[3].weight

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return (self.layers(images),)


def record(num_devices: int, sync_bn: bool = True, gpu0_bsz: int | None = None) -> list[Action]:
    """Return the actions of one step of the engine."""
    net = rebuild_on(Net(), "fake:0")
    if sync_bn:
        convert_sync_batchnorm(net)
    else:
        net.eval()
    model = DataParallelModel(net, [f"fake:{i}" for i in range(num_devices)], gpu0_bsz=gpu0_bsz)
    criterion = DataParallelCriterion(PlainCE(weight=torch.empty(4, device="fake:0")))
    recording = Recording()
    with mock.patch.object(replicas, "_BUCKET_BYTES", 100), recording.waits(), recording.collectives(), recording:
        outputs = model(torch.empty(9, 3, 11, 11))
        recording.backward(criterion(outputs, torch.empty(9, 9, 9, dtype=torch.long)))
    return recording.actions


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
        return record(num_devices, sync_bn=False)


def without_waiting(num_devices: int) -> list[Action]:
    """A step whose exchanges give tensors to replica 0 before the others have issued what computes them."""
    actions = record(num_devices)
    names = {f"replica {i}" for i in range(1, num_devices)}
    others = {number for number, action in enumerate(actions) if action.thread in names}
    return [
        Action(a.thread, a.devices, a.kind, a.reads, a.writes, a.after - others if a.thread == "replica 0" else a.after)
        for a in actions
    ]


def without_copies(num_devices: int) -> list[Action]:
    """A step that reads the other devices' tensors in place, as peer access would let a kernel do."""
    return [
        Action(a.thread, a.devices[-1:], "operator", a.reads, a.writes, a.after, a.what) for a in record(num_devices)
    ]


def findings(actions: Sequence[Action]) -> dict[str, Any]:
    kinds = [action.kind for action in actions]
    return {
        "unordered": unordered_reads(actions)[:3],
        "threads": sorted({action.thread for action in actions}),
        **{kind: kinds.count(kind) for kind in ("operator", "copy", "collective")},
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _setup_privateuseone_for_python_backend("fake")
    torch.autograd.set_multithreading_enabled(False)
    with FakeTensorMode():
        said = {
            "dp": {n: findings(record(n)) for n in (2, 3, 8)},
            "dp without gpu 0": {n: findings(record(n, gpu0_bsz=0)) for n in (2, 3, 8)},
            "dp, sync_bn off": {n: findings(record(n, sync_bn=False)) for n in (2, 3, 8)},
            "with collectives": {3: findings(with_collectives(3))},
            "without waiting": {3: findings(without_waiting(3))},
            "without copies": {3: findings(without_copies(3))},
        }
    print(json.dumps(said))
