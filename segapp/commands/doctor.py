"""`segapp doctor`: check what this machine supports, what is missing, and which command installs it.

Facts of the machine (`machine`) become findings: ok, a warning (it works with limits), or missing. If a required thing
is missing, training with default settings fails. Only the standard library is needed, so the command also works in a
broken installation, as long as typer starts.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from segapp.commands.machine import Facts, collect_facts
from segapp.run.starting import announce_on_terminal
from segapp.run.words import plural, printable, size

GIB = 2**30
MIN_RUN_DISK_BYTES = 5 * GIB
"""Checkpoints of 100 to 700 MiB; five of them are kept or being written."""
MIN_TEMPORARY_BYTES = GIB // 2
MIN_SHARED_BYTES = GIB
"""Enough for two batches per data worker; containers get 64 MiB by default."""

TESTED_ON = {
    "cpu": ("CPU", "yes: Linux on x86-64"),
    "cuda": ("NVIDIA GPUs (CUDA), one", "yes: H200"),
    "several": ("NVIDIA GPUs (CUDA), several", "untested"),
    "rocm": ("AMD GPUs (ROCm)", "untested"),
    "mps": ("Apple GPUs (MPS), one device", "untested"),
}
"""Name of each kind of device, and whether trainings have been run on one: the table of `start/install.md`."""

State = Literal["ok", "warning", "missing"]

_EXTRAS = {"export": "segapp export; segapp predict with .onnx files", "wandb": "log.wandb", "mlflow": "log.mlflow"}
_FAILURES = {"failed": "cannot be imported", "crashed": "its import crashes", "hung": "its import hangs"}


class Diagnosis(NamedTuple):
    """A line of the report: what is there or wrong, the affected feature, and a command or sentence to fix it."""

    name: str
    state: State
    found: str
    is_required: bool = False
    needed_for: str = ""
    fix: str = ""


def print_doctor(*, as_json: bool) -> int:
    """Print the findings; return 0 if training can run here, 1 if something that it requires is missing."""
    announce_on_terminal("looking at this machine")
    facts = collect_facts()
    findings = evaluate_machine(facts)
    trains = can_train(findings)
    if as_json:
        plain = [finding._asdict() for finding in findings]
        print(json.dumps({"v": 1, "can_train": trains, "findings": plain, "facts": facts}, indent=2))
    else:
        print("\n".join(report_lines(findings)))
    return 0 if trains else 1


def report_lines(findings: Sequence[Diagnosis]) -> list[str]:
    """Return the report as text: a line for each finding, then the commands to run, then the result."""
    width = max(len(finding.name) for finding in findings)
    lines, to_do = [], []
    for name, state, found, is_required, needed_for, fix in findings:
        affected = f" (affects {needed_for})" if needed_for and not fix else ""
        lines.append(printable(f"{name:<{width}}  {state:<7}  {found}{affected}"))
        if fix:
            label = "required" if is_required and state == "missing" else f"for {needed_for}"
            to_do += [printable(f"  {name} ({label}):"), printable(f"    {fix}")]
    if to_do:
        lines += ["", "to do:", *to_do]
    missing = [finding.name for finding in findings if finding.is_required and finding.state == "missing"]
    gpus = sum(finding.name.startswith("cuda:") and finding.state == "ok" for finding in findings)
    where = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "the CPU"
    result = f"cannot run here: {', '.join(missing)} missing" if missing else f"can run here, on {where}"
    return [*lines, "", f"training {result}"]


def can_train(findings: Sequence[Diagnosis]) -> bool:
    """Return True if nothing that is required is missing."""
    return not any(finding.is_required and finding.state == "missing" for finding in findings)


def evaluate_machine(facts: Facts) -> list[Diagnosis]:
    """Return all findings, in the order in which they are shown."""
    parts = (_software, _packages, _gpus, _triton, _disks)
    return [finding for part in parts for finding in part(facts)]


def _install(facts: Facts, names: Sequence[str], *, again: bool = False) -> str:
    """Return the command that installs packages into this environment; `again` reinstalls them."""
    python = shlex.quote(facts["executable"])
    requirements = {package["name"]: package["requirement"] for package in facts["packages"]}
    words = " ".join(shlex.quote(requirements.get(name, name)) for name in names)
    if facts["installer"] == "uv":
        return f"uv pip install --python {python} {'--reinstall ' if again else ''}{words}"
    return f"{python} -m pip install {'--force-reinstall ' if again else ''}{words}"


def _package(facts: Facts, name: str) -> dict[str, Any]:
    """Return the facts of a package; all are None for one that is not in segapp's metadata."""
    return next((each for each in facts["packages"] if each["name"].lower() == name), {})


