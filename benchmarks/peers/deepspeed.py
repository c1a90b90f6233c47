"""DeepSpeed's `aio_handle`, with its defaults."""

from __future__ import annotations

from typing import Any, ClassVar

from nvmeio.cli.measure import peers
from peers._tensors import TensorPeer


class DeepSpeedPeer(TensorPeer):
    """Its op is compiled at first use and cached by torch: minutes once, then seconds."""

    name: ClassVar[str] = "DeepSpeed"

    def __init__(self) -> None:
        super().__init__()
        self._module = peers.load_deepspeed()

    def make_handle(self, **options: Any) -> Any:
        return self._module.aio_handle(**options)
