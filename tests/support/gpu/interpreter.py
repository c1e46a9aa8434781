"""Triton's interpreter without the work that it repeats: two thirds of its time.

Before each call of a function within a kernel (`tl.sum` is one), it looks through all names of the language again, to
replace those that are replaced already.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from triton.runtime import interpreter


def call_functions_directly() -> None:
    """Replace the names of the language before the first call of a function from a module, and not again."""
    prepared: set[frozenset[int]] = set()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        seen = frozenset(id(value) for value in self.fn.__globals__.values() if isinstance(value, ModuleType))
        if seen not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(seen)
        return self.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call


def leave_overflow_checks_out() -> None:
    """Let integers overflow unnoticed: a fifth of the time. The kernels' own cases check them."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
