"""Code in strings, for `python -c`, names what is in the package: mypy does not see it."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nvmeio

PACKAGE = Path(nvmeio.__file__).parent
TESTS = Path(__file__).parents[1]
FOLDERS = [PACKAGE, TESTS, TESTS.parent / "benchmarks", TESTS.parent / "examples"]
FILES = sorted({path for folder in FOLDERS for path in folder.rglob("*.py")} - {Path(__file__)})
IMPORT = re.compile(
    r"(^|;)\s*(from nvmeio[\w.]* import|import ([\w, ]*, *)?nvmeio(\.| as |\s*[;,]|\s*$))",
    re.MULTILINE,
)


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every string with an import of nvmeio; the values of an f-string are names."""
    documentation = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    parts: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(node.values)
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "value"
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node in documentation or node in parts:
                continue
            text = node.value
        else:
            continue
        if IMPORT.search(text):
            yield node.lineno, textwrap.dedent(text)


def named(name: str) -> Any:
    """The module or attribute of that dotted name; AttributeError where there is none."""
    module, _, rest = name.partition(".")
    value: Any = importlib.import_module(module)
    while rest:
        part, _, rest = rest.partition(".")
        value = attribute(value, part)
    return value


def attribute(value: Any, name: str) -> Any:
    if isinstance(value, types.ModuleType) and not hasattr(value, name):
        try:
            return importlib.import_module(f"{value.__name__}.{name}")
        except ModuleNotFoundError:
            pass
    return getattr(value, name)


def missing(codes: list[tuple[int, ast.Module]]) -> Iterator[str]:
    """What the code of one file imports from nvmeio, or asks of its modules, and is not there."""
    bound: dict[str, Any] = {}
    for line, code in codes:
        for node in ast.walk(code):
            try:
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nvmeio"):
                    for alias in node.names:
                        value = named(f"{node.module}.{alias.name}")
                        bound[alias.asname or alias.name] = value
                elif isinstance(node, ast.Import):
                    for alias in node.names:
                        if alias.name.split(".")[0] == "nvmeio":
                            value = named(alias.name)
                            bound[alias.asname or "nvmeio"] = value if alias.asname else nvmeio
            except AttributeError as error:
                yield f"line {line}: {error}"
    for line, code in codes:
        for node in ast.walk(code):
            if isinstance(node, ast.Attribute):
                try:
                    owner(node, bound)
                except AttributeError as error:
                    yield f"line {line}: {error}"


def owner(node: ast.expr, bound: dict[str, Any]) -> Any:
    """The module or class that an expression names, or None where it is something else."""
    if isinstance(node, ast.Name):
        value = bound.get(node.id)
    elif isinstance(node, ast.Attribute) and (base := owner(node.value, bound)) is not None:
        value = attribute(base, node.attr)
    else:
        return None
    return value if isinstance(value, types.ModuleType | type) else None


def parsed(text: str) -> ast.Module:
    """The code, where it is a template for `str.format` with a name for each field."""
    try:
        return ast.parse(text)
    except SyntaxError:
        text = re.sub(r"^( *)\{\w+\}$", r"\1value", text, flags=re.MULTILINE)
        text = re.sub(r", \{\w+\}\)", ", **value)", text)
        text = re.sub(r"(?<!\{)\{\w+(![rs])?\}(?!\})", "value", text)
        return ast.parse(text.replace("{{", "{").replace("}}", "}"))


def test_code_in_strings_names_what_is_there() -> None:
    """A probe asked for a class that had been renamed: cuFile was called unusable everywhere."""
    problems = []
    seen = 0
    for path in FILES:
        codes = []
        for line, text in strings(ast.parse(path.read_text())):
            try:
                codes.append((line, parsed(text)))
            except SyntaxError as error:
                problems.append(f"{path}: line {line}: {error}")
        seen += len(codes)
        problems += [f"{path}: {problem}" for problem in missing(codes)]
    assert problems == []
    assert seen > 50
