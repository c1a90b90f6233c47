"""Kills a training at every point of the protocol in turn, and resumes it.

python _kill_points.py FOLDER DRIVES STEP OPTIMIZER

prints one line of JSON for each STEP-th point; see test_kill_points.py

One import of torch, and a forked process for each training: it dies as a real one does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _offload_models import model, train
from inside import swapper_of

import nvmeio
from nvmeio._storage import durable
from nvmeio.offload import SwappedOptimizer
from nvmeio.offload._swap_files import manifests
from nvmeio.testing import FakeEngine

BEFORE = 2  # steps that are complete before the killing begins


class Killer:
    """Kills this process at an event; the write of a manifest is half done then."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen: list[str] = []
        self.one = threading.Lock()  # the engine has several threads

    def event(self, what: str, half: Callable[[], Any] | None = None) -> None:
        with self.one:
            self.seen.append(what)
            if len(self.seen) == self.at:
                if half is not None:
                    half()
                os.kill(os.getpid(), signal.SIGKILL)

    def patch(self) -> None:
        """Stand before every call that changes the directory."""
        pwrite, real = os.pwrite, {name: getattr(os, name) for name in CALLS}

        def write(fd: int, data: Any, offset: int) -> int:
            self.event("pwrite", lambda: pwrite(fd, bytes(data)[: len(data) // 2], offset))
            return pwrite(fd, data, offset)

        def write_all(fd: int, parts: Any, offset: int = 0) -> None:
            for data in parts:
                if len(data):
                    offset += write(fd, data, offset)

        def before(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.event(name)
                return real[name](*args, **kwargs)

            return call

        os.pwrite = write  # type: ignore[assignment]
        durable.write_all = manifests.write_all = write_all  # type: ignore[assignment,attr-defined]
        for name in CALLS:
            setattr(os, name, before(name))


CALLS = ("fdatasync", "fsync", "ftruncate", "mkdir", "unlink", "write")


def directories(folder: Path) -> list[Path]:
    """Where it swaps: on one drive, or on several."""
    return [folder / f"drive{number}" for number in range(int(sys.argv[2]))]


def kind() -> Any:
    """The optimizer's class."""
    return getattr(torch.optim, sys.argv[4])


def made_in(folder: Path, engine: FakeEngine | None = None) -> tuple[Any, Any, Any]:
    module = model()
    handle = nvmeio.AioHandle(engine=engine or FakeEngine())
    optimizer = SwappedOptimizer(
        kind(),
        module.parameters(),
        swap_dir=directories(folder),
        resume=True,
        handle=handle,
        subgroup_bytes=128 << 10,
        lr=1e-2,
    )
    return module, optimizer, handle


def killed(folder: Path, at: int, from_the_start: bool) -> None:
    killer = Killer(at)
    armed = [from_the_start]

    def block(kind: str, offset: int, nbytes: int) -> int:
        if kind != "pread" and armed[0]:
            killer.event(kind)
        return 0

    if from_the_start:
        killer.patch()
    module, optimizer, _ = made_in(folder, FakeEngine(fail=block))
    if not from_the_start:
        train(module, optimizer, BEFORE)
        swapper_of(optimizer).store.settle()
        killer.patch()
        armed[0] = True
        train(module, optimizer, 1, BEFORE)
        (folder / "stepped").write_text("")
    swapper_of(optimizer).store.settle()
    (folder / "all").write_text(json.dumps(killer.seen))
    os.kill(os.getpid(), signal.SIGKILL)


def digest(module: Any) -> str:
    together = hashlib.sha256()
    for parameter in module.parameters():
        together.update(parameter.detach().numpy().tobytes())
    return together.hexdigest()


def resumed(folder: Path) -> None:
    """What comes back, and that it goes on from there."""
    module, optimizer, handle = made_in(folder)
    found = {"generation": optimizer.generation, "resumed": optimizer.resumed}
    found["weights"] = digest(module)
    train(module, optimizer, 2, optimizer.generation - 1)
    found["after"] = digest(module)
    optimizer.close()
    handle.close()
    (folder / "found").write_text(json.dumps(found))
    os._exit(0)


def in_child(work: Callable[..., None], *args: Any) -> int:
    child = os.fork()
    if not child:
        try:
            work(*args)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warm = model()
    train(warm, kind()(warm.parameters()), 1)  # which imports much of torch, once
    for from_the_start in (False, True):
        at, over = 1 - int(sys.argv[3]), False
        while not over:
            at += int(sys.argv[3])
            place = folder / f"{from_the_start}-{at}"
            place.mkdir()
            assert in_child(killed, place, at, from_the_start) == -signal.SIGKILL
            over = (place / "all").exists()
            assert in_child(resumed, place) == 0
            told = json.loads((place / "found").read_text())
            told["stepped"] = (place / "stepped").exists()
            told["from_the_start"] = from_the_start
            if over:
                told["events"] = json.loads((place / "all").read_text())
            print(json.dumps(told), flush=True)
            shutil.rmtree(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
