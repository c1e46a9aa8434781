"""The page `tested-on`: it agrees with the table of `start/install.md`, and with the allowed versions."""

from __future__ import annotations

import re
import tomllib
from datetime import date

from packaging.requirements import Requirement

from segapp.docs.pages import find_page
from tests.support import ROOT

PAGE = find_page("tested-on")[0].text()
ROWS = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", PAGE, re.MULTILINE))
TESTED_ON = re.findall(
    r"^\| (?!devices)([^|]+?) \| ([^|]+?) \|",
    find_page("install")[0].text().partition("## Tested on")[2],
    re.MULTILINE,
)


def test_devices_are_untested_as_the_page_install_says() -> None:
    for name, trained_on in TESTED_ON:
        (own, *others) = [cell for row, cell in ROWS.items() if row.startswith(name)]
        assert (own == "not yet") == (trained_on == "untested"), name
        assert own == "not yet" or trained_on.startswith("yes")
        assert set(others) <= {"not yet"} or trained_on.startswith("yes")
    assert PAGE.splitlines()[2].startswith("segapp has trained on one NVIDIA H200 and on CPUs.")
    assert [name for name, trained_on in TESTED_ON if trained_on != "untested"] == ["CPU", "NVIDIA GPUs (CUDA), one"]


def test_rows_are_dated_and_versions_are_allowed() -> None:
    rows = re.findall(r"^\| (?!---)(?!devices |machines |systems )([^|]+)\|([^|]+)\|([^|]*)\|$", PAGE, re.MULTILINE)
    assert len(rows) > 15
    assert [row for row, tested, last in rows if not last.strip() and "not" not in tested] == []
    assert len([date.fromisoformat(text) for text in re.findall(r"\| (\d{4}-\d\d-\d\d) \|", PAGE)]) >= 5
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    named = re.findall(r"\b(torch|torchvision) (\d+\.\d+\.\d+)", PAGE)
    assert len(named) >= 3
    assert [f"{name} {version}" for name, version in named if version not in allowed[name]] == []
