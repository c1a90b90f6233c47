"""Changes of an optimizer's state: one after the other, and rolled back if their caller goes.

One thread alone changes the state, so nobody sees a change half made. If a caller is interrupted or
cancelled while it waits for its change, the change is rolled back: it has not happened then, and
may be requested again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

from nvmeio._memory import devices
from nvmeio._threads.owner import OwnerThread
from nvmeio.errors import ClosedError

Value = TypeVar("Value")

_TINY = 5e-324


class RolledBack(Exception):
    """The caller no longer wants the change."""


class Transaction:
    """One change, as the work that makes it sees it."""

    def __init__(self) -> None:
        self.unwanted = False
        self.error: BaseException | None = None
        self._undo: Callable[[], object] | None = None

    def check(self) -> None:
        """Raise `RolledBack` if the caller left; called where the change can be left undone."""
        if self.unwanted:
            raise RolledBack

    def on_rollback(self, undo: Callable[[], object]) -> None:
        """Note that the change is made, and what undoes it."""
        self._undo = undo

    def roll_back(self) -> None:
        """Undo the change, if it was made and can be undone."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


class Transactions:
    """Makes changes in a thread of its own, in the order in which they are asked for.

    The stream of `device` that is current for the caller is current where the change is made.
    `closed` is the message of `ClosedError` after the end.
    """

    def __init__(self, name: str, closed: str, device: torch.device) -> None:
        self._device = device
        self.owner = OwnerThread(name, closed)
        self._current = Transaction()

    def run(self, work: Callable[[Transaction], Value]) -> Value:
        """Make a change and wait for it; at once and as a part of it within another change.

        If the waiting is interrupted, the change is rolled back first; a second interrupt does not
        wait for that.
        """
        if self.owner.is_here:
            return work(self._current)
        transaction = Transaction()
        try:
            here = self._as_here(work, transaction)
            value: Value = self.owner.call(self._make, transaction, here)
            return value
        except BaseException as failed:
            if failed is not transaction.error:
                transaction.unwanted = True
                with contextlib.suppress(ClosedError):
                    self.owner.call(transaction.roll_back)
            raise

    async def async_run(self, work: Callable[[Transaction], Value]) -> Value:
        """The same, awaited. When `CancelledError` is raised, the change has been rolled back."""
        transaction = Transaction()
        try:
            here = self._as_here(work, transaction)
            value: Value = await self.owner.async_call(self._make, transaction, here)
            return value
        except BaseException as failed:
            if failed is not transaction.error:
                transaction.unwanted = True
                if isinstance(failed, asyncio.CancelledError):
                    await self._rolled_back(transaction)
                else:  # the coroutine is closed: nobody can wait any more
                    self.owner.post(transaction.roll_back)
            raise

    def _as_here(
        self, work: Callable[[Transaction], Value], transaction: Transaction
    ) -> Callable[[], Value]:
        with devices.on(self._device):
            return _as_here(work, transaction)

    async def _rolled_back(self, transaction: Transaction) -> None:
        ended = asyncio.ensure_future(self.owner.async_call(transaction.roll_back))
        while not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([ended])
        if not isinstance(ended.exception(), ClosedError):
            ended.result()

    def _make(self, transaction: Transaction, work: Callable[[], Value]) -> Value:
        before, self._current = self._current, transaction
        try:
            transaction.check()
            return work()
        except BaseException as failed:
            transaction.error = failed
            raise
        finally:
            self._current = before


def _as_here(work: Callable[[Transaction], Value], transaction: Transaction) -> Callable[[], Value]:
    """The same work for another thread, with torch's per-thread settings of this one."""
    flushes = _TINY * 1.0 == 0.0

    def there() -> Value:
        if flushes != (_TINY * 1.0 == 0.0):
            torch.set_flush_denormal(flushes)
        with torch.no_grad():
            return work(transaction)

    return devices.as_here(there)
