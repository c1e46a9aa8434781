"""Replicas run in the same threads in every step, and no thread outlives its use."""

import copy
import gc
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from segapp.parallel import DataParallelCriterion, DataParallelModel, ReplicaDesyncError, current_replica
from segapp.parallel.replica_threads import MAX_FILLER_NODES, ReplicaThreads, keep_workers
from tests.support import ROOT


class Spy(nn.Module):
    """Notes the thread of each replica, as its model and as its criterion."""

    def __init__(self):
        super().__init__()
        self.threads = []

    def note(self):
        self.threads.append((current_replica().index, threading.get_ident()))

    def forward(self, x):
        self.note()
        return x * 1

    def statistics(self, output, target):
        self.note()
        return (output.sum(),)

    def finalize(self, totals):
        return totals[0]


def settles(condition, within_s=20.0):
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return condition()


def replica_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("replica ")}


@pytest.mark.parametrize("mode", ["threads", "lockstep"])
def test_thread_ids_repeat_over_steps_and_models(mode):
    before = replica_threads()  # of models that other tests still hold
    spy, x = Spy(), torch.ones(7, 2)
    models = [DataParallelModel(spy, ["cpu"] * 3, mode=mode) for _ in range(2)]
    criterion = DataParallelCriterion(spy)
    for step in range(6):
        models[step % 2].gpu0_bsz = step % 3
        criterion(models[step % 2](x), x)
    if mode == "threads":
        assert len(set(spy.threads)) == 3, "one thread for each place, for two models and their criterion"
    assert len({thread for _, thread in spy.threads}) == 3
    assert threading.get_ident() not in {thread for _, thread in spy.threads}
    spy.threads.clear()
    del models, criterion
    assert settles(lambda: replica_threads() <= before)


def test_models_in_several_threads_at_once_share_workers_safely():
    """What the threads share is changed by atomic operations: the interpreter switches between them everywhere."""
    before = replica_threads()
    x = torch.randn(8, 3, dtype=torch.float64)
    exact = []

    def use(seed):
        for i in range(6):
            truth = nn.Linear(3, 2).double()
            net = copy.deepcopy(truth)
            truth(x).sum().backward()
            model = DataParallelModel(net, ["cpu"] * (2 + (seed + i) % 3), mode=["threads", "lockstep"][i % 2])
            model(x).gather().sum().backward()
            exact.append(torch.allclose(net.weight.grad, truth.weight.grad))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        users = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
        for user in users:
            user.start()
        for user in users:
            user.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert exact == [True] * 24, "every thread computed all its steps"
    assert settles(lambda: replica_threads() <= before)


def test_worker_that_hangs_is_replaced():
    release = threading.Event()

    class Stuck(nn.Module):
        def forward(self, x):
            if current_replica().index == 1:
                stuck.append(threading.current_thread())
                release.wait(20 if len(stuck) == 1 else 0)
            return x

    stuck: list[threading.Thread] = []
    model = DataParallelModel(Stuck(), ["cpu"] * 2, timeout_s=0.4)
    with pytest.raises(ReplicaDesyncError, match="replica 1 on cpu did not come to the end"):
        model(torch.ones(4, 3))
    model.timeout_s = 60
    for _ in range(2):
        assert len(model(torch.ones(4, 3))) == 2
    assert stuck[0] is not stuck[1] is stuck[2]
    release.set()
    assert settles(lambda: not stuck[0].is_alive()), "the late thread ends"
    assert stuck[1].is_alive()


PROGRAM = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from segapp.parallel import DataParallelModel, ReplicaDesyncError, current_replica

class Module(nn.Module):
    def forward(self, x):
        if sys.argv[1] == "stuck" and current_replica().index == 1:
            time.sleep(100)
        return x

model = DataParallelModel(Module(), ["cpu"] * 2, timeout_s=0.2 if sys.argv[1] == "stuck" else 60)
try:
    model(torch.ones(4, 2))
except ReplicaDesyncError:
    assert sys.argv[1] == "stuck"
if sys.argv[1] == "forked":
    child = os.fork()
    if not child:
        os._exit(len(model(torch.ones(4, 2))) - 2)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["waiting", "stuck", "forked"])
def test_interpreter_ends_and_forks_with_threads_alive(kind):
    """A forked process makes threads of its own."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_order_of_gradients_is_independent_of_earlier_calls():
    """Autograd's numbers of the replicas are equal at the start of every call, whatever ran before."""
    first = []

    def call(num_nodes):
        source = torch.ones(1, requires_grad=True)
        first.append(torch.neg(source).grad_fn._sequence_nr())
        for _ in range(num_nodes):
            source.neg()

    keeper = nn.Linear(1, 1)
    keep_workers(keeper)
    devices = [torch.device("cpu")] * 3
    for counts in ((0, 50, 400), (7, 0, 0), (300, 1, 2), (0, MAX_FILLER_NODES + 5, 0), (0, 0, 0)):
        first.clear()
        ReplicaThreads(devices).run([partial(call, count) for count in counts])
        assert len(set(first)) == 1
        if counts[1] > MAX_FILLER_NODES:
            far = first[0]
    assert first[0] < far, "threads too far apart are replaced by new ones"


def test_order_of_gradients_is_independent_of_the_callers_nodes():
    """In a step, the nodes of replicas have larger numbers than the caller's, whoever had more of them before."""
    source = torch.ones(1, requires_grad=True)
    keeper = nn.Linear(1, 1)
    keep_workers(keeper)

    def call(num_nodes):
        return [source.neg().grad_fn._sequence_nr() for _ in range(1 + num_nodes)]

    for before, nodes in ((0, (3, 0)), (25_000, (3, 70)), (40, (4_000, 1)), (9_000, (0, 2))):
        call(before)
        found = [
            number
            for part in ReplicaThreads([torch.device("cpu")] * 2).run([partial(call, n) for n in nodes])
            for number in part
        ]
        assert max(call(1_500)) < min(found)
    with torch.no_grad():
        ReplicaThreads([torch.device("cpu")] * 2).run([lambda: None] * 2)
