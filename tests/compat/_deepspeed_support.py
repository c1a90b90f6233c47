"""Running DeepSpeed itself: what it needs, and runs in processes of their own with a time limit."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nvmeio

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TIME_LIMIT_S = 550  # only for what hangs: it takes seconds, and minutes on a busy machine
COMPILE_LIMIT_S = 900  # its ops are compiled at their first use if `make clients` has not
_GLOO_ABORTS = "terminate called without an active exception"
NVMEIOS_OP = "nvmeio.compat.deepspeed.handles"
ON_NVMEIO = ("-c", "from nvmeio.cli import main; main()", "deepspeed", "--", sys.executable)


def _missing() -> str:
    """Why DeepSpeed cannot be run here, or ""."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed (pip install -e '.[deepspeed]')"
    return ""


def _missing_for_its_own_op() -> str:
    if reason := _missing():
        return reason
    for tool in ("c++", "ninja"):
        if shutil.which(tool, path=environment()["PATH"]) is None:
            return f"DeepSpeed's own ops need {tool} to be compiled"
    if not any(Path(include, "libaio.h").exists() for include in ("/usr/include", "/include")):
        return "DeepSpeed's own op needs libaio's headers (apt-get install libaio-dev)"
    return ""


def environment(**more: str) -> dict[str, str]:
    """As torchrun sets it for one process, on the CPU, with the programs of this environment."""
    tools = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    return {
        **os.environ,
        # MKL's AVX-512 kernels give other last bits for a matrix at another address, which differs
        # with offloading to memory, too.
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "PATH": tools,
        "PYTHONPATH": str(Path(nvmeio.__file__).parent.parent),
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        **more,
    }


needs_deepspeed = pytest.mark.skipif(bool(_missing()), reason=_missing())
needs_its_own_op = pytest.mark.skipif(
    bool(_missing_for_its_own_op()), reason=_missing_for_its_own_op()
)


def free_port() -> int:
    """One that no connection is given meanwhile: from below the kernel's range for those."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Run:
    """A script with DeepSpeed in it, under way: `_deepspeed_<script>.py` beside this file.

    Args:
        script: Its name without the rest.
        arguments: Its arguments, as text.
        on_nvmeio: Started by `nvmeio deepspeed`; else DeepSpeed is as it comes.
        launcher: What comes between Python and the script.
        ranks: Processes to start, which find each other.
        more: Further variables for its environment.
    """

    def __init__(
        self,
        script: str,
        *arguments: object,
        on_nvmeio: bool,
        launcher: tuple[str, ...] = (),
        ranks: int = 1,
        **more: str,
    ) -> None:
        command = [sys.executable, *(ON_NVMEIO if on_nvmeio else ()), *launcher]
        command += [str(HERE / f"_deepspeed_{script}.py"), *map(str, arguments)]
        port = str(free_port())
        self._processes = [
            subprocess.Popen(
                command,
                env=environment(
                    MASTER_PORT=port, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(ranks)
                )
                | more,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for r in range(ranks)
        ]

    def finish(
        self, limit_s: float = TIME_LIMIT_S, may_fail: Callable[[str], bool] = lambda _: False
    ) -> str:
        """Wait for its end; all that it printed. Fails the test if it failed and may not."""
        outputs = []
        try:
            for process in self._processes:
                outputs.append(process.communicate(timeout=limit_s)[0])
        except subprocess.TimeoutExpired as expired:
            os.killpg(process.pid, 9)
            printed = process.communicate()[0]
            raise AssertionError(f"not done after {limit_s} s:\n{printed[-8000:]}") from expired
        finally:
            for process in self._processes:
                if process.poll() is None:
                    os.killpg(process.pid, 9)
                    process.communicate()
        for process, output in zip(self._processes, outputs, strict=True):
            assert process.returncode == 0 or may_fail(output), output[-8000:]
        return "".join(outputs)


class Training(Run):
    """`_deepspeed_train.py` with these options, and its result.

    Args:
        directory: To be made; the result goes there, and what is on disk.
        device: Where optimizer and parameters are: "nvme", "cpu", or None for where they were.
        on_nvmeio: See `Run`.
        options: The script's, and `launcher`, `ranks` and `environment` as for `Run`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        device: str | None = "nvme",
        on_nvmeio: bool = True,
        **options: Any,
    ) -> None:
        run = {name: options.pop(name) for name in ("launcher", "ranks") if name in options}
        run |= options.pop("environment", {})
        directory.mkdir(parents=True)
        if device is not None:
            options["offload"] = {"device": device, "nvme_path": str(directory)}
        on_disk = device == "nvme"
        self._result = directory / "result.json"
        self._own_op = on_disk and not on_nvmeio
        self._expected_op = (NVMEIOS_OP if on_nvmeio else "async_io") if on_disk else None
        arguments = (self._result, json.dumps(options))
        super().__init__("train", *arguments, on_nvmeio=on_disk and on_nvmeio, **run)

    def result(self, limit_s: float = TIME_LIMIT_S) -> dict[str, Any]:
        """Losses and a digest of the parameters; checks that the right op did the I/O."""
        # DeepSpeed's own op now and then aborts the process when the interpreter ends, and so do
        # gloo's threads on a busy machine, whatever else is in it.
        self.finish(
            limit_s,
            may_fail=lambda output: (
                self._result.exists() and (self._own_op or _GLOO_ABORTS in output)
            ),
        )
        result: dict[str, Any] = json.loads(self._result.read_text())
        assert result["op"] == self._expected_op
        assert len(set(result["losses"])) == len(result["losses"])
        return {name: result[name] for name in ("losses", "parameters")}
