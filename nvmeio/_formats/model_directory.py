"""Files beside the weights, in a transformers directory, that change the meaning of the weights.

An adapter is added to the weights by `from_pretrained`. A quantised checkpoint holds steps and
scales in the place of weights. Every way to read a directory asks here, so that none of them
computes with weights that transformers would not compute with.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from nvmeio._formats.safetensors import shards
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._storage.untrusted import INDEX_BYTES, read_object

_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
# Files that name a quantisation, and the keys that they have it under (ModelOpt, AWQ).
_OTHER_CONFIGS = {
    "hf_quant_config.json": ("quantization", "quant_algo"),
    "quant_config.json": ("quant_method", "w_bit"),
}
# Ends of names of what only a quantised checkpoint stores, and who writes them.
_STORED_BY = {
    "_scale_inv": "fp8",
    ".SCB": "bitsandbytes",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes",
    ".qweight": "gptq or awq",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "compressed-tensors",
    ".weight_scale_2": "modelopt",
    "_blocks": "mxfp4",
}


# Methods whose weights are widened as they are used, as transformers does when it loads on a CPU.
_READ = ("fp8", "mxfp4")


class Quantisation(NamedTuple):
    """The quantisation of a checkpoint by another library.

    Attributes:
        method: Its name, as in ``quantization_config["quant_method"]``.
        config: All of ``quantization_config``; empty where only the tensors' names tell.
    """

    method: str
    config: dict[str, Any]

    @property
    def is_read(self) -> bool:
        """Whether nvmeio reads weights that are quantised in this way."""
        if self.method == "compressed-tensors":
            return self._is_read_compressed
        return self.method in _READ

    @property
    def _is_read_compressed(self) -> bool:
        """Whether all groups are FP8 or whole integers by themselves, and nothing else changes."""
        about = self.config
        groups = about.get("config_groups")
        plain = not any(about.get(key) for key in ("sparsity_config", "transform_config"))
        compressed = about.get("quantization_status") == "compressed"
        if not (isinstance(groups, dict) and groups and plain and compressed):
            return False
        return about.get("kv_cache_scheme") is None and all(
            _is_read_group(group, about.get("format")) for group in groups.values()
        )

    @property
    def integers(self) -> list[tuple[int, int]]:
        """Bits and group size (0: a row) of each of its groups that is of integers."""
        groups = (self.config.get("config_groups") or {}).values()
        of_weights = [group["weights"] for group in groups if group["weights"]["type"] == "int"]
        return [(weights["num_bits"], weights.get("group_size") or 0) for weights in of_weights]

    @property
    def block(self) -> tuple[int, int] | None:
        """The rows and columns that share a scale in FP8, where the configuration says them."""
        sizes = self.config.get("weight_block_size")
        if not isinstance(sizes, (list, tuple)) or len(sizes) != 2:
            return None
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return None
        return sizes[0], sizes[1]


def _is_read_group(group: Any, common: Any) -> bool:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or weights.get("actorder"):
        return False
    form, strategy = group.get("format") or common, weights.get("strategy")
    kind, bits = weights.get("type"), weights.get("num_bits")
    if not weights.get("symmetric", True):
        return False
    if kind == "float":
        known = strategy in ("tensor", "channel", "block", "group")
        return bits == 8 and form == "float-quantized" and known
    size = weights.get("group_size") or 0
    known = strategy == "channel" or (strategy == "group" and type(size) is int and size > 0)
    return kind == "int" and bits in (4, 8) and form == "pack-quantized" and known


def refuse_adapter(directory: str | os.PathLike[str]) -> None:
    """Raise ValueError if a directory holds an adapter, which `from_pretrained` would add."""
    path = os.path.join(directory, _ADAPTER)
    if os.path.isfile(path):
        raise ValueError(
            f"{path} describes an adapter, which transformers' from_pretrained adds to the weights "
            "and nvmeio would leave out. Move adapter_config.json and the adapter_model files to a "
            "directory of their own, and add the adapter to the model: "
            "peft.PeftModel.from_pretrained(model, adapter_directory)"
        )


def quantisation_of(config: object) -> Quantisation | None:
    """The quantisation that a configuration names: transformers' object, or the JSON of one."""

    def value(name: str) -> Any:
        return config.get(name) if isinstance(config, dict) else getattr(config, name, None)

    named = value("quantization_config") or value("compression_config")
    if not named:
        return None
    described: dict[str, Any] = dict(named) if isinstance(named, dict) else dict(named.to_dict())
    method = described.get("quant_method")
    return Quantisation(str(getattr(method, "value", method) or "an unnamed method"), described)


