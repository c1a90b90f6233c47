"""PEFT's adapters over a streamed base of transformers: as over one in memory, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inference._models import gpt2, llama, loaded, mixtral, prompt, saved, transformers

from nvmeio.inference import chunked_cross_entropy, pack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft", reason="peft is not installed")

Make = Callable[..., Any]


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    layers = ["c_attn", "c_fc"] if model.config.model_type == "gpt2" else ["q_proj", "v_proj"]
    options.setdefault("target_modules", layers)
    found = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.1, **options))
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:  # those that PEFT begins with zeros teach nothing
                parameter.normal_(std=0.05)
    return found


def trained(model: Any, steps: int = 3) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
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


def assert_same(one: Any, other: Any) -> None:
    assert all(a.equal(b) for a, b in zip(one[0], other[0], strict=True))
    assert one[1].keys() == other[1].keys()
    assert all(one[1][name].equal(other[1][name]) for name in one[1])


def assert_close(one: Any, other: Any) -> None:
    assert torch.allclose(torch.stack(one[0]), torch.stack(other[0]), rtol=1e-4)
    assert all(torch.allclose(one[1][name], other[1][name], atol=2e-3) for name in one[1])


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("make", [llama, gpt2, mixtral])
def test_losses_and_adapters_are_those_of_the_model_in_memory(
    make: Any, checkpointing: bool | None, tmp_path: Path, stream: Make
) -> None:
    """The base is four times the window, and its adapters lie in memory."""
    saved(lambda: make(layers=5), tmp_path)
    whole = loaded(tmp_path)
    total = sum(p.nbytes for p in whole.parameters())
    model = stream(tmp_path, resident_bytes=total * 2 // 3, window=1, trainable=True)
    assert model.weight_stream.stats.streamed_bytes > total // 4
    results = []
    for each in (model, whole):
        both = adapted(each)
        if checkpointing is not None:
            both.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            both.enable_input_require_grads()
        results.append(trained(both))
        assert all(not p.is_meta for p in both.parameters() if p.requires_grad)
    assert_same(*results)


@pytest.mark.parametrize("compute", ["widened", "auto", "packed"])
@pytest.mark.parametrize("quant_bits", [4, 8])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_base_of_few_bits_trains_as_one_of_the_weights_they_stand_for(
    quant_bits: int, checkpointing: bool, compute: str, tmp_path: Path, stream: Make
) -> None:
    saved(lambda: llama(layers=4), tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "packed", quant_bits=quant_bits, quant_group_size=32)
    model = stream(
        tmp_path / "packed", trainable=True, resident_bytes=250_000, window=1, compute=compute
    )
    stats = model.weight_stream.stats
    assert (stats.work_bytes > 0) == (compute == "widened")
    assert (stats.streamed_bytes > 0) == (compute == "widened")  # packed, all of it stays
    whole = loaded(tmp_path / "model").requires_grad_(False)
    before = whole.model.layers[0].mlp.up_proj.weight.clone()

    def take(theirs: Any, mine: Any) -> Any:
        def hook(*_: Any) -> None:
            for name, parameter in mine.named_parameters():
                if not parameter.is_meta:
                    theirs.get_parameter(name).copy_(parameter)

        return mine.register_forward_pre_hook(hook)

    hooks = [
        take(theirs, mine)
        for theirs, mine in zip(whole.modules(), model.modules(), strict=True)
        if isinstance(mine, (torch.nn.Linear, torch.nn.Embedding)) or "Norm" in type(mine).__name__
    ]
    with torch.no_grad():
        model(input_ids=prompt())
    for hook in hooks:
        hook.remove()
    assert not before.equal(whole.model.layers[0].mlp.up_proj.weight)
    results = []
    for each in (model, whole):
        both = adapted(each)
        if checkpointing:
            both.gradient_checkpointing_enable({"use_reentrant": False})
        results.append(trained(both))
    if compute == "widened":
        assert_same(*results)
    assert_close(*results)


def test_adapters_are_saved_and_loaded_without_the_base(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path / "model")
    model = adapted(stream(tmp_path / "model", resident_bytes=200_000, trainable=True))
    model.eval()
    ids = prompt()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    model.save_pretrained(tmp_path / "adapters")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").stat().st_size < 100_000
    assert all("lora_" in name for name in model.state_dict())
    again = stream(tmp_path / "model", resident_bytes=200_000, trainable=True)
    found = peft.PeftModel.from_pretrained(again, tmp_path / "adapters")
    with torch.no_grad():
        assert found(input_ids=ids).logits.equal(wanted)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("budget", [200_000, 2_000_000])
def test_adapters_cannot_be_merged(budget: int, safe: bool, tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    model = adapted(stream(tmp_path, resident_bytes=budget, trainable=True))
    model.eval()
    with torch.no_grad():
        wanted = model(input_ids=prompt()).logits
        with pytest.raises(RuntimeError, match="cannot be merged"):
            model.merge_adapter(safe_merge=safe)
        assert model(input_ids=prompt()).logits.equal(wanted)


def test_tokens_are_generated_between_steps(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    found = []
    for base in (stream(tmp_path, resident_bytes=200_000, trainable=True), loaded(tmp_path)):
        model = adapted(base)
        trained(model, steps=1)
        model.eval()
        found.append(model.generate(input_ids=prompt(), max_new_tokens=4, do_sample=False))
        trained(model, steps=1)
    assert found[0].equal(found[1])


def test_a_loss_in_chunks_reads_the_head_no_more_often(tmp_path: Path, stream: Make) -> None:
    saved(llama, tmp_path)
    whole, model = loaded(tmp_path), stream(tmp_path, resident_bytes=200_000, trainable=True)
    found = []
    for base in (whole, model):
        both = adapted(base)
        both.eval()
        hidden = base.model(prompt()).last_hidden_state
        before = 0 if base is whole else model.weight_stream.stats.units_read
        loss = chunked_cross_entropy(hidden[:, :-1], base.lm_head, prompt()[:, 1:], 5)
        loss.backward()
        parameters = [p for p in both.parameters() if p.requires_grad]
        found.append([loss, *(p.grad for p in parameters)])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    # The head once, if it is not there yet, and the layers for backward and the next step.
    assert model.weight_stream.stats.units_read - before <= 1 + 2 * len(model.weight_stream.units)


def test_transformers_trainer_trains_as_in_memory(tmp_path: Path, stream: Make) -> None:
    pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")
    saved(llama, tmp_path / "model")
    rows = [{"input_ids": ids, "labels": ids} for ids in prompt(batch=8)]
    found = []
    for name in ("memory", "drive"):
        if name == "drive":
            base = stream(tmp_path / "model", resident_bytes=200_000, trainable=True)
        else:
            base = loaded(tmp_path / "model")
        model = adapted(base)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / name), max_steps=4, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, gradient_checkpointing=True, learning_rate=0.01,
            save_steps=2, logging_steps=1, report_to="none", use_cpu=True, seed=5,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((losses, peft.get_peft_model_state_dict(model)))
        again = adapted(base_again(name, tmp_path / "model", stream))
        resumed = transformers.Trainer(model=again, args=arguments, train_dataset=rows)
        resumed.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-2"))
        assert_state(peft.get_peft_model_state_dict(again), found[-1][1])
    assert found[0][0] == found[1][0]
    assert_state(found[0][1], found[1][1])


def base_again(name: str, path: Path, stream: Make) -> Any:
    if name == "memory":
        return loaded(path)
    return stream(path, resident_bytes=200_000, trainable=True)


def assert_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


def test_lightning_trains_as_in_memory_and_goes_on(tmp_path: Path, stream: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning", reason="Lightning is not installed")

    class Tuned(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def training_step(self, ids: torch.Tensor, _: int) -> Any:
            return self.model(input_ids=ids, labels=ids).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def fit(base: Any, steps: int, checkpoint: Path | None) -> tuple[Any, dict[str, torch.Tensor]]:
        module = Tuned(adapted(base))
        torch.manual_seed(5)
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(list(prompt(batch=4)), batch_size=1),
                    ckpt_path=checkpoint)  # fmt: skip
        return trainer, peft.get_peft_model_state_dict(module.model)

    saved(llama, tmp_path / "model")
    _, wanted = fit(loaded(tmp_path / "model"), 3, None)
    trainer, found = fit(base_again("drive", tmp_path / "model", stream), 3, None)
    assert_state(found, wanted)
    trainer.save_checkpoint(tmp_path / "at-3.ckpt")
    assert (tmp_path / "at-3.ckpt").stat().st_size < 200_000
    _, unchanged = fit(base_again("drive", tmp_path / "model", stream), 3, tmp_path / "at-3.ckpt")
    assert_state(unchanged, wanted)
