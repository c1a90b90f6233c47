"""The tree is the architecture: imports point downward, and `import nvmeio` stays light."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import json
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rooms import Import, PackageTree, order_on_page
from support import run_python

import nvmeio
from nvmeio.testing import FakeEngine

ROOT = Path(nvmeio.__file__).parent

# The tree of this page, read from above: who stands lower on it may import who stands higher.
PAGE = ROOT.parent / "docs/architecture.md"
SYSTEMS = ("checkpoint", "inference", "offload", "data")  # none imports another


TREE = PackageTree(ROOT)
MODULES = TREE.modules
INSIDE = [name for name in MODULES if name != "nvmeio"]
module_here = sys.modules[__name__]

ROOMS = order_on_page(PAGE.read_text(encoding="utf-8"), TREE) if PAGE.exists() else []
needs_page = pytest.mark.skipif(not ROOMS, reason="nvmeio is installed without its docs/")


def layer_of(module: str) -> int:
    return ROOMS.index(module.split(".")[1])


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports_of(module: str) -> tuple[Import, ...]:
    return TREE.imports_of(module)


def inner_imports(module: str, for_types: bool = True) -> set[str]:
    return TREE.inner_imports(module, for_types)


# Layers


@needs_page
def test_the_pages_tree_has_every_room_once() -> None:
    """And none that is not there: each of them has its place in the order of imports."""
    assert sorted(ROOMS) == sorted({module.split(".")[1] for module in INSIDE})


def importing(wrong: Callable[[str, str], bool]) -> list[tuple[str, str]]:
    """Each module of ours and what it imports of them, where that is wrong."""
    return [
        (module, name)
        for module in INSIDE
        for name in sorted(inner_imports(module))
        if wrong(module, name)
    ]


# Rooms and layers: the rules are `rooms.PackageTree`'s, which `.ci/parts` reports too


@needs_page
def test_imports_point_upward_on_the_page() -> None:
    """Types count too: what a module is about, it must know from below."""
    assert TREE.upward(ROOMS) == []


def test_rooms_do_not_import_each_other_in_a_circle() -> None:
    assert TREE.circles() == []


def test_no_room_is_crowded() -> None:
    assert TREE.crowded() == []


def test_only_the_outermost_layers_import_the_whole_package() -> None:
    """`import nvmeio` runs everything below: from within, that is a circle."""
    outermost = {"testing", "integrations", "compat", "cli", "__main__"}

    def is_inner(module: str, name: str) -> bool:
        return name == "nvmeio" and module.split(".")[1] not in outermost

    assert importing(is_inner) == []


def test_only_the_bindings_load_the_native_libraries() -> None:
    """They are loaded by name, so the name is what a module needs."""
    names = re.compile(r"(nvmeio\.)?_native(_\w+)?")
    loaders = {
        module
        for module in MODULES
        if any(names.fullmatch(name) for name, *_ in imports_of(module))
        or any(
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and names.fullmatch(node.value)
            for node in ast.walk(tree_of(module))
        )
    }
    bindings = {"nvmeio._bindings", "nvmeio._bindings.packed", "nvmeio._bindings.protection"}
    assert loaders == bindings


def test_cffi_is_used_through_the_shim_and_to_bind_cufile_only() -> None:
    users = {
        module
        for module in MODULES
        if any(name.split(".")[0] in ("cffi", "_cffi_backend") for name, *_ in imports_of(module))
    }
    # The compiled module brings its own ffi.
    assert users == {"nvmeio.engines.cufile.library"}


def test_none_of_the_systems_imports_another() -> None:
    for module in INSIDE:
        mine = [system for system in SYSTEMS if module.startswith(f"nvmeio.{system}")]
        for system, name in itertools.product(mine, inner_imports(module)):
            others = [o for o in SYSTEMS if o != system and name.startswith(f"nvmeio.{o}")]
            assert not others


# What the outermost layers stand on, beside the standard library and what they adapt to: declared
# here.
STANDS_ON = {
    "integrations": {
        *("errors", "handle", "files", "buffers", "pool", "_checks", "_pages", "_torch_private"),
        *("_core", "_files", "_memory", "_threads"),
        *("_io", "_distributed", "_storage", "_formats", "_residency", "_kv_blocks"),
        *SYSTEMS,
    },
    "cli": {
        *("errors", "handle", "files", "buffers", "tuned", "gds", "engines", "_checks"),
        *("progress", "_pages", "_bindings", "_torch_private"),
        *("_files", "_memory", "_threads"),
        *("_io", "_storage", "_formats", "_kv_blocks", "compat", "integrations"),
        *SYSTEMS,
    },
    "compat": {
        *("errors", "handle", "buffers", "gds", "operation", "_checks", "_pages", "_torch_private"),
        *("_files", "_memory", "_threads", "_io"),
    },
}


def is_private_to_another(importer: str, name: str) -> bool:
    """Whether a module is an underscored one inside a package that the importer is outside of.

    Underscored modules right below nvmeio are private to nvmeio as a whole.
    """
    parts = name.split(".")
    for length in range(3, len(parts) + 1):
        if parts[length - 1].startswith("_"):
            owner = ".".join(parts[: length - 1])
            return importer != owner and not importer.startswith(f"{owner}.")
    return False


def test_no_package_reaches_into_the_private_modules_of_another() -> None:
    assert importing(is_private_to_another) == []


def test_no_package_takes_private_names_out_of_another() -> None:
    """`from nvmeio.x import _y`, where `_y` is no module."""
    taken = [
        (module, f"{node.module}.{alias.name}")
        for module in INSIDE
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nvmeio.")
        for alias in node.names
        if alias.name.startswith("_") and f"{node.module}.{alias.name}" not in MODULES
    ]
    assert [each for each in taken if each[0].split(".")[:2] != each[1].split(".")[:2]] == []


def test_the_outermost_layers_stand_on_declared_ones() -> None:
    def is_undeclared(module: str, name: str) -> bool:
        mine = module.split(".")[1]
        if mine not in STANDS_ON or name == "nvmeio":
            return False
        return name.split(".")[1] not in STANDS_ON[mine] | {mine}

    assert importing(is_undeclared) == []


BENCHMARKS = sorted((ROOT.parent / "benchmarks").rglob("*.py"))
# It judges the tuner's answer with the tuner's own measurements.
TUNER = {"tune_against_grid.py": {f"nvmeio.cli.tune.{name}" for name in ("result", "rig", "space")}}


@pytest.mark.skipif(not BENCHMARKS, reason="nvmeio is installed without its benchmarks/")
def test_benchmarks_take_what_they_share_with_the_commands_from_one_place() -> None:
    """`nvmeio.cli.measure`; of other packages, no private module."""
    for path in BENCHMARKS:
        taken = {
            name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nvmeio.")
            for name in [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if name in MODULES
        }
        private = {name for name in taken if is_private_to_another("benchmarks", name)}
        assert private == set(), path
        tools = {name for name in taken if name.startswith("nvmeio.cli.")}
        tools -= TUNER.get(path.name, set())
        assert all(name.startswith("nvmeio.cli.measure") for name in tools), path


def test_no_two_test_modules_have_one_name() -> None:
    """pytest collects neither of them then: its folders are no packages."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert len(names) > 100
    assert [name for name, times in names.items() if times > 1] == []


