"""`segapp doctor`: a broken torch, no nvidia-smi, no compiler, full disks; and the schema of its JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.commands import doctor as module
from segapp.commands.doctor import (
    Diagnosis,
    check_disks,
    check_imports,
    check_nvidia_smi,
    check_packages,
    missing,
    report_lines,
    try_imports,
)
from tests.support import ROOT
from tests.support.fake_smi import FOUR, fake_smi, smi_of
from tests.support.gpu.fake_cuda import FakeCuda, FakeGpu

GIB = 2**30
Usage = namedtuple("Usage", "total used free")


def found(findings: Iterator[Diagnosis] | list[Diagnosis], name: str) -> Diagnosis:
    (one,) = [finding for finding in findings if finding.name == name]
    return one


def test_the_report_ends_with_what_to_do_and_the_result():
    findings = [
        Diagnosis("python", "ok", "3.12.1", True),
        Diagnosis("torch", "missing", "cannot be imported", True, "training", "uv pip install torch"),
        Diagnosis("export", "missing", "not installed", False, "segapp export", "uv pip install onnx"),
        Diagnosis("cuda", "missing", "no GPU", False, "training on GPUs"),
    ]
    lines = report_lines(findings)
    assert lines[:4] == [
        "python  ok       3.12.1",
        "torch   missing  cannot be imported",
        "export  missing  not installed",
        "cuda    missing  no GPU (affects training on GPUs)",
    ]
    assert lines[5:-2] == [
        "to do:",
        "  torch (required):",
        "    uv pip install torch",
        "  export (for segapp export):",
        "    uv pip install onnx",
    ]
    assert lines[-1] == "training cannot run here: torch missing"


@pytest.mark.parametrize(("states", "where"), [([], "the CPU"), (["ok", "warning"], "1 GPU"), (["ok"] * 3, "3 GPUs")])
def test_the_result_counts_the_gpus_that_work(states, where):
    findings = [Diagnosis("cuda", "ok", "torch sees them")]
    findings += [Diagnosis(f"cuda:{index}", state, "H200") for index, state in enumerate(states)]
    assert report_lines(findings)[-1] == f"training can run here, on {where}"


def test_missing_packages_have_a_command(monkeypatch):
    needed = ["numpy>=1", "absent-one>=2.5", 'absent-two>=3; extra == "export"', 'absent-three>=3; extra == "lora"']
    needed.append('absent-four<3; extra == "png"')
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: needed)
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    findings = list(check_packages())
    assert [finding.name for finding in findings] == ["absent-one", "absent-two", "absent-four", "segapp"]
    one, two, four, own = findings
    assert missing(findings) == ["absent-one"]
    assert one.fix == "uv pip install --python /env/bin/python 'absent-one>=2.5'"
    assert (two.needed_for, four.needed_for) == ("segapp export", "PNG files in half the time")
    assert own.found.endswith(", with 1 packages")


def test_segapp_that_is_not_installed_is_a_warning(monkeypatch):
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    (only,) = check_packages()
    assert (only.name, only.state) == ("segapp", "warning")


def fake_torch(folder: Path, body: str, torchvision: str = "") -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(body)
    (folder / "torchvision.py").write_text(torchvision)
    return folder


SOUND = """
from types import SimpleNamespace as Fake
__version__, version, get_num_threads = "9.1", Fake(cuda=None, hip="7"), lambda: 3
ones = lambda count: Fake(sum=lambda: count)
"""
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.parametrize(
    ("bodies", "error"),
    [
        (["raise ImportError('libcudart.so.13: cannot open shared object file')"], "ImportError: libcudart"),
        ([SOUND, CRASH], "exit status -11"),
        (["import os, sys; print('no space', file=sys.stderr, flush=True); os._exit(3)"], "exit status 3: no space"),
        (["import time; time.sleep(1000)"], "no answer within 2 s"),
    ],
    ids=["raises", "crashes", "exits", "hangs"],
)
def test_a_broken_torch_is_reported(tmp_path, monkeypatch, bodies, error):
    monkeypatch.syspath_prepend(fake_torch(tmp_path, *bodies))
    *works, broken = check_imports(2.0 if "sleep" in bodies[0] else 60.0)
    assert [(each.name, each.state) for each in works] == [("torch", "ok"), ("threads", "ok")][: 2 * len(bodies) - 2]
    assert [each.found.split(";")[0] for each in works[1:]] == ["3 for a training on the CPU"][: len(works) - 1]
    assert missing([*works, broken]) == [broken.name] == [["torch", "torchvision"][len(bodies) - 1]]
    assert error in broken.found
    assert broken.fix.endswith("--reinstall torch torchvision")


def raised(error: Exception) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise error

    return call


def test_a_failing_import_says_what_it_affects(monkeypatch, capsys):
    """If torch cannot be imported, the others are not tried."""
    fails = raised(RuntimeError("operator torchvision::nms does not exist"))
    torch_found = [Diagnosis("torch", "ok", "9.1", True), Diagnosis("threads", "missing", "none")]
    tries = {"torch": lambda: torch_found, "torchvision": fails, "trainer": fails, "triton": fails, "cuda": fails}
    monkeypatch.setattr(module, "IMPORTS", tries)
    try_imports()
    lines = [json.loads(line.partition(" ")[2]) for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0] == [[*each] for each in torch_found]
    findings = [Diagnosis(*values) for (values,) in lines[1:]]
    assert {each.found for each in findings} == {
        "cannot be imported: RuntimeError: operator torchvision::nms does not exist"
    }
    wanted = [("torchvision", "torch torchvision"), ("trainer", "what this error names"), ("triton", "triton"),
              ("cuda", "restart the machine")]  # fmt: skip
    assert [(each.name, each.fix[-len(end) :]) for each, (_, end) in zip(findings, wanted, strict=True)] == wanted
    assert missing(findings) == ["torchvision", "trainer"]
    monkeypatch.setattr(module, "IMPORTS", {**tries, "torch": fails})
    try_imports()
    assert capsys.readouterr().out.count("cannot be imported") == 1


def test_an_opencv_that_needs_libgl_is_replaced(monkeypatch, capsys):
    fails = raised(ImportError("libGL.so.1: cannot open shared object file: No such file or directory"))
    sound = dict.fromkeys(("torch", "torchvision", "triton", "cuda"), lambda: [Diagnosis("other", "ok", "")])
    monkeypatch.setattr(module, "IMPORTS", {**sound, "trainer": fails})
    try_imports()
    answers = [json.loads(line.partition(" ")[2]) for line in capsys.readouterr().out.splitlines() if line]
    (finding,) = [Diagnosis(*values) for rows in answers for values in rows if values[0] == "trainer"]
    assert "libGL.so.1" in finding.found
    assert finding.fix.endswith("--reinstall opencv-python-headless")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, fake_cuda: FakeCuda) -> pytest.MonkeyPatch:
    fake_cuda.version.cuda = "13.2"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return monkeypatch


def test_a_driver_that_is_too_old_is_named(no_gpu, fake_cuda, tmp_path):
    smi_of(tmp_path, FOUR, no_gpu)
    fake_cuda.warnings = ["The driver is\ntoo old", "another"]
    finding = found(module._cuda(), "cuda")
    assert finding.found == "The driver is too old"
    assert "newer NVIDIA driver" in finding.fix
    fake_smi(tmp_path, "echo 'Driver/library version mismatch'; exit 18", no_gpu)  # another problem
    finding = found(module._cuda(), "cuda")
    assert "version mismatch" in finding.found
    assert "reload the driver" in finding.fix
    assert "newer NVIDIA driver" not in finding.fix


def test_hidden_gpus_and_a_torch_without_cuda_are_named(no_gpu, fake_cuda, tmp_path):
    fake_cuda.warnings = ["The driver is too old"]
    smi_of(tmp_path, FOUR, no_gpu)
    for hidden in ("-1", "0,0"):
        no_gpu.setenv("CUDA_VISIBLE_DEVICES", hidden)
        finding = found(module._cuda(), "cuda")
        assert finding.found.startswith(f"CUDA_VISIBLE_DEVICES={hidden!r} ")
        assert finding.fix.startswith("name each GPU once" if hidden == "0,0" else "unset it, ")
        assert "driver" not in finding.fix
    fake_cuda.version.cuda = fake_cuda.version.hip = None
    assert found(module._cuda(), "cuda").fix.endswith("--reinstall torch torchvision")
    fake_cuda.version.cuda, fake_cuda.warnings = "13.2", []
    no_gpu.delenv("CUDA_VISIBLE_DEVICES")
    no_gpu.setenv("PATH", "")
    finding = found(module._cuda(), "cuda")
    assert (finding.found, finding.fix) == ("no GPU: training runs on the CPU", "")


def test_each_gpu_is_tried(no_gpu, fake_cuda):
    fake_cuda.gpus = [
        FakeGpu(name="NVIDIA H200", total=141 * GIB, capability=(9, 0)),
        FakeGpu(name="NVIDIA K40", total=12 * GIB, capability=(3, 5)),
    ]
    ones = torch.ones

    def tried(num: int, device: str | None = None) -> torch.Tensor:
        if device == "cuda:1":
            raise RuntimeError("no kernel image is available")
        return ones(num)

    no_gpu.setattr(torch, "ones", tried)
    works, fails = [finding for finding in module._cuda() if finding.name.startswith("cuda:")]
    assert works == Diagnosis("cuda:0", "ok", "NVIDIA H200, 141.0 GiB, compute capability 9.0")
    assert (fails.name, fails.state) == ("cuda:1", "warning")
    assert fails.found.startswith("NVIDIA K40, 12.0 GiB, compute capability 3.5; ")
    assert "no kernel image is available" in fails.found
    assert "a torch built for this GPU" in fails.fix


def test_a_gpu_with_triton_needs_a_compiler(no_gpu, fake_cuda):
    pytest.importorskip("triton")
    no_gpu.setattr(shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)
    assert missing(list(module._triton())) == []
    no_gpu.setattr(shutil, "which", lambda _: None)
    assert missing(list(module._triton())) == []
    fake_cuda.gpus = [FakeGpu()]
    assert missing(list(module._triton())) == ["c compiler"]
    no_gpu.setenv("CC", "mine -m64")
    no_gpu.setattr(shutil, "which", lambda name: "/opt/mine" if name == "mine" else None)
    assert missing(list(module._triton())) == []


@pytest.mark.parametrize(
    ("path", "total", "free", "name", "state", "fix"),
    [
        ("/dev/shm", 64 << 20, 64 << 20, "shared memory", "warning", "--shm-size"),
        ("/dev/shm", 8 * GIB, 10 << 20, "shared memory", "warning", "ls -l /dev/shm"),
        ("/", 9 * GIB, 4 * GIB, "run disk", "warning", "--run"),
        ("/tmp", 9 * GIB, GIB >> 2, "temporary disk", "warning", "TMPDIR"),
    ],
)
def test_small_disks_are_warnings(monkeypatch, path, total, free, name, state, fix):
    monkeypatch.chdir("/")
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr(os.path, "exists", lambda each: str(each) in ("/dev/shm", "/tmp", "/"))
    monkeypatch.setattr(os.path, "isdir", lambda each: each == "/dev/shm")
    monkeypatch.setattr(os, "access", lambda *_: True)
    rest = Usage(900 * GIB, 0, 900 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda each: Usage(total, 0, free) if str(each) == path else rest)
    findings = list(check_disks())
    finding = found(findings, name)
    assert (finding.state, missing(findings)) == (state, [])
    assert fix in finding.fix
    assert f"({path})" in finding.found


def test_disks_that_cannot_be_written_are_missing(monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os.path, "isdir", lambda _: True)
    findings = list(check_disks())
    assert missing(findings) == ["run disk", "temporary disk"]
    assert found(findings, "shared memory").state == "warning"


def doctor(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **env}
    command = [sys.executable, "-m", "segapp", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder, env=environ)


def test_a_broken_installation_gives_exit_code_1_and_a_command(tmp_path):
    fakes = fake_torch(tmp_path / "fakes", "raise OSError('libtorch.so: file too short')")
    for name in ("textual", "yaml", "numpy", "albumentations"):
        (fakes / f"{name}.py").write_text(f"raise ImportError('{name}')")
    done = doctor(tmp_path, PYTHONPATH=f"{fakes}:{ROOT}", PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    assert "cannot be imported: OSError: libtorch.so: file too short" in done.stdout
    assert "  torch (required):\n    " in done.stdout
    assert done.stdout.splitlines()[-1] == "training cannot run here: torch missing"


@pytest.mark.slow
def test_the_json_of_this_machine_has_the_schema(tmp_path):
    done = doctor(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {*answer} == {"v", "can_train", "findings"}
    assert (answer["v"], answer["can_train"]) == (1, True)
    keys = {"name", "state", "found", "is_required", "needed_for", "fix"}
    assert all(finding.keys() == keys for finding in answer["findings"])
    states = {finding["name"]: finding["state"] for finding in answer["findings"]}
    assert {states[name] for name in ("python", "segapp", "torch", "torchvision", "trainer")} == {"ok"}


def test_nvidia_smi_lists_four_gpus_of_which_two_are_seen(tmp_path, monkeypatch):
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (check_nvidia_smi().state, check_nvidia_smi().found) == ("missing", "not on PATH")
    monkeypatch.setenv("PATH", path)
    smi_of(tmp_path, FOUR, monkeypatch, "580.95")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert check_nvidia_smi() == Diagnosis("nvidia-smi", "ok", "lists 4 GPUs, driver 580.95")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-9,GPU-2")
    assert check_nvidia_smi().found == "lists 4 GPUs, driver 580.95, of which a process sees 2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-9,3")
    finding = check_nvidia_smi()
    assert (finding.state, "of which a process sees 1; CUDA_VISIBLE_DEVICES='GPU-9,3' ends" in finding.found) == (
        "warning",
        True,
    )
    assert "all by uuid" in finding.fix
    fake_smi(tmp_path, "echo 'driver/library version mismatch' >&2; exit 18", monkeypatch)
    finding = check_nvidia_smi()
    assert (finding.state, finding.found) == ("missing", "driver/library version mismatch")
    assert "reload the driver" in finding.fix


def test_doctor_imports_the_standard_library_only():
    code = "import sys; before = set(sys.modules); import segapp.commands.doctor; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    roots = {name.partition(".")[0] for name in done.stdout.split()}
    assert roots <= {"segapp", *sys.stdlib_module_names}
