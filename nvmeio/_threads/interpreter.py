"""The system and the Python that nvmeio runs in, checked before anything else, torch included.

Importing this module is the check.
"""

from __future__ import annotations

import sys
from importlib import import_module

from nvmeio.errors import BackendUnavailableError

# Which module tells, newest Python first: 3.13 renamed it.
_TELLERS = ("_interpreters", "_xxsubinterpreters")


def check() -> None:
    """Refuse systems without Linux's calls, and Pythons in which nvmeio or torch goes wrong.

    Those are subinterpreters (torch's import never returns in one, and its operators and the shim
    exist once a process), and a free-threaded Python whose GIL is off (nvmeio's threads share state
    under the GIL's rules, and were never run without).
    """
    if not sys.platform.startswith("linux"):
        raise BackendUnavailableError(
            f"nvmeio does not run on {sys.platform}: it needs Linux (kernel AIO and O_DIRECT)",
            remedy="use it on a Linux machine, in a Linux container or in WSL 2",
        )
    if is_subinterpreter():
        raise BackendUnavailableError(
            "nvmeio works in a process's main interpreter only: torch does not support "
            "subinterpreters",
            remedy="import nvmeio in the main interpreter, or in a process of its own "
            "(multiprocessing, concurrent.futures.ProcessPoolExecutor); under mod_wsgi "
            "set WSGIApplicationGroup %{GLOBAL}",
        )
    if not gil_enabled():
        raise BackendUnavailableError(
            "nvmeio has not been checked on a free-threaded Python whose GIL is off",
            remedy="run with PYTHON_GIL=1 or -X gil=1, or use an ordinary build of Python",
        )


def is_subinterpreter() -> bool:
    """Whether this is not the main interpreter."""
    for name in _TELLERS:
        try:
            teller = import_module(name)
        except ImportError:  # of another version, or a Python without subinterpreters
            continue
        # 3.13 and later answer with (id, whence), earlier ones with the id, 3.10 to 3.12's an
        # object that equals it.
        return bool(teller.get_current() != teller.get_main())
    return False


def gil_enabled() -> bool:
    """Whether threads take turns: always, but on a free-threaded build that was not told to."""
    ask = getattr(sys, "_is_gil_enabled", None)  # 3.13 and later
    return ask is None or bool(ask())


check()
