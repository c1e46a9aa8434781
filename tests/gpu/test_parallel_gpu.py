"""Exactness of the parallel engine on GPUs: three replicas on one GPU, and on several if there are several."""

import copy
import os
import time

import pytest
import torch
from torch import nn

from segapp.parallel import (
    BalancedDataParallel,
    DataParallelCriterion,
    DataParallelModel,
    SyncBatchNorm,
    convert_sync_batchnorm,
    gradient_penalty,
    set_recompute,
)
from segapp.parallel.distributed import init_from_env, shutdown, wrap_ddp
from segapp.parallel.launch import STORE_VARIABLE
from segapp.parallel.model_parallel import place_stages
from tests.support.parallel_cases import Critic, PlainCE, SmallNet, grads_of, make_batch, relative_error, state_error
from tests.support.replica_checks import (
    Noted,
    check_autocast_dtypes,
    check_channels_last,
    check_step,
    check_threads,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and sees none"),
]

SAME = ["cuda:0"] * 3


def device_lists():
    lists = [pytest.param(SAME, id="one GPU three times")]
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        lists.append(pytest.param(list(range(torch.cuda.device_count())), id="distinct GPUs"))
    return lists


needs_several = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two CUDA devices and sees {torch.cuda.device_count()}"
)
several = pytest.param(
    "all", id="distinct GPUs", marks=[needs_several, pytest.mark.timeout(120)]
)  # a hang is a failure


def as_devices(device_ids):
    return list(range(torch.cuda.device_count())) if device_ids == "all" else device_ids


@pytest.mark.parametrize("device_ids", [pytest.param(SAME, id="one GPU three times"), several])
@pytest.mark.parametrize("cudnn_benchmark", [False, True])
@pytest.mark.parametrize("sync_bn", [True, False])
def test_step_with_and_without_sync_bn_and_benchmark(device_ids, sync_bn, cudnn_benchmark):
    check_step(as_devices(device_ids), "cuda:0", sync_bn=sync_bn, cudnn_benchmark=cudnn_benchmark)


@pytest.mark.parametrize("device_ids", [pytest.param(SAME, id="one GPU three times"), several])
@pytest.mark.parametrize("check", [check_threads, check_channels_last])
def test_replicas_keep_threads_devices_and_channels_last(device_ids, check):
    check(as_devices(device_ids), "cuda:0")


BLOCKS = ["stem", "dilated", "residual"]


@pytest.mark.parametrize(
    "device_ids", [pytest.param(["cuda:0"], id="one GPU"), pytest.param(SAME, id="logical"), several]
)
@pytest.mark.parametrize("recomputed", [BLOCKS, BLOCKS[:1]])
def test_recomputed_blocks(device_ids, recomputed):
    """Losses, gradients and statistics in float64."""
    devices = as_devices(device_ids)
    images, target = (part.to("cuda:0") for part in make_batch(7))
    found = []
    for is_chosen in (False, True):
        torch.manual_seed(0)
        net = convert_sync_batchnorm(SmallNet().double().to("cuda:0"))
        if is_chosen:
            set_recompute(net, [recomputed] * len(devices))
        model = DataParallelModel(net, devices, gpu0_bsz=None if len(devices) == 1 else 1)
        criterion = DataParallelCriterion(PlainCE())
        for _ in range(2):
            loss = criterion(model(images), target)
            loss.backward()
        found.append([loss.detach(), *grads_of(net), *net.buffers()])
    kept, chosen = found
    assert relative_error(chosen, kept) <= 1e-10


def test_peak_is_lower_with_recomputed_blocks():
    layers = [
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 32, 3, padding=1)) for _ in range(6)
    ]
    net = nn.Sequential(*layers).cuda()
    names = [[str(i) for i in range(6)]]
    peaks = {}
    for is_chosen in (False, True):
        set_recompute(net, names if is_chosen else [])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        net(torch.randn(4, 32, 256, 256, device="cuda", requires_grad=True)).sum().backward()
        peaks[is_chosen] = torch.cuda.max_memory_allocated()
    assert peaks[True] < 0.7 * peaks[False]


@needs_several
@pytest.mark.timeout(300)
def test_200_steps_on_distinct_gpus_end():
    """A circle of waits between the devices would show here as a hang."""
    torch.manual_seed(0)
    net = convert_sync_batchnorm(SmallNet(width=64)).cuda()
    model = DataParallelModel(net, None)
    criterion = DataParallelCriterion(PlainCE())
    images, target = make_batch(4 * torch.cuda.device_count(), size=64, dtype=torch.float32)
    for _ in range(200):
        criterion(model(images), target).backward()
        net.zero_grad()
    torch.cuda.synchronize()


