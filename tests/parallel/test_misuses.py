"""Wrong calls of the wrappers and SyncBatchNorm are refused with a sentence: what was given, and what to give."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from segapp.losses import CriterionCE
from segapp.memory import DeviceMemoryTracker
from segapp.parallel import (
    BalancedDataParallel,
    DataParallelCriterion,
    DataParallelModel,
    ReplicaOutputs,
    SampleMasks,
    SyncBatchNorm,
    all_reduce_gradients,
    allreduce,
    balance_stages,
    convert_sync_batchnorm,
    gradient_penalty,
    mask_by_sample,
    place_stages,
    revert_sync_batchnorm,
    set_recompute,
)

CPUS, ONES = ["cpu"] * 3, torch.ones(5)
Model, Balanced, Criterion = DataParallelModel, BalancedDataParallel, DataParallelCriterion
NUMBER, LIST = "is not a whole number: use", "is not a list: give"
FIXED, MODULE = (
    r"number and order .* are fixed.*: make ReplicaOutputs\(\[...\]\)",
    "is not an nn.Module: give the model",
)
EXCLUDE, SYNC = (
    r"gpu0_bsz=1 and shares=\[0, 3, 2\] exclude each other: one",
    "SyncBatchNorm expects floating-point input",
)

COMPILED = nn.Sequential(nn.ReLU())
COMPILED.compile(backend="eager")

VALUES = [  # attributes of a wrapper: refused by the constructor, and later
    *(("gpu0_bsz", value, TypeError, NUMBER) for value in (True, np.bool_(True), 1.5, "2", [1])),
    ("gpu0_bsz", -1, ValueError, "gpu0_bsz=-1 is too small: use 0 or more, None splits evenly"),
    *(("shares", value, TypeError, LIST) for value in ("032", 3, {0: 1, 1: 2, 2: 2}, {0, 3, 2})),
    *(("shares", [0, value, 2], TypeError, rf"shares\[1\]=.*{NUMBER}") for value in (True, 3.0, "3", None)),
    ("shares", [3, -1, 3], ValueError, r"shares\[1\]=-1 is too small: use 0 or more"),
    ("shares", [2, 3], ValueError, r"shares=\[2, 3\] names 2 devices, there are 3: give one each"),
    ("shares", iter([2, 3]), ValueError, r"shares=\[2, 3\] names 2 devices"),
    ("shares", [0, 0, 0], ValueError, "at least one share positive"),
    *(("full_batch", value, TypeError, rf"full_batch=.*{NUMBER} 1") for value in (True, 5.0, "5")),
    ("full_batch", 0, ValueError, "full_batch=0 is too small: use 1 or more"),
    *(("dim", value, TypeError, rf"dim=.*{NUMBER} the dimension") for value in (True, 0.0, "0", None)),
    *(("mode", value, ValueError, "mode=.* is not known: use 'threads' or 'lockstep'") for value in ("thread", None)),
    *(("timeout_s", value, ValueError, "timeout_s=.*: give a number above 0")
      for value in (0, -1.0, True, "5", None, math.nan)),
]  # fmt: skip


def model(**options):
    return DataParallelModel(nn.Conv2d(2, 4, 1), CPUS, **options or {"gpu0_bsz": 1})


@pytest.mark.parametrize(("name", "value", "error", "words"), VALUES)
def test_wrong_value_is_refused_also_later(name, value, error, words):
    with pytest.raises(error, match=words):
        Model(nn.Identity(), CPUS, **{name: value})
    for ours in (Model(nn.Identity(), CPUS), Balanced(None, nn.Identity(), CPUS)):
        before = (repr(ours), ours(torch.ones(5))[0].tolist())
        with pytest.raises(error, match=words):
            setattr(ours, name, [2, 3] if isinstance(value, type(iter([]))) else value)
        assert (repr(ours), ours(torch.ones(5))[0].tolist()) == before


def changed(ours, **values):
    for name, value in values.items():
        setattr(ours, name, value)


def moved(ours):
    ours.module.bias = nn.Parameter(ours.module.bias.to("meta"))
    return ours


MISUSES = [  # call with images (5, 2, 6, 7), target (5, 6, 7) and outputs of 1, 2 and 2 samples; error, words
    (lambda x, t, y: model(gpu0_bsz=1, shares=[0, 3, 2]), ValueError, EXCLUDE),
    (lambda x, t, y: model(gpu0_bsz=0, shares=[0, 3, 2]), ValueError, "gpu0_bsz=0 and shares=.* exclude each other"),
    (lambda x, t, y: Balanced(1, nn.Identity(), CPUS, shares=iter([0, 3, 2])), ValueError, EXCLUDE),
    (lambda x, t, y: changed(model(shares=(0, 3, 2)), gpu0_bsz=1), ValueError, EXCLUDE),
    (lambda x, t, y: changed(model(), shares=[0, 3, 2]), ValueError, EXCLUDE),
    (lambda x, t, y: model(shares=[1, 3, 2], full_batch=5), ValueError, "add up to 6, but the batch is 5"),
    (lambda x, t, y: changed(model(gpu0_bsz=4), full_batch=3), ValueError, "gpu0_bsz=4 is more than the batch of 3"),
    (lambda x, t, y: changed(model(), devices=["cpu"]), AttributeError, "devices of a Data.* later: wrap the module"),
    (lambda x, t, y: changed(Balanced(1, nn.Identity(), CPUS), output_device="gpu"), ValueError, "device 'gpu' is not"),
    (lambda x, t, y: Model(nn.Identity(), CPUS, 1), TypeError, r"device_ids, 1\): write gpu0_bsz=.*no output_device"),
    (lambda x, t, y: Balanced(1, nn.Identity(), CPUS, full_bach=3), TypeError, "full_bach"),
    (lambda x, t, y: Balanced(1, nn.Identity(), CPUS, device_ids=CPUS), TypeError, "multiple values .*device_ids"),
    *((lambda x, t, y, ids=ids: Model(nn.Identity(), ids), TypeError, rf"device_ids=.*{LIST}")
      for ids in ("cpu", 0, torch.device("cpu"), {"cpu"}, 2.5)),
    *((lambda x, t, y, ids=ids: Model(nn.Identity(), ids), TypeError, "device .* is not a CUDA index, a string or")
      for ids in ([None], ["cpu", True], [1.5])),
    *((lambda x, t, y, ids=ids: Model(nn.Identity(), ids), ValueError, words) for ids, words in (
        (["cuda:99"], "device 'cuda:99'"), ([np.int64(99)], "device 'cuda:99'"), (["meta"], "holds no values"))),
    *((lambda x, t, y, net=net: Model(nn.Sequential(nn.ReLU(), net), CPUS), error, words) for net, error, words in (
        (COMPILED, TypeError, "compiled.*one process per device"),
        (torch.jit.script(nn.ReLU()), TypeError, "1 is compiled.*leave out torch.compile and torch.jit"),
        (nn.LazyLinear(1), ValueError, "1.weight of Sequential has no shape yet: run the bare module once"))),
    (lambda x, t, y: Model(nn.Sequential(Balanced(1, nn.ReLU(), CPUS)), CPUS)(x), RuntimeError,
     "BalancedDataParallel runs in a replica of another one: wrap only the outer"),
    *((lambda x, t, y, kind=kind, each=each: kind(each), TypeError, MODULE)
      for kind in (Model, convert_sync_batchnorm, revert_sync_batchnorm, lambda each: set_recompute(each, []),
                   lambda each: place_stages(each, {"0": "cpu"}), lambda each: balance_stages(each, CPUS),
                   lambda each: SampleMasks(each, 3), mask_by_sample)
      for each in (None, nn.Conv2d, [nn.BatchNorm2d(2)])),
    (lambda x, t, y: Balanced(nn.Identity(), 1, CPUS), TypeError, f"module=1 {MODULE}"),
    (lambda x, t, y: moved(model())(x), ValueError, r"bias of Conv2d is on meta .*: call module.to\('cpu'\) first"),
    (lambda x, t, y: model().load_state_dict({"model": {}}), RuntimeError, r"Unexpected key.*module\.model"),
    (lambda x, t, y: model().load_state_dict(None), TypeError, "Expected state_dict to be dict-like"),
    (lambda x, t, y: model().plan(x), TypeError, f"num_samples=tensor.*{NUMBER}"),
    (lambda x, t, y: model().scatter([x, torch.ones(4)]), ValueError, r"\(4,\) cannot be cut .* into \[1, 2, 2\]"),
    (lambda x, t, y: model().scatter([y, model(gpu0_bsz=3)(x)]), ValueError, r"chunks of \[3, 1, 1\] .*\.gather\(\)"),
    (lambda x, t, y: Criterion(CriterionCE), TypeError, r"CriterionCE is a class: give an object, .* CriterionCE\(\)"),
    (lambda x, t, y: Criterion(nn.CrossEntropyLoss()), TypeError, "CrossEntropyLoss has no statistics"),
    (lambda x, t, y: Criterion(CriterionCE(), "cpu"), TypeError, LIST),
    *((lambda x, t, y, cut=cut: Criterion(CriterionCE())(y, cut(t)), ValueError, words) for cut, words in [
        (lambda t: t[:4], r"the target has 4 samples and the outputs have \[1, 2, 2\]: pass the target of the"),
        (lambda t: t.numpy(), r"the target has no tensor with samples and the outputs have \[1, 2, 2\]: pass"),
        (lambda t: None, "the target has no tensor with samples and"),
        (lambda t: list(t.split([1, 3, 1])), "the target has 1 samples and .* or one part per output"),
        (lambda t: model(gpu0_bsz=3).scatter(t), r"chunks of \[3, 1, 1\] .* meet chunks of \[1, 2, 2\]"),
    ]),
    (lambda x, t, y: Criterion(CriterionCE())([], t), ValueError, "no tensor with samples: pass the result of"),
    (lambda x, t, y: ReplicaOutputs(x), TypeError, "outputs are a Tensor: give a list with one output per device"),
    (lambda x, t, y: ReplicaOutputs(3), TypeError, "outputs are a int: give a list"),
    (lambda x, t, y: ReplicaOutputs([x, x], sizes=[5], devices=y.devices), ValueError, "2 outputs have 1 sizes and 3"),
    *((lambda x, t, y, change=change: change(y), TypeError, FIXED) for change in (
        lambda y: y.append(y[0]), lambda y: y.extend(y), lambda y: y.insert(0, y[0]), lambda y: y.pop(),
        lambda y: y.remove(y[0]), lambda y: y.clear(), lambda y: y.reverse(), lambda y: y.sort(key=len),
        lambda y: y.__delitem__(0))),
    *((lambda x, t, y, each=each: SyncBatchNorm(2)(each(x)), ValueError, rf"{SYNC} of shape \(N, 2, ...\), got \(")
      for each in (lambda x: x.long(), lambda x: x[:, :1], lambda x: x[0, :, 0, 0])),
    *((lambda x, t, y, value=value, on=on: on(SyncBatchNorm(2, eps=value))(x), ValueError, "eps=.*: give a number ab")
      for value in (0, -1e-5, "1e-5", None, True, math.nan) for on in (lambda net: net, lambda net: Model(net, CPUS))),
    *((lambda x, t, y, value=value, on=on: on(SyncBatchNorm(2, momentum=value))(x), ValueError, "momentum=.* 0 to 1")
      for value in (2, -0.1, "0.1", math.nan) for on in (lambda net: net, lambda net: Model(net, CPUS))),
    (lambda x, t, y: Model(nn.Sequential(nn.ReLU(), SyncBatchNorm(5)), CPUS)(x), ValueError, r"Norm 1 expects .*N, 5"),
    (lambda x, t, y: SyncBatchNorm(2).load_state_dict(nn.BatchNorm2d(3).state_dict()), RuntimeError, "size mismatch"),
    (lambda x, t, y: allreduce([x, x]), TypeError, r"allreduce got a list: give tensors, as in allreduce\(\*tensors\)"),
    *((lambda x, t, y, fake=fake, more=more: gradient_penalty(nn.ReLU(), x, fake(x), **more), ValueError, words)
      for fake, more, words in (
        (lambda x: x, {"kind": "gp"}, "use one of wgan-gp, wgan-lp, dragan"),
        (lambda x: None, {}, "needs fake samples"),
        (lambda x: x, {"alpha": ONES, "noise": ONES}, "kind='wgan-gp' does not use noise: leave"),
        (lambda x: x[:1], {}, r"fake has shape \(1, 2, 6, 7\) and real \(5, 2, 6, 7\)"),
        (lambda x: x, {"alpha": ONES[:2]}, "one per sample"),
        (lambda x: None, {"kind": "dragan", "noise": ONES}, "noise has shape"))),
    (lambda x, t, y: gradient_penalty(lambda x: None, x, x), ValueError, "returned no tensor"),
    *((lambda x, t, y, stages=stages: place_stages(model(), stages), ValueError, "stages=.*: give names of submodules")
      for stages in ({}, ["module"], None)),
    *((lambda x, t, y, seed=seed: SampleMasks(model(), seed), TypeError, "seed=.* is not a whole number: use an")
      for seed in ("x", None, 0.5)),
    *((lambda x, t, y, sets=sets: set_recompute(model(), sets), TypeError, rf"got {given} instead of a set of")
      for sets, given in ((None, "None"), ("module", "'module'"), ([["module"], 3], "3"), ([[], "mod"], "'mod'"))),
    *((lambda x, t, y, each=each: all_reduce_gradients(each), TypeError, f"parameters given as {given}: give a list")
      for each, given in ((nn.Conv2d(2, 4, 1), "Conv2d"), (nn.Sequential(nn.ReLU()), "Sequential"), (None, "NoneType"),
                          (torch.ones(3, 2), "Tensor"), ([ONES, {"params": []}, 3], "dict"))),
    *((lambda x, t, y, each=each: DeviceMemoryTracker(each), TypeError, f"devices=.* {LIST}")
      for each in ("cpu", {"cpu"}, 3, None)),
    (lambda x, t, y: place_stages(model(), {"module": "cuda:77"}), ValueError, "cuda:77"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), MISUSES)
def test_misuse_is_named(call, error, words):
    images, target = torch.randn(5, 2, 6, 7), torch.arange(210).view(5, 6, 7) % 4
    outputs = model()(images)
    shown = repr(outputs)
    with pytest.raises(error, match=words):
        call(images, target, outputs)
    assert repr(outputs) == shown


def test_values_mean_what_they_say():
    """Iterators are read once; infinity waits forever; an option that excludes another one may follow its None."""
    images = torch.randn(5, 2, 6, 7)
    ours = DataParallelModel(nn.Conv2d(2, 4, 1), iter(CPUS), shares=iter(np.array([0, 3, 2])), timeout_s=math.inf)
    assert (ours(images).sizes, ours(images).sizes, ours.plan(10)) == ((3, 2), (3, 2), (0, 6, 4))
    ours.shares = None
    ours.gpu0_bsz, ours.full_batch, ours.dim, ours.mode = torch.tensor(3), 5, np.int64(-4), "lockstep"
    outputs = ours(images)
    assert (outputs.sizes, outputs.mode, outputs.dim) == ((3, 1, 1), "lockstep", -4)
    outputs[1] = -outputs[1]
    assert torch.equal(outputs.gather(device="cpu")[3:4], outputs[1])
    assert DataParallelModel(SyncBatchNorm(2), CPUS, timeout_s=math.inf)(images).sizes == (1, 2, 2)


def test_a_repr_shows_the_arguments():
    ours, cpus = model(shares=[0, 3, 2], timeout_s=9), ", ".join(["device(type='cpu')"] * 3)
    assert f"device_ids=[{cpus}], gpu0_bsz=None, shares=[0, 3, 2], full_batch=None, dim=0, mode='threads', tim" in str(
        ours
    )
    assert "output_device=device(type='cpu')" in repr(Balanced(1, nn.Identity(), CPUS))
    assert "device_ids=[device(type='cpu')]\n" in repr(Criterion(CriterionCE(), ["cpu"]))
    outputs = ours(torch.ones(5, 2, 6, 7))
    assert repr(outputs).startswith("ReplicaOutputs(shapes=[[(3, 4, 6, 7)], [(2, 4, 6, 7)]], sizes=(3, 2), devices=")
    assert repr(copy.copy(outputs)) == repr(outputs), "in all attributes, of devices 1 and 2"
    assert max(len(repr(each).splitlines()) for each in (ours, outputs)) < 10
