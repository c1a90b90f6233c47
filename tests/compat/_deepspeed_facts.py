"""What the op does that DeepSpeed has loaded, case by case; nothing here of nvmeio.

    python _deepspeed_facts.py RESULT.json DIRECTORY

Each case runs in a child of its own, for DeepSpeed's op may abort it.
"""

from __future__ import annotations

import codecs
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

CASES: dict[str, Callable[[Any, str], Any]] = {}
PAGE = 4096


def case(function: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    CASES[function.__name__] = function
    return function


def counting(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes).remainder(251).to(torch.uint8)


def locked(handle: Any, nbytes: int) -> torch.Tensor:
    tensor: torch.Tensor = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    return tensor.zero_()


def is_right(path: str, tensor: torch.Tensor) -> bool:
    return Path(path).read_bytes() == tensor.numpy().tobytes()


# What both do


@case
def settings(op: Any, path: str) -> Any:
    found = []
    for arguments in ((), (1 << 16, 16, True, True, 2)):
        handle = op.aio_handle(*arguments)
        names = ("block_size", "queue_depth", "single_submit", "overlap_events")
        found.append([getattr(handle, f"get_{name}")() for name in names])
        found.append([handle.get_intra_op_parallelism(), handle.get_alignment()])
    return found


@case
def returned(op: Any, path: str) -> Any:
    handle = op.aio_handle(queue_depth=8)
    tensor = locked(handle, PAGE)
    return [
        handle.sync_pwrite(tensor, path),
        handle.sync_pread(tensor, path),
        handle.async_pwrite(tensor, path),
        handle.async_pread(tensor, path),
        handle.wait(),
        handle.pwrite(tensor, path, False, True),
        handle.pread(tensor, path, validate=False, **{"async": True}),
        handle.sync_pwrite(tensor, path),  # waits for the two before it
        handle.async_pwrite(tensor, path),
        handle.write(tensor, path, True),
        handle.read(tensor, path, True),  # which leave that one pending
        handle.wait(),
        op.aio_write(tensor, path, 1 << 20, 8, False, True, True),
        op.aio_read(tensor, path, 1 << 20, 8, False, True, True),
    ]


@case
def descriptor(op: Any, path: str) -> Any:
    handle = op.aio_handle(queue_depth=8)
    tensor = locked(handle, PAGE).fill_(7)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    found = [handle.async_pwrite(tensor, fd), handle.async_pwrite(tensor, fd=fd, file_offset=PAGE)]
    found += [handle.wait(), os.fstat(fd).st_size, is_right(path, tensor.repeat(2))]
    return found


@case
def pinned(op: Any, path: str) -> Any:
    one, other, pins = op.aio_handle(), op.aio_handle(), PinMemoryBuilder().load().pin_handle()
    found = []
    for owner in (one, pins):
        tensor = owner.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.float16))
        found.append([str(tensor.dtype), list(tensor.shape), tensor.data_ptr() % 4096])
        for asked in (one, other, pins):
            found.append([asked.is_pinned(tensor), asked.is_pinned(tensor[3:9])])
            found.append([asked.is_pinned(torch.empty(3)), asked.is_pinned(torch.Tensor())])
        found.append([other.free_cpu_locked_tensor(torch.empty(4))])
        found.append([other.free_cpu_locked_tensor(tensor)])
    tensor = pins.new_cpu_locked_tensor(1000, torch.empty(0))
    found.append([pins.free_cpu_locked_tensor_by_ptr(a) for a in (12345, tensor.data_ptr())])
    found.append([one.is_pinned(tensor)])
    return found


@case
def public_methods(op: Any, path: str) -> Any:
    handles = (op.aio_handle, PinMemoryBuilder().load().pin_handle)
    return [[n for n in dir(h) if n[0] != "_" and n != "nvmeio"] for h in handles]


@case
def string_as_a_file_name_is_needed(op: Any, path: str) -> Any:
    return op.aio_handle().sync_pwrite(torch.empty(512), 1.5)


# What only one of them does


@case
def wait_with_nothing_pending(op: Any, path: str) -> Any:
    return op.aio_handle().wait()


@case
def missing_file(op: Any, path: str) -> Any:
    return op.aio_handle().async_pread(torch.empty(512), path)


@case
def missing_directory(op: Any, path: str) -> Any:
    return op.aio_handle().sync_pwrite(torch.empty(512), f"{path}/there/is/none")


