"""Malformed safetensors files: the verdicts of the package and ours."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoint._safetensors_states import SafetensorError, of, write_file
from hypothesis import given, settings
from hypothesis import strategies as st

import nvmeio
from nvmeio._formats.safetensors import headers
from nvmeio.checkpoint.safetensors import (
    load_safetensors,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def verdicts(path: Path) -> tuple[Any, Any]:
    """Tensors, as dtype and shape by name, or the error: of the package, and ours."""
    try:
        with pytest.importorskip("safetensors").safe_open(path, "pt") as opened:
            theirs: Any = {
                name: (t.dtype, tuple(t.shape))
                for name in opened.keys()  # noqa: SIM118
                for t in [opened.get_tensor(name)]
            }
    except (SafetensorError, TypeError, RuntimeError) as failed:
        theirs = failed
    try:
        ours: Any = {n: (t.dtype, tuple(t.shape)) for n, t in load_safetensors(path).items()}
    except (nvmeio.IntegrityError, TypeError) as failed:
        ours = failed
    return theirs, ours


def assert_agree(path: Path) -> bool:
    """Whether both took the file, with the same tensors in it."""
    theirs, ours = verdicts(path)
    if isinstance(theirs, Exception):
        assert isinstance(ours, Exception), (path.read_bytes(), theirs)
        return False
    assert theirs == ours
    return True


FIELDS = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'
ONE = "{" + FIELDS + "}"
DATA = b"\0\0\0\0"


def two(dtype: str, shape: str, start: int, end: int) -> str:
    entry = f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}'
    return f'{{"a":{ONE},"b":{entry}}}'


REFUSED: dict[str, tuple[str, bytes]] = {
    "empty text": ("", b""),
    "no JSON": ("{", DATA),
    "a list": ("[]", b""),
    "null": ("null", b""),
    "a number": ("1", b""),
    "a text": ('"a"', b""),
    "trailing text": (f'{{"a":{ONE}}}x', DATA),
    "single quotes": ("{'a':" + ONE + "}", DATA),
    "a trailing comma": (f'{{"a":{ONE},}}', DATA),
    "NaN": (of('"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":NaN'), DATA),
    "infinity": (of('"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1e999'), DATA),
    "a huge integer": (
        of('"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1%s' % ("0" * 400)),
        DATA,
    ),
    "a byte order mark": ("\ufeff" + f'{{"a":{ONE}}}', DATA),
    "a raw control character": ('{"a\x01":' + ONE + "}", DATA),
    "half a surrogate pair": ('{"\\ud800":' + ONE + "}", DATA),
    "tensor is null": ('{"a":null}', b""),
    "tensor is a text": ('{"a":"F32"}', b""),
    "no dtype": (of('"shape":[1],"data_offsets":[0,4]'), DATA),
    "no shape": (of('"dtype":"F32","data_offsets":[0,4]'), DATA),
    "no offsets": (of('"dtype":"F32","shape":[1]'), DATA),
    "unknown dtype": (of('"dtype":"F33","shape":[1],"data_offsets":[0,4]'), DATA),
    "torch's dtype": (of('"dtype":"float32","shape":[1],"data_offsets":[0,4]'), DATA),
    "lower case": (of('"dtype":"f32","shape":[1],"data_offsets":[0,4]'), DATA),
    "dtype is null": (of('"dtype":null,"shape":[1],"data_offsets":[0,4]'), DATA),
    "dtype is a number": (of('"dtype":0,"shape":[1],"data_offsets":[0,4]'), DATA),
    "6-bit floats": (of('"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]'), b"\0\0\0"),
    "half a byte": (of('"dtype":"F4","shape":[3],"data_offsets":[0,2]'), b"\0\0"),
    "a pair across rows": (of('"dtype":"F4","shape":[8,1],"data_offsets":[0,4]'), DATA),
    "negative size": (of('"dtype":"F32","shape":[-1],"data_offsets":[0,4]'), DATA),
    "minus zero": (of('"dtype":"F32","shape":[1],"data_offsets":[-0,4]'), DATA),
    "a size with a point": (of('"dtype":"F32","shape":[1.0],"data_offsets":[0,4]'), DATA),
    "a size with an exponent": (of('"dtype":"F32","shape":[1e0],"data_offsets":[0,4]'), DATA),
    "a size that is true": (of('"dtype":"F32","shape":[true],"data_offsets":[0,4]'), DATA),
    "a size that is a text": (of('"dtype":"F32","shape":["1"],"data_offsets":[0,4]'), DATA),
    "a nested size": (of('"dtype":"F32","shape":[[1]],"data_offsets":[0,4]'), DATA),
    "shape is null": (of('"dtype":"F32","shape":null,"data_offsets":[0,4]'), DATA),
    "shape is a number": (of('"dtype":"F32","shape":1,"data_offsets":[0,4]'), DATA),
    "a size of 64 bits": (
        of('"dtype":"F32","shape":[18446744073709551615,0],"data_offsets":[0,0]'),
        b"",
    ),
    "a size of 65 bits": (
        of('"dtype":"F32","shape":[18446744073709551616,0],"data_offsets":[0,0]'),
        b"",
    ),
    "sizes that overflow": (
        of('"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]'),
        b"",
    ),
    "overflow before zero": (
        of('"dtype":"U8","shape":[9223372036854775807,9223372036854775807,0],"data_offsets":[0,0]'),
        b"",
    ),
    "bits that overflow": (
        of('"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]'),
        b"",
    ),
    "one offset": (of('"dtype":"F32","shape":[1],"data_offsets":[0]'), DATA),
    "three offsets": (of('"dtype":"F32","shape":[1],"data_offsets":[0,4,4]'), DATA),
    "negative offset": (of('"dtype":"F32","shape":[1],"data_offsets":[-4,0]'), DATA),
    "offsets the wrong way": (of('"dtype":"F32","shape":[1],"data_offsets":[4,0]'), DATA),
    "too few bytes": (of('"dtype":"F32","shape":[1],"data_offsets":[0,3]'), b"\0\0\0"),
    "too many bytes": (of('"dtype":"F32","shape":[1],"data_offsets":[0,5]'), DATA + b"\0"),
    "beyond the file": (of('"dtype":"F32","shape":[100],"data_offsets":[0,400]'), DATA),
    "far beyond the file": (
        of('"dtype":"U8","shape":[1152921504606846976],"data_offsets":[0,1152921504606846976]'),
        DATA,
    ),
    "trailing bytes": (f'{{"a":{ONE}}}', DATA + b"\0"),
    "only trailing bytes": ("{}", DATA),
    "a hole at the start": (of('"dtype":"F32","shape":[1],"data_offsets":[4,8]'), DATA * 2),
    "a hole between": (
        f'{{"a":{ONE},"b":{{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}}}',
        DATA * 3,
    ),
    "an overlap": (
        f'{{"a":{ONE},"b":{{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}}}',
        DATA * 2,
    ),
    "the same bytes twice": (f'{{"a":{ONE},"b":{ONE}}}', DATA),
    "nothing inside another": (
        f'{{"a":{ONE},"b":{{"dtype":"F32","shape":[0],"data_offsets":[2,2]}}}}',
        DATA,
    ),
    "metadata is a list": (f'{{"a":{ONE},"__metadata__":["x"]}}', DATA),
    "metadata of numbers": (f'{{"a":{ONE},"__metadata__":{{"x":1}}}}', DATA),
    "metadata of null": (f'{{"a":{ONE},"__metadata__":{{"x":null}}}}', DATA),
    "metadata twice": (f'{{"a":{ONE},"__metadata__":{{}},"__metadata__":{{}}}}', DATA),
    "dtype twice": (of('"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]'), DATA),
    "nested for ever": ('{"a":' * 100_000, b""),
    "128 levels": (
        of(FIELDS + ',"x":' + "[" * 126 + "]" * 126),
        DATA,
    ),
}

TAKEN: dict[str, tuple[str, bytes]] = {
    "plain": (f'{{"a":{ONE}}}', DATA),
    "spaces": (f'  {{ "a" : {ONE} }}\n\t ', DATA),
    "a scalar": (of('"dtype":"F32","shape":[],"data_offsets":[0,4]'), DATA),
    "an empty name": (f'{{"":{ONE}}}', DATA),
    "a zero in a name": (f'{{"a\\u0000":{ONE}}}', DATA),
    "a surrogate pair": (f'{{"\\ud83d\\ude00":{ONE}}}', DATA),
    "unknown fields": (of(FIELDS + ',"x":[{"y":null}],"z":-1.5'), DATA),
    "127 levels": (of(FIELDS + ',"x":' + "[" * 125 + "]" * 125), DATA),
    "metadata is null": (f'{{"a":{ONE},"__metadata__":null}}', DATA),
    "any order": (
        '{"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"a":' + ONE + "}",
        DATA * 2,
    ),
    "nothing at the start": (two("F32", "[0]", 0, 0), DATA),
    "nothing at the end": (two("F32", "[0]", 4, 4), DATA),
    "nothing of huge sizes": (two("U8", "[0,9223372036854775807]", 4, 4), DATA),
    "pairs": (of('"dtype":"F4","shape":[4,2],"data_offsets":[0,4]'), DATA),
    "no tensors": ("{}", b""),
}

# What the package takes and the format's description does not allow, or does not describe.
STRICTER: dict[str, tuple[str, bytes]] = {
    "a name twice": (f'{{"a":{ONE},"a":{ONE}}}', DATA),
    "a key of the metadata twice": (f'{{"a":{ONE},"__metadata__":{{"x":"1","x":"2"}}}}', DATA),
    "a tensor as a list": ('{"a":["F32",[1],[0,4]]}', DATA),
    "a dtype as an object": (of('"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]'), DATA),
}


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (lambda path: torch.save({"a": torch.ones(3)}, path), "zip archive.*nvmeio.load"),
        (
            lambda path: torch.save(
                {"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False
            ),
            "pickle.*nvmeio.load",
        ),
        (lambda path: path.write_bytes(b"\x93NUMPY\1\0v\0" + bytes(118)), "numpy.load"),
        (lambda path: path.write_bytes(b"GGUF\3\0\0\0" + bytes(64)), "GGUF"),
    ],
)
def test_files_of_another_format_are_named(
    written: Callable[[Path], Any], says: str, tmp_path: Path
) -> None:
    """It said "its header is too large (expected at most 100000000, found …)"."""
    written(tmp_path / "w.pt")
    for read in (nvmeio.load_safetensors, lambda path: nvmeio.safe_open(path, "pt")):
        with pytest.raises(nvmeio.IntegrityError, match=f"not a safetensors file: it is.*{says}"):
            read(tmp_path / "w.pt")


def test_a_header_and_an_index_that_are_no_json_say_so(file: Path) -> None:
    """They said "expected JSON, found not JSON"."""
    write_file(file, b'{"a":', b"")
    with pytest.raises(
        nvmeio.IntegrityError,
        match=r"model\.safetensors is not a valid safetensors file: its header is not valid JSON "
        r"\(.*line 1 column 6.*\) \(expected JSON, found other text\)$",
    ) as refused:
        nvmeio.load_safetensors(file)
    assert (refused.value.expected, refused.value.found) == ("JSON", "other text")
    index = file.with_name("model.safetensors.index.json")
    index.write_text('{"weight_map":')
    with pytest.raises(
        nvmeio.IntegrityError,
        match=r"index\.json is not a valid safetensors index: it is not valid JSON: ",
    ) as refused:
        nvmeio.load_safetensors(index)
    assert (refused.value.expected, refused.value.found) == ("JSON", "other bytes")


@pytest.mark.parametrize("kind", REFUSED)
def test_malformed_headers_are_refused_as_the_package_does(file: Path, kind: str) -> None:
    text, data = REFUSED[kind]
    write_file(file, text.encode(), data)
    assert not assert_agree(file)


@pytest.mark.parametrize("kind", TAKEN)
def test_unusual_headers_are_taken_as_the_package_does(file: Path, kind: str) -> None:
    text, data = TAKEN[kind]
    write_file(file, text.encode(), data)
    assert assert_agree(file)


@pytest.mark.parametrize("kind", STRICTER)
def test_where_the_package_is_laxer_than_the_format(file: Path, kind: str) -> None:
    text, data = STRICTER[kind]
    write_file(file, text.encode(), data)
    with pytest.raises(nvmeio.IntegrityError, match="not a valid safetensors file"):
        load_safetensors(file)


@pytest.mark.parametrize("length", [100_000_001, 1 << 63, (1 << 64) - 1, 1000, 61, 59, 0])
def test_wrong_lengths_are_refused(file: Path, length: int) -> None:
    text = f'{{"a":{ONE}}}'.encode()
    assert len(text) == 54
    write_file(file, text, DATA, length)
    assert not assert_agree(file)


@pytest.mark.parametrize("content", [b"", b"1234567", bytes(8), b"\xff" * 100])
def test_files_without_a_header_are_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert not assert_agree(file)


def test_text_that_is_not_utf_8_is_refused(file: Path) -> None:
    for text in (b"\xff{}", b'{"\xed\xa0\x80":1}', b'{"__metadata__":{"a":"\xc0\x80"}}'):
        write_file(file, text)
        assert not assert_agree(file)


def test_a_header_of_the_largest_size_is_read(file: Path) -> None:
    text = f'{{"a":{ONE}}}'.encode()
    write_file(file, text.ljust(headers.MAX_HEADER_BYTES), DATA)
    assert assert_agree(file)


def test_nothing_is_allocated_for_a_malformed_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header may promise a petabyte."""
    from nvmeio._memory import mappings

    def refuse(cls: type, nbytes: int) -> None:
        raise AssertionError(f"{nbytes} bytes were asked for")

    monkeypatch.setattr(mappings.Mapping, "__new__", refuse)
    text = of(f'"dtype":"U8","shape":[{1 << 50}],"data_offsets":[0,{1 << 50}]')
    write_file(file, text.encode(), DATA)
    with pytest.raises(nvmeio.IntegrityError, match="tensor 'a' ends at byte"):
        load_safetensors(file)


