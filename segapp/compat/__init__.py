"""Private names of other libraries, with one module per library. Only these modules use such names.

Each module states the versions in which its names were checked. `tests/test_compat.py` uses each name as segapp does,
so a new version that lacks or changes one fails there.
"""
