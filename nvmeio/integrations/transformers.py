"""transformers through nvmeio: a Trainer, `save_pretrained` and `from_pretrained`.

Transformers still decides what is saved, under which names and in which format: directories are
those that transformers writes and reads. Each file is written at the drive's speed, atomically and
durably.

`NvmeTrainer` is `NvmeTrainerMixin` on `transformers.Trainer`; put the mixin before another Trainer
to have that one save through nvmeio:

    class MyTrainer(NvmeTrainerMixin, SomeTrainer): ...
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from nvmeio._distributed import DEFAULT_TIMEOUT_S
from nvmeio._distributed.messages import Messages
from nvmeio._distributed.rank_store import RankStore
from nvmeio._formats import model_directory, packed_index
from nvmeio._formats.safetensors.open_set import SafetensorsSet
from nvmeio._storage.durable import remove_directory, sync_directory
from nvmeio._threads.closing import do_all, on_error, opened
from nvmeio.checkpoint import load, save
from nvmeio.checkpoint.background import BackgroundSaver
from nvmeio.checkpoint.safetensors import load_safetensors, save_safetensors
from nvmeio.errors import BackendUnavailableError, IntegrityError
from nvmeio.handle import AioHandle
from nvmeio.integrations._clients import joined, on_demand

logger = logging.getLogger("nvmeio")

__all__ = ["NvmeTrainer", "NvmeTrainerMixin", "from_pretrained", "save_pretrained"]  # noqa: F822

# transformers' names for the files of a Trainer's checkpoint.
_OPTIMIZER = "optimizer.pt"
_SCHEDULER = "scheduler.pt"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def save_pretrained(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    handle: AioHandle | None = None,
    **options: Any,
) -> None:
    """`model.save_pretrained(directory, **options)`, with the weights written by nvmeio.

    Args:
        model: A `transformers.PreTrainedModel`.
        directory: Made where it is missing.
        handle: Moves the bytes and stays open; None makes one for each file.
        options: As for transformers, such as ``max_shard_size="5GB"`` (5 * 10**9 bytes).

    Raises:
        TransferError: The disk is full, or failed. Each file is whole, old or new.
        BackendUnavailableError: This version of transformers writes weights in another way.
        ImportError: transformers is not installed.
    """
    with _weights_written_by(handle):
        model.save_pretrained(directory, **options)


def from_pretrained(
    model_class: Any,
    directory: str | os.PathLike[str],
    *,
    config: Any = None,
    handle: AioHandle | None = None,
    **options: Any,
) -> Any:
    """`model_class.from_pretrained(directory, **options)`, with the weights read by nvmeio.

    Args:
        model_class: A model class, or one of the ``AutoModel…`` ones.
        directory: A directory of this machine, with safetensors weights: one file or shards with an
            index.
        config: The model's configuration; that of the directory by default.
        handle: Moves the bytes and stays open; None makes one.
        options: As for transformers, such as ``dtype=`` and ``attn_implementation=``.

    Returns:
        The model, in evaluation mode. Tensors whose dtype needs no change are those that were read,
        without a copy.

    Raises:
        IntegrityError: A file is malformed.
        TransferError: A file cannot be read.
        ValueError: The weights are quantised by `nvmeio pack`: `stream_model` reads them. They are
            not all: transformers itself loads a ``variant``, and the adapter of a directory. The
            ``AutoModel…`` has no class for this model.
        ImportError: transformers is not installed.
    """
    transformers = importlib.import_module("transformers")
    folder = os.path.join(directory, options.pop("subfolder", ""))
    if options.get("variant"):
        raise ValueError(
            f"variant={options['variant']!r} names other files of {folder}: load them with "
            "transformers' own from_pretrained"
        )
    model_directory.refuse_adapter(folder)
    of_any = not hasattr(model_class, "_from_config") or hasattr(model_class, "_model_mapping")
    # As transformers does it: a class knows its configuration, which need not name a model_type.
    own = None if of_any else model_class.config_class
    config = config or (own or transformers.AutoConfig).from_pretrained(folder)
    if of_any:
        auto: Any = importlib.import_module("transformers.models.auto.auto_factory")
        if type(config) not in model_class._model_mapping:
            raise ValueError(
                f"{model_class.__name__} has no class for {type(config).__name__}, the "
                f"configuration in {folder}: name the model's own class"
            )
        model_class = auto._get_model_class(config, model_class._model_mapping)
        if model_class.config_class is config.sub_configs.get("text_config", config):
            config = config.get_text_config()  # of a model of several parts it is the one for text
    asked = options.get("dtype", options.get("torch_dtype", "auto"))
    if asked == "auto" and config.dtype is None:
        # transformers would take the first of `state`, which has another order than the files.
        with contextlib.closing(SafetensorsSet(folder)) as opened:
            options["dtype"] = model_directory.dtype_of(opened)
    state = load_safetensors(folder, handle=handle)
    if any(name.endswith((*packed_index.SUFFIXES, packed_index.EXPERTS)) for name in state):
        raise ValueError(
            f"{folder} holds weights that nvmeio pack quantised, or experts that it put side by "
            "side, which transformers cannot compute with: use nvmeio.stream_model(directory), or "
            "load its source"
        )
    model = model_class.from_pretrained(None, config=config, state_dict=state, **options)
    if model.can_generate() and options.get("generation_config") is None:
        # As transformers: older models have what generates in their config.json.
        old = {"_from_model_config": True}
        for name, more in (("config.json", old), ("generation_config.json", {})):
            if os.path.isfile(os.path.join(folder, name)):
                model.generation_config = transformers.GenerationConfig.from_pretrained(
                    folder, name, **more
                )
    model.config._name_or_path = model.name_or_path = os.fspath(directory)
    return model


class NvmeTrainerMixin:
    """Saves and loads a `transformers.Trainer`'s checkpoints through nvmeio.

    Model weights, optimizer and scheduler go through nvmeio, into the files that transformers
    itself writes: with or without the mixin, each resumes from what the other saved. Under
    DeepSpeed, FSDP, XLA and SageMaker, which have files of their own, transformers' code runs.

    A checkpoint is made in ``.nvmeio-saving-…`` beside the others, and gets its name once all of it
    is durable: a program that is killed leaves it whole, or not at all. The next save removes
    remains. With `push_to_hub`, and if transformers' own code saves, files get their names one by
    one; such a directory is complete when it holds ``trainer_state.json``.

    Attributes:
        nvme_handle: Moves the bytes and stays open; None makes one for each file.
        nvme_guard: Write checkpoints while training goes on, each with the state at the moment of
            the save (see `Checkpointer`). A checkpoint gets its name after ``on_save``, but before
            the next save and before `train` returns, which raise what failed. Then older ones are
            removed. With several processes,
            `push_to_hub` or a best model to be kept a warning says that saves block as ever.
    """

    nvme_handle: AioHandle | None = None
    nvme_guard: bool = False
    _nvme_saving: TrainerSaving | None = None
    _nvme_hidden: str | None = None  # where a checkpoint is made before training goes on

    def train(self, *args: Any, **options: Any) -> Any:
        """`Trainer.train`; returns when the last checkpoint is durable."""
        try:
            found = super().train(*args, **options)  # type: ignore[misc]
            if self._nvme_saving is not None:
                self._nvme_saving.wait()
            return found
        finally:
            saving, self._nvme_saving = self._nvme_saving, None
            if saving is not None:
                saving.release()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        reason = why_not(trainer) if self.nvme_guard else None
        if reason is not None:
            logger.warning("nvme_guard: checkpoints are saved before training goes on: %s", reason)
        if reason is not None or not self.nvme_guard:
            if not _is_plain(trainer) or trainer.args.push_to_hub:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                return
            run_directory = trainer._get_output_dir(trial=trial)
            with _made_whole(trainer, run_directory) as hidden:
                self._nvme_hidden = hidden
                try:
                    super()._save_checkpoint(model, trial)  # type: ignore[misc]
                finally:
                    self._nvme_hidden = None
            return
        if self._nvme_saving is None:
            self._nvme_saving = TrainerSaving(self.nvme_handle)
        saving = self._nvme_saving
        saving.wait()
        run_directory = trainer._get_output_dir(trial=trial)
        saving.begin(run_directory)
        with on_error(saving.give_up):
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        saving.name_when_durable(run_directory, trainer)

    def _get_output_dir(self, trial: Any) -> str:
        saving = self._nvme_saving
        hidden = self._nvme_hidden if saving is None else saving.directory or self._nvme_hidden
        return hidden or super()._get_output_dir(trial=trial)  # type: ignore[misc]

    @property
    def _nvme_made(self) -> TrainerSaving | None:
        """The checkpoint that is being made, in the background."""
        saving = self._nvme_saving
        return None if saving is None or saving.directory is None else saving

    def _save(
        self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None
    ) -> None:
        made = self._nvme_made
        with _weights_written_by(self.nvme_handle, None if made is None else made.save_safetensors):
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        trainer: Any = self
        if not _is_plain(trainer):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        elif trainer.args.should_save:
            made, at_once = self._nvme_made, partial(save, handle=self.nvme_handle)
            large = at_once if made is None else made.save
            large(trainer.optimizer.state_dict(), os.path.join(output_dir, _OPTIMIZER))
            at_once(trainer.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer: Any = self
        names = [os.path.join(checkpoint or "", name) for name in (_OPTIMIZER, _SCHEDULER)]
        if checkpoint is None or not _is_plain(trainer) or not all(map(os.path.isfile, names)):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        # As transformers does it: on the GPU itself only where several ranks share host memory.
        device = trainer.args.device
        to = device if trainer.args.world_size > 1 and device.type != "cpu" else "cpu"
        trainer.optimizer.load_state_dict(load(names[0], to, handle=self.nvme_handle))
        trainer.lr_scheduler.load_state_dict(load(names[1], handle=self.nvme_handle))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        try:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        except Exception as failed:  # whatever a damaged file makes torch and random stumble over
            args: Any = self.args  # type: ignore[attr-defined]
            of_rank = f"_{args.process_index}" if args.world_size > 1 else ""
            path = os.path.join(checkpoint or "", f"rng_state{of_rank}.pth")
            if os.path.isfile(path):
                raise IntegrityError(
                    f"{path} cannot be read as random states ({failed}): resume from an earlier "
                    "checkpoint, or remove this file, and training goes on with other random "
                    "numbers",
                    expected="what a Trainer saved",
                    found=str(failed),
                ) from failed
            raise

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        trainer: Any = self
        model = trainer.model if model is None else model
        weights = (os.path.join(resume_from_checkpoint, name) for name in _WEIGHTS)
        found = next(filter(os.path.isfile, weights), None)
        if found is None or not _is_plain(trainer) or hasattr(model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        state = load_safetensors(found, handle=self.nvme_handle)
        trainer._issue_warnings_after_load(model.load_state_dict(state, strict=False))


def _is_plain(trainer: Any) -> bool:
    """Whether transformers would save with torch.save and safetensors from this process."""
    module = importlib.import_module("transformers.trainer")
    special = ("is_deepspeed_enabled", "is_fsdp_enabled", "is_distributed_loading_by_transformers")
    elsewhere = ("is_torch_xla_available", "is_sagemaker_mp_enabled")
    return not (
        any(getattr(trainer, name, False) for name in special)
        or any(getattr(module, name, bool)() for name in elsewhere)
    )


# transformers' modeling code writes weights through one name of its module, `safe_save_file`. A
# function takes its place, once, that asks which writer this thread has chosen: without one, it is
# what it was.
_here = threading.local()
_replacing = threading.Lock()
_SEAM = "safe_save_file"


@contextlib.contextmanager
def _weights_written_by(
    handle: AioHandle | None, writer: Callable[..., object] | None = None
) -> Iterator[None]:
    """Within the block, this thread's `save_pretrained` calls write through nvmeio."""
    _install(importlib.import_module("transformers.modeling_utils"))
    before = getattr(_here, "writer", None)
    # Aligned, as those of saves in the background: the files do not depend on `nvme_guard`.
    _here.writer = writer or partial(save_safetensors, align=True, handle=handle)
    try:
        yield
    finally:
        _here.writer = before


