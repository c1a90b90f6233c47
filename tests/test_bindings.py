"""What the shim's module does beside handing out the shim."""

from __future__ import annotations

import gc
import weakref

import torch

from nvmeio._bindings import memory_at


class Owner:
    """Something that can be referred to weakly."""


def test_memory_is_seen_and_written_to_as_bytes() -> None:
    tensor = torch.arange(16, dtype=torch.uint8)
    memory = memory_at(tensor.data_ptr() + 4, 8)
    assert bytes(memory) == bytes(range(4, 12))
    memory[2:4] = b"xy"
    assert tensor[6:8].tolist() == list(b"xy")
    assert len(memory_at(tensor.data_ptr(), 0)) == 0


def test_memory_keeps_its_owner_for_as_long_as_anybody_uses_it() -> None:
    tensor, owner = torch.zeros(64, dtype=torch.uint8), Owner()
    gone = weakref.ref(owner)
    laid_over = torch.frombuffer(memory_at(tensor.data_ptr(), 64, owner), dtype=torch.uint8)
    storage = laid_over.untyped_storage()
    del owner, laid_over
    gc.collect()
    assert gone() is not None
    del storage
    assert gone() is None  # by its count of references: no collector is needed


def test_a_length_that_was_not_met_before_makes_no_class() -> None:
    """An array of ctypes made one for each, which stays."""
    tensor = torch.zeros(1 << 12, dtype=torch.uint8)
    kinds = {type(memory_at(tensor.data_ptr(), nbytes).obj) for nbytes in range(1, 1 << 12)}
    assert len(kinds) == 1
