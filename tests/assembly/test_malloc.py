"""Freed memory stays with the process: counted in page faults, which the kernel counts."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
if sys.argv[1] == "kept":
    from segapp.datasets.resources import freed_memory_kept
    context = freed_memory_kept(True)
    context.__enter__()
    with freed_memory_kept(True), freed_memory_kept(False):
        pass  # an evaluation within a training, which goes on
for step in range(20):
    if step == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(2**24) for _ in range(2)]  # 64 MiB each: more than any threshold that can be set
    del kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap can be told so")
def test_freed_memory_is_reused_without_page_faults() -> None:
    given_back, kept = page_faults("given back"), page_faults("kept")
    assert given_back > 3 * kept
