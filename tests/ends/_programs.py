"""Programs that end in every way, for `test_ends`: one import of torch, a forked process for each.

python -m ends._programs SYSTEM FOLDER    prints a line of JSON for each way to end
"""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from interrupts import _checkpoints, _inference, _offload
from interrupts._checkpoints import state

import nvmeio
from nvmeio.offload import SwappedModule
from nvmeio.testing import FakeEngine

LIMIT_S = 300
Again = Callable[[], object]  # what a daemon thread goes on doing
Begin = Callable[[Path, nvmeio.AioHandle, list[Any]], Again]
_failing: dict[str, int] = {}  # what the drive does no more


def slow_handle() -> nvmeio.AioHandle:
    """So slow that a save is under way for a tenth of a second and more."""
    engine = FakeEngine(delay_s=0.001, fail=lambda kind, *_: _failing.get(kind, 0))
    return nvmeio.AioHandle(block_size=16384, queue_depth=2, engine=engine)


# What each system is at when the program ends


def checkpointer(folder: Path, handle: nvmeio.AioHandle, keep: list[Any]) -> Again:
    """The second save is under way."""
    made = nvmeio.Checkpointer(folder / "saved", keep=2, handle=handle)
    keep.append(made)
    made.save_sync(state(1), 1)
    made.wait_sync()
    made.save_sync(state(2), 2)
    return lambda: made.save_sync(state(3), 3)


def optimizer(folder: Path, handle: nvmeio.AioHandle, keep: list[Any]) -> Again:
    """Three steps."""
    made = _offload.net()
    swapped = _offload.resumed(made, folder, handle)
    keep += [made, swapped]

    def step() -> None:
        _offload.loss_of(made, swapped.generation - 1).backward()
        swapped.step()
        swapped.zero_grad()

    for _ in range(3):
        step()
    return step


def module(folder: Path, handle: nvmeio.AioHandle, keep: list[Any]) -> Again:
    """Between two passes."""
    made: SwappedModule = _offload.swapped(_offload.net(), folder, handle=handle)
    keep.append(made)

    def run() -> None:
        _offload.loss_of(made, 0).backward()

    run()
    return run


def stream(folder: Path, handle: nvmeio.AioHandle, keep: list[Any]) -> Again:
    """Between two passes, with reads ahead of the next one."""
    _inference.everything_streams()
    with torch.device("meta"):
        empty = _inference.Net().eval()
    model = nvmeio.stream_model(
        empty, folder / "net.safetensors", resident_bytes=160_000, window=2, handle=handle
    )
    keep.append(model)

    def run() -> None:
        with torch.no_grad():
            model(torch.ones(2, 48))

    run()
    return run


def writer(folder: Path, handle: nvmeio.AioHandle, keep: list[Any]) -> Again:
    """Half a file is written, over one that is whole."""
    made = nvmeio.FastFileWriter(folder / "file", handle=handle)
    keep.append(made)
    made.write(b"new" * 100_000)
    return lambda: made.write(b"new")


def dcp(folder: Path, handle: nvmeio.AioHandle, keep: list[Any]) -> Again:
    """The second save is under way."""
    import torch.distributed.checkpoint as checkpoint

    from nvmeio.integrations.dcp import NvmeStorageWriter

    def save(number: int) -> Any:
        place = NvmeStorageWriter(folder / f"saved-{number}", handle=handle)
        saving = checkpoint.async_save(
            _checkpoints.tensors(number), storage_writer=place, no_dist=True
        )
        keep.append(saving)
        return saving

    save(1).result()
    save(2)
    return lambda: time.sleep(0.01)


# What is lost when the program ends: the drive takes no more


def lost_save(folder: Path, handle: nvmeio.AioHandle, keep: list[Any]) -> Again:
    """A save that fails, and nobody waits for."""
    again = checkpointer(folder, handle, keep)
    keep[-1].wait_sync()
    _failing["pwrite"] = errno.EIO
    again()
    return again


def dropped(lost: Begin) -> Begin:
    """The same, and its Checkpointer or optimizer is gone by then."""

    def begin(folder: Path, handle: nvmeio.AioHandle, keep: list[Any]) -> Again:
        lost(folder, handle, keep)
        keep.clear()
        gc.collect()
        return int

    return begin


