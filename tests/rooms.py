"""The package's tree: its rooms, what imports what, and which imports its order refuses.

A room is a folder. `.ci/parts` and `tests/project/test_layering.py` both ask here. It needs neither
nvmeio nor torch: it reads sources.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

MOST_MODULES = 14  # in one room, `__init__` and `__main__` aside

# A job computes on its caller's device.
ALLOWED = frozenset({("nvmeio._threads.interruptible", "nvmeio._memory.devices")})


class Import(NamedTuple):
    """One name that a module imports.

    Attributes:
        name: The module's full name.
        for_types: Only type checkers run it.
        at_import: It runs when the importing module is imported.
    """

    name: str
    for_types: bool
    at_import: bool


class PackageTree:
    """The modules of a package by their full names, and the imports between them.

    Args:
        root: The package's folder.
        allowed: Pairs (importer, imported) that no rule counts.
    """

    def __init__(self, root: Path, allowed: Collection[tuple[str, str]] = ALLOWED) -> None:
        self.root = root
        self.name = root.name
        self._allowed = allowed
        self.modules: dict[str, Path] = {}
        for path in sorted(root.rglob("*.py")):
            parts = (self.name, *path.relative_to(root).with_suffix("").parts)
            self.modules[".".join(parts).removesuffix(".__init__")] = path
        self._imports = functools.cache(self._read_imports)

    # Modules and rooms

    @property
    def rooms(self) -> list[str]:
        """The packages: folders that have modules."""
        return [name for name in self.modules if self.is_room(name)]

    def is_room(self, module: str) -> bool:
        return module in self.modules and self.modules[module].name == "__init__.py"

    def modules_in(self, room: str) -> list[str]:
        """The modules right in a room, without `__init__` and `__main__`."""
        return [
            name
            for name in self.modules
            if name.rpartition(".")[0] == room
            and not self.is_room(name)
            and not name.endswith(".__main__")
        ]

    # Imports

    def imports_of(self, module: str) -> tuple[Import, ...]:
        return self._imports(module)

    def inner_imports(self, module: str, for_types: bool = True) -> set[str]:
        """Modules of the package that a module imports."""
        return {
            found.name
            for found in self.imports_of(module)
            if found.name.split(".")[0] == self.name and (for_types or not found.for_types)
        }

    def _read_imports(self, module: str) -> tuple[Import, ...]:
        tree = ast.parse(self.modules[module].read_text(encoding="utf-8"))
        package = module if self.is_room(module) else module.rpartition(".")[0]
        imports: list[Import] = []
        for node, typed, top in _walk(tree, False, True):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*above, base] if base else above)
                for alias in node.names:  # `from nvmeio import files` means nvmeio.files
                    inner = f"{base}.{alias.name}"
                    is_module = inner in self.modules or inner == f"{self.name}._native"
                    names.append(inner if is_module else base)
            imports += [Import(name, typed, top) for name in names]
        return tuple(imports)

    # Rules

    def broken_rules(self, order: Collection[str]) -> list[str]:
        """What the tree's order refuses, a sentence each. `order` is that of `order_on_page`."""
        return [*self.circles(), *self.upward(order), *self.crowded()]

    def circles(self) -> list[str]:
        """In each room, run-time imports that go in a circle among its parts.

        A room's parts are its modules, its `__init__` (the face) and the rooms in it. A room counts
        as one part, with all that is below it: two rooms that import each other are a circle even
        if no module does. Imports within functions count, those for type checkers do not.
        """
        return [circle for room in self.rooms for circle in self._circles_in(room)]

    def _circles_in(self, room: str) -> Iterator[str]:
        reasons: dict[tuple[str, str], str] = {}
        graph: dict[str, set[str]] = {}
        for importer in self.modules:
            part = self._part(room, importer)
            if part is None:
                continue
            graph.setdefault(part, set())
            for imported in sorted(self.inner_imports(importer, for_types=False)):
                other = self._part(room, imported)
                if other in (None, part) or (importer, imported) in self._allowed:
                    continue
                graph[part].add(other)
                reasons.setdefault((part, other), f"{importer} imports {imported}")
        for circle in _circles(graph):
            steps = "; ".join(reasons[step] for step in itertools.pairwise(circle))
            yield f"{' → '.join(circle)} is a circle in {room}: {steps}"

    def _part(self, room: str, module: str) -> str | None:
        """The part of a room that a module belongs to; None if it lies elsewhere."""
        if module == room:
            return f"{room.rpartition('.')[2]}/__init__"
        if module not in self.modules or not module.startswith(f"{room}."):
            return None
        return module.removeprefix(f"{room}.").split(".")[0]

    def upward(self, order: Collection[str]) -> list[str]:
        """Imports that point upward; those for type checkers count too.

        Right below the package, the order on the page holds: a module imports what stands above it
        there. Further in, the public modules of a package and its `__init__` are its face, and
        stand above its underscored rooms.
        """
        layers = {name: number for number, name in enumerate(order)}
        parts = {module.split(".")[1] for module in self.modules if module != self.name}
        missing = [
            f"{self.name}.{part} has no place in the order of docs/architecture.md"
            for part in sorted(parts - layers.keys())
        ]

        def is_upward(importer: str, imported: str) -> bool:
            if imported in (self.name, f"{self.name}._native"):
                return False
            lower, upper = layers.get(importer.split(".")[1]), layers.get(imported.split(".")[1])
            return lower is not None and upper is not None and upper > lower

        wrong = [*self.importing(is_upward), *self.importing(self._is_face)]
        return missing + [
            f"{importer} imports {imported}, which stands above it" for importer, imported in wrong
        ]

    def _is_face(self, importer: str, imported: str) -> bool:
        """Whether an underscored room imports the face of the package that it is in."""
        parts = importer.split(".")
        for depth in range(2, len(parts)):
            package = ".".join(parts[:depth])
            room = f"{package}.{parts[depth]}"
            if not parts[depth].startswith("_") or not self.is_room(room):
                continue
            if imported == package:
                return True
            if imported.startswith(f"{package}."):
                return not imported.split(".")[depth].startswith("_")
        return False

    def importing(self, is_wrong: Callable[[str, str], bool]) -> list[tuple[str, str]]:
        """Pairs of modules of which the first imports the second, and should not."""
        return [
            (importer, imported)
            for importer in self.modules
            if importer != self.name
            for imported in sorted(self.inner_imports(importer))
            if (importer, imported) not in self._allowed and is_wrong(importer, imported)
        ]

    def crowded(self) -> list[str]:
        """Rooms that have become too wide to be seen at a glance."""
        counts = {room: len(self.modules_in(room)) for room in self.rooms}
        return [
            f"{room} has {count} modules, at most {MOST_MODULES} fit in a room: give a subject of "
            "it a room of its own"
            for room, count in counts.items()
            if count > MOST_MODULES
        ]