def test_benchmark_tunes_in_the_first_step_only(capsys):
    """In new threads every step would tune again: about 50 ms for every convolution and thread."""
    net = nn.Sequential(*[nn.Conv2d(32, 32, 3, padding=1) for _ in range(20)]).cuda()
    model, images, times = DataParallelModel(net, SAME), torch.randn(6, 32, 64, 64, device="cuda"), []
    with torch.backends.cudnn.flags(enabled=True, benchmark=True), torch.no_grad():
        for _ in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(images)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    with capsys.disabled():
        print("\nforward with benchmark, ms: " + ", ".join(f"{seconds * 1e3:.1f}" for seconds in times))
    assert min(times[2:]) < 0.5 * times[0]


@pytest.mark.parametrize("device_ids", device_lists())
@pytest.mark.parametrize(
    ("dtype", "limit"), [pytest.param(torch.float64, 1e-10, id="fp64"), pytest.param(torch.float32, 1e-4, id="fp32")]
)
def test_steps_match_one_device_at_every_gpu0_bsz(device_ids, dtype, limit):
    images, target = make_batch(7, dtype=dtype)
    torch.manual_seed(0)
    truth = SmallNet().to("cuda:0", dtype)
    criterion = PlainCE(weight=torch.tensor([0.5, 1.0, 2.0, 0.1]), label_smoothing=0.1)
    start = copy.deepcopy(truth)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = criterion(truth(images.cuda()), target.cuda())
        expected.backward()
        for gpu0_bsz in (None, 0, 1, 3, 7):
            for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
                net = convert_sync_batchnorm(copy.deepcopy(start))
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    outputs = DataParallelModel(net, device_ids, gpu0_bsz=gpu0_bsz)(images.pin_memory())
                    loss = DataParallelCriterion(criterion)(outputs, target)
                    loss.backward()
                torch.cuda.synchronize()
                assert loss.device == torch.device("cuda:0")
                assert relative_error([loss.detach()], [expected.detach()]) <= limit
                assert relative_error(grads_of(net), grads_of(truth)) <= limit
                assert state_error(net, truth) <= limit


@pytest.mark.parametrize("kind", ["wgan-gp", "wgan-lp", "dragan"])
def test_penalties_match_one_device(kind):
    torch.manual_seed(2)
    real, fake, noise = (torch.randn(6, 3, 16, 16, dtype=torch.float64, device="cuda") for _ in range(3))
    drawn = {"noise": noise} if kind == "dragan" else {"alpha": torch.rand(6, dtype=torch.float64, device="cuda")}
    truth = Critic().double().cuda()
    critic = convert_sync_batchnorm(copy.deepcopy(truth))
    expected = gradient_penalty(truth, real, fake, kind, **drawn)
    expected.backward()
    penalty = gradient_penalty(DataParallelModel(critic, SAME, gpu0_bsz=1), real, fake, kind, **drawn)
    penalty.backward()
    assert relative_error([penalty.detach()], [expected.detach()]) <= 1e-12
    assert relative_error(grads_of(critic), grads_of(truth)) <= 1e-9


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-11), (torch.float32, 1e-4), (torch.float16, 2e-2), (torch.bfloat16, 5e-2)],
)
@pytest.mark.parametrize(
    ("kind", "shape", "layout"),
    [
        (nn.BatchNorm1d, (9, 6), None),
        (nn.BatchNorm1d, (9, 6, 5), None),
        (nn.BatchNorm2d, (9, 6, 8, 7), None),
        (nn.BatchNorm2d, (9, 6, 8, 7), torch.channels_last),
        (nn.BatchNorm3d, (9, 6, 4, 3, 2), None),
        (nn.BatchNorm3d, (9, 6, 4, 3, 2), torch.channels_last_3d),
    ],
)
def test_fused_sync_batchnorm_kernels_match_batchnorm(kind, shape, layout, dtype, limit):
    torch.manual_seed(0)
    x = (torch.randn(shape, device="cuda", dtype=torch.float64) * 3 + 5).to(dtype)
    weights = torch.randn(shape, device="cuda").to(dtype)
    if layout is not None:
        x = x.contiguous(memory_format=layout)
    truth = kind(6, device="cuda", dtype=torch.float64)
    nn.init.normal_(truth.weight)
    layer = convert_sync_batchnorm(copy.deepcopy(truth)).to(torch.float64 if dtype == torch.float64 else torch.float32)
    results = []
    for module, inputs in ((truth, x.double()), (BalancedDataParallel(2, layer, SAME), x)):
        inputs = inputs.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        y = module(inputs)
        (y * weights.to(y.dtype)).sum().backward()
        results.append([y.detach(), inputs.grad])
    assert relative_error(results[1], results[0]) <= limit
    assert relative_error(grads_of(layer), grads_of(truth)) <= limit
    assert state_error(layer, truth) <= max(1e-11, min(limit, 1e-4))


