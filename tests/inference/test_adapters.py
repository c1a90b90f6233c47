"""Adapters that look at the base's weights, or train copies of its modules, over a streamed base.

What PEFT makes of it: the losses, adapters and logits of the base in memory, bit for bit, or a
sentence that says what to do.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._models import gpt2, llama, loaded, mixtral, prompt, saved
from support import spin_until_collected

from nvmeio.errors import ClosedError
from nvmeio.inference.weight_stream import WeightStream

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft", reason="peft is not installed")

Make = Callable[..., Any]
MAKERS = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral}
LINEAR = {
    "llama": ["q_proj", "v_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc", "c_proj"],
    "mixtral": ["q_proj", "v_proj", "o_proj"],
}
EMBEDDING = {"llama": "embed_tokens", "gpt2": "wte", "mixtral": "embed_tokens"}
NORMS = {
    "llama": ["input_layernorm", "norm"],
    "gpt2": ["ln_1", "ln_f"],
    "mixtral": ["input_layernorm", "norm"],
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(family: str, **options: Any) -> Any:
    options.setdefault("target_modules", LINEAR[family])
    return peft.LoraConfig(r=2, **options)


KINDS: dict[str, Callable[[str], Any]] = {
    "dora": lambda f: lora(f, use_dora=True),
    "dora of embedding and head": lambda f: lora(
        f, use_dora=True, target_modules=[EMBEDDING[f], "lm_head"]
    ),
    "mica": lambda f: lora(f, init_lora_weights="mica"),
    "a trained head": lambda f: lora(f, modules_to_save=["lm_head"]),
    "a trained embedding": lambda f: lora(f, modules_to_save=[EMBEDDING[f]]),
    "trained norms": lambda f: lora(f, modules_to_save=NORMS[f]),
    "trained layers": lambda f: lora(
        f,
        target_modules=LINEAR[f][:1],
        modules_to_save=["mlp"],
        layers_to_transform=[0],
        layers_pattern="h" if f == "gpt2" else "layers",
    ),
    "ln_tuning": lambda f: peft.LNTuningConfig(target_modules=NORMS[f]),
    "tokens": lambda f: lora(f, trainable_token_indices=[3, 5, 9]),
    "tokens alone": lambda f: peft.TrainableTokensConfig(
        token_indices=[3, 5, 9], target_modules=[EMBEDDING[f]]
    ),
    "parameters": lambda f: peft.LoraConfig(
        r=2,
        target_modules=[],
        target_parameters=EXPERTS if f == "mixtral" else [LINEAR[f][0] + ".weight"],
    ),
    "sampled prompt": lambda f: peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, prompt_tuning_init="SAMPLE_VOCAB"
    ),
    "deft": lambda f: peft.DeftConfig(target_modules=LINEAR[f]),
    "dora with dropout": lambda f: lora(f, use_dora=True, lora_dropout=0.1),
    "delora": lambda f: peft.DeloraConfig(r=2, target_modules=LINEAR[f]),
    "osf": lambda f: peft.OSFConfig(target_modules=LINEAR[f]),
    "shira": lambda f: peft.ShiraConfig(r=2, target_modules=LINEAR[f]),
    "bat": lambda f: peft.MissConfig(r=4, init_weights="bat", target_modules=["q_proj"]),
    "hira": lambda f: peft.HiraConfig(r=2, target_modules=LINEAR[f]),
}
ELSEWHERE = {
    "gpt2": [
        "dora",
        "dora of embedding and head",
        "a trained embedding",
        "ln_tuning",
        "parameters",
    ],
    "mixtral": ["dora", "trained layers", "parameters"],
}
CASES = [
    *(("llama", kind) for kind in KINDS),
    *((family, kind) for family, kinds in ELSEWHERE.items() for kind in kinds),
]


def adapted(model: Any, family: str, kind: str) -> Any:
    torch.manual_seed(3)
    config = KINDS[kind](family)
    found = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if parameter.requires_grad and ("lora_" in name or not parameter.any()):
                parameter.add_(torch.randn(parameter.shape) * 0.05)  # zeros teach nothing
    return found


def trained(model: Any, steps: int = 3) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model.train()
    losses = []
    for step in range(steps):
        torch.manual_seed(step)  # of dropout
        ids = prompt(seed=step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, peft.get_peft_model_state_dict(model)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    model.eval()
    found: torch.Tensor = model(input_ids=prompt(seed=9)).logits
    return found


@pytest.fixture
def base(tmp_path: Path, stream: Make) -> Make:
    """A model in memory, and a way to stream it that has room for some of its layers."""

    def make(family: str = "llama", share: float = 0.6) -> tuple[Any, Callable[..., Any]]:
        path = saved(lambda: MAKERS[family](layers=3), tmp_path / "base")
        whole = loaded(path).requires_grad_(False)
        nbytes = int(sum(p.nbytes for p in whole.parameters()) * share)

        def streamed(**options: Any) -> Any:
            options = {"trainable": True, "resident_bytes": nbytes, "window": 1, **options}
            return stream(path, **options)

        return whole, streamed

    return make


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_adapters_that_look_at_the_base_are_those_of_the_base_in_memory(
    family: str, kind: str, base: Make, tmp_path: Path
) -> None:
    """Their norms, copies and rows were those of tensors without memory: an error of torch's, as
    a rule, or NaN (DEFT)."""
    whole, streamed = base(family)
    wanted = trained(memory := adapted(whole, family, kind))
    model = streamed()
    assert model.weight_stream.stats.streamed_bytes > 0
    found = trained(both := adapted(model, family, kind))
    assert all(a.equal(b) for a, b in zip(found[0], wanted[0], strict=True))
    # PEFT saves the base's embedding with an adapter of it; here it is in the base's files.
    assert all("base_layer" in name or name in found[1] for name in wanted[1])
    assert all(value.equal(wanted[1][name]) for name, value in found[1].items())
    expected = logits(memory)
    assert logits(both).equal(expected)
    both.save_pretrained(tmp_path / "adapters")
    for again in (streamed(), streamed(trainable=False), loaded(tmp_path / "base")):
        assert logits(peft.PeftModel.from_pretrained(again, tmp_path / "adapters")).equal(expected)


def test_an_adapter_over_a_stream_for_inference_is_used(base: Make, tmp_path: Path) -> None:
    """It was made on the meta device, where its weights were lost, and other tokens came."""
    whole, streamed = base()
    memory = peft.get_peft_model(whole, lora("llama", init_lora_weights=False))
    memory.save_pretrained(tmp_path / "adapters")
    model = peft.PeftModel.from_pretrained(streamed(trainable=False), tmp_path / "adapters")
    assert all(p.device.type == "cpu" for name, p in model.named_parameters() if "lora" in name)
    assert logits(model).equal(logits(memory))


@pytest.mark.parametrize("kind", ["pissa", "olora", "kasa"])
def test_an_adapter_that_begins_by_changing_the_base_is_refused(kind: str, base: Make) -> None:
    _, streamed = base()
    model = streamed()
    before = logits(model)
    options = {"kasa_config": peft.KasaConfig()} if kind == "kasa" else {"init_lora_weights": kind}
    with pytest.raises(RuntimeError, match="begun in a model that is loaded: save that base"):
        peft.get_peft_model(model, lora("llama", **options))
    assert logits(streamed()).equal(before)


def test_one_that_was_begun_in_memory_goes_on_over_its_base(
    base: Make, tmp_path: Path, stream: Make
) -> None:
    """What the sentence of the test before says, and the documentation."""
    whole, _ = base()
    first = peft.get_peft_model(whole, lora("llama", init_lora_weights="pissa"))
    first.peft_config["default"].init_lora_weights = True  # begun already
    first.save_pretrained(tmp_path / "adapters")
    first.unload().save_pretrained(tmp_path / "residual")
    found = []
    for model in (
        loaded(tmp_path / "residual").requires_grad_(False),
        stream(tmp_path / "residual", resident_bytes=250_000, window=1, trainable=True),
    ):
        again = peft.PeftModel.from_pretrained(model, tmp_path / "adapters", is_trainable=True)
        found.append(trained(again))
    assert all(a.equal(b) for a, b in zip(found[0][0], found[1][0], strict=True))


@pytest.mark.parametrize(
    ("kind", "share"), [("dora", 0.6), ("tokens alone", 0.6), ("shira", 0.6), ("hira", 3.0)]
)
def test_merging_says_what_to_do(kind: str, share: float, base: Make) -> None:
    _, streamed = base(share=share)
    model = adapted(streamed(), "llama", kind)
    wanted = logits(model)
    for safe in (False, True):
        with pytest.raises(RuntimeError, match="cannot be merged into it"):
            model.merge_adapter(safe_merge=safe)
    assert logits(model).equal(wanted)


def test_norms_that_are_copies_are_merged(base: Make) -> None:
    whole, streamed = base()
    found = []
    for model in (whole, streamed()):
        both = adapted(model, "llama", "ln_tuning")
        trained(both)
        found.append(logits(both.merge_and_unload()))
    assert found[0].equal(found[1])


CHANGES: list[Callable[[torch.Tensor], Any]] = [
    lambda weight: weight.mul_(2),
    lambda weight: weight.copy_(torch.zeros(weight.shape)),
    lambda weight: torch.nn.init.normal_(weight),
    lambda weight: weight.__setitem__(0, 1.0),
    lambda weight: weight.pow_(2),
    lambda weight: weight.masked_fill_(weight > 0, 0),
    lambda weight: weight.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    lambda weight: weight.__ifloordiv__(2),
    lambda weight: weight.data.mul_(2),
    lambda weight: weight.data.T.zero_(),
    lambda weight: torch.add(weight, 1, out=weight.data),
]


@pytest.mark.parametrize("share", [0.6, 3.0])
def test_a_weight_cannot_be_changed_in_place(share: float, base: Make) -> None:
    """One that stays in memory was changed, until it was read again, and one on disk was not."""
    whole, streamed = base(share=share)
    model = streamed()
    wanted = logits(model)
    for weight in (model.lm_head.weight, model.model.layers[0].mlp.up_proj.weight):
        for change in CHANGES:
            with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be changed"):
                change(weight)
    assert logits(model).equal(wanted)
    assert logits(whole).equal(wanted)


PAST_ITS_METHODS: list[Callable[[torch.Tensor], Any]] = [
    lambda weight: torch.add(weight, 1, out=weight),
    lambda weight: torch.nn.init.eye_(weight),
    lambda weight: weight.view(-1).zero_(),
    lambda weight: weight.detach().mul_(2),
]


@pytest.mark.parametrize("change", PAST_ITS_METHODS, ids=["out", "init", "view", "detach"])
@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.mlp.up_proj"])
def test_a_change_past_a_weights_methods_is_told_of(
    change: Callable[[torch.Tensor], Any], name: str, base: Make
) -> None:
    """It was computed with until the layer was read again, and lost then."""
    _, streamed = base(share=3.0)
    model = streamed()
    logits(model)
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        change(model.get_submodule(name).weight)
    with pytest.raises(RuntimeError, match="cannot be changed"):
        logits(model)


def test_what_is_looked_at_is_read_and_goes(base: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of one matrix is in memory at a time, and none when the adapters are there."""
    alive: list[Any] = []
    most = 0

    def counted(*args: Any, real: Any = WeightStream.weight) -> Any:
        nonlocal most
        weight = real(*args)
        alive.append(weakref.ref(weight.untyped_storage()))
        most = max(most, sum(ref() is not None for ref in alive))
        return weight

    monkeypatch.setattr(WeightStream, "weight", counted)
    _, streamed = base()
    model = streamed()
    before = model.weight_stream.stats.bytes_read
    both = adapted(model, "llama", "dora")
    assert len(alive) == 3 * len(LINEAR["llama"])
    assert most <= 2
    spin_until_collected(lambda: all(ref() is None for ref in alive))
    assert model.weight_stream.stats.bytes_read > before
    alive.clear()
    trained(both, steps=1)
    assert not alive  # layers have theirs while they are computed


