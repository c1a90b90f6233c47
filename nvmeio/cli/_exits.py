"""Exit statuses of the commands, and which failure ends in which. docs/cli.md lists them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console

from nvmeio.errors import BackendUnavailableError, NvmeioError

OK = 0
FAILED = 1  # the work was begun and did not succeed: an I/O error, other bytes than expected
USAGE = 2  # what was asked for makes no sense, or does not fit here
UNAVAILABLE = 3  # what was asked for is not installed, or not there: an engine, a GPU, a right
INTERRUPTED = 128 + signal.SIGINT


class Refused(Exception):
    """What was asked for does not fit here: too little space, too little memory."""


class Failed(Exception):
    """The work was begun and did not succeed."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: cleaned up after as Ctrl-C is."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def exit_statuses(errors: Console) -> Iterator[None]:
    """Turns failures of the body into one message on `errors` and an exit status.

    SIGTERM and SIGHUP are taken as Ctrl-C meanwhile, so that whatever the body made is removed.
    """
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for signum in before:
            signal.signal(signum, _terminate)
        yield
    except _Terminated as terminated:
        complain(errors, "terminated; no files are left", "yellow")
        raise typer.Exit(128 + terminated.signum) from terminated
    except KeyboardInterrupt as interrupted:
        complain(errors, "interrupted; no files are left", "yellow")
        raise typer.Exit(INTERRUPTED) from interrupted
    except Refused as refused:
        complain(errors, f"refused: {refused}")
        raise typer.Exit(USAGE) from refused
    except BackendUnavailableError as missing:
        complain(errors, f"not available: {missing}")
        raise typer.Exit(UNAVAILABLE) from missing
    except (Failed, NvmeioError, OSError, MemoryError) as failed:
        complain(errors, f"failed: {failed}")
        raise typer.Exit(FAILED) from failed
    except Exception as failed:
        status = status_of_interrupt(failed)
        if status is None:
            raise
        complain(errors, "interrupted; no files are left", "yellow")
        raise typer.Exit(status) from failed
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def status_of_interrupt(failed: BaseException) -> int | None:
    """The exit status of an interrupt that others made this error of; None where none did.

    Before Python 3.12 one that comes in a ``__set_name__``, while a class is being made, is raised
    as RuntimeError: pydantic has such classes, and typer imports it when a command is called.
    """
    error: BaseException | None = failed
    while error is not None:
        if isinstance(error, _Terminated):
            return 128 + error.signum
        if isinstance(error, KeyboardInterrupt):
            return INTERRUPTED
        error = error.__cause__
    return None


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise _Terminated(signum)


def complain(errors: Console, message: str, style: str = "red") -> None:
    """One message on `errors`, in which brackets are no markup."""
    errors.print(message, style=style, markup=False, highlight=False, soft_wrap=True)
