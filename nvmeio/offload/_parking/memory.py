"""Give parked memory back, and guard tensors without memory meanwhile.

Host memory keeps its addresses: its pages go, so views that nobody here knows of (numpy's too) are
whole again after a restore. A device's memory goes back to torch's allocator. The tensors that are
known lie over a stand-in meanwhile: NaN, and refused by torch where they are written to.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from nvmeio._checks import NotPickled
from nvmeio._memory import devices, mappings
from nvmeio._threads.closing import do_all, on_error
from nvmeio.offload._parking.members import ParkedStorage, parameters_of
from nvmeio.offload._swap_files.subgroups import SlotSpan
from nvmeio.offload._swap_files.tensors import absent, is_absent, is_nothing, is_sharded

ATTRIBUTE = "_nvmeio_parked"  # of a module: the object that restores it


class Away:
    """A storage without its memory, and the tensors that lay in it as they were."""

    def __init__(self, parked: ParkedStorage) -> None:
        self.parked = parked
        self._as_they_were = [(each, each.tensor.detach()) for each in parked.members]

    def leave(self) -> None:
        """Give the memory back. Its content must be on the drive."""
        with on_error(self.come_back):
            for member, _ in self._as_they_were:
                _lay(member.tensor, _stand_in(member.tensor))
        self.drop()

    def drop(self) -> None:
        """Give the memory back again, whatever is in it."""
        parked = self.parked
        parked.away = True
        if parked.device.type == "cpu":
            mappings.give_back_pages(parked.storage.data_ptr(), parked.nbytes)
        else:
            parked.storage.resize_(0)

    def memory(self) -> torch.Tensor:
        """Memory to read into. Raises torch's error if a device has no room for it."""
        parked = self.parked
        if parked.device.type == "cpu":
            mappings.bring_pages(parked.storage.data_ptr(), parked.nbytes)
        else:
            parked.storage.resize_(parked.nbytes)
        return parked.memory()

    def come_back(self) -> None:
        """Let the tensors lie in it as before, once its content is back."""
        for member, original in self._as_they_were:
            _lay(member.tensor, original)
        self.parked.away = False

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a tensor was converted, moved or given other values meanwhile."""
        for member, original in self._as_they_were:
            now = member.tensor
            if (now.dtype, now.device, now.shape) != (
                original.dtype,
                original.device,
                original.shape,
            ):
                raise RuntimeError(
                    f"{member.name} (of {member.kind}) was {original.dtype} on {original.device} "
                    f"of shape {tuple(original.shape)} when it was parked, and is {now.dtype} on "
                    f"{now.device} of shape {tuple(now.shape)}: convert it back, then restore()"
                )
            own = now.untyped_storage()._cdata == self.parked.storage._cdata
            if not own and not is_absent(now) and not is_nothing(now):
                raise RuntimeError(
                    f"{member.name} (of {member.kind}) was given other values while it was parked, "
                    "and restore() would replace them. Keep them (kept = p.data), let it be empty "
                    "again (p.data = torch.full_like(p, torch.nan), zeros for integers), "
                    "restore(), and copy them into it"
                )


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    span = SlotSpan(0, 0, tensor.dtype, tuple(tensor.shape))
    return absent(span, tensor.device)


def _lay(tensor: torch.Tensor, other: torch.Tensor) -> None:
    torch.Tensor.data.__set__(tensor, other)  # type: ignore[attr-defined]


def synchronize(storages: Sequence[ParkedStorage]) -> None:
    """Wait until devices have finished their work so far, with these storages say."""
    for device in {each.device for each in storages} - {torch.device("cpu")}:
        devices.synchronize(device)


def trim(storages: Sequence[ParkedStorage]) -> None:
    """Have torch give free memory of a device back to it, for other processes."""
    if any(each.device.type == "cuda" for each in storages):
        torch.cuda.empty_cache()


class Guard(NotPickled):
    """Refuses whatever uses or converts what is parked; the module keeps who restores it."""

    _elsewhere = "call restore() before you copy or pickle parked tensors"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        parked: object,
        where: str,
    ) -> None:
        self._where = where
        self._root = weakref.ref(module)
        self._of_module: list[Any] = []
        self._of_optimizer: list[Any] = []
        self._unconverted: list[torch.nn.Module] = []
        self._unhooked: list[Any] = []  # without hooks before
        with on_error(self.release):
            self._begin(module, optimizer)
        module.__dict__[ATTRIBUTE] = parked

    def _begin(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        parts: list[Any] = list(module.modules())  # some of what is called has no types
        for each in parts:
            self._of_module += [
                each.register_forward_pre_hook(self._refuse, prepend=True),
                each.register_state_dict_pre_hook(self._refuse),
                each.register_load_state_dict_pre_hook(self._refuse),
            ]
            # A conversion makes new buffers, of which nobody would know that they have no values.
            if "_apply" not in each.__dict__:
                each.__dict__["_apply"] = self._refuse
                self._unconverted.append(each)
        parameters: list[Any] = list(parameters_of(module, optimizer).values())
        for parameter in parameters:
            # Backward of an older call: of what autograd saved, views of host memory are zeros.
            if parameter.requires_grad and parameter.is_leaf and not is_sharded(parameter):
                if parameter._backward_hooks is None:
                    self._unhooked.append(parameter)
                self._of_module.append(parameter.register_hook(self._refuse))
        if optimizer is not None:
            self._of_optimizer = [
                optimizer.register_step_pre_hook(self._refuse),
                optimizer.register_state_dict_pre_hook(self._refuse),
                optimizer.register_load_state_dict_pre_hook(self._refuse),
            ]

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"it is parked: its memory was given back, and its values are in {self._where}. Call "
            "restore() of what park() returned first (or Parked.of(module).restore())"
        )

    def release_module(self) -> None:
        """Let the module be called again."""
        _remove(self._of_module)
        for parameter in self._unhooked:
            if not parameter._backward_hooks:
                parameter._backward_hooks = None  # an empty dict costs each backward a call
        self._unhooked.clear()

    def release(self) -> None:
        """Let both be used again."""
        root = self._root()
        if root is not None:
            root.__dict__.pop(ATTRIBUTE, None)
        self.release_module()
        for each in self._unconverted:
            each.__dict__.pop("_apply", None)
        self._unconverted.clear()
        _remove(self._of_optimizer)


def _remove(hooks: list[Any]) -> None:
    with contextlib.suppress(KeyError):
        do_all([each.remove for each in hooks])
    hooks.clear()
