"""Programs of the tests, forked from a process that has imported torch: that takes 2 s of CPU each.

`Program` is `subprocess.Popen` for a Python with `-c`, `-m` or a script: such a program has the
arguments, environment, descriptors, session and parent that it would have, imports nvmeio for
itself, and ends as every program does. What can not be had by forking (options of the interpreter,
variables that are read before a program begins, a terminal, `preexec_fn`) begins in the usual way.
A test that measures memory, or what is imported, takes `subprocess.Popen` itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, AnyStr, NamedTuple

# Read by libraries when they are loaded, or by the interpreter when it begins.
_READ_AT_BIRTH = ("LD_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "GLIBC_", "MALLOC_")
_SEEN_TO = ("PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS")
_MESSAGE_BYTES = 1 << 20


class _Order(NamedTuple):
    """What the process that forks is asked for."""

    arguments: list[str]  # of the interpreter, without its name
    environment: dict[str, str]
    folder: str
    session: bool


class Program(subprocess.Popen[AnyStr]):
    """A Python program, forked where that can be."""

    def _execute_child(  # type: ignore[no-untyped-def]
        self,
        args,
        executable,
        preexec_fn,
        close_fds,
        pass_fds,
        cwd,
        env,
        startupinfo,
        creationflags,
        shell,
        p2cread,
        p2cwrite,
        c2pread,
        c2pwrite,
        errread,
        errwrite,
        *rest,
    ) -> None:
        """What `subprocess` calls to begin a program; it does everything else."""
        environment = dict(os.environ if env is None else env)
        plain = not (executable or preexec_fn or pass_fds or shell)
        given = [p2cread, c2pwrite, errwrite]
        given = [number if fd == -1 else fd for number, fd in enumerate(given)]
        pid = 0
        if plain and _can_be_forked(args, environment) and not any(map(os.isatty, given[1:])):
            order = _Order(
                [*map(os.fspath, args[1:])], environment, os.fspath(cwd or os.getcwd()), rest[5]
            )
            pid = _forking.program(order, given)
        if not pid:
            ends = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            begin: Callable[..., None] = super()._execute_child  # type: ignore[misc]
            begin(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                  creationflags, shell, *ends, *rest)  # fmt: skip
            return
        self.pid = pid
        self._child_created = True
        close: Callable[..., None] = self._close_pipe_fds  # type: ignore[attr-defined]
        close(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run_program(
    arguments: Sequence[str], *, timeout: float, input: str | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with a `Program`, its output captured as text."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Program[str](arguments, text=True, **options) as program:
        try:
            out, err = program.communicate(input, timeout=timeout)
        except BaseException:
            program.kill()
            raise
    return subprocess.CompletedProcess(arguments, program.returncode, out, err)


def _can_be_forked(args: Any, environment: Mapping[str, str]) -> bool:
    if isinstance(args, str) or args[0] != sys.executable or len(args) < 2:
        return False
    at = 1
    while str(args[at]).startswith("-W") and at + 2 < len(args):
        at += 2 if args[at] == "-W" else 1
    first = str(args[at])
    if first.startswith("-") and (first not in ("-c", "-m") or at + 1 == len(args)):
        return False
    theirs = _read_at_birth(environment)
    return theirs == _forking.environment


def _read_at_birth(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_BIRTH) and name not in _SEEN_TO
    }


class _Forking:
    """The process that forks for this one: it is there from the first program on."""

    def __init__(self) -> None:
        self.environment = _read_at_birth(os.environ)
        self._lock = threading.Lock()
        self._ours: socket.socket | None = None
        self._theirs: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._adopts = ctypes.CDLL(None, use_errno=True).prctl

    def begin(self) -> None:
        """Called once; where it was not, all programs begin in the usual way."""
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def end(self) -> None:
        with self._lock:
            for end in filter(None, (self._ours, self._theirs)):
                end.close()
            self._ours = self._theirs = None
            if self._server is not None:
                self._server.wait()

    def program(self, order: _Order, descriptors: list[int]) -> int:
        """The id of a new child of ours; 0 where none can be had."""
        message = pickle.dumps(tuple(order))
        with self._lock:
            if self._ours is None or len(message) > _MESSAGE_BYTES // 8:
                return 0
            if self._theirs is not None:
                self._serve(self._theirs)
            try:
                self._adopt(True)  # it is an orphan for a moment
                socket.send_fds(self._ours, [message], descriptors)
                answer = self._ours.recv(64)
            except OSError:
                answer = b""
            finally:
                self._adopt(False)
            if not answer:  # it has ended
                self._ours.close()
                self._ours = None
        return int(answer or 0)

    def _serve(self, theirs: socket.socket) -> None:
        number = theirs.fileno()
        environment = {k: v for k, v in os.environ.items() if k not in _SEEN_TO}
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(number)],
            env=environment,
            pass_fds=(number,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._theirs = None

    def _adopt(self, does: bool) -> None:
        if self._adopts(36, ctypes.c_ulong(does), 0, 0, 0):  # PR_SET_CHILD_SUBREAPER
            raise OSError(ctypes.get_errno(), "prctl")


_forking = _Forking()


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Within it programs are forked; without it all begin in the usual way."""
    _forking.begin()
    try:
        yield
    finally:
        _forking.end()


