"""Matrices that are larger than the memory for weights are computed in tiles."""

from __future__ import annotations

import itertools
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inference._models import gpt2, llama, loaded, logits, prompt, saved, tokens
from inference._tiled import (
    BUDGET,
    NARROW,
    OUTPUTS,
    WIDE,
    Make,
    Net,
    empty_net,
    saved_net,
    tiles_of,
    whole_numbers,
)
from torch import nn

import nvmeio
from nvmeio._residency.tiled_linear import ROWS
from nvmeio._storage import crc32
from nvmeio.checkpoint.safetensors import read_header, save_safetensors
from nvmeio.errors import IntegrityError, TransferError
from nvmeio.inference import pack
from nvmeio.inference._hooks import linear_in_tiles
from nvmeio.inference._plan.slot_layout import CutSums, FileExtent, Weight, WeightPart, rows_of
from nvmeio.inference._plan.units import Tile
from nvmeio.testing import FakeEngine

pytestmark = pytest.mark.usefixtures("small_ones_are_cut")


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Sums in another order, of numbers that are not whole."""
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


# What is computed


@torch.no_grad()
@pytest.mark.parametrize("budget", [BUDGET, 500_000])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_matrix_larger_than_the_budget_gives_the_same_outputs(
    stored: torch.dtype, budget: int, tmp_path: Path, stream: Make
) -> None:
    whole = saved_net(tmp_path / "net.safetensors", stored)
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=budget)
    assert len(tiles_of(net, "head")) > 1
    for shape in ((NARROW,), (1, NARROW), (3, 5, NARROW), (0, NARROW)):
        assert net(whole_numbers(*shape)).equal(whole(whole_numbers(*shape)))
    stats = net.weight_stream.stats
    assert stats.resident_bytes + stats.window_bytes + stats.work_bytes <= budget
    assert stats.mispredicted == 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_model_in_tiles_says_what_it_says_whole(
    tied: bool, tmp_path: Path, stream: Make
) -> None:
    def make() -> Any:
        return llama(layers=2, vocab_size=2000, tie_word_embeddings=tied)

    saved(make, tmp_path)
    whole = loaded(tmp_path)
    model = stream(tmp_path, resident_bytes=150_000)
    assert tiles_of(model, "lm_head" if not tied else "model.embed_tokens")
    assert not any(unit.is_layer for unit in model.weight_stream.units)
    close(logits(model, prompt()), logits(whole, prompt()))
    assert tokens(model, prompt()).equal(tokens(whole, prompt()))


@pytest.mark.parametrize(
    ("bits", "compute", "budget"),
    [
        (None, "auto", 200_000),
        (4, "widened", 200_000),
        (8, "widened", 200_000),
        (4, "packed", 100_000),
        (8, "packed", 120_000),
    ],
)
def test_packed_matrices_are_used_tile_by_tile(
    bits: int | None, compute: str, budget: int, tmp_path: Path, stream: Make
) -> None:
    saved(lambda: llama(layers=2, vocab_size=2000), tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed", quant_bits=bits, quant_group_size=32)
    model = stream(tmp_path / "packed", resident_bytes=budget, compute=compute)
    assert len(tiles_of(model, "lm_head")) > 1
    found = logits(model, prompt())
    close(found, logits(stream(tmp_path / "packed", compute="widened"), prompt()))
    assert logits(model, prompt()).equal(found)


@torch.no_grad()
def test_a_hook_of_the_layer_sees_its_whole_output_once(tmp_path: Path, stream: Make) -> None:
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=BUDGET)
    seen: list[torch.Tensor] = []
    net.head.register_forward_hook(lambda _, __, output: seen.append(output))
    net(whole_numbers(3, NARROW))
    assert len(seen) == 1
    assert seen[0].equal(whole(whole_numbers(3, NARROW)))


@pytest.mark.parametrize("trainable", [False, True])
def test_one_tile_adds_to_the_output_at_a_time(
    trainable: bool, tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_net(tmp_path / "net.safetensors")
    computed: list[weakref.ref[torch.Tensor]] = []
    stock = Tile.forward

    def noting(tile: Tile, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert not any(part() is not None for part in computed)
        found = stock(tile, input, bias)
        computed.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Tile, "forward", noting)
    options = {"resident_bytes": BUDGET, "trainable": trainable}
    net = stream(empty_net(), tmp_path / "net.safetensors", **options)
    found = net(whole_numbers(3, NARROW).requires_grad_(trainable))
    assert len(computed) == len(tiles_of(net, "head")) > 1
    assert found.requires_grad == trainable
    found.mul_(2)  # it is no view


# What is cut


class Shares(nn.Module):
    """Blocks, two of which have a matrix in common, and two a smaller block."""

    def __init__(self, part: slice) -> None:
        super().__init__()
        matrix = nn.Linear(NARROW, NARROW)
        block = nn.Sequential(nn.Linear(NARROW, NARROW), nn.ReLU())
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(matrix, nn.ReLU()),
                nn.Sequential(nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW), matrix),
                nn.Sequential(block, nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)),
                nn.Sequential(block, nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)),
            ][part]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).clamp(-2, 2)
        return x


class Beside(nn.Module):
    """A layer with such blocks, and a matrix that has to be cut."""

    def __init__(self, part: slice) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Shares(part)])
        self.head = nn.Linear(NARROW, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers[0](x))
        return found


@torch.no_grad()
@pytest.mark.parametrize("part", [slice(2), slice(2, 4)])
def test_blocks_that_share_a_module_are_cut_where_that_can_be(
    part: slice, tmp_path: Path, stream: Make
) -> None:
    path = tmp_path / "net.safetensors"
    whole = Beside(part)
    for parameter in whole.parameters():
        parameter.copy_(torch.randint(-2, 3, parameter.shape))
    save_safetensors(dict(whole.named_parameters()), path)

    def empty() -> Beside:
        with torch.device("meta"):
            return Beside(part)

    with pytest.raises(ValueError, match="with matrices in tiles") as refused:
        stream(empty(), path, resident_bytes=1000)
    needed = int(str(refused.value).split("with matrices in tiles, ")[1].split()[0])
    x = whole_numbers(3, NARROW)
    assert needed < BUDGET  # the layer as a whole has more
    for budget in range(needed, 300_000, 20_000):  # cut this way and that
        net = stream(empty(), path, resident_bytes=budget, window=1)
        assert tiles_of(net, "head")
        assert net(x).equal(whole(x))


class Uncut(nn.Module):
    """Layers with a fast path of torch's, which uses the weights of their modules itself."""

    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            kind(NARROW, 4, 4 * NARROW, dropout=0.0, batch_first=True)  # type: ignore[call-arg]
            for kind in kinds
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, x) if isinstance(layer, nn.TransformerDecoderLayer) else layer(x)
        return x


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_layers_that_torch_computes_as_one_are_not_cut(
    kind: type[nn.Module], tmp_path: Path, stream: Make
) -> None:
    whole = Uncut(kind, kind).eval()
    save_safetensors(whole.state_dict(), tmp_path / "net.safetensors")
    with torch.device("meta"):
        empty = Uncut(kind, kind).eval()
    with pytest.raises(ValueError, match="is too small") as refused:
        stream(empty, tmp_path / "net.safetensors", resident_bytes=100_000)
    assert "in tiles" not in str(refused.value)
    needed = int(re.findall(r"need (\d+) bytes", str(refused.value))[0])
    for trainable in (False, True):
        with torch.device("meta"):
            empty = Uncut(kind, kind).eval()
        options = {"resident_bytes": needed, "trainable": trainable}
        net = stream(empty, tmp_path / "net.safetensors", **options)
        x = torch.ones(2, 3, NARROW)
        with torch.no_grad():
            close(net(x), whole(x))


