"""Packed models over several drives: the same bits, a part of every layer from each."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inference import _models as models
from inside import uses_of
from support import spin_until
from typer.testing import CliRunner

import nvmeio
from nvmeio import cli
from nvmeio._formats import packed_index
from nvmeio._formats.packed_index import Dealing
from nvmeio._io import drives
from nvmeio._io.drives import DriveHandles
from nvmeio._pages import PAGE_BYTES
from nvmeio.checkpoint.verifying import verify
from nvmeio.engines.threads import Block, ThreadsEngine
from nvmeio.errors import IntegrityError
from nvmeio.inference import pack, packing

Make = Callable[..., Any]
PART = packed_index.PART_NAME


def llama() -> Any:
    return models.llama(layers=3, width=256)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("one", "two", "three")]


@pytest.fixture
def packed(tmp_path: Path, folders: list[Path]) -> list[Path]:
    models.saved(llama, tmp_path / "model")
    pack(tmp_path / "model", folders)
    return folders


# Arithmetic


@given(
    st.lists(st.integers(1, 1000), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 70)), min_size=1, max_size=8),
    st.data(),
)
def test_every_byte_is_asked_of_one_drive_that_holds_it(
    weights: list[int], records: list[tuple[int, int]], data: st.DataObject
) -> None:
    """And what goes on beyond a piece, a row, lies there too, unless the record ends before."""
    placed, at = [], 0
    for pages, more in records:
        placed.append((at, at + pages * PAGE_BYTES, more * PAGE_BYTES))
        at += pages * PAGE_BYTES
    dealing = Dealing(weights, placed)
    told = packed_index.read_part(dealing.describe(1, [0] * len(dealing.pieces)))
    assert told.dealing.pieces == dealing.pieces
    start = data.draw(st.integers(0, at - 1))
    end = data.draw(st.integers(start + 1, at))
    position = start
    for drive, low, high in dealing.spans(start, end):
        assert low == position < high
        position = high
        for first, last, more in placed:
            if first <= low < last:
                held = [p for p in dealing.pieces if p.drive == drive]
                for page in range(low, min(high + more, last), PAGE_BYTES):
                    assert any(p.start <= page < p.held_end for p in held)
    assert position == end
    for drive in range(len(weights)):
        held = [p for p in dealing.pieces if p.drive == drive]
        assert all(a.held_end <= b.start for a, b in itertools.pairwise(held))


# The same bits


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5"])
def test_models_compute_the_same(
    name: str, tmp_path: Path, folders: list[Path], stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied heads, experts, several stacks; pieces so small that tables and experts are cut."""
    monkeypatch.setattr(drives, "LEAST_CHUNK_BYTES", PAGE_BYTES)
    monkeypatch.setattr(drives, "MOST_STRIPE_BYTES", 8 * PAGE_BYTES)
    models.saved(models.MODELS[name], tmp_path / "model")
    pack(tmp_path / "model", folders)
    whole = models.loaded(tmp_path / "model")
    model = stream([folders[2], folders[0], folders[1]], resident_bytes=1_000_000)
    units = model.weight_stream.units
    assert {read.file for unit in units for read in unit.layout.reads} == {0, 1, 2}
    ids = models.prompt()
    assert models.logits(model, ids).equal(models.logits(whole, ids))
    assert models.tokens(model, ids).equal(models.tokens(whole, ids))


