"""Packed models: the same tokens from one read a layer, and quantised ones from fewer bytes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inference._models import (
    MODELS,
    llama,
    loaded,
    logits,
    prompt,
    saved,
    tokens,
    transformers,
    weights_file,
)
from typer.testing import CliRunner

from nvmeio._formats.packed_index import KEY, SEAL, SUFFIXES
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio.checkpoint.safetensors import read_header
from nvmeio.cli import app
from nvmeio.errors import IntegrityError, TransferError
from nvmeio.inference import pack
from nvmeio.inference._plan import packed_format
from nvmeio.inference._plan.quantization import (
    Quantised,
    can_quantise,
    check_setting,
    dequantise,
    quantise,
)
from nvmeio.integrations.transformers import from_pretrained

Make = Callable[..., Any]


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_model_computes_the_same(name: str, tmp_path: Path, stream: Make) -> None:
    saved(MODELS[name], tmp_path / "m")
    report = pack(tmp_path / "m", tmp_path / "p")
    assert report.quantised == 0
    assert report.bytes_written == weights_file(tmp_path / "p").stat().st_size
    whole = loaded(tmp_path / "m")
    model = stream(tmp_path / "p", resident_bytes=1_000_000)
    assert logits(model, prompt()).equal(logits(whole, prompt()))
    assert tokens(model, prompt()).equal(tokens(whole, prompt()))
    for unit in model.weight_stream.units:
        if unit.experts is None:
            assert len(unit.layout.reads) == 1, unit
        assert all(read.start % 4096 == 0 == read.at % 4096 for read in unit.layout.reads)


def test_named_chat_templates_are_copied(tmp_path: Path) -> None:
    """They lie in a directory of their own, which was left out: what asked for one by its name had
    that name as its template."""
    saved(llama, tmp_path / "m")
    templates = tmp_path / "m" / "additional_chat_templates"
    templates.mkdir()
    (templates / "rag.jinja").write_text("{{ messages }}")
    (tmp_path / "m" / "original").mkdir()
    (tmp_path / "m" / "original" / "consolidated.00.pth").write_bytes(b"other weights")
    pack(tmp_path / "m", tmp_path / "p")
    copied = tmp_path / "p" / "additional_chat_templates" / "rag.jinja"
    assert copied.read_text() == "{{ messages }}"
    assert not (tmp_path / "p" / "original").exists()


def test_transformers_reads_what_is_not_quantised(tmp_path: Path) -> None:
    saved(llama, tmp_path / "m")
    pack(tmp_path / "m", tmp_path / "p")
    assert logits(loaded(tmp_path / "p"), prompt()).equal(logits(loaded(tmp_path / "m"), prompt()))


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}], ids=["", "dtype"])
def test_transformers_refuses_what_is_quantised(
    options: dict[str, Any], tmp_path: Path, stream: Make
) -> None:
    """It began with random weights, for it leaves out tensors whose names it does not know."""
    saved(llama, tmp_path / "m")
    pack(tmp_path / "m", tmp_path / "p", quant_bits=4, quant_group_size=32)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "p", **options)
    with pytest.raises(ValueError, match=r"nvmeio pack quantised.* use nvmeio\.stream_model"):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path / "p", **options)
    # As older versions of nvmeio called it.
    weights_file(tmp_path / "p").rename(tmp_path / "p" / "model.safetensors")
    with pytest.raises(ValueError, match="nvmeio pack quantised"):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path / "p", **options)
    assert stream(tmp_path / "p").weight_stream.units


def test_another_dtype_halves_what_is_read(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path / "m")
    report = pack(tmp_path / "m", tmp_path / "p", dtype=torch.bfloat16)
    assert report.bytes_written < 0.6 * report.bytes_read
    model = stream(tmp_path / "p", resident_bytes=200_000)
    whole = loaded(tmp_path / "m", torch.bfloat16)
    assert model.dtype is torch.bfloat16
    assert logits(model, prompt()).equal(logits(whole, prompt()))
    assert model.weight_stream.stats.work_bytes == 0


@pytest.mark.parametrize("compute", ["widened", "auto", "packed"])
@pytest.mark.parametrize("budget", [600_000, 1 << 30])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_a_quantised_model_computes_what_its_weights_say(
    name: str, bits: int, budget: int, compute: str, tmp_path: Path, stream: Make
) -> None:
    """As the model with the same values loaded whole: bit for bit where they are widened."""
    saved(MODELS[name], tmp_path / "m")
    report = pack(tmp_path / "m", tmp_path / "p", quant_bits=bits, quant_group_size=32)
    assert report.quantised > 8
    whole = loaded(tmp_path / "m")
    setting = Quantised(bits, 32)
    with contextlib.closing(SafetensorsSet(tmp_path / "p")) as opened:
        index = packed_format.parse(opened)
    assert index is not None
    quantised = index.quantised
    with torch.no_grad():
        for parameter_name, parameter in whole.named_parameters():
            if parameter_name in quantised:
                back = torch.empty_like(parameter)
                dequantise(quantise(parameter, setting), setting, back)
                parameter.copy_(back)
    model = stream(tmp_path / "p", resident_bytes=budget, compute=compute)
    found, wanted = logits(model, prompt()), logits(whole, prompt())
    if compute == "widened":
        assert found.equal(wanted)
    assert torch.allclose(found, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))
    assert tokens(model, prompt()).equal(tokens(whole, prompt()))
    kept = 1024 if name == "mixtral" else 0  # its router is no linear layer
    assert (model.weight_stream.stats.work_bytes == kept) == (compute != "widened")


def test_what_four_bits_save(tmp_path: Path) -> None:
    saved(lambda: llama(width=256), tmp_path / "m", torch.bfloat16)
    sizes = [
        pack(tmp_path / "m", tmp_path / f"p{bits}", quant_bits=bits).bytes_written
        for bits in (4, 8)
    ]
    whole = weights_file(tmp_path / "m").stat().st_size
    # A scale and a minimum of 32 bits each for 64 elements: one bit an element.
    assert sizes[0] / whole == pytest.approx(5 / 16, rel=0.1)
    assert sizes[1] / whole == pytest.approx(9 / 16, rel=0.1)


@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([2, 16, 64]),
    rows=st.integers(1, 5),
    groups=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_no_element_is_further_than_half_a_step(
    bits: int, group: int, rows: int, groups: int, dtype: torch.dtype, seed: int
) -> None:
    setting = check_setting(bits, group)
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(rows, groups * group, generator=generator) * 10).to(dtype)
    assert can_quantise(tuple(tensor.shape), dtype, setting)
    steps, scale, low = quantise(tensor, setting)
    assert steps.nbytes == tensor.numel() * bits // 8
    back = torch.empty_like(tensor)
    dequantise((steps, scale, low), setting, back)
    error = (back.float() - tensor.float()).abs().view(rows, groups, group)
    rounding = tensor.float().abs().max() * torch.finfo(dtype).eps
    assert bool((error <= scale[:, :, None] * 0.501 + rounding).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_the_change_is_told_beside_the_spread_of_the_weights(bits: int, tmp_path: Path) -> None:
    saved(lambda: llama(width=256), tmp_path / "m")
    report = pack(tmp_path / "m", tmp_path / "p", quant_bits=bits)
    setting, largest, relative = Quantised(bits, 64), [], []
    for weight in loaded(tmp_path / "m").state_dict().values():
        if weight.dim() == 2:
            back = torch.empty_like(weight)
            dequantise(quantise(weight, setting), setting, back)
            largest.append(float((back - weight).abs().max()))
            relative.append(float((back - weight).double().square().mean().sqrt() / weight.std()))
    assert report.largest_error == max(largest)
    assert report.relative_error == pytest.approx(max(relative), rel=1e-3)

    arguments = ["pack", str(tmp_path / "m"), str(tmp_path / "c"), "--quant-bits", str(bits)]
    said = " ".join(CliRunner().invoke(app, arguments).stdout.split())
    assert f"rms error {report.relative_error:.1%} of their standard deviation" in said
    assert f"no element is off by more than {report.largest_error:.3g}" in said


def test_what_is_not_quantised_has_not_changed(tmp_path: Path) -> None:
    saved(llama, tmp_path / "m")
    report = pack(tmp_path / "m", tmp_path / "p", dtype=torch.bfloat16)
    assert (report.largest_error, report.relative_error) == (0.0, 0.0)


def test_a_group_of_equal_elements_is_exact() -> None:
    tensor = torch.full((3, 64), 0.7)
    back = torch.empty_like(tensor)
    setting = Quantised(4, 64)
    dequantise(quantise(tensor, setting), setting, back)
    assert back.equal(tensor)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_bits": 3}, "must be 4 or 8"),
        ({"quant_bits": 4, "quant_group_size": 7}, "even number"),
        (
            {"quant_bits": 4, "quant_group_size": 48},
            "quant_group_size=48: .* rows have [0-9, ]* elements, give one of .*32",
        ),
        (
            {"quant_bits": 4, "modules_to_not_convert": ["model", "lm_head"]},
            "quant_bits=4: no matrix of floating-point numbers is left to quantise",
        ),
    ],
)
def test_there_is_no_such_quantisation(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(llama, tmp_path / "m")
    with pytest.raises(ValueError, match=message):
        pack(tmp_path / "m", tmp_path / "p", **options)
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize(
    ("left", "names"),
    [
        (["lm_head"], {"lm_head"}),
        (["embed_tokens", "lm_head"], {"model.embed_tokens", "lm_head"}),
        (["model.layers.1.mlp", "o_proj"], None),
    ],
)
def test_modules_are_left_as_they_are(
    left: list[str], names: set[str] | None, tmp_path: Path, stream: Make
) -> None:
    """They compute with the very weights of the model; the others with few bits."""
    saved(lambda: llama(layers=2, vocab_size=8192), tmp_path / "m")
    options: dict[str, Any] = {"quant_bits": 4, "quant_group_size": 32}
    pack(tmp_path / "m", tmp_path / "p", modules_to_not_convert=left, **options)
    pack(tmp_path / "m", tmp_path / "all", **options)
    if names is None:
        names = {f"model.layers.1.mlp.{each}_proj" for each in ("gate", "up", "down")}
        names |= {f"model.layers.{n}.self_attn.o_proj" for n in range(2)}
    stored, everything = (
        read_header(weights_file(tmp_path / each)).tensors for each in ("p", "all")
    )
    plain = {name for name in stored if name in {f"{each}.weight" for each in names}}
    assert len(plain) == len(names)
    assert len([n for n in everything if SUFFIXES[0] in n]) == len(names) + len(
        [n for n in stored if SUFFIXES[0] in n]
    )
    whole = loaded(tmp_path / "m")
    setting = Quantised(4, 32)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if name + SUFFIXES[0] in stored:
                dequantise(quantise(parameter, setting), setting, parameter)
    model = stream(tmp_path / "p", compute="widened")
    assert logits(model, prompt()).equal(logits(whole, prompt()))


def test_a_group_size_that_no_matrix_has_is_refused(tmp_path: Path) -> None:
    """It wrote the model unquantised, and said nothing."""
    saved(llama, tmp_path / "m")
    arguments = ["pack", str(tmp_path / "m"), str(tmp_path / "p"), "--quant-bits", "4"]
    done = CliRunner().invoke(app, [*arguments, "--quant-group-size", "46"])
    assert done.exit_code == 2 and "the rows have 64, 128 elements, give one of" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_module_that_is_not_there_is_told(tmp_path: Path) -> None:
    saved(llama, tmp_path / "m")
    arguments = ["pack", str(tmp_path / "m"), str(tmp_path / "p"), "--quant-bits", "4"]
    for name in ("head", "layers.1", "model.norm"):
        done = CliRunner().invoke(app, [*arguments, "--modules-to-not-convert", name])
        if name == "head":
            assert done.exit_code == 2 and "no weights are in a module 'head'" in done.stderr
        else:
            assert done.exit_code == 0, done.output
            (tmp_path / "p").rename(tmp_path / f"without {name}")


def test_a_tied_head_is_left_by_either_of_its_names(tmp_path: Path) -> None:
    saved(lambda: llama(layers=2, vocab_size=8192, tie_word_embeddings=True), tmp_path / "m")
    for name in ("lm_head", "embed_tokens"):
        pack(tmp_path / "m", tmp_path / name, quant_bits=4, modules_to_not_convert=[name])
        stored = read_header(weights_file(tmp_path / name)).tensors
        assert "model.embed_tokens.weight" in stored
    with pytest.raises(ValueError, match="nothing is quantised anyway; give quant_bits=4"):
        pack(tmp_path / "m", tmp_path / "p", modules_to_not_convert=["lm_head"])
    # The names that there are were left to be found out, but for one of them.
    for near, meant in (
        ("embed_token", "embed_tokens"),
        ("model.embed_token", "model.embed_tokens"),
        ("q_pro", "q_proj"),
        ("layers.1.self_attn.q_porj", "layers.1.self_attn.q_proj"),
    ):
        with pytest.raises(ValueError, match=rf"{near!r} \(did you mean '[a-z.]*{meant}'\?\)"):
            pack(tmp_path / "m", tmp_path / "p", quant_bits=4, modules_to_not_convert=[near])
    with pytest.raises(TypeError, match=r"give a list, \['lm_head'\]"):
        pack(tmp_path / "m", tmp_path / "p", quant_bits=4, modules_to_not_convert="lm_head")


def test_pack_overwrites_nothing_and_refuses_packed_models(tmp_path: Path) -> None:
    saved(llama, tmp_path / "m")
    with pytest.raises(FileExistsError):
        pack(tmp_path / "m", tmp_path / "m")
    pack(tmp_path / "m", tmp_path / "p")
    with pytest.raises(ValueError, match="is packed already"):
        pack(tmp_path / "p", tmp_path / "again")


def test_an_interrupt_as_the_directory_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to be removed only from the next statement on."""
    source = saved(llama, tmp_path / "model")
    mkdir = os.mkdir

    def interrupted(path: Any, *arguments: Any, **options: Any) -> None:
        mkdir(path, *arguments, **options)
        if "packing" in os.fspath(path):
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["model"]


