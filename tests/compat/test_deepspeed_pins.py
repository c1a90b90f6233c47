"""Page-locked memory by DeepSpeed's names; its two tensor functions; its builders."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support import collect

import nvmeio
from nvmeio._memory import mappings
from nvmeio.compat import deepspeed as compat
from nvmeio.compat.deepspeed import (
    AsyncIOBuilder,
    GDSBuilder,
    PinMemoryBuilder,
    UtilsBuilder,
    aio_handle,
    cast_to_byte_tensor,
    deepspeed_memcpy,
    gds_handle,
    pin_handle,
)

# Page-locked memory


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float64])
def test_locked_tensor_has_the_examples_dtype(dtype: torch.dtype) -> None:
    example = torch.empty(2, 3, dtype=dtype)
    for handle in (aio_handle(queue_depth=1), pin_handle()):
        tensor = handle.new_cpu_locked_tensor(1001, example)
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, (1001,))
        assert tensor.data_ptr() % 4096 == 0
        assert handle.free_cpu_locked_tensor(tensor) is True


def test_parameters_have_deepspeeds_names() -> None:
    example = torch.empty(0)
    handle, pins = aio_handle(queue_depth=1), pin_handle()
    tensor = handle.new_cpu_locked_tensor(num_elem=10, example_tenosr=example)
    assert handle.is_pinned(buffer=tensor)
    assert handle.free_cpu_locked_tensor(tensor=tensor)
    tensor = pins.new_cpu_locked_tensor(num_elem=10, example_tensor=example)
    assert pins.is_pinned(buffer=tensor)
    assert pins.free_cpu_locked_tensor(locked_tensor=tensor)
    address = pins.new_cpu_locked_tensor(10, example).data_ptr()
    assert not pins.free_cpu_locked_tensor_by_ptr(address=address)  # it went with its tensor


def test_is_pinned_holds_for_views_and_across_handles() -> None:
    one, other, pins = aio_handle(queue_depth=1), aio_handle(queue_depth=1), pin_handle()
    for tensor in (
        one.new_cpu_locked_tensor(1000, torch.empty(0)),
        pins.new_cpu_locked_tensor(1000, torch.empty(0)),
    ):
        for asked in (one, other, pins):
            assert asked.is_pinned(tensor) is True
            assert asked.is_pinned(tensor.narrow(0, 3, 500).view(5, 100)) is True
            assert asked.is_pinned(torch.empty(3)) is False
            assert asked.is_pinned(torch.Tensor()) is False
        assert other.free_cpu_locked_tensor(tensor) is True
        assert one.is_pinned(tensor) is False


def test_freeing_what_is_not_locked_returns_false() -> None:
    for handle in (aio_handle(queue_depth=1), pin_handle()):
        tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0))
        assert handle.free_cpu_locked_tensor(torch.empty(4)) is False
        assert handle.free_cpu_locked_tensor(tensor[1:]) is False
        assert handle.free_cpu_locked_tensor(tensor) is True
        assert handle.free_cpu_locked_tensor(tensor) is False
    assert pin_handle().free_cpu_locked_tensor_by_ptr(12345) is False


def test_freed_tensor_stays_valid() -> None:
    """In DeepSpeed its memory is given back to malloc, whoever still looks at it."""
    handle = aio_handle(queue_depth=1)
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0)).fill_(3)
    handle.free_cpu_locked_tensor(tensor)
    assert bool((tensor == 3).all())


def test_free_by_address() -> None:
    pins = pin_handle()
    tensor = pins.new_cpu_locked_tensor(1000, torch.empty(0))
    assert pins.free_cpu_locked_tensor_by_ptr(tensor.data_ptr()) is True
    assert pins.is_pinned(tensor) is False


def test_finalizer_finds_the_memory_that_it_frees() -> None:
    """DeepSpeed frees by address from a finalizer; the address must not be another's by then."""
    pins = pin_handle()
    base = pins.new_cpu_locked_tensor(1000, torch.empty(0))
    address, seen = base.data_ptr(), []
    weakref.finalize(
        base,
        lambda: seen.append(
            (
                mappings.mapped.covers(address, 1),
                pins.free_cpu_locked_tensor_by_ptr(address),
            )
        ),
    )
    view = base[:500].view(5, 100)
    del base
    gc.collect()
    assert pins.is_pinned(view)
    del view
    collect()
    assert seen == [(True, True)]


