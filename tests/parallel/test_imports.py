import json
import subprocess
import sys


def modules_after(code: str) -> set[str]:
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    return set(json.loads(subprocess.check_output([sys.executable, "-c", script], text=True)))


def test_splits_of_a_batch_load_no_torch():
    loaded = modules_after("from segapp.chunks import plan_chunks, check_split")
    assert not {"torch", "numpy", "segapp.parallel"} & loaded