def _install(module: Any) -> None:
    with _replacing:
        stock = getattr(module, _SEAM, None)
        if stock is None:
            version = importlib.import_module("transformers").__version__
            raise BackendUnavailableError(
                f"transformers {version} writes weights in a way that is not known here",
                attempts=[(_SEAM, "transformers.modeling_utils has no such name")],
                remedy="save with the model's own save_pretrained",
            )
        if getattr(stock, "_nvmeio", False):
            return

        def write(
            tensors: dict[str, torch.Tensor],
            filename: str | os.PathLike[str],
            metadata: dict[str, str] | None = None,
        ) -> None:
            writer = getattr(_here, "writer", None) or stock
            writer(tensors, filename, metadata)

        write._nvmeio = True  # type: ignore[attr-defined]
        setattr(module, _SEAM, write)


def _trainer() -> Any:
    stock = importlib.import_module("transformers").Trainer
    about = "`transformers.Trainer` with `NvmeTrainerMixin`."
    return joined("NvmeTrainer", NvmeTrainerMixin, stock, doc=about)


__getattr__ = on_demand(__name__, "NvmeTrainer", _trainer)


_HIDDEN = ".nvmeio-saving-"


@contextlib.contextmanager
def _made_whole(trainer: Any, run: str) -> Iterator[str]:
    """A directory for a checkpoint that all processes save; behind the block it gets its name.

    If the block raises in a process, it is removed, and all others raise a TransferError.
    """
    args, state = trainer.args, trainer.state
    # Each machine has a first process: they need not see the same files.
    is_first = args.local_process_index == 0
    token = _agreed_token(args.world_size)
    hidden = os.path.join(run, _HIDDEN + token)
    messages = _messages(token, run, args)
    if is_first:
        _remove_unfinished(run, os.path.basename(hidden))
        os.makedirs(hidden, exist_ok=True)
    with messages.telling():  # or the others waited for as long as their process group lets them
        try:
            yield hidden
            if _correct_best(state, hidden, run) and args.should_save:
                made = os.path.join(hidden, f"checkpoint-{state.global_step}")
                state.save_to_json(os.path.join(made, "trainer_state.json"))
            messages.agree("saved", True)
        except BaseException:
            if is_first:
                remove_directory(hidden)  # it may be a full disk that it takes
            raise
        if args.process_index == 0:
            _put_in_place(hidden, run)
        messages.agree("placed", True)
        # The remaining processes are on machines with files of their own. Two at a time in one
        # directory would each take the other's for the older checkpoint of that name.
        if is_first and args.process_index != 0 and os.path.isdir(hidden):
            _put_in_place(hidden, run)
        messages.agree("settled", True)
    messages.forget(["saved", "placed"])
    if args.should_save:
        _rotate(run, args.save_total_limit, state.best_model_checkpoint)