def quantisation_in(directory: str | os.PathLike[str]) -> Quantisation | None:
    """The quantisation that a directory's files name; None if there is none, or no directory.

    IntegrityError if one of these files is malformed.
    """
    path = Path(directory)
    if not path.is_dir():
        path = path.parent  # of a file, or an index
    if (path / _CONFIG).is_file():
        named = quantisation_of(read_object(path / _CONFIG, INDEX_BYTES))
        if named is not None:
            return named
    for name, keys in _OTHER_CONFIGS.items():
        if not (path / name).is_file():
            continue
        described = read_object(path / name, INDEX_BYTES)
        if any(key in described for key in keys):
            producer = described.get("producer")
            method = producer.get("name") if isinstance(producer, dict) else None
            return Quantisation(str(method or described.get("quant_method", "awq")), described)
    return None


def quantisation_among(names: Iterable[str], stored: Container[str]) -> Quantisation | None:
    """The quantisation that some names show, among those of all stored tensors."""
    for name in names:
        for end, method in _STORED_BY.items():
            if name.endswith(end) and _stands_beside(name, end, stored):
                return Quantisation(method, {})
    return None


def _stands_beside(name: str, end: str, stored: Container[str]) -> bool:
    """Whether a name is one of several that hold a quantised weight together."""
    stem = name.removesuffix(end)
    if end in (".qweight", ".weight_packed", "_blocks"):
        beside = {"_blocks": "_scales", ".qweight": ".scales", ".weight_packed": ".weight_scale"}
        return stem + beside[end] in stored
    weight = stem if end == "_scale_inv" else f"{stem}.weight"
    return weight in stored


def refuse_quantised(named: Quantisation, where: str | os.PathLike[str]) -> NoReturn:
    """Raise ValueError: a checkpoint is quantised in a way that nvmeio does not read."""
    raise ValueError(
        f"{os.fspath(where)} is quantised by {named.method}, which nvmeio does not read in this "
        "form: its tensors are steps and scales, not weights. nvmeio reads FP8 with scales of "
        "blocks (weight_scale_inv), MXFP4 (_blocks, _scales) and compressed-tensors' "
        "float-quantized FP8 and pack-quantized integers, symmetric ones of 4 and 8 bits. Use the "
        "checkpoint that this one was made from; nvmeio pack --quant-bits makes it small again"
    )


def dtype_of(opened: SafetensorsSet) -> torch.dtype:
    """The dtype that transformers gives a model whose configuration names none.

    That is the one in the index's metadata, or else that of the first tensor with a floating dtype
    of 16 bits or more, in the order of names, of the first file. Without any, float32.
    """
    if shards.is_index(opened.path):
        metadata = read_object(opened.path, INDEX_BYTES).get("metadata")
        named = metadata.get("dtype") if isinstance(metadata, dict) else None
        if isinstance(named, str) and isinstance(getattr(torch, named, None), torch.dtype):
            return getattr(torch, named)  # type: ignore[no-any-return]
    first = min(range(len(opened.files)), key=lambda index: str(opened.files[index].path))
    stored = (each for _, each in sorted(opened.tensors.items()) if each.file == first)
    for each in stored:
        # Torch may lack a dtype: the code that reads the tensor raises then.
        with contextlib.suppress(TypeError):
            dtype, _ = each.entry.for_torch()
            if dtype.is_floating_point and dtype.itemsize > 1:
                return dtype
    return torch.float32
