"""Mixed devices, which logical CPU devices cannot show, raise errors on fake devices without a GPU."""

import json
import subprocess
import sys

import pytest
from torch.utils import backend_registration

from tests.support import ROOT

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot register a device in Python",
)


@pytest.fixture(scope="module")
def said():
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.gpu.fake_device_step"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_full_step_with_sync_batchnorm_never_mixes_devices(said):
    assert said["steps"] == [["fake:0", "fake:1", "fake:2"], ["fake:1", "fake:2"], ["fake:0", "fake:1", "fake:2"]]


@pytest.mark.slow
def test_four_seeded_device_bugs_are_detected(said):
    assert len(said["bugs"]) == 4
    assert all("device" in words for words in said["bugs"].values()), said["bugs"]
