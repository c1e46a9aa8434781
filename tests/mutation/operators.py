"""Mutants of a source: one small change each, at a position, made by an operator of a fixed list.

- comparison: `<` and `<=`, `>` and `>=`, `==` and `!=`, `is` and `is not`, `in` and `not in` exchanged;
- constant: a number one larger, and one smaller;
- statement: a call, a raise, an augmented assignment, or an assignment to an attribute or item, left out;
- negation: `not x` and `-x` become `x`;
- arguments: the first two positional arguments of a call exchanged;
- exception: a handler that raises does nothing instead.

Left out, because nothing can depend on them: calls of a logger, the order of the arguments of `max`, `min`, `transpose`
and other symmetric functions.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

OPERATORS = ("comparison", "constant", "statement", "negation", "arguments", "exception")

_SYMMETRIC = {
    "max",
    "min",
    "maximum",
    "minimum",
    "transpose",
    "swapaxes",
    "equal",
    "array_equal",
    "logical_and",
    "logical_or",
}

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """One change of a source.

    Attributes:
        path: Of the file, below `segapp/`, with slashes.
        line: Of the changed place, from 1.
        operator: One of `OPERATORS`.
        number: Of this operator's changes on this line, from 0.
        before: The source that is replaced.
        after: What replaces it.
        start: Offset of `before` in the file, bytes.
        function_line: First line of the innermost function around it, decorators included; 0: none.
    """

    path: str
    line: int
    operator: str
    number: int
    before: str
    after: str
    start: int
    function_line: int

    @property
    def id(self) -> str:
        """The name for `--one`."""
        return f"{self.path}:{self.line}:{self.operator}:{self.number}"

    @property
    def package(self) -> str:
        """The package below segapp, or the name of a module there."""
        return self.path.partition("/")[0].removesuffix(".py")

    def applied_to(self, source: bytes) -> bytes:
        """Return the changed source."""
        end = self.start + len(self.before.encode())
        assert source[self.start : end].decode() == self.before
        return source[: self.start] + self.after.encode() + source[end:]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file in the order of their places; some may not compile."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    counts: dict[tuple[int, str], int] = {}
    for node, operator, after, function_line in _changes(ast.parse(source), 0):
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]
        key = node.lineno, operator
        mutant = Mutant(
            path,
            node.lineno,
            operator,
            counts.get(key, 0),
            source[first:last].decode(),
            after,
            first,
            function_line,
        )
        counts[key] = mutant.number + 1
        found.append(mutant)
    return sorted(found, key=lambda each: (each.start, each.operator, each.number))


def compiles(mutant: Mutant, source: bytes) -> bool:
    """Return whether a file with this mutant compiles."""
    try:
        compile(mutant.applied_to(source), mutant.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _changes(node: ast.AST, function_line: int) -> Iterator[tuple[ast.expr | ast.stmt, str, str, int]]:
    """Yield (node to replace, operator, its replacement, line of the function around it)."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if "triton.jit" in (ast.unparse(each) for each in node.decorator_list):  # triton reads its source from the file
            return
        function_line = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    if isinstance(node, ast.expr):
        for operator, after in _of_expression(node):
            yield node, operator, after, function_line
    elif isinstance(node, ast.stmt) and _can_be_dropped(node):
        yield node, "statement", "pass", function_line
    if isinstance(node, ast.ExceptHandler) and any(
        isinstance(n, ast.Raise) for each in node.body for n in ast.walk(each)
    ):
        whole = copy.copy(node.body[0])
        whole.end_lineno, whole.end_col_offset = node.body[-1].end_lineno, node.body[-1].end_col_offset
        yield whole, "exception", "pass", function_line
    for name, value in ast.iter_fields(node):
        # Positions inside f-strings are wrong before Python 3.12; an annotation has no effect.
        if isinstance(node, ast.JoinedStr) or name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_for_types(child):
                yield from _changes(child, function_line)


def _of_expression(node: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[index] = _COMPARISONS[type(operator)]()
            yield "comparison", ast.unparse(changed)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        for change in (1, -1):
            value = node.value + change  # type: ignore[operator]
            if value != node.value:
                yield "constant", repr(value) if value >= 0 else f"({value!r})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "negation", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        first, second = node.args[:2]
        is_starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        is_symmetric = _name_of(node.func) in _SYMMETRIC and len(node.args) == 2
        if not is_starred and not is_symmetric and ast.unparse(first) != ast.unparse(second):
            changed_call = copy.deepcopy(node)
            changed_call.args[:2] = reversed(changed_call.args[:2])
            yield "arguments", ast.unparse(changed_call)


def _can_be_dropped(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await) and not _is_log(node.value)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise)


def _is_log(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("logger.", "logging."))


def _name_of(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
