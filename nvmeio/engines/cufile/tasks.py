"""Requests to cuFile, the tasks that they are cut into, and the calls that move one.

A write's unaligned head and tail do not go through cuFile, which would read the block, change it
and write it back over a neighbour's bytes. They are copied to the host and written through the page
cache, as on the AIO path.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from dataclasses import dataclass
from typing import Any

import torch

from nvmeio._memory import copy_on_write
from nvmeio._memory.devices import Copier
from nvmeio._pages import PAGE_BYTES
from nvmeio.engines._queued import DeviceRequest, QueuedEngine
from nvmeio.engines.base import CompletionQueue, DeviceTransfer, Opcode, Transfer
from nvmeio.engines.cufile.library import CuFileFailure, Library
from nvmeio.engines.cufile.registry import Files, RegisteredRegion
from nvmeio.errors import TransferError, errno_of


class CuFileRequest(DeviceRequest):
    """A request with what is left of it."""

    def __init__(
        self, engine: QueuedEngine[Any], token: int, transfer: Transfer, cq: CompletionQueue
    ) -> None:
        super().__init__(engine, token, transfer, cq)
        span_start, span_end = transfer.span_start, transfer.span_end
        end = transfer.file_offset + transfer.nbytes
        if transfer.opcode == Opcode.READ:  # not the aligned span around it: cuFile takes any
            span_start, span_end = transfer.file_offset, end
        self.next = span_start
        self.end = span_end
        # A write's head and tail, in the file.
        self.edges = [
            (first, last)
            for first, last in ((transfer.file_offset, span_start), (span_end, end))
            if first < last
        ]
        self.region: RegisteredRegion | None = None
        self.lost = False  # given up with a call under way, which keeps memory and file
        self.held: Any = None  # then, on the memory's storage

    @property
    def exhausted(self) -> bool:
        """Whether no further task of it is to be begun."""
        return self.stop or (self.next >= self.end and not self.edges)

    def cut(self, task_bytes: int) -> CuFileTask:
        """The next task of it, with the engine's condition held."""
        if self.edges:
            return CuFileTask(self, *self.edges.pop(), True)
        start = self.next
        end = min((start // task_bytes + 1) * task_bytes, self.end)
        self.next = end
        return CuFileTask(self, start, end, False)


@dataclass(eq=False)
class CuFileTask:
    """File range [start, end) of a request; an edge goes through the host."""

    request: CuFileRequest
    start: int
    end: int
    edge: bool


class TaskMover:
    """Moves tasks, in whatever thread calls it; without the engine's condition held.

    Args:
        library: cuFile, with its driver open.
        files: What cuFile knows of files.
        copier: The device's copies, for the edges of writes and for contexts.
        condition: The engine's, which guards its requests.
        mode: Which way bytes go at best, as `GdsHandle.mode` says it.
    """

    def __init__(
        self,
        library: Library,
        files: Files,
        copier: Copier,
        condition: threading.Condition,
        mode: str,
    ) -> None:
        self._library = library
        self._files = files
        self._copier = copier
        self._condition = condition
        self._reaches_drive = mode in ("gds", "p2p")

    def run(self, task: CuFileTask) -> None:
        """Move a task's bytes; failures are the request's."""
        request = task.request
        memory = request.transfer.memory
        try:
            if request.stop:
                return
            if memory.device is not None:
                self._copier.enter(memory.device.device)
            if task.edge:
                self._write_edge(task)
            else:
                self._move(task)
        except OSError as failed:
            request.fail(errno_of(failed), failed if isinstance(failed, TransferError) else None)
        except Exception as failed:  # cuFile's have an errno
            request.fail(getattr(failed, "errno", errno.EIO), failed)

    def _move(self, task: CuFileTask) -> None:
        request, transfer = task.request, task.request.transfer
        fd = transfer.direct_fd if transfer.direct_fd >= 0 else transfer.buffered_fd
        handle = self._files.handle(self._library, transfer.opened, fd)
        memory = transfer.address - transfer.file_offset  # plus the offset in the file
        base = self._base(request)
        move = self._library.read if transfer.opcode == Opcode.READ else self._library.write
        at = task.start
        if transfer.opcode == Opcode.READ and transfer.memory.device is None:
            copy_on_write.give_up(memory + at, task.end - at)
        while at < task.end and not request.stop:
            address = memory + at
            start = address if base is None else base
            moved = move(handle, start, task.end - at, at, address - start)
            if moved > task.end - at:
                raise CuFileFailure(errno.EIO, f"cuFile moved {moved} bytes of {task.end - at}")
            self._count(task, moved)
            at += moved
            if moved:
                continue
            if transfer.opcode == Opcode.WRITE:
                raise CuFileFailure(errno.EIO, "cuFileWrite moved nothing and reported no error")
            size = os.fstat(fd).st_size
            if at < size:
                # Seen where libcuda is broken: no bytes, and no error either.
                raise CuFileFailure(
                    errno.EIO, f"cuFileRead moved nothing at byte {at} of a file of {size}"
                )
            with self._condition:
                request.next = request.end  # the file ends here: nothing lies behind
            return

    @staticmethod
    def _base(request: CuFileRequest) -> int | None:
        """The address that names memory: its registration's base; None for each call's own.

        Registered memory counts as such only by its base. But of host memory cuFile (1.20) looks
        at the base's alignment alone: with an aligned base and an odd offset it hands the kernel
        a misaligned direct transfer, and answers the kernel's EINVAL with -1 and a stale errno.
        """
        region = request.region
        if region is None or request.transfer.memory.device is None:
            return None
        return region.base

    def _write_edge(self, task: CuFileTask) -> None:
        transfer = task.request.transfer
        start = task.start - transfer.file_offset
        data = self._host_bytes(transfer, start, task.end - task.start)
        done = 0
        while done < len(data):
            done += os.pwrite(transfer.opened.buffered_fd(), data[done:], task.start + done)
        with self._condition:
            if not task.request.done:
                task.request.buffered += done

    def _host_bytes(self, transfer: DeviceTransfer, start: int, nbytes: int) -> bytes:
        device = transfer.memory.device
        if device is None:
            return transfer.memory.read(start, nbytes)
        chunk = torch.empty(nbytes, dtype=torch.uint8)
        self._copier.download(chunk, device[start : start + nbytes]).wait()
        return ctypes.string_at(chunk.data_ptr(), nbytes)

    def _count(self, task: CuFileTask, moved: int) -> None:
        request, transfer = task.request, task.request.transfer
        address = transfer.address + task.start - transfer.file_offset
        aligned = not any(n % PAGE_BYTES for n in (task.start, task.end, address))
        with self._condition:
            if request.done:
                return  # given up; what comes later is nobody's
            if self._reaches_drive and transfer.direct_fd >= 0 and aligned:
                request.direct += moved
            elif transfer.direct_fd >= 0:
                request.bounced += moved
            else:
                request.buffered += moved
