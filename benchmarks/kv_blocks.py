"""Pages of KV caches to and from the drive: nvmeio beside the servers' own file backends, and fio.

    python benchmarks/kv_blocks.py --dir /mnt/nvme          # vLLM's tier where vLLM is installed,
                                                            # SGLang's backend where SGLang is
Every contender stores and loads the same pages in the same memory, batch by batch, in turns, of
which each begins one; files are written back and dropped from the page cache before a load. A store
is timed three times: until it returns, until its pages have left memory for the drive, batch by
batch ("written": nothing more to wait for where it was direct), and until the file system says that
all of the turn is there ("synced": with what it keeps of names and sizes).
Of small batches a turn has several, one after the other, 8 MiB or 32 of them. fio stores into a new
file, allocated before it begins to count, has as many pages in flight, waits for all of them like
the others, and does so for 64 MiB at least, since it counts in milliseconds. vLLM's interface is
called by the main thread and SGLang's by another one, as the servers do. Medians, and ratios to
nvmeio. Takes minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from _files import drop_from_cache

KIB = 1 << 10
PAGES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
BATCHES = (1, 16, 256)
MOST_BYTES = 1 << 30  # of a batch
FIO_BYTES = 64 << 20
TURN_BYTES, TURN_BATCHES = 8 << 20, 32
VERBS = ("store", "written", "synced", "load")
_WRITE_AND_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER
_libc = ctypes.CDLL(None, use_errno=True)


class Contender(NamedTuple):
    """Attributes: `store` and `load` move one batch of pages, given its number; what is stored
    through the page cache makes files in `cached`.
    """

    name: str
    store: Callable[[int], None]
    load: Callable[[int], None]
    close: Callable[[], None]
    cached: Path | None = None


def vllm_spec() -> Any:
    """What vLLM's tiers ask a specification for."""
    parallel = dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
    return SimpleNamespace(
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
        config=SimpleNamespace(
            groups=[],
            parallel=SimpleNamespace(**parallel, rank=0, is_parallelism_agnostic=True),
            model=SimpleNamespace(name="m", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
            canonical_layout=False,
            replicated_layout=False,
            kv_cache_layout=None,
        ),
    )


def tier(name: str, made: Any, batch: int) -> Contender:
    """A tier of vLLM, through vLLM's interface."""
    # To vLLM `drain_jobs` is a reset, behind which nvmeio's tier finds nothing.
    settle = made._store.drain if name == "nvmeio" else made.drain_jobs

    def run(submit: Callable[[Any], None], number: int) -> None:
        keys = [number.to_bytes(4, "big") + n.to_bytes(28, "big") + bytes(4) for n in range(batch)]
        submit(SimpleNamespace(job_id=number, keys=keys, chunk_ids=range(batch)))
        settle()
        (result,) = made.get_finished_jobs()
        assert result.success, f"{name} failed"

    return Contender(
        name,
        lambda number: run(made.submit_store, number),
        lambda number: run(made.submit_load, number),
        made.shutdown,
    )


def of_vllm(directory: Path, page: int, batch: int) -> list[Contender]:
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    from nvmeio.integrations.vllm_tier import NvmeTier

    mapping = mmap.mmap(-1, page * batch)  # shared, as vLLM's
    mapping[:] = os.urandom(min(page * batch, 1 << 20)) * max(page * batch >> 20, 1)
    view = memoryview(mapping).cast("B", (batch, page))
    room = 8 * page * batch + (1 << 30)
    return [
        tier(
            "nvmeio",
            NvmeTier(
                vllm_spec(),
                view,
                "n",
                directory=str(directory / "nvmeio"),
                capacity_bytes=room,
                weights_id="none",
            ),
            batch,
        ),
        tier(
            "vLLM fs",
            FileSystemTierManager(vllm_spec(), view, "fs", root_dir=str(directory / "fs")),
            batch,
        ),
    ]


def of_sglang(directory: Path, page: int, batch: int) -> list[Contender]:
    import sglang.srt.mem_cache.hicache_storage as interface

    from nvmeio.integrations.sglang_hicache import NvmeHiCache

    class Pool:
        layout, page_size, dtype = "page_first", 1, torch.bfloat16

        def __init__(self) -> None:
            self.pages = torch.empty(max(batch, 2), page // 2, dtype=self.dtype).normal_()

        def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
            return self.pages[index]

        def get_dummy_flat_data_page(self) -> torch.Tensor:
            return torch.zeros(page // 2, dtype=self.dtype)

        def set_from_flat_data_page(self, index: int, data: torch.Tensor) -> None:
            self.pages[index] = data

    room = 8 * page * batch + (1 << 30)
    config = interface.HiCacheStorageConfig(
        **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
        **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
        **dict.fromkeys(("is_mla_model", "enable_storage_metrics", "is_page_first_layout"), False),
        model_name="m",
        extra_config={
            "directory": str(directory / "nvmeio"),
            "capacity_bytes": room,
            "weights_id": "none",
        },
    )
    pool, found = Pool(), []
    for name, backend in (
        ("nvmeio", NvmeHiCache(config)),
        ("HiCacheFile", interface.HiCacheFile(config, file_path=str(directory / "file"))),
    ):
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, interface.PoolName.KV)

        def run(work: Any, number: int, name: str = name) -> None:
            keys = [f"{number}-{n}" for n in range(batch)]
            given = interface.PoolTransfer(
                name=interface.PoolName.KV, host_indices=torch.arange(batch), keys=keys
            )
            assert all(work([given])[interface.PoolName.KV]), f"{name} failed"

        found.append(
            Contender(
                name,
                lambda number, run=run, backend=backend: run(backend.batch_set_v2, number),
                lambda number, run=run, backend=backend: run(backend.batch_get_v2, number),
                getattr(backend, "close", lambda: None),
                directory / "file" if name == "HiCacheFile" else None,
            )
        )
    return found


def of_fio(directory: Path, page: int, batch: int) -> list[Contender]:
    if shutil.which("fio") is None:
        return []

    total = page * batch
    batches = max(FIO_BYTES // total, 1)

    def run(verb: str) -> None:
        path = directory / "fio"
        if verb == "write":  # into blocks that are allocated and not written yet, as the others
            path.unlink(missing_ok=True)
        command = [
            *("fio", "--name=kv", f"--filename={path}", f"--rw=rand{verb}"),
            *(f"--bs={page}", f"--size={batches * total}", "--direct=1", "--fallocate=native"),
            *("--ioengine=libaio", f"--iodepth={batch}", f"--iodepth_batch={batch}"),
            *(f"--iodepth_batch_complete_min={batch}", "--output-format=json"),
        ]
        said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        seconds[0] = said["jobs"][0][verb]["runtime"] / 1e3 / batches

    seconds = [0.0]
    fio = Contender("fio", lambda _: run("write"), lambda _: run("read"), lambda: None)
    fio.store.seconds = fio.load.seconds = seconds  # type: ignore[attr-defined]
    return [fio]


def measure(
    contenders: list[Contender], directory: Path, repeats: int, batches: int
) -> dict[str, list[float]]:
    """Seconds a batch, by verb: for each contender the median of turns of so many batches."""
    taken: dict[str, list[list[float]]] = {verb: [[] for _ in contenders] for verb in VERBS}
    for number in range(repeats + 1):  # the first one is not counted
        for verb in ("store", "load"):
            os.sync()
            drop_from_cache(directory)
            for turn in range(len(contenders)):
                place = (number + turn) % len(contenders)
                work = getattr(contenders[place], verb)
                cached = contenders[place].cached if verb == "store" else None
                own = getattr(work, "seconds", None)
                known = set(os.listdir(cached)) if cached else set()
                aside = waited = 0.0
                began = time.perf_counter()
                for batch in range(1 if own else batches):
                    work(number * batches + batch)
                    if cached:
                        paused = time.perf_counter()
                        new = [cached / name for name in os.listdir(cached) if name not in known]
                        known.update(path.name for path in new)
                        looked = time.perf_counter()
                        _write_back(new)
                        aside += time.perf_counter() - paused
                        waited += time.perf_counter() - looked
                seconds = [time.perf_counter() - began - aside]
                if verb == "store":
                    seconds.append(seconds[0] + waited)
                    syncing = time.perf_counter()
                    os.sync()
                    seconds.append(seconds[1] + time.perf_counter() - syncing)
                if number:
                    names = ("store", "written", "synced") if verb == "store" else (verb,)
                    for name, each in zip(names, seconds, strict=True):
                        taken[name][place].append(own[0] if own else each / batches)
    return {verb: [statistics.median(each) for each in times] for verb, times in taken.items()}


def _write_back(paths: list[Path]) -> None:
    """Have the pages of files on the drive."""
    with contextlib.ExitStack() as undo:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            undo.callback(os.close, fd)
            if _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE_AND_WAIT):
                raise OSError(ctypes.get_errno(), f"sync_file_range of {path}")


def _here(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """What an executor does, by the caller itself."""
    done: Future[Any] = Future()
    done.set_result(work(*arguments))
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="on the drive")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pages", type=int, nargs="+", default=PAGES, help="bytes")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    arguments = parser.parse_args()
    peers = [
        make
        for library, make in (("vllm", of_vllm), ("sglang", of_sglang))
        if importlib.util.find_spec(library) is not None
    ]
    if not peers:
        sys.exit("neither vLLM nor SGLang is installed here: see `make serve-vllm`")
    print(f"{'page':>9} {'batch':>5} {'verb':6} {'contender':12} {'GB/s':>6} {'nvmeio is':>9}")
    for page in arguments.pages:
        for batch in arguments.batches:
            if page * batch > MOST_BYTES:
                continue
            for make in peers:
                with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="kv-") as name:
                    directory = Path(name)
                    contenders = make(directory, page, batch) + of_fio(directory, page, batch)
                    batches = max(1, min(TURN_BATCHES, TURN_BYTES // (page * batch)))
                    with ThreadPoolExecutor(1) as other:
                        run = other.submit if make is of_sglang else _here
                        asked = run(measure, contenders, directory, arguments.repeats, batches)
                        found = asked.result()
                    for contender in contenders:
                        contender.close()
                for verb, times in found.items():
                    for contender, seconds in zip(contenders, times, strict=True):
                        rate, ratio = page * batch / seconds / 1e9, seconds / times[0]
                        row = f"{page:>9} {batch:>5} {verb:6} {contender.name:12}"
                        print(f"{row} {rate:6.2f} {ratio:8.2f}x", flush=True)


if __name__ == "__main__":
    main()