def _messages(token: str, run: str, args: Any) -> Messages:
    """The messages between the processes of a training in one save."""
    if args.world_size == 1:
        return Messages(RankStore.of_one(run, "save"), 1, DEFAULT_TIMEOUT_S)
    limit_s = float(args.ddp_timeout)
    group = torch.distributed.group.WORLD
    store = RankStore.of_group(group, f"trainer/{token}", run, "save", limit_s)
    return Messages(store, 1, limit_s)


def _agreed_token(world_size: int) -> str:
    """A new name, the same in all processes of the training."""
    token = [secrets.token_hex(4)]
    if world_size > 1:
        importlib.import_module("accelerate.utils").broadcast_object_list(token)
    return token[0]


def _correct_best(state: Any, hidden: str, run: str) -> bool:
    """Name the best checkpoint as it will be called; whether that was another name.

    transformers names it if it is in the directory that is saved into.
    """
    before = state.best_model_checkpoint
    if before is not None and before.startswith(hidden):
        state.best_model_checkpoint = run + before.removeprefix(hidden)
    step = getattr(state, "best_global_step", None)
    older = os.path.join(run, f"checkpoint-{step}")
    if step and os.path.exists(older):
        state.best_model_checkpoint = older
    return bool(state.best_model_checkpoint != before)