def test_the_rules_see_what_breaks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them names the module and what it imports."""

    def imports(**what: set[str]) -> None:
        broken = {f"nvmeio.{module}": names for module, names in what.items()}
        monkeypatch.setattr(module_here, "inner_imports", lambda name: broken.get(name, set()))

    imports(files={"nvmeio"})
    with pytest.raises(AssertionError, match=r"\('nvmeio.files', 'nvmeio'\)"):
        test_only_the_outermost_layers_import_the_whole_package()
    imports(cli={"nvmeio.checkpoint._manager.saver", "nvmeio.pool"})
    for rule, name in (
        (
            test_no_package_reaches_into_the_private_modules_of_another,
            "nvmeio.checkpoint._manager.saver",
        ),
        (test_the_outermost_layers_stand_on_declared_ones, "nvmeio.pool"),
    ):
        with pytest.raises(AssertionError, match=rf"\('nvmeio.cli', '{name}'\)"):
            rule()


def test_private_modules_are_seen() -> None:
    """Were the rule blind, the tests above would pass."""
    assert is_private_to_another("nvmeio.cli.checkpoints", "nvmeio.checkpoint._manager.saver")
    assert is_private_to_another("nvmeio.offload.module", "nvmeio.inference._stream.uses")
    assert not is_private_to_another(
        "nvmeio.inference.weight_stream", "nvmeio.inference._stream.uses"
    )
    assert not is_private_to_another("nvmeio.cli.bench", "nvmeio._io.handles")
    assert is_private_to_another("nvmeio.cli.bench", "nvmeio._io._secret")


def test_there_are_no_circles() -> None:
    """Among modules, wherever they are; at run time: a type may know its user."""
    graph = {module: inner_imports(module, for_types=False) & set(INSIDE) for module in INSIDE}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join([*path, module])
        if module not in done:
            for name in graph[module]:
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@needs_page
def test_the_lower_half_has_no_circle() -> None:
    """Not through imports within functions, nor through those for type checkers."""
    lower = {name for name in INSIDE if layer_of(name) < ROOMS.index("_io")}
    below = {name: (inner_imports(name) & lower) - {name} for name in lower}
    # A package is imported with each of its modules; it is no step of its own way.
    below = {
        name: {to for to in tos if not name.startswith(f"{to}.")} for name, tos in below.items()
    }
    while below:
        free = {name for name, tos in below.items() if not tos & below.keys()}
        assert free, f"imports go in a circle among {sorted(below)}"
        below = {name: tos for name, tos in below.items() if name not in free}


def test_the_walk_sees_what_it_is_to_see() -> None:
    """Facts about today's modules: were the walk blind, every test above would pass."""
    assert {"nvmeio.errors"} <= inner_imports("nvmeio.files")
    assert "nvmeio._bindings.loading" in inner_imports("nvmeio._bindings")
    assert "nvmeio.checkpoint" in inner_imports("nvmeio")
    assert "nvmeio.checkpoint" not in inner_imports("nvmeio", for_types=False)
    assert "nvmeio.engines.libaio" in inner_imports("nvmeio.engines")
    assert ("typer", False, True) in imports_of("nvmeio.cli")