def _software(facts: Facts) -> Iterator[Diagnosis]:
    if facts["segapp"] is None:
        found = f"runs from {facts['folder']}, not installed as a package"
        fix = f"{shlex.quote(facts['executable'])} -m pip install -e {shlex.quote(facts['folder'].rpartition('/')[0])}"
        yield Diagnosis("segapp", "warning", found, False, "version checks", fix)
    else:
        yield Diagnosis("segapp", "ok", f"{facts['segapp']} ({facts['folder']})")
    yield Diagnosis("python", "ok", f"{facts['python']} ({facts['executable']})", True)
    yield from _torch(facts)
    if facts["imports"]["trainer"]["status"] != "skipped":
        yield _imported(facts, "trainer", "all its modules can be imported", "install what this error names")


def _torch(facts: Facts) -> Iterator[Diagnosis]:
    torch, vision = facts["imports"]["torch"], facts["imports"]["torchvision"]
    installed, pair = _package(facts, "torch"), ["torch", "torchvision"]
    version, cuda, rocm = (torch["facts"].get(name) for name in ("version", "cuda_build", "rocm_build"))
    if torch["status"] == "ok" and installed.get("is_in_range") is False:
        yield _out_of_range(facts, installed)
    else:
        build = f"built for ROCm {rocm}" if rocm else f"built for CUDA {cuda}" if cuda else "built without CUDA"
        fix = _install(facts, pair, again=not installed or installed["version"] is not None)
        yield _imported(facts, "torch", f"{version}, {build}", fix)
    fix = _install(facts, pair, again=True)
    if torch["status"] != "ok":
        there = _package(facts, "torchvision").get("version")
        found = f"{there}, not tried: it needs torch" if there else "not installed"
        state: State = "warning" if there else "missing"
        yield Diagnosis("torchvision", state, found, True, "every model", "" if there else fix)
    elif vision["status"] == "failed" and "torchvision::" in vision["error"]:
        found = f"does not match torch {version}: {vision['error']}"
        yield Diagnosis("torchvision", "missing", found, True, "every model", fix)
    else:
        yield _imported(facts, "torchvision", f"{vision['facts'].get('version')}, matches torch", fix)


def _imported(facts: Facts, name: str, found: str, fix: str) -> Diagnosis:
    result = facts["imports"][name]
    if result["status"] == "ok":
        return Diagnosis(name, "ok", found, True)
    problem = f"{_FAILURES.get(result['status'], 'not tried')}: {result['error']}"
    return Diagnosis(name, "missing", problem, True, "training", fix)


def _out_of_range(facts: Facts, package: dict[str, Any]) -> Diagnosis:
    found = f"{package['version']}, but segapp requires {package['requirement']}"
    fix = _install(facts, [package["name"]])
    return Diagnosis(package["name"], "warning", found, package["extra"] is None, "a tested combination", fix)


