"""The page python as a notebook: its code runs in a Jupyter kernel and shows the progress and the table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from segapp.docs.pages import find_page
from tests.support import ROOT
from tests.support.page_blocks import blocks, difference

PAGE = find_page("python")[0].path
CELLS = [block for block in blocks() if block.page == PAGE and block.language == "python" and block.mark != "not run"]
SHOWN = "import pandas; pandas.DataFrame(result.history.rows())"
"""Last line of a cell that the page names: its value is shown."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_page_python_runs_as_a_notebook(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="a notebook needs the dependency group notebook")
    nbformat = pytest.importorskip("nbformat")
    (tmp_path / "data").symlink_to(ROOT / "data")
    cells = [nbformat.v4.new_code_cell(text) for text in [*(block.text for block in CELLS), SHOWN]]
    notebook = nbformat.v4.new_notebook(cells=cells)
    place = {"metadata": {"path": str(tmp_path)}}
    kernel = {"PYTHONPATH": str(ROOT), "PATH": str(Path(sys.executable).parent)}
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place)
    client.execute(env={**kernel, "HOME": str(tmp_path)})  # raises an error of a cell

    for cell, block in zip(cells, CELLS, strict=False):
        (promised,) = [each.text for each in blocks() if each.source == block and each.language == "text"] or [""]
        printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        assert not promised or difference(printed, promised) == "", block.place
        if "epochs=6" in cell.source:
            assert "epoch 6/6  step 18/18  loss " in printed
    assert "<th>miou</th>" in data_of(cells[-1], "text/html")


def data_of(cell: Any, kind: str) -> str:
    """Return the value that a cell shows, in one form."""
    (value,) = [output.data for output in cell.outputs if output.output_type == "execute_result"]
    return str(value[kind])
