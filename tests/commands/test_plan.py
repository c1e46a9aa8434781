"""`segapp plan` as a person meets it."""

import json

import pytest
import yaml

from segapp.commands.plan import gpu_specs, parse_gpus, print_plan
from segapp.errors import ConfigError
from segapp.memory.plan import GpuSpec
from tests.support.fake_smi import FOUR, SLICED, Card, fake_smi, smi_of
from tests.support.gpu.fake_cuda import FakeGpu
from tests.support.runs import segapp


@pytest.fixture
def folder(tiny, tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("3x24220MiB", [24220.0] * 3),
        ("24220MiB,24220MiB,11019MiB", [24220.0, 24220.0, 11019.0]),
        ("2x24GiB, 1x11GiB", [24576.0, 24576.0, 11264.0]),
        ("80gb", [80e9 / 2**20]),
        ("4096MB", [4096e6 / 2**20]),
        ("1.5GiB", [1536.0]),
    ],
)
def test_gpu_sizes_are_parsed(text, mib):
    assert [gpu.total_mib for gpu in parse_gpus(text)] == pytest.approx(mib)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpus", "three GPUs"], ["'three GPUs' is not a size above 0 with MiB or GiB", "--gpus", "3x24220MiB"]),
        (["--gpus", ""], ["''"]),
        (["--gpus", "3x"], ["'3x'"]),
        (["--gpus", "3x24220TiB"], ["'3x24220TiB' is not a size"]),
        (["--gpus", "0x24220MiB"], ["'0x24220MiB' is not a size"]),
        (["--gpus", "2x0MiB"], ["'2x0MiB' is not a size"]),
        (["--gpus", "8GiB,,8GiB"], ["''"]),
        (["--gpus", "100x8GiB"], ["64"]),
        (["--gpus", "2x8GiB", "parallel.mode=single"], ["parallel.mode = single", "2"]),
        (["--gpus", "8GiB", "parallel.mode=model"], ["parallel.mode = model"]),
        (["--gpus", "3x8GiB", "parallel.mode=ddp"], ["3 ranks", "train.batch_size = 2"]),
        (["--gpus", "3x8GiB", "parallel.shares=[1,1]"], ["parallel.shares", "3"]),
        pytest.param(["--gpus", "2x8GiB", "model.name=deeplabv9"], ["model.name"], marks=pytest.mark.slow),
    ],
)
def test_unplannable_config_is_one_clear_line(folder, arguments, named, command):
    code, out, said = command("plan", "--config", folder / "tiny.yaml", *arguments)
    other = ("more: segapp docs ", "memory plan: ")  # the last one on a busy machine
    (line,) = [line for line in said.splitlines() if not line.startswith(other)]
    assert (code, out, line[:7]) == (2, "", "error: ")
    for part in named:
        assert part in said


def test_gpus_of_this_machine_are_ordered_by_free_memory(monkeypatch, tmp_path):
    sizes = {
        "a": ("24000", "20000"),
        "b": ("[N/A]", "[N/A]"),
        "c": ("11000", "0"),
        "d": ("24564", "1000"),
        "e": ("9", "0"),
    }
    smi_of(tmp_path, tuple(Card(f"GPU-{each}", "A", *mib) for each, mib in sizes.items()), monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert gpu_specs("here") == (GpuSpec(24564.0, "GPU 0"), GpuSpec(11000.0, "GPU 1"), GpuSpec(24000.0, "GPU 2"))


@pytest.mark.parametrize(
    ("cards", "visible", "sizes", "said"),
    [
        (FOUR, "GPU-9d,7", [24576], "ends for CUDA at '7'"),
        (SLICED, "MIG-77ab,MIG-91", [9728], ""),
    ],
)
def test_plan_is_for_the_gpus_that_cuda_shows(monkeypatch, capsys, tmp_path, cards, visible, sizes, said):
    smi_of(tmp_path, cards, monkeypatch)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.total_mib for gpu in gpu_specs("here")] == sizes
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"--gpus here: CUDA_VISIBLE_DEVICES='{visible}'" if said else "")
    assert said in printed.err
    assert bool(printed.err) == bool(said)


