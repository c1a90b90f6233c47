"""transformers through nvmeio: a real Trainer and real models, built from a config."""

from __future__ import annotations

import copy
import errno
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PATIENCE_S, needs_protection, run_python, run_ranks, spin_until

import nvmeio
from nvmeio.checkpoint._snapshot import protected

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the packages it imports
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")
    from nvmeio.integrations import transformers as ours
    from nvmeio.integrations.transformers import (
        NvmeTrainer,
        NvmeTrainerMixin,
        from_pretrained,
        save_pretrained,
    )

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

pytestmark = pytest.mark.filterwarnings("default")


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
        )
    )


def gpt2() -> Any:
    """Its head is tied to its embedding."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=128, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config).bfloat16()


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(
        transformers.BertConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
        )
    )


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@pytest.fixture
def counting() -> Iterator[nvmeio.AioHandle]:
    """A handle whose counters tell whether bytes went through it."""
    with nvmeio.AioHandle(engine="threads") as handle:
        yield handle


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].equal(tensor), name


def weights_of(model: Any) -> int:
    seen = {p.data_ptr(): p.nbytes for p in model.parameters()}
    return sum(seen.values())


# Models


@pytest.mark.parametrize("shards", [None, "100KB"])
def test_models_are_saved_for_transformers(
    model: Any, tmp_path: Path, counting: nvmeio.AioHandle, shards: str | None
) -> None:
    options = {"max_shard_size": shards} if shards else {}
    save_pretrained(model, tmp_path / "ours", handle=counting, **options)
    assert counting.stats.bytes_written >= weights_of(model)
    model.save_pretrained(tmp_path / "stock", **options)
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "stock"))
    for name in os.listdir(tmp_path / "ours"):
        if name.endswith(".json"):
            texts = [(tmp_path / side / name).read_text() for side in ("ours", "stock")]
            assert json.loads(texts[0]) == json.loads(texts[1])
    assert (shards is not None) == any("-of-" in name for name in os.listdir(tmp_path / "ours"))
    assert_same(type(model).from_pretrained(tmp_path / "ours"), model)


@pytest.mark.parametrize("shards", [None, "100KB"])
def test_models_that_transformers_saved_are_loaded(
    model: Any, tmp_path: Path, counting: nvmeio.AioHandle, shards: str | None
) -> None:
    model.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    loaded = from_pretrained(type(model), tmp_path, handle=counting)
    assert counting.stats.bytes_read >= weights_of(model)
    stock = type(model).from_pretrained(tmp_path)
    assert_same(loaded, model)
    assert loaded.config.to_dict() == stock.config.to_dict()
    assert loaded.name_or_path == stock.name_or_path
    assert not loaded.training
    if loaded.can_generate():
        assert loaded.generation_config.to_dict() == stock.generation_config.to_dict()


def test_tied_weights_are_tied_again(tmp_path: Path) -> None:
    save_pretrained(gpt2(), tmp_path)
    loaded = from_pretrained(transformers.GPT2LMHeadModel, tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_auto_classes_find_the_model(tmp_path: Path) -> None:
    save_pretrained(llama(), tmp_path)
    assert_same(from_pretrained(transformers.AutoModelForCausalLM, tmp_path), llama())
    base = from_pretrained(transformers.AutoModel, tmp_path)
    assert_same(base, transformers.AutoModel.from_pretrained(tmp_path))


def test_the_class_that_was_saved_is_loaded(tmp_path: Path) -> None:
    """An automatic class has two for Funnel: the first would have a decoder of random weights."""
    config = transformers.FunnelConfig(
        vocab_size=64, d_model=32, n_head=4, d_head=8, d_inner=48, block_sizes=[1, 1]
    )
    model = transformers.FunnelBaseModel(config)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(transformers.AutoModel, tmp_path)
    assert type(loaded) is transformers.FunnelBaseModel
    assert_same(loaded, model)


def test_the_part_for_text_of_a_model_of_several(tmp_path: Path) -> None:
    both = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = {"vocab_size": 64, "intermediate_size_mlp": 64, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_key_value_heads": 2, "num_local_experts": 2, "pad_token_id": 0, **both}
    vision = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14, **both}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    transformers.Llama4ForConditionalGeneration(config).save_pretrained(tmp_path)
    loaded = from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    assert type(loaded) is transformers.Llama4ForCausalLM
    assert_same(loaded, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_an_auto_class_without_a_class_for_the_model(tmp_path: Path) -> None:
    save_pretrained(llama(), tmp_path)
    with pytest.raises(ValueError, match="AutoModelForMaskedLM has no class for LlamaConfig"):
        from_pretrained(transformers.AutoModelForMaskedLM, tmp_path)


def test_how_tokens_are_generated(tmp_path: Path) -> None:
    """Older models say it in their config.json; what the caller says counts most."""
    llama().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_beams": 3, "max_length": 50}))
    loaded = from_pretrained(transformers.AutoModelForCausalLM, tmp_path).generation_config
    stock = transformers.LlamaForCausalLM.from_pretrained(tmp_path).generation_config
    assert (loaded.num_beams, loaded.max_length) == (3, 50)
    assert loaded.to_dict() == stock.to_dict()
    llama().save_pretrained(tmp_path)
    asked = transformers.GenerationConfig(num_beams=4)
    model = from_pretrained(transformers.LlamaForCausalLM, tmp_path, generation_config=asked)
    assert model.generation_config.num_beams == 4


def test_options_reach_transformers(tmp_path: Path) -> None:
    save_pretrained(llama(), tmp_path)
    loaded = from_pretrained(transformers.LlamaForCausalLM, tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert_same(loaded, llama().bfloat16())


def test_other_weights_than_the_directorys_are_not_passed_over(tmp_path: Path) -> None:
    """Those of the directory itself were loaded, without a word."""
    llama().save_pretrained(tmp_path)
    torch.manual_seed(1)
    other = transformers.LlamaForCausalLM(llama().config)
    other.save_pretrained(tmp_path / "other")
    loaded = from_pretrained(transformers.LlamaForCausalLM, tmp_path, subfolder="other")
    assert_same(loaded, other)
    other.save_pretrained(tmp_path, variant="fp16")
    with pytest.raises(ValueError, match="names other files"):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path, variant="fp16")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="describes an adapter"):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path)


def test_loaded_weights_are_not_copied(tmp_path: Path, handle: nvmeio.AioHandle) -> None:
    save_pretrained(llama(), tmp_path)
    loaded = from_pretrained(transformers.LlamaForCausalLM, tmp_path, handle=handle)
    weight = loaded.model.embed_tokens.weight
    assert nvmeio.buffers.owns(weight.data_ptr(), weight.nbytes)


def test_others_keep_the_writer_that_they_had(tmp_path: Path) -> None:
    """A block changes its own thread, and only while it lasts."""
    inside = threading.Event()
    done = threading.Event()

    class Slow:
        def save_pretrained(self, directory: Path) -> None:
            inside.set()
            assert done.wait(PATIENCE_S)

    runner = threading.Thread(target=save_pretrained, args=(Slow(), tmp_path))
    runner.start()
    assert inside.wait(PATIENCE_S)
    llama().save_pretrained(tmp_path / "stock")
    done.set()
    runner.join()
    llama().save_pretrained(tmp_path / "later")
    for name in ("stock", "later"):
        entries = nvmeio.checkpoint.safetensors.read_header(
            tmp_path / name / "model.safetensors"
        ).tensors
        assert min(entry.start for entry in entries.values()) % 4096  # not padded as ours is


def test_a_failed_save_leaves_the_old_weights(tmp_path: Path) -> None:
    save_pretrained(llama(), tmp_path)
    with (
        nvmeio.AioHandle(
            engine=nvmeio.testing.FakeEngine(fail=lambda kind, offset, nbytes: errno.ENOSPC)
        ) as failing,
        pytest.raises(nvmeio.TransferError),
    ):
        save_pretrained(llama(), tmp_path, handle=failing)
    assert_same(from_pretrained(transformers.LlamaForCausalLM, tmp_path), llama())


def test_an_unknown_transformers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.modeling_utils.safe_save_file")
    with pytest.raises(nvmeio.BackendUnavailableError, match="not known here"):
        save_pretrained(llama(), tmp_path)
    assert os.listdir(tmp_path) == []


# The Trainer


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(2, 128, (12,), generator=generator)
        return {"input_ids": ids, "labels": ids}


class Losses(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if "loss" in logs:
            self.seen[state.global_step] = logs["loss"]


def train(
    trainer_class: Callable[..., Any],
    directory: Path,
    steps: int,
    resume: Path | None = None,
    handle: nvmeio.AioHandle | None = None,
    **options: Any,
) -> tuple[dict[int, float], Any]:
    losses = Losses()
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=8,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=3,
        **options,
    )
    trainer = trainer_class(
        model=llama(),
        args=arguments,
        train_dataset=Texts(),
        eval_dataset=Texts(),
        callbacks=[losses],
    )
    if handle is not None:
        trainer.nvme_handle = handle
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return losses.seen, trainer


def test_training_resumes_with_the_same_losses(tmp_path: Path, counting: nvmeio.AioHandle) -> None:
    wanted, _ = train(transformers.Trainer, tmp_path / "stock", 6)
    first, _ = train(NvmeTrainer, tmp_path / "ours", 4, handle=counting)
    assert first == {step: wanted[step] for step in range(1, 5)}
    checkpoint = tmp_path / "ours" / "checkpoint-4"
    # two checkpoints of the weights and Adam's two moments
    assert counting.stats.bytes_written >= 2 * 3 * weights_of(llama())
    assert sorted(os.listdir(checkpoint)) == sorted(os.listdir(tmp_path / "stock" / "checkpoint-4"))
    after = {step: wanted[step] for step in (5, 6)}
    before = counting.stats.bytes_read
    rest, _ = train(NvmeTrainer, tmp_path / "ours", 6, checkpoint, counting)
    assert rest == after
    assert counting.stats.bytes_read - before >= 3 * weights_of(llama())
    # and neither side needs the other's Trainer
    assert train(transformers.Trainer, tmp_path / "more", 6, checkpoint)[0] == after
    stock = tmp_path / "stock" / "checkpoint-4"
    assert train(NvmeTrainer, tmp_path / "less", 6, stock)[0] == after


def test_checkpoints_are_ordinary_ones(tmp_path: Path) -> None:
    _, trainer = train(NvmeTrainer, tmp_path, 2)
    checkpoint = tmp_path / "checkpoint-2"
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    moments = trainer.optimizer.state_dict()["state"]
    assert state["state"].keys() == moments.keys()
    assert all(state["state"][key]["exp_avg"].equal(moments[key]["exp_avg"]) for key in moments)
    assert_same(transformers.LlamaForCausalLM.from_pretrained(checkpoint), trainer.model)


def test_old_checkpoints_are_rotated(tmp_path: Path) -> None:
    train(NvmeTrainer, tmp_path, 6, save_total_limit=1)
    assert os.listdir(tmp_path) == ["checkpoint-6"]


def test_weights_in_shards_are_resumed(tmp_path: Path, counting: nvmeio.AioHandle) -> None:
    wanted, _ = train(transformers.Trainer, tmp_path, 4)
    checkpoint = tmp_path / "checkpoint-2"
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="100KB")
    rest, _ = train(NvmeTrainer, tmp_path / "on", 4, checkpoint, counting)
    assert rest == {step: wanted[step] for step in (3, 4)}


# A checkpoint is whole, or not there


class Killed(NvmeTrainer):  # type: ignore[misc,valid-type]
    """Ends in its second save, between its files."""

    def _save_rng_state(self, output_dir: str) -> None:
        if self.state.global_step == 4:
            raise SystemExit("killed")
        super()._save_rng_state(output_dir)


def test_a_save_that_was_cut_short_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of one was there, and training could not be resumed: no valid checkpoint."""
    wanted, _ = train(transformers.Trainer, tmp_path / "stock", 6)
    run = tmp_path / "run"
    with monkeypatch.context() as patch:  # as SIGKILL, which removes nothing
        patch.setattr(ours, "remove_directory", lambda path: None)
        with pytest.raises(SystemExit):
            train(Killed, run, 6)
    names = sorted(os.listdir(run))
    assert names[1:] == ["checkpoint-2"] and names[0].startswith(".nvmeio-saving-")
    last = transformers.trainer_utils.get_last_checkpoint(str(run))
    rest, _ = train(NvmeTrainer, run, 6, Path(last))
    assert rest == {step: wanted[step] for step in (3, 4, 5, 6)}
    assert sorted(os.listdir(run)) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(Killed, tmp_path, 6)
    assert os.listdir(tmp_path) == ["checkpoint-2"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "of_before").touch()
    train(NvmeTrainer, tmp_path, 2)
    assert os.listdir(tmp_path) == ["checkpoint-2"]
    assert not (tmp_path / "checkpoint-2" / "of_before").exists()