def _packages(facts: Facts) -> Iterator[Diagnosis]:
    for package in facts["packages"]:
        name = package["name"]
        if package["extra"] is not None or name in ("torch", "torchvision"):
            continue
        if package["version"] is None:
            yield Diagnosis(name, "missing", "not installed", True, "training", _install(facts, [name]))
        elif package["is_in_range"] is False:
            yield _out_of_range(facts, package)
        else:
            yield Diagnosis(name, "ok", package["version"], True)
    for extra, needed_for in _EXTRAS.items():
        packages = [package for package in facts["packages"] if package["extra"] == extra]
        absent = [package["name"] for package in packages if package["version"] is None]
        if absent:
            fix = _install(facts, absent)
            yield Diagnosis(extra, "missing", f"{', '.join(absent)} not installed", False, needed_for, fix)
            continue
        yield from (_out_of_range(facts, package) for package in packages if package["is_in_range"] is False)
        if packages:
            yield Diagnosis(extra, "ok", ", ".join(f"{package['name']} {package['version']}" for package in packages))


_SMI_FIXES: dict[str, tuple[State, str]] = {
    "ok": ("ok", ""),
    "absent": ("missing", "install the NVIDIA driver's tools, or start the container with --gpus all"),
    "hung": ("missing", "restart the machine to reset the driver"),
    "failed": ("warning", "see nvidia-smi -q"),
}
"""Result of nvidia-smi -> its state, and the fix."""


def _gpus(facts: Facts) -> Iterator[Diagnosis]:
    smi, cuda = facts["nvidia_smi"], facts["imports"]["cuda"]["facts"]
    devices = cuda.get("devices", [])
    is_rocm = facts["imports"]["torch"]["facts"].get("rocm_build") is not None
    state, fix = _SMI_FIXES[smi["status"]]
    found = smi["error"] or "not on PATH"
    if smi["status"] == "ok":
        drivers = sorted({gpu["driver"] for gpu in smi["gpus"]})
        found = f"lists {plural(len(smi['gpus']), 'GPU')}, driver {', '.join(drivers)}"
    if is_rocm:
        state, found, fix = "ok" if facts["amd_smi"] else "missing", facts["amd_smi"] or "not on PATH", ""
    needed_for = "" if state == "ok" else "free memory for parallel.devices: auto and in the TUI"
    is_to_do = devices or smi["status"] != "absent"
    yield Diagnosis("amd-smi" if is_rocm else "nvidia-smi", state, found, False, needed_for, fix if is_to_do else "")
    yield _cuda(facts)
    used_mib = {gpu["uuid"]: gpu["used_mib"] for gpu in smi["gpus"]}
    for device in devices:
        yield _device(device, used_mib.get(device["uuid"]), is_rocm=is_rocm)
    for kind, names in cuda.get("others", {}).items():
        for index, name in enumerate(names):
            yield Diagnosis(f"{kind}:{index}", "ok", f"{name}, with parallel.devices: [{kind}]{_untested(kind)}")


def _untested(kind: str) -> str:
    return "; untested: no training has been run on its kind" if TESTED_ON[kind][1] == "untested" else ""


def _cuda(facts: Facts) -> Diagnosis:
    result, has_gpus, hidden = facts["imports"]["cuda"], bool(facts["nvidia_smi"]["gpus"]), facts["visible_devices"]
    fix = ""
    if devices := result["facts"].get("devices", []):
        return Diagnosis(
            "cuda", "ok", f"torch sees {plural(len(devices), 'GPU')}{_untested('several') if len(devices) > 1 else ''}"
        )
    if result["status"] == "skipped":
        found = result["error"]
    elif result["status"] != "ok":
        found, has_gpus = f"does not answer: {result['error']}", True
        fix = "restart the machine; nvidia-smi -q and dmesg name the GPU in trouble"
    elif not any(facts["imports"]["torch"]["facts"].get(build) for build in ("cuda_build", "rocm_build")):
        found, fix = "this torch is built without CUDA", _install(facts, ["torch", "torchvision"], again=True)
    elif hidden is not None and hidden.strip() in ("", "-1"):
        found, fix = f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
    else:
        found = result["facts"].get("reason") or "no GPU: training runs on the CPU"
        fix = "install a newer NVIDIA driver, or a torch built for this driver's CUDA"
    return Diagnosis("cuda", "missing", found, False, "training on GPUs", fix if has_gpus else "")


