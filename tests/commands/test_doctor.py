"""`segapp doctor`: a broken torch, no nvidia-smi, no compiler; findings from facts; the schema of its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from segapp.commands.doctor import TESTED_ON, Diagnosis, State, can_train, evaluate_machine, report_lines
from segapp.commands.machine import (
    Facts,
    ask_nvidia_smi,
    find_compiler,
    try_imports,
)
from tests.support import ROOT

GIB = 2**30
DISK = {"path": "/data", "total_bytes": 100 * GIB, "free_bytes": 50 * GIB, "is_writable": True}
A5000 = {
    "index": 0, "uuid": "ab", "name": "NVIDIA RTX A5000", "driver": "580.95", "total_mib": 24220.0, "used_mib": 1024.0,
}  # fmt: skip
CUDA_DEVICE = {
    "index": 0, "uuid": "ab", "name": "NVIDIA RTX A5000", "total_mib": 24220.0, "capability": "8.6", "error": "",
}  # fmt: skip


def package(name: str, requirement: str, extra: str | None, version: str | None, in_range: bool | None) -> Facts:
    return {
        "name": name, "requirement": requirement, "extra": extra, "version": version, "is_in_range": in_range,
    }  # fmt: skip


def imported(status: str = "ok", error: str = "", **facts: Any) -> Facts:
    return {"status": status, "error": error, "facts": facts}


def smi(status: str, error: str = "", *gpus: Facts) -> Facts:
    return {"status": status, "error": error, "gpus": list(gpus)}


FACTS: Facts = {
    "segapp": "0.1.0",
    "folder": "/src/segapp",
    "python": "3.12.1",
    "executable": "/env/bin/python",
    "installer": "pip",
    "packages": [
        package("torch", "torch>=2.11", None, "2.15.0", True),
        package("torchvision", "torchvision>=0.26", None, "0.29.2", True),
        package("textual", "textual==8.2.8", None, "8.2.8", True),
        package("onnx", "onnx>=1.18", "export", "1.20.0", True),
    ],
    "imports": {
        "torch": imported(version="2.15.0", cuda_build="13.2"),
        "torchvision": imported(version="0.29.2"),
        "triton": imported(version="3.9.0"),
        "trainer": imported(),
        "cuda": imported(reason="", devices=[CUDA_DEVICE]),
    },
    "nvidia_smi": smi("ok", "", A5000),
    "amd_smi": None,
    "compiler": "/usr/bin/gcc",
    "visible_devices": None,
    "disks": {"run": DISK, "temporary": DISK, "shared_memory": DISK},
}  # fmt: skip


def of(facts: Facts, name: str) -> Diagnosis:
    (found,) = [finding for finding in evaluate_machine(facts) if finding.name == name]
    return found


def with_facts(facts: Facts = FACTS, **changes: Any) -> Facts:
    return {**facts, **changes}


def with_import(name: str, result: Facts) -> Facts:
    return with_facts(imports={**FACTS["imports"], name: result})


def with_cuda(**facts: Any) -> Facts:
    return with_import("cuda", imported(**{**FACTS["imports"]["cuda"]["facts"], **facts}))


def with_disks(**disks: Any) -> Facts:
    return with_facts(disks={**FACTS["disks"], **disks})


def with_package(*values: Any) -> Facts:
    found = package(*values)
    return with_facts(packages=[*(each for each in FACTS["packages"] if each["name"] != found["name"]), found])


def test_a_complete_machine_has_nothing_to_do() -> None:
    findings = evaluate_machine(FACTS)
    assert {finding.state for finding in findings} == {"ok"}
    lines = report_lines(findings)
    assert lines[-1] == "training can run here, on 1 GPU"
    assert len({line.index("ok ", 15) for line in lines[:5]}) == 1
    assert "to do:" not in lines


@pytest.mark.parametrize(
    ("facts", "name", "state", "found", "fix", "trains"),
    [
        (with_facts(segapp=None), "segapp", "warning", "not installed", "pip install -e /src", True),
        (with_package("torch", "torch>=2.11", None, "2.9.0", False), "torch", "warning",
         "2.9.0, but segapp requires torch>=2.11", "", True),
        (with_package("textual", "textual==8.2.8", None, None, None), "textual", "missing", "not installed",
         "/env/bin/python -m pip install textual==8.2.8", False),
        (with_package("textual", "textual==8.2.8", None, "9.0", False), "textual", "warning", "9.0",
         "textual==8.2.8", True),
        (with_package("onnx", "onnx>=1.18", "export", None, None), "export", "missing", "onnx not installed",
         "pip install 'onnx>=1.18'", True),
        (with_import("torchvision", imported("failed",
         "RuntimeError: operator torchvision::nms does not exist")),
         "torchvision", "missing", "does not match torch 2.15.0", "--force-reinstall", False),
        (with_import("trainer", imported("failed", "ImportError: libGL.so.1")), "trainer", "missing",
         "libGL", "", False),
        (with_import("triton", imported("failed", "ModuleNotFoundError: triton")), "triton", "missing",
         "triton", "install triton", True),
        (with_import("cuda", imported("hung", "no answer within 90 s")), "cuda", "missing",
         "does not answer", "restart", True),
        (with_cuda(devices=[], reason="driver is too old"), "cuda", "missing", "too old", "newer NVIDIA driver", True),
        (with_facts(with_cuda(devices=[]), visible_devices=""), "cuda", "missing", "hides every GPU", "unset", True),
        (with_cuda(devices=[{**CUDA_DEVICE, "error": "no kernel image is available"}]), "cuda:0", "warning",
         "no kernel image", "a torch built for this GPU", True),
        (with_cuda(devices=[{**CUDA_DEVICE, "capability": "7.5"}]), "cuda:0", "ok", "amp-fp16", "", True),
        (with_cuda(devices=[{**CUDA_DEVICE, "error": "busy"}]), "cuda:0", "warning", "busy", "nvidia-smi", True),
        (with_facts(nvidia_smi=smi("absent")), "nvidia-smi", "missing", "not on PATH",
         "--gpus all", True),
        (with_facts(nvidia_smi=smi("hung", "no answer within 10 s")), "nvidia-smi", "missing",
         "no answer", "restart", True),
        (with_facts(compiler=None), "c compiler", "missing", "no C compiler", "gcc", False),
        (with_facts(with_cuda(devices=[]), compiler=None), "c compiler", "missing", "no C compiler", "gcc", True),
        (with_disks(run={**DISK, "free_bytes": GIB}), "run disk", "warning", "1.0 GiB free", "--run", True),
        (with_disks(run={**DISK, "is_writable": False}), "run disk", "missing", "cannot be written",
         "--run", False),
        (with_disks(temporary=None), "temporary disk", "missing", "no temporary folder", "TMPDIR", False),
    ],
)  # fmt: skip
def test_each_problem_has_its_finding(
    facts: Facts, name: str, state: State, found: str, fix: str, trains: bool
) -> None:
    finding = of(facts, name)
    assert finding.state == state
    assert found in finding.found
    assert fix in finding.fix
    assert can_train(evaluate_machine(facts)) is trains
    lines = report_lines(evaluate_machine(facts))
    assert lines[-1].startswith("training can run here" if trains else "training cannot run here")
    assert not finding.fix or f"    {finding.fix}" in lines


MI210: Facts = {**CUDA_DEVICE, "name": "AMD Instinct MI210", "capability": "7.0"}


def on_rocm(**changes: Any) -> Facts:
    torch = imported(version="2.15.0+rocm7.0", cuda_build=None, rocm_build="7.0")
    cuda = imported(reason="", devices=[MI210], others={})
    imports = {**FACTS["imports"], "torch": torch, "cuda": cuda}
    return with_facts(imports=imports, nvidia_smi=smi("absent"), amd_smi="/opt/rocm/bin/amd-smi", **changes)


def test_rocm_is_read_by_its_own_names() -> None:
    facts = on_rocm()
    assert {finding.state for finding in evaluate_machine(facts)} == {"ok"}
    assert "built for ROCm 7.0" in of(facts, "torch").found
    assert of(facts, "amd-smi").found == "/opt/rocm/bin/amd-smi"
    assert "AMD Instinct MI210" in of(facts, "cuda:0").found
    assert "bfloat16" not in of(facts, "cuda:0").found


def test_doctor_says_untested_for_what_nobody_ran() -> None:
    """On ROCm and MPS, and on several GPUs."""
    facts = with_cuda(others={"mps": ["Apple M2"]})
    found = {"cuda": of(facts, "cuda:0"), "mps": of(facts, "mps:0")}
    found["rocm"] = of(on_rocm(), "cuda:0")
    three = with_cuda(devices=FACTS["imports"]["cuda"]["facts"]["devices"] * 3)
    found["one"], found["several"] = of(FACTS, "cuda"), of(three, "cuda")
    said = {kind for kind, finding in found.items() if "untested" in finding.found}
    assert said == {"mps", "rocm", "several"}


def test_page_tested_on_has_the_table_of_doctor() -> None:
    page = (ROOT / "segapp/docs/start/install.md").read_text(encoding="utf-8").partition("## Tested on")[2]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in page.splitlines() if line[:1] == "|"]
    assert rows[2:] == list(TESTED_ON.values())


@pytest.mark.parametrize(
    ("installer", "name", "requirement", "extra", "command"),
    [
        ("pip", "onnx", "onnx>=1.18", "export", "/env/bin/python -m pip install 'onnx>=1.18'"),
        ("uv", "textual", "textual==8.2.8", None, "uv pip install --python /env/bin/python textual==8.2.8"),
    ],
)
def test_the_command_is_the_installers(
    installer: str, name: str, requirement: str, extra: str | None, command: str
) -> None:
    facts = with_facts(with_package(name, requirement, extra, None, None), installer=installer)
    assert of(facts, extra or name).fix == command


@pytest.mark.parametrize(
    ("total_mib", "free_mib", "is_writable", "state", "fix"),
    [
        (64, 64, True, "warning", "--shm-size"),
        (8192, 10, True, "warning", "remove"),
        (8192, 8192, False, "warning", "--shm-size"),
        (8192, 8192, True, "ok", ""),
    ],
)
def test_shared_memory_by_its_size(total_mib: int, free_mib: int, is_writable: bool, state: State, fix: str) -> None:
    disk = {
        "path": "/dev/shm", "total_bytes": total_mib << 20, "free_bytes": free_mib << 20, "is_writable": is_writable,
    }  # fmt: skip
    finding = of(with_disks(shared_memory=disk), "shared memory")
    assert finding.state == state
    assert fix in finding.fix


def fake_torch(folder: Path, body: str) -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(body)
    return folder


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "failed", "ImportError: libcudart"),
        ("raise OSError('invalid ELF header')", "failed", "OSError: invalid ELF header"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "Segmentation fault"),
        ("import os; os._exit(3)", "crashed", "exit status 3"),
        ("import time; time.sleep(1000)", "hung", "no answer within 4 s"),
    ],
)
def test_a_broken_torch_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: str, error: str
) -> None:
    monkeypatch.syspath_prepend(fake_torch(tmp_path, body))
    found = try_imports(4.0)
    assert found["torch"]["status"] == status
    assert error in found["torch"]["error"]
    assert {result["status"] for name, result in found.items() if name != "torch"} == {"skipped"}
    findings = evaluate_machine(with_facts(imports=found))
    assert not can_train(findings)
    assert of(with_facts(imports=found), "torch").fix.endswith("--force-reinstall 'torch>=2.11' 'torchvision>=0.26'")


def test_imports_behind_a_crashing_one_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        "class Ones:\n    def sum(self): return 2\ndef ones(n): return Ones()\n"
        "class version: cuda = hip = None\n__version__ = '9'\n"
    )
    monkeypatch.syspath_prepend(fake_torch(tmp_path, body))
    (tmp_path / "torchvision.py").write_text("import os; os._exit(1)")
    (tmp_path / "triton.py").write_text("__version__ = '3'")
    found = try_imports(60.0)
    assert found["torch"]["facts"] == {"version": "9", "cuda_build": None, "rocm_build": None}
    assert [found[name]["status"] for name in ("torchvision", "triton", "trainer", "cuda")] == [
        "crashed",
        "ok",
        "failed",
        "failed",
    ]


def doctor(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **env}
    command = [sys.executable, "-m", "segapp", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder, env=environ)


def test_a_broken_installation_gives_exit_code_1_and_a_command(tmp_path: Path) -> None:
    fakes = fake_torch(tmp_path / "fakes", "raise OSError('libtorch.so: file too short')")
    for name in ("textual", "yaml", "numpy", "albumentations"):
        (fakes / f"{name}.py").write_text(f"raise ImportError('{name}')")
    done = doctor(tmp_path, PYTHONPATH=f"{fakes}:{ROOT}", PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    assert "cannot be imported: OSError: libtorch.so: file too short" in done.stdout
    assert "  torch (required):\n    " in done.stdout
    assert "c compiler" in done.stdout
    assert done.stdout.splitlines()[-1] == "training cannot run here: torch missing"


TEXT, FLAG = {"type": "string"}, {"type": "boolean"}
MAYBE_FLAG = {"type": ["boolean", "null"]}
MAYBE_TEXT = {"type": ["string", "null"]}
MAYBE_NUMBER = {"type": ["number", "null"]}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


DISK_SCHEMA = record(path=TEXT, total_bytes={"type": "integer"}, free_bytes={"type": "integer"}, is_writable=FLAG)
MAYBE_DISK = {"anyOf": [DISK_SCHEMA, {"type": "null"}]}
SCHEMA = record(
    v={"const": 1},
    can_train=FLAG,
    findings={
        "type": "array",
        "items": record(
            name=TEXT, state={"enum": ["ok", "warning", "missing"]}, found=TEXT, is_required=FLAG, needed_for=TEXT,
            fix=TEXT,
        ),
    },
    facts=record(
        segapp=MAYBE_TEXT,
        folder=TEXT,
        python=TEXT,
        executable=TEXT,
        installer={"enum": ["uv", "pip"]},
        packages={
            "type": "array",
            "items": record(
                name=TEXT, requirement=TEXT, extra=MAYBE_TEXT, version=MAYBE_TEXT, is_in_range=MAYBE_FLAG,
            ),
        },
        imports=record(
            **{
                name: record(
                    status={"enum": ["ok", "failed", "crashed", "hung", "skipped"]},
                    error=TEXT,
                    facts={"type": "object"},
                )
                for name in ("torch", "torchvision", "triton", "trainer", "cuda")
            }
        ),
        nvidia_smi=record(
            status={"enum": ["ok", "absent", "failed", "hung"]},
            error=TEXT,
            gpus={
                "type": "array",
                "items": record(
                    index={"type": "integer"}, uuid=TEXT, name=TEXT, driver=TEXT, total_mib=MAYBE_NUMBER,
                    used_mib=MAYBE_NUMBER,
                ),
            },
        ),
        amd_smi=MAYBE_TEXT,
        compiler=MAYBE_TEXT,
        visible_devices=MAYBE_TEXT,
        disks=record(run=DISK_SCHEMA, temporary=MAYBE_DISK, shared_memory=MAYBE_DISK),
    ),
)  # fmt: skip


@pytest.mark.slow
def test_the_json_of_this_machine_has_the_schema(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    jsonschema.validate(found, SCHEMA)
    assert found["can_train"] is True
    assert found["facts"]["imports"]["torch"]["status"] == "ok"
    states = {finding["name"]: finding["state"] for finding in found["findings"]}
    assert {states[name] for name in ("python", "torch", "torchvision", "trainer", "numpy", "export")} == {"ok"}


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in the place of nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return make


def test_no_nvidia_smi_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_nvidia_smi()["status"] == "absent"


def test_nvidia_smi_lists_two_gpus(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi(
        "echo '0, GPU-ab, 580.95, 24220, 1024, NVIDIA RTX A5000'\n"
        "echo '1, GPU-cd, 580.95, 24220, [N/A], NVIDIA RTX A5000'"
    )
    assert ask_nvidia_smi() == smi("ok", "", A5000, {**A5000, "index": 1, "uuid": "cd", "used_mib": None})


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        ("echo 'No devices were found'; exit 6", "failed", "No devices were found"),
        ("echo 'driver/library version mismatch' >&2; exit 18", "failed", "driver/library version mismatch"),
        ("exit 9", "failed", "exit status 9"),
        ("/bin/sleep 1000 & wait", "hung", "no answer within 1 s"),
    ],
)
def test_a_failing_nvidia_smi_is_reported(
    nvidia_smi: Callable[[str], None], script: str, status: str, error: str
) -> None:
    nvidia_smi(script)
    assert ask_nvidia_smi(1.0) == smi(status, error)


def test_the_compiler_is_the_one_triton_takes(tmp_path: Path) -> None:
    path = str(tmp_path)
    assert find_compiler({"PATH": path}) is None
    for name in ("clang", "gcc", "mine"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    assert find_compiler({"PATH": path}) == f"{path}/gcc"
    assert find_compiler({"PATH": path, "CC": "mine -m64"}) == "mine -m64"
    assert find_compiler({"PATH": path, "CC": "absent"}) is None


def test_doctor_imports_the_standard_library_only() -> None:
    code = "import sys; before = set(sys.modules); import segapp.commands.doctor; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    roots = {name.partition(".")[0] for name in done.stdout.split()}
    assert roots <= {"segapp", *sys.stdlib_module_names}