@pytest.mark.parametrize("limit", [None, 2])
def test_the_best_checkpoint_has_the_name_that_transformers_gives_it(
    limit: int | None, tmp_path: Path
) -> None:
    best, kept = [], []
    for name, kind in (("stock", transformers.Trainer), ("ours", NvmeTrainer)):
        run = tmp_path / name
        options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
        options |= {"load_best_model_at_end": True, "save_total_limit": limit}
        _, trainer = train(kind, run, 6, **options)
        states = {
            path.parent.name: json.loads(path.read_text())["best_model_checkpoint"]
            for path in run.glob("*/trainer_state.json")
        }
        best.append({step: at and Path(at).relative_to(run) for step, at in states.items()})
        kept.append(sorted(os.listdir(run)))
        assert Path(trainer.state.best_model_checkpoint).is_dir()
    assert best[0] == best[1] and kept[0] == kept[1]


@pytest.mark.parametrize("where", ["one machine", "machines"])
def test_several_processes_save_into_one(tmp_path: Path, where: str) -> None:
    """The first process of a second machine took the new checkpoint for an older one."""
    script = Path(__file__).parent / "_trainer_rank.py"
    ended = run_ranks(script, 2, tmp_path, where)
    assert [status for status, _ in ended] == [0, 0], "\n".join(out for _, out in ended)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "checkpoint-4"]
    for name in os.listdir(tmp_path):
        files = os.listdir(tmp_path / name)
        assert {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"} <= set(files)


def test_a_process_that_fails_in_a_save_is_told_to_all(tmp_path: Path) -> None:
    """The others waited for half an hour, the timeout of their process group."""
    script = Path(__file__).parent / "_trainer_rank.py"
    ended = run_ranks(script, 2, tmp_path, "fails")
    (first, said), (second, failed) = ended
    assert (first, second) == (0, 0), f"{said}\n{failed}"
    assert "TransferError of rank 0: [Errno 28] ENOSPC: rank 1 of 2 could not save" in said
    assert "OSError of rank 1: [Errno 28] the drive is full" in failed
    assert os.listdir(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_damaged_random_states_are_named(damage: str, tmp_path: Path) -> None:
    """A bare "Invalid argument" of torch's loader, and of no file."""
    train(NvmeTrainer, tmp_path, 2)
    path = tmp_path / "checkpoint-2" / "rng_state.pth"
    if damage == "other":
        torch.save({"python": 3}, path)
    else:
        os.truncate(path, path.stat().st_size // 2 if damage == "cut" else 0)
    with pytest.raises(nvmeio.IntegrityError, match=r"rng_state\.pth cannot be read"):
        train(NvmeTrainer, tmp_path, 4, path.parent)
    path.unlink()
    seen, _ = train(NvmeTrainer, tmp_path, 4, path.parent)
    assert list(seen) == [3, 4]


def test_a_trainer_of_ones_own_takes_the_mixin(tmp_path: Path, counting: nvmeio.AioHandle) -> None:
    class Own(NvmeTrainerMixin, transformers.Trainer):  # type: ignore[name-defined,misc]
        nvme_handle = counting

    train(Own, tmp_path, 2)
    assert counting.stats.bytes_written >= 3 * weights_of(llama())


def test_a_disk_error_ends_the_training(tmp_path: Path) -> None:
    with (
        nvmeio.AioHandle(
            engine=nvmeio.testing.FakeEngine(fail=lambda kind, offset, nbytes: errno.EIO)
        ) as failing,
        pytest.raises(nvmeio.TransferError, match="EIO"),
    ):
        train(NvmeTrainer, tmp_path, 2, handle=failing)


class Guarding(NvmeTrainer):  # type: ignore[misc,valid-type]
    """Says what became of the first checkpoint."""

    nvme_guard = True

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.state.global_step == 4:
            self._nvme_saving.wait()
            self.reports = [saver.last for saver in self._nvme_saving.savers]
        super()._save_checkpoint(model, trial)


class Gate(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == 3:
            self.gate.set()


@needs_protection
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_training_goes_on_while_it_is_saved_and_files_are_the_same(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, too; and only the last is kept, which is there when training ends."""
    wanted, _ = train(NvmeTrainer, tmp_path / "stock", 4, **options)
    monkeypatch.setattr(protected, "LEAST_BYTES", 4096)  # the model is small
    gate, read = threading.Event(), protected.Protected.read

    def late(*arguments: Any) -> int:
        assert gate.wait(PATIENCE_S)
        return read(*arguments)

    monkeypatch.setattr(protected.Protected, "read", late)

    class Ours(Guarding):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.add_callback(Gate(gate))

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if self.state.global_step == 4:  # before its save, whose end removes the older one
                older = tmp_path / "ours" / "checkpoint-2" / "optimizer.pt"
                spin_until(older.exists)
                saved.update(torch.load(older))
            super()._save_checkpoint(model, trial)
            moment.setdefault(self.state.global_step, copy.deepcopy(self.optimizer.state_dict()))

    moment: dict[int, Any] = {}
    saved: dict[str, Any] = {}
    found, trainer = train(Ours, tmp_path / "ours", 4, save_total_limit=1, **options)
    for key, values in moment[2]["state"].items():
        assert all(torch.equal(saved["state"][key][name], each) for name, each in values.items())
    assert found == wanted
    assert os.listdir(tmp_path / "ours") == ["checkpoint-4"]
    ours, stock = (tmp_path / name / "checkpoint-4" for name in ("ours", "stock"))
    assert sorted(os.listdir(ours)) == sorted(os.listdir(stock))
    for name in ("model.safetensors", "optimizer.pt"):
        assert (ours / name).read_bytes() == (stock / name).read_bytes()
    for report in trainer.reports:
        assert report.durable and report.protected_bytes > report.copied_bytes
    assert sum(report.moved_bytes for report in trainer.reports) > 0
    rest, _ = train(NvmeTrainer, tmp_path / "more", 6, ours, **options)
    assert set(rest) == {5, 6}


def test_the_best_checkpoint_of_a_run_before_is_kept(tmp_path: Path) -> None:
    """Without its metric checkpoints are saved meanwhile, and it was the oldest of them."""
    options = {"save_total_limit": 2, "metric_for_best_model": "loss"}

    class Worse(transformers.Trainer):  # type: ignore[name-defined,misc]
        def _determine_best_metric(self, *arguments: Any, **named: Any) -> bool:
            self.state.best_global_step = 2
            return False

    _, trainer = train(Worse, tmp_path, 6, eval_strategy="steps", eval_steps=1, **options)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    train(Guarding, tmp_path, 10, tmp_path / "checkpoint-6", save_total_limit=2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-2"]


class Overflowing(torch.amp.GradScaler):
    """The third iteration's gradients are infinite: its step, the one after a save, is skipped."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=4.0)
        self.scaled = 0

    def scale(self, outputs: Any) -> Any:
        self.scaled += 1
        found = super().scale(outputs)
        return found * torch.inf if self.scaled == 3 else found


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
def test_a_scaler_skips_the_step_after_a_save(guarded: bool, tmp_path: Path) -> None:
    """accelerate has no fp16 without a GPU, so it gets the scaler that it would make."""

    class Scaled(NvmeTrainer):  # type: ignore[misc,valid-type]
        nvme_guard = guarded

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = Overflowing()

    class Stock(transformers.Trainer):  # type: ignore[name-defined,misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = Overflowing()

    wanted, _ = train(Stock, tmp_path / "stock", 4)
    found, trainer = train(Scaled, tmp_path / "ours", 4)
    scaler = trainer.accelerator.scaler
    assert (scaler.scaled, scaler.get_scale()) == (4, 2.0)  # halved: one was skipped
    assert found == wanted
    for step in (2, 4):
        ours, stock = (tmp_path / name / f"checkpoint-{step}" for name in ("ours", "stock"))
        assert sorted(os.listdir(ours)) == sorted(os.listdir(stock))
        ours_state, stock_state = (torch.load(each / "optimizer.pt") for each in (ours, stock))
        for key, state in stock_state["state"].items():
            for name, value in state.items():
                assert torch.equal(ours_state["state"][key][name], value)
            assert int(state["step"]) == {2: 2, 4: 3}[step]


def test_a_checkpoint_that_fails_in_the_background_gets_no_name(tmp_path: Path) -> None:
    with (
        nvmeio.AioHandle(
            engine=nvmeio.testing.FakeEngine(
                fail=lambda kind, offset, nbytes: errno.EIO if nbytes > 1 << 16 else 0
            )
        ) as failing,
        pytest.raises(nvmeio.TransferError, match="EIO"),
    ):
        train(Guarding, tmp_path, 2, handle=failing)
    assert [name for name in os.listdir(tmp_path) if name.startswith("checkpoint")] == []


def test_what_needs_its_checkpoint_at_once_is_not_saved_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Plain(NvmeTrainer):  # type: ignore[misc,valid-type]
        nvme_guard = True

    train(Plain, tmp_path, 2, metric_for_best_model="loss")
    assert "the best checkpoint is looked for" in caplog.text
    assert os.listdir(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize("special", ["is_deepspeed_enabled", "is_fsdp_enabled"])
def test_files_of_others_are_left_to_transformers(special: str) -> None:
    class Stock:
        def _save_optimizer_and_scheduler(self, output_dir: str) -> str:
            calls.append("save")
            return ""

        def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
            calls.append("load")

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any) -> None:
            calls.append("weights")

    class Special(NvmeTrainerMixin, Stock):  # type: ignore[misc]
        model = None

    calls: list[str] = []
    trainer = Special()
    setattr(trainer, special, True)
    trainer._save_optimizer_and_scheduler("/nowhere")
    trainer._load_optimizer_and_scheduler("/nowhere")
    trainer._load_from_checkpoint("/nowhere")
    assert calls == ["save", "load", "weights"]


# Imports


def test_transformers_is_imported_by_its_user_only() -> None:
    done = run_python(
        """
        import sys, nvmeio, nvmeio.integrations.transformers
        print(sorted({name.partition(".")[0] for name in sys.modules} & {"transformers"}))
        """
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_what_the_module_lacks_is_told() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        ours.Nonsense  # noqa: B018