def lost_step(folder: Path, handle: nvmeio.AioHandle, keep: list[Any]) -> Again:
    """A step that the drive has not made durable."""
    made = optimizer(folder, handle, keep)
    keep[-1].state_dict()  # what was before is durable
    _no_more_syncs()
    made()
    return made


def _no_more_syncs() -> None:
    def sync(self: nvmeio.AioHandle, file: Any, **_: Any) -> None:
        raise nvmeio.TransferError(errno.EIO, operation="fsync", path="the drive")

    nvmeio.AioHandle.sync_fsync = sync  # type: ignore[assignment, method-assign]


SYSTEMS: dict[str, Begin] = {
    "checkpointer": checkpointer,
    "optimizer": optimizer,
    "module": module,
    "stream": stream,
    "writer": writer,
    "dcp": dcp,
}
LOST: dict[str, Begin] = {
    "lost save": lost_save,
    "lost save, dropped": dropped(lost_save),
    "lost step": lost_step,
    "lost step, dropped": dropped(lost_step),
}


# How a program ends


def normally(handle: nvmeio.AioHandle, again: Again) -> None:
    pass


def by_exit(handle: nvmeio.AioHandle, again: Again) -> None:
    sys.exit(3)


def by_exception(handle: nvmeio.AioHandle, again: Again) -> None:
    raise ValueError("the end")


def by_interrupt(handle: nvmeio.AioHandle, again: Again) -> None:
    signal.raise_signal(signal.SIGINT)


def by_sigterm(handle: nvmeio.AioHandle, again: Again) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


def at_once(handle: nvmeio.AioHandle, again: Again) -> None:
    os._exit(0)


def handle_first(handle: nvmeio.AioHandle, again: Again) -> None:
    handle.close()


def with_a_daemon_thread(handle: nvmeio.AioHandle, again: Again) -> None:
    """It is in the middle of something, again and again."""
    begun = threading.Event()

    def go_on() -> None:
        begun.set()
        while True:
            again()

    threading.excepthook = lambda *_: None  # the end of the program is its end, too
    threading.Thread(target=go_on, daemon=True).start()
    begun.wait()


def without_stderr(handle: nvmeio.AioHandle, again: Again) -> None:
    """As a service may have none."""
    sys.stderr = None


def after_a_forked_child(handle: nvmeio.AioHandle, again: Again) -> None:
    """The child ends as a program does, and must leave what is its parent's alone."""
    child = os.fork()
    if not child:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0


ENDS: dict[str, Callable[[nvmeio.AioHandle, Again], None]] = {
    "normal": normally,
    "sys.exit": by_exit,
    "exception": by_exception,
    "ctrl-c": by_interrupt,
    "sigterm": by_sigterm,
    "os._exit": at_once,
    "handle closed first": handle_first,
    "daemon thread": with_a_daemon_thread,
    "forked child": after_a_forked_child,
}
# Those at which Python itself tells the status.
TELLING: dict[str, Callable[[nvmeio.AioHandle, Again], None]] = {
    **{end: ENDS[end] for end in ("normal", "sys.exit", "exception", "ctrl-c", "forked child")},
    "no stderr": without_stderr,
}


def ends_of(system: str) -> dict[str, Callable[[nvmeio.AioHandle, Again], None]]:
    """The ways in which a program of this system ends."""
    if system not in LOST:
        return ENDS
    if not system.endswith("dropped"):
        return TELLING
    return {end: TELLING[end] for end in ("normal", "ctrl-c", "no stderr")}


def prepared(system: str, folder: Path) -> None:
    if system == "stream":
        _inference.saved_net(folder / "net.safetensors")
    if system == "writer":
        (folder / "file").write_bytes(b"old")


def main() -> None:
    """Returns, or raises, in the child whose program ends: Python's own end is what is tested."""
    system, folder = sys.argv[1], Path(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for end, ends in ends_of(system).items():
        place = folder / end
        place.mkdir()
        prepared(system, place)
        child = os.fork()
        if not child:
            signal.alarm(LIMIT_S)
            errors = os.open(folder / f"{end}.errors", os.O_WRONLY | os.O_CREAT)
            os.dup2(errors, 2)
            os.close(errors)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            keep: list[Any] = []
            handle = slow_handle()
            sys.modules["__main__"].kept = keep, handle  # type: ignore[attr-defined]
            again = {**SYSTEMS, **LOST}[system](place, handle, keep)
            ends(handle, again)
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"end": end, "status": status}), flush=True)


if __name__ == "__main__":
    main()
