"""`nvmeio deepspeed`: a command in whose process tree DeepSpeed uses nvmeio."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from nvmeio.compat.deepspeed import installing


def run(command: list[str]) -> NoReturn:
    """Become this command: same process, so signals and the exit status are its own.

    Args:
        command: The program, looked up on PATH, and its arguments.

    Raises:
        OSError: It cannot be run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, installing.environment(os.environ))