def peak_bytes(net: nn.Module, images: torch.Tensor) -> int:
    model = DataParallelModel(net, SAME)
    for _ in range(2):  # the first step also tunes
        torch.cuda.reset_peak_memory_stats()
        sum(output.float().square().sum() for output in model(images)).backward()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sync_batchnorm_needs_no_more_memory_than_batchnorm(dtype, capsys):
    def build():
        blocks = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(8)]
        return nn.Sequential(*blocks).cuda().to(dtype)

    images = torch.randn(6, 32, 256, 256, device="cuda", dtype=dtype)
    plain = peak_bytes(build(), images)
    synced = peak_bytes(convert_sync_batchnorm(build()), images)
    with capsys.disabled():
        print(f"\npeak {dtype}: BatchNorm {plain / 2**20:.0f} MiB, synchronised {synced / 2**20:.0f} MiB")
    assert synced <= 1.05 * plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_replicas_inherit_autocast_dtype_and_match_one_device(dtype):
    images, target = make_batch(6, size=32, dtype=torch.float32, ignored=0.3)
    losses = []
    for enabled in (False, True):
        torch.manual_seed(0)
        net = convert_sync_batchnorm(SmallNet(width=16)).cuda()
        net.head = Noted(net.head)
        model, criterion = DataParallelModel(net, SAME, gpu0_bsz=1), DataParallelCriterion(PlainCE())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cuda", enabled=enabled and dtype == torch.float16)
        for _ in range(50):
            with torch.autocast("cuda", dtype, enabled=enabled):
                outputs = model(images)
            check_autocast_dtypes(net.head, outputs, dtype if enabled else torch.float32)
            loss = criterion([tuple(head.float() for head in output) for output in outputs], target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    assert abs(losses[1] / losses[0] - 1) <= 0.02


def test_replica_out_of_memory_is_raised_within_2_s():
    class Greedy(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = SyncBatchNorm(3)

        def forward(self, x):
            if len(x) == 1:
                torch.empty(1 << 45, device=x.device, dtype=torch.uint8)
            return self.norm(x)

    model, images = DataParallelModel(Greedy().cuda(), SAME, gpu0_bsz=1), torch.randn(7, 3, 4, 4)
    torch.cuda.synchronize()  # the first use of the card takes seconds
    start = time.monotonic()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(images)
    assert caught.value.__notes__ == ["raised in replica 0 on cuda:0"]
    assert time.monotonic() - start < 2


def test_model_on_wrong_device_and_absent_device_are_refused():
    with pytest.raises(ValueError, match=r"call module.to\('cuda:0'\) first"):
        DataParallelModel(nn.Linear(2, 2), SAME)(torch.ones(4, 2))
    with pytest.raises(ValueError, match="CUDA devices are visible"):
        DataParallelModel(nn.Linear(2, 2), [torch.cuda.device_count()])


def test_stages_on_cpu_and_gpu_match_one_device():
    images, target = make_batch(4)
    torch.manual_seed(0)
    truth = SmallNet(has_aux=False).double()
    net = copy.deepcopy(truth)
    PlainCE()(truth(images), target).backward()
    place_stages(net, {"stem": "cpu", "dilated": "cuda:0", "residual": "cpu", "head": "cuda:0"}, rest="cpu")
    (logits,) = net(images)  # stem and residual branch are added, on the CPU
    PlainCE()((logits,), target.to(logits.device)).backward()
    assert {p.device.type for p in net.parameters()} == {"cpu", "cuda"}
    assert relative_error([p.grad.cpu() for p in net.parameters()], grads_of(truth)) <= 1e-10


def test_one_nccl_rank_trains_through_ddp(monkeypatch, tmp_path):
    values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", STORE_VARIABLE: str(tmp_path / "store")}
    for name, value in values.items():  # a file to meet in: another test may hold any fixed port
        monkeypatch.setitem(os.environ, name, value)
    monkeypatch.setattr("segapp.parallel.distributed.die_with_parent", lambda *_: None)
    info = init_from_env()
    try:
        assert (info.backend, info.device) == ("nccl", torch.device("cuda:0"))
        net = convert_sync_batchnorm(SmallNet()).cuda()
        ddp = wrap_ddp(net, info.device)
        ddp(torch.randn(2, 3, 16, 16, device="cuda"))[0].sum().backward()
        assert all(p.grad is not None for p in net.stem.parameters())
    finally:
        shutdown()