def _device(device: dict[str, Any], used_mib: float | None, *, is_rocm: bool) -> Diagnosis:
    total_gib = f"{device['total_mib'] / 1024:.1f} GiB"
    memory = total_gib if used_mib is None else f"{used_mib / 1024:.1f} of {total_gib} used"
    found = f"{device['name']}, {memory}, compute capability {device['capability']}"
    found += _untested("rocm" if is_rocm else "cuda")
    if device["error"]:
        fix = (
            "nvidia-smi shows the processes on it and its compute mode; if a kernel image is missing, install a torch "
            "built for this GPU: https://pytorch.org/get-started/previous-versions"
        )
        name, found = f"cuda:{device['index']}", f"{found}; {device['error']}"
        return Diagnosis(name, "warning", found, False, "training on this GPU", fix)
    if not is_rocm and int(device["capability"].partition(".")[0]) < 8:
        found = f"{found}; no bfloat16 in hardware: train.precision: auto trains in amp-fp16"
    return Diagnosis(f"cuda:{device['index']}", "ok", found)


def _triton(facts: Facts) -> Iterator[Diagnosis]:
    result = facts["imports"]["triton"]
    has_gpu = bool(facts["imports"]["cuda"]["facts"].get("devices"))
    if result["status"] == "ok":
        yield Diagnosis("triton", "ok", str(result["facts"]["version"]))
    elif result["status"] != "skipped":
        fix = _install(facts, ["triton"], again=result["status"] != "failed") if has_gpu else ""
        yield Diagnosis("triton", "missing", result["error"], False, "the fast loss on GPUs", fix)
    if facts["compiler"] is not None:
        yield Diagnosis("c compiler", "ok", facts["compiler"])
        return
    found = "no C compiler in CC, and neither gcc nor clang on PATH"
    fix = "install gcc, or set CC to a C compiler"
    is_needed = has_gpu and result["status"] == "ok"  # loss.options.implementation: auto takes Triton then
    if is_needed:
        fix += "; without one: loss.options.implementation: reference"
    yield Diagnosis("c compiler", "missing", found, is_needed, "Triton: the loss on GPUs", fix)


def _disks(facts: Facts) -> Iterator[Diagnosis]:
    run, temporary, shared = (facts["disks"][name] for name in ("run", "temporary", "shared_memory"))
    yield _disk("run disk", run, MIN_RUN_DISK_BYTES, "checkpoints", "choose another folder with --run")
    if temporary is None:
        fix = "export TMPDIR=/a/folder/that/can/be/written"
        yield Diagnosis("temporary disk", "missing", "no temporary folder can be written", True, "training", fix)
    else:
        fix = "free space there, or set TMPDIR to another folder"
        yield _disk("temporary disk", temporary, MIN_TEMPORARY_BYTES, "compiled kernels", fix)
    if shared is not None:
        fix = "start the container with --shm-size=8g (or --ipc=host), or set data.workers: 0"
        if shared["is_writable"] and shared["total_bytes"] >= MIN_SHARED_BYTES:
            fix = f"remove what fills it: ls -l {shared['path']}"
        found = _disk("shared memory", shared, MIN_SHARED_BYTES, "data workers", fix)
        # Without shared memory, a training with data.workers: 0 is still possible.
        yield found if found.state == "ok" else found._replace(state="warning", is_required=False)


def _disk(name: str, disk: Facts, least_bytes: int, needed_for: str, fix: str) -> Diagnosis:
    if not disk["is_writable"]:
        return Diagnosis(name, "missing", f"{disk['path']} cannot be written", True, needed_for, fix)
    found = f"{size(disk['free_bytes'])} free of {size(disk['total_bytes'])} ({disk['path']})"
    if disk["free_bytes"] >= least_bytes:
        return Diagnosis(name, "ok", found)
    return Diagnosis(name, "warning", f"{found}, {size(least_bytes)} are advised", False, needed_for, fix)
