"""What servers and other libraries use of ours, disturbed: blocks on the drive, weights maps."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from interrupts._inference import Generate, Net, everything_streams, saved_llama, saved_net
from interrupts._operations import noise
from interrupts._trials import Scenario
from support import spin_until

import nvmeio
from nvmeio._kv_blocks import catalog
from nvmeio._kv_blocks.store import BlockStore

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


class Prefixes(Scenario):
    """A prompt's keys and values saved by name, again and again others, and loaded."""

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        from nvmeio.inference import PrefixCache, _prefix_format

        _prefix_format.BLOCK_BYTES = 4096
        catalog.STEP_BYTES = 16 * 4096
        self.models = saved_llama(folder / "model")
        self.model = self.models.loaded(folder / "model")
        self.ids = self.models.prompt(length=20)
        self.caches: list[Any] = []
        for seed in (1, 2):
            cache = self.models.transformers.DynamicCache(config=self.model.config)
            made = torch.Generator().manual_seed(seed)
            for layer in range(self.model.config.num_hidden_layers):
                states = (torch.randn(2, 2, 20, 16, generator=made) for _ in range(2))
                cache.update(*states, layer)
            self.caches.append(cache)
        self.turn = 0
        self.kept = PrefixCache(self.model, folder / "kv", 512 << 10, handle=handle)

    def work(self) -> Any:
        self.turn += 1
        self.kept.save("one", self.ids, self.caches[self.turn % 2])
        return self.kept.load("one", torch.cat([self.ids, self.ids], dim=1))

    def check(self, found: Any) -> None:
        wanted = self.caches[self.turn % 2]
        for mine, theirs in zip(found.layers, wanted.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)


class HiCachePages(Scenario):
    """Pages of a host pool of SGLang's to the drive, and to other places in it."""

    modes: ClassVar[tuple[str, ...]] = ("timer", "opcodes")

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        from integrations import test_servers_hicache as pools

        from nvmeio.integrations import sglang_hicache

        self.pools = pools
        catalog.STEP_BYTES = 16 * 4096
        sglang_hicache.STAGING_BYTES = 2000  # three pages: reads in several parts
        zero, one = ("tp_rank", "pp_rank", "attn_cp_rank"), ("tp_size", "pp_size", "attn_cp_size")
        config = SimpleNamespace(
            **dict.fromkeys(zero, 0),
            **dict.fromkeys(one, 1),
            is_mla_model=False,
            model_name="m",
            extra_config={"directory": str(folder), "capacity_bytes": 64 * 4096},
        )
        self.pool = pools.filled()
        self.backend = sglang_hicache.HiCache(config)
        self.backend.mem_pool_host = self.pool
        self.keys = [str(n) for n in range(10)]

    def work(self) -> Any:
        self.backend.clear()
        stored = self.backend.batch_set_v1(self.keys, self.pools.indices(*range(10)))
        places = range(20, 30)
        for place in places:
            self.page(place).zero_()
        loaded = self.backend.batch_get_v1(self.keys, self.pools.indices(*places))
        return stored, loaded, torch.stack([self.page(place).clone() for place in places])

    def page(self, place: int) -> torch.Tensor:
        start = place * self.pools.PAGE
        return self.pool.kv_buffer[:, :, start : start + self.pools.PAGE]

    def check(self, found: Any) -> None:
        stored, loaded, pages = found
        assert stored == loaded == [True] * 10
        assert torch.equal(pages, torch.stack([self.page(place) for place in range(10)]))

    def close(self) -> None:
        self.backend.close()


class TierChunks(Scenario):
    """Chunks of vLLM's first tier to the drive and back, a job each way."""

    modes: ClassVar[tuple[str, ...]] = ("timer", "opcodes")

    def __init__(self, folder: Path, handle: nvmeio.AioHandle | None = None) -> None:
        super().__init__(folder, handle)
        from integrations import test_servers_tier as tiers

        from nvmeio.integrations import vllm_tier

        if not tiers.VLLM:
            sys.modules.update(tiers.doubles())
        catalog.STEP_BYTES = 16 * tiers.CHUNK
        nbytes = tiers.CHUNK * tiers.CHUNKS
        self.mapping = mmap.mmap(-1, nbytes)
        self.rows = torch.frombuffer(self.mapping, dtype=torch.uint8).view(tiers.CHUNKS, -1)
        self.wanted = noise(0, nbytes).view(tiers.CHUNKS, -1)
        self.tier = vllm_tier.NvmeTier(
            offloading_spec=tiers.spec(),
            primary_kv_view=memoryview(self.mapping).cast("B", (tiers.CHUNKS, tiers.CHUNK)),
            tier_type="NvmeTier",
            backpressure_detector=None,
            directory=str(folder),
            capacity_bytes=40 * tiers.CHUNK,
        )
        self.job = 0

    def done(self, submit: Any, keys: list[bytes]) -> Any:
        self.job += 1
        submit(SimpleNamespace(job_id=self.job, keys=keys, chunk_ids=range(len(keys))))
        success: list[bool] = []

        def look() -> bool:  # of an interrupted call there may be others
            finished = self.tier.get_finished_jobs()
            success.extend(each.success for each in finished if each.job_id == self.job)
            return bool(success)

        spin_until(look)  # `drain_jobs` forgets all blocks
        return success[0]

    def work(self) -> Any:
        keys = [f"{self.job}-{n}".encode() for n in range(len(self.rows))]
        self.tier.drain_jobs()  # nothing of a call before goes on in this memory
        self.rows.copy_(self.wanted)
        stored = self.done(self.tier.submit_store, keys)
        self.rows.zero_()
        loaded = self.done(self.tier.submit_load, keys)
        return stored, loaded, self.rows.clone()

    def check(self, found: Any) -> None:
        stored, loaded, rows = found
        assert stored
        assert loaded
        assert torch.equal(rows, self.wanted)

    def close(self) -> None:
        self.tier.shutdown()


SCENARIOS: dict[str, type[Scenario]] = {
    "blocks": Blocks,
    "block-stores": BlockStores,
    "weights-map": WeightsMap,
    "weights-maps": WeightsMaps,
    "spill": Spill,
    "kv-cache": KvCache,
    "prefixes": Prefixes,
    "hicache": HiCachePages,
    "tier": TierChunks,
}
