"""Custom components: user code that a config names, `package.module:factory` or `./file.py:factory`. No torch."""

from segapp.custom.loading import build_part, load_part, option_problems
from segapp.custom.names import PART_PATTERN, find_source, is_part, sha256_of_source

__all__ = [
    "PART_PATTERN",
    "build_part",
    "find_source",
    "is_part",
    "load_part",
    "option_problems",
    "sha256_of_source",
]
