"""Weights of 4 and 8 bits: widened bit for bit, and products of them that were not widened."""

from __future__ import annotations

import pytest
import torch

from nvmeio._bindings import packed as native
from nvmeio.inference._plan.quantization import Quantised, dequantise, multiply, quantise

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The shim's loops take 16 elements at a time, 8, or one, as groups allow and the CPU can.
SETTINGS = [Quantised(bits, size) for bits in (4, 8) for size in (64, 32, 16, 8, 6, 2)]


def matrix(setting: Quantised, rows: int = 37, groups: int = 6) -> Parts:
    """Steps, scales and minima of numbers between subnormals of float16 and its largest."""
    generator = torch.Generator().manual_seed(setting.group_size)
    values = torch.randn(rows, groups * setting.group_size, generator=generator)
    sizes = 10.0 ** torch.randint(-8, 4, (rows, groups, 1), generator=generator)
    values = (values.view(rows, groups, -1) * sizes).view_as(values)
    return quantise(values, setting)


def widened(parts: Parts, setting: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """By torch's own operations."""
    steps, scales, minima = parts
    groups = steps.view(*scales.shape, -1)
    if setting.bits == 4:
        groups = torch.cat((groups & 15, groups >> 4), -1)
    values = groups.float() * scales.unsqueeze(-1) + minima.unsqueeze(-1)
    return values.to(dtype).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_elements_are_a_step_times_the_scale_and_the_minimum(
    setting: Quantised, dtype: torch.dtype
) -> None:
    parts = matrix(setting)
    wanted = widened(parts, setting, dtype)
    found = torch.full_like(wanted, torch.nan)
    dequantise(parts, setting, found)
    assert found.equal(wanted)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_rows_and_columns_are_widened_by_themselves(setting: Quantised) -> None:
    parts = matrix(setting)
    wanted = widened(parts, setting, torch.bfloat16)
    rows = torch.empty_like(wanted[5:20])
    dequantise([part[5:20] for part in parts], setting, rows)
    assert rows.equal(wanted[5:20])
    size = setting.group_size
    bounds = [(2 * width // 6, 5 * width // 6) for width in (part.shape[1] for part in parts)]
    columns = torch.empty(37, 3 * size, dtype=torch.bfloat16)
    cut = [part[:, a:b] for part, (a, b) in zip(parts, bounds, strict=True)]
    dequantise(cut, setting, columns)
    assert columns.equal(wanted[:, 2 * size : 5 * size])


class _WithoutTiles:
    """The shim on a CPU that has no tile registers."""

    nv_packed_run = staticmethod(native.lib.nv_packed_run)
    nv_packed_has_tiles = staticmethod(lambda _: 0)


@pytest.fixture(params=["as this CPU does", "without tiles"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without tiles":
        monkeypatch.setattr(native, "lib", _WithoutTiles)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 7, 8, 21, 70])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_product_is_that_of_the_widened_elements(
    setting: Quantised, dtype: torch.dtype, inputs: int
) -> None:
    """In float32: each sum is off by less than its terms' sizes times the rounding of one step."""
    check_product(setting, dtype, inputs, 37, 6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 31, 256, 300])
@pytest.mark.parametrize(("size", "groups"), [(64, 19), (512, 3), (192, 5), (576, 2)])
def test_a_product_with_many_rows(size: int, groups: int, rows: int, bits: int) -> None:
    """More than are widened, or summed, at a time; and not a multiple of that."""
    for inputs in (64, 65, 530):
        check_product(Quantised(bits, size), torch.bfloat16, inputs, rows, groups)


def check_product(
    setting: Quantised, dtype: torch.dtype, inputs: int, rows: int, groups: int
) -> None:
    parts = matrix(setting, rows, groups)
    wide = widened(parts, setting, dtype).double()
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(inputs, wide.shape[1], generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype)
    for given in (None, bias):
        added = 0 if given is None else given.double()
        exact = x.double() @ wide.T + added
        sizes = x.double().abs() @ wide.abs().T + torch.as_tensor(added).abs()
        bound = sizes * wide.shape[1] * torch.finfo(torch.float32).eps
        found = multiply(x, parts, setting, given)
        assert found.dtype is dtype and found.shape == (inputs, rows)
        rounding = exact.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).tiny
        finite = exact.abs() < torch.finfo(dtype).max / 2
        wrong = (found.double() - exact).abs() > bound + rounding
        assert finite.any() and not (wrong & finite).any()


@pytest.mark.parametrize("inputs", [3, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_threads_share_the_rows(dtype: torch.dtype, inputs: int) -> None:
    setting = Quantised(4, 64)
    parts = list(quantise(torch.randn(1031, 1024), setting))
    x = torch.randn(inputs, 1024).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = multiply(x, parts, setting, None)
        torch.set_num_threads(7)
        for _ in range(20):
            assert multiply(x, parts, setting, None).equal(alone)
    finally:
        torch.set_num_threads(before)


def test_torch_multiplies_in_between() -> None:
    """Both use the tile registers, and shape them as they need."""
    setting = Quantised(8, 64)
    parts = quantise(torch.randn(96, 256), setting)
    wide = widened(parts, setting, torch.bfloat16)
    x, y = torch.randn(40, 256).bfloat16(), torch.randn(17, 96).bfloat16()
    wanted = multiply(x, parts, setting, None), y @ wide
    for _ in range(20):
        assert multiply(x, parts, setting, None).equal(wanted[0])
        assert (y @ wide).equal(wanted[1])