def test_nan_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    saved(llama, tmp_path / "m")
    model = loaded(tmp_path / "m")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight' cannot be quantised"):
        pack(tmp_path / "m", tmp_path / "p", quant_bits=4)
    assert os.listdir(tmp_path) == ["m"]


def described(**fields: Any) -> str:
    weight = {"bits": 8, "group_size": 64, "dtype": "F32", "shape": [64, 64], **fields}
    return json.dumps({"version": 1, "quantised": {"model.layers.0.mlp.up_proj.weight": weight}})


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[",
        '{"version": 2}',
        '{"version": 1, "quantised": 3}',
        described(shape=[]),
        described(shape=[64, 65]),
        described(shape=[-64, 64]),
        described(bits=3),
        described(group_size=0),
        described(dtype="F33"),
        "[" * 100_000,
    ],
)
def test_damaged_metadata_is_refused(text: str, tmp_path: Path, stream: Make) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    saved(llama, tmp_path / "m")
    pack(tmp_path / "m", tmp_path / "p", quant_bits=8)
    file = weights_file(tmp_path / "p")
    state = {name: tensor.clone() for name, tensor in safetensors.load_file(file).items()}
    safetensors.save_file(state, file, {"format": "pt", KEY: text})
    with pytest.raises(IntegrityError, match="not a valid packed model"):
        stream(tmp_path / "p")


