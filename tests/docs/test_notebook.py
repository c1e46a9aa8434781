"""The page python as a notebook: its code runs in a Jupyter kernel and shows the progress and the table."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from segapp.docs.pages import find_page
from tests.support import ROOT
from tests.support.page_blocks import blocks, difference
from tests.support.runs import events

PAGE = find_page("python")[0].path
CELLS = [block for block in blocks() if block.page == PAGE and block.language == "python" and block.mark != "not run"]
SHOWN = "import pandas; pandas.DataFrame(result.history.rows())"
"""Last line of a cell that the page names: its value is shown."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_page_python_runs_as_a_notebook(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(ROOT / "data")
    cells = run_cells([*(block.text for block in CELLS), SHOWN], tmp_path)
    for cell, block in zip(cells, CELLS, strict=False):
        (promised,) = [each.text for each in blocks() if each.source == block and each.language == "text"] or [""]
        printed = printed_by(cell)
        assert not promised or difference(printed, promised) == "", block.place
        if "epochs=6" in cell.source:
            assert "epoch 6/6  step 18/18  loss " in printed
    assert "<th>miou</th>" in data_of(cells[-1], "text/html")


TRAIN = """
import json, segapp
every = {"eval.every_epochs": 1, "checkpoint.every_epochs": 1, "log.every_steps": 1}
short = {"train.epochs": 3, "train.batch_size": 9, **every}
segapp.train("demo.yaml", short)
"""
STATUS = "!python -m segapp status demo --json"
RESUME = """
result, whole = segapp.train(resume="demo"), segapp.train("demo.yaml", short, run="whole", progress=False)
print(json.dumps([result.history.rows(), whole.history.rows()]))
"""
PLOT = """
axes, bars = result.history.plot(), segapp.evaluate(result.run, progress=False).plot()
print(json.dumps([line.get_ydata().tolist() for line in axes.lines]), bars.get_title())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupted_training_resumes_in_the_same_kernel(tmp_path: Path) -> None:
    """It is interrupted in the second of three epochs, each with 8 steps, and has the scores of a run that is not."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    log = tmp_path / "runs" / "demo" / "events.jsonl"
    train, status, resume, plot = run_cells(
        [TRAIN, STATUS, RESUME, PLOT], tmp_path, lambda: log.exists() and log.read_text().count('"type":"step"') > 8
    )
    assert train.outputs[-1].ename == "KeyboardInterrupt"
    shown = json.loads(printed_by(status))
    assert (shown["state"], shown["reason"], shown["exit_code"]) == (
        "stopped",
        "KeyboardInterrupt: nothing was saved",
        130,
    )
    assert shown["checkpoint"]["epoch"] == 1
    ends = [(end["status"], end["exit_code"]) for end in events(log.parent, "run_end")]
    assert ends == [("stopped", 130), ("finished", 0)]
    resumed, whole = ([{**row, "val_s": 0} for row in rows] for rows in json.loads(printed_by(resume).splitlines()[-1]))
    assert [row["epoch"] for row in resumed] == [1, 2, 3]
    assert resumed == whole
    losses = [[row[key] for row in whole] for key in ("train_loss", "loss")]
    assert printed_by(plot) == f"{losses} val: mIoU {max(row['miou'] for row in whole):.4f}\n"
    assert [sorted(output.data) for output in plot.outputs if output.output_type == "display_data"] == [
        ["image/png", "text/plain"]
    ] * 2


def run_cells(texts: Sequence[str], folder: Path, interrupts: Callable[[], bool] | None = None) -> list[Any]:
    """Return the cells of a notebook that has run; its kernel is interrupted in the first cell once `interrupts`."""
    nbclient = pytest.importorskip("nbclient", reason="a notebook needs the dependency group notebook")
    nbformat = pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(text) for text in texts]
    notebook, place = nbformat.v4.new_notebook(cells=cells), {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=place)

    def interrupt(holds: Callable[[], bool]) -> None:
        while not holds():
            time.sleep(0.02)
        os.kill(client.km.provisioner.pid, signal.SIGINT)

    if interrupts is not None:
        cells[0].metadata["tags"] = ["raises-exception"]  # the next cell runs
        threading.Thread(target=interrupt, args=[interrupts], daemon=True).start()
    kernel = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.defpath}", "HOME": str(folder)}
    client.execute(env=kernel)  # raises an error of a cell
    return cells


def printed_by(cell: Any) -> str:
    """Return what a cell prints to stdout."""
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def data_of(cell: Any, kind: str) -> str:
    """Return the value that a cell shows, in one form."""
    (value,) = [output.data for output in cell.outputs if output.output_type == "execute_result"]
    return str(value[kind])
