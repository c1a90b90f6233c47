"""Page-locked memory is kept for the next one: nothing locks memory for one read or one token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, fake_cuda
from support import collect

import nvmeio
from nvmeio import buffers
from nvmeio._io import spans
from nvmeio._memory import devices, page_locked
from nvmeio.inference import kv_cache

GPU = torch.device("cuda:1")
MIB = 1 << 20


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A process that works on device 1."""
    collect()
    made = fake_cuda(monkeypatch)
    made.set_device(1)
    monkeypatch.setattr(devices, "begin_copy", lambda target, source: target.copy_(source))
    yield made
    collect()
    page_locked.forget()


def locks(cuda: FakeCuda) -> int:
    return [name for name, _ in cuda.calls].count("cudaHostRegister")


def unlocks(cuda: FakeCuda) -> int:
    return [name for name, _ in cuda.calls].count("cudaHostUnregister")


def test_memory_whose_last_tensor_is_gone_is_the_next_one_s(cuda: FakeCuda) -> None:
    first = page_locked.take(5 * MIB)
    address, view = first.data_ptr(), first[7:]
    del first
    assert page_locked.take(5 * MIB).data_ptr() != address  # a view has it
    del view
    taken = [page_locked.take(5 * MIB), page_locked.take(4 * MIB)]
    assert address in {each.data_ptr() for each in taken} and taken[0].nbytes == 5 * MIB
    assert taken[0].data_ptr() != taken[1].data_ptr()
    assert buffers.is_pinned(taken[0])
    assert locks(cuda) == 2 and unlocks(cuda) == 0


def test_what_grows_little_by_little_is_locked_for_each_eighth(cuda: FakeCuda) -> None:
    for nbytes in range(16 * MIB, 32 * MIB, 64 << 10):
        page_locked.take(nbytes)
    assert locks(cuda) <= 9


def test_no_more_is_kept_than_was_in_use_and_not_for_long(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_locked, "_KEPT_BYTES", 4 * MIB)
    kept = [page_locked.take(4 * MIB) for _ in range(3)]
    kept.clear()
    page_locked.take(4 * MIB)
    assert unlocks(cuda) == 0  # as much was in use at once
    monkeypatch.setattr(page_locked, "_KEPT_S", -1.0)
    page_locked.take(64 << 10)
    collect()
    assert unlocks(cuda) == 3


def test_the_limit_for_locked_memory_is_not_cuda_s(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise OSError("RLIMIT_MEMLOCK")

    monkeypatch.setattr("nvmeio._memory.mappings.Mapping.lock", refuse)
    assert page_locked.take(MIB).nbytes == MIB


def test_tensors_that_are_loaded_one_by_one_lock_no_memory(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `get_tensor` and each `load` locked its chunks, and made a stream."""
    (tmp_path / "file").write_bytes(bytes(range(256)) * 64)
    empty = torch.empty
    monkeypatch.setattr(spans.torch, "empty", lambda *size, device=None, **o: empty(*size, **o))
    with nvmeio.AioHandle(engine="threads") as handle:
        for start in range(20):
            (found,) = spans.read(handle, [spans.Span(str(tmp_path / "file"), start, 300)], GPU)
            assert found[0] == start
            if not start:
                first = locks(cuda), len(cuda.streams)
    assert (locks(cuda), len(cuda.streams)) == first == (1, 1)


@pytest.mark.parametrize("on_drive", [True, False], ids=["on the drive", "in memory"])
def test_a_token_locks_no_memory(
    on_drive: bool, cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's whole past was mapped, locked, registered and unregistered at every token."""
    pytest.importorskip("transformers", reason="transformers is not installed: `make clients` does")
    from transformers import LlamaConfig

    monkeypatch.setattr(devices, "device_of", lambda tensor: GPU)
    with nvmeio.AioHandle(engine="threads") as handle:
        store = kv_cache.KVStore(tmp_path if on_drive else None, handle)
        cache = kv_cache.new_cache(LlamaConfig(num_hidden_layers=1), store)
        (layer,) = cache.layers
        past = torch.randn(1, 2, 3 * kv_cache.BLOCK_TOKENS, 32)
        layer.update(past, past)
        counts = []
        for _ in range(kv_cache.BLOCK_TOKENS // 2):
            token = torch.randn(1, 2, 1, 32)
            past = torch.cat([past, token], dim=-2)
            keys, values = layer.update(token, token)
            assert torch.equal(keys, past) and torch.equal(values, past)
            del keys, values
            counts.append(locks(cuda) + unlocks(cuda))
        assert counts[1:] == counts[:-1]
        layer.reset()
        store.close()


def test_blocks_that_stay_in_memory_share_what_is_locked(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block of each layer was mapped, locked and registered; nothing was used again."""
    monkeypatch.setattr(devices, "device_of", lambda tensor: GPU)
    keys = torch.randn(1, 2, kv_cache.BLOCK_TOKENS, 32)
    counts = []
    for _ in range(3):  # prompts
        store = kv_cache.KVStore(None, None)
        blocks = [store.put(keys + number, keys - number)[0] for number in range(300)]
        counts.append(locks(cuda))
        for number, block in enumerate(blocks):
            assert block.memory is not None and buffers.is_pinned(block.memory)
            found = block.memory[: 2 * keys.nbytes].view(torch.float32).view(2, *block.about.keys)
            assert torch.equal(found[0], keys + number) and torch.equal(found[1], keys - number)
        store.close()
        del store, blocks, block, found
    assert counts == [1, 1, 1] and not unlocks(cuda)
