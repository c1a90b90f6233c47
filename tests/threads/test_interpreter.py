"""What is refused: other systems, subinterpreters, and free-threaded Pythons with the GIL off."""

import runpy
import sys
import sysconfig
from pathlib import Path

import pytest
from faults._support import run_python

import nvmeio
from nvmeio._threads import interpreter

ROOT = Path(nvmeio.__file__).parents[1]


def said_by(code):
    """What a Python says that runs this code; killed, and the test failed, where it hangs."""
    ran = run_python(code, timeout_s=500.0, fresh=True)
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    return ran.stdout


@pytest.mark.untraced
def test_a_subinterpreter_is_refused_before_torch_hangs_in_it():
    """`import torch` never returned in one (torch 2.13, Python 3.11), and so nvmeio's did not."""
    said = said_by(
        """
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        run = getattr(interpreters, "exec", None) or interpreters.run_string
        run(interpreters.create(), '''if True:
            import sys
            try:
                import nvmeio
            except RuntimeError as refused:
                print(type(refused).__name__, refused)
            print("torch" in sys.modules, flush=True)
        ''')
        """
    )
    assert said.startswith("BackendUnavailableError nvmeio works in a process's main interpreter")
    assert "how to fix it" in said and said.endswith("False\n")


def test_python_without_its_gil_is_refused_before_torch_is_imported():
    said = said_by(
        """
        import sys

        sys._is_gil_enabled = lambda: False
        for name in ("nvmeio", "nvmeio.checkpoint"):
            try:
                __import__(name)
            except RuntimeError as refused:
                print(type(refused).__name__, refused)
        print("torch" in sys.modules)
        """
    )
    assert said.count("BackendUnavailableError nvmeio has not been checked on a free-threaded") == 2
    assert "PYTHON_GIL=1" in said and said.endswith("False\n")


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_a_system_other_than_linux_is_refused_when_it_is_imported(platform):
    """The compiled shim was missing there, and a compiler was what its error asked for."""
    said = said_by(
        f"""
        import sys

        sys.platform = "{platform}"
        try:
            import nvmeio
        except RuntimeError as refused:
            print(type(refused).__name__, refused)
        print("torch" in sys.modules)
        """
    )
    assert said.startswith(f"BackendUnavailableError nvmeio does not run on {platform}: it needs")
    assert "Linux container" in said and said.endswith("False\n")


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_a_system_other_than_linux_is_refused_when_it_is_installed(monkeypatch, platform):
    """In one sentence: a compiler's error about linux/aio_abi.h was all that was said."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **options: pytest.fail("it is built"))
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(str(ROOT / "setup.py"))
    assert str(refused.value).startswith(f"nvmeio does not run on {platform}: it needs Linux")


def test_a_free_threaded_python_with_its_gil_on_is_taken(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    interpreter.check()


def test_python_without_subinterpreters_is_taken(monkeypatch):
    for name in ("_interpreters", "_xxsubinterpreters"):
        monkeypatch.setitem(sys.modules, name, None)  # an ImportError
    interpreter.check()


@pytest.mark.parametrize("free_threaded", [False, True])
def test_free_threaded_builds_make_a_wheel_of_their_own(monkeypatch, free_threaded):
    """setuptools refuses the stable ABI there, so that `pip install .` ended with its error."""
    setuptools = pytest.importorskip("setuptools")
    known = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig,
        "get_config_var",
        lambda name: free_threaded if name == "Py_GIL_DISABLED" else known(name),
    )
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    stable = {"bdist_wheel": {"py_limited_api": "cp310"}}
    assert given["options"] == ({} if free_threaded else stable)