@pytest.mark.parametrize(
    ("name", "bits", "budget"),
    [("gpt2", 4, 400_000), ("mixtral", 4, 300_000), ("mixtral", 8, 300_000)],
)
def test_quantised_models_compute_the_same(
    name: str,
    bits: int,
    budget: int,
    tmp_path: Path,
    folders: list[Path],
    stream: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps, scales and minima of a tied head, and of experts, are cut where pieces end."""
    monkeypatch.setattr(drives, "LEAST_CHUNK_BYTES", PAGE_BYTES)
    monkeypatch.setattr(drives, "MOST_STRIPE_BYTES", 2 * PAGE_BYTES)
    models.saved(models.MODELS[name], tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "whole", quant_bits=bits, quant_group_size=32)
    pack(tmp_path / "model", folders, quant_bits=bits, quant_group_size=32)
    whole = stream(tmp_path / "whole", resident_bytes=1 << 30, compute="packed")
    model = stream(folders[::-1], resident_bytes=budget, compute="packed")
    units = model.weight_stream.units
    assert {read.file for unit in units for read in unit.layout.reads} == {0, 1, 2}
    ids = models.prompt()
    assert torch.allclose(models.logits(model, ids), models.logits(whole, ids), atol=1e-5)
    assert models.tokens(model, ids).equal(models.tokens(whole, ids))
    if name == "mixtral":
        assert model.weight_stream.stats.experts_read


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_rows_of_tables_come_from_the_drive_that_has_them(
    tied: bool, bits: int, tmp_path: Path, folders: list[Path], stream: Make
) -> None:
    """Parts of rows of 768, 384 and 48 bytes, which no piece is a multiple of."""
    models.saved(
        lambda: models.llama(2, 768, vocab_size=8192, tie_word_embeddings=tied), tmp_path / "model"
    )
    options: dict[str, Any] = {"quant_bits": bits, "quant_group_size": 64}
    pack(tmp_path / "model", folders, **options)
    pack(tmp_path / "model", tmp_path / "whole", **options)
    model = stream(folders, resident_bytes=8_000_000, compute="widened")
    whole = stream(tmp_path / "whole", resident_bytes=1 << 30, compute="widened")
    ids = torch.randperm(8192, generator=torch.Generator().manual_seed(0))[:1400].reshape(2, -1)
    assert models.logits(model, ids).equal(models.logits(whole, ids))
    assert model.weight_stream.stats.rows_read >= 1400


def test_rows_of_tables_come_from_the_drive_that_has_them(
    tmp_path: Path, folders: list[Path], stream: Make
) -> None:
    """Rows of 1.5 pages, which lie across the pieces' ends."""
    models.saved(lambda: models.llama(2, 1536 // 4, vocab_size=2048), tmp_path / "model")
    pack(tmp_path / "model", folders)
    whole = models.loaded(tmp_path / "model")
    model = stream(folders, resident_bytes=7_000_000)
    ids = torch.arange(2048).reshape(2, -1)
    assert models.logits(model, ids[:, :700]).equal(models.logits(whole, ids[:, :700]))
    assert model.weight_stream.stats.rows_read == 1400


def test_quantised_and_in_tiles(packed: list[Path], tmp_path: Path, stream: Make) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    pack(tmp_path / "model", tmp_path / "p", quant_bits=4)
    pack(tmp_path / "model", folders, quant_bits=4)
    ids = models.prompt()
    one, several = (stream(path, compute="packed") for path in (tmp_path / "p", folders))
    assert models.logits(several, ids).equal(models.logits(one, ids))
    pack(tmp_path / "model", tmp_path / "q")
    tight = [stream(path, resident_bytes=900_000) for path in (tmp_path / "q", packed)]
    assert models.logits(tight[0], ids).equal(models.logits(tight[1], ids))


def test_a_frozen_base_is_trained_over(packed: list[Path], tmp_path: Path, stream: Make) -> None:
    pack(tmp_path / "model", tmp_path / "p")
    ids = models.prompt()
    found = []
    for path in (tmp_path / "p", packed):
        model = stream(path, resident_bytes=4_000_000, trainable=True)
        given = torch.ones(*ids.shape, 256, requires_grad=True)
        model(inputs_embeds=given, labels=ids).loss.backward()
        found.append(given.grad)
    assert found[0] is not None
    assert torch.equal(found[0], found[1])


def test_each_drive_is_read_by_its_weight(
    tmp_path: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch, stream: Make
) -> None:
    """Counted below the handle: W * weight ± 1 %."""
    weights = [500, 300, 200]
    monkeypatch.setattr(packing, "weights_of", lambda *_: weights)
    models.saved(lambda: models.llama(layers=3, width=512), tmp_path / "model")
    pack(tmp_path / "model", folders)
    read: Counter[str] = Counter()

    class Counting(ThreadsEngine):
        def _move(self, block: Block, fd: int, memory: memoryview, offset: int) -> int:
            done = super()._move(block, fd, memory, offset)
            with self.condition:
                read[Path(os.readlink(f"/proc/self/fd/{fd}")).parent.name] += done
            return done

    with nvmeio.AioHandle(engine=Counting()) as handle:
        model = stream(folders, handle=handle, resident_bytes=24_000_000, window=1)
        models.logits(model, models.prompt())
        reader = uses_of(model).resources.reader

        def is_idle() -> bool:
            return not reader._queue and all(flying[0].done() for flying in [*reader._flying])

        spin_until(is_idle)
        read.clear()
        before = model.weight_stream.stats.bytes_read
        for _ in range(4):
            models.logits(model, models.prompt())
            spin_until(is_idle)
        wanted = model.weight_stream.stats.bytes_read - before
        model.weight_stream.close()
    assert wanted > 4_000_000
    for folder, weight in zip(folders, weights, strict=True):
        share = wanted * weight / sum(weights)
        assert abs(read[folder.name] - share) <= 0.01 * share, (read, wanted)


def test_each_drive_has_a_handle_of_its_own(
    tmp_path: Path, folders: list[Path], stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers, rows and the experts of a token, which are read past the queue."""
    made: dict[str, nvmeio.AioHandle] = {}

    class PerDirectory(DriveHandles):
        def __init__(self, handle: nvmeio.AioHandle | None, directories: list[str]) -> None:
            assert handle is None
            made.update((each, nvmeio.AioHandle(engine="threads")) for each in directories)
            super().__init__(made[directories[0]], directories)

        mover = property(lambda self: self)

        def of(self, file: nvmeio.File) -> nvmeio.AioHandle:
            return made[os.path.dirname(file.path)]

        def close(self) -> None:
            for each in made.values():
                each.close()

    monkeypatch.setattr("nvmeio.inference.weight_stream.DriveHandles", PerDirectory)
    monkeypatch.setattr(drives, "LEAST_CHUNK_BYTES", PAGE_BYTES)
    models.saved(models.mixtral, tmp_path / "model")
    pack(tmp_path / "model", folders)
    whole = models.loaded(tmp_path / "model")
    given_ = whole.config, folders  # a configuration, and where its weights are
    model = stream(*given_, resident_bytes=1_000_000, handle=None)
    ids = models.prompt()[:, :1]
    assert models.tokens(model, ids, 4).equal(models.tokens(whole, ids, 4))
    assert model.weight_stream.stats.experts_read
    assert sorted(made) == sorted(map(str, folders))
    read = [each.stats.bytes_read for each in made.values()]
    assert all(read), read
    model.weight_stream.close()
    assert all(each.closed for each in made.values())


# What does not belong together


def test_sets_that_are_none(packed: list[Path], tmp_path: Path, stream: Make) -> None:
    one, two, three = packed
    other = [tmp_path / "other" / name for name in ("one", "two", "three")]
    other[0].parent.mkdir()
    pack(tmp_path / "model", other, dtype="bfloat16")
    shutil.copytree(two, tmp_path / "copy")
    for given_, named in (
        ([one, three], "three: of a model packed into 3 directories part 1 is missing"),
        (one, "one: of a model packed into 3 directories part 1, 2 is missing"),
        ([one, two, two], "names a directory twice"),
        ([one, two, tmp_path / "copy"], "two both hold part 1 of 3"),
        ([one, two, other[2]], "other/three holds part 2 of 3 of another packing"),
        ([one, two, three, tmp_path / "model"], "model holds no part"),
        ([tmp_path / "model", one], "model holds no part"),
    ):
        with pytest.raises(ValueError, match=named):
            stream(given_)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        stream([one, two, tmp_path / "nowhere"])


def test_a_changed_part_is_named(packed: list[Path], stream: Make) -> None:
    """Bytes that change before it is opened, and while it is open; verify knows which."""
    model = stream(packed, resident_bytes=1_900_000)
    models.logits(model, models.prompt())
    path = packed[1] / PART
    with path.open("r+b") as file:
        data = os.lseek(file.fileno(), 1 << 17, os.SEEK_DATA)
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, data)[0] ^ 4]), data)
    with pytest.raises(IntegrityError, match=r"two/model\.safetensors\.part"):
        for _ in range(3):
            models.logits(model, models.prompt())
    again = stream(packed, resident_bytes=1_900_000)
    with pytest.raises(
        IntegrityError, match=r"two/model\.safetensors\.part.*differ from what was packed"
    ):
        models.logits(again, models.prompt())
    assert [bool(verify(each / PART).problems) for each in packed] == [False, True, False]


def test_other_parts_in_the_same_place_are_refused_when_reopened(
    packed: list[Path], tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stream(packed)
    model.weight_stream.close()
    for each in packed:
        shutil.rmtree(each)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "weights_of", lambda *_: [5, 1, 1])
        pack(tmp_path / "model", packed)
    with pytest.raises(IntegrityError, match="differs from the checkpoint"):
        model.weight_stream.reopen()


# Packing


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupt_between_the_names_leaves_nothing(
    at: int, tmp_path: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    models.saved(llama, tmp_path / "model")
    rename, done = packing.durable.rename, []

    def interrupted(source: Path, target: Path) -> None:
        rename(source, target)
        done.append(target)
        if len(done) == at + 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(packing.durable, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "model", folders)
    assert done
    assert os.listdir(tmp_path) == ["model"]


def test_what_cannot_be_packed_into_several(packed: list[Path], tmp_path: Path) -> None:
    new = tmp_path / "new"
    for out, options, error in (
        ([new, packed[1]], {}, FileExistsError),
        ([new, new], {}, ValueError),
        ([], {}, ValueError),
        ([new, tmp_path / "newer"], {"ranks": 2}, ValueError),
    ):
        with pytest.raises(error):
            pack(tmp_path / "model", out, **options)
    assert sorted(os.listdir(tmp_path)) == ["model", "one", "three", "two"]


def test_the_commands(folders: list[Path], tmp_path: Path) -> None:
    models.saved(llama, tmp_path / "model")
    names = [str(each) for each in folders]

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert names[2] in run("pack", str(tmp_path / "model"), *names)
    assert "part 1 of 3 directories" in run("verify", *names)
    assert "part 2 of 3 directories" in run("inspect", *names)
    given_ = ("--ids", "3,4,5", "--max-new-tokens", "4", "--json")
    one = json.loads(run("generate", str(tmp_path / "model"), *given_))
    several = json.loads(run("generate", *names, *given_))
    assert one["tokens"] == several["tokens"]
