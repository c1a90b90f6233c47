"""An optimizer's state is opened: gone on with, or begun where nothing is lost by that."""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

from nvmeio._checks import Paths
from nvmeio._ranks.rank_store import several
from nvmeio._threads.endings import Ending, do_all
from nvmeio.handle import AioHandle
from nvmeio.offload._generations.manifests import Manifest
from nvmeio.offload._generations.rank_steps import agreed, directory_name
from nvmeio.offload._generations.transactions import Transaction, Transactions
from nvmeio.offload._optimizer.settings import OptimizerSettings
from nvmeio.offload._optimizer.state_swapper import Groups, StateSwapper
from nvmeio.offload._step.stepping import Stepper
from nvmeio.offload._swap_files.swap_dirs import SwapDirs

logger = logging.getLogger("nvmeio")


class OpenedState(NamedTuple):
    """State that was opened.

    Attributes:
        swapper: Has it.
        ending: Closes it; keep it where it dies with the optimizer.
        resumed: The options of the parameter groups that were there; None at the beginning.
    """

    swapper: StateSwapper
    ending: Ending
    resumed: list[dict[str, Any]] | None


def open_state(
    swap_dir: Paths | None,
    handle: AioHandle | None,
    transactions: Transactions,
    stepper: Stepper,
    settings: OptimizerSettings,
    groups: Groups,
    transaction: Transaction,
) -> OpenedState:
    """Make the state of an optimizer, or go on with what is in its directory.

    Args:
        swap_dir: As for `SwappedOptimizer`, like `handle`.
        handle: Moves the bytes and stays open, or None.
        transactions: Whose thread this is called in.
        stepper: Does the arithmetic.
        settings: How.
        groups: The parameter groups.
        transaction: Whose opening it is.
    """
    remove = not settings.resume
    name = directory_name("optimizer")
    try:
        directory = SwapDirs(swap_dir, name, settings.resume, overwrite=settings.overwrite)
    except Exception as failed:
        if settings.resume and several():
            agreed("", failed)  # the others wait to hear what this rank has
        raise
    swapper: StateSwapper | None = None
    try:
        swapper = StateSwapper(directory, handle, transactions, stepper, settings)
        manifest = swapper.open(groups, transaction)
        transaction.check()
    except BaseException:
        if swapper is not None:
            swapper.close(remove)
        else:
            directory.release(remove)
        raise
    ending = Ending(transactions.owner, functools.partial(swapper.close, remove))
    store = swapper.store
    transaction.on_rollback(lambda: do_all((store.undo_stay, ending.close)))
    store.stay()
    _tell(directory, manifest, settings)
    return OpenedState(swapper, ending, None if manifest is None else manifest.groups)


def _tell(directory: SwapDirs, manifest: Manifest | None, settings: OptimizerSettings) -> None:
    """Say in the log what became of what was there: one line."""
    where = ", ".join(directory.paths)
    if manifest is not None:
        logger.info("resumed %s from %s", manifest, where)
    elif settings.resume:
        hint = directory.hint()
        level = logging.WARNING if hint else logging.INFO
        logger.log(level, "began in %s: there was nothing to resume%s", where, hint)
    else:
        logger.info("began in %s", where)