def _remove_unfinished(run: str, kept: str = "") -> None:
    """Make the directory of a run, without the remains of a killed program."""
    os.makedirs(run, exist_ok=True)
    for name in os.listdir(run):
        if name.startswith(_HIDDEN) and name != kept:
            remove_directory(os.path.join(run, name))


class TrainerSaving:
    """The checkpoints of one Trainer, one after the other.

    Args:
        handle: Moves the bytes and stays open; None makes one for each file.

    Attributes:
        directory: The directory in which the checkpoint's directory is to be made; None while none
            is.
        savers: One for each file of a checkpoint.
    """

    def __init__(self, handle: AioHandle | None) -> None:
        self._handle = handle
        self._files = 0
        self.directory: str | None = None
        self.savers: list[BackgroundSaver] = []

    def begin(self, run_directory: str) -> None:
        """From now on files are part of a checkpoint; the one before must have ended."""
        self._files = 0
        _remove_unfinished(run_directory)
        self.directory = tempfile.mkdtemp(prefix=_HIDDEN, dir=run_directory)

    def save(self, state: object, path: str) -> None:
        """Begin to write a file as `torch.save` would."""
        self._next().save(state, os.path.abspath(path))

    def save_safetensors(
        self, tensors: Mapping[str, torch.Tensor], path: Any, metadata: Mapping[str, str] | None
    ) -> None:
        """Begin to write a safetensors file."""
        self._next().save_safetensors(tensors, os.path.abspath(path), metadata)

    def name_when_durable(self, run_directory: str, trainer: Any) -> None:
        """No file is to come: once all are durable the checkpoint gets its name."""
        hidden, self.directory = self.directory, None
        assert hidden is not None
        savers = self.savers[: self._files]
        kept = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
        name = partial(_name, hidden, run_directory, savers[1:], *kept)
        if savers:
            savers[0].after(name)
        else:
            name()

    def give_up(self) -> None:
        """The checkpoint was not made as a whole: it gets no name."""
        self.directory = None

    def wait(self) -> None:
        """Until the last checkpoint is durable and has its name; raises what failed, once."""
        do_all((saver.wait for saver in self.savers), Exception)

    def release(self) -> None:
        """Give the memory back."""
        for saver in self.savers:
            saver.release()

    def _next(self) -> BackgroundSaver:
        if self._files == len(self.savers):
            self.savers.append(BackgroundSaver(handle=self._handle))
        saver = self.savers[self._files]
        self._files += 1
        return saver