def test_too_large_a_header_is_not_written() -> None:
    with pytest.raises(ValueError, match="max_shard_size"):
        headers.build([("n" * 100_000_000, torch.float32, (1,))], None)


# Generated: values, and damage to valid files

NUMBERS = st.sampled_from(
    [0, 1, 2, 3, 4, 6, 8, -1, 1 << 31, 1 << 63, 1 << 64, 1.0, True, None, "1"]
)
DTYPES = st.sampled_from([*headers.BITS, "F128", "", None, 7])
ENTRY = st.fixed_dictionaries(
    {
        "dtype": DTYPES,
        "shape": st.lists(NUMBERS, max_size=3) | NUMBERS,
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
    },
    optional={"extra": NUMBERS | st.lists(NUMBERS, max_size=2)},
)


@st.composite
def nearly_valid(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A valid header, most of the time with one value in it replaced."""
    header: dict[str, Any] = {}
    position = 0
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(headers.DTYPES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        bits = headers.BITS[dtype]
        if dtype == "F4":
            shape.append(2)
        for size in shape:
            bits *= size
        end = position + bits // 8
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    if draw(st.booleans()):
        header["__metadata__"] = draw(
            st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)
        )
    data = bytes(max(0, position + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))))
    if header and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(header)))
        if name == "__metadata__" or draw(st.integers(0, 4)) == 0:
            header[name] = draw(NUMBERS | ENTRY)
        else:
            field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
            if field == "dtype":
                header[name][field] = draw(DTYPES)
            else:
                values = header[name][field]
                if values:
                    values[draw(st.integers(0, len(values) - 1))] = draw(NUMBERS)
    return header, data


# Of JSON that is spaced out, and as the package writes it: that is parsed in another way.
SEPARATORS = st.sampled_from([None, (",", ":")])


@settings(max_examples=300)
@given(nearly_valid(), SEPARATORS)
def test_verdicts_agree_on_generated_headers(
    tmp_path: Path, case: tuple[dict[str, Any], bytes], separators: tuple[str, str] | None
) -> None:
    header, data = case
    path = tmp_path / "generated.safetensors"
    # lone surrogates are in REFUSED; hypothesis's texts have none
    write_file(path, json.dumps(header, separators=separators).encode(), data)
    assert_agree(path)


def valid_file(separators: tuple[str, str] | None = None) -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [24, 30]},
    }
    text = json.dumps(header, separators=separators).encode()
    return struct.pack("<Q", len(text)) + text + bytes(30)


def by_the_json_parser(text: bytes, file_bytes: int) -> headers.Header | None:
    with mock.patch.object(headers, "parse_as_written", lambda *_: None):
        try:
            return headers.parse(text, file_bytes, "a file")
        except nvmeio.IntegrityError:
            return None


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_a_header_as_it_is_written_is_parsed_as_json_is(data: st.DataObject) -> None:
    """It is parsed by one regular expression; whatever that takes the JSON parser finds too."""
    described, tensors = data.draw(nearly_valid())
    text = bytearray(json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(text) - 1))
        byte = data.draw(st.sampled_from(list(b'{}[]":,0123456789 \\u\n\xff\xb2\x00')))
        change = data.draw(st.sampled_from(["set", "cut", "put", "twice"]))
        if change == "twice":  # a whole piece
            end = data.draw(st.integers(at, len(text)))
            text[at:at] = text[at:end]
        else:
            text[at : at + (change != "put")] = b"" if change == "cut" else bytes([byte])
    whole, file_bytes = bytes(text), headers.LENGTH_BYTES + len(text) + len(tensors)
    found = headers.parse_as_written(whole, file_bytes)
    if found is not None:
        wanted = by_the_json_parser(whole, file_bytes)
        assert wanted is not None
        assert [*found.tensors.items()] == [*wanted.tensors.items()]
        assert found.metadata == wanted.metadata


@pytest.mark.parametrize(
    "text",
    [
        '{"__metadata__":{},}', '{"__metadata__":{}}}', '{"__metadata__":{"a":"b","a":"c"}}', "{},",
        "{,}", "}", "{", "", f'{{"a":{ONE}', f'{{"a":{ONE},}}', f'{{{{"a":{ONE}}}', f'["a":{ONE}}}',
        f'{{"a":{ONE}"b":{ONE}}}', f'{{"a":{ONE},"a":{ONE}}}', f'{{"__metadata__":{ONE}}}',
    ],
)  # fmt: skip
def test_what_only_looks_as_it_is_written_goes_to_the_json_parser(text: str) -> None:
    for nbytes in (0, 4, 8):
        file_bytes = headers.LENGTH_BYTES + len(text) + nbytes
        assert headers.parse_as_written(text.encode(), file_bytes) is None
        with pytest.raises(nvmeio.IntegrityError):
            headers.parse(text.encode(), file_bytes, "a file")


@pytest.mark.parametrize("metadata", [{}, {"__metadata__": {"format": "pt", "of": "us"}}])
@pytest.mark.parametrize("tensors", [0, 1, 3])
def test_what_writers_leave_is_parsed_in_one_pass(metadata: Any, tensors: int) -> None:
    """The JSON parser took 8 s for 300,000 tensors, the package one."""
    described = {
        **metadata,
        **{
            f"größe.{n}": {"dtype": "F32", "shape": [2], "data_offsets": [8 * n, 8 * n + 8]}
            for n in reversed(range(tensors))  # older writers have them in any order
        },
    }
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode().ljust(500)
    found = headers.parse_as_written(text, headers.LENGTH_BYTES + len(text) + 8 * tensors)
    assert found is not None
    assert [*found.tensors] == [f"größe.{n}" for n in range(tensors)]
    assert found.metadata == metadata.get("__metadata__", {})


@settings(max_examples=300)
@given(st.data(), SEPARATORS)
def test_verdicts_agree_on_damaged_files(
    tmp_path: Path, data: st.DataObject, separators: tuple[str, str] | None
) -> None:
    """Bytes flipped, cut out or put in: what still parses must be the same to both."""
    content = bytearray(valid_file(separators))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 31))
        change = data.draw(st.sampled_from(["set", "cut", "put"]))
        byte = data.draw(st.sampled_from(list(b'{}[]":,0123456789eE-+. \\untf\xff\x00')))
        if change == "set":
            content[at] = byte
        elif change == "cut":
            del content[at]
        else:
            content.insert(at, byte)
        if data.draw(st.booleans()):  # keep the length true, so that the text is looked at
            content[:8] = struct.pack("<Q", max(0, len(content) - 38))
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    theirs, ours = verdicts(path)
    if isinstance(ours, Exception) and not isinstance(theirs, Exception):
        assert "occurs more than once" in str(ours)  # see STRICTER
        return
    assert_agree(path)


def test_no_name_is_not_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvmeio.save_safetensors({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        nvmeio.load_safetensors("")
