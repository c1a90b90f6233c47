"""Bits that flip in what is read: found in packed models and in blocks of past keys and values."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._models import (
    MODELS,
    llama,
    loaded,
    logits,
    mixtral,
    prompt,
    saved,
    transformers,
    weights_file,
)
from typer.testing import CliRunner

import nvmeio
from nvmeio._formats.packed_index import KEY, PADDING
from nvmeio._residency import reader
from nvmeio._storage import crc32
from nvmeio.checkpoint.safetensors import read_header
from nvmeio.checkpoint.verifying import verify
from nvmeio.cli import app
from nvmeio.errors import IntegrityError
from nvmeio.inference import kv_cache, pack

Make = Callable[..., Any]

EVERYTHING = 1 << 30  # all weights stay, the embedding too
EMBEDDING = "model.embed_tokens.weight"


def packed(make: Any, directory: Path, **options: Any) -> Path:
    saved(make, directory / "m")
    pack(directory / "m", directory / "p", **options)
    return directory / "p"


def flip(file: Path, offset: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 0x10]))


def index_of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read_header(file).metadata[KEY])
    return found


def rewrite_index(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Put another index into a packed file, the tensors where they were."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    index = json.loads(header["__metadata__"][KEY])
    header["__metadata__"][KEY] = json.dumps(change(index))
    text = json.dumps(header).encode().ljust(length)
    assert len(text) == length, "the header has room"
    file.write_bytes(data[:8] + text + data[8 + length :])


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_the_index_has_the_sums_of_what_was_written(
    name: str, bits: int | None, tmp_path: Path
) -> None:
    file = weights_file(packed(MODELS[name], tmp_path, quant_bits=bits, quant_group_size=32))
    data, sums = file.read_bytes(), index_of(file)["crc32"]
    entries = {n: e for n, e in read_header(file).tensors.items() if not n.startswith(PADDING)}
    assert set(sums) == set(entries)
    assert {len(each) for each in sums.values()} == ({1, 4} if name == "mixtral" else {1})
    for tensor, entry in entries.items():
        share = entry.nbytes // len(sums[tensor])
        for number, text in enumerate(sums[tensor]):
            first = entry.start + number * share
            assert text == f"{crc32.of_bytes(data[first : first + share]):08x}"


@pytest.mark.parametrize(
    ("bits", "compute", "budget"),
    [
        (None, "auto", 210_000),
        (None, "auto", EVERYTHING),
        (8, "auto", 70_000),
        (8, "auto", EVERYTHING),
        (8, "widened", 210_000),
        (8, "widened", EVERYTHING),
    ],
)
def test_a_flipped_bit_is_found_in_every_tensor(
    bits: int | None,
    compute: str,
    budget: int,
    tmp_path: Path,
    stream: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "CHUNK_BYTES", 8192)  # a tensor of several pieces
    directory = packed(lambda: llama(layers=2), tmp_path, quant_bits=bits)
    file = weights_file(directory)
    for tensor, entry in read_header(file).tensors.items():
        if tensor.startswith(PADDING) or (tensor.startswith(EMBEDDING) and budget != EVERYTHING):
            continue
        for offset in (entry.start, entry.end - 1):
            flip(file, offset)
            with pytest.raises(IntegrityError) as failed:
                logits(stream(directory, resident_bytes=budget, compute=compute), prompt())
            assert str(file) in str(failed.value)
            assert repr(tensor) in str(failed.value)
            assert f"[{entry.start}, {entry.end})" in str(failed.value)
            flip(file, offset)
    model = stream(directory, resident_bytes=budget, compute=compute)
    for _ in range(2):
        read = model.weight_stream.stats.units_read
        found = logits(model, prompt())
        assert bits or found.equal(logits(loaded(tmp_path / "m"), prompt()))
    assert (model.weight_stream.stats.units_read > read) == (budget != EVERYTHING)


def test_after_a_flipped_bit_the_same_call_fails_again_until_the_bytes_are_right(
    tmp_path: Path, stream: Make
) -> None:
    directory = packed(llama, tmp_path)
    file = weights_file(directory)
    entry = read_header(file).tensors["model.layers.2.mlp.up_proj.weight"]
    flip(file, entry.start + 5)
    model = stream(directory, resident_bytes=300_000)
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"layers\.2\.mlp\.up_proj"):
            logits(model, prompt())
    model.weight_stream.close()
    flip(file, entry.start + 5)
    model.weight_stream.reopen()
    assert logits(model, prompt()).equal(logits(loaded(tmp_path / "m"), prompt()))


@pytest.mark.parametrize("kept", ["experts.gate_up", "experts.nvmeio_experts"])
@pytest.mark.parametrize("length", [1, 12])  # experts on demand; all of them, read ahead
@pytest.mark.parametrize(
    ("bits", "compute", "budget"),
    [(None, "auto", 600_000), (8, "auto", 300_000), (8, "widened", 600_000)],
)
def test_a_flipped_bit_is_found_in_experts(
    bits: int | None,
    compute: str,
    budget: int,
    length: int,
    kept: str,
    tmp_path: Path,
    stream: Make,
) -> None:
    """Side by side, and as the model has them."""
    fused = "gate_up" in kept
    directory = packed(mixtral, tmp_path, quant_bits=bits, quant_group_size=32, keep_fused=fused)
    file = weights_file(directory)
    ids = prompt(batch=1, length=length)
    name, entry = next(
        (name, entry)
        for name, entry in read_header(file).tensors.items()
        if name.startswith("model.layers.2.") and kept in name
    )
    share = entry.nbytes // 4
    model = stream(directory, resident_bytes=budget, compute=compute)
    logits(model, ids)
    assert model.weight_stream.stats.experts_read >= 8
    model.weight_stream.close()
    for expert in range(4):  # whichever are read
        flip(file, entry.start + expert * share)
    model = stream(directory, resident_bytes=budget, compute=compute)
    with pytest.raises(IntegrityError) as failed:
        logits(model, ids)
    assert repr(name) in str(failed.value)
    spans = [f"[{entry.start + n * share}, {entry.start + (n + 1) * share})" for n in range(4)]
    assert sum(span in str(failed.value) for span in spans) == 1


def test_experts_that_are_not_read_are_not_compared(tmp_path: Path, stream: Make) -> None:
    directory = packed(mixtral, tmp_path)
    file = weights_file(directory)
    ids = prompt(batch=1, length=1)
    whole = logits(loaded(tmp_path / "m"), ids)
    entry = read_header(file).tensors["model.layers.1.mlp.experts.nvmeio_experts"]
    share = entry.nbytes // 4
    right = wrong = 0
    for expert in range(4):
        flip(file, entry.start + expert * share + share // 2)
        model = stream(directory, resident_bytes=1_200_000)
        try:
            assert logits(model, ids).equal(whole)
            right += 1
        except IntegrityError:
            wrong += 1
        flip(file, entry.start + expert * share + share // 2)
    assert right == wrong == 2  # two experts a token


def test_rows_that_are_read_one_by_one_are_not_compared(tmp_path: Path, stream: Make) -> None:
    directory = packed(llama, tmp_path)
    file = weights_file(directory)
    flip(file, read_header(file).tensors[EMBEDDING].end - 1)
    model = stream(directory, resident_bytes=200_000)
    logits(model, prompt())
    assert model.weight_stream.stats.rows_read > 0


def test_without_checksums_the_bytes_are_taken_as_they_are(tmp_path: Path, stream: Make) -> None:
    directory = packed(llama, tmp_path)
    file = weights_file(directory)
    flip(file, read_header(file).tensors["model.layers.1.mlp.up_proj.weight"].start + 1)
    model = stream(directory, resident_bytes=300_000, checksum=False)
    assert logits(model, prompt()).equal(logits(loaded(directory), prompt()))


def test_a_packed_model_of_before_has_no_sums_and_opens(tmp_path: Path, stream: Make) -> None:
    directory = packed(llama, tmp_path, quant_bits=8)
    file = weights_file(directory)
    before = logits(stream(directory, resident_bytes=300_000), prompt())
    rewrite_index(file, lambda index: {k: v for k, v in index.items() if k != "crc32"})
    assert logits(stream(directory, resident_bytes=300_000), prompt()).equal(before)


@pytest.mark.parametrize(
    "sums",
    [
        3,
        {},
        {EMBEDDING: []},
        {EMBEDDING: 7},
        {EMBEDDING: ["0"]},
        {EMBEDDING: [1]},
        {EMBEDDING: ["0000000g"]},
        {EMBEDDING: ["00000000"] * 7},
    ],
)
def test_damaged_sums_are_refused(sums: Any, tmp_path: Path, stream: Make) -> None:
    directory = packed(llama, tmp_path)

    def change(index: dict[str, Any]) -> dict[str, Any]:
        given = {**index["crc32"], **sums} if isinstance(sums, dict) and sums else sums
        return {**index, "crc32": given}

    rewrite_index(weights_file(directory), change)
    with pytest.raises(IntegrityError, match="not a valid packed model"):
        stream(directory)
    logits(stream(directory, checksum=False), prompt())


def test_a_model_packed_anew_is_another_when_it_is_opened_again(
    tmp_path: Path, stream: Make
) -> None:
    directory = packed(llama, tmp_path)
    model = stream(directory, resident_bytes=300_000)
    model.weight_stream.close()
    other = loaded(tmp_path / "m")
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    other.save_pretrained(tmp_path / "m2")
    pack(tmp_path / "m2", tmp_path / "p2")
    os.replace(weights_file(tmp_path / "p2"), weights_file(directory))
    with pytest.raises(IntegrityError, match="Call stream_model again"):
        model.weight_stream.reopen()


def test_the_command_leaves_the_sums_out(tmp_path: Path) -> None:
    directory = packed(llama, tmp_path)
    file = weights_file(directory)
    flip(file, read_header(file).tensors["model.layers.1.mlp.up_proj.weight"].start)
    words = ["generate", str(directory), "--ids", "3,4,5", "--max-new-tokens", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "model.layers.1.mlp.up_proj.weight" in done.stderr
    done = CliRunner().invoke(app, [*words, "--no-checksum"])
    assert done.exit_code == 0, done.output


# Past keys and values


def filled(store: kv_cache.KVStore, count: int = 11) -> tuple[Any, list[torch.Tensor]]:
    cache = kv_cache.new_cache(transformers.LlamaConfig(num_hidden_layers=1), store)
    states = [torch.randn(1, 2, count, 5) for _ in range(2)]
    for start in range(0, count, 4):
        cache.update(*(s[:, :, start : start + 4] for s in states), 0)
    return cache, states


def flip_in(store: kv_cache.KVStore, offset: int) -> None:
    store.settle()
    assert store.file is not None
    opened = store.file.files[0].acquire("test")
    try:
        flip(Path(f"/proc/self/fd/{opened.any_fd()}"), offset)
    finally:
        opened.let_go("test")


def test_a_flipped_bit_is_found_in_a_block(
    tmp_path: Path, one_handle: nvmeio.AioHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "BLOCK_TOKENS", 4)
    new = [torch.randn(1, 2, 1, 5) for _ in range(2)]
    for checksum in (True, False):
        store = kv_cache.KVStore(tmp_path, one_handle, checksum)
        cache, states = filled(store)
        block = cache.layers[0].blocks[1]
        flip_in(store, block.offset + 3)
        if checksum:
            with pytest.raises(IntegrityError) as failed:
                cache.update(*new, 0)
            for said in (str(tmp_path), "block 1 ", "tokens 4 to 7", f"[{block.offset}, "):
                assert said in str(failed.value)
            with pytest.raises(RuntimeError, match="start again with a new one"):
                cache.update(*new, 0)
            cache.reset()
            cache.update(*new, 0)
        else:
            keys, values = cache.update(*new, 0)
            assert values.equal(torch.cat([states[1], new[1]], dim=-2))
            assert (keys != torch.cat([states[0], new[0]], dim=-2)).sum() == 1
        store.close()


@pytest.mark.parametrize("checksum", [True, False])
def test_the_checksum_of_a_streamed_model_is_that_of_its_caches(
    checksum: bool, tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "BLOCK_TOKENS", 4)
    saved(llama, tmp_path)
    model = stream(tmp_path, kv_offload=tmp_path, checksum=checksum)
    with torch.no_grad():
        cache = model(prompt(), use_cache=True).past_key_values
    layer = cache.layers[2]  # no layer of this pass has read it ahead
    flip_in(layer.store, layer.blocks[0].offset)
    with torch.no_grad():
        if checksum:
            with pytest.raises(IntegrityError, match="block 0 "):
                model(prompt()[:, :1], past_key_values=cache)
        else:
            model(prompt()[:, :1], past_key_values=cache)


# nvmeio verify


def told(path: Path) -> tuple[int, list[dict[str, str]]]:
    """The exit status of `nvmeio verify`, and what it says is wrong with the weights."""
    done = CliRunner().invoke(app, ["verify", str(path), "--json"])
    (verdict,) = json.loads(done.stdout)["files"]
    assert verdict["whole"] == (done.exit_code == 0)
    assert verdict["path"].endswith("model.safetensors")
    return done.exit_code, verdict["problems"]


@pytest.mark.parametrize("bits", [None, 8])
def test_verify_finds_a_flipped_bit_anywhere_in_a_packed_file(
    bits: int | None, tmp_path: Path
) -> None:
    """It looked at the structure alone: header bytes that contradict nothing, and no tensor."""
    directory = packed(mixtral, tmp_path, quant_bits=bits, quant_group_size=32)
    file = weights_file(directory)
    sums = index_of(file)["crc32"]
    entries = read_header(file).tensors
    end = min(entry.start for entry in entries.values())
    expected = [(offset, "", f"[0, {end})") for offset in (*range(8, end, end // 40), end - 1)]
    for tensor, entry in entries.items():  # padding too
        share = entry.nbytes // len(sums.get(tensor, [0]))
        for offset in (entry.start, entry.end - 1):
            first = entry.start + (offset - entry.start) // share * share
            expected.append((offset, tensor, f"[{first}, {first + share})"))
    with nvmeio.AioHandle() as handle:
        for offset, tensor, span in expected:
            flip(file, offset)
            verdict = verify(file, handle=handle)
            flip(file, offset)
            (problem,) = verdict.problems
            assert (verdict.path, problem.record) == (str(file), tensor), offset
            # Damage that is no safetensors header any more, or no index, is told as that.
            assert span in problem.what or "not a valid" in problem.what or "index" in problem.what
        assert verify(file, handle=handle).problems == []


def test_the_command_tells_what_has_flipped_in_a_packed_model(tmp_path: Path) -> None:
    directory = packed(llama, tmp_path)
    file = weights_file(directory)
    assert told(directory) == (0, [])
    shown = CliRunner().invoke(app, ["verify", str(directory)]).stdout
    assert "whole" in shown
    assert "structure only" not in shown
    entry = read_header(file).tensors["model.layers.2.mlp.up_proj.weight"]
    flip(file, entry.start + 5)
    status, (problem,) = told(directory)
    assert (status, problem["record"]) == (1, "model.layers.2.mlp.up_proj.weight")
    assert f"[{entry.start}, {entry.end})" in problem["what"]
    shown = CliRunner().invoke(app, ["verify", str(directory)]).stdout
    assert f"{file}: DAMAGED" in shown


def test_verify_of_a_file_packed_before_there_were_sums_checks_its_structure(
    tmp_path: Path,
) -> None:
    directory = packed(llama, tmp_path)

    def older(index: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in index.items() if key not in ("crc32", "sealed")}

    file = weights_file(directory)
    rewrite_index(file, older)
    assert told(directory) == (0, [])
    assert "structure only" in CliRunner().invoke(app, ["verify", str(directory)]).stdout
