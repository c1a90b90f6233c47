"""Tensors of the stand-in's memory say that they are a CUDA device's, and are made and moved there.

Torch believes that they are the CPU's: it is what asks them in Python that is answered otherwise
(`device`, `is_cuda`, `is_cpu`), so code that decides by these goes the way it goes for a device.
`to`, `cpu` and `cuda` move, and what makes a tensor on "cuda" makes it there (`fake_kernels`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_kernels import is_wrapper

from nvmeio._memory import mappings, page_locked


def tell_device(patch: pytest.MonkeyPatch, cuda: Any) -> None:
    """From now on; `cuda` is the stand-in."""
    base, tensors = torch._C.TensorBase, torch.Tensor
    own = {name: vars(base)[name] for name in ("device", "get_device")}
    own_to, own_tensor, own_as_tensor = tensors.to, torch.tensor, torch.as_tensor
    own_resize, own_size = torch.UntypedStorage.resize_, torch.UntypedStorage.size
    own_place = vars(torch._C.StorageBase)["device"]

    def device(tensor: torch.Tensor) -> torch.device:
        if is_wrapper(type(tensor)):
            return device(tensor._local_tensor)  # type: ignore[attr-defined]
        found: torch.device = own["device"].__get__(tensor)
        return cuda.place(tensor) if found.type == "cpu" and cuda.has(tensor) else found

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        copies = options.pop("copy", False)
        where: torch.device | None
        if args and isinstance(args[0], torch.Tensor):
            where, dtype, rest = device(args[0]), args[0].dtype, args[1:]
            waits_not = rest[0] if rest else options.get("non_blocking", False)
            memory_format = options.get("memory_format")
        else:
            parsed: Any = torch._C._nn._parse_to(*args, **options)
            where, dtype, waits_not, memory_format = parsed
        here = device(tensor)
        dtype = dtype or tensor.dtype
        if where is None or is_wrapper(type(tensor)):  # torch takes its device for the CPU
            where = here
        if where.type == "cuda":
            where = torch.device("cuda", cuda.index_of(where))
        if where == here or "cuda" not in (where.type, here.type):
            kept = {"memory_format": memory_format} if memory_format is not None else {}
            given = {} if where == here else {"device": where}
            return own_to(tensor, **given, dtype=dtype, copy=copies, **kept)
        made = torch.empty_like(
            tensor, device="meta", dtype=dtype, memory_format=torch.preserve_format
        )
        if where.type == "cpu" and waits_not and made.is_contiguous() and made.numel():
            there = page_locked.take(made.nbytes).view(dtype).view(made.shape)
        elif where.type == "cpu":
            there = torch.empty_strided(made.shape, made.stride(), dtype=dtype)
        else:
            with cuda.device(where):
                there = cuda.like(made)
        return there.copy_(tensor, non_blocking=waits_not) if tensor.numel() else there

    own_tolist = tensors.tolist

    def to_cuda(tensor: torch.Tensor, device: Any = None, **options: Any) -> torch.Tensor:
        return to(tensor, torch.device("cuda", cuda.index_of(device)), **options)

    def made_there(make: Any) -> Any:
        def made(data: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
            if device is None or torch.device(device).type != "cuda":
                if device is not None:
                    options["device"] = device
                return make(data, *args, **options)
            needs = options.pop("requires_grad", False)
            there = to(make(data, *args, **options), torch.device(device))
            return there.requires_grad_(needs)

        return made

    def place(storage: torch.UntypedStorage) -> torch.device:
        found: torch.device = own_place.__get__(storage)
        there = found.type == "cpu" and cuda.is_inside(storage.data_ptr())
        return cuda.place_at(storage.data_ptr()) if there else found

    def storage_to(storage: torch.UntypedStorage, device: Any, **options: Any) -> Any:
        where = torch.device(device)
        if where.type == place(storage).type:
            return storage
        flat = torch.tensor([], dtype=torch.uint8).set_(storage)
        return to(flat, where).untyped_storage()

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        """FSDP2 frees the memory of a tensor that stays, and has it given again."""
        if not cuda.is_inside(storage.data_ptr()):
            return own_resize(storage, nbytes)
        cuda.resize(storage.data_ptr(), nbytes)
        return storage

    def size(storage: torch.UntypedStorage) -> int:
        return 0 if storage.data_ptr() in cuda.emptied else own_size(storage)

    def index_of(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
        return int(cuda.index_of(device))

    def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        there = page_locked.new(max(tensor.nbytes, 1))[: tensor.nbytes]
        return there.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
        return mappings.locked.covers(tensor.untyped_storage().data_ptr(), tensor.nbytes)

    patch.setattr(tensors, "pin_memory", pin_memory)
    patch.setattr(tensors, "is_pinned", is_pinned)
    patch.setattr(tensors, "device", property(device))
    patch.setattr(tensors, "is_cuda", property(lambda t: device(t).type == "cuda"))
    patch.setattr(tensors, "is_cpu", property(lambda t: device(t).type == "cpu"))
    patch.setattr(
        tensors, "get_device", lambda t: device(t).index if cuda.has(t) else own["get_device"](t)
    )
    patch.setattr(tensors, "to", to)
    patch.setattr(tensors, "cpu", lambda t, **options: to(t, "cpu", **options))
    patch.setattr(tensors, "tolist", lambda t: own_tolist(to(t, "cpu")))
    patch.setattr(tensors, "cuda", to_cuda)
    patch.setattr(torch, "tensor", made_there(own_tensor))
    patch.setattr(torch, "as_tensor", made_there(own_as_tensor))
    patch.setattr(torch.UntypedStorage, "device", property(place))
    patch.setattr(torch.UntypedStorage, "is_cuda", property(lambda s: place(s).type == "cuda"))
    patch.setattr(torch.UntypedStorage, "to", storage_to)
    patch.setattr(torch.UntypedStorage, "resize_", resize_)
    patch.setattr(torch.UntypedStorage, "size", size)
    patch.setattr(torch.UntypedStorage, "cpu", lambda s: storage_to(s, "cpu"))
    patch.setattr(torch.UntypedStorage, "cuda", lambda s: storage_to(s, "cuda"))
    patch.setattr(torch.cuda._utils, "_get_device_index", index_of)
    patch.setattr(torch.cuda, "_lazy_init", lambda: None)
