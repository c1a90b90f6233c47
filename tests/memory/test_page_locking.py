"""Page-locked memory: limits, who may unlock it and when, forks, and CUDA played by a stand-in."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import sys
import textwrap
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest
import torch
from memory.facts import MIB, PAGE, is_mapped, none_more, run_python, status_bytes
from support import collect, spin_until_collected

from nvmeio import buffers
from nvmeio._memory import mappings as mappings_module
from nvmeio._memory import system

# Page-locking


@pytest.fixture
def locked_before(lockable: None) -> Iterator[int]:
    collect()
    before = status_bytes("VmLck")
    yield before
    spin_until_collected(lambda: status_bytes("VmLck") <= before)


def test_empty_pinned_locks_and_free_pinned_unlocks_now(locked_before: int) -> None:
    tensor = buffers.empty_pinned(3, MIB // 4, dtype=torch.float32)
    assert tensor.shape == (3, MIB // 4)
    assert status_bytes("VmLck") - locked_before == 3 * MIB
    assert buffers.is_pinned(tensor)
    tensor.fill_(1.5)
    buffers.free_pinned(tensor)
    assert status_bytes("VmLck") == locked_before
    assert not buffers.is_pinned(tensor)
    assert bool((tensor == 1.5).all())  # still valid
    assert buffers.owns(tensor.data_ptr(), tensor.nbytes)


def test_the_last_view_unlocks(locked_before: int) -> None:
    tensor = buffers.empty_pinned(MIB, dtype=torch.uint8)
    address = tensor.data_ptr()
    view = tensor[5:]
    del tensor
    assert buffers.is_pinned(view)
    assert status_bytes("VmLck") > locked_before
    del view
    assert status_bytes("VmLck") == locked_before
    assert address not in mappings_module.pinned
    assert not mappings_module.locked.covers(address, 1)


def test_mlock_without_mlock2_does_as_well(
    locked_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: object) -> int:
        ctypes.set_errno(errno.ENOSYS)
        return -1

    monkeypatch.setattr(system.libc, "mlock2", missing)
    tensor = buffers.empty_pinned(MIB, dtype=torch.uint8)
    assert status_bytes("VmLck") - locked_before == MIB
    assert buffers.is_pinned(tensor)


def test_free_pinned_accepts_any_view_that_starts_at_the_base(locked_before: int) -> None:
    for view in (
        lambda t: t,
        lambda t: t[:7],
        lambda t: t.view(torch.uint8),
        lambda t: t.view(2, 32)[0],
        lambda t: torch.from_numpy(t.numpy())[::3],
        lambda t: t[:0],
    ):
        tensor = buffers.empty_pinned(64)
        buffers.free_pinned(view(tensor))
        assert not buffers.is_pinned(tensor)
    empty = buffers.empty_pinned(0, 4)
    assert buffers.is_pinned(empty)
    buffers.free_pinned(empty)
    assert not buffers.is_pinned(empty)


def test_free_pinned_refuses_what_is_not_a_locked_tensor_of_ours(lockable: None) -> None:
    tensor = buffers.empty_pinned(64)
    with pytest.raises(ValueError, match="view into the middle"):
        buffers.free_pinned(tensor[1:])
    assert buffers.is_pinned(tensor)
    buffers.free_pinned(tensor)
    with pytest.raises(ValueError, match="freed before"):
        buffers.free_pinned(tensor)
    with pytest.raises(ValueError, match="empty_aligned"):
        buffers.free_pinned(buffers.empty_aligned(4))
    for ordinary in (torch.empty(4), torch.empty(0), torch.empty(4, device="meta")):
        with pytest.raises(ValueError, match="not page-locked by nvmeio"):
            buffers.free_pinned(ordinary)
    with pytest.raises(TypeError, match=r"torch\.Tensor, not bytearray"):
        buffers.free_pinned(bytearray(4))  # type: ignore[arg-type]


def test_of_many_threads_that_free_one_tensor_exactly_one_succeeds(locked_before: int) -> None:
    tensor = buffers.empty_pinned(64)
    barrier = threading.Barrier(8)
    outcomes: list[str] = []

    def free() -> None:
        barrier.wait(100)
        try:
            buffers.free_pinned(tensor)
            outcomes.append("freed")
        except ValueError:
            outcomes.append("refused")

    threads = [threading.Thread(target=free) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["freed"] + ["refused"] * 7


def test_is_pinned_looks_at_the_memory_not_at_the_object(lockable: None) -> None:
    tensor = buffers.empty_pinned(64, 64)
    for view in (
        tensor[3],
        tensor[:, 1],
        tensor.t(),
        tensor[::7, 5::3],
        tensor.view(torch.int16),
        tensor.expand(2, 64, 64),
        tensor[5, 5],
        torch.from_numpy(tensor.numpy()),
        tensor[:0],
        tensor.detach(),
    ):
        assert buffers.is_pinned(view)
    assert not buffers.is_pinned(tensor.clone())
    assert not buffers.is_pinned(buffers.empty_aligned(4))
    assert not buffers.is_pinned(torch.empty(4))
    assert not buffers.is_pinned(torch.empty(0))
    assert not buffers.is_pinned(torch.empty(4, device="meta"))
    assert not buffers.is_pinned(torch.eye(4).to_sparse())
    with pytest.raises(TypeError, match=r"torch\.Tensor, not int"):
        buffers.is_pinned(3)  # type: ignore[arg-type]


def test_new_locked_takes_the_dtype_from_a_tensor_or_a_dtype(lockable: None) -> None:
    tensor = buffers.new_locked(10, torch.empty(3, 3, dtype=torch.bfloat16))
    assert (tensor.shape, tensor.dtype) == ((10,), torch.bfloat16)
    assert buffers.is_pinned(tensor)
    assert buffers.new_locked(7, torch.int64).dtype == torch.int64
    assert buffers.new_locked(0, torch.int64).shape == (0,)
    assert (
        buffers.new_locked(2, torch.empty(1, device="meta", dtype=torch.int8)).dtype == torch.int8
    )


@pytest.mark.parametrize(
    ("num_elem", "example", "kind", "says"),
    [
        (-1, torch.int8, ValueError, "num_elem must be 0 or more, not -1"),
        (1.5, torch.int8, TypeError, "num_elem must be an int, not float: 1.5"),
        (True, torch.int8, TypeError, "num_elem must be an int, not bool"),
        ("4", torch.int8, TypeError, "num_elem must be an int, not str"),
        (4, "int8", TypeError, r"torch\.Tensor or a torch\.dtype, not 'int8'"),
        (4, None, TypeError, r"torch\.Tensor or a torch\.dtype, not None"),
    ],
)
def test_new_locked_says_what_was_wrong(
    num_elem: object, example: object, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        buffers.new_locked(num_elem, example)  # type: ignore[arg-type]


# The lock limit

# Root may lock without limit (CAP_IPC_LOCK, man 7 capabilities), so the script drops that first.
UNPRIVILEGED = """
import ctypes, os, resource, sys
import torch
from nvmeio._memory import mappings
from nvmeio import buffers
from nvmeio._pages import PAGE_BYTES
from nvmeio.errors import TransferError
from nvmeio.pool import PinnedPool

