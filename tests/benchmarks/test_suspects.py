"""How many of the first regions of `segapp suspects` are errors that were put into the masks of CamVid.

Trains two folds in about eight minutes on one free core; skips without the CamVid images.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_suspects.py
"""

import subprocess
import sys

import pytest

from segapp.commands.suspects import judge_masks
from tests.support.label_errors import kinds_found, write_folds

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(3 * 3600)]


def test_first_regions_are_errors_in_masks_of_camvid(camvid, tmp_path, capsys):
    """Five in a hundred regions are shifted, swapped, eroded or missing; the network of each fold sees them too."""
    errors = write_folds(camvid, tmp_path)
    configs = [word for fold in (0, 1) for word in ("--config", f"fold{fold}.yaml")]
    done = subprocess.run([sys.executable, "-m", "segapp", "sweep", "folds", *configs], cwd=tmp_path, timeout=3 * 3600)
    assert done.returncode == 0
    found = judge_masks([str(tmp_path / "runs/folds" / fold) for fold in ("fold0", "fold1")], None, None)
    kinds = kinds_found(found, tmp_path / "changed", 300)
    with capsys.disabled():
        print(f"\n{len(errors)} regions have an error; {len(found.suspects)} regions are suspicious")
        for first in (50, 100, 200, 300):
            right = [kind for kind in kinds[:first] if kind is not None]
            shares = ", ".join(f"{kind} {right.count(kind)}" for kind in sorted(set(right)))
            print(f"of the first {first}: {len(right) / first:.2f} are errors ({shares})")
    assert sum(kind is not None for kind in kinds[:100]) >= 80
