"""Memory that tensors lie over."""

from __future__ import annotations

import pytest
import torch

from nvmeio import PinnedPool
from nvmeio._residency import window
from nvmeio._residency.window import LentPool, laid_over, lease_now


def test_tensors_are_laid_over_memory_as_views_of_it() -> None:
    memory = torch.arange(4096, dtype=torch.int32).view(torch.uint8)
    places: list[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]] = [
        (64, torch.float32, (3, 5, 2), ()),
        (256, torch.bfloat16, (7,), ()),
        (512, torch.float32, (), ()),
        (1024, torch.uint8, (4, 1), ()),
        (1536, torch.float32, (0, 5), ()),
        (2048, torch.float32, (3, 5), (1, 3)),
    ]
    for place, tensor in zip(places, laid_over(memory, places), strict=True):
        start, dtype, shape, strides = place
        assert tensor.dtype == dtype
        assert tensor.shape == shape
        assert tensor.stride() == (strides or torch.empty(shape).stride())
        expected = memory[start : start + tensor.nbytes]
        in_order = tensor.mT if strides else tensor
        assert torch.equal(in_order.reshape(-1).view(torch.uint8), expected)
        if tensor.numel():
            assert tensor.data_ptr() == memory.data_ptr() + start


def test_a_lease_that_finds_no_room_now_is_none_and_leaves_nothing() -> None:
    with PinnedPool(3 * 4096) as pool:
        first = lease_now(pool, 4096)
        middle = lease_now(pool, 4096)
        last = lease_now(pool, 4096)
        assert first is not None and middle is not None and last is not None
        assert lease_now(pool, 4096) is None
        first[0].__exit__(None, None, None)
        last[0].__exit__(None, None, None)
        assert lease_now(pool, 8192) is None  # there is as much, in two pieces
        assert pool.waiting == 0
        middle[0].__exit__(None, None, None)
        whole = lease_now(pool, 3 * 4096)
        assert whole is not None
        whole[0].__exit__(None, None, None)


def test_lent_memory_is_free_with_the_last_tensor_over_it() -> None:
    pool = LentPool(4096)
    slot = pool.take("unit", 4096)
    assert slot is not None and slot.memory is not None
    (kept,) = laid_over(slot.memory, [(128, torch.float32, (8,), ())])
    slot.memory = torch.empty(0, dtype=torch.uint8)
    assert pool.take("another", 4096) is None
    del kept
    assert pool.take("another", 4096) is not None
    pool.close()


def test_a_unit_that_finds_the_free_bytes_in_pieces_gets_as_many_of_its_own() -> None:
    """A window of enough bytes refused a part, since a smaller one lay in the middle of it."""
    pool = LentPool(4 * 4096)
    first, middle = pool.take("first", 4096), pool.take("middle", 4096)
    assert first is not None and middle is not None
    first.memory = first.host = torch.empty(0)
    del first
    assert pool.in_use_bytes == 4096
    assert pool.take("large", 3 * 4096) is None
    large = pool.take_apart("large", 3 * 4096)
    assert large is not None and large.memory is not None
    assert large.memory.nbytes == 3 * 4096
    assert pool.in_use_bytes == 4 * 4096
    assert pool.take("one more", 4096) is None
    assert pool.take_apart("one more", 4096) is None
    large.memory = torch.empty(0, dtype=torch.uint8)
    assert pool.in_use_bytes == 4096
    middle.memory = torch.empty(0, dtype=torch.uint8)
    pool.close()


def test_memory_that_could_not_be_lent_is_free_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came back twice, and two tensors had the same bytes."""
    pool = LentPool(2 * 4096)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(window, "Slot", fail)
        with pytest.raises(RuntimeError):
            pool.take("unit", 4096)
    assert pool.in_use_bytes == 0
    slots = [pool.take(unit, 4096) for unit in ("one", "other", "third")]
    assert slots[2] is None
    memories = [slot.memory for slot in slots if slot is not None]
    starts = {memory.data_ptr() for memory in memories if memory is not None}
    assert len(starts) == 2
    pool.close()


def test_what_was_refused_is_looked_for_again_once_memory_came_back() -> None:
    """A full pool says so without a search, for as long as nothing has come back."""
    pool = LentPool(3 * 4096)
    slots = [pool.take(number, 4096) for number in range(2)]
    assert all(slot is not None for slot in slots)
    for _ in range(2):
        assert pool.take("large", 2 * 4096) is None
    small = pool.take("small", 4096)  # less than was refused
    assert small is not None
    for _ in range(2):
        assert pool.take("small", 4096) is None
    slots.clear()
    large = pool.take("large", 2 * 4096)
    assert large is not None
    assert pool.take("another", 4096) is None
    del small, large
    assert pool.in_use_bytes == 0  # which takes it back
    assert pool.take("whole", 3 * 4096) is not None
