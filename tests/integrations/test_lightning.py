"""The Lightning plugins under a real Trainer, of both packages that Lightning comes in."""

from __future__ import annotations

import copy
import errno
import importlib
import os
import pickle
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from integrations import _lightning
from integrations._lightning import new_module, quiet_trainer
from support import needs_protection, run_python, spin_until

import nvmeio
from nvmeio._formats.torch_archives import torch_writing
from nvmeio.checkpoint import background
from nvmeio.checkpoint._snapshot.state_snapshot import Snapshots
from nvmeio.integrations import lightning as plugins
from nvmeio.integrations.lightning import AsyncNvmeCheckpointIO, NvmeCheckpointIO

pl = _lightning.pl  # a fixture
BOTH = [NvmeCheckpointIO, AsyncNvmeCheckpointIO]


@pytest.fixture(params=BOTH)
def plugin(request: pytest.FixtureRequest) -> Iterator[NvmeCheckpointIO]:
    pytest.importorskip("lightning", reason="lightning is not installed")
    made = request.param()
    yield made
    made.teardown()


@pytest.fixture
def async_plugin() -> Iterator[AsyncNvmeCheckpointIO]:
    pytest.importorskip("lightning", reason="lightning is not installed")
    made = AsyncNvmeCheckpointIO()
    yield made
    made.teardown()


def fit(
    pl: ModuleType,
    directory: Path,
    epochs: int,
    plugin: Any = None,
    resume: Any = None,
    **options: Any,
) -> tuple[list[float], Any]:
    callback = pl.callbacks.ModelCheckpoint(
        dirpath=directory, filename="{epoch}", save_top_k=options.pop("keep", -1), **options
    )
    module = new_module(pl)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few workers, few batches, no logger
        trainer = quiet_trainer(pl, epochs, plugin, callback)
        trainer.fit(module, ckpt_path=resume)
    return module.losses, trainer


@pytest.mark.parametrize("kind", BOTH)
def test_training_resumes_with_the_same_losses(
    pl: ModuleType, kind: Callable[[], Any], tmp_path: Path
) -> None:
    wanted, _ = fit(pl, tmp_path / "stock", 4)
    first, trainer = fit(pl, tmp_path / "ours", 2, kind())
    assert type(trainer.strategy.checkpoint_io) is kind
    saved = sorted((tmp_path / "ours").iterdir())
    assert [path.name for path in saved] == ["epoch=0.ckpt", "epoch=1.ckpt"]
    rest, _ = fit(pl, tmp_path / "ours", 4, kind(), resume=saved[-1])
    assert first + rest == wanted
    # and neither side needs the other's plugin
    rest, _ = fit(pl, tmp_path / "more", 4, resume=saved[-1])
    assert first + rest == wanted
    rest, _ = fit(pl, tmp_path / "less", 4, kind(), resume=tmp_path / "stock" / "epoch=1.ckpt")
    assert first + rest == wanted


@pytest.mark.parametrize("kind", BOTH)
def test_old_checkpoints_are_removed(
    pl: ModuleType, kind: Callable[[], Any], tmp_path: Path
) -> None:
    fit(pl, tmp_path, 4, kind(), keep=1)
    assert os.listdir(tmp_path) == ["epoch=3.ckpt"]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_save_that_fails_ends_the_training(
    pl: ModuleType, kind: Callable[..., Any], wrapped: bool, tmp_path: Path
) -> None:
    """Also the last one, within a wrapper that passes no `teardown` on."""

    def no_space(kind: str, offset: int, nbytes: int) -> int:
        return errno.ENOSPC if kind == "pwrite" else 0

    with nvmeio.AioHandle(engine=nvmeio.testing.FakeEngine(fail=no_space)) as handle:
        plugin = kind(handle=handle)
        if wrapped:
            plugin = pl.plugins.io.AsyncCheckpointIO(plugin)
        with pytest.raises(nvmeio.TransferError, match="ENOSPC"):
            fit(pl, tmp_path, 1, plugin)
    assert os.listdir(tmp_path) == []


# Without a copy


