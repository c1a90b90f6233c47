"""Matrices that are larger than the memory for weights are computed in tiles."""

from __future__ import annotations

import copy
import itertools
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_accelerator import accelerator
from hypothesis import given
from hypothesis import strategies as st
from inference._models import gpt2, llama, loaded, logits, prompt, saved, tokens
from torch import nn
from torch.nn import functional

import nvmeio
from nvmeio._residency.tiled_linear import ROWS
from nvmeio._storage import crc32
from nvmeio.checkpoint.safetensors import read_header, save_safetensors
from nvmeio.errors import IntegrityError, TransferError
from nvmeio.inference import pack
from nvmeio.inference._plan import budget as budget_module
from nvmeio.inference._plan import tiles as tiles_module
from nvmeio.inference._plan import units
from nvmeio.inference._plan.slot_layout import FileExtent, Weight, WeightPart
from nvmeio.inference._plan.tiles import CutSums, Tile, rows_of
from nvmeio.testing import FakeEngine

Make = Callable[..., Any]

WIDE, NARROW = 250, 64
OUTPUTS = 2000  # no multiple of the rows of a tile


@pytest.fixture(autouse=True)
def small_ones_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of tests are smaller than what is worth a read."""
    monkeypatch.setattr(budget_module, "LEAST_BYTES", 1 << 14)


class Net(nn.Module):
    """Sums of whole numbers, which are exact in any order: the same bits whatever the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(NARROW, WIDE), nn.ReLU(), nn.Linear(WIDE, NARROW, bias=False))
            for _ in range(2)
        )
        self.head = nn.Linear(NARROW, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).clamp(-2, 2)
        found: torch.Tensor = self.head(x)
        return found


