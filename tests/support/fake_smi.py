"""A program in the place of nvidia-smi: one that behaves like the real one, or a few lines of shell."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

THREE_GPUS = """\
0, GPU-aaaa, 10, 24220, 4220, 20000, 535.1, Fast Card, 1, Disabled, Disabled, 50
1, GPU-bbbb, [N/A], 24220, 1000, 23220, 535.1, Fast Card, 2, Disabled, Disabled, [N/A]
2, GPU-cccc, 99, 11019, 11000, 19, 535.1, Small Card, 3, Disabled, Disabled, 80
"""
"""What GPUtil asks for; the second one says nothing about its load and temperature."""


@dataclass(frozen=True)
class Card:
    """A GPU of the machine, in the order of bus addresses; `lost` is printed in its place."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-80GB"
    total_mib: str = "81920"
    used_mib: str = "87"
    load: str = "0"
    mig: str = "Disabled"
    slices: tuple[tuple[str, str, int, int, str, str], ...] = ()
    """Profile, uuid, GPU instance, compute instance, total and used MiB of each slice."""
    lost: str = ""


FOUR = (
    Card("GPU-1a4e", "NVIDIA RTX A6000", "49140", "300"),
    Card("GPU-1b77", "NVIDIA GeForce RTX 3060", "12288", "11"),
    Card("GPU-2c05", "NVIDIA GeForce RTX 3060", "12037", "1500"),
    Card("GPU-9d31", "NVIDIA GeForce RTX 3090", "24576", "700"),
)
"""Four GPUs of three kinds; the first two uuids begin with the same character."""

SLICED = (
    Card("GPU-5e00", mig="Enabled", load="[N/A]"),
    Card(
        "GPU-6f12",
        mig="Enabled",
        load="[N/A]",
        slices=(
            ("3g.40gb", "MIG-77aa01", 2, 0, "40192", "37"),
            ("1g.10gb", "MIG-77ab02", 9, 0, "9728", "12"),
            ("1g.10gb", "MIG-80cd03", 11, 0, "[Insufficient Permissions]", "[Insufficient Permissions]"),
        ),
    ),
    Card(
        "GPU-7f43",
        name="NVIDIA A30",
        total_mib="24576",
        mig="Enabled",
        slices=(("2g.12gb", "MIG-91", 3, 1, "12011", "9"),),
    ),
    Card("GPU-8a99", name="NVIDIA L4", total_mib="23034", mig="[N/A]", load="7"),
)
"""A GPU in MIG mode without slices, two with slices, and one that has no MIG mode."""

_PROGRAM = """#!/bin/sh
'''exec' {python} -SE "$0" "$@"
' '''
import sys
CARDS, DRIVER = {cards!r}, {driver!r}
words = sys.argv[1:]
rows = [(index, card) for index, card in enumerate(CARDS)]
if not CARDS:
    print("No devices were found")
    sys.exit(6)
elif words == ["-L"]:
    for index, card in rows:
        print(card["lost"] or f"GPU {{index}}: {{card['name']}} (UUID: {{card['uuid']}})")
        for number, (profile, uuid, *_) in enumerate(card["slices"]):
            print(f"  MIG {{profile:<12}}Device {{number:>2}}: (UUID: {{uuid}})")
elif words == ["-q", "-x"]:
    print('<?xml version="1.0" ?>\\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\\n<nvidia_smi_log>')
    for index, card in rows:
        print(f"<gpu id=\\"00000000:{{index:02X}}:00.0\\">\\n<product_name>{{card['name']}}</product_name>")
        print(f"<mig_mode>\\n<current_mig>{{card['mig'].strip('[]')}}</current_mig>\\n</mig_mode>\\n<mig_devices>")
        for number, (profile, uuid, instance, part, total, used) in enumerate(card["slices"]):
            print(f"<mig_device>\\n<index>{{number}}</index>\\n<gpu_instance_id>{{instance}}</gpu_instance_id>")
            print(f"<compute_instance_id>{{part}}</compute_instance_id>\\n<device_attributes>\\n<shared>")
            print("<multiprocessor_count>14</multiprocessor_count>\\n</shared>\\n</device_attributes>")
            unit = " MiB" if total.isdecimal() else ""
            print(f"<fb_memory_usage>\\n<total>{{total}}{{unit}}</total>\\n<reserved>0 MiB</reserved>")
            print(f"<used>{{used}}{{unit}}</used>\\n<free>5 MiB</free>\\n</fb_memory_usage>")
            print("<bar1_memory_usage>\\n<total>32767 MiB</total>\\n<used>1 MiB</used>\\n</bar1_memory_usage>")
            print("</mig_device>")
        print(f"</mig_devices>\\n<uuid>{{card['uuid']}}</uuid>\\n<fb_memory_usage>")
        print(f"<total>{{card['total_mib']}} MiB</total>")
        print(f"<used>{{card['used_mib']}} MiB</used>\\n</fb_memory_usage>\\n<processes>\\n<process_info>")
        print("<gpu_instance_id>2</gpu_instance_id>\\n<compute_instance_id>0</compute_instance_id>\\n</process_info>")
        print("</processes>\\n</gpu>")
    print("</nvidia_smi_log>")
elif words[0].startswith("--query-gpu=") and words[1].startswith("--format=csv"):
    fields = words[0].partition("=")[2].split(",")
    shown = words[1].partition("=")[2].split(",")
    known = {{"driver_version": DRIVER, "gpu_serial": "[N/A]", "display_active": "Disabled", "display_mode": "Enabled",
              "temperature.gpu": "41", "memory.free": "1"}}
    own = {{"uuid": "uuid", "name": "name", "memory.total": "total_mib", "memory.used": "used_mib",
            "utilization.gpu": "load", **({{"mig.mode.current": "mig"}} if DRIVER >= "450" else {{}})}}
    units = {{"memory.total": " MiB", "memory.used": " MiB", "memory.free": " MiB", "utilization.gpu": " %"}}
    for field in fields:
        if field not in {{"index", *known, *own}}:
            print(f'Field "{{field}}" is not a valid field to query.\\n')
            sys.exit(2)
    if "noheader" not in shown:
        print(", ".join(fields))
    for index, card in rows:
        values = {{"index": str(index), **known, **{{field: card[own[field]] for field in own}}}}
        unit = {{}} if "nounits" in shown else units
        print(card["lost"] or ", ".join(values[field] + unit.get(field, "") for field in fields))
else:
    print(f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\\n")
    sys.exit(2)
sys.exit(15 if any(card["lost"] for card in CARDS) else 0)
"""


def fake_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, name: str = "nvidia-smi") -> None:
    """Puts a shell script in the place of the program for a test."""
    _put(folder / name, f"#!/bin/sh\n{script}\n", monkeypatch)


def smi_of(folder: Path, cards: tuple[Card, ...], monkeypatch: pytest.MonkeyPatch, driver: str = "535.129.03") -> None:
    """Puts a nvidia-smi of these cards on the path: `-L`, `-q -x` and `--query-gpu=... --format=csv...`."""
    rows = [asdict(card) for card in cards]
    program = _PROGRAM.format(python=shlex.quote(sys.executable), cards=rows, driver=driver)
    _put(folder / "nvidia-smi", program, monkeypatch)


def _put(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(text)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
