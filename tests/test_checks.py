"""Arguments: sizes as text, wherever bytes are asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nvmeio
from nvmeio import _checks
from nvmeio.errors import BackendUnavailableError
from nvmeio.inference.packing import pack
from nvmeio.inference.spilling import spill
from nvmeio.integrations.accelerate import NvmeWeights
from nvmeio.offload import SwappedModule, SwappedOptimizer


def test_sizes_are_text_or_numbers() -> None:
    assert _checks.size("x", "1.5G") == 3 << 29
    assert _checks.size("x", "24 GiB") == _checks.size("x", "24 g") == 24 << 30
    assert _checks.size("x", 7) == 7
    assert _checks.size("x", None) is None
    with pytest.raises(ValueError, match=r"^resident_bytes: '24X' is not a size") as told:
        _checks.size("resident_bytes", "24X")
    assert told.value.__cause__ is None  # a traceback said it twice


def test_a_handle_and_a_pool_take_them() -> None:
    with nvmeio.AioHandle(block_size="64K", ring_bytes="8M") as handle:
        assert handle.get_block_size() == 64 << 10
    pool = nvmeio.PinnedPool("1M")
    assert pool.budget_bytes == 1 << 20
    pool.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda path: nvmeio.PinnedPool("much"),
        lambda path: nvmeio.AioHandle(block_size="much"),
        lambda path: nvmeio.AioHandle(ring_bytes="much"),
        lambda path: nvmeio.Checkpointer(path, memory_bytes="much"),
        lambda path: nvmeio.GdsHandle(max_direct_io_bytes="much"),
        lambda path: spill([torch.nn.Linear(2, 2)], path, resident_bytes="much"),
        lambda path: NvmeWeights({}, window_bytes="much"),
        lambda path: nvmeio.stream_model(path, resident_bytes="much"),
        lambda path: SwappedModule(torch.nn.Linear(2, 2), swap_dir=path, resident_bytes="much"),
        lambda path: SwappedOptimizer(
            torch.optim.AdamW, [torch.zeros(2)], swap_dir=path, subgroup_bytes="much"
        ),
    ],
)
def test_what_is_no_size_is_named(call: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"_(bytes|size): 'much' is not a size: write bytes, or"):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_swapped_module_and_optimizer_work_with_them(tmp_path: Path) -> None:
    module = SwappedModule(torch.nn.Linear(8, 8), swap_dir=tmp_path / "m", resident_bytes="1M")
    assert module(torch.ones(1, 8)).shape == (1, 8)
    module.close()
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = SwappedOptimizer(
        torch.optim.AdamW, [weight], swap_dir=tmp_path / "o", subgroup_bytes="1M", buffer_bytes="1M"
    )
    weight.grad = torch.ones(4)
    optimizer.step()
    optimizer.close()
    assert not torch.equal(weight, torch.ones(4))


# Dtypes


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16", "bf16", torch.bfloat16])
def test_dtypes_are_given_by_name(name: Any) -> None:
    assert _checks.dtype("dtype", name) is torch.bfloat16
    assert nvmeio.empty_aligned(3, dtype=name).dtype is torch.bfloat16


def test_spilled_modules_and_optimizers_take_sizes_and_dtypes_as_text(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8))
    wanted = module(torch.ones(1, 8))
    with spill([module], tmp_path, resident_bytes="1M"):
        assert torch.equal(module(torch.ones(1, 8)), wanted)
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = SwappedOptimizer(
        torch.optim.AdamW, [weight], swap_dir=tmp_path / "o", master_dtype="float32"
    )
    weight.grad = torch.ones(4, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.close()
    assert weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "call",
    [
        lambda path, name: nvmeio.empty_aligned(3, dtype=name),
        lambda path, name: nvmeio.empty_pinned(3, dtype=name),
        lambda path, name: nvmeio.stream_model(path, dtype=name),
        lambda path, name: pack(path, path / "out", dtype=name),
        lambda path, name: SwappedOptimizer(
            torch.optim.AdamW, [torch.zeros(2)], swap_dir=path / "o", master_dtype=name
        ),
    ],
)
def test_what_is_no_dtype_is_named(call: Callable[[Path, Any], Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype: 'bfloat17' is not a dtype of torch"):
        call(tmp_path, "bfloat17")
    with pytest.raises(ValueError, match=r"dtype: 'nn' is not a dtype of torch"):
        call(tmp_path, "nn")
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype or the name of one, not 16"):
        call(tmp_path, 16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("named", ["cuda", "cuda:1", torch.device("cuda"), 0])
def test_a_device_that_is_not_there_is_told_with_the_way_out(
    named: str | int | torch.device, tmp_path: Path
) -> None:
    """torch's own errors were an assertion, and a comparison of None and a number."""
    nvmeio.save_safetensors({"0.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
    for call in (
        lambda: nvmeio.load_safetensors(tmp_path / "model.safetensors", named),
        lambda: nvmeio.safe_open(tmp_path / "model.safetensors", device=named),
        lambda: nvmeio.stream_model(model, tmp_path / "model.safetensors", device=named),
    ):
        with pytest.raises(
            BackendUnavailableError, match=r"(?s)device='cuda.*no such device.*device='cpu'"
        ):
            call()
