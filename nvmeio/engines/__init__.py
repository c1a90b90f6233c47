"""Engines move the bytes. A requested engine is used, or an error is raised; never another one.

Reading order: `base` (the contract), `libaio`, `threads`.
"""

from __future__ import annotations

import errno
import logging

from nvmeio.engines import libaio
from nvmeio.engines.base import Engine, Options
from nvmeio.engines.libaio import LibaioEngine
from nvmeio.engines.threads import ThreadsEngine
from nvmeio.errors import BackendUnavailableError

logger = logging.getLogger("nvmeio")

ENGINES: dict[str, type[LibaioEngine] | type[ThreadsEngine]] = {
    LibaioEngine.name: LibaioEngine,
    ThreadsEngine.name: ThreadsEngine,
}
# The names that `AioHandle(engine=)` takes.
NAMES = ("auto", *ENGINES)
# Answers of io_setup where the kernel (or a sandbox) has no AIO at all.
_NO_AIO = (errno.ENOSYS, errno.EPERM, errno.EACCES)


_limit_warned: list[bool] = []


def start(engine: str | Engine, options: Options) -> Engine:
    """The engine of this name (or the given one), started.

    "auto" is Linux AIO, or the portable engine if the kernel offers none: in a sandbox (gVisor, a
    seccomp profile without io_setup), or if others have used up ``fs.aio-max-nr``. An administrator
    can raise that limit, so one warning names it: a save in the middle of a training must not fail
    for it. "libaio" by name raises.

    Raises:
        TypeError: Neither a name nor an engine.
        ValueError: No engine has this name.
        BackendUnavailableError: It cannot work here, and why.
    """
    if not isinstance(engine, str):
        if isinstance(engine, type) or not hasattr(engine, "prepare"):
            raise TypeError(f"engine must be a name or an engine object, not {engine!r}")
        engine.start(options)
        return engine
    if engine not in NAMES:
        raise ValueError(
            f"engine must be one of {', '.join(map(repr, NAMES))} "
            f"or an engine object, not {engine!r}"
        )
    chosen: Engine = ENGINES["libaio" if engine == "auto" else engine]()
    try:
        chosen.start(options)
    except BackendUnavailableError as failed:
        if engine != "auto":
            raise
        if isinstance(failed, libaio.AioLimitError):
            if not _limit_warned:
                _limit_warned.append(True)
                logger.warning("engine='auto' takes the slower 'threads': %s", failed)
        # Asked afterwards: to give a context back that was made for the question takes 30 ms.
        elif libaio.probe()[0] not in _NO_AIO:
            raise
        chosen = ENGINES["threads"]()
        chosen.start(options)
    return chosen


def describe() -> list[tuple[str, bool, str]]:
    """Every engine: name, whether it works here, and how or why not.

    Raises:
        BackendUnavailableError: ``NVMEIO_LIBAIO`` names something that cannot be loaded.
    """
    failure, how = libaio.probe()
    return [
        (LibaioEngine.name, not failure, how),
        (ThreadsEngine.name, True, "preadv and pwritev in threads"),
    ]