@case
def buffer_larger_than_the_file(op: Any, path: str) -> Any:
    Path(path).write_bytes(bytes(512))
    return op.aio_handle().sync_pread(torch.empty(1024), path)


@case
def read_of_a_part_of_the_file(op: Any, path: str) -> Any:
    handle = op.aio_handle()
    Path(path).write_bytes(counting(2 * PAGE).numpy().tobytes())
    target = locked(handle, PAGE)
    return [handle.read(target, path, False), torch.equal(target, counting(PAGE))]


@case
def size_no_multiple_of_the_parallelism(op: Any, path: str) -> Any:
    return op.aio_handle(intra_op_parallelism=2).sync_pwrite(counting(10_001), path)


@case
def write_of_a_size_no_multiple_of_512(op: Any, path: str) -> Any:
    source = counting(10_000)
    return [op.aio_handle().sync_pwrite(source, path), is_right(path, source)]


@case
def read_from_an_unaligned_offset(op: Any, path: str) -> Any:
    Path(path).write_bytes(counting(2 * PAGE).numpy().tobytes())
    target = torch.zeros(1024, dtype=torch.uint8)
    done = op.aio_handle().sync_pread(target, path, 100)
    return [done, torch.equal(target, counting(2 * PAGE)[100:1124])]


@case
def read_into_page_locked_memory_at_an_odd_address(op: Any, path: str) -> Any:
    Path(path).write_bytes(counting(PAGE).numpy().tobytes())
    handle = op.aio_handle()
    target = locked(handle, 4 * PAGE)[12 : 12 + PAGE]
    return [handle.sync_pread(target, path), torch.equal(target, counting(PAGE))]


@case
def write_of_ordinary_memory(op: Any, path: str) -> Any:
    memory = counting(2 * PAGE)
    skip = (64 - memory.data_ptr()) % 512  # as large tensors of torch's lie, 64 behind a page
    source = memory[skip : skip + PAGE]
    return [op.aio_handle().write(source, path, True), is_right(path, source)]


@case
def write_of_a_matrix_in_ordinary_memory(op: Any, path: str) -> Any:
    source = counting(PAGE).view(64, 64)
    return [op.aio_handle().sync_pwrite(source, path), is_right(path, source.reshape(-1))]


@case
def file_size_limit(op: Any, path: str) -> Any:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    handle = op.aio_handle()
    return handle.sync_pwrite(locked(handle, 1 << 20), path)


@case
def read_into_a_parameter(op: Any, path: str) -> Any:
    Path(path).write_bytes(bytes(PAGE))
    parameter = torch.nn.Parameter(torch.ones(PAGE // 4))
    return [op.aio_handle().sync_pread(parameter, path), bool((parameter == 0).all())]


@case
def handle_dropped_with_a_transfer_pending(op: Any, path: str) -> Any:
    handle = op.aio_handle()
    handle.async_pwrite(locked(handle, 1 << 22), path)
    del handle
    return "dropped"


@case
def locked_memory_limit(op: Any, path: str) -> Any:
    if os.geteuid() == 0:
        codecs.lookup("ascii")  # nobody may not read root's Python from here on
        os.setuid(65534)  # root may lock as much as it likes
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
    return op.aio_handle().new_cpu_locked_tensor(1 << 20, torch.empty(0)).numel()


@case
def memcpy_of_a_matrix(op: Any, path: str) -> Any:
    target = torch.zeros(20, 30)
    done = op.deepspeed_memcpy(target, torch.ones(20, 30))
    return [done, int(target.sum())]


@case
def switches_as_strings(op: Any, path: str) -> Any:
    return op.aio_handle(1 << 20, 8, "false").get_single_submit()


def in_a_child(run: Callable[[], Any]) -> Any:
    """What it returns, or {"raises": …}, or {"dies": signal}."""
    near, far = os.pipe()
    child = os.fork()
    if not child:
        try:
            outcome: Any = run()
        except Exception as raised:
            outcome = {"raises": type(raised).__name__}
        os.write(far, json.dumps(outcome).encode())
        os._exit(0)
    os.close(far)
    with os.fdopen(near) as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(answer) if answer else {"dies": signal.Signals(-code).name}


def main() -> None:
    result, directory = Path(sys.argv[1]), Path(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    op = AsyncIOBuilder().load()
    PinMemoryBuilder().load()
    found = {
        name: in_a_child(lambda run=run, name=name: run(op, str(directory / name)))  # type: ignore[misc]
        for name, run in CASES.items()
    }
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