def test_what_is_computed_of_a_weight_is_right(base: Make) -> None:
    whole, streamed = base(share=0.4)
    for options in ({}, {"trainable": False}):
        model = streamed(**options)
        for name in ("lm_head", "model.layers.1.mlp.up_proj"):
            module, known = model.get_submodule(name), whole.get_submodule(name)
            weight = module.weight
            assert torch.linalg.norm(weight, dim=1).equal(torch.linalg.norm(known.weight, dim=1))
            assert weight[3].equal(known.weight[3])
            assert weight.tolist() == known.weight.tolist()
            assert weight.detach().T.contiguous().equal(known.weight.T.contiguous())
            assert torch.zeros_like(weight).equal(torch.zeros_like(known.weight))
            assert weight.shape == known.weight.shape
            assert weight.device == known.weight.device
        model.weight_stream.close()
        with pytest.raises(ClosedError, match="reopen"):
            model.lm_head.weight.sum()
        model.weight_stream.reopen()
        assert model.lm_head.weight.sum().equal(whole.lm_head.weight.sum())


def test_views_of_weights_are_computed_with_beside_other_weights(base: Make) -> None:
    """A view had been read; the other had not, and torch took what lay in memory for it."""
    whole, streamed = base(share=0.4)
    found: list[list[Any]] = []
    for model in (whole, streamed()):
        one, two = (model.model.layers[n].self_attn.o_proj.weight for n in (0, 1))
        norm = model.model.norm.weight
        with torch.no_grad():
            found.append(
                [
                    one.T @ two,
                    two @ one.T,
                    torch.nn.functional.linear(one.T, two),
                    torch.stack([one.T, two]),
                    one.view(-1) * two.view(-1),
                    torch.where(one.T > 0, one.T, two),
                    norm @ two,
                ]
            )
    for wanted, got in zip(*found, strict=True):
        assert got.equal(wanted)


