"""Into DeepSpeed, and into process trees: with a DeepSpeed of a few lines, which needs no compiler.

It has what `install` touches, laid out as in 0.19.8; test_deepspeed_installed.py asks the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from programs import run_program

import nvmeio
from nvmeio.compat.deepspeed import installing

pytestmark = pytest.mark.slow

ROOT = Path(nvmeio.__file__).parent.parent
LIMIT_S = 550  # only for what hangs

FILES = {
    "deepspeed/__init__.py": "__version__ = '0.19.8'\nfrom deepspeed import ops",
    "deepspeed/accelerator.py": """
        def get_accelerator():
            return Accelerator()
        class Accelerator:
            def get_op_builder(self, name):
                from deepspeed.ops.op_builder import cpu
                return getattr(cpu, name, cpu.NotImplementedBuilder)
    """,
    "deepspeed/ops/__init__.py": "",
    "deepspeed/ops/op_builder/__init__.py": """
        from deepspeed.ops.op_builder.builder import OpBuilder
        from deepspeed.ops.op_builder import cpu
        from deepspeed.ops.op_builder.cpu import AsyncIOBuilder
        UtilsBuilder = GDSBuilder = cpu.NotImplementedBuilder
    """,
    "deepspeed/ops/op_builder/builder.py": """
        class OpBuilder:
            _loaded_ops = {}
            def load(self):
                return self._loaded_ops[self.NAME]
    """,
    "deepspeed/ops/op_builder/cpu.py": """
        from deepspeed.ops.op_builder.builder import OpBuilder
        class NotImplementedBuilder(OpBuilder):
            NAME = "deepspeed_not_implemented"
            def is_compatible(self, verbose=False):
                return "untouched"
        class AsyncIOBuilder(OpBuilder):
            NAME = "async_io"
            def is_compatible(self, verbose=False):
                return False
    """,
    "deepspeed/io/__init__.py": "",
    "deepspeed/io/fast_file_writer.py": "from deepspeed.ops.op_builder import UtilsBuilder",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with that DeepSpeed, to be put on PYTHONPATH."""
    for name, text in FILES.items():
        file = tmp_path / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return tmp_path / "site"


def python(
    script: str, *path: Path, flags: tuple[str, ...] = (), everywhere: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a script with these directories on PYTHONPATH; `everywhere` as `nvmeio deepspeed`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
    command = [sys.executable, *flags, "-c", textwrap.dedent(script)]
    if not everywhere:
        return run_program(command, env=environment, timeout=LIMIT_S)
    environment = installing.environment(environment)  # a module there is imported at birth
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


# install()


def test_install_puts_the_ops_where_deepspeed_looks(site: Path) -> None:
    done = python(
        """
        import sys
        import deepspeed.ops
        from nvmeio.compat import deepspeed as compat
        assert not compat.installed()
        deepspeed.ops.__compatible_ops__ = {"async_io": False, "gds": True, "cpu_adam": False}
        compat.install()
        compat.install()
        assert compat.installed()

        from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder, OpBuilder, UtilsBuilder
        assert AsyncIOBuilder().load().aio_handle is compat.aio_handle
        assert AsyncIOBuilder().is_compatible() is True
        assert OpBuilder._loaded_ops["gds"].gds_handle is compat.gds_handle
        assert OpBuilder._loaded_ops["pin_memory"].pin_handle is compat.pin_handle
        assert sys._deepspeed_pin_memory_op_module is OpBuilder._loaded_ops["pin_memory"]
        assert GDSBuilder().is_compatible() == "untouched"
        assert UtilsBuilder is compat.UtilsBuilder
        assert deepspeed.io.fast_file_writer.UtilsBuilder is compat.UtilsBuilder
        known = {"async_io": True, "gds": False, "cpu_adam": False}
        assert deepspeed.ops.__compatible_ops__ == known
        """,
        site,
    )
    assert done.returncode == 0, done.stderr


def test_utils_op_that_exists_is_kept(site: Path) -> None:
    """On CUDA, DeepSpeed has one of its own."""
    builder = site / "deepspeed/ops/op_builder/__init__.py"
    builder.write_text(
        builder.read_text().replace(
            "UtilsBuilder = GDSBuilder =",
            "UtilsBuilder = type('UtilsBuilder', (OpBuilder,), {'NAME': 'utils'})\nGDSBuilder =",
        )
    )
    done = python(
        """
        import deepspeed, nvmeio.compat.deepspeed
        nvmeio.compat.deepspeed.install()
        print(deepspeed.io.fast_file_writer.UtilsBuilder.__module__)
        """,
        site,
    )
    assert done.stdout.strip() == "deepspeed.ops.op_builder", done.stderr


def test_source_tree_has_two_caches(site: Path) -> None:
    """With DeepSpeed's sources on the path the accelerator uses a top-level `op_builder`."""
    (site / "op_builder.py").write_text("class OpBuilder:\n    _loaded_ops = {}\n")
    cpu = site / "deepspeed/ops/op_builder/cpu.py"
    cpu.write_text(cpu.read_text().replace("deepspeed.ops.op_builder.builder", "op_builder"))
    done = python(
        """
        import deepspeed, op_builder, nvmeio.compat.deepspeed
        nvmeio.compat.deepspeed.install()
        both = (op_builder.OpBuilder, deepspeed.ops.op_builder.OpBuilder)
        print([sorted(each._loaded_ops) for each in both])
        """,
        site,
    )
    assert done.stdout.count("['async_io', 'gds', 'pin_memory']") == 2, done.stderr


@pytest.mark.parametrize("loaded", ["async_io", "pin_memory"])
def test_install_after_deepspeeds_own_op_is_refused(site: Path, loaded: str) -> None:
    done = python(
        f"""
        import deepspeed.ops.op_builder
        import nvmeio.compat.deepspeed as compat
        deepspeed.ops.op_builder.OpBuilder._loaded_ops[{loaded!r}] = object()
        try:
            compat.install()
        except RuntimeError as refused:
            print(refused)
        assert not compat.installed()
        """,
        site,
    )
    assert f"its own {loaded}" in done.stdout, done.stderr
    assert "import deepspeed" in done.stdout


def test_install_without_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ImportError('there is none')")
    done = python(
        """
        import nvmeio, nvmeio.compat.deepspeed as compat
        try:
            compat.install()
        except nvmeio.BackendUnavailableError as missing:
            print(missing.attempts, missing.remedy)
        """,
        tmp_path,
    )
    assert "there is none" in done.stdout, done.stderr
    assert "pip install deepspeed" in done.stdout


def test_install_into_an_unknown_deepspeed(site: Path) -> None:
    (site / "deepspeed/ops/op_builder/builder.py").write_text("class OpBuilder:\n    pass\n")
    done = python(
        """
        import nvmeio, nvmeio.compat.deepspeed as compat
        try:
            compat.install()
        except nvmeio.BackendUnavailableError as unknown:
            print(unknown)
        assert not compat.installed()
        """,
        site,
    )
    assert "_loaded_ops" in done.stdout, done.stderr


# A whole process tree

TREE = """
    import json, multiprocessing, subprocess, sys

    def installed():  # as nvmeio.compat.deepspeed.installed() says it, without loading nvmeio
        import deepspeed
        return hasattr(sys, "_deepspeed_pin_memory_op_module")

    def child(queue):
        queue.put(installed())

    def main():
        found = {"itself": installed()}
        for method in ("spawn", "forkserver", "fork"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            found[method] = queue.get(timeout=500)
            process.join()
        code = "import deepspeed, sys; print(hasattr(sys, '_deepspeed_pin_memory_op_module'))"
        line = subprocess.check_output([sys.executable, "-c", code], text=True)
        found["subprocess"] = line.strip() == "True"
        print(json.dumps(found))

    if __name__ == "__main__":
        main()
"""


@pytest.mark.parametrize("everywhere", [True, False])
def test_children_of_every_kind(site: Path, tmp_path: Path, everywhere: bool) -> None:
    script = tmp_path / "tree.py"
    script.write_text(textwrap.dedent(TREE))
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    if everywhere:
        environment = installing.environment(environment)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(everywhere).lower()) == 5, done.stdout


