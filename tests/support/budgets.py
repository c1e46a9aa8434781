"""Memory budgets of logical devices: trainings on the CPU that run out of memory where a small GPU would.

`parallel.memory_budget_mib` limits GPUs through torch's allocator. `enforce_budgets` makes the key hold on logical
devices of the CPU for one test: `MemoryLimit` follows every storage that a step makes, as torch's allocator would count
it. A storage belongs to the replica's device in a replica's thread, in backward to the device of the tensors it was
made from, else to the first. The operation that exceeds a device's limit raises `torch.OutOfMemoryError`: in a forward
pass, in the loss, in backward, in the update, in an evaluation.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from segapp.memory import counters
from segapp.memory.counters import DeviceInfo, DeviceMemoryTracker
from segapp.memory.oom import examine
from segapp.memory.plan import SavedMemoryPlan
from segapp.parallel import DataParallelModel, current_replica
from segapp.planning import auto, trial
from segapp.run.events import Oom
from segapp.run.words import first_line
from segapp.session import session
from segapp.training.live import oom
from segapp.training.pulse import Liveness
from segapp.training.step.assembler import StepAssembler
from segapp.training.step.distill import CriticTrainer, TeacherIdentity
from segapp.training.step.engine import StepEngine
from segapp.training.validation import Validation

MIB = 2**20


_HELD = "held"


def held_tensors(engine: StepEngine) -> list[Tensor]:
    """Weights, buffers, optimizer states and averages, which an engine keeps between two steps on the first device."""
    modules: list[torch.nn.Module] = [engine.model, engine.criterion]
    modules += [] if engine.update.average is None else [engine.update.average.module]
    optimizers, guards = [engine.update.optimizer], [engine.guard]
    for participant in engine.participants:
        if isinstance(participant, CriticTrainer):
            modules.append(participant.critic)
            optimizers.append(participant.update.optimizer)
            guards.append(participant._guard)
        elif isinstance(participant, TeacherIdentity):
            modules.append(teacher_model(participant))
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return [
        *(tensor for module in modules for tensor in (*module.parameters(), *module.buffers())),
        *(parameter for group in engine.update.optimizer.param_groups for parameter in group["params"]),
        *(tensor for guard in guards for tensor in guard.kept),
        *(value for value in states if isinstance(value, Tensor)),
    ]


def replicated_bytes(engine: StepEngine) -> int:
    """What every device but the first holds while it works: the weights of the model, critic and teacher."""
    copied: list[Tensor] = list(engine.model.parameters())
    for participant in engine.participants:
        if isinstance(participant, CriticTrainer):
            copied += participant.critic.parameters()
        elif isinstance(participant, TeacherIdentity):
            copied += [*teacher_model(participant).parameters(), *teacher_model(participant).buffers()]
    return sum(tensor.nbytes for tensor in copied)


def teacher_model(identity: TeacherIdentity) -> torch.nn.Module:
    return next(iter(identity.teacher._on.values()))[0]


class MemoryLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors on each device of a training, and enforces a limit on each.

    Enter it around steps and evaluations; what is alive between them stays counted. A replica's weights are charged to
    its device although logical devices share them. The images of a batch count for the host. `busy` returns the devices
    that work in the present forward pass, in replica order, and `phase` the phase for error reports.
    """

    def __init__(
        self,
        limits_mib: Sequence[float],
        names: Sequence[str],
        busy: Callable[[], Sequence[int]] = lambda: (0,),
        phase: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limits_bytes = [int(mib * MIB) for mib in limits_mib]
        self.names = tuple(names)
        self.busy, self.phase = busy, phase
        self.live = [0] * len(limits_mib)
        self.peaks = [0] * len(limits_mib)
        self._alive: dict[int, tuple[int, int, str, weakref.ref[Any]]] = {}
        self._replica_bytes = 0
        self._charged: set[int] = set()
        self._is_enforced = True
        self._watched: set[int] = set()

    def hold_training(self, engine: StepEngine) -> None:
        """Count what an engine holds on the first device; call it again when it trains further parameters."""
        self.hold(held_tensors(engine), replicated_bytes=replicated_bytes(engine))
        # The garbage collector cannot see such hooks: a reference to this limit would keep it, and its model, alive.
        limit = weakref.proxy(self)
        for parameter in engine.model.parameters():
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                hook: Any = parameter.register_post_accumulate_grad_hook
                hook(lambda p: limit.place([p.grad], 0))

    def hold(self, tensors: Iterable[Tensor | None], *, replicated_bytes: int = 0) -> None:
        """Count what the first device holds all the time, and the bytes of every other busy device during a step."""
        self._replica_bytes = replicated_bytes
        self._is_enforced = False
        for tensor in tensors:
            if tensor is not None:
                self._take_in(tensor, 0, _HELD, 0)
        self._is_enforced = True

    def place(self, tensors: Iterable[Tensor | None], device: int) -> None:
        """Move tensors that are counted already to another device."""
        for tensor in tensors:
            entry = None if tensor is None else self._alive.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry[0] != device:
                assert tensor is not None
                self._alive[tensor.untyped_storage()._cdata] = (device, entry[1], entry[2], entry[3])
                self._add(entry[0], -entry[1])
                self._add(device, entry[1])

    @contextlib.contextmanager
    def enforced(self) -> Iterator[None]:
        """Enforce the limits during a step or an evaluation."""
        try:
            with self:
                yield
        finally:
            for device in self._charged:
                self._add(device, -self._replica_bytes)
            self._charged.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count the storages that it returned."""
        out = func(*args, **(kwargs or {}))
        device: int | None = None
        for tensor in (out,) if isinstance(out, Tensor) else tree_iter(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._alive:
                if device is None:
                    device = self._device_of((args, kwargs))
                self._take_in(tensor, device, func._opname, tensor.untyped_storage().nbytes())
        return out

    def _device_of(self, inputs: Any) -> int:
        replica = current_replica()
        if replica is not None:
            busy = self.busy()
            device = busy[replica.index] if replica.index < len(busy) else 0
            if device and device not in self._charged:
                self._charged.add(device)
                self._add(device, self._replica_bytes)
            return device
        # Statistics and weights are small beside what they are applied to; equal parts meet where they are added up.
        largest, found = 0, {0}
        for tensor in tree_iter(inputs):
            entry = self._alive.get(tensor.untyped_storage()._cdata) if isinstance(tensor, Tensor) else None
            if entry is not None and not entry[2].startswith(_HELD) and entry[1] >= largest:
                found = {entry[0]} if entry[1] > largest else found | {entry[0]}
                largest = entry[1]
        return found.pop() if len(found) == 1 else 0

    def _take_in(self, tensor: Tensor, device: int, operator: str, requested_bytes: int) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or not size:
            return
        what = f"{operator} {'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
        self._alive[key] = device, size, what, weakref.ref(storage, lambda gone: self._let_go(key, gone))
        self._add(device, size)
        if self._is_enforced and self.live[device] > self.limits_bytes[device]:
            raise self._refusal(device, requested_bytes)

    def _let_go(self, key: int, gone: weakref.ref[Any]) -> None:
        entry = self._alive.get(key)
        if entry is not None and entry[3] is gone:
            del self._alive[key]
            self._add(entry[0], -entry[1])

    def _add(self, device: int, size: int) -> None:
        self.live[device] += size
        self.peaks[device] = max(self.peaks[device], self.live[device])

    def _refusal(self, device: int, requested_bytes: int) -> torch.OutOfMemoryError:
        requested, limit, live = (n / MIB for n in (requested_bytes, self.limits_bytes[device], self.live[device]))
        error = torch.OutOfMemoryError(
            f"{self.names[device]} (device {device}) tried to allocate {requested:.1f} MiB with {live - requested:.1f} "
            f"of {limit:.1f} MiB of its budget in use"
        )
        error.report = Oom(  # type: ignore[attr-defined]
            device=self.names[device],
            index=device,
            phase=self.phase(),
            step=0,
            action="",
            problem=first_line(error),
            requested_mib=requested,
            allocated_mib=live - requested,
            total_mib=limit,
        )
        return error


class LimitCounters:
    """The counters of one logical device, for `DeviceMemoryTracker`; 0 until the training has a limit."""

    def __init__(self, limits: dict[str, MemoryLimit], device: int) -> None:
        self._limits, self._device = limits, device

    def read(self) -> dict[str, float | None]:
        limit = self._limits.get("training")
        live_mib = None if limit is None else limit.live[self._device] / MIB
        return {"used_mib": live_mib, "allocated_mib": live_mib, "reserved_mib": live_mib}

    def pop_peak_mib(self) -> float | None:
        limit = self._limits.get("training")
        if limit is None:
            return None
        peak = limit.peaks[self._device]
        limit.peaks[self._device] = limit.live[self._device]
        return peak / MIB


def limit_of(engine: StepEngine, limits_mib: Sequence[float], phase: Callable[[], str]) -> MemoryLimit:
    """The limits of an engine's logical devices, counted from now on."""
    network = engine.network.module

    def busy() -> Sequence[int]:
        split = network.last_split if isinstance(network, DataParallelModel) else (1,)
        return [i for i, size in enumerate(split) if size] or [0]

    limit = MemoryLimit(limits_mib, ["cpu"] * len(limits_mib), busy, phase)
    limit.hold_training(engine)
    return limit


def enforce_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `parallel.memory_budget_mib` hold on logical devices of the CPU, in trainings of this process."""
    limits: dict[str, MemoryLimit] = {}
    by_engine: dict[int, MemoryLimit] = {}
    assemble, step, unfreeze = StepAssembler.assemble, StepEngine.step, StepEngine.unfreeze
    device_infos, counters_of = session._device_infos, counters.counters_of
    validate, evaluate_blank = Validation.run, trial.evaluate_blank

    def logical_devices(devices: Any, ranks: Any, budgets_mib: Sequence[float] | None) -> Any:
        limits.clear()
        infos, locations = device_infos(devices, ranks, None)
        return [
            DeviceInfo("cpu", uuid=f"logical {i}", total_mib=mib, pid=os.getpid())
            for i, mib in enumerate(budgets_mib or ())
        ] or infos, locations

    def logical_counters(info: DeviceInfo) -> Any:
        is_logical = (info.uuid or "").startswith("logical ")
        return LimitCounters(limits, int(str(info.uuid).split()[1])) if is_logical else counters_of(info)

    def assemble_within(self: StepAssembler, *args: Any, **options: Any) -> StepEngine:
        engine, budgets_mib = assemble(self, *args, **options), self.config.parallel.memory_budget_mib
        if budgets_mib is not None:
            liveness = getattr(options.get("mark"), "__self__", None)
            is_training = isinstance(liveness, Liveness)
            limit = limit_of(engine, budgets_mib, lambda: liveness.device_memory.phase if is_training else "")
            by_engine[id(engine)] = limit
            if is_training:
                limits["training"] = limit
        return engine

    def within(engine: StepEngine) -> contextlib.AbstractContextManager[None]:
        limit = by_engine.get(id(engine))
        return contextlib.nullcontext() if limit is None else limit.enforced()

    def step_within(self: StepEngine, *args: Any, **options: Any) -> Any:
        with within(self):
            return step(self, *args, **options)

    def unfreeze_within(self: StepEngine) -> None:
        unfreeze(self)
        if id(self) in by_engine:
            by_engine[id(self)].hold_training(self)

    def validate_within(self: Validation, *args: Any, **options: Any) -> Any:
        with within(self._engine):
            return validate(self, *args, **options)

    def evaluate_within(engine: StepEngine, *args: Any) -> None:
        with within(engine):
            evaluate_blank(engine, *args)

    def examined(error: BaseException, memory: DeviceMemoryTracker, first: int = 0) -> Oom:
        cause: BaseException | None = error
        while cause is not None:
            if hasattr(cause, "report"):
                update = {"index": cause.report.index + first, "problem": first_line(error)}
                return cause.report.model_copy(update=update)
            cause = cause.__cause__
        return examine(error, memory, first)

    monkeypatch.setattr(session, "_device_infos", logical_devices)
    monkeypatch.setattr(oom, "examine", examined)
    monkeypatch.setattr(counters, "counters_of", logical_counters)
    monkeypatch.setattr(StepAssembler, "assemble", assemble_within)
    monkeypatch.setattr(StepEngine, "step", step_within)
    monkeypatch.setattr(StepEngine, "unfreeze", unfreeze_within)
    monkeypatch.setattr(Validation, "run", validate_within)
    monkeypatch.setattr(trial, "evaluate_blank", evaluate_within)


def use_plan(monkeypatch: pytest.MonkeyPatch, planned: SavedMemoryPlan) -> None:
    """Let every training of this test that plans its memory get this plan."""
    monkeypatch.setattr(auto, "plan_memory", Mock())
    monkeypatch.setattr(SavedMemoryPlan, "of_plan", lambda *_: planned)
