import json
import subprocess
import sys

import pytest

import segapp.parallel


def modules_after(code: str) -> set[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    return set(json.loads(subprocess.check_output([sys.executable, "-c", script], text=True)))


@pytest.mark.parametrize(
    "code",
    [
        "import segapp.parallel",
        "from segapp.parallel import plan_chunks, check_split",
        "from segapp.parallel.chunks import plan_chunks",
    ],
)
def test_plan_chunks_loads_no_torch(code):
    loaded = modules_after(code)
    assert "torch" not in loaded
    assert "numpy" not in loaded


@pytest.mark.slow
def test_parallel_library_loads_nothing_beyond_torch():
    code = "import segapp.parallel as p\nfor name in p.__all__: getattr(p, name)"
    loaded = modules_after(code)
    ours = {name for name in loaded if name.split(".")[0] == "segapp"}
    assert all(name == "segapp" or name.startswith("segapp.parallel") for name in ours)
    for outsider in ("torchvision", "textual", "albumentations", "cv2", "pydantic", "GPUtil"):
        assert outsider not in loaded


def test_every_public_name_exists_and_is_documented():
    assert set(segapp.parallel.__all__) <= set(dir(segapp.parallel))
    for name in segapp.parallel.__all__:
        assert getattr(segapp.parallel, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = segapp.parallel.nothing
    assert callable(segapp.parallel.gradient_penalty)
