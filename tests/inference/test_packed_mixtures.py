"""Packed mixtures: what an expert has lies side by side, and is one read with one checksum."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._model_budget import Make, least
from inference._models import loaded_aligned, logits, mixtral, prompt, saved, tokens, transformers
from inference._models import weights_file as file_in
from inference._published import published
from torch import nn
from typer.testing import CliRunner

import nvmeio
from nvmeio._formats.packed_index import EXPERTS, KEY, SEAL
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio.checkpoint.safetensors import read_header
from nvmeio.cli import app
from nvmeio.errors import IntegrityError
from nvmeio.inference import _model_plan, pack, packing
from nvmeio.inference._experts import sets as sets_module
from nvmeio.inference._plan import packed_format
from nvmeio.testing import FakeEngine

PAGE = 4096


def many_experts() -> Any:
    """Four layers of 16 experts, two a token."""
    return mixtral(experts=16)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    saved(many_experts, tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed")
    return tmp_path / "packed"


# How they lie


@pytest.mark.parametrize("options", [{}, {"quant_bits": 4, "quant_group_size": 32}])
def test_an_expert_is_one_read_with_one_checksum(
    tmp_path: Path, stream: Make, options: dict[str, Any]
) -> None:
    """It was a read for each weight, and for each packed part of one."""
    saved(many_experts, tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed", **options)
    pack(tmp_path / "model", tmp_path / "fused", keep_fused=True, **options)
    # At 4 bits an expert has so little of the other fused weight that this stays with its layer.
    for name, reads in (("packed", 1), ("fused", 2 if not options else 3)):
        sets = stream(tmp_path / name).weight_stream.experts
        assert len(sets) == 4
        for experts in sets:
            assert not experts.stage_nbytes
            for own in experts.direct:
                assert len(own.reads) == len(own.expected) == reads
    for own in stream(tmp_path / "packed").weight_stream.experts[2].direct:
        (read,), (expected,) = own
        assert read.start % PAGE == read.nbytes % PAGE == 0
        assert (expected.offset, expected.nbytes) == (read.start, read.nbytes)


def test_decoding_reads_whole_experts_and_nothing_else(packed: Path) -> None:
    asked: list[tuple[int, int]] = []

    def note(kind: str, offset: int, nbytes: int) -> int:
        asked.append((offset, nbytes))
        return 0

    with nvmeio.AioHandle(engine=FakeEngine(fail=note)) as handle:
        budget = 1_700_000  # a third of the experts
        with nvmeio.stream_model(packed, handle=handle, resident_bytes=budget) as model:
            logits(model, prompt(batch=1, length=1))
            places = {own.reads[0][1:3] for e in model.weight_stream.experts for own in e.direct}
            before = model.weight_stream.stats.experts
            asked.clear()
            for token in range(3, 40):
                logits(model, torch.tensor([[token]]))
            after = model.weight_stream.stats.experts
    assert after.misses - before.misses == len(asked) > 20
    assert {(start, start + nbytes) for start, nbytes in asked} <= places
    assert after.bytes_read - before.bytes_read == sum(nbytes for _, nbytes in asked)


def test_experts_of_a_layer_follow_each_other(packed: Path) -> None:
    header = read_header(file_in(packed))
    names = [name for name in header.tensors if name.endswith(EXPERTS)]
    assert names == [f"model.layers.{n}.mlp.experts{EXPERTS}" for n in range(4)]
    share = 3 * 64 * 96 * 4  # gate, up and down in float32
    for name in names:
        entry = header.tensors[name]
        assert entry.shape == (16, -(-share // PAGE) * PAGE)
        assert entry.start % PAGE == 0
    index = json.loads(header.metadata[KEY])
    assert index["version"] == 3  # earlier releases read 1 and 2, and refuse the others
    assert all(len(index["crc32"][name]) == 16 for name in names)


@pytest.mark.parametrize("way", ["trainable", "by layer"])
def test_whole_layers_are_few_reads(
    packed: Path, stream: Make, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As devices read them, and who has no address space for the cache; backward as well then."""
    monkeypatch.setattr(_model_plan, "_expert_sets", lambda *_: [])
    model = stream(packed, trainable=way == "trainable")
    assert not model.weight_stream.experts
    layers = [unit for unit in model.weight_stream.units if unit.is_layer]
    assert len(layers) == 4
    for unit in layers:
        assert len(unit.layout.reads) <= 3
        assert sum(read.nbytes for read in unit.layout.reads) <= unit.layout.nbytes
    assert tokens(model, prompt()).equal(tokens(loaded_aligned(packed.parent / "model"), prompt()))


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("by_layer", [True, False])
def test_gradients_go_through_experts(
    tmp_path: Path, bits: int | None, by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of experts have others' between them there; the bits stay the same."""
    if by_layer:
        monkeypatch.setattr(_model_plan, "_expert_sets", lambda *_: [])
    saved(many_experts, tmp_path / "model")
    found = []
    for name, keep_fused in (("packed", False), ("fused", True)):
        pack(tmp_path / "model", tmp_path / name, quant_bits=bits, keep_fused=keep_fused)
        budget = 4_000_000 if bits is None else 3_000_000
        with nvmeio.stream_model(
            tmp_path / name, trainable=True, resident_bytes=budget, compute="widened"
        ) as model:
            ids = prompt()
            inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
            loss = model(inputs_embeds=inputs, labels=ids).loss
            loss.backward()
            found.append((loss.detach(), inputs.grad))
    assert found[0][0].equal(found[1][0])
    assert found[0][1].equal(found[1][1])


# The same tokens


@pytest.mark.parametrize("compute", ["auto", "packed", "widened"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_experts_compute_as_fused_ones(
    tmp_path: Path, stream: Make, bits: int, compute: str
) -> None:
    saved(many_experts, tmp_path / "model")
    for name, keep_fused in (("packed", False), ("fused", True)):
        options: Any = {"quant_bits": bits, "keep_fused": keep_fused}
        report = pack(tmp_path / "model", tmp_path / name, **options)
        assert 0 < report.relative_error < 0.2
    budget = least(stream, tmp_path / "packed", compute=compute)
    few = stream(tmp_path / "packed", compute=compute, resident_bytes=budget)
    fused = stream(tmp_path / "fused", compute=compute)
    ids = prompt(batch=1, length=3)
    assert tokens(few, ids, 200).equal(tokens(fused, ids, 200))
    assert few.weight_stream.stats.experts.evictions > 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_experts_are_converted_as_they_come(packed: Path, stream: Make, dtype: Any) -> None:
    whole = loaded_aligned(packed.parent / "model", dtype=getattr(torch, dtype))
    model = stream(packed, dtype=dtype, resident_bytes=least(stream, packed, dtype=dtype))
    assert all(experts.stage_nbytes for experts in model.weight_stream.experts)
    ids = prompt(batch=1, length=3)
    assert tokens(model, ids, 60).equal(tokens(whole, ids, 60))


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("compute", ["auto", "widened"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_published_formats_keep_their_bytes(
    tmp_path: Path,
    stream: Make,
    kind: str,
    compute: str,
    dtype: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FP8 with scales, MXFP4 with scales and biases; in float32 a bias is converted by itself."""
    monkeypatch.setattr(sets_module, "LEAST_BYTES", 1024)  # experts of gpt-oss are that small here
    directory = published(kind, tmp_path / "model")
    pack(directory, tmp_path / "packed")
    options = {"compute": compute, "dtype": dtype}
    budget = least(stream, tmp_path / "packed", **options)
    model = stream(tmp_path / "packed", resident_bytes=budget, **options)
    whole = loaded_aligned(directory, **({} if dtype is None else {"dtype": torch.float32}))
    ids = prompt(batch=1, length=5)
    assert tokens(model, ids, 40).equal(tokens(whole, ids, 40))
    for experts in model.weight_stream.experts:
        for direct, staged in zip(experts.direct, experts.staged, strict=True):
            assert len((*direct.reads, *staged.reads)) == 1
            assert len((*direct.expected, *staged.expected)) == 1
    if kind == "gpt_oss":
        shown = {weight.weight.name.rpartition(".")[2] for weight in experts.weights}
        assert shown >= {"gate_up_proj_bias", "down_proj_bias"}


def test_several_drives_hold_parts_of_experts(tmp_path: Path, stream: Make) -> None:
    saved(many_experts, tmp_path / "model")
    drives = [tmp_path / "a", tmp_path / "b"]
    pack(tmp_path / "model", drives, quant_bits=8)
    pack(tmp_path / "model", tmp_path / "one", quant_bits=8)
    model = stream(drives, compute="widened", resident_bytes=1_500_000)
    ids = prompt(batch=1, length=3)
    assert tokens(model, ids, 40).equal(
        tokens(stream(tmp_path / "one", compute="widened"), ids, 40)
    )
    for drive in drives:
        assert CliRunner().invoke(app, ["verify", str(drive)]).exit_code == 0


# Experts that are modules


class ListConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    model_type = "nvmeio-list-mixture"
    hidden_size = 64


class ListLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 6, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 90), nn.SiLU(), nn.Linear(90, 64)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return x + out


class ListMixture(transformers.PreTrainedModel):  # type: ignore[misc]
    config_class = ListConfig

    def __init__(self, config: ListConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(ListLayer() for _ in range(3))
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def list_mixture(tmp_path: Path) -> Iterator[Path]:
    transformers.AutoConfig.register(ListConfig.model_type, ListConfig)
    transformers.AutoModelForCausalLM.register(ListConfig, ListMixture)
    torch.manual_seed(0)
    ListMixture(ListConfig(architectures=["ListMixture"])).save_pretrained(tmp_path / "list")
    yield tmp_path / "list"
    transformers.models.auto.configuration_auto.CONFIG_MAPPING._extra_content.pop(
        ListConfig.model_type
    )
    transformers.AutoModelForCausalLM._model_mapping._extra_content.pop(ListConfig)


@pytest.mark.parametrize("options", [{}, {"quant_bits": 8, "quant_group_size": 2}])
def test_experts_in_a_list_lie_side_by_side(
    list_mixture: Path, tmp_path: Path, stream: Make, options: dict[str, Any]
) -> None:
    pack(list_mixture, tmp_path / "packed", **options)
    model = stream(tmp_path / "packed", compute="widened")
    for experts in model.weight_stream.experts:
        for direct, staged in zip(experts.direct, experts.staged, strict=True):
            ((read,), (expected,)) = staged if experts.stage_nbytes else direct
            assert read.start % PAGE == read.nbytes % PAGE == 0
            assert (expected.offset, expected.nbytes) == (read.start, read.nbytes)
    if not options:
        whole = ListMixture.from_pretrained(tmp_path / "packed").eval()
        for seed in range(6):
            x = torch.randn(1 + seed, 64, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                assert model(x).equal(whole(x))
    found = CliRunner().invoke(app, ["inspect", str(tmp_path / "packed")]).stdout
    assert "3 layers of 6 experts" in found


# Damage


def test_a_corrupt_expert_fails_its_pass_by_its_name(packed: Path, stream: Make) -> None:
    """Other experts are computed with before and after, and itself once it is whole."""
    path = file_in(packed)
    entry = read_header(path).tensors[f"model.layers.3.mlp.experts{EXPERTS}"]
    broken = 5
    at = entry.start + broken * entry.shape[1] + 64 * 96 * 4 + 12
    content = path.read_bytes()[at]

    def write(byte: int) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))

    whole = loaded_aligned(packed.parent / "model")
    write(content ^ 1)
    model = stream(packed, resident_bytes=1_500_000)
    failures = 0
    for token in range(3, 60):
        one = torch.tensor([[token]])
        try:
            assert logits(model, one).equal(logits(whole, one))
        except IntegrityError as wrong:
            assert f"expert {broken} of model.layers.3.mlp.experts" in str(wrong)
            failures += 1
    assert 0 < failures < 40
    assert CliRunner().invoke(app, ["verify", str(path)]).exit_code == 1
    write(content)
    model = stream(packed, resident_bytes=1_500_000)
    assert logits(model, prompt()).equal(logits(whole, prompt()))


def test_a_corrupt_expert_is_found_where_layers_are_read_whole(
    packed: Path, stream: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_model_plan, "_expert_sets", lambda *_: [])
    path = file_in(packed)
    entry = read_header(path).tensors[f"model.layers.1.mlp.experts{EXPERTS}"]
    with path.open("r+b") as file:
        file.seek(entry.end - PAGE)
        file.write(b"\xa5" * 8)
    model = stream(packed, trainable=True)
    with pytest.raises(IntegrityError, match=r"model\.layers\.1\.mlp\.experts"):
        logits(model, prompt())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"number": 15}, "not"),
        ({"nbytes": 4096}, "not"),
        ({"starts": [64]}, "cannot begin"),
        ({"starts": [3]}, "cannot begin"),
        ({"starts": [-64]}, "cannot begin"),
        ({"starts": [1 << 40]}, "cannot begin"),
        ({"starts": [0, 64]}, "has 2 places"),
        ({"starts": 7}, "not a valid packed model"),
        ({"shape": [16, 1, 1 << 40]}, "cannot begin"),
        ({"tensor": "others"}, "lacks"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    packed: Path, stream: Make, change: dict[str, Any], said: str
) -> None:
    """Nothing is read from places that the tensor does not have."""
    path = file_in(packed)
    header = read_header(path)
    index = json.loads(header.metadata[KEY])
    module = "model.layers.2.mlp.experts"
    entry = index["experts"][module]
    name = f"{module}.gate_up_proj"
    dtype, shape, starts = entry["weights"][name]
    for key, value in change.items():
        if key in ("number", "nbytes"):
            entry[key] = value
        elif key == "tensor":
            index["experts"][value] = index["experts"].pop(module)
        else:
            places = value if key == "starts" else starts
            entry["weights"][name] = [dtype, value if key == "shape" else shape, places]
    # The last weight of an expert, where more would be another expert's.
    if change.get("starts") == [64]:
        entry["weights"][f"{module}.down_proj"][2] = [entry["nbytes"] - 64]
    load, save = (getattr(pytest.importorskip("safetensors.torch"), n) for n in _NAMES)
    metadata = {**header.metadata, KEY: json.dumps({**index, "sealed": False})}
    metadata.pop(SEAL)
    save({n: t.clone() for n, t in load(path).items()}, path, metadata)
    with pytest.raises(IntegrityError, match=said):
        stream(packed)


_NAMES = ("load_file", "save_file")


# What is written


def test_files_of_before_are_read(tmp_path: Path, stream: Make) -> None:
    """As `keep_fused` writes them: the index has no experts, and transformers loads them."""
    saved(many_experts, tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "fused", keep_fused=True)
    with closing(SafetensorsSet(tmp_path / "fused")) as opened:
        index = packed_format.parse(opened)
    assert index is not None
    assert not index.experts
    assert json.loads(read_header(file_in(tmp_path / "fused")).metadata[KEY])["version"] == 1
    ids = prompt(batch=1, length=3)
    model = stream(tmp_path / "fused", resident_bytes=least(stream, tmp_path / "fused"))
    assert tokens(model, ids, 40).equal(tokens(loaded_aligned(tmp_path / "fused"), ids, 40))


@pytest.mark.parametrize("piece", [1, 100_000, 1 << 30])
def test_an_expert_is_widened_at_a_time(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's were all widened and quantised at once. The file has the same bytes anyhow."""
    saved(many_experts, tmp_path / "model", torch.bfloat16)
    pack(tmp_path / "model", tmp_path / "whole", quant_bits=4)
    sizes = []
    quantise = packing.quantise

    def noting(tensor: torch.Tensor, *rest: Any) -> Any:
        sizes.append(tensor.numel())
        return quantise(tensor, *rest)

    monkeypatch.setattr(packing, "quantise", noting)
    monkeypatch.setattr(packing, "_PIECE_BYTES", piece)
    pack(tmp_path / "model", tmp_path / "packed", quant_bits=4)
    assert max(sizes) == 2 * 96 * 64  # gate and up of one expert
    assert file_in(tmp_path / "packed").read_bytes() == file_in(tmp_path / "whole").read_bytes()


def test_the_layout_is_shown(packed: Path) -> None:
    path = str(file_in(packed))
    shown = " ".join(CliRunner().invoke(app, ["inspect", path]).stdout.split())
    assert (
        "4 layers of 16 experts: 72 KiB each, side by side in pages of 4 KiB, "
        "one read and one checksum an expert" in shown
    )
    told = json.loads(CliRunner().invoke(app, ["inspect", "--json", path]).stdout)
    assert told["experts"][1] == {
        "module": "model.layers.1.mlp.experts",
        "number": 16,
        "nbytes": 18 * PAGE,
    }


def test_several_threads_share_packed_experts(packed: Path, stream: Make) -> None:
    model = stream(packed, resident_bytes=1_500_000)
    whole = loaded_aligned(packed.parent / "model")
    wrong: list[int] = []

    def work(seed: int) -> None:
        for token in range(3 + seed, 40, 3):
            one = torch.tensor([[token]])
            if not logits(model, one).equal(logits(whole, one)):
                wrong.append(token)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