# --- in the process that forks ------------------------------------------------------------------


def _serve(number: int) -> _Order:
    """Forks for each order; returns in the programs."""
    _import_what_takes_long()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it goes to all of a terminal's processes
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=number) as asked:
        while True:
            message, descriptors, *_ = socket.recv_fds(asked, _MESSAGE_BYTES, 3)
            if not message:
                os._exit(0)
            told, tells = os.pipe()
            between = os.fork()
            if not between:
                pid = os.fork()
                if pid:  # whose end makes an orphan of the program
                    os.write(tells, b"%d" % pid)
                    os._exit(0)
                os.close(told)
                os.close(tells)
                break
            os.close(tells)
            os.waitpid(between, 0)
            asked.send(os.read(told, 64))
            for descriptor in (told, *descriptors):
                os.close(descriptor)
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    _open_standard_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return _Order(*pickle.loads(message))


def _open_standard_streams() -> None:
    """Anew: those that are there know that theirs could be sought in."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        old = getattr(sys, name)
        buffering = 1 if name == "stderr" else -1
        new = open(  # noqa: SIM115
            descriptor, mode, buffering, encoding=old.encoding, errors=old.errors, closefd=False
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _import_what_takes_long() -> None:
    import numpy  # noqa: F401
    import torch

    with contextlib.suppress(ImportError):
        import torch._dynamo
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint  # noqa: F401


def _begin_program(order: _Order, usual_path: list[str]) -> Callable[[], Any]:
    """Make this process what it would be; returns what runs the program."""
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    if order.session:
        os.setsid()
    if "OMP_NUM_THREADS" in order.environment:
        import torch

        torch.set_num_threads(int(order.environment["OMP_NUM_THREADS"]))
    given = list(order.arguments)
    while given[0].startswith("-W"):
        option = given.pop(0)
        sys.warnoptions.append(option[2:] or given.pop(0))
    if sys.warnoptions:
        warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    first, *more = given
    paths = order.environment.get("PYTHONPATH", "")
    sys.path[:] = [*(paths.split(os.pathsep) if paths else []), *usual_path]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = ["-m", *more[1:]]
        run_module: Callable[..., Any] = runpy._run_module_as_main  # type: ignore[attr-defined]
        return lambda: run_module(more[0])
    if first == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *more[1:]]
        code = compile(more[0], "<string>", "exec")
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(first)))
        sys.argv[:] = [first, *more]
        main.__dict__["__file__"] = first
        with open(first, "rb") as script:
            code = compile(script.read(), first, "exec")
    return lambda: exec(code, main.__dict__)


if __name__ == "__main__":
    _order = _serve(int(sys.argv[1]))
    _begin_program(_order, sys.path[1:])()