def test_a_linear_layer_with_tensors_of_its_own_is_not_cut(tmp_path: Path, stream: Make) -> None:
    """A hook may compute with them when the layer is called."""

    def with_scale(net: Net) -> Net:
        net.head.register_buffer("scale", torch.full((OUTPUTS,), 2.0))
        net.head.register_forward_hook(lambda head, _, output: output * head.scale)
        return net

    path = tmp_path / "net.safetensors"
    whole = with_scale(saved_net(path))
    save_safetensors(whole.state_dict(), path)

    def empty() -> Net:
        with torch.device("meta"):
            return with_scale(Net())

    with pytest.raises(ValueError, match="is too small"):
        stream(empty(), path, resident_bytes=BUDGET)
    net = stream(empty(), path, resident_bytes=600_000)
    with torch.no_grad():
        assert net(whole_numbers(3, NARROW)).equal(whole(whole_numbers(3, NARROW)))


# What is read, and where it lies


@torch.no_grad()
def test_each_byte_is_read_once_a_pass(tmp_path: Path, stream: Make) -> None:
    path = tmp_path / "net.safetensors"
    saved_net(path)
    entry = read_header(path).tensors["head.weight"]
    reads: list[tuple[int, int]] = []

    def note(kind: str, offset: int, nbytes: int) -> int:
        reads.append((offset, offset + nbytes))
        return 0

    with nvmeio.AioHandle(engine=FakeEngine(fail=note)) as handle:
        net = stream(empty_net(), path, handle=handle, resident_bytes=BUDGET, window=1)
        tiles = tiles_of(net, "head")
        net(whole_numbers(NARROW))
        before = net.weight_stream.stats.bytes_read
        reads.clear()
        for _ in range(4):
            net(whole_numbers(NARROW))
        mine = [
            (max(low, entry.start), min(high, entry.end))
            for low, high in reads
            if low < entry.end and entry.start < high
        ]
        read = net.weight_stream.stats.bytes_read - before
        net.weight_stream.close()
    streamed = [tile for tile in tiles if not tile.resident]
    nbytes = sum(tile.weights[0].nbytes for tile in streamed)
    # At most the page that two tiles share comes with both, and the next pass's first one early.
    pages = 2 * 4096 * len(tiles)
    largest = max(tile.layout.nbytes for tile in tiles)
    found = sum(high - low for low, high in mine)
    assert 4 * nbytes - largest <= found <= 4 * (nbytes + pages) + largest
    streaming = sum(unit.streamed_bytes for unit in net.weight_stream.units if not unit.resident)
    assert abs(read - 4 * streaming) <= largest


