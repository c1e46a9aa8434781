"""A run folder that an older version wrote is resumed as if it had never been interrupted.

`tests/data/run_of_7e7f74b.tar.xz` is a run of commit 7e7f74b on the drawn data set, killed in step 8, in the middle of
its second epoch; `REFERENCE` has the steps of the same run without the kill, by the same commit.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.runs import events, segapp

REFERENCE = {
    1: (1.0950167179107666, 3.0867409706115723),
    2: (1.0981978178024292, 4.271512508392334),
    3: (0.8914697170257568, 2.733930826187134),
    4: (1.0419658422470093, 3.149960517883301),
    5: (0.8667768239974976, 2.210641860961914),
    6: (0.8847125768661499, 2.7705063819885254),
    7: (0.7700057029724121, 2.4675018787384033),
    8: (0.8081149458885193, 2.3516080379486084),
    9: (0.6637338399887085, 1.8726788759231567),
    10: (0.861991822719574, 2.648380994796753),
    11: (0.717566967010498, 2.436843156814575),
    12: (0.7448979020118713, 2.108860731124878),
    13: (0.6785324811935425, 2.0256073474884033),
    14: (0.6337401270866394, 3.180558919906616),
    15: (0.5061491131782532, 1.591432809829712),
}
"""Step -> loss, norm of the gradient."""


def test_older_run_resumes_on_its_course(tiny_root: Path, tmp_path: Path) -> None:
    with tarfile.open(ROOT / "tests" / "data" / "run_of_7e7f74b.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    shutil.copytree(tiny_root, tmp_path / "data")
    before = events(tmp_path / "run", "step")
    assert [event["step"] for event in before] == list(range(1, 8))
    done = segapp("train", "--plain", "--resume", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "names of an older version" in line]
    assert len(said) == 1
    assert "optim.nesterov is now optim.options.nesterov" in said[0]
    steps = events(tmp_path / "run", "step")
    assert [event["step"] for event in steps] == list(REFERENCE)
    for event in steps:
        loss, grad_norm = REFERENCE[event["step"]]
        assert event["loss"] == pytest.approx(loss, rel=1e-4)
        assert event["grad_norm"] == pytest.approx(grad_norm, rel=1e-3)
    assert events(tmp_path / "run", "run_end")[-1]["status"] == "finished"
    listed = json.loads(segapp("ckpt", "verify", "run", "--json", cwd=tmp_path).stdout)
    assert listed