def new_wide_module(pl: ModuleType, optimizers: int) -> Any:
    """Two layers of 256 KiB, an optimizer for both or one for each."""

    class Wide(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(2))
            self.norm = torch.nn.BatchNorm1d(256)
            self.automatic_optimization = optimizers == 1

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            rows: Any = batch[0]
            for layer in self.layers:
                rows = torch.tanh(layer(rows))
            loss: torch.Tensor = self.norm(rows).square().mean() + rows.mean()
            if optimizers > 1:
                found = self.optimizers()
                self.manual_backward(loss)
                for each in found:
                    each.step()
                    each.zero_grad()
            return loss

        def configure_optimizers(self) -> Any:
            if optimizers == 1:
                return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
            return [torch.optim.Adam(layer.parameters()) for layer in self.layers]

        def train_dataloader(self) -> Any:
            data = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 4)

    return Wide()


def fit_wide(
    pl: ModuleType,
    directory: Path,
    optimizers: int,
    plugin: Any = None,
    callback: Any = None,
    others: Sequence[Any] = (),
) -> Any:
    """Four steps, each saved."""
    made = (callback or plugins.NvmeModelCheckpoint)(
        dirpath=directory, filename="{step}", save_top_k=-1, every_n_train_steps=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            plugins=[plugin] if plugin is not None else None,
            callbacks=[made, *others],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(new_wide_module(pl, optimizers))
    return trainer


@pytest.fixture
def callbacks_of(pl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`NvmeModelCheckpoint` is that of the package under test."""
    package = pl.__name__.partition(".")[0]
    monkeypatch.setattr(plugins, "lightning_modules", lambda places: [places[package]])
    vars(plugins).pop("NvmeModelCheckpoint", None)
    yield
    vars(plugins).pop("NvmeModelCheckpoint", None)


class Reporting(AsyncNvmeCheckpointIO):
    """Keeps what was saved, by the file's name, and what was said of it once it was durable."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reports: list[nvmeio.SaveReport] = []
        self.saved: dict[str, dict[str, Any]] = {}

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if self.report is not None:
            self.wait()
            self.reports.append(self.report)
        self.saved[os.path.basename(path)] = copy.deepcopy(checkpoint)
        super().save_checkpoint(checkpoint, path, storage_options)


def gate_of(pl: ModuleType, gate: threading.Event) -> Any:
    """A callback that lets the first save go on once the second step is made."""

    class Gate(pl.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, *arguments: Any, **options: Any) -> None:
            self.batches = getattr(self, "batches", 0) + 1
            if self.batches == 2:  # before the second save, which comes behind all callbacks
                gate.set()

    return Gate()


@pytest.fixture
def little_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save reads 64 KiB ahead of its drive, of a state that is small here."""
    monkeypatch.setattr(torch_writing, "STAGING_BYTES", 64 << 10)
    monkeypatch.setattr(torch_writing, "STAGINGS", 1)


@needs_protection
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.usefixtures("callbacks_of", "little_read")
def test_training_goes_on_while_it_is_saved_and_files_are_the_same(
    pl: ModuleType, optimizers: int, tmp_path: Path, held: Held
) -> None:
    """The step behind the first save is made before any of it is written."""
    plugin = Reporting(handle=held.handle)
    others = [gate_of(pl, held.gate)]
    trainer = fit_wide(pl, tmp_path / "run", optimizers, plugin, others=others)
    assert trainer.strategy.checkpoint_io is plugin
    (tmp_path / "run").rename(tmp_path / "beside")
    assert len(plugin.reports) == 3
    for report in plugin.reports:
        assert report.durable and report.protected_bytes >= 3 * 2 * 256 * 256 * 4
        assert report.copied_bytes < report.protected_bytes / 20
    assert plugin.reports[0].moved_bytes > 0 and plugin.reports[0].step_held_s > 0
    # The stock plugin's name is in no file; it saves before the training goes on.
    fit_wide(pl, tmp_path / "run", optimizers, NvmeCheckpointIO())
    names = sorted(os.listdir(tmp_path / "run"))
    assert names == sorted(os.listdir(tmp_path / "beside")) and len(names) == 4
    for name in names:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "beside" / name).read_bytes()


@needs_protection
@pytest.mark.parametrize("kind", ["EMAWeightAveraging", "WeightAveraging"])
@pytest.mark.usefixtures("callbacks_of", "little_read")
def test_averages_of_lightnings_own_are_saved_as_they_were(
    pl: ModuleType, kind: str, tmp_path: Path, held: Held
) -> None:
    """No optimizer swaps them in, nor changes them: the save behind which it was done failed."""
    averaging = getattr(pl.callbacks, kind, None)
    if averaging is None:
        pytest.skip(f"this Lightning has no {kind}")
    plugin = Reporting(handle=held.handle)
    others = [averaging(), gate_of(pl, held.gate)]
    trainer = fit_wide(pl, tmp_path, 1, plugin, others=others)
    assert trainer.state.finished
    assert len(plugin.saved) == 4 and sorted(plugin.saved) == sorted(os.listdir(tmp_path))
    for name, wanted in plugin.saved.items():
        found = torch.load(tmp_path / name, weights_only=False)
        for part in ("state_dict", "current_model_state"):
            assert found[part].keys() == wanted[part].keys()
            for key, tensor in wanted[part].items():
                assert found[part][key].equal(tensor), (name, part, key)
        assert same_moments(found, wanted), name
    assert plugin.reports[0].moved_bytes > 0


def same_moments(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether the first optimizer's state is the same."""
    ours, theirs = (each["optimizer_states"][0]["state"] for each in (found, wanted))
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[key][name], value)
        for key, values in theirs.items()
        for name, value in values.items()
    )


