"""Where torch keeps what DeepSpeed and SGLang compile while the tests run: with their environment.

By default that is a directory of the user's, for every environment and torch. There, a run that was
killed while it compiled leaves a file ``lock`` for which every later one waits for ever
(`torch.utils.file_baton`). So the tests have a directory of their own, and whoever comes to it when
nobody else is there removes such files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "TORCH_EXTENSIONS_DIR"
DIRECTORY = Path(sys.prefix) / "torch-extensions"


@contextlib.contextmanager
def kept_with_environment(directory: Path = DIRECTORY) -> Iterator[None]:
    """`VARIABLE` names this directory, for the tests and their processes; its locks are live."""
    if sys.prefix == sys.base_prefix:  # the interpreter's own directory is not ours to write to
        yield
        return
    before = os.environ.get(VARIABLE)
    directory.mkdir(exist_ok=True)
    visit = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(visit, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else is there
            for lock in directory.rglob("lock"):
                lock.unlink()
        fcntl.flock(visit, fcntl.LOCK_SH)
        os.environ[VARIABLE] = str(directory)
        yield
    finally:
        os.close(visit)
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before
