"""What the ranks agree upon before anything of a save is written: that they save the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from nvmeio._formats.torch_layout import FileLayout
from nvmeio.checkpoint._ranks.ranks import Messages
from nvmeio.checkpoint._ranks.same_state import explain, fingerprint, pieces_to_bytes, with_pieces

# All that a save may tell; the next one, of which all know then, has rank 0's store forget them.
MESSAGES = (
    *("plan", "agreed", "pieces", "place", "part", "end", "seen", "beat"),
    *("same", "durable", "named"),  # of parts on drives of their own
)


class Disagreement(ValueError):
    """Known to every rank, so nobody has to be told."""


class Agreement(NamedTuple):
    """What all ranks have told.

    Attributes:
        plans: What each of them saves.
        same_pieces: Whether all but the storages is the same to the last byte.
    """

    plans: list[dict[str, Any]]
    same_pieces: bool


def agree(
    messages: Messages, before: Messages, path: str, plan: Mapping[str, Any], layout: FileLayout
) -> Agreement:
    """Tell what this rank saves, and hear of the others.

    Args:
        messages: Of this save.
        before: Of the one before, which are forgotten.
        path: Of the checkpoint, for errors.
        plan: What the ranks are to have in common, and what each tells of itself.
        layout: Of what is saved.

    Raises:
        Disagreement: They do not save the same; says what differs.
        TransferError: Another rank failed, or gave up.
    """
    messages.put("plan", json.dumps({**plan, **fingerprint(layout)}).encode())
    plans = [json.loads(told) for told in messages.gather("plan")]
    messages.check()  # one may have told its plan, and then given up
    before.forget(MESSAGES)  # all have left it
    wrong = explain(plans)
    if wrong is not None:
        raise Disagreement(f"{path}: {wrong}")
    return Agreement(plans, all(each["pieces"] == plans[0]["pieces"] for each in plans))


def with_pieces_of_first(messages: Messages, layout: FileLayout) -> FileLayout:
    """Pickles say on which device each tensor was, so they may differ: rank 0's is written."""
    if messages.rank == 0:
        messages.put("pieces", pieces_to_bytes(layout))
        return layout
    return with_pieces(layout, messages.get("pieces", 0))