@pytest.mark.parametrize(
    ("script", "visible", "words"),
    [
        ("", "NoDevFiles", ["CUDA_VISIBLE_DEVICES='NoDevFiles' hides every GPU", "unset it"]),
        ("echo 'Driver/library version mismatch'; exit 18", "0", ["version mismatch", "reload the driver"]),
    ],
)
def test_plan_without_visible_gpus_says_why(monkeypatch, tmp_path, script, visible, words):
    if script:
        fake_smi(tmp_path, script, monkeypatch)
    else:
        smi_of(tmp_path, FOUR, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=r"^--gpus here: ") as caught:
        gpu_specs("here")
    for word in [*words, "or name the GPUs, such as --gpus 3x24220MiB"]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("gpus", "capability", "expected"),
    [("here", (7, 5), "amp-fp16"), ("here", (8, 0), "amp-bf16"), ("1GiB", (7, 5), "auto")],
)
def test_gpus_here_decide_the_precision(folder, tmp_path, monkeypatch, fake_cuda, gpus, capability, expected):
    fake_cuda.gpus = [FakeGpu(capability=capability), FakeGpu(capability=(9, 0))]
    smi_of(tmp_path, FOUR, monkeypatch)
    planned = []

    def plan_memory(config, *_, **__):
        planned.append(config.train.precision)
        raise ConfigError("seen")

    monkeypatch.setattr("segapp.commands.plan.plan_memory", plan_memory)
    with pytest.raises(ConfigError, match="seen"):
        print_plan(str(folder / "tiny.yaml"), [], gpus)
    assert planned == [expected]


NETWORK = """
from torch import nn

class Net(nn.Sequential):
    precision = "fp32"

    def __init__(self, num_classes):
        super().__init__(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, num_classes, 1))
"""


def test_plan_of_a_small_network_is_made(folder, tiny):
    """Only one: a plan takes seconds, in processes of its own."""
    (folder / "net.py").write_text(NETWORK)
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**tiny, "model": {"library": "python", "name": "other.py:Net"}}))
    words = ["model.name=net.py:Net", "data.workers=3", "data.crop_px=[240,400]", "train.accumulate=3"]
    words += ["parallel.mode=dp", "--gpus", "1GiB,2GiB"]
    done = segapp("plan", "--config", "tiny.yaml", *words, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    none, one, row = found["rows"]
    assert [(each["split"], each["fits"]) for each in found["rows"]] == [([0, 2], True), ([1, 1], True), ([2, 0], True)]
    assert none["tensors_mib"][0] < one["tensors_mib"][0] < row["tensors_mib"][0]
    assert "fp32 (auto: net.py:Net asks for it)" in found["notes"][0]
    images_mib = 2 * 3 * 240 * 400 * 4 / 2**20
    assert found["ring_mib"] == round((6 + 1 + 3) * 2 * (3 + 1) * 240 * 400 / 2**20, 1)
    assert images_mib < row["tensors_mib"][0] < row["peak_mib"][0] < 1024
    assert 2 < found["max_batch"] < 100_000
    assert found["overhead"]["tensor_frac"] == 0.95  # as a training sets the allocator


@pytest.mark.slow
def test_plan_where_batchnorm_needs_two_samples(folder, tiny):
    model = {"library": "torchvision", "name": "deeplabv3", "encoder": "mobilenet_v3_large", "aux": False}
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**tiny, "model": model}))
    parallel = ["parallel.sync_bn=false", "parallel.mode=model"]
    done = segapp("plan", "--config", "tiny.yaml", *parallel, "--gpus", "2x1GiB", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["smallest_chunk"] == 2
    assert found["max_batch"] > 2