@pytest.mark.usefixtures("callbacks_of")
def test_a_save_behind_the_fit_is_of_that_moment(
    pl: ModuleType, tmp_path: Path, held: Held
) -> None:
    """A change of the weights before all was written lost the file."""
    held.gate.set()
    plugin = AsyncNvmeCheckpointIO(handle=held.handle)
    trainer = fit_wide(pl, tmp_path / "run", 1, plugin, pl.callbacks.ModelCheckpoint)
    held.gate.clear()
    weight = trainer.lightning_module.layers[0].weight
    wanted = weight.detach().clone()
    trainer.save_checkpoint(tmp_path / "behind.ckpt")
    with torch.no_grad():
        weight.zero_()
    held.gate.set()
    plugin.wait()
    saved = torch.load(tmp_path / "behind.ckpt")["state_dict"]
    assert saved["layers.0.weight"].equal(wanted)


@needs_protection
@pytest.mark.usefixtures("callbacks_of")
def test_the_stock_plugin_gives_way(pl: ModuleType, tmp_path: Path) -> None:
    trainer = fit_wide(pl, tmp_path, 1)
    assert type(trainer.strategy.checkpoint_io) is AsyncNvmeCheckpointIO
    report = trainer.strategy.checkpoint_io.report
    assert report.durable and report.protected_bytes > report.copied_bytes


