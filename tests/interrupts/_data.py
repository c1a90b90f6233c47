"""Records and their prefetching, disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from interrupts._operations import noise
from interrupts._trials import Scenario
from support import PATIENCE_S

import nvmeio
from nvmeio.data import Records

ORDER = [[number * 37 % 500 for number in range(at, at + 50)] for at in range(0, 500, 50)]


class Prefetched(Scenario):
    """Write some records, and read all in batches: all of them, or an error."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.path = folder / "records"
        self.rows = noise(9, 500 * 300).view(500, 300)
        self.path.write_bytes(self.rows.numpy().tobytes())
        self.records = Records(self.path, torch.uint8, 300, mode="r+", handle=handle)

    def work(self) -> Any:
        self.records[ORDER[0]] = self.rows[ORDER[0]]
        found = torch.zeros_like(self.rows)
        with self.records.prefetch(ORDER, depth=3) as batches:
            for numbers, rows in zip(ORDER, batches, strict=True):
                found[numbers] = rows
        return found

    def check(self, found: Any) -> None:
        assert torch.equal(found, self.rows)
        assert torch.equal(self.records[:], self.rows)
        self.records.handle.wait(PATIENCE_S)
        assert self.records.handle.stats.in_flight == 0

    def close(self) -> None:
        self.records.close()


class Awaited(Prefetched):
    """The same on an event loop; opened and closed there too."""

    modes = ("timer", "opcodes", "cancel", "cancel-later")

    async def awork(self) -> Any:
        found, number = torch.zeros_like(self.rows), 0
        async with (
            Records(self.path, torch.uint8, 300, handle=self.given) as records,
            records.prefetch(ORDER) as batches,
        ):
            async for rows in batches:
                found[ORDER[number]] = rows
                number += 1
        return found

    work = Scenario.work


SCENARIOS: dict[str, type[Scenario]] = {"records": Prefetched, "records-async": Awaited}
