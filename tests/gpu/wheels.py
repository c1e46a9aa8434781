"""Gather the wheels for a session on a machine without a network: python -m tests.gpu.wheels --out DIR [--lean].

torch and what it brings (CUDA, Triton, NCCL) stay the machine's own. What depends on torch is therefore fetched without
its dependencies, and those are listed here. There:

    pip install --no-index --find-links DIR --no-deps DIR/*.whl

--lean leaves out the wheels of packages that the images of rented machines have (`IN_IMAGES`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.support import ROOT

PYTHON = "3.12"

PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (24, 25, 26, 27, 28)))
"""pip takes a name of the newer form as it is, and not what is older."""

OF_TORCH = {"torchvision": "==0.26.*", "timm": "", "segmentation-models-pytorch": "", "liger-kernel": "==0.8.*"}
"""Packages that depend on torch, and versions that the machine's torch 2.11 asks for; "": as pyproject.toml says."""

BESIDE_TORCH = ("huggingface-hub",)
"""What those depend on beside torch and the project's own dependencies."""

PINNED = {"setuptools": "setuptools<82", "numpy": "numpy>=1.26,<2.4"}
"""Versions that torch 2.11, and the interpreter of its Triton 3.6, ask for of packages that the project needs too."""

TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
"""Of the development group: what the tests on a card need."""

SANITIZER = "nvidia-cuda-sanitizer-api==13.0.*"
"""compute-sanitizer, of the CUDA version of the machine's torch."""

WITHOUT_WHEEL = ("GPUtil",)
"""Packages that are published as a source archive alone; the wheel is built here, and holds Python alone."""

_NAMES_IN_IMAGES = """
absl-py annotated-doc anyio click execnet filelock fsspec grpcio h11 hf-xet huggingface-hub hypothesis idna iniconfig
jinja2 markdown markdown-it-py markupsafe mdurl numpy nvidia-cuda-sanitizer-api opencv-python-headless packaging
pillow pluggy protobuf psutil pygments pytest pytest-timeout pytest-xdist pyyaml rich safetensors scipy setuptools
shellingham sortedcontainers tensorboard tensorboard-data-server tifffile timm torchvision tqdm typer
typing-extensions werkzeug httpcore2 httpx2 truststore
"""

IN_IMAGES = frozenset(_NAMES_IN_IMAGES.split())
"""Packages that the image of a rented machine had beside torch 2.11 in November 2026.

It had version 1 of huggingface-hub, which does not need the last three.
"""

LEAN_MIB = 25
"""Largest size of all wheels of `--lean` together."""


def requirements() -> tuple[list[str], list[str], list[str]]:
    """Return the requirements: with their dependencies, without them, and those to be built."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    own = {**{name_of(text): text for text in project["project"]["dependencies"]}, **PINNED}
    tools = {name_of(text): text for text in project["dependency-groups"]["dev"]}
    chosen = {**own, **{name: tools[name] for name in TOOLS}}
    bare = [f"{name}{version}" if version else chosen[name] for name, version in OF_TORCH.items()]
    left_out = {"torch", *OF_TORCH, *(name.lower() for name in WITHOUT_WHEEL)}
    whole = [text for name, text in chosen.items() if name not in left_out]
    return [*whole, *BESIDE_TORCH], [*bare, SANITIZER], [chosen[name.lower()] for name in WITHOUT_WHEEL]


def name_of(requirement: str) -> str:
    """Return the name of a requirement, in lower case."""
    end = next((i for i, letter in enumerate(requirement) if not (letter.isalnum() or letter in "-_.")), None)
    return requirement[:end].lower()


def commands(out: Path) -> list[list[str]]:
    """Return the commands that fill a folder with wheels."""
    whole, bare, built = requirements()
    pip = [sys.executable, "-m", "pip"]
    target = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    download = [*pip, "download", "--dest", str(out), *target]
    # A marker is read for the Python that runs pip: for another one the requirement is taken without it.
    whole = [text.partition(";")[0].strip() for text in whole]
    wheel = [*pip, "wheel", "--no-deps", "--wheel-dir", str(out)]
    return [[*download, *whole], [*download, "--no-deps", *bare], [*wheel, *built]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the wheels and list them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lean", action="store_true", help="without the packages that the machine's image has")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for command in commands(options.out):
        subprocess.run(command, check=True)
    return finish(options.out, is_lean=options.lean)


def finish(folder: Path, *, is_lean: bool) -> int:
    """Remove the wheels of `IN_IMAGES` if asked to, and list the others; return 1 if they are too large together."""
    wheels = sorted(folder.glob("*.whl"))
    if is_lean:
        unneeded = [path for path in wheels if path.name.partition("-")[0].replace("_", "-").lower() in IN_IMAGES]
        for path in unneeded:
            path.unlink()
        wheels = [path for path in wheels if path not in unneeded]
    mib = sum(path.stat().st_size for path in wheels) / 2**20
    print("\n".join([*(path.name for path in wheels), f"{len(wheels)} wheels, {mib:.1f} MiB"]))
    if is_lean and mib > LEAN_MIB:
        print(f"error: more than {LEAN_MIB} MiB: add what the image has to IN_IMAGES", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