@pytest.mark.usefixtures("callbacks_of")
def test_what_saves_before_training_goes_on_is_told(
    pl: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beside = "checkpoints are not written while training goes on"
    fit_wide(pl, tmp_path / "other", 1, NvmeCheckpointIO())
    assert f"{beside}: NvmeCheckpointIO saves" in caplog.text
    caplog.clear()
    strategy = types.SimpleNamespace(checkpoint_io=None, _state_dict_type="sharded")
    trainer = types.SimpleNamespace(is_global_zero=True, strategy=strategy)
    plugins.NvmeModelCheckpoint(dirpath=tmp_path).on_train_start(trainer, None)
    assert f"{beside}: SimpleNamespace writes sharded checkpoints" in caplog.text


def test_strategies_that_write_checkpoints_themselves_are_known(
    pl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    found = importlib.import_module(f"{pl.__name__}.strategies")

    class Training:
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            pass

    class Saving(plugins.NvmeModelCheckpointMixin, Training):
        pass

    def warned(strategy: Any) -> str:
        caplog.clear()
        Saving().on_train_start(SimpleNamespace(strategy=strategy, is_global_zero=True), None)
        ours = isinstance(strategy.checkpoint_io, AsyncNvmeCheckpointIO)
        assert ours == (not caplog.text)
        return caplog.text

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "sharded checkpoints" in warned(found.FSDPStrategy(state_dict_type="sharded"))
        assert "distributed checkpoints" in warned(found.ModelParallelStrategy())
        for other in (found.FSDPStrategy(state_dict_type="full"), found.DDPStrategy()):
            assert not warned(other)
        assert not warned(found.SingleDeviceStrategy("cpu"))


@needs_protection
@pytest.mark.usefixtures("little_read")
def test_a_change_behind_the_save_is_not_in_the_file(
    held_plugin: AsyncNvmeCheckpointIO, held: Held, tmp_path: Path
) -> None:
    layer = torch.nn.Linear(256, 256)
    wanted = layer.weight.detach().clone()
    with pytest.warns(DeprecationWarning, match="leave the call out"):
        held_plugin.guard(torch.optim.SGD(layer.parameters()))
    held_plugin.save_checkpoint({"state_dict": layer.state_dict()}, tmp_path / "a.ckpt")
    with torch.no_grad():
        layer.weight.zero_()
    layer.weight.data += 1
    held.gate.set()
    held_plugin.wait()
    assert torch.load(tmp_path / "a.ckpt")["state_dict"]["weight"].equal(wanted)
    report = held_plugin.report
    assert report is not None and report.moved_bytes > 0


# The plugins by themselves


def state(seed: int = 0, nbytes: int = 1 << 16) -> dict[str, Any]:
    weight = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(seed))
    return {"state_dict": {"w": weight, "tied": weight, "half": weight[::2]}, "epoch": seed}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["epoch"] == wanted["epoch"]
    assert found["state_dict"].keys() == wanted["state_dict"].keys()
    for name, tensor in wanted["state_dict"].items():
        assert found["state_dict"][name].equal(tensor)


def test_what_is_saved_is_loaded(plugin: NvmeCheckpointIO, tmp_path: Path) -> None:
    path = tmp_path / "made" / "on the way" / "a.ckpt"
    plugin.save_checkpoint(state(), path)
    loaded = plugin.load_checkpoint(path)
    assert_same(loaded, state())
    tensors = loaded["state_dict"]
    assert tensors["w"].data_ptr() == tensors["tied"].data_ptr() == tensors["half"].data_ptr()
    plugin.teardown()
    assert_same(torch.load(path), state())
    plugin.save_checkpoint(state(1), f"file://{path}")  # again, after its end
    assert_same(plugin.load_checkpoint(path), state(1))
    plugin.remove_checkpoint(path)
    plugin.remove_checkpoint(path)
    plugin.teardown()
    assert not path.exists()


def test_directories_are_removed_too(plugin: NvmeCheckpointIO, tmp_path: Path) -> None:
    (tmp_path / "sharded.ckpt").mkdir()
    (tmp_path / "sharded.ckpt" / "part").write_bytes(b"x")
    plugin.remove_checkpoint(tmp_path / "sharded.ckpt")
    assert os.listdir(tmp_path) == []


def test_arguments_that_are_not_supported_are_refused(
    plugin: NvmeCheckpointIO, tmp_path: Path
) -> None:
    stock = importlib.import_module("lightning.fabric.plugins.io.torch_io").TorchCheckpointIO()
    with pytest.raises(TypeError, match="storage_options") as refused:
        stock.save_checkpoint({}, tmp_path / "a", storage_options={})
    with pytest.raises(TypeError, match="storage_options") as caught:
        plugin.save_checkpoint({}, tmp_path / "a", storage_options={})
    assert str(caught.value) == str(refused.value).replace(
        "TorchCheckpointIO", type(plugin).__name__
    )
    for call in (
        lambda: plugin.save_checkpoint({}, "s3://a/b"),
        lambda: plugin.load_checkpoint("s3://a"),
    ):
        with pytest.raises(ValueError, match="not a file of this machine"):
            call()
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "none.ckpt")


