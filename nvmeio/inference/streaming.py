"""`stream_model`: a model whose weights stay on disk."""

from __future__ import annotations

import contextlib
import os
import time
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from nvmeio import _checks
from nvmeio._checks import Paths
from nvmeio._distributed import DEFAULT_TIMEOUT_S
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._io import long_call
from nvmeio._io.long_call import profiled
from nvmeio._memory import devices
from nvmeio._threads.closing import on_error
from nvmeio.errors import IntegrityError
from nvmeio.handle import AioHandle
from nvmeio.inference import _hooks, kv_cache
from nvmeio.inference._experts.expectation import experts_that_fit
from nvmeio.inference._experts.ranks import ExpertParallel
from nvmeio.inference._model_plan import Asked, ModelPlan, name_of, plan_model
from nvmeio.inference._parallel.stream_ranks import Ranks
from nvmeio.inference._plan import packed_format, transformers
from nvmeio.inference.weight_stream import WeightStream
from nvmeio.progress import Progress

Streamed = TypeVar("Streamed", bound="StreamedModel")


class StreamedModel(nn.Module):
    """The model that `stream_model` returns: of its own class, and of this one beside it.

    The class is for type checkers. It leaves out what only some models have (`generate`, `config`),
    so these are `Any`. A model whose class refuses subclasses, or is a context manager already, is
    of its own class alone.

    Attributes:
        weight_stream: Reads the weights.
    """

    weight_stream: WeightStream

    def __enter__(self: Streamed) -> Streamed:
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the stream."""
        self.weight_stream.__exit__(*error)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise, and say what to do."""
        return self.weight_stream.__reduce_ex__(protocol)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def stream_model(
    model_or_config_or_path: nn.Module | Any | Paths,
    checkpoint: Paths | None = None,
    *,
    device: str | int | torch.device = "cpu",
    window: int | None = None,
    resident_bytes: int | str | None = None,
    host_bytes: int | str | None = None,
    handle: AioHandle | None = None,
    dtype: torch.dtype | str | None = None,
    kv_offload: bool | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = False,
    layers: Sequence[nn.Module | str] | None = None,
    strict: bool = True,
    checksum: bool = True,
    revision: str | None = None,
    progress: Progress | None = None,
    trainable: bool = False,
    compute: Literal["auto", "packed", "widened"] = "auto",
    process_group: Any = None,
    tp_plan: str | Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> StreamedModel:
    """A model whose weights are read from disk while it computes.

    `forward` and `generate` are the model's own. Logits and tokens are those of the model loaded
    whole, bit for bit (for quantised models see `compute`). All weights together take
    `resident_bytes` of memory. Memory that the model allocates while it computes comes on top.

    Args:
        model_or_config_or_path: A directory that `save_pretrained` or `nvmeio pack` wrote; the name
            of a repository on the Hugging Face hub, from its cache or downloaded
            (``HF_HUB_OFFLINE=1`` forbids that); a transformers configuration; or any
            `torch.nn.Module` with its parameters on the meta device, which is changed in place and
            returned. A list of directories is a model that `nvmeio pack` wrote over several drives:
            all are read at once, and may be named in any order.
        checkpoint: The weights, as safetensors: a file, an index of shards, a directory
            that holds either, or a list as above. Not needed if the model is a directory.
        device: The device that it computes on. A GPU gets the layers through page-locked memory,
            copied on a stream of its own. Host and GPU each hold `resident_bytes`, the window
            included, and the host more with `host_bytes`.
        window: How many layers the window holds, the one in use included; 3, or fewer if
            `resident_bytes` has no room for them.
        resident_bytes: Bytes of memory for all weights, or a size such as "24G" (GiB): layers that
            stay, the window, and room for conversions. As many layers as fit stay. If not even one
            fits, layers are cut into their modules, and linear layers into tiles, whose outputs may
            differ in the last bits (docs/inference.md). By default half of the free memory (of the
            machine, the cgroup, or under RLIMIT_AS and RLIMIT_DATA; of the GPU, if that is less).
        host_bytes: On a GPU: page-locked memory for weights, or a size such as "96G". The part
            beyond `resident_bytes` keeps more experts of a mixture, which are copied from there to
            the GPU. By default as much as `resident_bytes`, or half of the free memory where that
            is not given either.
        handle: Moves the bytes and stays open; by default one for each drive with the setting
            stored for its file system, for as long as the stream is open.
        dtype: Convert weights to this dtype, or the one of this name ("bfloat16"), when they are
            used; by default that of the configuration. Files that have this dtype already are
            faster: ``nvmeio pack --dtype``.
        kv_offload: The place of past keys and values of idle layers. True: page-locked memory (GPU)
            or a temporary file (CPU). A path: a file in that directory. A list of paths: a file on
            each of several drives, which work at once. For transformers' models that use a
            `DynamicCache`.
        layers: The modules, or their names, that are streamed as one. By default transformers'
            decoder and encoder layers; in other models the members of the outermost ModuleList and
            Sequential containers.
        strict: Refuse a checkpoint with tensors that the model has no place for.
        checksum: Compare the bytes of a packed model with the checksums in its index, and blocks of
            `kv_offload` in a file with what was written. Rows of an embedding that are read one by
            one are not compared.
        revision: Branch, tag or commit of a repository on the hub; by default its main branch.
        progress: Called in each pass, by the thread that computes, before each layer is used:
            ``progress(name, done_bytes, total_bytes)``, of the weights of all layers; see
            `nvmeio.progress`. If it raises, the forward raises that. It may be changed:
            ``model.weight_stream.progress``.
        trainable: Let gradients go through the model, for adapters that are added afterwards
            (``peft.get_peft_model``, or modules of your own). Adapters, and copies of modules
            (`modules_to_save`), are in memory. Backward reads the weights once more, in reverse.
            The weights get no gradients and are in no `state_dict`. Experts are read whole. On the
            CPU or a CUDA device.
        compute: How linear layers, embeddings and fused experts compute with weights that
            `nvmeio pack` quantised. They stay packed in memory. "auto" multiplies few rows with the
            packed weights, and for many rows widens a part of the weights at a time; how many is
            measured once in a process. "packed" never widens on a CPU. Both sum the elements that
            widening gives in another order (docs/inference.md has the bounds). "widened" converts
            each layer whole before it is used, which takes memory for one, and gives the bits of a
            model that has these weights. Weights in FP8 or MXFP4 are widened matrix by matrix for
            their products, with "widened" layer by layer: both give the bits of `from_pretrained`
            on a CPU.
        process_group: A `torch.distributed` group whose ranks all call this with the same model
            and the same settings: each reads an equal part of every layer from its own files, and
            gets the rest from the others. Prompts, and the number of passes, are each rank's own.
            `model_or_config_or_path` may be the directory that ``nvmeio pack --ranks`` wrote.
        tp_plan: "auto": the ranks of `process_group` compute one model together. Linear layers are
            cut by transformers' own plan for the model: each rank reads its rows or columns of
            them, and all of what is not cut; transformers' hooks exchange results. A dictionary
            replaces some of the plan's words. All ranks make the same passes with the same
            prompts, one at a time. On the CPU, from plain or packed files. If a pass fails on
            one rank, all refuse to go on. "experts": each rank keeps and reads some of a mixture's
            experts, and computes with them for all; the ranks have prompts of their own, and make
            the same number of passes.
        timeout_s: How long a rank may make no progress before it is given up, in seconds.

    Returns:
        The model, in evaluation mode if it was made here. A ``with`` statement closes its stream,
        which gives memory and descriptors back. ``model.weight_stream`` is that `WeightStream`:
        close it, reopen it, await work beside it, read its counters.

    Raises:
        IntegrityError: A header or index is malformed or a file truncated; a tensor is missing, has
            no place in the model, or has another shape. Names tensor and file.
        FileNotFoundError: There is no such file or directory, and no such repository in the hub's
            cache or, where downloads are allowed, on the hub.
        ValueError: `resident_bytes` does not hold the bytes that are needed at once
            (`BudgetTooSmall`, whose `least` would do); parameters lie on a real device; buffers
            that no checkpoint holds on the meta device; unknown `layers`; a directory holds the
            part of another rank, or of another number of ranks; directories are not all those that
            were packed together; `tp_plan` is of a model that has no plan, says a word that cannot
            be streamed (named), or is given for a model that others quantised, a tied weight, a GPU
            or without `process_group`, or for some of the processes.
        TransferError: Another rank failed, died or did not come, here or in a forward.
        BackendUnavailableError: transformers is needed and not installed.
        MemoryError: There is less memory than `resident_bytes`.

    The forward raises `TransferError` (an OSError) where a read fails and `IntegrityError` where a
    file was written to, or holds other bytes than were packed, each naming tensors and file; no
    value is computed from such bytes. The model can be used again afterwards, with a new cache.

    Cost: headers are read, and the memory is mapped and touched, here (0.1 s per GiB); resident
    layers are read in the course of the first pass.

    Examples:
        >>> with nvmeio.stream_model("Llama-3-70B", resident_bytes=24 << 30) as model:
        ...     tokens = model.generate(ids, max_new_tokens=32)
    """
    began = time.perf_counter()
    ranks = Ranks.of_group(process_group, timeout_s, name_of(checkpoint, model_or_config_or_path))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_telling(ranks))
        _checks.timeout(timeout_s)
        told = long_call.checked(progress)
        asked = Asked.checked(
            model_or_config_or_path,
            checkpoint,
            revision=revision,
            rank=None if ranks is None else ranks.rank,
            device=device,
            dtype=dtype,
            window=window,
            resident_bytes=resident_bytes,
            host_bytes=host_bytes,
            layers=layers,
            strict=strict,
            checksum=checksum,
            trainable=trainable,
            compute=compute,
            generates=kv_offload is not False,
            process_group=process_group,
            tp_plan=tp_plan,
        )
        stack.enter_context(profiled("stream_model", "plan"))
        opened = stack.enter_context(contextlib.closing(packed_format.open_model(asked.sources)))
        plan = plan_model(asked, opened, ranks)
    model, where, sources, ranks = plan.model, asked.device, asked.sources, plan.ranks
    with _telling(ranks):
        devices.move_buffers(model, where)

    def open_again() -> SafetensorsSet:
        again = packed_format.open_model(sources)
        with on_error(again.close):
            _check_same(plan, again, checksum)
        return again

    with _telling(ranks), contextlib.ExitStack() as undo, profiled("stream_model", "open"):
        close_caches = None
        if kv_offload is not False:
            close_caches = kv_cache.offload(model, handle, where, kv_offload, checksum)
            undo.callback(close_caches)
        stream = WeightStream(
            partition=plan.parts,
            experts=plan.experts,
            shares=plan.shares,
            device=where,
            open_checkpoint=open_again,
            handle=handle,
            paths=sources,
            beside=close_caches,
            trainable=trainable,
            ranks=ranks,
        )
        undo.callback(stream.close)
        _hooks.attach(model, stream)
        if plan.parallel is not None:
            plan.parallel.attach(model)
        if isinstance(plan.parallel, ExpertParallel):
            plan.parallel.share_out(plan.experts)
        model.weight_stream = stream
        _close_by_with(model)
        if asked.is_transformers and asked.directory is not None:
            transformers.finish(model, asked.directory, asked.name)
        stream.progress = told
        undo.pop_all()
    shares = plan.shares
    detail = f"{shares.resident} bytes stay, {shares.window} are the window, the rest is streamed"
    if plan.experts:
        detail += f"; {experts_that_fit(plan.experts, shares.experts)}"
    seconds = time.perf_counter() - began
    long_call.completed("opened a stream of", sources[0], 0, seconds, detail)
    streamed: StreamedModel = model
    return streamed


