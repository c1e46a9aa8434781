"""Costs of a step: the seconds of its operators, and the memory that each block of the network keeps and needs.

The time of an operator is the time of its arithmetic or of its memory traffic, whichever is longer, plus a launch.
Blocks are tracked call by call: a block that runs twice in a forward pass has two calls.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from segapp.compat.torch import TorchDispatchMode, operator_name, storage_key, tree_iter
from segapp.memory.ledger import StorageLedger
from segapp.memory.peaks import Numbers

PASS = ("forward", "loss", "backward")
"""Phases of a micro-batch."""
EFFICIENCY = 0.5
"""Ratio of a network's speed, in operations per second, to the speed of one large convolution."""


@dataclass(frozen=True)
class Machine:
    """Speeds of a processor and a GPU; the defaults, for planned machines, are an RTX 3090's (2020)."""

    dispatch_s: float = 12e-6
    """Seconds that Python takes per operator."""
    launch_s: float = 4e-6
    """Seconds that the GPU takes per kernel launch."""
    flops_per_s: float = 2e13
    half_flops_per_s: float = 4e13
    bytes_per_s: float = 8e11

    def seconds(self, flops: float, num_bytes: float, *, is_half: bool) -> float:
        """Return the time of an operator on the GPU."""
        speed = EFFICIENCY * (self.half_flops_per_s if is_half else self.flops_per_s)
        return max(flops / speed, num_bytes / self.bytes_per_s) + self.launch_s


class OperatorCosts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators and their floating-point operations; views of other tensors are free."""

    def __init__(self, machine: Machine | None = None) -> None:
        from torch.utils.flop_counter import flop_registry  # imports Triton

        super().__init__()  # type: ignore[no-untyped-call]
        self.machine = machine or Machine()
        self.num_operators, self.flops = 0, 0.0
        self._formulas: Mapping[Any, Any] = flop_registry

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False; otherwise torch imports its compiler at the first operator, which takes five seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it."""
        out = func(*args, **(kwargs or {}))
        self.num_operators += 1
        formula = self._formulas.get(func.overloadpacket)
        flops = float(formula(*args, **(kwargs or {}), out_val=out)) if formula else 0.0
        self.flops += flops
        made = [each for each in tree_iter(out) if isinstance(each, Tensor)]
        read = [each for each in tree_iter(args) if isinstance(each, Tensor)]
        if made and not self._is_view(func, made, read):
            num_bytes = sum(each.numel() * each.element_size() for each in (*made, *read))
            is_half = made[0].element_size() < 4
            self.count(str(made[0].device), self.machine.seconds(flops, num_bytes, is_half=is_half))
        return out

    def _is_view(self, func: Any, made: list[Tensor], read: list[Tensor]) -> bool:
        keys = {storage_key(each) for each in read}
        return storage_key(made[0]) in keys and not operator_name(func).endswith("_")

    def count(self, device: str, seconds: float) -> None:
        """Record the time of an operator on a device."""


@dataclass
class _Call:
    """A call of a block in a forward pass that has a backward pass."""

    name: str
    first: int
    """Numbers in the ledger of the storages that are created in it."""
    end: int = 0
    outputs: frozenset[int] = frozenset()
    seconds: float = 0.0
    kept: int = 0
    is_held: bool = False


@dataclass
class _Course:
    """The step of one device."""

    calls: list[_Call] = field(default_factory=list)
    running: _Call | None = None
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class StepTrace(OperatorCosts):  # type: ignore[no-untyped-call]
    """Tracks the blocks of a network through a step; `mark` begins a phase of the ledger and of the trace."""

    def __init__(self, ledger: StorageLedger, machine: Machine | None = None) -> None:
        super().__init__(machine)
        self.ledger, self.phase = ledger, ""
        self._devices: dict[str, _Course] = defaultdict(_Course)
        self._moments: list[tuple[int, str, str]] = []
        self._num_passes = 0

    def follow(self, blocks: Mapping[str, nn.Module]) -> None:
        """Track blocks, given by name, in their forward and backward passes."""
        for name, block in blocks.items():
            block.register_forward_pre_hook(functools.partial(self._enter, name), with_kwargs=True)
            block.register_forward_hook(self._leave)

    def begin(self) -> None:
        """Forget what was seen so far."""
        self._devices.clear()
        self._moments.clear()
        self._num_passes = 0

    def mark(self, phase: str) -> None:
        """Begin a phase."""
        self.ledger.mark(phase)
        self.phase = phase
        for device, course in self._devices.items():
            if phase == "loss":
                for call in course.calls:
                    call.kept = self.ledger.living_bytes(device, call.first, call.end, call.outputs)
            elif phase == "forward":
                course.calls = []
            elif phase == "step":
                for call in course.calls:
                    call.is_held = False
            self._note(device, phase)
        self._num_passes += phase == "backward"

    def count(self, device: str, seconds: float) -> None:
        """Record the time of an operator on a device."""
        course = self._devices[device]
        course.seconds[self.phase] += seconds
        if course.running is not None and self.phase == "forward":
            course.running.seconds += seconds

    def _enter(self, name: str, _block: nn.Module, args: Any, kwargs: Any) -> None:
        tensor = next((each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)), None)
        if tensor is None or not torch.is_grad_enabled() or self.phase != "forward":
            return
        device = str(tensor.device)
        course = self._devices[device]
        self._note(device, f"forward {len(course.calls)}")
        course.running = _Call(name, len(self.ledger.allocations))

    def _leave(self, _block: nn.Module, _args: Any, output: Any) -> None:
        tensors = [each for each in tree_iter(output) if isinstance(each, Tensor)]
        device = str(tensors[0].device) if tensors else ""
        course = self._devices[device]
        call, course.running = course.running, None
        followed = [each for each in tensors if each.requires_grad]
        if call is None or not followed:
            return
        number = len(course.calls)
        call.end, call.is_held = len(self.ledger.allocations), True
        call.outputs = frozenset(map(self.ledger.number_of, tensors))
        course.calls.append(call)
        self._note(device, f"after {number}")

        def begin_backward(_gradient: Tensor) -> None:
            if call.is_held:
                call.is_held = False
                self._note(device, f"backward {number}")

        for tensor in followed:
            tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]

    def _note(self, device: str, moment: str) -> None:
        """Begin a moment, in which the calls before the first one that is not held keep their storages."""
        calls = self._devices[device].calls
        num_held = next((i for i, call in enumerate(calls) if not call.is_held), len(calls))
        self._moments.append((self.ledger.num_events, device, f"at/{num_held:04d}/{moment}"))

    def numbers(self, device: str) -> Numbers:
        """Return seconds and MiB for `segapp.memory.recompute.DeviceCourse`; empty for an unused device."""
        peaks = self.ledger.peaks_between(self._moments).get(device, {})
        if not peaks:
            return {}
        course = self._devices[device]
        numbers = {key: num_bytes / 2**20 for key, num_bytes in peaks.items()}
        for number, call in enumerate(course.calls):
            numbers[f"kept/{number:04d}/{call.name}"] = call.kept / 2**20
            numbers[f"seconds/{number:04d}/{call.name}"] = call.seconds
        numbers["time/pass"] = sum(course.seconds[phase] for phase in PASS) / max(1, self._num_passes)
        return numbers | {"time/update": course.seconds["step"]}
