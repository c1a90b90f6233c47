"""What is at work when the power goes, and what must be there afterwards.

python -m power._workloads work NAME PROMISES FOLDER...    does it, and notes each promise
python -m power._workloads check NAME                      checks the images named on its input

A promise is a line of PROMISES, written when a call has returned that said "durable": the time, the
rank and a number. A check is a line of JSON {"folders", "promised"}, answered by "right …" or
"wrong …"; each is done in forked processes, one for each rank.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import nvmeio
from nvmeio._formats.torch_archives import torch_writing
from nvmeio._kv_blocks.store import BlockStore
from nvmeio.integrations.dcp import NvmeStorageReader, NvmeStorageWriter
from nvmeio.offload import SwappedOptimizer

Promise = Callable[[int], None]
TURNS = 8


def state(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    made = {f"w{n}": torch.randn(211, 173, generator=generator) for n in range(3)}
    return {**made, "number": torch.tensor([number])}


def number_of(found: dict[str, torch.Tensor]) -> int:
    """Which state it is, all of it."""
    number = int(found["number"])
    wanted = state(number)
    assert found.keys() == wanted.keys(), found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{name} of {number} is damaged"
    return number


class Workload:
    """`work` promises numbers; `check` returns the number that it found, None for nothing yet."""

    # Whether one process has all folders, rather than each rank its own.
    on_all_drives = False

    def work(self, folder: Any, promise: Promise) -> None:
        raise NotImplementedError

    def check(self, folder: Any) -> int | None:
        raise NotImplementedError


class Save(Workload):
    name = "state.pt"

    def save(self, number: int, path: Path) -> None:
        nvmeio.save(state(number), path)

    def load(self, path: Path) -> Any:
        return nvmeio.load(path)

    def work(self, folder: Path, promise: Promise) -> None:
        for number in range(TURNS):
            self.save(number, folder / self.name)
            promise(number)

    def check(self, folder: Path) -> int | None:
        if not (folder / self.name).exists():
            return None
        return number_of(self.load(folder / self.name))


class LargeSave(Save):
    """Of many writes of the drive, and still without a handle."""

    def save(self, number: int, path: Path) -> None:
        nvmeio.save({**state(number), "large": torch.full((2 << 20,), float(number))}, path)

    def load(self, path: Path) -> Any:
        found = nvmeio.load(path)
        assert torch.equal(found.pop("large"), torch.full((2 << 20,), float(found["number"])))
        return found


class Unsynchronised(Save):
    """The negative control: nothing is flushed, so a promise is not kept sooner or later."""

    def work(self, folder: Path, promise: Promise) -> None:
        def nothing(fd: int) -> None:
            pass

        os.fsync = os.fdatasync = nothing  # type: ignore[assignment]
        with nvmeio.AioHandle(engine="threads") as handle:
            for number in range(TURNS):
                nvmeio.save(state(number), folder / self.name, handle=handle)
                promise(number)


class Writer(Save):
    def save(self, number: int, path: Path) -> None:
        with nvmeio.FastFileWriter(path) as file:
            torch.save(state(number), file)


class Safetensors(Save):
    name = "state.safetensors"

    def save(self, number: int, path: Path) -> None:
        nvmeio.save_safetensors(state(number), path)

    def load(self, path: Path) -> Any:
        return nvmeio.load_safetensors(path)


class Recycling(Workload):
    """A Checkpointer that overwrites its oldest file; every checkpoint that is listed is whole."""

    keep = 2

    def new(self, folder: Path) -> nvmeio.Checkpointer:
        return nvmeio.Checkpointer(folder / "saved", keep=self.keep)

    def work(self, folder: Path, promise: Promise) -> None:
        checkpointer = self.new(folder)
        for number in range(TURNS):
            checkpointer.save_sync(state(number), number)
            checkpointer.wait_sync()
            promise(number)
        checkpointer.close()

    def check(self, folder: Path) -> int | None:
        checkpointer = self.new(folder)
        try:
            steps = checkpointer.steps()
            if not steps:
                return None
            for step in steps:
                assert number_of(checkpointer.restore(step)) == step
            latest = number_of(checkpointer.restore())
            assert len(steps) >= min(self.keep, latest + 1), f"{steps} are left"
            return latest
        finally:
            checkpointer.close()


class Protected(Recycling):
    """What is being saved is written to meanwhile: pages are copied aside all the time.

    Each turn has another value for all of the state, and what writes to it another one still.
    """

    numel, count = 600_000, 2  # 2.3 MiB each: several cells, and edges that are no whole page

    def new(self, folder: Path) -> nvmeio.Checkpointer:
        # In small blocks, so that the drive is long behind whoever writes.
        handle = nvmeio.AioHandle(engine="threads", queue_depth=1, block_size=64 << 10)
        return nvmeio.Checkpointer(folder / "saved", self.keep, handle, snapshot="protect")

    def state(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        return {f"w{n}": torch.randn(self.numel, generator=generator) for n in range(self.count)}

    def work(self, folder: Path, promise: Promise) -> None:
        torch_writing.STAGING_BYTES, torch_writing.STAGINGS = 256 << 10, 2  # else it takes in all
        checkpointer = self.new(folder)
        kept = self.state(0)
        kept["w0"] = nvmeio.empty_aligned(self.numel).copy_(kept["w0"])  # written in place
        for number in range(TURNS):
            for name, value in self.state(number).items():
                kept[name].copy_(value)
            checkpointer.save_sync({**kept, "number": torch.tensor([number])}, number)
            over = threading.Event()
            writer = threading.Thread(target=self.write, args=(kept, number, over))
            writer.start()
            report = checkpointer.wait_sync()
            promise(number)
            over.set()
            writer.join()
            assert report is not None and report.moved_bytes > 0, report
        checkpointer.close()

    def write(self, kept: dict[str, torch.Tensor], seed: int, over: threading.Event) -> None:
        chance = random.Random(seed)
        while not over.is_set():
            for tensor in reversed(kept.values()):  # the drive takes them in their order
                low = chance.randrange(self.numel)
                tensor.data[low : low + 50_000] = chance.random()

    def check(self, folder: Path) -> int | None:
        with nvmeio.Checkpointer(folder / "saved", read_only=True) as checkpointer:
            steps = checkpointer.steps()
            for step in steps:
                found = checkpointer.restore(step)
                assert int(found.pop("number")) == step
                for name, value in self.state(step).items():
                    assert torch.equal(found[name], value), f"{name} of {step} is of two moments"
            latest = checkpointer.latest_step()
        assert latest is None or len(steps) >= min(self.keep, latest + 1), f"{steps} are left"
        return latest


class Dcp(Workload):
    """Over the one before, as torch does it."""

    def work(self, folder: Path, promise: Promise) -> None:
        for number in range(TURNS):
            writer = NvmeStorageWriter(folder / "saved", overwrite=True)
            dcp.save(state(number), storage_writer=writer, no_dist=True)
            promise(number)

    def check(self, folder: Path) -> int | None:
        if not (folder / "saved" / ".metadata").exists():
            return None
        found = state(0)
        dcp.load(found, storage_reader=NvmeStorageReader(folder / "saved"), no_dist=True)
        return number_of(found)


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))


def train(made: torch.nn.Module, optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    made(torch.randn(4, 64, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights_after(steps: int) -> list[torch.Tensor]:
    made = net()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    for step in range(steps):
        train(made, optimizer, step)
    return [p.detach() for p in made.parameters()]


def swapped(made: torch.nn.Module, folder: Path) -> SwappedOptimizer:
    return SwappedOptimizer(
        torch.optim.AdamW,
        made.parameters(),
        swap_dir=folder,
        subgroup_bytes=32768,
        resume=True,
        lr=1e-2,
    )


def resumed(folder: Path) -> int | None:
    """After how many steps it goes on, with the weights of then."""
    made = net()
    optimizer = swapped(made, folder)
    try:
        if not optimizer.resumed:
            return None
        steps = optimizer.generation - 1
        for found, wanted in zip(made.parameters(), weights_after(steps), strict=True):
            assert torch.equal(found, wanted), f"other weights than those after {steps} steps"
        train(made, optimizer, steps)  # and with the state of then
        for found, wanted in zip(made.parameters(), weights_after(steps + 1), strict=True):
            assert torch.equal(found, wanted), f"another state than that after {steps} steps"
        return steps
    finally:
        optimizer.close()


class Optimizer(Workload):
    """A step is durable when the next one has begun to write, so when that has returned."""

    def work(self, folder: Path, promise: Promise) -> None:
        made = net()
        optimizer = swapped(made, folder)
        for step in range(TURNS):
            train(made, optimizer, step)
            promise(step)
        optimizer.close()
        self.met()
        promise(TURNS)

    def met(self) -> None:
        """All ranks have come so far: no rank waits for the last step of another that is closed."""

    def check(self, folder: Path) -> int | None:
        return resumed(folder)


class Striped(Workload):
    """One optimizer's state over several drives, which lose what they like of it."""

    on_all_drives = True

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def net(self) -> torch.nn.Sequential:
        # A section of the state is dealt to all drives where it has 128 KiB for each.
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(320, 320) for _ in range(3)))

    def train(self, made: torch.nn.Module, optimizer: Any, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        made(torch.randn(4, 320, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def swapped(self, made: torch.nn.Module, folders: list[Path]) -> SwappedOptimizer:
        return SwappedOptimizer(
            self.kind,
            made.parameters(),
            swap_dir=folders,
            subgroup_bytes=2 << 20,
            resume=True,
            lr=1e-2,
        )

    def weights_after(self, steps: int) -> list[torch.Tensor]:
        made = self.net()
        optimizer = self.kind(made.parameters(), lr=1e-2)
        for step in range(steps):
            self.train(made, optimizer, step)
        return [p.detach() for p in made.parameters()]

    def work(self, folder: list[Path], promise: Promise) -> None:
        made = self.net()
        optimizer = self.swapped(made, folder)
        for step in range(TURNS):
            self.train(made, optimizer, step)
            promise(step)
        optimizer.close()
        promise(TURNS)

    def check(self, folder: list[Path]) -> int | None:
        made = self.net()
        optimizer = self.swapped(made, folder)
        try:
            if not optimizer.resumed:
                return None
            steps = optimizer.generation - 1
            for more in range(2):  # the weights, and the state by what it makes of them
                wanted = self.weights_after(steps + more)
                for found, right in zip(made.parameters(), wanted, strict=True):
                    assert torch.equal(found, right), f"wrong {more} steps after {steps}"
                self.train(made, optimizer, steps + more)
            return steps
        finally:
            optimizer.close()


class Ranks(Optimizer):
    """Several; what one of them promises holds for all."""

    def met(self) -> None:
        dist.barrier()


class Drives(Recycling):
    """Ranks with a drive each: what is whole, and the newest, is the same for all of them."""

    def new(self, folder: Path) -> nvmeio.Checkpointer:
        group = dist.group.WORLD
        return nvmeio.Checkpointer(folder / "saved", self.keep, None, group, shared=False)


class Blocks(Workload):
    """A block store promises nothing but that what it gives is what was stored.

    Slots are written over by others, of other weights as well; of its table now and then a part is
    on the drive, and of its blocks another.
    """

    NBYTES = 10_000
    SLOTS = 12

    def opened(self, folder: Path, turn: int, *, writer: bool) -> BlockStore:
        room = (self.SLOTS + turn // 3) * 12_288  # it grows in place, too
        return BlockStore(folder, "kv", self.NBYTES, room, writer=writer, identity=f"{turn // 2}")

    def block(self, turn: int, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * (turn // 2) + number)
        return torch.randint(0, 256, (self.NBYTES,), dtype=torch.uint8, generator=generator)

    def work(self, folder: Path, promise: Promise) -> None:
        for turn in range(TURNS):
            with self.opened(folder, turn, writer=True) as store:
                for first in range(0, 15, 3):
                    numbers = [(first + 7 * turn + n) % 20 for n in range(3)]
                    blocks = [self.block(turn, number) for number in numbers]
                    assert store.store(list(map(str, numbers)), blocks) == [True] * 3
                with store.path.with_suffix(".table").open("rb") as table:
                    os.fsync(table.fileno())
            promise(turn)

    def check(self, folder: Path) -> int | None:
        for turn in range(0, TURNS, 2):
            try:
                store = self.opened(folder, turn, writer=False)
            except FileNotFoundError:
                continue
            with store:
                rooms = [torch.empty(self.NBYTES, dtype=torch.uint8) for _ in range(20)]
                found = store.load([str(number) for number in range(20)], rooms)
                for number, (room, there) in enumerate(zip(rooms, found, strict=True)):
                    assert not there or room.equal(self.block(turn, number)), (turn, number)
        with self.opened(folder, 0, writer=True) as store:  # it can go on
            assert store.store(["0"], [self.block(0, 0)]) == [True]
        return TURNS


class Snapshot(Workload):
    """Copies of the swap files, while training goes on."""

    def work(self, folder: Path, promise: Promise) -> None:
        made = net()
        (folder / "swap").mkdir()
        optimizer = swapped(made, folder / "swap")
        for step in range(TURNS // 2):
            train(made, optimizer, step)
            optimizer.snapshot(folder / f"copy-{step + 1}")
            promise(step + 1)
        optimizer.close()

    def check(self, folder: Path) -> int | None:
        found = None
        for steps in range(1, TURNS // 2 + 1):
            if (folder / f"copy-{steps}").exists():
                copied = resumed(folder / f"copy-{steps}")
                if copied is not None:
                    assert copied == steps, f"copy-{steps} is one after {copied} steps"
                    found = steps
        return found


WORKLOADS: dict[str, Workload] = {
    "save": Save(),
    "save-large": LargeSave(),
    "unsynchronised": Unsynchronised(),
    "writer": Writer(),
    "safetensors": Safetensors(),
    "checkpointer": Recycling(),
    "protected": Protected(),
    "dcp": Dcp(),
    "optimizer": Optimizer(),
    "ranks": Ranks(),
    "drives": Drives(),
    "snapshot": Snapshot(),
    "striped-adamax": Striped(torch.optim.Adamax),
    "striped-radam": Striped(torch.optim.RAdam),
    "blocks": Blocks(),
}


# Processes


def in_children(work: Callable[[int, int], None], count: int) -> list[int]:
    """Run it in forked processes, as ranks of a process group where they are several."""
    meeting = Path(f"/dev/shm/nvmeio-power-{os.getpid()}-{time.monotonic_ns()}")
    children = []
    for rank in range(count):
        child = os.fork()
        if not child:
            status = 1
            try:
                if count > 1:
                    store = dist.FileStore(str(meeting), count)
                    dist.init_process_group(
                        "gloo", store=store, rank=rank, world_size=count,
                        timeout=timedelta(seconds=120),
                    )  # fmt: skip
                work(rank, count)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    meeting.unlink(missing_ok=True)
    return codes


def do_work(name: str, promises: Path, folders: list[Path]) -> int:
    def run(rank: int, count: int) -> None:
        told = os.open(promises, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        def promise(number: int) -> None:
            os.write(told, f"{time.monotonic_ns()} {rank} {number}\n".encode())

        workload.work(folders if workload.on_all_drives else folders[rank], promise)

    workload = WORKLOADS[name]
    return max(map(abs, in_children(run, 1 if workload.on_all_drives else len(folders))))


def do_checks(name: str) -> None:
    workload = WORKLOADS[name]
    for line in sys.stdin:
        asked = json.loads(line)
        folders, promised = list(map(Path, asked["folders"])), asked["promised"]
        results = Path(asked["results"])
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir()

        def run(
            rank: int,
            count: int,
            folders: list[Path] = folders,
            promised: int | None = promised,
            results: Path = results,
        ) -> None:
            try:
                found = workload.check(folders if workload.on_all_drives else folders[rank])
                if promised is not None:
                    assert found is not None, f"nothing is there, and {promised} was durable"
                    assert found >= promised, f"{found} is there, and {promised} was durable"
                (results / str(rank)).write_text(f"right {found}")
            except BaseException:
                (results / str(rank)).write_text("wrong " + traceback.format_exc())

        codes = in_children(run, 1 if workload.on_all_drives else len(folders))
        told = [(results / str(rank)).read_text() for rank in range(len(codes))]
        if any(codes):
            told.append(f"wrong: ended with {codes}")
        if len({each for each in told if each.startswith("right")}) > 1:
            told.append("wrong: the ranks go on from different steps")
        bad = [each for each in told if each.startswith("wrong")]
        print(json.dumps({"wrong": bad, "found": told[0][6:] if not bad else ""}), flush=True)


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kind, name, *rest = sys.argv[1:]
    if kind == "work":
        return do_work(name, Path(rest[0]), list(map(Path, rest[1:])))
    do_checks(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