def _close_by_with(model: nn.Module) -> None:
    """Make a model a context manager; Python looks for that in its class, which gets a subclass."""
    cls = type(model)
    if hasattr(cls, "__enter__"):
        return
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    names["__reduce_ex__"] = StreamedModel.__reduce_ex__  # of a class that has one, too
    # A model's own __init_subclass__ may refuse: then it streams anyway, without `with`.
    with contextlib.suppress(Exception):
        made = types.new_class(
            cls.__name__, (cls, StreamedModel), exec_body=lambda space: space.update(names)
        )
        model.__class__ = made


def _telling(ranks: Ranks | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if ranks is None else ranks.telling()


def _check_same(plan: ModelPlan, again: SafetensorsSet, checksum: bool) -> None:
    """Raise where files are not those that the model was planned from."""
    before = plan.stored
    if before != again.tensors:
        changed = sorted(
            name
            for name in {*before, *again.tensors}
            if before.get(name) != again.tensors.get(name)
        )[0]
        what = f"{changed!r} is elsewhere, or gone"
        raise _another(again, what, before.get(changed), again.tensors.get(changed))
    if plan.differs(again, checksum):
        what = "it was packed again, from other weights"
        raise _another(again, what, "the same weights", "others")


def _another(again: SafetensorsSet, what: str, before: object, now: object) -> IntegrityError:
    return IntegrityError(
        f"{again.path} differs from the checkpoint that the model was first streamed from: {what}. "
        "Call stream_model again",
        expected=before,
        found=now,
    )
