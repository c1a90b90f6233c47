"""The header of a safetensors file: parsed without trust, built. No I/O here.

A file is the header's length (8 bytes, little-endian), the header (JSON, padded with spaces), and
the tensors' bytes without a hole between them::

    {"__metadata__": {"format": "pt"},
     "weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …}

`parse` refuses what the safetensors package (0.8) refuses, with `IntegrityError`, before anything
is allocated for the tensors. It is stricter where the package's parser happens to take what the
format's description rules out: a key that occurs twice (the package keeps the last), a tensor's
description or dtype in another JSON form than the one above. tests/checkpoint/test_safetensors.py
compares the two on malformed files of every kind.

Source: https://github.com/huggingface/safetensors, README.md, "Format".
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nvmeio._formats.safetensors.shards import as_package
from nvmeio._pages import PAGE_BYTES, round_up
from nvmeio._storage.untrusted import unique_keys
from nvmeio.errors import IntegrityError, counted

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000

# The first tensor's place in a file: on a block of every drive, so that tensors go direct.
DATA_ALIGNMENT = max(4096, PAGE_BYTES)

# The package's alignment of tensor data.
PACKAGE_ALIGNMENT = 8

# Bits of an element and torch's name for it, by the format's. The narrow ones are packed. torch has
# no 6-bit dtypes, and older ones lack some of the 8- and 4-bit ones. In the package's order: it
# writes the tensors of the last dtype first, those of one dtype by name.
_ELEMENTS = {
    "BOOL": (8, "bool"),
    "F4": (4, "float4_e2m1fn_x2"),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}
BITS = {name: bits for name, (bits, _) in _ELEMENTS.items()}
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name)
    for name, (_, torch_name) in _ELEMENTS.items()
    if hasattr(torch, torch_name)
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANKS = {DTYPES[name]: rank for rank, name in enumerate(BITS) if name in DTYPES}

_METADATA = "__metadata__"
_quoted: Callable[[str], str] = json.encoder.encode_basestring  # what `ensure_ascii=False` takes
_MAX_UNSIGNED = (1 << 64) - 1
_MAX_SIZE = (1 << 63) - 1  # torch's sizes are signed
_MAX_DEPTH = 127  # of nested JSON; the package's parser stops there


class TensorEntry(NamedTuple):
    """One tensor of a file: its bytes are [start, end), counted from the first byte of the file.

    `dtype` is the format's name, such as "BF16". The shape is in elements: that of "F4", whose
    elements torch holds in pairs, has twice torch's last size.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def for_torch(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Its dtype and shape in torch; TypeError if torch has no such dtype or packed shape."""
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise as_package(TypeError)(
                f"dtype {self.dtype} is unknown to torch {torch.__version__}"
            )
        if self.dtype != "F4":
            return dtype, self.shape
        if self.shape[-1] % 2:
            raise as_package(TypeError)(
                f"a tensor of dtype F4 and shape {self.shape} does not exist in torch, which packs "
                "pairs along the last dimension: its size must be even"
            )
        return dtype, (*self.shape[:-1], self.shape[-1] // 2)


# There may be hundreds of thousands: `TensorEntry()` is a function of Python's.
_new_entry = functools.partial(tuple.__new__, TensorEntry)


class Header(NamedTuple):
    """The tensors of a file by name, in the order of their bytes, and its metadata."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


# The first bytes of other files that hold weights, and the advice for them.
_OTHERS = {
    b"PK\x03\x04": "it is a zip archive, as torch.save writes: read it with nvmeio.load",
    b"\x80": "it is a pickle, as torch.save once wrote: read it with nvmeio.load",
    b"\x93NUMPY": "it is an array of numpy: read it with numpy.load",
    b"GGUF": "it is llama.cpp's GGUF: have transformers load it, and save_pretrained()",
}


def header_bytes(prefix: bytes, file_bytes: int, where: str) -> int:
    """The length of the JSON, from a file's first 8 bytes, or all of it if it is shorter.

    Raises IntegrityError, which names `where`, if the file is too short for a header, or the length
    absurd.
    """
    if len(prefix) < LENGTH_BYTES:
        raise _bad(where, "too short for a header", "8 bytes or more", len(prefix))
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        for magic, what in _OTHERS.items():
            if prefix.startswith(magic):
                raise as_package(IntegrityError)(
                    f"{where} is not a safetensors file: {what}",
                    expected="the length of a header",
                    found=prefix[:LENGTH_BYTES],
                )
    if length > MAX_HEADER_BYTES:
        raise _bad(where, "its header is too large", f"at most {MAX_HEADER_BYTES} bytes", length)
    if LENGTH_BYTES + length > file_bytes:
        raise _bad(
            where, "its header ends beyond the file", f"at most {file_bytes - LENGTH_BYTES}", length
        )
    return length


def parse(text: bytes, file_bytes: int, where: str) -> Header:
    """Parse a header, all bytes between its length and the tensors, and check it.

    Raises IntegrityError, which names `where`, if it is malformed, or does not describe exactly the
    bytes that follow in a file of this size.
    """
    as_written = parse_as_written(text, file_bytes)
    if as_written is not None:
        return as_written
    found = _json(text, where)
    if type(found) is not dict:
        raise _bad(where, "its header is not a JSON object", "an object", type(found).__name__)
    metadata = _metadata(found.pop(_METADATA, None), where)
    base = LENGTH_BYTES + len(text)
    entries = {name: _entry(name, value, base, where) for name, value in found.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    position = base
    for name, entry in entries.items():
        if entry.start != position or entry.end < entry.start:
            raise _bad(
                where,
                f"the bytes of {name!r} overlap others or leave a hole",
                f"data_offsets from {position - base} on",
                [entry.start - base, entry.end - base],
            )
        position = entry.end
        _check_size(name, entry, where)
    if position != file_bytes:
        raise _bad(where, "the tensors do not end with the file", file_bytes, position)
    return Header(entries, metadata)


def build(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None,
    alignment: int = DATA_ALIGNMENT,
) -> tuple[bytes, dict[str, TensorEntry]]:
    """A header for these tensors, one behind the other, and the entry of each.

    `tensors` are name, dtype and torch's shape of each. The header is all bytes before the first
    tensor: a multiple of `alignment`, in bytes.

    Raises:
        TypeError: A dtype is unknown to the format.
        ValueError: A name or text is not valid Unicode, or the header is larger than 100 MB.
    """
    described: list[str] = []
    if metadata is not None:
        texts = json.dumps(dict(metadata), separators=(",", ":"), ensure_ascii=False)
        described.append(f'"{_METADATA}":{texts}')
    shapes: list[tuple[str, str, tuple[int, ...], int, int]] = []
    position = 0
    for name, dtype, sizes in tensors:
        kind = NAMES.get(dtype)
        if kind is None:
            raise TypeError(f"{name!r} has dtype {dtype}: convert it to one that safetensors has")
        shape = tuple(map(int, sizes))
        end = position + math.prod(shape) * dtype.itemsize
        if kind == "F4":
            if not shape:
                raise TypeError(f"{name!r} needs a dimension, for {dtype} is packed in pairs")
            shape = (*shape[:-1], shape[-1] * 2)
        described.append(
            f'{_quoted(name)}:{{"dtype":"{kind}","shape":[{",".join(map(str, shape))}],'
            f'"data_offsets":[{position},{end}]}}'
        )
        shapes.append((name, kind, shape, position, end))
        position = end
    try:
        text = f"{{{','.join(described)}}}".encode()
    except UnicodeEncodeError as failed:
        raise ValueError(f"a name or metadata text is not valid Unicode: {failed}") from None
    base = round_up(LENGTH_BYTES + len(text), alignment)
    length = base - LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header of {counted(len(tensors), 'tensor')} has {length} bytes, the format "
            f"allows {MAX_HEADER_BYTES}: use shards (max_shard_size) or shorter names"
        )
    entries = {
        name: _new_entry((dtype, shape, base + start, base + end))
        for name, dtype, shape, start, end in shapes
    }
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length), entries


def package_order(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors in the order in which the package writes them."""
    return dict(sorted(tensors.items(), key=lambda item: (-_RANKS[item[1].dtype], item[0])))


# A header as writers leave it: a fifth of the time for hundreds of thousands of tensors

_NUMBER = "(?:0|[1-9][0-9]{0,17})"
_TEXT = r'"[^"\\\x00-\x1f]*"'  # without escapes
_WRITTEN_METADATA = re.compile(
    rf'\{{"{_METADATA}":(\{{(?:{_TEXT}:{_TEXT}(?:,{_TEXT}:{_TEXT})*)?\}})(?=[,}}])'
)
_WRITTEN_ENTRY = re.compile(
    rf'([{{,])({_TEXT}):\{{"dtype":"([A-Z0-9_]+)","shape":\[((?:{_NUMBER}(?:,{_NUMBER})*)?)\],'
    rf'"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}'
)
# The length of an entry without its name and values.
_ENTRY_EXTRA = len(',:{"dtype":"","shape":[],"data_offsets":[,]}')


def parse_as_written(text: bytes, file_bytes: int) -> Header | None:
    """The header if it is right and in the form that all known writers use, else None.

    The package writes that form: no spaces but at the end, no escapes, and the three fields in its
    order. One pass of a regular expression, which takes every byte, stands for the JSON parser.
    """
    try:
        written = text.decode("utf-8").rstrip(" ")
    except UnicodeDecodeError:
        return None
    metadata: dict[str, str] = {}
    if (match := _WRITTEN_METADATA.match(written)) is not None:
        metadata = json.loads(match[1])
        if len(metadata) * 4 != match[1].count('"'):  # a key twice
            return None
        rest = written[match.end() :]
        if rest.startswith(",}"):
            return None
        written = "{" + rest.removeprefix(",")
    if not (written.startswith("{") and written.endswith("}")):
        return None
    written = written[:-1]
    base = LENGTH_BYTES + len(text)
    entries: dict[str, TensorEntry] = {}
    sizes: dict[tuple[str, str], tuple[str, tuple[int, ...], int, int]] = {}
    before, position, is_sorted, taken, count = "{", 0, True, 0, 0
    for lead, quoted, dtype, shape, start, end in _WRITTEN_ENTRY.findall(written):
        known = sizes.get((dtype, shape))
        if known is None:
            bits = BITS.get(dtype, 0)
            sizes_of = tuple(map(int, shape.split(","))) if shape else ()
            bits *= math.prod(sizes_of)
            if dtype not in BITS or bits % 8 or math.prod(filter(None, sizes_of)) > _MAX_SIZE >> 8:
                return None
            extra = _ENTRY_EXTRA + len(dtype) + len(shape)
            known = sizes[dtype, shape] = (dtype, sizes_of, bits // 8, extra)
        first, last = int(start), int(end)
        if lead != before or last - first != known[2]:
            return None
        is_sorted = is_sorted and first == position
        before, position = ",", last
        taken += len(quoted) + len(start) + len(end) + known[3]
        count += 1
        entries[quoted[1:-1]] = _new_entry((known[0], known[1], base + first, base + last))
    if taken != len(written) - (not count):
        return None  # something lies between them
    if len(entries) != count or _METADATA in entries:
        return None
    if not is_sorted:
        entries = dict(sorted(entries.items(), key=lambda item: item[1][2:]))
        position = base
        for entry in entries.values():
            if entry.start != position:
                return None
            position = entry.end
        position -= base
    return Header(entries, metadata) if base + position == file_bytes else None


# Parts of a header


class _Refused(ValueError):
    """Raised inside the JSON parser."""


def _json(text: bytes, where: str) -> Any:
    try:
        decoded = text.decode("utf-8")
        found = json.loads(
            decoded,
            object_pairs_hook=unique_keys,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
        # A half of a surrogate pair can be written as \ud800; no text can hold it.
        if "\\u" in decoded:
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise _bad(where, "its header is nested too deeply", _MAX_DEPTH, "more") from None
    except ValueError as failed:
        raise _bad(
            where, f"its header is not valid JSON ({failed})", "JSON", "other text"
        ) from None
    return found


def _integer(digits: str) -> int | float:
    # Not even -0 is a length; and numbers that no float can hold are refused as such.
    return _float(digits) if digits[0] == "-" or len(digits) > 19 + 1 else int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _Refused(f"number out of range: {digits:.40}")
    return value


def _constant(name: str) -> float:
    raise _Refused(f"{name} is not a JSON value")


def _metadata(given: Any, where: str) -> dict[str, str]:
    if given is None:
        return {}
    if type(given) is not dict or any(type(value) is not str for value in given.values()):
        raise _bad(where, f"its {_METADATA} is not an object of texts", "texts", _brief(given))
    return given


def _entry(name: str, given: Any, base: int, where: str) -> TensorEntry:
    if type(given) is not dict:
        raise _bad(where, f"{name!r} is not described", "an object", _brief(given))
    for field in ("dtype", "shape", "data_offsets"):
        if field not in given:
            raise _bad(where, f"{name!r} is not described fully", field, sorted(given))
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if type(dtype) is not str or dtype not in BITS:
        raise _bad(where, f"{name!r} has an unknown dtype", ", ".join(BITS), _brief(dtype))
    if not _are_unsigned(shape):
        raise _bad(where, f"{name!r} has an impossible shape", "sizes >= 0", _brief(shape))
    if not _are_unsigned(offsets) or len(offsets) != 2:
        raise _bad(where, f"{name!r} has impossible data_offsets", "[start, end]", _brief(offsets))
    if len(given) > 3 and _depth(given) > _MAX_DEPTH - 1:
        raise _bad(where, f"{name!r} is nested too deeply", _MAX_DEPTH, "more")
    return TensorEntry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _are_unsigned(given: Any) -> bool:
    return type(given) is list and all(
        type(value) is int and 0 <= value <= _MAX_SIZE for value in given
    )


def _check_size(name: str, entry: TensorEntry, where: str) -> None:
    elements = 1
    for size in entry.shape:
        elements *= size
        if elements > _MAX_UNSIGNED:
            raise _bad(where, f"the shape of {name!r} overflows", "64 bits", entry.shape)
    bits = elements * BITS[entry.dtype]
    if bits > _MAX_UNSIGNED or bits % 8:
        raise _bad(where, f"{name!r} has no whole number of bytes", "a multiple of 8 bits", bits)
    if bits // 8 != entry.nbytes:
        raise _bad(
            where,
            f"the bytes of {name!r} do not match its dtype {entry.dtype} and shape {entry.shape}",
            f"{bits // 8} bytes",
            f"{entry.nbytes} bytes",
        )


def _depth(value: Any) -> int:
    """The depth of nested lists and dicts; without recursion."""
    depth, level = 0, [value]
    while level := [inner for inner in level if isinstance(inner, (list, dict))]:
        depth += 1
        level = [
            part for inner in level for part in (inner.values() if type(inner) is dict else inner)
        ]
    return depth


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _bad(where: str, what: str, expected: object, found: object) -> IntegrityError:
    return as_package(IntegrityError)(
        f"{where} is not a valid safetensors file: {what} (expected {expected}, found {found})",
        expected=expected,
        found=found,
    )