def test_pin_handle_leaves_cuda_to_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed registers what pin_handle gives it, and a second registration fails."""
    registered: list[int] = []
    monkeypatch.setattr(
        mappings.Mapping, "register_with_cuda", lambda mapping: registered.append(mapping.address)
    )
    pin_handle().new_cpu_locked_tensor(1000, torch.empty(0))
    assert not registered
    aio_handle(queue_depth=1).new_cpu_locked_tensor(1000, torch.empty(0))
    assert len(registered) == 1


def test_sizes_of_locked_tensors_are_checked() -> None:
    for handle in (aio_handle(queue_depth=1), pin_handle()):
        assert handle.new_cpu_locked_tensor(0, torch.empty(0)).numel() == 0
        with pytest.raises(ValueError, match="0 or more"):
            handle.new_cpu_locked_tensor(-1, torch.empty(0))
        with pytest.raises(TypeError):
            handle.new_cpu_locked_tensor(1.5, torch.empty(0))  # type: ignore[arg-type]


# Functions on tensors


def test_memcpy_copies_all_of_a_tensor() -> None:
    """DeepSpeed's copies as many floats as the first dimension has, whatever the dtype."""
    for dtype in (torch.float32, torch.float16, torch.int64):
        source = torch.arange(600).view(20, 30).to(dtype)
        target = torch.zeros(600, dtype=dtype)
        assert deepspeed_memcpy(target, source) == 0
        assert torch.equal(target, source.view(-1))
        target = torch.zeros(30, 20, dtype=dtype).t()
        deepspeed_memcpy(dest=target, src=source)
        assert torch.equal(target, source)


def test_memcpy_takes_the_beginning_of_a_longer_source() -> None:
    target = torch.zeros(10)
    deepspeed_memcpy(target, torch.arange(100.0))
    assert torch.equal(target, torch.arange(10.0))


def test_memcpy_refuses_what_would_overrun() -> None:
    with pytest.raises(ValueError, match="10 elements from 5"):
        deepspeed_memcpy(torch.zeros(10), torch.zeros(5))
    with pytest.raises(TypeError, match="convert"):
        deepspeed_memcpy(torch.zeros(10), torch.zeros(10).double())


def test_memcpy_into_a_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    deepspeed_memcpy(parameter, torch.ones(4))
    assert bool((parameter == 1).all())


def test_cast_to_byte_tensor_shares_memory() -> None:
    tensors = [torch.zeros(3, 4), torch.zeros(1, dtype=torch.bool), torch.empty(0)]
    casts = cast_to_byte_tensor(tensors)
    assert [c.numel() for c in casts] == [48, 1, 0]
    casts[0].fill_(255)
    assert tensors[0].isnan().all()
    assert cast_to_byte_tensor(tensors[0]).data_ptr() == tensors[0].data_ptr()


# Builders


def test_builders_load_what_deepspeeds_do() -> None:
    op = AsyncIOBuilder().load()
    assert op.aio_handle is aio_handle
    assert {"aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"} <= set(dir(op))
    assert GDSBuilder().load(verbose=True).gds_handle is gds_handle
    assert PinMemoryBuilder().load().pin_handle is pin_handle
    assert UtilsBuilder().load().cast_to_byte_tensor is cast_to_byte_tensor
    assert AsyncIOBuilder().load() is AsyncIOBuilder().load(verbose=False)


def test_loaded_ops_are_no_shared_libraries() -> None:
    """DeepSpeed opens the `__file__` of its pin_memory op with dlopen."""
    for builder in (AsyncIOBuilder, GDSBuilder, PinMemoryBuilder, UtilsBuilder):
        assert not hasattr(builder().load(), "__file__")


def test_builders_know_what_works_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert AsyncIOBuilder().is_compatible()
    assert AsyncIOBuilder().is_compatible(verbose=True)
    assert not GDSBuilder().is_compatible()
    assert capsys.readouterr().out == ""
    builder = GDSBuilder()
    assert not builder.is_compatible(verbose=True)
    assert "needs cuFile" in capsys.readouterr().out
    assert builder.error_log is not None
    assert (builder.name, builder.NAME) == ("gds", "gds")


def test_public_names() -> None:
    assert all(hasattr(compat, name) for name in compat.__all__)
    assert "deepspeed" not in dir(nvmeio.compat) or nvmeio.compat.deepspeed is compat