CAP_IPC_LOCK = 14

def limit_to(soft, hard):
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice 32 bits
    libc = ctypes.CDLL(None)
    libc.capget(header, sets)
    for index in (0, 1, 2):
        sets[index] &= ~(1 << CAP_IPC_LOCK)
    libc.capset(header, sets)
    for line in open("/proc/thread-self/status"):
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> CAP_IPC_LOCK & 1:
            print("SKIP: CAP_IPC_LOCK cannot be dropped here")
            sys.exit()
"""


def run_unprivileged(script: str) -> dict[str, str]:
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard != resource.RLIM_INFINITY and hard < 2 * MIB and os.geteuid() != 0:
        pytest.skip("the hard limit RLIMIT_MEMLOCK is below the 2 MiB that this test sets")
    done = run_python(UNPRIVILEGED + textwrap.dedent(script))
    if done.stdout.startswith("SKIP"):
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_a_lock_limit_hit_names_the_limit_and_how_to_raise_it() -> None:
    found = run_unprivileged(
        """
        limit_to(1 << 20, 2 << 20)
        held = buffers.empty_pinned(PAGE_BYTES, dtype=torch.uint8)
        rss = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
        before = rss()
        try:
            buffers.new_locked(64 << 20, torch.uint8)
        except OSError as error:
            print(f"errno={error.errno}")
            print(f"transfer={isinstance(error, TransferError)}")
            print(f"text={error}")
            print(f"grown={rss() - before}")
        print(f"held={buffers.is_pinned(held)}")
        print(f"entries={len(mappings.locked)},{len(mappings.pinned)}")
        print(f"still={buffers.is_pinned(buffers.empty_pinned(4096))}")
        """
    )
    assert found["errno"] == str(errno.ENOMEM)
    assert found["transfer"] == "False"
    text = found["text"]
    for part in (
        f"page-lock {64 * MIB} bytes",
        "RLIMIT_MEMLOCK is 1048576 bytes (hard limit 2097152 bytes)",
        f"{PAGE} bytes locked",
        "ulimit -l",
        "/etc/security/limits.conf",
        "LimitMEMLOCK",
        "--ulimit memlock=-1",
        "does not need locked memory",
        "empty_aligned is as fast",
    ):
        assert part in text
    assert int(found["grown"]) < 8 * MIB  # refused before it was touched
    assert found["held"] == found["still"] == "True"
    assert found["entries"] == "1,1"


def test_a_process_that_may_lock_nothing_is_told_so_and_everything_else_works() -> None:
    found = run_unprivileged(
        """
        limit_to(0, 0)
        try:
            buffers.empty_pinned(4)
        except OSError as error:
            print(f"kind={type(error).__name__},{error.errno}")
            print(f"text={error}")
        print(f"aligned={buffers.empty_aligned(4 << 20).shape[0]}")
        with PinnedPool(8 << 20) as pool:
            with pool.take(1 << 20) as tensor:
                tensor.fill_(3)
                print(f"pool={pool.locked},{buffers.is_pinned(tensor)},{int(tensor[-1])}")
        """
    )
    assert found["kind"] == f"PermissionError,{errno.EPERM}"
    assert "RLIMIT_MEMLOCK is 0 bytes (hard limit 0 bytes)" in found["text"]
    assert found["aligned"] == str(4 << 20)
    assert found["pool"] == "False,False,3"


# Fork


def test_a_forked_child_has_the_memory_but_not_the_locks(lockable: None) -> None:
    done = run_python(
        """
        import os, torch
        from nvmeio import buffers
        tensor = buffers.empty_pinned(4096, dtype=torch.uint8)
        tensor.fill_(5)
        child = os.fork()
        if child == 0:
            fine = not buffers.is_pinned(tensor) and buffers.owns(tensor.data_ptr(), 4096)
            fine = fine and int(tensor[-1]) == 5
            try:
                buffers.free_pinned(tensor)
                fine = False
            except ValueError:
                pass
            again = buffers.empty_pinned(4)
            fine = fine and buffers.is_pinned(again)
            os._exit(0 if fine else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, buffers.is_pinned(tensor))
        """
    )
    assert (done.returncode, done.stdout) == (0, "0 True\n"), done.stderr


# CUDA, played


class FakeRuntime:
    """Stands in for torch.cuda.cudart()."""

    def __init__(self, register: int = 0, unregister: int = 0) -> None:
        self.results = (register, unregister)
        self.known: dict[int, int] = {}
        self.device = 3

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 0
        if self.results[0] == 0:
            self.known[address] = nbytes
        return self.results[0]

    def cudaHostUnregister(self, address: int) -> int:
        assert self.device == 3  # where it was registered
        return 713 if self.known.pop(address, None) is None else self.results[1]

    def cudaGetErrorString(self, error: int) -> str:
        return f"fake error {error}"


def play_cuda(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> FakeRuntime:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    in_use = (3).__eq__
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", in_use, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", runtime.on)
    return runtime


def test_locked_memory_is_registered_with_cuda_until_freed(
    monkeypatch: pytest.MonkeyPatch, locked_before: int
) -> None:
    runtime = play_cuda(monkeypatch, FakeRuntime())
    first, second = (buffers.empty_pinned(PAGE, dtype=torch.uint8) for _ in range(2))
    address, other = first.data_ptr(), second.data_ptr()
    assert runtime.known == {address: PAGE, other: PAGE}
    buffers.empty_aligned(4)
    buffers.free_pinned(first)
    assert runtime.known == {other: PAGE}
    del first
    view = second[7:]
    del second
    assert runtime.known == {other: PAGE}
    runtime.device = 0  # the thread of the last view is on another one
    del view
    assert runtime.known == {}


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a destructor raises is dropped: pytest keeps it, and with it the object."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def test_an_interrupted_destructor_leaves_no_entry(
    monkeypatch: pytest.MonkeyPatch, unraisable: None
) -> None:
    """Python goes on after a KeyboardInterrupt there: nobody would do it again."""
    registry, calls = mappings_module.mapped, []

    class Interrupted:
        def remove(self, address: int) -> None:
            calls.append(address)
            if len(calls) == 1:
                raise KeyboardInterrupt
            registry.remove(address)

    collect()
    mapping = mappings_module.Mapping(4096)
    address = mapping.address
    assert registry.covers(address, 1)
    monkeypatch.setattr(mappings_module, "mapped", Interrupted())
    del mapping
    assert not registry.covers(address, 1)
    assert calls == [address, address]


def test_a_destructor_that_never_began_leaves_no_entry(lockable: None, unraisable: None) -> None:
    """Ctrl-C may take all of it: the address would have been known as ours, and as locked."""
    destructor = mappings_module.Mapping.__del__.__code__
    taken = []

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code is destructor:
            taken.append(frame.f_locals["self"].address)
            raise KeyboardInterrupt

    collect()
    before = (
        len(mappings_module.mapped),
        len(mappings_module.locked),
        len(mappings_module.pinned),
    )
    mapping = mappings_module.Mapping(PAGE)
    mapping.lock()
    address = mapping.address
    tracing = sys.gettrace()
    sys.settrace(interrupt)
    try:
        del mapping
    finally:
        sys.settrace(tracing)
    assert taken == [address]
    assert not mappings_module.mapped.covers(address, 1) and not mappings_module.locked.covers(
        address, 1
    )
    assert address not in mappings_module.pinned and address not in mappings_module.alive
    assert none_more(
        before,
        (len(mappings_module.mapped), len(mappings_module.locked), len(mappings_module.pinned)),
    )


def test_what_a_destructor_left_is_known_before_its_address_is_free(
    monkeypatch: pytest.MonkeyPatch, unraisable: None
) -> None:
    """Another thread may be given it at once, and register it anew."""
    seen = []

    class Died(SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            seen.append(is_mapped(address))
            super().put(item)

    class Interrupted:
        def remove(self, address: int) -> None:
            raise KeyboardInterrupt

    collect()
    registry = mappings_module.mapped
    monkeypatch.setattr(mappings_module, "died", Died())
    mapping = mappings_module.Mapping(4 * MIB)
    address = mapping.address
    monkeypatch.setattr(mappings_module, "mapped", Interrupted())
    del mapping
    monkeypatch.setattr(mappings_module, "mapped", registry)
    assert seen == [True]
    assert not registry.covers(address, 1)


@pytest.mark.parametrize("at", ["locked", "CUDA", "after CUDA", "munlock"])
def test_unlocking_that_is_interrupted_is_gone_on_with(
    at: str, monkeypatch: pytest.MonkeyPatch, locked_before: int
) -> None:
    """The entry went first: what was left stayed locked, known to CUDA and known as locked."""
    runtime = FakeRuntime()
    play_cuda(monkeypatch, runtime)
    tensor = buffers.empty_pinned(PAGE, dtype=torch.uint8)
    address = tensor.data_ptr()

    def once(thing: Any, name: str, after: bool = False) -> None:
        call = getattr(thing, name)

        def cut(*arguments: Any) -> Any:
            monkeypatch.setattr(thing, name, call)
            if after:
                call(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(thing, name, cut)

    if at == "locked":
        once(mappings_module.locked, "remove")
    elif at == "munlock":
        once(system.libc, "munlock")
    else:
        once(runtime, "cudaHostUnregister", after=at != "CUDA")
    with pytest.raises(KeyboardInterrupt):
        buffers.free_pinned(tensor)
    buffers.free_pinned(tensor)
    assert not buffers.is_pinned(tensor) and address not in mappings_module.pinned
    assert runtime.known == {}
    assert status_bytes("VmLck") == locked_before


def test_a_refusal_by_cuda_leaves_nothing_locked(
    monkeypatch: pytest.MonkeyPatch, locked_before: int
) -> None:
    play_cuda(monkeypatch, FakeRuntime(register=2))
    taken: list[int] = []

    def take() -> None:
        taken.append(1)

    monkeypatch.setattr(system.libc, "cudaGetLastError", take, raising=False)
    with pytest.raises(
        OSError, match=f"cudaHostRegister of {PAGE} bytes failed: fake error 2"
    ) as info:
        buffers.empty_pinned(PAGE, dtype=torch.uint8)
    assert info.value.errno == errno.EIO
    assert taken == [1]  # or the thread's next kernel would be told to have failed
    assert status_bytes("VmLck") == locked_before
    play_cuda(monkeypatch, FakeRuntime(unregister=1))
    tensor = buffers.empty_pinned(4096, dtype=torch.uint8)
    with pytest.raises(OSError, match="cudaHostUnregister"):
        buffers.free_pinned(tensor)
    assert not buffers.is_pinned(tensor)


def test_memory_of_a_device_that_failed_is_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch, locked_before: int
) -> None:
    """No memory could be had any more, not even to save what was computed."""

    def failed(device: int) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    play_cuda(monkeypatch, FakeRuntime())
    first, second = (buffers.empty_pinned(PAGE, dtype=torch.uint8) for _ in range(2))
    monkeypatch.setattr(torch.cuda, "device", failed)
    with pytest.raises(OSError, match=r"Unregister of \d+ bytes failed: CUDA error: an illegal"):
        buffers.free_pinned(first)
    address = second.data_ptr()
    del second
    spin_until_collected(lambda: not buffers.owns(address, 1))
    assert not buffers.is_pinned(first)
    assert status_bytes("VmLck") == locked_before
    buffers.empty_aligned(PAGE, dtype=torch.uint8).zero_()


def test_cuda_that_cannot_be_initialised_is_left_out(
    monkeypatch: pytest.MonkeyPatch, lockable: None
) -> None:
    def cudart() -> object:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    assert buffers.is_pinned(buffers.empty_pinned(4))


def test_cuda_is_not_touched_before_it_is_in_use() -> None:
    done = run_python(
        """
        import torch
        def refuse(*arguments):
            raise AssertionError("CUDA was touched")
        torch.cuda.is_available = torch.cuda.cudart = torch.cuda._lazy_init = refuse
        torch.cuda.init = refuse
        import nvmeio
        from nvmeio import buffers
        tensor, locked = buffers.empty_aligned(4), buffers.empty_pinned(4)
        pool = nvmeio.PinnedPool(4096)
        print(buffers.is_pinned(tensor), buffers.owns(tensor.data_ptr(), 16))
        """
    )
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_itself_knows_the_memory() -> None:
    device = torch.ones(1, device="cuda")  # in use
    tensor = buffers.empty_pinned(MIB)
    assert tensor.is_pinned() and tensor[5:].is_pinned()
    device = tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert not buffers.is_pinned(device)
    assert buffers.is_pinned(torch.empty(8, pin_memory=True))
    buffers.free_pinned(tensor)
    assert not tensor.is_pinned()
