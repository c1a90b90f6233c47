"""Memory as it was at one moment, despite later writes: the kernel's write protection.

`WriteProtection` covers whole pages of the caller's memory. A writer waits there while a thread of
the shim copies the 2 MiB around it aside: an optimizer, ``.data``, numpy, a raw pointer, another
thread. See native_shim/protection/copy_on_write.c.

It needs userfaultfd(2) with write protection of pages that may not exist yet (Linux 6.4), and one
of these:

- the right to handle faults of the kernel: CAP_SYS_PTRACE, ``vm.unprivileged_userfaultfd=1``, or
  access to ``/dev/userfaultfd``. A system call that writes to protected memory is then a write
  like any other;
- else faults of programs alone. Then a system call that writes to protected memory (``readinto`` of
  a file, a socket's ``recv``) fails with EFAULT, so this is used only where somebody asks for it.

Containers forbid the call by their default seccomp profile.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nvmeio._bindings import protection
from nvmeio._memory import mappings
from nvmeio._pages import PAGE_BYTES, round_down, round_up
from nvmeio.errors import IntegrityError, TransferError

if TYPE_CHECKING:
    from nvmeio._memory.mappings import Mapping

# Smaller memory is copied at once: to protect it costs two calls of the kernel, and its first write
# a third. Measured: 128 KiB are copied in the time of the two calls (6 us).
LEAST_BYTES = 128 << 10

# Each range of memory is one more mapping to the kernel, of which a process may have 65,530.
MOST_RANGES = 8192

_WHY = {
    errno.EOPNOTSUPP: "this kernel lacks a feature of userfaultfd",
    errno.ENOTUNIQ: "the kernel merges equal pages of this process (KSM, PR_SET_MEMORY_MERGE; "
    "systemd: MemoryKSM=no), and forgets their protection",
}

HOW_TO_ALLOW = (
    "allow it by `sysctl vm.unprivileged_userfaultfd=1`, by access to /dev/userfaultfd (such as "
    "`chmod 666`), or by CAP_SYS_PTRACE; in a container by a seccomp profile with userfaultfd"
)


class Support(NamedTuple):
    """Whether memory can be protected in this process.

    `kind` is "any" (all writes are seen), "user" (but system calls that write there fail) or
    "none". `attempts` are what was tried and failed: its name, and why.
    """

    kind: str
    attempts: tuple[tuple[str, str], ...]

    @property
    def reason(self) -> str:
        """Why not every write can be seen; "" if it can."""
        return (
            "" if self.kind == "any" else "; ".join(f"{way}: {why}" for way, why in self.attempts)
        )


def support() -> Support:
    """The kernel's permission for this process; tried once.

    ``NVMEIO_USERFAULTFD`` set to "user" or "none" leaves the others out.
    """
    return _support(os.getpid())


@functools.cache
def _support(_pid: int) -> Support:  # a forked child needs a descriptor of its own
    wanted = os.environ.get("NVMEIO_USERFAULTFD", "")
    attempts: list[tuple[str, str]] = []
    lib = protection.lib
    for kind, which, name in (
        ("any", lib.NV_SNAPSHOT_ANY_WRITE, "userfaultfd"),
        ("any", lib.NV_SNAPSHOT_DEVICE, "/dev/userfaultfd"),
        ("user", lib.NV_SNAPSHOT_USER_MODE, "userfaultfd for programs alone"),
    ):
        if wanted and kind != wanted:
            attempts.append((name, f"NVMEIO_USERFAULTFD={wanted}"))
            continue
        opened = lib.nv_snapshot_open(which)
        if opened >= 0:
            return Support(kind, tuple(attempts))
        attempts.append((name, _WHY.get(-opened) or os.strerror(-opened)))
    return Support("none", tuple(attempts))


class WriteProtection:
    """Ranges of memory, (address, nbytes) each, as they are when `protect` is called.

    The caller keeps the memory as long as this lives. Copies without room in memory go into a file
    without a name in `directory`. `taken` says of each range whether it will be protected. One that
    is not (another snapshot protects it, it is not private memory, it has no whole page) the caller
    has to copy.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], directory: str) -> None:
        kind = support().kind  # of this process: where there is none, nothing is taken
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        starts = [ranges[i][0] for i in order]
        addresses = protection.ffi.new("uint64_t[]", starts)
        sizes = protection.ffi.new("uint64_t[]", [ranges[i][1] for i in order])
        # Memory behind ours is protected with it if that disturbs nobody: to protect a part of a
        # huge page splits it, and each small page takes 0.1 us from then on. Not where system calls
        # that write there would fail.
        limits = protection.ffi.new("uint64_t[]", len(starts))
        if kind == "any":
            next_starts = (*starts[1:], 1 << 63)  # one too many if there are no ranges
            for place, (start, next_start) in enumerate(zip(starts, next_starts, strict=False)):
                limits[place] = min(mappings.mapped.end_of(start), next_start)
        results = protection.ffi.new("int[]", len(ranges))
        raw = protection.lib.nv_snapshot_new(
            len(ranges), addresses, sizes, limits, results, os.fsencode(directory or ".")
        )
        if raw == protection.ffi.NULL:
            raise MemoryError("no memory for a snapshot's tables")
        # Owned from here on, and ended by a C function: an interrupt may come after any step.
        self._raw: Any = protection.ffi.gc(raw, protection.lib.nv_snapshot_free)
        self._arena: Mapping | None = None
        taken = {i: results[place] == 0 for place, i in enumerate(order)}
        self.taken = [taken[i] for i in range(len(ranges))]

    def protect(self, arena: Mapping | None) -> bool:
        """Keep the memory as it is now; nobody changes it before this returns.

        Copies go into the arena; what finds no room there goes into a file. False if the kernel
        refuses; then this is over.
        """
        self._arena = arena
        address, nbytes = (0, 0) if arena is None else (arena.address, arena.nbytes)
        return bool(protection.lib.nv_snapshot_protect(self._raw, address, nbytes) == 0)

    def read(self, address: int, nbytes: int, to: int, crc: int | None) -> int:
        """Copy bytes of the moment of `protect`, within one range; each once, and in order.

        They go to the address `to`; if that is 0, they are summed and still to be read. A `crc`
        goes on with them if `crc32.CAN_COPY`; None is for no sum, and returns 0. Lets go of the
        GIL.

        Raises:
            OSError: A write came before they were read, there was no memory left to copy them
                aside, and the file failed (ENOSPC, EIO).
            TransferError: Something else in this process took the memory's protection, so its bytes
                are not known to be those of that moment.
        """
        total = protection.ffi.new("uint32_t *", crc or 0)
        failed = protection.lib.nv_snapshot_read(
            self._raw, address, nbytes, to, protection.ffi.NULL if crc is None else total
        )
        _check(failed)
        return int(total[0])

    def settle(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """Say that somebody else has read whole pages where they lie, in order; errors as `read`.

        Parts without a write until now were read as they were at the moment of `protect`, and are
        released. Returns address and size of each part that was written to: `read` has its bytes.
        """
        left = protection.ffi.new("uint64_t[2]")
        again = []
        end = address + nbytes
        while address < end:
            left[0], left[1] = address, end - address
            _check(protection.lib.nv_snapshot_settle(self._raw, left, left + 1))
            address = int(left[0] + left[1])
            if left[1]:
                again.append((int(left[0]), int(left[1])))
        return again

    def end(self) -> None:
        """Protect nothing any more. Idempotent, from any thread."""
        protection.lib.nv_snapshot_end(self._raw)

    @property
    def aside_bytes(self) -> int:
        """How much was copied aside, because somebody wrote there."""
        return int(self._counters().aside_bytes)

    @property
    def spilled_bytes(self) -> int:
        """How much of `aside_bytes` went into a file."""
        return int(self._counters().spilled_bytes)

    @property
    def held_s(self) -> float:
        """How long those who wrote were stopped, together, in seconds."""
        return float(self._counters().held_ns) * 1e-9

    def _counters(self) -> Any:
        counters = protection.ffi.new("nv_snapshot_counters *")
        protection.lib.nv_snapshot_count(self._raw, counters)
        return counters


def whole_pages(address: int, nbytes: int) -> int:
    """How many bytes of a range lie in whole pages."""
    return max(round_down(address + nbytes, PAGE_BYTES) - round_up(address, PAGE_BYTES), 0)


_LOST = {
    errno.EBADFD: "the memory being saved lost its protection: something in this "
    "process closed a descriptor of nvmeio's (os.closerange does), or gave memory of a tensor away "
    "by its address (madvise with MADV_DONTNEED, munmap). Keep it from that until the save is "
    "durable, or take snapshot='copy'",
    errno.EOWNERDEAD: "a thread that copies protected memory aside was ended, alone. A filter of "
    "system calls does that (SECCOMP_RET_KILL_THREAD): have it allow poll, read, ioctl, futex, "
    "openat and pwrite64, or take snapshot='copy'",
}


def _check(failed: int) -> None:
    if failed == -errno.ESTALE:
        raise IntegrityError("bytes of a snapshot were read twice", expected=1, found=2)
    if detail := _LOST.get(-failed):
        raise TransferError(-failed, operation="protect", path="userfaultfd", detail=detail)
    if failed:
        raise OSError(-failed, os.strerror(-failed))
