"""Models that compute with weights of 4 and 8 bits as they are: what modules see, and how exact."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_accelerator import accelerator
from inference._models import (
    MODELS,
    llama,
    loaded,
    logits,
    prompt,
    qwen3,
    saved,
    tokens,
    weights_file,
)
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

from nvmeio._formats.packed_index import KEY
from nvmeio.checkpoint.safetensors import read_header
from nvmeio.cli import app
from nvmeio.inference import generate_in_blocks, pack
from nvmeio.inference._plan import quantization
from nvmeio.inference._plan.quantization import Quantised, dequantise, multiply, quantise
from nvmeio.inference._stream import packed_weights, slots

Make = Callable[..., Any]


def packed(tmp_path: Path, build: Callable[[], Any] = llama, bits: int = 4, **options: Any) -> Path:
    saved(build, tmp_path / "m")
    pack(tmp_path / "m", tmp_path / "p", quant_bits=bits, quant_group_size=32, **options)
    return tmp_path / "p"


def seen(model: Any, module: nn.Module, look: Callable[[nn.Module], Any]) -> list[Any]:
    """What a hook sees in a module while its weights are there."""
    found: list[Any] = []
    handle = module.register_forward_hook(lambda *_: found.append(look(module)))
    logits(model, prompt())
    handle.remove()
    return found


@pytest.mark.parametrize("bits", [4, 8])
def test_what_stays_is_packed(bits: int, tmp_path: Path, stream: Make) -> None:
    """In memory where one layer stays beside a window of float32 ones, all eight do."""
    saved(lambda: llama(layers=8, width=256), tmp_path / "m")
    pack(tmp_path / "m", tmp_path / "p", quant_bits=bits)
    plain = stream(tmp_path / "m", resident_bytes=1 << 30)
    layer = max(unit.layout.nbytes for unit in plain.weight_stream.units)
    budget = {4: 3, 8: 5}[bits] * layer
    model = stream(tmp_path / "p", resident_bytes=budget, compute="auto")
    whole = stream(tmp_path / "m", resident_bytes=budget)
    kept, before = (
        sum(unit.resident for unit in each.weight_stream.units if len(unit.weights) > 2)
        for each in (model, whole)
    )
    assert kept == 8 and before <= {4: 1, 8: 3}[bits]
    logits(model, prompt())
    read = model.weight_stream.stats.bytes_read
    logits(model, prompt())
    rows = model.weight_stream.stats.bytes_read - read
    assert rows <= prompt().numel() * 256 * 4
    stats = model.weight_stream.stats
    assert stats.work_bytes == 0 and stats.resident_bytes + stats.window_bytes <= budget


def test_a_weight_is_what_it_was_to_who_looks_at_it(tmp_path: Path, stream: Make) -> None:
    path = packed(tmp_path)
    model, other = stream(path), stream(path, compute="widened")
    module = model.model.layers[1].mlp.up_proj
    wanted = seen(other, other.model.layers[1].mlp.up_proj, lambda m: m.weight.detach().clone())[0]

    def look(m: Any) -> Any:
        weight = m.weight
        assert isinstance(weight, nn.Parameter) and isinstance(weight, torch.Tensor)
        assert (weight.shape, weight.dtype) == (wanted.shape, wanted.dtype)
        assert weight.device.type == "cpu" and not weight.is_meta
        x = torch.ones(3, wanted.shape[1])
        return {
            "sum": (weight * 2, wanted * 2),
            "copy": (copy.deepcopy(weight).detach(), wanted),
            "norm": (torch.linalg.norm(weight, dim=1), torch.linalg.norm(wanted, dim=1)),
            "row": (weight[3], wanted[3]),
            "rows": (weight[2:5] + 0, wanted[2:5]),
            "chosen": (weight[torch.tensor([4, 1])], wanted[[4, 1]]),
            "masked": (weight[torch.arange(len(wanted)) < 3], wanted[:3]),
            "column": (weight[:, 3], wanted[:, 3]),
            "clone": (weight.clone(), wanted),
            "turned": (x @ weight.T, x @ wanted.T),
            "transposed": (x @ weight.transpose(0, 1), x @ wanted.T),
            "another dtype": (
                functional.linear(x.double(), weight.double()),
                (x @ wanted.T).double(),
            ),
        }

    for what, (found, known) in seen(model, module, look)[0].items():
        assert torch.allclose(found, known, rtol=1e-5, atol=1e-5), what


def test_a_packed_weight_cannot_be_changed(tmp_path: Path, stream: Make) -> None:
    model = stream(packed(tmp_path))
    module = model.model.layers[0].mlp.up_proj

    def change(m: Any) -> None:
        with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be changed"):
            m.weight.mul_(2)
        with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be changed"):
            m.weight.data = torch.ones(1)

    assert seen(model, module, change) == [None]


def test_a_head_is_copied_whole(tmp_path: Path, stream: Make) -> None:
    model = stream(packed(tmp_path), trainable=True)
    head = copy.deepcopy(model.lm_head)
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert torch.allclose(head(x), model.lm_head(x), atol=1e-5)
    assert type(head.weight) is nn.Parameter


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("budget", [500_000, 1 << 30])
def test_fused_experts_in_each_of_their_ways(
    budget: int, way: str, tmp_path: Path, stream: Make
) -> None:
    path = packed(tmp_path, MODELS["mixtral"])
    both = [stream(path, resident_bytes=budget, compute=c) for c in ("auto", "widened")]
    for model in both:
        model.set_experts_implementation(way)
    found, wanted = (logits(model, prompt()) for model in both)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-5)
    assert tokens(both[0], prompt()).equal(tokens(both[1], prompt()))


@pytest.mark.parametrize("compute", ["auto", "packed", "widened"])
@pytest.mark.parametrize("budget", [1_400_000, 1 << 30])
@pytest.mark.parametrize(("tied", "bits"), [(True, 4), (True, 8), (False, 4)])
def test_embeddings_are_looked_up_packed_and_multiplied_with_where_they_are_the_head(
    tied: bool, bits: int, budget: int, compute: str, tmp_path: Path, stream: Make
) -> None:
    """Of rows that are read one by one, steps, scales and minima; and the whole where it stays."""
    path = packed(
        tmp_path, lambda: llama(layers=2, vocab_size=32768, tie_word_embeddings=tied), bits
    )
    model = stream(path, resident_bytes=budget, compute=compute)
    whole = loaded(tmp_path / "m")
    setting = Quantised(bits, 32)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() == 2:
                dequantise(quantise(parameter, setting), setting, parameter)
    ids = torch.randint(0, 32768, (2, 9), generator=torch.Generator().manual_seed(0))
    found, wanted = logits(model, ids), logits(whole, ids)
    assert torch.allclose(found, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))
    assert tokens(model, ids).equal(tokens(whole, ids))
    if budget < 1 << 30:
        assert model.weight_stream.stats.rows_read >= ids.unique().numel()
    with pytest.raises(IndexError, match="out of range"):
        logits(model, torch.tensor([[32768]]))


@pytest.mark.filterwarnings("ignore:The use of `x.T` on tensors")
def test_fused_experts_are_turned_as_torch_does(tmp_path: Path, stream: Make) -> None:
    """`T` turns all of three dimensions; it gave what `mT` does."""
    model = stream(packed(tmp_path, MODELS["mixtral"]))
    experts = model.model.layers[1].mlp.experts

    def look(_: nn.Module) -> None:
        weight = experts.down_proj
        assert weight.T.shape == weight.shape[::-1]
        assert weight.T[..., 0].equal(weight[0].T)
        assert weight.mT[0].equal(weight[0].T)

    assert None in seen(model, experts.act_fn, look)


def test_biases_of_a_base_that_is_not_trained_are_added_to_packed_products(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of these layers' weights were widened for each product."""
    model = stream(packed(tmp_path, qwen3), trainable=True)
    wanted = logits(stream(tmp_path / "p", compute="widened", trainable=True), prompt())
    whole: list[Any] = []
    stock = packed_weights.Packed.widened
    monkeypatch.setattr(
        packed_weights.Packed, "widened", lambda self: whole.append(self) or stock(self)
    )
    assert torch.allclose(logits(model, prompt()), wanted, rtol=0, atol=1e-5)
    assert all(len(each.parts[0]) <= prompt().numel() for each in whole)  # rows of the embedding


