"""Run by every Python that starts with this directory on PYTHONPATH: waits for DeepSpeed.

Costs a process that never imports DeepSpeed nothing: nvmeio and torch are not loaded before it is.
Spawned children, the fork server and the launcher's workers inherit PYTHONPATH, and so do this.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterDeepSpeed:
    """Finds DeepSpeed where it is, and installs nvmeio into it as soon as it is loaded."""

    def __init__(self) -> None:
        self._finding = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "deepspeed" or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from nvmeio.compat.deepspeed import install

            install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_the_other() -> None:
    """The sitecustomize that this one stands in front of."""
    others = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _AfterDeepSpeed())
_run_the_other()
