"""Ranks for tests: real processes with real gloo groups, and what they have in common.

A script calls `main` with functions: it imports torch once and then, for each line of JSON that it
reads, forks so many ranks, has each of them run one of those functions, and prints how they ended.
Every rank tells what is wrong by failing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from inside import saver_of

import nvmeio
import nvmeio.checkpoint
from nvmeio._distributed import messages as ranks_module
from nvmeio.testing import FakeEngine

MIB = 1 << 20

# No rank takes longer than this for anything, on a busy machine.
PATIENCE_S = 120.0

# How long a rank may make no progress where one is given up.
LIMIT_S = 2.5

# What ranks do, by name; those that return False end without meeting the others.
Work = dict[str, Callable[..., bool | None]]


# States


def replicated(step: int, large: int = 0) -> dict[str, Any]:
    """The same on all ranks: storages larger and smaller than a part, ties, Python objects."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(531, 517, generator=generator)
    state: dict[str, Any] = {
        "step": step,
        "rows": rows,
        "tied": rows[5:9],
        "small": [torch.randn(i % 7, generator=generator) for i in range(60)],
        "moments": {"m": torch.randn(200_003, generator=generator), "lr": 1e-3},
        "odd": torch.randn(3, generator=generator),
    }
    if large:
        state["large"] = torch.full((large,), step % 251, dtype=torch.uint8)
    return state


def own(step: int, rank: int) -> dict[str, Any]:
    """Another one on each rank, of another size."""
    return {"step": step, "rank": rank, "w": torch.full((50_000 * (rank + 1),), step * 10 + rank)}


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


class Rank:
    """What each function below is given."""

    def __init__(self, folder: Path, rank: int, world: int, layout: str, number: int) -> None:
        self.folder = folder / "checkpoints"
        self.notes = folder
        self.rank = rank
        self.world = world
        self.layout = layout
        self.number = number  # of the order
        self.errno = 0  # that every write of this rank meets
        self.kill_at = -1  # the offset whose write kills this rank
        self.written: list[tuple[int, int]] = []
        self.read: list[tuple[int, int]] = []
        self.reading = threading.Event()  # set by the first read
        self.read_gate: threading.Event | None = None  # that every read of this rank waits for
        self.read_errno = 0  # that every read of this rank meets
        self.kill_reading = False  # with its next read

    def state(self, step: int) -> dict[str, Any]:
        return replicated(step) if self.layout == "one" else own(step, self.rank)

    def new(self, **options: Any) -> nvmeio.Checkpointer:
        chosen = {"layout": self.layout, "keep": 2, "timeout_s": PATIENCE_S, **options}
        group = dist.group.WORLD
        if chosen["layout"] == "one" or "handle" not in chosen:
            chosen.setdefault("handle", nvmeio.AioHandle(engine=FakeEngine(fail=self._meet)))
        return nvmeio.Checkpointer(self.folder, process_group=group, **chosen)

    def _meet(self, kind: str, offset: int, nbytes: int) -> int:
        if kind != "pwrite":
            return self._meet_read(offset, nbytes)
        if 0 <= self.kill_at <= offset:
            os.kill(os.getpid(), signal.SIGKILL)
        self.written.append((offset, nbytes))
        return self.errno

    def _meet_read(self, offset: int, nbytes: int) -> int:
        self.read.append((offset, nbytes))
        self.reading.set()
        if self.read_gate is not None:
            self.read_gate.wait(PATIENCE_S)
        if self.kill_reading:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.read_errno

    def saved(self, checkpointer: nvmeio.Checkpointer, step: int) -> None:
        """Save a step, and see that all of it is there on every rank."""
        checkpointer.save_sync(self.state(step), step)
        report = checkpointer.wait_sync(PATIENCE_S)
        assert report is not None and report.durable and report.step == step, report
        assert checkpointer.latest_step() == step
        assert same(checkpointer.restore(), self.state(step))

    @contextlib.contextmanager
    def raises(self, error: Any, *texts: str, within_s: float = PATIENCE_S) -> Iterator[list[Any]]:
        """The body raises this error soon, and it says all of this."""
        began = time.monotonic()
        told: list[Any] = []
        try:
            yield told
        except error as raised:
            assert all(text in str(raised) for text in texts), str(raised)
            told.append(raised)
        else:
            raise AssertionError(f"rank {self.rank} raised nothing")
        assert time.monotonic() - began < within_s, time.monotonic() - began

    def meet_others(self) -> None:
        dist.barrier()

    def tell(self, name: str, text: str) -> None:
        """A note for the others, whole as soon as it is there."""
        (self.notes / f"{name}.new").write_text(text)
        (self.notes / f"{name}.new").rename(self.notes / name)

    def told(self, name: str) -> str:
        """Another rank's note, once it is there."""
        until = time.monotonic() + PATIENCE_S
        while not (self.notes / name).exists():
            assert time.monotonic() < until, f"nobody told {name}"
            time.sleep(0.002)
        return (self.notes / name).read_text()