def test_everything_is_logged_by_the_one_logger() -> None:
    """Whoever wants to hear of it, or nothing, names that one."""
    named = {
        ast.unparse(node)
        for module in MODULES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger")
    }
    assert named == {"logging.getLogger('nvmeio')"}


# import nvmeio


def test_importing_nvmeio_imports_no_torch() -> None:
    """Which took 2 s, and 11 s on a loaded machine, of every `nvmeio --version`."""
    done = run_python(
        """
        import sys
        import nvmeio
        print("torch" in sys.modules, "nvmeio._bindings" in sys.modules)
        assert nvmeio.progress.__name__ == "nvmeio.progress"
        print("torch" in sys.modules)
        """,
        fresh=True,
    )
    assert (done.stdout.split(), done.stderr) == (["False", "False", "False"], "")


def test_what_nvmeio_loads_is_no_more_than_it_needs_and_starts_nothing() -> None:
    """torch may load what it likes; nvmeio adds no command line, no numpy and no GPU library.

    And nothing starts: no thread, no file, no kernel queue.
    """
    done = run_python(
        """
        import json, os, re, sys, threading
        import torch
        def started():
            return threading.active_count(), len(os.listdir("/proc/self/fd"))
        def libraries():
            with open("/proc/self/maps") as maps:
                return {line.split()[-1] for line in maps if ".so" in line}
        modules, loaded, before = set(sys.modules), libraries(), started()
        import nvmeio
        nvmeio.AioHandle
        assert started() == before
        with open("/proc/self/maps") as maps:
            assert "[aio]" not in maps.read()
        print(json.dumps([sorted(set(sys.modules) - modules), sorted(libraries() - loaded)]))
        """,
        fresh=True,
    )
    assert done.stderr == ""
    modules, loaded = json.loads(done.stdout)
    assert "nvmeio.handle" in modules
    outside = {name.split(".")[0] for name in modules} - {"nvmeio"}
    assert not outside & {"typer", "rich", "click", "numpy", "uvloop", "pytest", "hypothesis"}
    assert not {name for name in modules if name.startswith(("nvmeio.cli", "nvmeio.testing"))}
    gpu = re.compile("cuda|cufile|nvidia|nvml|cudart", re.IGNORECASE)
    assert [name for name in loaded if gpu.search(name.removeprefix(str(ROOT.parent)))] == []
    libraries = {Path(name).name.split(".")[0] for name in loaded if "/_native" in name}
    assert libraries == {"_native"}


