"""`SwappedOptimizer`: any torch optimizer, with its state on the drive."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from nvmeio._checks import NotPickled, Paths, switch
from nvmeio._io.long_call import profiled
from nvmeio._memory import devices
from nvmeio._threads import shutdown
from nvmeio._threads.closing import Closing, on_error
from nvmeio._threads.shutdown import Ending
from nvmeio._torch_private import global_optimizer_pre_hooks
from nvmeio.errors import ClosedError, NvmeioError
from nvmeio.handle import AioHandle
from nvmeio.offload._generations.transactions import Transaction, Transactions
from nvmeio.offload._optimizer import arguments, state_view
from nvmeio.offload._optimizer.arguments import OptimizerSettings
from nvmeio.offload._optimizer.arithmetic import Stepper
from nvmeio.offload._optimizer.kept_schedule import KeptSchedule
from nvmeio.offload._optimizer.memory_plans import MemoryPlan, plan_of
from nvmeio.offload._optimizer.params import Scaled, StepInputs, check_groups, grads_of, scheduled
from nvmeio.offload._optimizer.state_view import StateView
from nvmeio.offload._optimizer.swapper import StateSwapper, open_state
from nvmeio.offload._swap_files.pipeline import Times

DEFAULT_SUBGROUP_BYTES = 64 << 20
_CLOSED = "the optimizer is closed"
_BEGUN_ANEW = (
    "a learning-rate scheduler was made over an optimizer that has resumed: making it set lr back "
    "to its beginning. Call optimizer.keep_scheduler(scheduler), in the run before as well; or "
    "optimizer.restore_groups() once all schedulers are made, then each scheduler's "
    "load_state_dict() and step(); or load a checkpoint of optimizer and scheduler"
)


class SwappedOptimizer(NotPickled, Closing, torch.optim.Optimizer):
    """A torch optimizer whose state lies on the drive and passes through a few buffers.

    The result is that of `optimizer_class` in memory, bit for bit. Works with every torch optimizer
    whose state is tensors of each parameter (Adam, AdamW, SGD, Adagrad, …; foreach and fused
    forms), with parameter groups, LR schedulers, clipping, accumulation and `GradScaler`.

    A step goes through the state subgroup by subgroup, and reads, computes and writes at the same
    time. It is complete or has not happened: a step that fails raises, and everything is as before
    it. After a kill ``resume=True`` goes on from the last complete step.

    Values of your own in `param_groups` (numbers, strings, tensors, lists and dicts of them) are
    stored with each step and come back with it. A scheduler that is made over an optimizer that has
    resumed needs `keep_scheduler`.

    Args:
        optimizer_class: The class, such as `torch.optim.AdamW`.
        params: Parameters, or groups, as for that class.
        swap_dir: A directory on a fast drive, made where it is missing (not those above it); a
            private, locked subdirectory for this optimizer and rank is made in it. It takes twice
            the state; see `plan`. Or a list of directories, one on each of several drives, which
            work at once: each gets a part of every subgroup, in proportion to the rates that
            `nvmeio tune --save` measured, or equally. None makes a temporary directory, for a
            `ratio` of 0.0 with gradients in memory, which has nothing but manifests to keep.
        subgroup_bytes: How much state is read, stepped and written at a time; "64M" is 64 MiB. Up
            to some 64 MiB more is better for the drive; see docs/offload.md.
        buffer_bytes: The most memory of all buffers together. None: each stage gets a buffer for
            the largest subgroup. Large parameters are split if the class works element by element
            in fp32 or fp64.
        handle: Moves the bytes and stays open; None makes one for each drive.
        master_dtype: Keep master weights of this dtype (or name of one) on the drive, step on them,
            and round the result into the parameters: `torch.float32` for bf16 parameters.
        gradients: "memory" leaves them in ``.grad``. "disk" writes each to the drive when backward
            has made it. Then clip with this object's `clip_grad_norm_`: torch's own function does
            not see those gradients, and a step after it is refused.
        ratio: The part of the state that is on the drive; the rest stays in memory. It must be 1
            for parameters of a `SwappedModule` without masters.
        recoverable: Keep a copy of the weights on the drive, beside the state. A failed step is
            undone from it, and `resume` takes the weights from it. It costs 4 bytes more written
            for an fp32 parameter. Master weights are such a copy already.
        durable: Survive a power cut as well (fdatasync beside the next forward pass).
        checksum: Compare what is read with the CRC-32 of what was written: flipped bits raise
            `IntegrityError`. The sums are computed while the drive works.
        resume: True goes on from what is in the directory, weights included, and begins if there is
            nothing. "must" raises if there is nothing. Files stay after `close`. False begins, and
            refuses a directory with the state of another run. Several ranks go on from the last
            step that all of them have, so all must make their optimizers together. The log says
            what was resumed (INFO), and what could not be (WARNING).
        overwrite: Remove the state of another run, and begin. Files are removed by `close`.
        pipeline_read: Read ahead of the step; False needs a buffer less.
        pipeline_write: Write behind the step; False needs a buffer less.
        device: The device that the class steps on: the CPU, or the CUDA device that the parameters
            are on (one H100 has run it, docs/gds.md). State then goes through page-locked memory to
            the device and back, copied beside the arithmetic; docs/offload.md says when that pays.
        device_bytes: Buffers on a CUDA device. Two subgroups must fit, so subgroups may become
            smaller than `subgroup_bytes`. None: room for two of the largest.
        optimizer_args: Arguments of the class: ``lr=1e-3``.

    Raises:
        TypeError: The class cannot be swapped (LBFGS, SparseAdam, one that needs a closure, that
            changes its own options, draws from a generator of its own, or steps parameters by
            each other's).
        ValueError: A parameter is out of range; a directory is named twice; the buffers
            are too small for one parameter; a parameter is not on the device that steps; torch's
            fused step of it leaves its weights as they are (SGD in bfloat16 on the CPU).
        BackendUnavailableError: There is no such device.
        MemoryError: The device has no room for the buffers.
        TransferError: The directory above is missing; it is read-only, full, in use (EBUSY), or
            not this user's (EPERM, ELOOP); it has the state of another run (EEXIST), or none, which
            ``resume="must"`` wants (ENOENT).
        IntegrityError: The state that is to be resumed belongs to another model or optimizer, is
            damaged (names file, parameter and span), or lies in further directories (names those).

    Attributes:
        generation: How many times the state has changed: 1 when made, one more with each step,
            `load_state_dict` and `reload_weights`.
        resumed: Whether it went on from the state in the directory.
        last_step: The times and bytes of the last step, with bytes that were read ahead of it.

    Cost: see `plan`. A step takes as long as the longest of reading, computing and writing, and the
    time of writing one subgroup more. Its first reads, one for each buffer, begin when the step
    before is over (not with ``pipeline_read=False``, nor for weights that a `SwappedModule` keeps).

    Examples:
        >>> opt = SwappedOptimizer(torch.optim.AdamW, model.parameters(), swap_dir="/mnt/nvme",
        ...                        master_dtype=torch.float32, lr=1e-4)
        >>> loss.backward()
        >>> opt.step()  # or: await opt.async_step()
        >>> opt.zero_grad()
    """

    _elsewhere = "send its state_dict(), and make another one, in another swap_dir"

    def __init__(
        self,
        optimizer_class: Any,
        params: Any = None,
        *,
        swap_dir: Paths | None,
        subgroup_bytes: int | str = DEFAULT_SUBGROUP_BYTES,
        buffer_bytes: int | str | None = None,
        handle: AioHandle | None = None,
        master_dtype: torch.dtype | str | None = None,
        gradients: str = "memory",
        ratio: float = 1.0,
        recoverable: bool = True,
        durable: bool = True,
        checksum: bool = True,
        resume: bool | str = False,
        overwrite: bool = False,
        pipeline_read: bool = True,
        pipeline_write: bool = True,
        device: str | torch.device = "cpu",
        device_bytes: int | str | None = None,
        **optimizer_args: Any,
    ) -> None:
        arguments.check_names(optimizer_class, optimizer_args, type(self))
        there = devices.usable("device", device)
        stepper = Stepper(optimizer_class, optimizer_args, there)
        if params is None:
            raise TypeError(
                "params is missing: pass parameters or parameter groups, as for torch.optim"
            )
        if isinstance(params, torch.nn.Module) and not isinstance(params, torch.nn.ParameterList):
            raise TypeError(
                f"params is a module ({type(params).__name__}): pass its parameters, "
                "model.parameters()"
            )
        arguments.handle(handle)
        arguments.choice("gradients", gradients, ("memory", "disk"))
        if swap_dir is None and (ratio != 0 or gradients == "disk"):
            raise ValueError(
                "swap_dir must be a directory: None needs ratio=0.0 and gradients in memory, "
                "which leaves nothing for the drive"
            )
        resume = arguments.resume(resume)
        self._settings = settings = OptimizerSettings(
            subgroup_bytes=arguments.size("subgroup_bytes", subgroup_bytes, 4096),
            buffer_bytes=arguments.buffer_bytes(buffer_bytes),
            master_dtype=arguments.master_dtype(master_dtype),
            on_disk=gradients == "disk",
            ratio=ratio,
            recoverable=switch("recoverable", recoverable),
            durable=switch("durable", durable),
            checksum=switch("checksum", checksum),
            resume=bool(resume),
            must_resume=resume == arguments.MUST,
            overwrite=switch("overwrite", overwrite),
            read_ahead=switch("pipeline_read", pipeline_read),
            write_behind=switch("pipeline_write", pipeline_write),
            device=there,
            device_bytes=arguments.device_bytes(device_bytes, there),
        )
        self._optimizer_class = optimizer_class
        self._swapper: StateSwapper | None = None
        self._ending: Ending | None = None
        self._closed = False
        self._given: StepInputs | None = None  # of the step that is being made
        self.last_step: Times = Times()
        self.resumed = False
        self._scheduled: list[dict[str, Any]] | None = None  # groups that a scheduler had changed
        self._loaded = False  # a state dict, since it was made
        self._keeps_scheduler = False
        super().__init__(params, stepper.defaults)
        self._transactions = Transactions("nvmeio-offload", _CLOSED, there)
        make = functools.partial(
            open_state, swap_dir, handle, self._transactions, stepper, settings, self.param_groups
        )
        try:
            self._swapper, self._ending, groups = self._transactions.run(make)
            if groups is not None:
                self.resumed = True
                state_view.apply_groups(self.param_groups, groups)
                if any("initial_lr" in group for group in groups):
                    self._scheduled = groups
            state: Any = StateView(self._swapper, self._transactions)
            self.state = state
            if self._settings.on_disk:
                # GradScaler then leaves the scaling to us: only this object reaches the gradients.
                self._step_supports_amp_scaling = True
        except BaseException:
            shutdown.leave(self._transactions.owner)
            if self._swapper is not None:
                self._swapper.store.undo_stay()
            self.close()
            raise

    # Parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do; its state follows the others' in the files.

        Raises:
            TransferError: There is no space for it.
            ValueError, TypeError: As for the optimizer's class.

        After an interrupt `param_groups` tells whether it was added.
        """
        if self._swapper is None:
            super().add_param_group(param_group)  # called by the constructor
            return
        swapper, add = self._check_open(), super().add_param_group

        def work(transaction: Transaction) -> None:
            add(param_group)
            with on_error(self.param_groups.pop):
                swapper.extend(self.param_groups)

        self._transactions.run(work)

    # Stepping

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step, as the class does in memory. Blocks; other threads run.

        Several callers (threads, tasks with `async_step`) step one after the other, in the order
        in which they asked; so do all other calls of this object.

        Args:
            closure: Refused: call ``loss.backward()`` yourself, then `step`.

        Raises:
            TypeError: There is a closure.
            TransferError: The drive failed or is full. The step has not happened: state, weights
                and gradients are as before, and it may be tried again. If even the weights could
                not be brought back, the optimizer is broken: every further step raises.
            RuntimeError: A parameter was resized, converted or moved, or put into a group (or
                taken out of one) by hand; gradients on the drive were changed in memory only; a
                scheduler was made over an optimizer that has resumed, and neither `keep_scheduler`
                nor `restore_groups` was called. Nothing was changed.
            ClosedError: It is closed, or belongs to the parent of this forked process.
            KeyboardInterrupt: The step has not happened, and may be made again. `generation` tells
                if it has: the interrupt may have come at its very end, and a step cannot be undone
                without a copy of the weights (`recoverable=False`) or with state in memory
                (`ratio`). A second interrupt is raised at once, and the step is undone meanwhile.
        """
        if closure is not None:
            raise TypeError("a swapped optimizer takes no closure: call backward(), then step()")
        self._check_open()
        inputs = self._given if self._transactions.owner.is_here else None
        if inputs is None or self._is_hooked():
            inputs = self._inputs()
        with profiled("step"):
            self._transactions.run(functools.partial(self._step, inputs))

    async def async_step(self) -> None:
        """`step`, awaited: a thread does it, and the event loop goes on.

        Do not touch parameters and gradients meanwhile. If it is cancelled, the step is undone
        before `CancelledError` is raised: it has not happened (exceptions: as for an interrupt, see
        `step`). If hooks were registered, gradients and options are taken after those have run.

        Raises: As `step`.
        """
        self._check_open()
        inputs = self._inputs()

        def work(transaction: Transaction) -> None:
            self._given = inputs
            try:
                self.step()  # with the hooks that torch has put around it
            finally:
                self._given = None

        with profiled("step"):
            await self._transactions.async_run(work)

    def _inputs(self) -> StepInputs:
        """The inputs of a step, as they are now."""
        params, on_disk = self._opened().params, self._settings.on_disk
        check_groups(self.param_groups, params)
        if self._scheduled is not None and scheduled(self):
            raise RuntimeError(_BEGUN_ANEW)
        scaled = None
        if on_disk and hasattr(self, "found_inf"):
            scaled = Scaled(self.found_inf, getattr(self, "grad_scale", None))
        grads = None if on_disk else grads_of(params)
        return StepInputs([dict(group) for group in self.param_groups], grads, scaled)

    def _is_hooked(self) -> bool:
        """Whether hooks have run that may have changed gradients and options."""
        hooks = [*global_optimizer_pre_hooks.values(), *self._optimizer_step_pre_hooks.values()]
        return any(
            getattr(h, "changes_inputs", False)
            or not str(getattr(h, "__module__", "")).startswith("nvmeio.")
            for h in hooks
        )

    def _step(self, inputs: StepInputs, transaction: Transaction) -> None:
        times = self._check_open().step(inputs, transaction)
        if times is not None:
            self.last_step = times

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those on the drive too.

        Raises:
            ValueError: `set_to_none` is False while gradients are on the drive.
        """
        if self._settings.on_disk and not set_to_none:
            raise ValueError("gradients on the drive are set to none: set_to_none must be True")
        forget = super().zero_grad
        if self._closed or self._transactions.owner.forked:
            forget(set_to_none)
            return

        def work(_: Transaction) -> None:
            gradients = self._opened().gradients
            if gradients is not None:
                gradients.clear()
            forget(set_to_none)

        self._transactions.run(work)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, scaler: Any = None
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over all gradients, on the drive or in memory.

        Gradients on the drive are multiplied when the next step reads them.

        Args:
            max_norm: The largest norm allowed.
            norm_type: 2.0; any other only with gradients in memory.
            scaler: The GradScaler that scaled them; None for none. For gradients on the drive:
                in memory, call its `unscale_` first, as ever.

        Returns:
            The norm before clipping.

        Raises:
            ValueError: Gradients are on the drive, and the norm is not the 2-norm.
        """
        gradients = self._opened().gradients
        if gradients is None:
            parameters = [param.parameter for param in self._opened().params]
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2.0:
            raise ValueError("gradients on the drive have their 2-norm only: leave out norm_type")
        inverse = (
            None if scaler is None else scaler._get_scale_async().double().reciprocal().float()
        )
        return self._transactions.run(
            lambda transaction: gradients.clip(max_norm, inverse, transaction)
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of `optimizer_class`, which can load it. Nothing is read yet.

        Its tensors are mapped swap files: a page is read when it is touched, so saving takes no
        memory for the whole. They are valid until the next step. Master weights are in it as
        "master": torch's classes keep that key, and `load_state_dict` uses it.
        """
        self._check_open()
        found: dict[str, Any] = self._transactions.run(
            lambda _: super(SwappedOptimizer, self).state_dict()
        )
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of an optimizer of this class, swapped or not.

        It is written to the drive subgroup by subgroup. Weights are the present values of the
        parameters, so load the model first; or "master", unless a class in memory has rounded it.

        Args:
            state_dict: The state dict of an `optimizer_class`, or of this class.

        Raises:
            ValueError: It has other groups, parameters or kinds of state; nothing has changed.
            TransferError: The drive failed; nothing has changed.
        """
        self._check_open()
        hooked: Any = self
        for hook in hooked._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        loaded = state_view.prepared(self._opened().params, self.param_groups, state_dict)

        def work(transaction: Transaction) -> None:
            self._check_open().load(loaded.states, loaded.groups, transaction)
            state_view.apply_groups(self.param_groups, loaded.groups)
            self._scheduled = None
            self._loaded = True

        self._transactions.run(work)
        for hook in hooked._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def keep_scheduler(self, scheduler: LRScheduler, every: int = 1) -> None:
        """Store a learning-rate scheduler's state with each step, and bring it back.

        Call it once in each run, after the scheduler was made and before the first step::

            optimizer = SwappedOptimizer(AdamW, model.parameters(), swap_dir=…, resume=True)
            scheduler = CosineAnnealingLR(optimizer, T_max=10_000)
            optimizer.keep_scheduler(scheduler)

        If the optimizer has resumed, `param_groups` and the scheduler are then where they were
        after the last complete step, and after the ``scheduler.step()`` that followed it.
        `restore_groups` is not needed. The state is in ``param_groups[0]["scheduler"]``. After a
        `load_state_dict` nothing is brought back here: load the scheduler's state as well.

        Args:
            scheduler: One of `torch.optim.lr_scheduler`, made over this optimizer. It is not kept
                alive: the caller holds it.
            every: Steps of the optimizer between steps of the scheduler: those of an epoch, for one
                that steps once an epoch. Counted from the first call in the first run.

        Raises:
            TypeError: It is `ReduceLROnPlateau`, which steps by a metric, or not a scheduler.
            ValueError: It was made over another optimizer, or this one keeps another: join several
                by `SequentialLR` or `ChainedScheduler`. Or ``every`` is below 1.
            ClosedError: It is closed, or belongs to the parent of this forked process.
        """
        self._check_open()
        kept = KeptSchedule(scheduler, every)
        if self._keeps_scheduler:
            raise ValueError(
                "the optimizer keeps a scheduler already: combine both with SequentialLR or "
                "ChainedScheduler, and keep the result"
            )
        kept.attach(self, self._loaded)
        self._keeps_scheduler = True

    def restore_groups(self) -> None:
        """Give `param_groups` the values again that they had in the step that was resumed.

        Call it once all LR schedulers are made: making one sets lr (and what else it changes) to
        the beginning of its schedule. Then load the scheduler's own state, and step it: what is
        stored with a step is from before the ``scheduler.step()`` that followed.

        Nothing happens where nothing was resumed, no scheduler had been in use, or a state dict was
        loaded since.

        Raises:
            ClosedError: It is closed, or belongs to the parent of this forked process.
        """
        self._check_open()
        if self._scheduled is None:
            return
        state_view.apply_groups(self.param_groups[: len(self._scheduled)], self._scheduled)
        if scheduled(self):
            self._scheduled = None
            self._opt_called = True  # by the run before: schedulers may step first

    def reload_weights(self) -> None:
        """Write the parameters' present values to the drive, as the weights to go on from.

        Call it after parameters were changed by other means than `step`, such as
        ``model.load_state_dict``. Without master weights the next step does it by itself; but if
        that step is undone, the old weights come back.
        """
        swapper = self._check_open()
        self._transactions.run(
            lambda transaction: swapper.store_weights(self.param_groups, transaction)
        )

    def snapshot(self, directory: Paths) -> None:
        """Copy the swap files of the last step to a directory that ``resume=True`` can go on from.

        Args:
            directory: Made where it is missing; to resume, name it as `swap_dir`. As many as those
                have, where they are several.

        Raises:
            TransferError: It has such a copy already (EEXIST), is full, or on a failing drive;
                nothing is left of the copy then.
            ValueError: Some state is in memory (`ratio`); there are not as many directories.

        Cost: nothing is copied if the file system can share blocks (reflink on xfs and btrfs). Else
        the kernel copies, also to another file system; no byte passes through this process. Both
        generations are copied: twice the state.
        """
        swapper = self._check_open()
        self._transactions.run(lambda transaction: swapper.snapshot(directory, transaction))

    # Properties

    @property
    def plan(self) -> MemoryPlan:
        """Sizes of buffers, files and traffic; print it to read them."""
        return plan_of(self._opened())

    @property
    def generation(self) -> int:
        """How many times the state has changed: 1 when made, one more with each step.

        `load_state_dict` and `reload_weights` change it too. Waits for what is under way: after an
        interrupt it tells whether the step has happened.
        """
        return self._settled().store.generation

    def _steps_made(self) -> int:
        """Complete steps since this object was made; waits for a step under way."""
        return self._settled().steps

    def _settled(self) -> StateSwapper:
        """The swapper, after all that was asked of it."""
        swapper = self._opened()
        with contextlib.suppress(ClosedError):
            self._transactions.run(lambda _: None)
        return swapper

    @property
    def has_gradients_on_disk(self) -> bool:
        """Whether backward's gradients go to the drive."""
        return self._settings.on_disk

    @property
    def gradients_clipped(self) -> bool:
        """Whether the next step multiplies gradients on the drive, as `clip_grad_norm_` found."""
        gradients = self._opened().gradients
        return gradients is not None and gradients.factor is not None

    @property
    def swap_dir(self) -> str:
        """The directory of the swap files; of several the one with the manifests."""
        return self._opened().directory.path

    @property
    def swap_dirs(self) -> list[str]:
        """The directories of the swap files, one on each drive."""
        return self._opened().directory.paths

    @property
    def bytes_written(self) -> int:
        """Written to the drive since this object was made, for the drive's endurance."""
        return self._opened().written_bytes

    @property
    def bytes_read(self) -> int:
        """Read from the drive since this object was made."""
        return self._opened().read_bytes

    @property
    def pinned(self) -> bool:
        """Whether the buffers are page-locked; the drive does not need it."""
        return self._opened().pipeline.pinned

    @property
    def broken(self) -> str:
        """Why no further step can be made, or ""."""
        return self._opened().broken

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # The end

    def close(self) -> None:
        """Wait for writes, give back memory, files and lock.

        The swap files are removed, unless it was made with ``resume``. Idempotent. If you do not
        call it, the same happens when the object is dropped or the process ends.
        """
        self._closed = True
        if self._ending is not None:
            self._ending.close()

    def _check_open(self) -> StateSwapper:
        if self._closed:
            raise ClosedError(_CLOSED)
        if self._transactions.owner.forked:
            raise ClosedError(
                "this process was forked from the optimizer's owner: make one of its own here"
            )
        swapper = self._opened()
        if swapper.broken:
            raise NvmeioError(swapper.broken)
        return swapper

    def _opened(self) -> StateSwapper:
        if self._swapper is None:
            raise ClosedError("the optimizer was never opened: make a new one")
        return self._swapper

    def __repr__(self) -> str:
        if self._swapper is None or self._closed:
            return f"<SwappedOptimizer of {self._optimizer_class.__name__}, closed>"
        return (
            f"<SwappedOptimizer of {self._optimizer_class.__name__} in {self.swap_dir}, "
            f"generation {self.generation}: {self.plan}>"
        )


def swapped_like(
    optimizer: torch.optim.Optimizer,
    swap_dir: Paths,
    *,
    as_class: type[SwappedOptimizer] = SwappedOptimizer,
    **options: Any,
) -> SwappedOptimizer:
    """A swapped optimizer of the same class, with the same groups, options, state and hooks.

    Args:
        optimizer: In memory; not to be used any more.
        swap_dir: As for `SwappedOptimizer`, like `options`.
        as_class: The class to make, `SwappedOptimizer` or a subclass.
        options: ``master_dtype=torch.float32`` and the like.

    Raises:
        TypeError: It is swapped already, or its class takes other arguments than its defaults say.
        Exception: As for `SwappedOptimizer`.

    Learning-rate schedulers of `optimizer` go on if they are given the new one (`follow`).
    """
    if isinstance(optimizer, SwappedOptimizer):
        raise TypeError(f"{optimizer!r} is swapped already: use it as it is")
    kind = type(optimizer)
    takes = inspect.signature(kind.__init__).parameters
    arguments = {k: v for k, v in optimizer.defaults.items() if k in takes}
    made = as_class(
        kind,
        [dict(group) for group in optimizer.param_groups],
        swap_dir=swap_dir,
        **options,
        **arguments,
    )
    if optimizer.state and not made.resumed:
        made.load_state_dict(optimizer.state_dict())
    vars(made).update({k: v for k, v in vars(optimizer).items() if k.startswith("_optimizer_")})
    return made
