"""A "device" whose memory is host memory, and whose copies a test can hold, delay and fail.

Work on it is asked for in order and done by a thread of its own, so whoever does not wait for a
mark meets bytes that are not there yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import nvmeio
from nvmeio._memory import devices


class Mark:
    def __init__(self, failure: Exception | None = None) -> None:
        self.reached = threading.Event()
        self.failure = failure

    def done(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return self.reached.is_set()

    def wait(self) -> None:
        self.reached.wait()
        if self.failure is not None:
            raise self.failure


class FakeDevice:
    """A `Copier`, and the device behind it.

    Attributes:
        gate: Copies are made only while this is set.
        work: The caller's stream: `now` gives marks that are reached only while it is set.
        delay_s: What each copy takes.
        fail: Raised by the mark of the next copies, while it is not None.
        log: What was done, in order: ("upload" or "download", bytes).
        most_locked: Bytes of page-locked memory that were asked for.
        entered: Devices that threads have entered, with the threads' names.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.work = threading.Event()
        self.work.set()
        self.delay_s = 0.0
        self.fail: Exception | None = None
        self.refuse: Exception | None = None
        self.log: list[tuple[str, int]] = []
        self.most_locked = 0
        self.entered: list[tuple[torch.device, str]] = []
        self._memory: list[torch.UntypedStorage] = []
        self._asked: list[tuple[Mark, Callable[[], None]]] = []
        self._condition = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
        self._thread.start()

    # --- tensors

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        """A tensor "on the device" with these contents."""
        made = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype)
        made.copy_(data)
        return self.take(made)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """From now on this tensor's memory is the device's."""
        self._memory.append(tensor.untyped_storage())
        return tensor

    def has(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and any(
            tensor.untyped_storage().data_ptr() == mine.data_ptr() for mine in self._memory
        )

    # --- the copier

    def now(self, device: torch.device) -> Mark:
        mark = Mark()
        mark.reached = self.work
        return mark

    def page_locked(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self.refuse is not None:
            raise self.refuse
        self.most_locked += nbytes
        return nvmeio.empty_aligned(nbytes, dtype=torch.uint8)

    def upload(self, copies: list[devices.Copy]) -> Mark:
        assert self.work.is_set(), "device memory is touched before the caller's stream got there"
        return [self._ask("upload", copy.on_device, copy.on_host) for copy in copies][-1]

    def download(self, copy: devices.Copy) -> Mark:
        assert self.work.is_set(), "device memory is touched before the caller's stream got there"
        return self._ask("download", copy.on_host, copy.on_device)

    def finish(self, device: torch.device, step: Callable[[], None]) -> None:
        step()

    def enter(self, device: torch.device) -> None:
        self.entered.append((device, threading.current_thread().name))

    # --- its work

    def _ask(self, what: str, target: torch.Tensor, source: torch.Tensor) -> Mark:
        mark = Mark(self.fail)

        def copy() -> None:
            target.copy_(source)
            self.log.append((what, target.numel()))

        with self._condition:
            self._asked.append((mark, copy))
            self._condition.notify_all()
        return mark

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._asked:
                    if self._stopped:
                        return
                    self._condition.wait()
                mark, copy = self._asked.pop(0)
            self.gate.wait()
            if self.delay_s:
                time.sleep(self.delay_s)
            if mark.failure is None:
                copy()
            mark.reached.set()

    def stop(self) -> None:
        self.gate.set()
        self.work.set()
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        self._thread.join()


@contextmanager
def fake_device(patch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """nvmeio takes the fake device's tensors for a device's; handles have to be made inside."""
    device = FakeDevice()
    patch.setattr(devices, "is_device", device.has)
    patch.setattr(devices, "is_expandable", lambda tensor: False)
    patch.setattr(devices, "new_copier", lambda: device)
    try:
        yield device
    finally:
        device.stop()
