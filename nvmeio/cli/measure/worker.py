"""A peer in a process of its own, kept alive and driven over a pipe.

Imports and compiling stay outside the timing, a peer that ends its process (DeepSpeed asserts on
errors) takes only its own figures along, and CPU time and resident memory are its own.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import nvmeio
from nvmeio.cli._terminal import Failed, Refused
from nvmeio.errors import BackendUnavailableError

_PATIENCE_S = 5.0
_ROOT = str(Path(nvmeio.__file__).parent.parent)  # where this very package lies, installed or not

Answer = Any  # a value, or the exception that is raised in its place


class PeerUnavailable(BackendUnavailableError):
    """A peer that this machine does not have, and the command that installs it."""

    def __init__(self, reason: str, install: str = "") -> None:
        super().__init__(reason, attempts=[], remedy=install)


def why_missing(missing: BackendUnavailableError) -> str:
    """The reasons alone, for a list that names peer and remedy itself."""
    return "; ".join(reason for _, reason in missing.attempts) or str(missing).splitlines()[0]


class Worker:
    """The near end: starts the process, sends a method's name and arguments, takes answers.

    Args:
        target: `module:Class`, imported and called in the process; its answer comes first.
        arguments: Arguments for the class.
        name: Its name in error messages.
        log: File for the peer's output; without one it goes to stderr.
        path: Directories that the process imports from, before all others.
    """

    def __init__(
        self,
        target: str,
        *arguments: Any,
        name: str = "",
        log: Path | None = None,
        path: Sequence[Path] = (),
    ) -> None:
        self._name = name or f"the process of {target}"
        self._log = log
        self._pipe, far = Pipe()
        paths = [*map(str, path), _ROOT]
        script = (
            f"import sys; sys.path[:0] = {paths!r}; "
            f"from nvmeio.cli.measure.worker import serve; serve({far.fileno()})"
        )
        output = log.open("wb") if log else None
        # Results are the parent's to print, and DeepSpeed prints too.
        stderr = sys.__stderr__ and sys.__stderr__.fileno()
        try:
            # Its own session: Ctrl-C reaches only us, and we end the process in order.
            self._process = subprocess.Popen(
                [sys.executable, "-c", script],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output or stderr,
                stderr=output,
                start_new_session=True,
            )
        except BaseException:
            self._pipe.close()
            raise
        finally:
            far.close()
            if output is not None:
                output.close()
        self.send(target, *arguments)

    def send(self, method: str, *arguments: Any, **named: Any) -> None:
        """Asks; `answer` returns the result, also if the process has ended."""
        with suppress(OSError):
            self._pipe.send((method, arguments, named))

    def answer(self, timeout_s: float | None = None) -> Answer:
        """The answer to the earliest open request; `opened` reads it."""
        try:
            if not self._pipe.poll(timeout_s):
                return Failed(f"{self._name} gave no answer within {timeout_s:.0f} s")
            return self._pipe.recv()
        except (EOFError, OSError):
            return Failed(self._obituary())

    def call(self, method: str, *, timeout_s: float | None = None, **named: Any) -> Any:
        """Asks and waits.

        Raises:
            BackendUnavailableError, Refused, Failed: As raised in the process.
        """
        self.send(method, **named)
        return opened(self.answer(timeout_s))

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()

    def hang_up(self) -> None:
        """Closes the pipe: a process that waits for work ends at that."""
        self._pipe.close()

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Ends the process and whatever it started, in the middle of a transfer too."""
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=patience_s)
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _obituary(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_PATIENCE_S)
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"status {code}"
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log else []
        return f"{self._name} ended with {how}" + (f": {lines[-1]}" if lines else "")


def opened(answer: Answer) -> Any:
    """The value of an answer.

    Raises:
        BackendUnavailableError, Refused, Failed: As raised in the process.
    """
    if isinstance(answer, Exception):
        raise answer
    return answer


# The far end


def serve(descriptor: int) -> None:
    """Answers requests from a pipe until it is closed."""
    pipe = Connection(descriptor)
    peer: Any = None
    while True:
        try:
            method, arguments, named = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            if peer is None:
                module, _, name = method.partition(":")
                if not name:
                    raise Failed("its process did not start")
                peer = getattr(importlib.import_module(module), name)(*arguments, **named)
                answer: Answer = None
            else:
                answer = getattr(peer, method)(*arguments, **named)
        except (BackendUnavailableError, Refused, Failed) as said:
            answer = said
        except OSError as failed:
            answer = Failed(str(failed))
        except Exception as failed:
            traceback.print_exc()
            answer = Failed(f"{type(failed).__name__}: {failed}")
        pipe.send(answer)
    with suppress(Exception):
        if peer is not None:
            peer.close()
    sys.stderr.flush()
    # Not by way of the interpreter's end: DeepSpeed's threads do not survive it in order.
    os._exit(0)


Contender = TypeVar("Contender")


def order(contenders: Sequence[Contender], loop: int, loops: int) -> list[Contender]:
    """The order of one loop: each begins with somebody else.

    The starting points are spread over the whole list, and odd loops run backwards, so that nobody
    always follows the same neighbour (whose dirty host pages it would pay for).
    """
    count = len(contenders)
    step = max(1, count // max(1, loops))
    first = loop * step % count if count else 0
    turned = [*contenders[first:], *contenders[:first]]
    return turned[::-1] if loop % 2 else turned
