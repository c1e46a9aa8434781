"""Runs a mutated module in place of the real one, in every Python process that has this folder on PYTHONPATH.

`SEGAPP_MUTANT` names a folder with `module` (its name), `source.py` (the mutated source) and, once it was imported,
`loaded`. The module keeps its own path, so what it finds beside its file is there.
"""

import importlib.machinery
import os
import sys

_FOLDER = os.environ.get("SEGAPP_MUTANT", "")


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        with open(os.path.join(_FOLDER, "source.py"), "rb") as file:
            source = file.read()
        with open(os.path.join(_FOLDER, "loaded"), "w"):
            pass
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder:
    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


if _FOLDER:
    with open(os.path.join(_FOLDER, "module")) as _file:
        sys.meta_path.insert(0, _Finder(_file.read()))