@pytest.mark.parametrize("layout", [None, "rows of 16"])
def test_the_index_says_how_weights_lie(layout: str | None, tmp_path: Path, stream: Make) -> None:
    """Files of before say nothing and are read; another layout is refused."""
    safetensors = pytest.importorskip("safetensors.torch")
    saved(llama, tmp_path / "m")
    pack(tmp_path / "m", tmp_path / "p", quant_bits=8)
    wanted = logits(stream(tmp_path / "p"), prompt())
    file = weights_file(tmp_path / "p")
    metadata = dict(read_header(file).metadata)
    index = json.loads(metadata[KEY])
    assert index.pop("layout") == "halves of groups"
    index |= {"sealed": False} | ({} if layout is None else {"layout": layout})
    metadata.pop(SEAL)
    state = {name: tensor.clone() for name, tensor in safetensors.load_file(file).items()}
    safetensors.save_file(state, file, metadata | {KEY: json.dumps(index)})
    if layout is None:
        assert logits(stream(tmp_path / "p"), prompt()).equal(wanted)
    else:
        with pytest.raises(IntegrityError, match="its weights lie as 'rows of 16'"):
            stream(tmp_path / "p")


def test_a_missing_part_of_a_quantised_weight_is_refused(tmp_path: Path, stream: Make) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    saved(llama, tmp_path / "m")
    pack(tmp_path / "m", tmp_path / "p", quant_bits=8)
    file = weights_file(tmp_path / "p")
    metadata = read_header(file).metadata
    state = {name: tensor.clone() for name, tensor in safetensors.load_file(file).items()}
    state.pop("model.layers.2.mlp.up_proj.weight.nvmeio_scales")
    safetensors.save_file(state, file, metadata)
    with pytest.raises(IntegrityError, match=r"lacks 'model\.layers\.2\.mlp\.up_proj"):
        stream(tmp_path / "p")


# The command


def test_the_command_packs(tmp_path: Path) -> None:
    saved(llama, tmp_path / "m")
    done = CliRunner().invoke(
        app, ["pack", str(tmp_path / "m"), str(tmp_path / "p"), "--quant-bits", "4"]
    )
    assert done.exit_code == 0, done.output
    assert "weights quantised" in done.stdout
    assert json.loads((tmp_path / "p" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--quant-bits", "5"], 2), (["--dtype", "int3"], 2)],
)
def test_the_command_refuses(arguments: list[str], status: int, tmp_path: Path) -> None:
    saved(llama, tmp_path / "m")
    done = CliRunner().invoke(app, ["pack", str(tmp_path / "m"), str(tmp_path / "p"), *arguments])
    assert done.exit_code == status


def test_the_command_tells_a_directory_without_a_model(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["pack", str(tmp_path), str(tmp_path / "p")])
    assert done.exit_code == 2
    assert "config.json" in done.stderr
    assert issubclass(TransferError, OSError)