def why_not(trainer: Any) -> str | None:
    """Why a Trainer's checkpoints cannot be written meanwhile; None if they can."""
    args = trainer.args
    if not _is_plain(trainer):
        return "their files are not those that are known here"
    if args.world_size > 1:
        return "several processes write into one checkpoint"
    if args.push_to_hub:
        return "push_to_hub reads a checkpoint as soon as it was saved"
    if args.load_best_model_at_end or args.metric_for_best_model:
        return "the best checkpoint is looked for as soon as it was saved"
    if getattr(trainer, "hp_search_backend", None) is not None:
        return "a hyperparameter search has directories of its own"
    return None


def _name(
    hidden: str, run: str, others: list[BackgroundSaver], limit: int | None, best: str | None
) -> None:
    for saver in others:
        saver.wait()
    _put_in_place(hidden, run)
    _rotate(run, limit, best)


def _put_in_place(hidden: str, run: str) -> None:
    """Give a directory's content its name in the directory of the run, once it is durable."""
    for name in os.listdir(hidden):
        made, target = os.path.join(hidden, name), os.path.join(run, name)
        for folder, _, names in os.walk(made):
            for file in names:  # transformers' own; ours are durable
                with opened(os.path.join(folder, file), os.O_RDONLY) as fd:
                    os.fsync(fd)
            sync_directory(folder)
        replaced = f"{hidden}-replaced"
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, replaced)
        os.rename(made, target)
        sync_directory(run)
        remove_directory(replaced)
    os.rmdir(hidden)
    sync_directory(run)


def _rotate(run: str, limit: int | None, best: str | None) -> None:
    rotate = getattr(importlib.import_module("transformers.trainer"), "rotate_checkpoints", None)
    if rotate is not None:
        rotate(run, limit, best, use_mtime=True)
