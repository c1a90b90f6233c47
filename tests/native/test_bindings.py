"""What the shim's module does beside handing out the shim."""

from __future__ import annotations

import gc
import weakref
import zlib
from pathlib import Path

import pytest
import support
import torch

from nvmeio._bindings import INTERFACE, memory_at

DECLARED = Path(__file__).parents[2] / "native_shim" / "decl.h"


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


def test_the_interface_is_that_of_the_declarations() -> None:
    declared = zlib.crc32(DECLARED.read_text(encoding="utf-8").encode())
    assert declared == INTERFACE, "write the new number into nvmeio/_bindings.py"


@pytest.mark.parametrize("number", ["", "1"])
def test_a_shim_of_another_version_is_refused(number: str) -> None:
    """Before there was a number, or with another one; a call into it would end the program."""
    ended = support.run_python(
        f"""
        import sys, types
        shim = types.ModuleType("nvmeio._native")
        shim.ffi = shim.lib = types.SimpleNamespace()
        if "{number}":
            shim.lib.NV_INTERFACE = int("{number}")
        import nvmeio
        sys.modules["nvmeio._native"] = shim
        nvmeio.AioHandle
        """,
        fresh=True,
    )
    assert ended.returncode == 1
    assert "built for another version of nvmeio" in ended.stderr
    assert "pip install" in ended.stderr