def test_nothing_is_loaded_where_deepspeed_is_not_imported(site: Path) -> None:
    done = python(
        """
        import importlib.util, sys
        assert importlib.util.find_spec("deepspeed") is not None  # looking is not importing
        print([name for name in ("torch", "nvmeio", "deepspeed") if name in sys.modules])
        import deepspeed
        from nvmeio.compat.deepspeed import installed
        print(installed())
        """,
        site,
        everywhere=True,
    )
    assert done.stdout.split("\n")[:2] == ["[]", "True"], done.stderr


def test_deepspeed_keeps_its_loader(site: Path) -> None:
    """pkgutil, inspect and tracebacks ask it for sources."""
    done = python(
        """
        import inspect, deepspeed
        print(type(deepspeed.__loader__).__name__, "from deepspeed" in inspect.getsource(deepspeed))
        """,
        site,
        everywhere=True,
    )
    assert done.stdout.split() == ["SourceFileLoader", "True"], done.stderr


def test_another_sitecustomize_still_runs(site: Path) -> None:
    (site / "sitecustomize.py").write_text("import builtins\nbuiltins.other_ran = __file__\n")
    done = python(
        """
        import sys, sitecustomize, deepspeed
        from nvmeio.compat.deepspeed import installed
        print(other_ran == sitecustomize.__file__, installed())
        """,
        site,
        everywhere=True,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_import_fails_where_nvmeio_is_missing(site: Path, tmp_path: Path) -> None:
    """What was asked for and cannot be had is an error, not DeepSpeed's own op in silence."""
    environment = installing.environment({**os.environ, "PYTHONPATH": str(site)})
    script = """
        import importlib.abc, sys

        class Nowhere(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "nvmeio":
                    raise ModuleNotFoundError("No module named 'nvmeio'", name=name)

        sys.meta_path.insert(0, Nowhere())
        import deepspeed
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "No module named 'nvmeio'" in done.stderr


def test_missing_deepspeed_is_reported_as_ever(tmp_path: Path) -> None:
    script = """
        import importlib.machinery, sys
        sys.path[:] = [entry for entry in sys.path if "-packages" not in entry]
        sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f)]
        try:
            import deepspeed
        except ModuleNotFoundError as missing:
            print(missing)
    """
    done = python(script, tmp_path, everywhere=True)
    assert done.stdout.strip() == "No module named 'deepspeed'", done.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "{0}"),
        ("", "{0}"),
        ("/a:/b", "{0}:/a:/b"),
        (":/b", "{0}::/b"),
        ("{0}:/a", "{0}:/a"),
    ],
)
def test_environment_of_the_tree(before: str | None, after: str) -> None:
    """Entries stay as they were (an empty one is the current directory), and ours comes first."""
    ours = str(installing.STARTUP)
    base = {"HOME": "/h"} if before is None else {"HOME": "/h", "PYTHONPATH": before.format(ours)}
    assert installing.environment(base) == {"HOME": "/h", "PYTHONPATH": after.format(ours)}
    assert (installing.STARTUP / "sitecustomize.py").is_file()
