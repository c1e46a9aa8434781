"""A replica that fails or is missing stops the others; the error names it."""

import gc
import signal
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from segapp.parallel import (
    DataParallelCriterion,
    DataParallelModel,
    ReplicaDesyncError,
    SyncBatchNorm,
    allreduce,
    current_replica,
)
from segapp.parallel.replica_threads import failed_replica
from tests.parallel.test_workers import settles
from tests.support.live_runs import wait_for
from tests.support.parallel_cases import PlainCE

MODES = ["threads", "lockstep"]


class Layers(nn.Module):
    """Five synchronised layers; `plan` = (replica, layer, action) makes one replica fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SyncBatchNorm(3) for _ in range(5))
        self.plan = None
        self.release = threading.Event()

    def forward(self, x):
        index = current_replica().index
        for i, layer in enumerate(self.layers):
            what = self.plan[2] if self.plan and self.plan[:2] == (index, i) else None
            if what == "raise":
                raise ValueError("boom")
            if what == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
            if what == "exit":
                raise SystemExit(3)
            if what == "return":
                return x
            if what == "sleep":
                self.release.wait(60)
            if what == "skip":
                continue
            if what == "twice":
                x = layer(x)
            x = layer(x)
        return x


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("raise", ValueError, r"^boom\nraised in replica 2 on cpu$"),
        ("memory", torch.OutOfMemoryError, "^CUDA out of memory"),
        ("exit", SystemExit, r"^3\nraised in replica 2 on cpu$"),
        ("return", ReplicaDesyncError, "have ended"),
        ("skip", ReplicaDesyncError, "layers.2"),
        ("twice", ReplicaDesyncError, "layers.2"),
    ],
)
def test_failing_replica_is_raised_before_the_timeout(mode, what, error, words):
    module = Layers()
    model = DataParallelModel(module, ["cpu"] * 5, gpu0_bsz=0, mode=mode)  # the second to run is on device 2
    before = threading.active_count()
    module.plan = (1, 2, what)
    start = time.monotonic()
    with pytest.raises(error, match=words) as caught:
        model(torch.randn(7, 3, 2, 2))
    assert time.monotonic() - start < 20
    assert type(caught.value) is error
    is_desync = error is ReplicaDesyncError
    assert getattr(caught.value, "__notes__", None) == (None if is_desync else ["raised in replica 2 on cpu"])
    assert failed_replica(caught.value) == (None if is_desync else (2, torch.device("cpu")))
    module.plan = None
    assert len(model(torch.randn(7, 3, 2, 2))) == 4, "the model is usable afterwards"
    assert threading.active_count() <= before + 4
    del model, caught
    assert settles(lambda: threading.active_count() <= before), "the threads end with the model"


@pytest.mark.parametrize("mode", MODES)
def test_replica_that_never_arrives_is_named_after_timeout(mode):
    module = Layers()
    model = DataParallelModel(module, ["cpu"] * 3, mode=mode, timeout_s=1.5)
    before = threading.active_count()
    module.plan = (2, 1, "sleep")
    start = time.monotonic()
    with pytest.raises(ReplicaDesyncError, match=r"replica 2 on cpu did not come to .*layers.1.* within 1.5 s"):
        model(torch.randn(6, 3, 2, 2))
    assert time.monotonic() - start < 20
    module.release.set()
    del model
    assert settles(lambda: threading.active_count() <= before), "a late replica finds the group failed and ends"


def test_step_is_left_after_its_late_replica():
    """Replica 0 updates the model's own running statistics: after the caller's rollback it would spoil them."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("num_calls", torch.zeros(()))

        def forward(self, x):
            if current_replica().index == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
            time.sleep(0.5)
            self.num_calls += 1
            return x

    module = Late()
    with pytest.raises(torch.OutOfMemoryError):
        DataParallelModel(module, ["cpu"] * 2)(torch.randn(4, 3))
    assert module.num_calls.item() == 1, "nothing changes it from here on"


@pytest.fixture
def heard_interrupts():
    """Restore SIGINT, which a shell ignores in background jobs; tests may run as one."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("heard_interrupts")
def test_interrupt_in_the_caller_ends_the_replicas():
    module = Layers()
    module.plan = (1, 1, "sleep")
    before = threading.active_count()
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        DataParallelModel(module, ["cpu"] * 3)(torch.randn(6, 3, 2, 2))
    assert time.monotonic() - start < 20
    timer.join()
    assert settles(lambda: threading.active_count() <= before + 1), "only the sleeping replica is left"
    module.release.set()
    assert settles(lambda: threading.active_count() <= before)


def test_error_of_a_criterion_names_the_device_of_its_output():
    class Failing(PlainCE):
        def statistics(self, outputs, target):
            if current_replica().index == 1:
                raise LookupError("sums")
            return outputs[0].sum(), torch.ones(())

    outputs = DataParallelModel(nn.Identity(), ["cpu"] * 3, gpu0_bsz=0)(torch.zeros(7, 2, 2, 2))
    with pytest.raises(LookupError) as caught:
        DataParallelCriterion(Failing())([(output,) for output in outputs], torch.zeros(7, 2, 2).long())
    assert caught.value.__notes__ == ["raised in replica 1 on cpu"], "of a list, whose devices are all"
    with pytest.raises(LookupError) as caught:
        DataParallelCriterion(Failing())(outputs, torch.zeros(7, 2, 2).long())
    assert caught.value.__notes__ == ["raised in replica 2 on cpu"]


def test_error_keeps_its_cause_and_is_freed_with_its_frames():
    freed = []

    class Failing(nn.Module):
        def forward(self, x):
            if not x.any():
                return x
            local = torch.zeros(3)
            freed.append(weakref.ref(local))
            try:
                raise LookupError("first")
            except LookupError as first:
                raise ValueError("second") from first

    model = DataParallelModel(Failing(), ["cpu"] * 3)
    model(torch.zeros(7, 2))  # the first pass is in lockstep
    gc.collect()
    gc.disable()  # a cycle between the error and a frame would keep the activations
    try:
        with pytest.raises(ValueError, match="second") as caught:
            model(torch.ones(7, 2))
        assert type(caught.value.__cause__) is LookupError
        del caught
        assert wait_for(lambda: [ref() for ref in freed] == [None] * 3, 5)
    finally:
        gc.enable()


def test_differing_tensor_counts_are_an_exchange_error():
    class Uneven(nn.Module):
        def forward(self, x):
            return allreduce(*[x.sum()] * (1 + current_replica().index))[0]

    with pytest.raises(ValueError, match="give the same shapes from each"):
        DataParallelModel(Uneven(), ["cpu"] * 2)(torch.randn(4, 3))
