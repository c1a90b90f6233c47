"""Tensors as memory: byte aliases, what is staged, what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from support import ALL_DTYPES, QUANTISED, dtype_id, make_tensor, random_bytes, raw

import nvmeio
from nvmeio._memory import tensors as tensors_module

DATA = random_bytes(16 * 30)


# cast_to_byte_tensor


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_id)
def test_every_dtype_has_bytes(dtype: torch.dtype) -> None:
    tensor = make_tensor(dtype, DATA)
    alias = nvmeio.cast_to_byte_tensor(tensor)
    assert (alias.dtype, alias.shape) == (torch.uint8, (len(DATA),))
    assert alias.data_ptr() == tensor.data_ptr()
    assert raw(alias) == DATA


def test_an_alias_shares_the_memory() -> None:
    tensor = torch.arange(10, dtype=torch.int32)
    alias = nvmeio.cast_to_byte_tensor(tensor)
    alias.zero_()
    assert (tensor == 0).all()
    tensor.fill_(0x01020304)
    assert alias.tolist() == [4, 3, 2, 1] * 10


def test_an_alias_keeps_the_memory() -> None:
    alias = nvmeio.cast_to_byte_tensor(torch.full((1 << 16,), 3, dtype=torch.int16))
    others = [torch.full((1 << 16,), 4, dtype=torch.int16) for _ in range(10)]
    assert alias.tolist() == [3, 0] * (1 << 16)
    assert len(others) == 10


@pytest.mark.parametrize(
    ("shape", "nbytes"), [((), 8), ((0,), 0), ((3, 0, 2), 0), ((1,), 8), ((2, 3, 4), 192)], ids=str
)
def test_shapes_become_one_dimension(shape: tuple[int, ...], nbytes: int) -> None:
    tensor = torch.ones(shape, dtype=torch.float64)
    assert nvmeio.cast_to_byte_tensor(tensor).shape == (nbytes,)


def test_views_alias_their_own_part() -> None:
    base = torch.arange(100, dtype=torch.int16)
    alias = nvmeio.cast_to_byte_tensor(base[10:20])
    assert alias.tolist() == [n for value in range(10, 20) for n in (value, 0)]
    alias[0] = 99
    assert base[10] == 99
    assert (base[:10] == torch.arange(10)).all()
    rows = torch.arange(24, dtype=torch.uint8).view(4, 6)
    assert nvmeio.cast_to_byte_tensor(rows[2]).tolist() == list(range(12, 18))


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_gives_a_list(kind: type) -> None:
    tensors = [torch.zeros(3), torch.ones(2, 2, dtype=torch.int8), torch.tensor(1.5)]
    aliases = nvmeio.cast_to_byte_tensor(kind(tensors))
    assert type(aliases) is list
    assert [alias.numel() for alias in aliases] == [12, 4, 4]
    assert [alias.data_ptr() for alias in aliases] == [tensor.data_ptr() for tensor in tensors]
    assert nvmeio.cast_to_byte_tensor([]) == []


def test_parameters_and_inference_tensors_have_bytes() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    alias = nvmeio.cast_to_byte_tensor(parameter)
    assert not alias.requires_grad
    assert alias.data_ptr() == parameter.data_ptr()
    with torch.inference_mode():
        tensor = torch.ones(4)
        assert nvmeio.cast_to_byte_tensor(tensor).data_ptr() == tensor.data_ptr()
    assert raw(nvmeio.cast_to_byte_tensor(tensor)) == raw(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4).t(),
        torch.zeros(10)[::2],
        torch.zeros(1).expand(5),
        torch.zeros(4, dtype=torch.complex64).conj(),
        torch.zeros(4, dtype=torch.complex64).conj().imag,
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negative"],
)
def test_no_alias_of_what_is_not_contiguous(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"no byte alias; call \.contiguous") as caught:
        nvmeio.cast_to_byte_tensor(tensor)
    assert type(caught.value) is ValueError
    assert str(tuple(tensor.shape)) in str(caught.value)
    with pytest.raises(ValueError, match="no byte alias"):
        nvmeio.cast_to_byte_tensor([torch.zeros(1), tensor])


@pytest.mark.parametrize("bad", [None, b"bytes", 3, "text", [1], {"a": torch.zeros(1)}], ids=repr)
def test_no_alias_of_what_is_no_tensor(bad: object) -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor, not "):
        nvmeio.cast_to_byte_tensor(bad)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.zeros(3, device="meta"), "device='cpu'"),
        (lambda: torch.eye(3).to_sparse(), r"indices\(\) and values\(\)"),
        (lambda: torch.eye(3).to_sparse_csr(), r"indices\(\) and values\(\)"),
    ],
    ids=["meta", "sparse", "csr"],
)
def test_tensors_without_memory_are_refused(make: Callable[[], torch.Tensor], says: str) -> None:
    tensor = make()
    for take in (tensors_module.source, tensors_module.destination, nvmeio.cast_to_byte_tensor):
        with pytest.raises(TypeError, match=says):
            take(tensor)


def test_wrapper_subclasses_are_refused() -> None:
    """As DTensor: it holds tensors and is none, memory-wise."""

    class Wrapper(torch.Tensor):
        inner: torch.Tensor  # type: ignore[assignment]

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Wrapper:
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            made.inner = inner
            return made

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["inner"], None

        @staticmethod
        def __tensor_unflatten__(
            inner: dict[str, torch.Tensor], _: None, size: object, stride: object
        ) -> Wrapper:
            return Wrapper(inner["inner"])

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: object, types: object, args: object = (), kwargs: object = None
        ) -> object:
            raise NotImplementedError(func)

    wrapped = Wrapper(torch.zeros(4))
    for take in (tensors_module.source, tensors_module.destination, nvmeio.cast_to_byte_tensor):
        with pytest.raises(TypeError, match=r"Wrapper wraps other tensors.*to_local"):
            take(wrapped)


# source and destination


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_id)
def test_contiguous_memory_is_used_in_place(dtype: torch.dtype) -> None:
    tensor = make_tensor(dtype, DATA)
    for memory in (tensors_module.source(tensor), tensors_module.destination(tensor)):
        assert (memory.address, memory.nbytes) == (tensor.data_ptr(), len(DATA))
        assert memory.copy_back is None
        assert memory.keep.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if d not in QUANTISED], ids=dtype_id)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_other_memory_is_staged(dtype: torch.dtype) -> None:
    data = bytes(byte & 1 for byte in DATA) if dtype is torch.bool else DATA
    tensor = make_tensor(dtype, data).view(-1, 3).t()
    staged = tensors_module.source(tensor)
    assert staged.address != tensor.data_ptr()
    assert staged.nbytes == len(data)
    item = dtype.itemsize
    items = [data[n : n + item] for n in range(0, len(data), item)]
    expected = b"".join(b"".join(items[column::3]) for column in range(3))
    assert staged.read(0, staged.nbytes) == expected
    assert tensors_module.destination(tensor).copy_back is not None


def test_a_subclass_with_plain_memory_works() -> None:
    class Named(torch.Tensor):
        pass

    tensor = torch.arange(6.0).as_subclass(Named)
    assert tensors_module.source(tensor).read(0, 24) == raw(torch.arange(6.0))
    memory = tensors_module.destination(tensor)
    assert memory.nbytes == 24
    assert memory.copy_back is not None
    memory.copy_back()


def test_what_was_staged_is_copied_back() -> None:
    tensor = torch.zeros(3, 2).t()
    memory = tensors_module.destination(tensor)
    staging = torch.empty(0).set_(memory.keep)  # type: ignore[call-overload]
    assert staging.data_ptr() == memory.address
    staging.copy_(torch.arange(6.0))
    version = tensor._version
    assert memory.copy_back is not None
    memory.copy_back()
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensor._version > version


def test_touch_is_a_change_in_place() -> None:
    tensor = torch.zeros(3)
    view = tensor[1:]
    version = tensor._version
    tensors_module.touch(view)
    assert tensor._version == version + 1
    with torch.inference_mode():
        inference = torch.zeros(3)
    tensors_module.touch(inference)  # has no version, and needs none


def test_a_packed_tensor_is_as_long_as_its_storage() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch._empty_affine_quantized([7], scale=1.0, zero_point=0, dtype=torch.quint4x2)
    assert tensor.nbytes == 7
    assert tensors_module.source(tensor).nbytes == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_tensors() -> None:
    tensor = torch.arange(10, dtype=torch.int32, device="cuda")
    alias = nvmeio.cast_to_byte_tensor(tensor)
    assert alias.device == tensor.device
    assert alias.data_ptr() == tensor.data_ptr()
    staged = tensors_module.source(tensor)
    assert staged.read(0, 40) == raw(torch.arange(10, dtype=torch.int32))
    memory = tensors_module.destination(tensor)
    staging = torch.empty(0, dtype=torch.int32).set_(memory.keep)  # type: ignore[call-overload]
    staging.copy_(torch.arange(10, 20))
    assert memory.copy_back is not None
    memory.copy_back()
    assert tensor.tolist() == list(range(10, 20))
