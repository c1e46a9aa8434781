"""Private names of other libraries: one module per library, the only places that use them.

Each name was read in the version that its module states; `tests/test_compat.py` uses each as segapp does, so that a new
version that lacks or changes one fails there.
"""