def test_weights_only_is_what_none_means(plugin: NvmeCheckpointIO, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    plugin.save_checkpoint({"object": threading.Thread}, path)
    with pytest.raises(pickle.UnpicklingError):
        plugin.load_checkpoint(path)
    assert plugin.load_checkpoint(path, weights_only=False) == {"object": threading.Thread}


def test_plugins_can_be_sent_elsewhere(plugin: NvmeCheckpointIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
    if isinstance(plugin, AsyncNvmeCheckpointIO):
        plugin.wait()
    for other in (pickle.loads(pickle.dumps(plugin)), copy.deepcopy(plugin)):
        assert_same(other.load_checkpoint(tmp_path / "a.ckpt"), state())
        other.teardown()


def test_it_works_in_a_forked_process(plugin: NvmeCheckpointIO, tmp_path: Path) -> None:
    plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
    if isinstance(plugin, AsyncNvmeCheckpointIO):
        plugin.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12: threads and fork
        child = os.fork()
    if child == 0:
        code = 1
        try:
            assert_same(plugin.load_checkpoint(tmp_path / "a.ckpt"), state())
            plugin.teardown()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


# What is left


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("nvmeio")}


@pytest.mark.parametrize("kind", BOTH)
def test_no_thread_outlives_the_trainer(
    pl: ModuleType, kind: Callable[[], Any], tmp_path: Path
) -> None:
    """A handle of the plugin's own, and its thread, stayed after a save behind the fit."""
    before = ours()
    _, trainer = fit(pl, tmp_path, 1, kind())
    trainer.save_checkpoint(tmp_path / "behind.ckpt")
    spin_until(lambda: (tmp_path / "behind.ckpt").exists() and not ours() - before)
    assert torch.load(tmp_path / "behind.ckpt")["global_step"] == 4


@pytest.mark.parametrize("kind", BOTH)
def test_lightnings_own_wrapper_around_it(
    pl: ModuleType, kind: Callable[[], Any], tmp_path: Path
) -> None:
    before = ours()
    wrapper = pl.plugins.io.AsyncCheckpointIO(kind())
    wanted, _ = fit(pl, tmp_path / "stock", 2)
    losses, trainer = fit(pl, tmp_path / "ours", 2, wrapper)
    assert losses == wanted
    assert trainer.strategy.checkpoint_io is wrapper
    spin_until(lambda: not ours() - before)
    assert sorted(os.listdir(tmp_path / "ours")) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    rest, _ = fit(pl, tmp_path / "ours", 3, wrapper, resume=tmp_path / "ours" / "epoch=1.ckpt")
    assert len(rest) == 4


@pytest.mark.stress
def test_no_thread_is_left_after_spawned_processes(tmp_path: Path) -> None:
    """The parent saves and loads after them, and its plugin's `teardown` is not called again."""
    pytest.importorskip("lightning", reason="lightning is not installed")
    done = run_python(
        f"""
        import threading, time, warnings
        warnings.simplefilter("ignore")
        import lightning.pytorch as pl
        from lightning.pytorch.demos.boring_classes import BoringModel
        from nvmeio.integrations.lightning import NvmeCheckpointIO

        if __name__ == "__main__":
            trainer = pl.Trainer(
                max_epochs=1, limit_train_batches=2, limit_val_batches=0, accelerator="cpu",
                devices=1, strategy="ddp_spawn", plugins=[NvmeCheckpointIO()], logger=False,
                enable_progress_bar=False, enable_model_summary=False,
                default_root_dir={str(tmp_path)!r},
            )
            trainer.fit(BoringModel())
            trainer.save_checkpoint({str(tmp_path / "behind.ckpt")!r})
            names = ["nvmeio"]
            while names:
                names = [t.name for t in threading.enumerate() if t.name.startswith("nvmeio")]
                time.sleep(0.001)
            print("none", flush=True)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("none\n")
    assert (tmp_path / "behind.ckpt").exists()


# Meanwhile


class Held:
    """A handle whose writes wait for a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.failing = False

        def fail(kind: str, offset: int, nbytes: int) -> int:
            return errno.EIO if kind == "pwrite" and self.failing else 0

        engine = nvmeio.testing.FakeEngine(hold=self.gate, fail=fail)
        self.handle = nvmeio.AioHandle(engine=engine)


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.gate.set()
    made.handle.close()


@pytest.fixture
def held_plugin(held: Held) -> Iterator[AsyncNvmeCheckpointIO]:
    pytest.importorskip("lightning", reason="lightning is not installed")
    made = AsyncNvmeCheckpointIO(handle=held.handle)
    yield made
    held.gate.set()
    made.teardown()


def test_the_state_may_change_once_save_returns(
    held_plugin: AsyncNvmeCheckpointIO, held: Held, tmp_path: Path
) -> None:
    changing = state()
    held_plugin.save_checkpoint(changing, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    changing["state_dict"]["w"].zero_()
    changing["epoch"] = 99
    held.gate.set()
    assert_same(held_plugin.load_checkpoint(tmp_path / "a.ckpt"), state())


def test_the_old_checkpoint_stays_until_the_new_one_is_durable(
    held_plugin: AsyncNvmeCheckpointIO, held: Held, tmp_path: Path
) -> None:
    held.gate.set()
    held_plugin.save_checkpoint(state(1), tmp_path / "1.ckpt")
    held_plugin.wait()
    held.gate.clear()
    held_plugin.save_checkpoint(state(2), tmp_path / "2.ckpt")
    held_plugin.remove_checkpoint(tmp_path / "1.ckpt")
    assert_same(torch.load(tmp_path / "1.ckpt"), state(1))
    held.gate.set()
    held_plugin.wait()
    assert os.listdir(tmp_path) == ["2.ckpt"]


def test_a_failure_is_raised_once_and_keeps_the_old_checkpoint(
    held_plugin: AsyncNvmeCheckpointIO, held: Held, tmp_path: Path
) -> None:
    held.gate.set()
    held_plugin.save_checkpoint(state(1), tmp_path / "1.ckpt")
    held_plugin.wait()
    held.gate.clear()
    held.failing = True
    held_plugin.save_checkpoint(state(2), tmp_path / "2.ckpt")
    held_plugin.remove_checkpoint(tmp_path / "1.ckpt")
    held.gate.set()
    with pytest.raises(nvmeio.TransferError, match="EIO"):
        held_plugin.save_checkpoint(state(3), tmp_path / "3.ckpt")
    assert os.listdir(tmp_path) == ["1.ckpt"]
    held.failing = False
    held_plugin.save_checkpoint(state(3), tmp_path / "3.ckpt")
    held_plugin.teardown()
    assert sorted(os.listdir(tmp_path)) == ["1.ckpt", "3.ckpt"]


@pytest.mark.parametrize("call", ["load_checkpoint", "remove_checkpoint", "teardown", "wait"])
def test_every_call_raises_what_failed(
    held_plugin: AsyncNvmeCheckpointIO, held: Held, tmp_path: Path, call: str
) -> None:
    held.failing = True
    held.gate.set()
    held_plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
    arguments = [tmp_path / "a.ckpt"] if call.endswith("checkpoint") else []
    raised: list[int | None] = []

    def raises() -> bool:
        """Once the save is over: `remove_checkpoint` does not wait for that."""
        try:
            getattr(held_plugin, call)(*arguments)
        except nvmeio.TransferError as failed:
            raised.append(failed.errno)
        return bool(raised)

    spin_until(raises)
    assert raised == [errno.EIO]


def test_memory_is_used_again_and_given_back(
    async_plugin: AsyncNvmeCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Snapshots] = []

    def new(memory_bytes: int | None, way: str, directory: str) -> Snapshots:
        made.append(Snapshots(memory_bytes, "copy", directory))
        return made[-1]

    monkeypatch.setattr(background, "Snapshots", new)
    async_plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
    memory = made[0].copies
    first = memory.arena(1)
    async_plugin.save_checkpoint(state(1), tmp_path / "b.ckpt")
    assert memory.arena(1) is first
    async_plugin.save_checkpoint(state(2, 1 << 20), tmp_path / "c.ckpt")
    assert memory.arena(1) is not first
    async_plugin.teardown()
    assert memory.nbytes == 0
    for number, name in enumerate("ab"):
        assert_same(torch.load(tmp_path / f"{name}.ckpt"), state(number))
    assert_same(torch.load(tmp_path / "c.ckpt"), state(2, 1 << 20))


# Imports


def test_lightning_is_imported_by_its_user_only() -> None:
    done = run_python(
        """
        import sys, nvmeio, nvmeio.integrations.lightning
        loaded = {name.partition(".")[0] for name in sys.modules}
        print(sorted(loaded & {"lightning", "pytorch_lightning", "lightning_fabric"}))
        """
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_without_lightning_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "LIGHTNING", {"no_such_lightning": "no_such_lightning.io"})
    with pytest.raises(nvmeio.BackendUnavailableError, match="pip install lightning"):
        NvmeCheckpointIO()
