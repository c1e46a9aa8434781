"""What must hold before the first CUDA call of a process that tests on a card."""

from __future__ import annotations

import os

# cuBLAS reads it at the first matrix product of the process and keeps it, and later tests are deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
