"""The Dockerfile of the page `platforms`: its instructions, copied files and commands. It is not built."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib

from tests.support import ROOT
from tests.support.page_blocks import blocks

(BLOCK,) = [block for block in blocks() if block.language == "dockerfile"]
KNOWN = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT"}


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments), with continued lines joined."""
    lines = re.sub(r"\\\n\s*", " ", BLOCK.text).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines if line.strip()]


def test_instructions_are_known_and_begin_with_from() -> None:
    assert instructions()[0][0] == "FROM"
    assert {name for name, _ in instructions()} <= KNOWN
    (base,) = [text for name, text in instructions() if name == "FROM"]
    python = tuple(int(part) for part in re.findall(r"\d+", base))
    assert python >= (3, 11), "requires-python of pyproject.toml"


def test_commands_parse_and_copied_files_exist() -> None:
    for name, text in instructions():
        if name == "RUN":
            assert subprocess.run(["bash", "-nc", text], check=False).returncode == 0, text
        if name == "COPY":
            *sources, _target = shlex.split(text)
            assert [source for source in sources if not (ROOT / source).exists()] == []
        if name == "ENTRYPOINT":
            (program,) = json.loads(text)
            assert program in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_what_the_build_of_the_package_reads_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {word for name, text in instructions() if name == "COPY" for word in shlex.split(text)[:-1]}
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        project["project"]["readme"],
        *project["project"]["license-files"],
        *wheel["packages"],
        *wheel["force-include"],
    }
    assert needed | {"pyproject.toml"} <= copied