def set_limit(checkpointer: nvmeio.Checkpointer, timeout_s: float) -> None:
    """From the next save on; those before it are to be in time on the slowest drive."""
    saver = saver_of(checkpointer)
    saver.setup = saver.setup._replace(timeout_s=timeout_s)


def tell_time_by(clock: Callable[[], float]) -> None:
    """Have this rank measure by this clock how long others make no progress."""
    ranks_module.time = types.SimpleNamespace(  # type: ignore[assignment]
        monotonic=clock, sleep=time.sleep
    )


def since_the_end_of(pid: int) -> Callable[[], float]:
    """A clock that stands still while a process lives, so that nobody is given up before."""
    ended: list[float] = []

    def clock() -> float:
        if not ended:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                ended.append(time.monotonic())
        return time.monotonic() - ended[0] if ended else 0.0

    return clock


def sync_nothing() -> None:
    """A busy drive may take seconds, in which a rank makes no progress; here no power is lost."""
    os.fsync = os.fdatasync = lambda fd: None  # type: ignore[assignment]


# Processes


def run(work: Work, order: dict[str, Any]) -> dict[str, Any]:
    """Fork ranks (and whoever serves the store), and wait for all of them."""
    folder = Path(order["folder"])
    folder.mkdir(exist_ok=True)
    world, limit_s = order["world"], order["limit_s"]
    port_file = folder / f"port-{order['number']}"
    server = fork(lambda: serve(port_file), folder / "server") if order["store"] == "tcp" else 0
    logs = [folder / f"log-{order['number']}-{rank}" for rank in range(world)]
    ranks = [
        fork(lambda rank=rank: be_rank(work, order, rank, port_file), log)  # type: ignore[misc]
        for rank, log in enumerate(logs)
    ]
    codes: dict[int, int] = {}
    until = time.monotonic() + limit_s + 5
    while len(codes) < world:
        for pid in ranks:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
        if time.monotonic() > until:
            for pid in ranks:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    if server:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    return {"codes": [codes[pid] for pid in ranks], "logs": [log.read_text() for log in logs]}


def fork(work: Callable[[], None], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # gloo may abort a process that ends in the usual way


def serve(port_file: Path) -> None:
    """The store in a process that is no rank, as torchrun has it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    publish(port_file, store.port)
    signal.pause()


def publish(port_file: Path, port: int) -> None:
    port_file.with_suffix(".new").write_text(str(port))
    port_file.with_suffix(".new").rename(port_file)


def open_store(order: dict[str, Any], rank: int, port_file: Path) -> Any:
    if order["store"] == "file":
        return dist.FileStore(str(port_file) + ".store", order["world"])
    options: Any = {"wait_for_workers": False, "timeout": timedelta(seconds=PATIENCE_S)}
    if order["store"] == "rank 0" and rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, **options)
        publish(port_file, store.port)
        return store
    until = time.monotonic() + PATIENCE_S
    while not port_file.exists():
        assert time.monotonic() < until
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), is_master=False, **options)


def be_rank(work: Work, order: dict[str, Any], rank: int, port_file: Path) -> None:
    faulthandler.enable()  # a rank that crashes says where
    faulthandler.dump_traceback_later(order["limit_s"], exit=True)
    warnings.simplefilter("error")
    world = order["world"]
    dist.init_process_group(
        "gloo",
        store=open_store(order, rank, port_file),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    me = Rank(Path(order["folder"]), rank, world, order["layout"], order["number"])
    if work[order["work"]](me, **order["arguments"]) is not False:
        dist.barrier()


def main(work: Work) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a rank would look at all of torch's objects, and copy their pages
    for line in sys.stdin:
        print(json.dumps(run(work, json.loads(line))), flush=True)
