"""A peer in a process of its own, kept alive and driven over a pipe.

Imports and compiling stay outside the timing, a peer that aborts the process (DeepSpeed asserts
on errors) takes only its own rows along, and CPU time and resident memory are its own.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START_TIMEOUT_S = 1200  # DeepSpeed compiles its op at first use
CALL_TIMEOUT_S = 300


class PeerUnavailable(Exception):
    """A peer that this machine does not have, and the command that installs it."""

    def __init__(self, reason: str, install: str = "") -> None:
        super().__init__(reason, install)
        self.reason = reason
        self.install = install

    def __str__(self) -> str:
        return self.reason


class PeerFailed(Exception):
    """A peer that is there and did not do the work."""


class Worker:
    """The near end: starts the process, sends a method's name and arguments, waits.

    Args:
        target: `module:Class`, imported in the process.
        log: File that takes what the peer prints.
    """

    def __init__(self, target: str, log: Path) -> None:
        self.target = target
        self._log = log
        near, far = Pipe()
        self._pipe = near
        with log.open("wb") as output:
            # Its own session: Ctrl-C reaches only us, and we stop the worker in order.
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "_worker.py"), target, str(far.fileno())],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        far.close()
        try:
            self._receive(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **arguments: Any) -> Any:
        """Run one method in the process and hand back what it returned."""
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise PeerFailed(self._obituary()) from error
        return self._receive(CALL_TIMEOUT_S)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._pipe.close()  # the worker's next receive ends it
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _receive(self, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise PeerFailed(f"no answer from {self.target} within {timeout_s:.0f} s")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise PeerFailed(self._obituary()) from error
        if kind == "unavailable":
            raise PeerUnavailable(*value)
        if kind == "failed":
            raise PeerFailed(value)
        return value

    def _obituary(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        lines = self._log.read_text(errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return f"process of {self.target} ended with status {self._process.returncode}{last}"


def serve(target: str, pipe: Connection) -> None:
    """The far end: answer calls until the pipe closes."""
    # A checkout with the extension built in place will do, but an installed nvmeio wins.
    sys.path.append(str(HERE.parent))
    # This file runs as __main__; peers raise the exception of the module.
    unavailable: type[Exception] = importlib.import_module("_worker").PeerUnavailable
    peer: Any = None

    def answer(method: str, arguments: dict[str, Any]) -> Any:
        nonlocal peer
        if peer is None:
            module, _, name = target.partition(":")
            peer = getattr(importlib.import_module(module), name)()
            return None
        return getattr(peer, method)(**arguments)

    call: tuple[str, dict[str, Any]] = ("", {})
    while True:
        try:
            pipe.send(("ok", answer(*call)))
        except unavailable as error:
            pipe.send(("unavailable", error.args))
        except Exception as error:
            traceback.print_exc()
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
        try:
            call = pipe.recv()
        except (EOFError, ConnectionError):
            break
    if peer is not None:
        peer.close()


if __name__ == "__main__":
    serve(sys.argv[1], Connection(int(sys.argv[2])))