def test_only_experts_that_are_used_are_widened(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stream(packed(tmp_path, MODELS["mixtral"]))
    whole: list[Any] = []
    stock = packed_weights.Packed.widened
    monkeypatch.setattr(
        packed_weights.Packed, "widened", lambda self: whole.append(self) or stock(self)
    )
    logits(model, prompt())
    assert all(len(each.parts[0]) <= prompt().numel() for each in whole)  # rows of the embedding


@pytest.mark.parametrize("compute", ["auto", "packed"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": False}])
def test_batches_and_beams(
    options: dict[str, Any], bits: int, compute: str, tmp_path: Path, stream: Make
) -> None:
    path = packed(tmp_path, bits=bits)
    ids = prompt(batch=3)
    found, wanted = (
        stream(path, compute=c).generate(ids, max_new_tokens=6, **options)
        for c in (compute, "widened")
    )
    assert found.shape == (3, ids.shape[1] + 6) and found.equal(wanted)


def _widening_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that widen weights; prompts are given parts that are widened."""
    threads: list[str] = []

    def widen(*given: Any) -> None:
        threads.append(threading.current_thread().name)
        quantization.dequantise(*given)

    monkeypatch.setattr(slots, "dequantise", widen)
    monkeypatch.setattr(packed_weights, "dequantise", widen)
    second = SimpleNamespace(made=lambda ways, *given: ways[1](*given))
    monkeypatch.setattr(packed_weights, "CHOICES", second)
    return threads


@pytest.mark.parametrize("compute", ["auto", "packed", "widened"])
@pytest.mark.parametrize(("name", "budget"), [("llama", 400_000), ("mixtral", 700_000)])
def test_the_thread_that_computes_widens(
    name: str,
    budget: int,
    compute: str,
    tmp_path: Path,
    stream: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner of the window did, for `compute="widened"`: with OpenMP threads of its own."""
    model = stream(packed(tmp_path, MODELS[name]), resident_bytes=budget, window=1, compute=compute)
    threads = _widening_threads(monkeypatch)
    for ids in (prompt(), prompt(length=1)):
        logits(model, ids)
    assert set(threads) == {threading.current_thread().name}


@pytest.mark.parametrize("compute", ["auto", "widened"])
def test_the_thread_that_trains_widens(
    compute: str, tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In backward too, and where a weight is looked at by itself."""
    options: dict[str, Any] = {"resident_bytes": 250_000, "window": 1, "trainable": True}
    model = stream(packed(tmp_path), compute=compute, **options)
    threads = _widening_threads(monkeypatch)
    given = torch.ones(2, 7, 64, requires_grad=True)
    model(inputs_embeds=given, labels=prompt()).loss.backward()
    assert given.grad is not None and threads
    forward_and_backward = len(threads)
    copy.deepcopy(model.lm_head)
    assert len(threads) == forward_and_backward + 1
    assert set(threads) == {threading.current_thread().name}


@pytest.mark.parametrize("budget", [400_000, 1 << 30])
@pytest.mark.parametrize("blocks", [1, 2])
def test_what_an_interrupt_left_packed_is_widened_by_the_next_pass(
    blocks: int, budget: int, tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(tmp_path)
    model = stream(path, compute="widened", resident_bytes=budget, window=1)
    ids = prompt(batch=4)
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    wanted = stream(path, compute="packed").generate(ids, **options)
    left = [0]

    def interrupted(*given: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        quantization.dequantise(*given)

    monkeypatch.setattr(slots, "dequantise", interrupted)
    for at in (1, 2, 9, 20):
        left[0] = at
        with pytest.raises(KeyboardInterrupt):
            generate_in_blocks(model, ids, micro_batches=blocks, **options)
        assert generate_in_blocks(model, ids, micro_batches=blocks, **options).equal(wanted)


@pytest.mark.parametrize("compute", ["auto", "packed", "widened"])
@pytest.mark.parametrize(
    ("asked", "name", "most"),
    [(None, "F32", 2e-6), ("bfloat16", "BF16", 2**-8)],
    ids=["float32 as it is", "bfloat16 was asked for"],
)
def test_linear_layers_compute_in_the_dtype_of_the_model_unless_another_is_asked_for(
    asked: str | None, name: str, most: float, compute: str, tmp_path: Path, stream: Make
) -> None:
    """Weights, inputs, outputs and sums; and the index says which dtype it is."""
    path = packed(tmp_path, lambda: llama(width=256), dtype=asked)
    header = read_header(weights_file(path))
    index = json.loads(header.metadata[KEY])["quantised"]
    assert len(index) == 4 * 7 + 2 and {each["dtype"] for each in index.values()} == {name}
    whole = {n: t.dtype for n, t in header.tensors.items() if n.endswith("norm.weight")}
    assert len(whole) == 9 and set(whole.values()) == {name}
    dtype = getattr(torch, asked or "float32")
    assert json.loads((path / "config.json").read_text())["dtype"] == (asked or "float32")
    model = stream(path, compute=compute)
    assert model.dtype is dtype
    for unit in model.weight_stream.units:  # as it lies: one read a layer, of whole pages
        assert len(unit.layout.reads) == 1
        assert all(read.start % 4096 == 0 == read.at % 4096 for read in unit.layout.reads)
    seen_layers: list[str] = []

    def look(layer: nn.Module, given: tuple[torch.Tensor, ...], found: torch.Tensor) -> None:
        weight: Any = layer.weight
        wide = weight.packed.widened() if compute != "widened" else weight.detach()
        assert {weight.dtype, wide.dtype, given[0].dtype, found.dtype} == {dtype}
        exact = given[0].double() @ wide.double().T
        assert float((found.double() - exact).abs().max()) <= most * float(exact.abs().max())
        seen_layers.append(str(layer))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(look)
    assert logits(model, prompt()).dtype is dtype
    logits(model, prompt(length=1))
    assert len(seen_layers) == 2 * (4 * 7 + 1)


class Noting(packed_weights.Choices):
    """Nothing is chosen yet; notes each product whose weight is widened, in a trial as well."""

    def __init__(self, note: Callable[[packed_weights.Packed], object]) -> None:
        super().__init__()
        self._note = note

    def made(self, ways: Any, inputs: torch.Tensor, what: packed_weights.Packed, bias: Any) -> Any:
        def widened(inputs: torch.Tensor, what: packed_weights.Packed, bias: Any) -> Any:
            self._note(what)
            return ways[1](inputs, what, bias)

        return super().made((ways[0], widened), inputs, what, bias)


def test_the_first_product_has_the_bits_of_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first call of many rows gave the loops' product, and those after it torch's."""
    monkeypatch.setattr(packed_weights, "CHOICES", packed_weights.Choices())
    setting = Quantised(4, 64)
    weight = torch.randn(512, 512).bfloat16()
    what = packed_weights.Packed(quantise(weight, setting), setting, weight.dtype, "auto")
    for rows in (128, 64, 32, 16, 8, 4, 256):
        x = torch.randn(rows, 512).bfloat16()
        first = what.product(x, None)
        for _ in range(3):
            assert what.product(x, None).equal(first)


def test_the_choice_is_remembered_and_measured_once(
    tmp_path: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[packed_weights.Packed] = []
    monkeypatch.setattr(packed_weights, "CHOICES", Noting(measured.append))
    model = stream(packed(tmp_path))
    one = torch.tensor([[5]])
    logits(model, one)
    assert measured == []  # few rows are not worth a trial
    for _ in range(3):
        logits(model, prompt())
    sizes = 7 * 4 + 1  # matrices: those of a size share what was found
    assert 0 < len(measured) < 4 * sizes


def _seen_to_cost(
    monkeypatch: pytest.MonkeyPatch,
    loops: Sequence[int],
    parts: int,
    preempted: int = 0,
    sizes: list[int] | None = None,
) -> list[str]:
    """Clocks that say what a product costs: CPU time, and waiting for other programs on top.

    Args:
        monkeypatch: Undoes it.
        loops: What calls of the loops take, in turn; the last for all later ones.
        parts: What widening takes.
        preempted: How much longer the loops take by the clock.
        sizes: Gets the rows of each weight that is widened.

    Returns:
        Who was called, in order.
    """
    calls: list[str] = []
    cpu, clock = [0], [0]

    def multiplied(*given: Any, **options: Any) -> torch.Tensor:
        cpu[0] += loops[min(calls.count("loops"), len(loops) - 1)]
        clock[0] += preempted
        calls.append("loops")
        return quantization.multiply(*given, **options)

    def widened(what: packed_weights.Packed) -> None:
        cpu[0] += parts
        calls.append("parts")
        if sizes is not None:
            sizes.append(len(what.parts[0]))

    monkeypatch.setattr(packed_weights, "CHOICES", Noting(widened))
    monkeypatch.setattr(packed_weights, "multiply", multiplied)
    both = SimpleNamespace(thread_time=lambda: cpu[0], perf_counter=lambda: cpu[0] + clock[0])
    monkeypatch.setattr(packed_weights, "time", both)
    return calls


def _weight(dtype: torch.dtype, rows: int = 128) -> packed_weights.Packed:
    setting = Quantised(4, 64)
    weight = torch.randn(rows, 128).to(dtype)
    return packed_weights.Packed(quantise(weight, setting), setting, dtype, "auto")


@pytest.mark.parametrize(
    ("loops", "parts", "way"),
    [((2,), 3, "loops"), ((3,), 2, "parts"), ((9, 9, 2), 3, "loops")],
    ids=["loops are faster", "widening is faster", "loops were cold at first"],
)
def test_what_other_programs_take_does_not_decide(
    loops: tuple[int, ...], parts: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad moment had a process widen the weights of every prompt, for as long as it ran."""
    calls = _seen_to_cost(monkeypatch, loops, parts, preempted=100)
    what, x = _weight(torch.float32), torch.randn(16, 128)
    what.product(x, None)
    calls.clear()
    for _ in range(3):
        what.product(x, None)
    assert calls == 3 * [way]


def test_a_trial_takes_a_part_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large matrix with a long prompt was multiplied six times before the first output."""
    monkeypatch.setattr(packed_weights, "PART_BYTES", 128 * 128 * 4)
    sizes: list[int] = []
    _seen_to_cost(monkeypatch, (3,), 2, sizes=sizes)
    what = _weight(torch.float32, rows=1000)
    x, bias = torch.randn(16, 128), torch.randn(1000)
    found = what.product(x, bias)
    assert torch.allclose(found, functional.linear(x, what.widened(), bias), atol=1e-4)
    assert sizes == packed_weights.TRIALS * [128] + [1000]


def test_where_tile_registers_multiply_nothing_is_widened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are faster for any number of rows: nothing is measured, and the bits never change."""
    calls = _seen_to_cost(monkeypatch, (3,), 2)
    monkeypatch.setattr(packed_weights, "in_halves", lambda *_: True)
    what = _weight(torch.bfloat16)
    for rows in (16, 700):
        what.product(torch.randn(rows, 128).bfloat16(), None)
    assert calls == ["loops", "loops"]


@pytest.mark.parametrize(("how", "status"), [("widened", 0), ("packed", 0), ("fast", 2)])
def test_the_command_line_takes_it_too(how: str, status: int, tmp_path: Path) -> None:
    arguments = ["generate", str(packed(tmp_path)), "--ids", "5,6", "--max-new-tokens", "3"]
    assert CliRunner().invoke(app, [*arguments, "--compute", how]).exit_code == status


def test_there_is_no_such_way(tmp_path: Path, stream: Make) -> None:
    with pytest.raises(ValueError, match='must be "auto", "packed" or "widened"'):
        stream(packed(tmp_path), compute="fast")


@pytest.mark.parametrize("width", [256, 1024, 4096])
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]
)
def test_how_far_a_product_is_from_the_widened_one(
    dtype: torch.dtype, most: float, width: int
) -> None:
    """As docs/inference.md says: of the largest output, the rounding of the dtype.

    Prints the largest and the typical error: bits, dtype, width of the weight, rows of inputs.
    """
    torch.manual_seed(0)
    weight = torch.randn(512, width).to(dtype)
    for bits in (4, 8):
        setting = Quantised(bits, 64)
        parts = quantise(weight, setting)
        wide = torch.empty_like(weight)
        dequantise(parts, setting, wide)
        for rows in (1, 16, 256):
            x = torch.randn(rows, width).to(dtype)
            exact = x.double() @ wide.double().T
            error = multiply(x, parts, setting, None).double() - exact
            largest, typical = error.abs().max() / exact.abs().max(), error.std() / exact.std()
            name = str(dtype).removeprefix("torch.")
            print(f"| {bits} | {name} | {width} | {rows} | {largest:.1e} | {typical:.1e} |")
            assert largest <= most


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_device_computes_with_packed_weights(
    bits: int, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is the device's: the shim's loops may not touch it."""
    setting = Quantised(bits, 32)
    parts = quantise(torch.randn(64, 64), setting)
    x = torch.randn(5, 64)
    here = packed_weights.Packed(parts, setting, torch.float32, "packed", turned)
    wanted = here.product(x, None)
    with accelerator(monkeypatch) as cuda:
        there = here._replace(parts=tuple(cuda.tensor(part) for part in parts))
        found = cuda.value(there.product(cuda.tensor(x), None))
    assert torch.allclose(found, wanted, atol=1e-5)


@contextlib.contextmanager
def _int4_kernel(clock: list[int], works: str) -> Iterator[list[int]]:
    """What stands for CUDA's product with 4 bits; yields the rows of its calls."""
    calls: list[int] = []

    def convert(steps: torch.Tensor, inner: int) -> torch.Tensor:
        rows, half = steps.shape
        return steps.view(torch.int32).reshape(rows // 8, half // (inner * 8), 32, inner // 2)

    def product(x: torch.Tensor, tiles: Any, size: int, pairs: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        clock[0] += 3 if works == "slow" else 1
        rows = tiles.shape[0] * 8
        steps = tiles.reshape(rows, -1).view(torch.uint8)
        wide = torch.stack((steps >> 4, steps & 15), -1).view(rows, -1, size).float() - 8
        scales, zeros = pairs.transpose(0, 1).float().unsqueeze(-1).unbind(2)
        return functional.linear(
            x, (wide * scales + zeros + (works == "wrong")).to(x.dtype).view(rows, -1)
        )

    def shape(x: torch.Tensor, tiles: torch.Tensor, *_: Any) -> torch.Tensor:
        return x.new_empty(len(x), tiles.shape[0] * 8)

    if works == "absent":
        yield calls
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_convert_weight_to_int4pack", convert, "CPU")
        library.impl("_weight_int4pack_mm", product, "CPU")
        library.impl("_weight_int4pack_mm", shape, "Meta", allow_override=True)
        yield calls


@pytest.mark.parametrize("works", ["fast", "slow", "wrong", "absent"])
def test_cuda_multiplies_with_four_bits_where_its_kernel_is_faster(
    works: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen once, on the stand-in; a kernel that is absent or wrong is not used."""
    clock = [0]  # of its own: what widens takes two, the kernel one or three
    monkeypatch.setattr(packed_weights, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def widened(_: packed_weights.Packed) -> None:
        clock[0] += 2

    monkeypatch.setattr(packed_weights, "CHOICES", Noting(widened))
    setting = Quantised(4, 64)
    weight = torch.randn(64, 256).bfloat16()
    here = packed_weights.Packed(quantise(weight, setting), setting, weight.dtype, "auto")
    x, bias = torch.randn(5, 256).bfloat16(), torch.randn(64).bfloat16()
    wanted = functional.linear(x, here.widened(), bias).float()
    with _int4_kernel(clock, works) as calls, accelerator(monkeypatch) as cuda:
        there = here._replace(parts=tuple(cuda.tensor(part) for part in here.parts))
        on_device = cuda.tensor(x), cuda.tensor(bias)
        for _ in range(3):
            found = cuda.value(there.product(*on_device)).float()
            assert float((found - wanted).abs().max()) < 0.02 * float(wanted.abs().max())
    tried = packed_weights.TRIALS
    used = {"fast": tried + 3, "slow": tried, "wrong": tried, "absent": 0}[works]
    assert calls == used * [5]  # in the trial, and then where it was the faster


def test_perplexity_is_that_of_the_weights_widened(tmp_path: Path, stream: Make) -> None:
    """Of a model that was trained: on words that follow each other by rules, with some noise.

    Prints the perplexity on text that it has not seen: bits, not quantised, widened, packed, auto.
    """
    torch.manual_seed(0)
    model = llama(layers=2, num_key_value_heads=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    follower = torch.randperm(120) + 4

    def text(count: int) -> torch.Tensor:
        ids = [torch.randint(4, 124, (count,))]
        for _ in range(23):
            noise = torch.rand(count) < 0.1
            ids.append(torch.where(noise, torch.randint(4, 124, (count,)), follower[ids[-1] - 4]))
        return torch.stack(ids, 1)

    for _ in range(120):
        ids = text(16)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    held_out = text(32)

    def perplexity(of: Any) -> float:
        with torch.no_grad():
            return float(of(input_ids=held_out, labels=held_out).loss.exp())

    whole = perplexity(model)
    assert whole < 20  # of 120 words: it has learned
    model.save_pretrained(tmp_path / "m")
    for bits, most in ((8, 1.002), (4, 1.1)):
        path = tmp_path / f"p{bits}"
        pack(tmp_path / "m", path, quant_bits=bits, quant_group_size=32)
        wide, few, auto = (
            perplexity(stream(path, compute=c)) for c in ("widened", "packed", "auto")
        )
        print(f"| {bits} | {whole:.4f} | {wide:.4f} | {few:.4f} | {auto:.4f} |")
        assert few == pytest.approx(wide, rel=1e-5) and auto == pytest.approx(wide, rel=1e-5)
        assert wide < most * whole