@given(st.integers(1, 3000), st.integers(1, 9), st.integers(1, 60_000), st.sampled_from([1, 3]))
def test_tiles_are_the_rows_of_a_matrix(rows: int, width: int, most: int, extents: int) -> None:
    a_row = 4 * width
    cuts = [rows * n // extents * a_row for n in range(extents + 1)]
    places = tuple(
        FileExtent(0, 5000 * (n + 1) + low, high - low, low)
        for n, (low, high) in enumerate(itertools.pairwise(cuts))
        if high > low
    )
    part = WeightPart(torch.float32, (rows, width), places)
    weight = Weight("w", torch.float32, (rows, width), (part,), None, ("w",))
    tiles = rows_of(weight, most)
    if not tiles:
        assert rows <= max(most // a_row, ROWS)
        return
    assert [t.first for t in tiles] == [0, *(t.last for t in tiles[:-1])]
    assert tiles[-1].last == rows
    joined: list[tuple[int, int]] = []
    for tile in tiles:
        assert tile.first % ROWS == 0
        assert tile.weight.nbytes == (tile.last - tile.first) * a_row
        assert tile.weight.nbytes <= max(most, ROWS * a_row)
        at = 0
        for extent in tile.weight.parts[0].extents:
            assert extent.at == at
            at += extent.nbytes
            joined.append((extent.offset, extent.offset + extent.nbytes))
        assert at == tile.weight.nbytes
    bytes_of = [b for low, high in joined for b in range(low, high, a_row)]
    whole = [b for e in places for b in range(e.offset, e.offset + e.nbytes, a_row)]
    assert bytes_of == whole


# What goes wrong


def test_a_packed_tile_with_other_bytes_is_found(tmp_path: Path, stream: Make) -> None:
    saved(lambda: llama(layers=2, vocab_size=2000), tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed")
    (path,) = (tmp_path / "packed").glob("*.safetensors")
    entry = read_header(path).tensors["lm_head.weight"]

    def flip(at: int) -> None:
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))

    for at in (entry.start, entry.end - 1):
        flip(at)
        model = stream(tmp_path / "packed", resident_bytes=200_000)
        for _ in range(3):  # in the first pass, and in those that follow
            with pytest.raises(IntegrityError, match=r"lm_head\.weight"):
                logits(model, prompt())
        model.weight_stream.close()
        flip(at)
        model = stream(tmp_path / "packed", resident_bytes=200_000)
        logits(model, prompt())


@torch.no_grad()
@pytest.mark.parametrize("fails_between", [False, True], ids=["replaced", "failed"])
def test_a_tile_that_was_wrong_when_it_was_used_is_told_of(fails_between: bool) -> None:
    """Read anew for another thread it was right, and the first one's outputs passed with it."""
    right, wrong = [1, 2], 7
    sums = CutSums(crc32.combine(right[0], right[1], 4), [4, 4])

    class Reading:
        """A tile's module, before which it is read as often as there are values."""

        def __init__(self, tile: int, found: list[tuple[int, int]]) -> None:
            self.first, self.last, self.found = tile, tile + 1, found

        def __call__(self, given: torch.Tensor, bias: None) -> torch.Tensor:
            for tile, found in self.found:
                sums.agrees(tile, found)
            return given[..., :1]

    def unit(*reads: list[tuple[int, int]]) -> Any:
        part = SimpleNamespace(cut=(sums, 0))
        weight = SimpleNamespace(name="head", shape=(2, 1), parts=[part])
        tiles = [
            SimpleNamespace(modules=[Reading(tile, found)], weights=[weight])
            for tile, found in enumerate(reads)
        ]
        return SimpleNamespace(weights=[weight], tiles=tiles)

    others = [(1, right[1])] if fails_between else []
    others += [(0, right[0]), (1, right[1])]  # the wrong one went meanwhile
    with pytest.raises(IntegrityError, match="differed from the packed ones"):
        linear_in_tiles(unit([(0, wrong)], others), torch.ones(1, 1), None)
    assert sums.settled
    assert linear_in_tiles(unit([], []), torch.ones(1, 1), None).shape == (1, 2)


def test_a_tile_that_cannot_be_read_is_named_and_the_model_goes_on(
    tmp_path: Path, stream: Make
) -> None:
    path = tmp_path / "net.safetensors"
    whole = saved_net(path)
    entry = read_header(path).tensors["head.weight"]
    failing = [False]

    def fail(kind: str, offset: int, nbytes: int) -> int:
        return 5 if failing[0] and offset < entry.end <= offset + nbytes else 0

    with nvmeio.AioHandle(engine=FakeEngine(fail=fail)) as handle:
        net = stream(empty_net(), path, handle=handle, resident_bytes=BUDGET, window=1)
        failing[0] = True
        with pytest.raises(TransferError, match=r"head\.weight\[\d+:2000\]"):
            net(whole_numbers(3, NARROW))
        failing[0] = False
        assert net(whole_numbers(3, NARROW)).equal(whole(whole_numbers(3, NARROW)))
        net.weight_stream.close()


@torch.no_grad()
def test_another_weight_in_the_place_of_a_tiled_one_is_refused(
    tmp_path: Path, stream: Make
) -> None:
    saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=BUDGET)
    with pytest.raises(RuntimeError, match="reads its weights from its checkpoint"):
        net.load_state_dict(Net().state_dict())
    net.head.weight = nn.Parameter(torch.zeros(OUTPUTS, NARROW))
    with pytest.raises(RuntimeError, match="'weight' of a Linear was replaced"):
        net(whole_numbers(NARROW))