def test_packages_are_there_without_an_import_of_their_own() -> None:
    done = run_python(
        """
        import nvmeio
        print(nvmeio.offload.offload.__name__, nvmeio.inference.pack.__name__)
        """,
        fresh=True,
    )
    assert (done.stdout.split(), done.stderr) == (["offload", "pack"], "")


# Public names


def test_completion_offers_public_names_only() -> None:
    """`dir` named `_LATER`, and what the module imports for itself."""
    offered = set(dir(nvmeio))
    assert {name for name in offered if name.startswith("_")} == {"__version__"}
    modules = {name for name in offered if isinstance(getattr(nvmeio, name), types.ModuleType)}
    assert modules == {
        name.split(".")[1] for name in MODULES if re.fullmatch(r"nvmeio\.[a-z]\w*", name)
    } - {"cli"}
    assert offered == modules | set(nvmeio.__all__) | {"__version__"}


def public_names() -> set[str]:
    """Those that are loaded at first use included."""
    everything = {name: getattr(nvmeio, name) for name in dir(nvmeio)}
    return {
        name
        for name, value in everything.items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


def test_public_names_are_those_of_all() -> None:
    assert len(nvmeio.__all__) == len(set(nvmeio.__all__))
    assert public_names() == set(nvmeio.__all__)


def test_all_is_exported_explicitly() -> None:
    """`X as X`, which type checkers take for a re-export (PEP 484)."""
    tree = tree_of("nvmeio")
    exported = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert exported == {*nvmeio.__all__, *nvmeio._MODULES}  # modules for editors: they were Any
    assert (ROOT / "py.typed").exists()


def public_things() -> Iterator[tuple[str, object]]:
    for name in sorted(nvmeio.__all__):
        thing = getattr(nvmeio, name)
        yield name, thing
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                # Fields of a NamedTuple are described by their class.
                if not member.startswith("_") and type(value).__name__ != "_tuplegetter":
                    yield f"{name}.{member}", value


THINGS = {
    name: thing
    for name, thing in [*public_things(), ("testing.FakeEngine", FakeEngine)]
    if callable(thing) or isinstance(thing, (property, classmethod, staticmethod))
}


def documentation_of(thing: Any) -> str:
    if isinstance(thing, (classmethod, staticmethod)):
        thing = thing.__func__
    own = thing.fget.__doc__ if isinstance(thing, property) and thing.fget else thing.__doc__
    return (own or "").strip()


def test_public_things_are_documented() -> None:
    assert len(THINGS) > 100
    assert [name for name, thing in THINGS.items() if not documentation_of(thing)] == []


def test_modules_are_documented() -> None:
    assert [name for name in MODULES if ast.get_docstring(tree_of(name)) is None] == []


def test_public_classes_live_where_they_say() -> None:
    """What pickles and tracebacks name can be imported again."""
    for name in nvmeio.__all__:
        thing = getattr(nvmeio, name)
        assert getattr(importlib.import_module(thing.__module__), thing.__name__) is thing


# docs/architecture.md


@needs_page
def test_what_the_architecture_names_is_there() -> None:
    """Every room of the package; every dotted name is a module, or a name in one."""
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:_?[a-z]+)(?:\.\w+)+)(?:\(\))?`", text))
    ours = {name for name in named if f"nvmeio.{name.split('.')[0]}" in MODULES}
    assert len(ours) > 30
    missing = []
    for name in ours:
        module, _, member = name.rpartition(".")
        if f"nvmeio.{name}" not in MODULES:
            inside = MODULES.get(f"nvmeio.{module}")
            if inside is None or not hasattr(importlib.import_module(f"nvmeio.{module}"), member):
                missing.append(name)
    assert missing == []
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {room for room in rooms if f"{room}/" not in text} == set()


@needs_page
def test_the_architecture_fits_a_screen() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 120] == []
