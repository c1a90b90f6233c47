"""What servers and other libraries use of ours, disturbed: blocks on the drive, weights maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from interrupts._inference import Generate, Net, everything_streams, saved_net
from interrupts._operations import noise
from interrupts._trials import Scenario

import nvmeio
from nvmeio._blocks import catalog
from nvmeio._blocks.store import BlockStore

BLOCK = 10_000
SLOT = 12_288


class Blocks(Scenario):
    """More blocks than there is room for: stored, asked for, loaded, removed."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        catalog.STEP_BYTES = 4 * SLOT
        self.blocks = {str(n): noise(n, BLOCK) for n in range(12)}
        self.opened()

    def opened(self) -> None:
        self.store = BlockStore(self.folder, "kv", BLOCK, 8 * SLOT, handle=self.given)

    def work(self) -> Any:
        store, names = self.store, list(self.blocks)
        for part in (names[:6], names[6:]):
            store.store(part, [self.blocks[name] for name in part])
        store.touch(names[-2:])
        store.remove(names[-3:-2])
        rooms = [torch.zeros(BLOCK, dtype=torch.uint8) for _ in names]
        return store.contains(names), store.load(names, rooms), rooms

    def again(self) -> Any:
        self.whole()  # whatever came of it
        return self.work()

    def whole(self) -> None:
        rooms = [torch.zeros(BLOCK, dtype=torch.uint8) for _ in self.blocks]
        there = self.store.load(list(self.blocks), rooms)
        for found, room, wanted in zip(there, rooms, self.blocks.values(), strict=True):
            assert not found or torch.equal(room, wanted)

    def check(self, found: Any) -> None:
        contained, there, rooms = found
        assert contained == there
        assert there[-2:] == [True, True]
        assert there[-3] is False
        assert sum(there) in (7, 8), there  # what was there was not stored again
        for is_there, room, wanted in zip(there, rooms, self.blocks.values(), strict=True):
            assert not is_there or torch.equal(room, wanted)
        assert self.store.stats.damaged == 0

    def close(self) -> None:
        self.store.close()


class BlockStores(Blocks):
    """From opening a store to closing it; what it holds outlives it."""

    def opened(self) -> None:
        with BlockStore(self.folder, "kv", BLOCK, 8 * SLOT) as store:
            store.store(list(self.blocks)[:3], list(self.blocks.values())[:3])

    def work(self) -> Any:
        with BlockStore(self.folder, "kv", BLOCK, 8 * SLOT, handle=self.given) as store:
            names = list(self.blocks)[:3]
            rooms = [torch.zeros(BLOCK, dtype=torch.uint8) for _ in names]
            return store.load(names, rooms), rooms

    def again(self) -> Any:
        return self.patiently(self.work)

    def check(self, found: Any) -> None:
        there, rooms = found
        assert there == [True] * 3
        assert all(torch.equal(room, self.blocks[str(n)]) for n, room in enumerate(rooms))

    def close(self) -> None:
        """Nothing is open."""


class WeightsMap(Scenario):
    """accelerate's map of weights on disk, asked for one after the other, twice."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        path = folder / "net.safetensors"
        self.wanted = saved_net(path).state_dict()
        self.index = {
            name: {"safetensors_file": str(path), "weight_name": name, "dtype": "float32"}
            for name in self.wanted
        }
        self.map = self.opened()

    def opened(self) -> Any:
        from nvmeio.integrations.accelerate import NvmeWeights

        return NvmeWeights(index=self.index, window_bytes=40_000, handle=self.given)

    def read(self, weights: Any) -> Any:
        for _ in range(2):
            found = {name: weights[name].clone() for name in self.wanted}
        return found

    def work(self) -> Any:
        return self.read(self.map)

    def check(self, found: Any) -> None:
        assert found.keys() == self.wanted.keys()
        assert all(torch.equal(found[name], self.wanted[name]) for name in found)

    def close(self) -> None:
        self.map.close()


class WeightsMaps(WeightsMap):
    """From making one to closing it."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        self.map.close()

    def work(self) -> Any:
        made = self.opened()
        try:
            return self.read(made)
        finally:
            made.close()


class Spill(Scenario):
    """Layers that are in memory to a file, and streamed from there, to its end."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        everything_streams()
        torch.manual_seed(0)
        self.whole = Net().eval()
        self.x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
        self.spilled: Any = None

    @torch.no_grad()
    def work(self) -> Any:
        from nvmeio.inference.spilling import spill

        model = Net().eval()
        model.load_state_dict(self.whole.state_dict())
        stream = spill(list(model.blocks), self.folder, window=2, handle=self.given)
        with stream:
            model(self.x)
            return model(self.x)

    @torch.no_grad()
    def check(self, found: Any) -> None:
        assert torch.equal(found, self.whole(self.x))
        self.until(lambda: not any(self.folder.iterdir()))


class KvCache(Generate):
    """Past keys and values of a model on the drive."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        (folder / "kv").mkdir()
        super().__init__(folder, handle, kv_offload=folder / "kv")


SCENARIOS: dict[str, type[Scenario]] = {
    "blocks": Blocks,
    "block-stores": BlockStores,
    "weights-map": WeightsMap,
    "weights-maps": WeightsMaps,
    "spill": Spill,
    "kv-cache": KvCache,
}