def test_what_is_no_linear_layer_is_not_cut(tmp_path: Path, stream: Make) -> None:
    """GPT-2's matrices are transposed: their columns are outputs."""
    saved(lambda: gpt2(layers=2, width=128), tmp_path)
    with pytest.raises(ValueError, match="is too small") as refused:
        stream(tmp_path, resident_bytes=100_000)
    assert "with matrices in tiles" in str(refused.value)
    needed = int(str(refused.value).split("with matrices in tiles, ")[1].split()[0])
    whole = loaded(tmp_path)
    with pytest.raises(ValueError, match="is too small"):
        stream(tmp_path, resident_bytes=needed - 1)
    model = stream(tmp_path, resident_bytes=needed)
    close(logits(model, prompt()), logits(whole, prompt()))


def in_memory(net: Any) -> int:
    stats = net.weight_stream.stats
    return int(stats.resident_bytes + stats.window_bytes + stats.work_bytes)


@torch.no_grad()
def test_memory_that_is_left_decides_where_nobody_says_how_much(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved_net(tmp_path / "net.safetensors")
    monkeypatch.setattr("nvmeio.inference._model_plan.memory_left", lambda: BUDGET)
    net = stream(empty_net(), tmp_path / "net.safetensors")
    assert in_memory(net) <= BUDGET // 2
    assert net(whole_numbers(3, NARROW)).equal(whole(whole_numbers(3, NARROW)))
    # Where a share of what is left does not do, no more is taken than what does.
    with pytest.raises(ValueError, match="with matrices in tiles") as refused:
        stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=1000)
    needed = int(str(refused.value).split("with matrices in tiles, ")[1].split()[0])
    monkeypatch.setattr("nvmeio.inference._model_plan.memory_left", lambda: needed * 3 // 2)
    net = stream(empty_net(), tmp_path / "net.safetensors")
    assert tiles_of(net, "head")
    assert in_memory(net) == needed
    assert net(whole_numbers(3, NARROW)).equal(whole(whole_numbers(3, NARROW)))
    monkeypatch.setattr("nvmeio.inference._model_plan.memory_left", lambda: 1000)
    assert not tiles_of(stream(empty_net(), tmp_path / "net.safetensors"), "head")