def saved_net(path: Path, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    net = Net().requires_grad_(False)
    for parameter in net.parameters():
        parameter.copy_(torch.randint(-2, 3, parameter.shape))
    save_safetensors(net.to(dtype).state_dict(), path, align=True)  # tests go by places in it
    return net.float()


def empty_net() -> Net:
    with torch.device("meta"):
        return Net()


def whole_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float()


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Sums in another order, of numbers that are not whole."""
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


BUDGET = 200_000  # the head has 512,000 bytes, a layer 129,000


def tiles_of(model: Any, name: str) -> list[Any]:
    return [tile for unit in model.weight_stream.units if unit.name == name for tile in unit.tiles]


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


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_packed_matrices_are_converted_tile_by_tile(
    bits: int | None, tmp_path: Path, stream: Make
) -> None:
    saved(lambda: llama(layers=2, vocab_size=2000), tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed", quant_bits=bits, quant_group_size=32)
    model = stream(tmp_path / "packed", resident_bytes=200_000)
    assert len(tiles_of(model, "lm_head")) > 1
    found = logits(model, prompt())
    close(found, logits(stream(tmp_path / "packed"), prompt()))
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
    with pytest.raises(IntegrityError, match="were not all what was packed"):
        tiles_module.linear(unit([(0, wrong)], others), torch.ones(1, 1), None)
    assert sums.settled
    assert tiles_module.linear(unit([], []), torch.ones(1, 1), None).shape == (1, 2)


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
    with pytest.raises(RuntimeError, match="takes no other weights"):
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


@torch.no_grad()
def test_memory_that_is_left_decides_where_nobody_says_how_much(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved_net(tmp_path / "net.safetensors")
    monkeypatch.setattr("nvmeio.inference._plan.model_plan.memory_left", lambda: BUDGET)
    net = stream(empty_net(), tmp_path / "net.safetensors")
    assert net.weight_stream._shares.total <= BUDGET // 2
    assert net(whole_numbers(3, NARROW)).equal(whole(whole_numbers(3, NARROW)))
    # Where a share of what is left does not do, no more is taken than what does.
    with pytest.raises(ValueError, match="with matrices in tiles") as refused:
        stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=1000)
    needed = int(str(refused.value).split("with matrices in tiles, ")[1].split()[0])
    monkeypatch.setattr("nvmeio.inference._plan.model_plan.memory_left", lambda: needed * 3 // 2)
    net = stream(empty_net(), tmp_path / "net.safetensors")
    assert tiles_of(net, "head")
    assert net.weight_stream._shares.total == needed
    assert net(whole_numbers(3, NARROW)).equal(whole(whole_numbers(3, NARROW)))
    monkeypatch.setattr("nvmeio.inference._plan.model_plan.memory_left", lambda: 1000)
    assert not tiles_of(stream(empty_net(), tmp_path / "net.safetensors"), "head")


# Training


def test_gradients_go_through_tiles(tmp_path: Path, stream: Make) -> None:
    whole = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=BUDGET, trainable=True)
    assert len(tiles_of(net, "head")) > 1
    for seed in range(2):
        gradients = []
        for model in (whole, net):
            x = whole_numbers(3, NARROW, seed=seed).requires_grad_()
            output = model(x)
            output.backward(whole_numbers(3, OUTPUTS, seed=seed + 9))
            gradients.append((output.detach(), x.grad))
        assert gradients[0][0].equal(gradients[1][0])
        assert gradients[0][1].equal(gradients[1][1])


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_gradients_of_a_tiled_layer_are_refused(name: str, tmp_path: Path, stream: Make) -> None:
    """The bias, which is always there, was trained, and was in no state dict."""
    saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=BUDGET, trainable=True)
    assert tiles_of(net, "head")
    getattr(net.head, name).requires_grad_(True)
    x = whole_numbers(3, NARROW).requires_grad_()
    with pytest.raises(RuntimeError, match=f"'{name}' of a Linear requires gradients"):
        net(x)
    getattr(net.head, name).requires_grad_(False)
    net(x).sum().backward()
    assert x.grad is not None


def test_gradients_of_an_embedding_read_by_rows_are_refused(tmp_path: Path, stream: Make) -> None:
    path = tmp_path / "net.safetensors"
    whole = nn.Sequential(nn.Embedding(OUTPUTS, NARROW), nn.ReLU())
    save_safetensors(whole.state_dict(), path)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Embedding(OUTPUTS, NARROW), nn.ReLU())
    net = stream(empty, path, resident_bytes=BUDGET, trainable=True, layers=[])
    ids = torch.arange(3)
    assert net(ids).equal(whole(ids))
    net[0].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="'weight' of a Embedding requires gradients"):
        net(ids)


def test_gradients_of_tiles_are_added_in_float32(tmp_path: Path, stream: Make) -> None:
    """In bfloat16 256 and 1 are 256 again, however often 1 is added."""
    path = tmp_path / "one.safetensors"
    save_safetensors({"0.weight": torch.ones(4 * 256, 64, dtype=torch.bfloat16)}, path)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(64, 4 * 256, bias=False, dtype=torch.bfloat16))
    net = stream(empty, path, resident_bytes=100_000, trainable=True)
    tiles = tiles_of(net, "0")
    assert len(tiles) > 2
    x = torch.ones(1, 64, dtype=torch.bfloat16, requires_grad=True)
    given = torch.zeros(1, 4 * 256, dtype=torch.bfloat16)
    for tile in tiles:
        given[0, tile.modules[0].first] = 1
    given[0, tiles[-1].modules[0].first] = 256  # which backward comes to first
    net(x).backward(given)
    assert x.grad is not None
    wanted = torch.tensor(256.0 + len(tiles) - 1).bfloat16()
    assert wanted > 256
    assert bool((x.grad == wanted).all())


class Adapted(nn.Module):
    """A matrix of low rank beside a layer, as PEFT makes it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        torch.manual_seed(1)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.up(self.down(x))
        return found


def test_adapters_beside_tiles_have_the_gradients_that_they_have_in_memory(
    tmp_path: Path, stream: Make
) -> None:
    whole: Any = saved_net(tmp_path / "net.safetensors")
    net = stream(empty_net(), tmp_path / "net.safetensors", resident_bytes=BUDGET, trainable=True)
    learned = []
    for model in (whole, net):
        model.head = Adapted(model.head)
        model.layers[0][0] = Adapted(model.layers[0][0])
        trained = [p for p in model.parameters() if p.requires_grad]
        assert len(trained) == 4
        for step in range(2):  # gradients are added
            model(whole_numbers(3, NARROW, seed=step)).square().mean().backward()
        learned.append([p.grad for p in trained])
    for found, wanted in zip(learned[1], learned[0], strict=True):
        scale = float(wanted.abs().max())
        assert scale > 0
        torch.testing.assert_close(found / scale, wanted / scale, rtol=0, atol=1e-4)


def test_gradients_go_through_tiles_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = saved_net(tmp_path / "net.safetensors")
    given = whole_numbers(3, OUTPUTS, seed=9)
    with accelerator(monkeypatch) as cuda:
        net = nvmeio.stream_model(
            empty_net(),
            tmp_path / "net.safetensors",
            resident_bytes=BUDGET,
            trainable=True,
            device="cuda",
        )
        try:
            assert len(tiles_of(net, "head")) > 1
            x = cuda.tensor(whole_numbers(3, NARROW)).requires_grad_()
            output = net(x)
            output.backward(cuda.tensor(given))
            found = cuda.value(output.detach()), cuda.value(x.grad)
        finally:
            net.weight_stream.close()
    known = whole_numbers(3, NARROW).requires_grad_()
    wanted = whole(known)
    wanted.backward(given)
    assert found[0].equal(wanted.detach())
    assert found[1].equal(known.grad)


class Uncalled(nn.Module):
    """Uses a weight of a child's, and does not call the child."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.a, self.b = nn.Linear(NARROW, WIDE, bias=False), nn.Linear(WIDE, NARROW, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.a.weight
        between = functional.linear(x, weight) if self.way == "linear" else x @ weight.T.float()
        found: torch.Tensor = self.b(between)
        return found


@pytest.mark.parametrize("way", ["linear", "transposed"])
@pytest.mark.parametrize("trainable", [False, True])
def test_a_weight_that_is_used_without_its_module_is_no_garbage(
    tmp_path: Path, stream: Make, way: str, trainable: bool
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Uncalled(way), Uncalled(way)).requires_grad_(False)
    save_safetensors(dict(net.state_dict()), tmp_path / "model.safetensors")
    x = torch.randn(3, NARROW)
    with torch.device("meta"):
        empty = nn.Sequential(Uncalled(way), Uncalled(way))
    whole = stream(copy.deepcopy(empty), tmp_path, resident_bytes=BUDGET * 2, trainable=trainable)
    assert torch.equal(whole(x), net(x))
    names = whole.state_dict().keys()
    whole.weight_stream.close()
    cut = stream(empty, tmp_path, resident_bytes=BUDGET // 2, trainable=trainable)
    for _ in range(2):
        if trainable:  # read for each use, as adapters want it
            assert torch.allclose(cut(x), net(x), atol=1e-5)
        else:
            with pytest.raises(RuntimeError, match="where a layer was cut to fit"):
                cut(x)
    assert cut.state_dict().keys() == names
    assert sum(p.numel() for p in cut.parameters()) == 4 * NARROW * WIDE


def test_a_head_that_takes_the_embeddings_weight_itself_is_no_garbage(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(OUTPUTS, NARROW)
            self.layers = nn.ModuleList(nn.Linear(NARROW, NARROW) for _ in range(2))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return functional.linear(x, self.embed.weight)

    monkeypatch.setattr(units, "SMALL_BYTES", 0)
    save_safetensors(dict(Tied().state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = Tied()
    model = stream(empty, tmp_path, resident_bytes=100_000)
    with pytest.raises(RuntimeError, match="does not call the module that it belongs to"):
        model(torch.tensor([[1, 2, 3]]))
