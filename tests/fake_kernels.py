"""Kernels of the stand-in's device: operations of torch that are asked of a stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import fake_memory
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from nvmeio._memory import mappings

_here = threading.local()


class Kernels(TorchDispatchMode):
    """Operations on the accelerator's memory are asked of the current stream of its device.

    And what an operation of the CPU does with memory that copies go to and from is known to the
    order of accesses. Within itself, in one thread, it changes nothing.
    """

    def __init__(self, cuda: Any) -> None:
        super().__init__()
        self._cuda = cuda
        self._inner: list[bool] = []

    def __enter__(self) -> Any:
        is_inner = getattr(_here, "cuda", None) is self._cuda
        self._inner.append(is_inner)
        if is_inner:
            return self
        _here.cuda = self._cuda
        return super().__enter__()

    def __exit__(self, *raised: Any) -> Any:
        if self._inner.pop():
            return None
        _here.cuda = None
        return super().__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cuda, kwargs = self._cuda, kwargs or {}
        if any(map(is_wrapper, types)):  # what it does with its parts comes here again
            return NotImplemented
        if cuda.stopped or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            return func(*args, **kwargs)  # or only of shapes, as DTensors ask for
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        first = next((t for t in tensors if cuda.has(t)), None)
        schema = func._schema
        returns = [r.alias_info for r in schema.returns]
        if any(info is not None and not info.is_write for info in returns):
            return func(*args, **kwargs)  # a view
        is_beside = func.namespace == "_c10d_functional" and first is not None
        if is_beside and not _is_collective(func):  # it waits for one, or has somebody wait
            return args[0]  # what comes later on its stream comes after it
        if func.namespace == "fsdp":  # several kernels; some results are views, and do not say so
            return self._of_its_parts(func, args, kwargs)
        wanted = kwargs.get("device")
        if first is None and isinstance(wanted, torch.device) and wanted.type == "cuda":
            # A factory: what it makes is moved there.
            return self._made_there(func, args, kwargs, wanted)
        if first is None:
            if cuda.order.host_spans:
                self._of_the_host(func, tensors, args, kwargs)
            return func(*args, **kwargs)
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU"):
            raise NotImplementedError(f"the stand-in has the CPU's kernels, and none is for {func}")
        where = cuda.device_of(first)
        if isinstance(wanted, torch.device):
            casts = func is torch.ops.aten._to_copy.default  # autograd's, who says "cpu" of these
            if wanted.type != "cuda" and not (casts and wanted.type == "cpu"):
                return func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
            if wanted.type == "cuda":
                where = torch.device("cuda", cuda.index_of(wanted))
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        written = _written(schema, args, kwargs)
        stream: Any = cuda.current_stream(where)
        name, reads = f"{func} on {stream}", [span(t) for t in tensors if cuda.has(t)]
        if schema.name.startswith(("aten::new_", "aten::empty")) or schema.name.endswith("_like"):
            reads = []  # of the shape alone
        if func is torch.ops.aten.copy_.default and not cuda.has(args[0]):
            if _goes_on_beside(args[0], *args[2:]):
                return self._down_beside(stream, name, *args[:2])
            cuda.order.asked(stream.number, name, [span(args[1])], [])
            stream.synchronize()
            return func(args[0], cuda.inside(args[1]))
        other: Any = stream
        if func is torch.ops.aten.copy_.default and cuda.has(args[1]):
            other = cuda.current_stream(cuda.device_of(args[1]))
        if other is not stream:  # of another device: torch has both wait for each other
            stream.wait_stream(other)
        strangers = [t for t in tensors if t.dim() and t.numel() and not cuda.has(t)]
        strangers += [t for t in tensors if cuda.has(t) and cuda.device_of(t) != where]
        if strangers and func is not torch.ops.aten.copy_.default:
            raise RuntimeError(f"{func}: expected all tensors on the same device")
        read = [id(t) for t in written]
        source = args[1] if func is torch.ops.aten.copy_.default else None
        if source is not None and not cuda.has(source) and _goes_on_beside(source, *args[2:]):
            cuda.order.note_host(*span(source))
            reads.append(span(source))
        else:
            source = None

        def there(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if value is source:  # looked at when it is done, and not kept until then
                return fake_memory.bare(value.detach())
            if cuda.has(value):
                return cuda.inside(value.detach())
            return value if id(value) in read else value.detach().clone()

        there_args, there_kwargs = tree_map(there, (args, kwargs))
        kept = (args, kwargs)  # a kernel's memory is not given away before it was asked

        def call() -> Any:
            return quietly(lambda: _to_its_end(func, func(*there_args, **there_kwargs)))

        if written:
            writes = [span(t) for t in written if cuda.has(t)]
            cuda.order.asked(stream.number, name, reads, writes)
            stream.ask(lambda: (call(), None)[1])
            if other is not stream:
                other.wait_stream(stream)
            if not all(cuda.has(t) for t in written):  # a number that the host looks at
                stream.synchronize()
            found = [t for info, t in zip(returns, written, strict=False) if info is not None]
            return found[0] if len(found) == 1 else tuple(found) or None
        if not any(isinstance(r.type, (torch.TensorType, torch.ListType)) for r in schema.returns):
            cuda.order.asked(stream.number, name, reads, [])
            stream.synchronize()
            return call()
        with cuda.device(where):
            made = tree_map(lambda t: cuda.like(t) if _real(t) else t, self._shapes(func, kept))
        results = [t for t in tree_leaves(made) if _real(t)]
        targets = [cuda.inside(t) if cuda.has(t) else t for t in results]

        def work() -> None:
            results = [t for t in tree_leaves(call()) if _real(t)]
            for target, result in zip(targets, results, strict=True):
                if target.numel():
                    quietly(lambda t=target, r=result: t.copy_(r))

        writes = [] if "empty" in schema.name else [span(t) for t in results if cuda.has(t)]
        cuda.order.asked(stream.number, name, reads, writes)
        if _is_collective(func):
            cuda.collectives.ask(stream, work)
        else:
            stream.ask(work)
        return made

    def _of_its_parts(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        super().__enter__()
        try:
            return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _down_beside(
        self, stream: Any, name: str, target: torch.Tensor, source: torch.Tensor
    ) -> torch.Tensor:
        """A copy to page-locked memory, which nobody waits for."""
        self._cuda.order.note_host(*span(target))
        self._cuda.order.asked(stream.number, name, [span(source)], [span(target)])
        there, inside = fake_memory.bare(target.detach()), self._cuda.inside(source.detach())
        kept = [target]  # torch gives it to nobody before the copy is done

        def copy() -> None:
            quietly(lambda: there.copy_(inside))
            kept.clear()

        stream.ask(copy)
        return target

    def _made_there(self, func: Any, args: Any, kwargs: dict[str, Any], where: Any) -> Any:
        made = func(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False})
        with self._cuda.device(where):
            if "empty" in func._schema.name:
                return self._cuda.like(torch.empty_like(made, device="meta"))
            return self._cuda.tensor(made)

    def _of_the_host(self, func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        lowest, highest = self._cuda.order.host_spans
        written: list[int] | None = None
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
                continue
            start, nbytes = span(tensor)
            if start < highest and lowest < start + nbytes:
                if written is None:
                    written = [id(t) for t in _written(func._schema, args, kwargs)]
                writes = id(tensor) in written
                self._cuda.order.host(f"{func} of the host", start, nbytes, writes)

    def _shapes(self, func: Any, given: Any) -> Any:
        args, kwargs = tree_map(_meta, given)
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = torch.device("meta")
        found = func(*args, **kwargs)
        if func is torch.ops.aten.native_layer_norm.default:
            # The kernels that compute are the CPU's, which keep the mean in the dtype of the rows.
            return tuple(each.to(args[0].dtype) for each in found)
        return found


def _goes_on_beside(host: torch.Tensor, non_blocking: bool = False) -> bool:
    """Whether a copy from or to host memory goes on after the call: others are staged."""
    locked = non_blocking and host.is_contiguous() and host.numel()
    return bool(locked) and mappings.locked.covers(*span(host))


def _is_collective(func: Any) -> bool:
    """Whether it is one of DTensor's."""
    is_one = func.namespace == "_c10d_functional"
    return is_one and any(each.name == "group_name" for each in func._schema.arguments)


def _to_its_end(func: Any, result: Any) -> Any:
    """What it made; of a collective, once every rank is there."""
    if not _is_collective(func):
        return result
    return tree_map(torch.ops._c10d_functional.wait_tensor, result)


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this type have no memory of their own, as DTensors."""
    return kind.__name__ in ("DTensor", "AsyncCollectiveTensor")


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's first element is, and the bytes from there to the end of its last."""
    if not tensor.numel():
        return 0, 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    extent = (sum((n - 1) * s for n, s in strides) + 1) * tensor.dtype.itemsize
    start = tensor.untyped_storage().data_ptr()
    return start + int(tensor.storage_offset()) * tensor.dtype.itemsize, extent


def quietly(work: Callable[[], Any]) -> Any:
    """Neither autograd nor a mode sees it, and it computes alike in whichever thread does it."""
    torch.get_num_threads()  # else a new thread's products know nothing of `set_num_threads`
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        return work()


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _real(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _written(schema: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found