def order_on_page(page: str, tree: PackageTree) -> list[str]:
    """The modules and rooms right below the package, lowest first, as docs/architecture.md says."""
    rows = page.split(f"    {tree.name}/\n", 1)[1].split("\nA module imports", 1)[0]
    names = []
    for row in re.findall(r"^ {6}(\S.*)$", rows, re.MULTILINE):
        first, *others = re.split(r"/? {2,}|/ ", row)
        names += [first, *(name for name in others if f"{tree.name}.{name}" in tree.modules)]
    return names


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _walk(node: ast.AST, for_types: bool, at_top: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Nodes below; whether they are for type checkers only, and run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        typed = for_types or (
            isinstance(node, ast.If) and _is_type_checking(node.test) and child in node.body
        )
        top = at_top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield child, typed, top
        yield from _walk(child, typed, top)


def _circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """A circle, its first node repeated at its end, through each edge that closes one."""
    path: list[str] = []
    done: set[str] = set()

    def visit(node: str) -> Iterator[list[str]]:
        if node in path:
            yield [*path[path.index(node) :], node]
        elif node not in done:
            path.append(node)
            for other in sorted(graph[node]):
                yield from visit(other)
            path.pop()
            done.add(node)

    for node in sorted(graph):
        yield from visit(node)