def test_backward_reads_again_what_was_looked_at(base: Make) -> None:
    whole, streamed = base(share=0.4)
    found = []
    for model in (whole, streamed()):
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        torch.nn.functional.linear(x, model.lm_head.weight).square().sum().backward()
        found.append(x.grad)
    assert found[0].equal(found[1])


def test_a_module_can_be_copied_and_the_model_cannot(base: Make) -> None:
    """A copy had the stream's wrapper around its call, and computed with the original's weights."""
    whole, streamed = base()
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2))
    for options in ({}, {"trainable": False}):
        model = streamed(**options)
        head, layer = copy.deepcopy(model.lm_head), copy.deepcopy(model.model.layers[1].mlp)
        for made, known in ((head, whole.lm_head), (layer, whole.model.layers[1].mlp)):
            assert {type(p) for p in made.parameters()} == {torch.nn.Parameter}
            assert made.state_dict().keys() == known.state_dict().keys()
            with torch.no_grad():
                assert made(x).equal(known(x))
                for parameter in made.parameters():
                    parameter.zero_()
                assert not made(x).any()
            made.load_state_dict(known.state_dict())
            made.double().to("cpu")
        with pytest.raises(TypeError, match="call stream_model again"):
            copy.deepcopy(model)
        assert logits(model).equal(logits(whole))
