"""A ZeRO-3 training with its optimizer on disk, on DeepSpeed's own op or on nvmeio's."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import socket
import sys
import time
from typing import Any, ClassVar

from nvmeio.cli.measure.peers import DEEPSPEED_BUILD, DEEPSPEED_INSTALL
from nvmeio.cli.measure.worker import PeerUnavailable

WIDTH = 1024


def start_deepspeed(on_nvmeio: bool = False) -> Any:
    """DeepSpeed in a process group of one, on the CPU, with its asynchronous I/O op built.

    Raises:
        PeerUnavailable: It, or what builds its ops, is missing; says what to install.
    """
    os.environ.update(
        DS_ACCELERATOR="cpu",
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_free_port()),
    )
    # ninja installed by pip lies beside the interpreter, which need not be on PATH.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
    except ImportError as error:
        raise PeerUnavailable(
            f"DeepSpeed cannot be imported ({error})", DEEPSPEED_INSTALL
        ) from error
    if on_nvmeio:
        importlib.import_module("nvmeio.compat.deepspeed").install()
    for tool in ("ninja", "c++"):  # for the CPU Adam; the op of its own wants libaio as well
        if shutil.which(tool) is None:
            raise PeerUnavailable(f"DeepSpeed's ops need {tool} to build", DEEPSPEED_BUILD)
    builders = importlib.import_module("deepspeed.ops.op_builder")
    if not builders.AsyncIOBuilder().is_compatible(verbose=False):
        raise PeerUnavailable("its op needs libaio's headers to build", DEEPSPEED_BUILD)
    builders.AsyncIOBuilder().load(verbose=False)
    # All-reduce between processes of one host, of which there is one here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


class Training:
    """One engine in this process; a batch of one row, so that a step is mostly the optimizer's."""

    on_nvmeio: ClassVar[bool]

    def __init__(self) -> None:
        self._deepspeed = start_deepspeed(self.on_nvmeio)
        importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder().load(verbose=False)

    def prepare(
        self, directory: str, parameters: int, group: int, pipelined: bool, aio: dict[str, Any]
    ) -> None:
        """Build model and engine, and take two steps, after which every file is written."""
        torch = self._torch = importlib.import_module("torch")
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "aio": aio,
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": group,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": directory,
                    "buffer_count": 12,
                    "pipeline_read": pipelined,
                    "pipeline_write": pipelined,
                },
            },
        }
        layers = max(1, parameters // WIDTH**2)
        with self._deepspeed.zero.Init(config_dict_or_path=config):
            model = torch.nn.Sequential(
                *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
            )
        optimizer = self._deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters())
        self._engine, *_ = self._deepspeed.initialize(
            model=model, optimizer=optimizer, config=config
        )
        self._batch = torch.randn(1, WIDTH, dtype=torch.bfloat16)
        self.steps(2)

    def steps(self, count: int) -> list[dict[str, float]]:
        """Train; seconds of each step, of the optimizer's part of it, and of all processors."""
        taken = []
        for _ in range(count):
            before = time.process_time()
            start = time.perf_counter()
            loss = self._engine(self._batch).square().mean()
            self._engine.backward(loss)
            middle = time.perf_counter()
            self._engine.step()
            end = time.perf_counter()
            cpu = time.process_time() - before
            taken.append({"step": end - start, "optimizer": end - middle, "cpu": cpu})
        return taken

    def fingerprint(self) -> str:
        """A digest of all parameters: both sides must have computed the same."""
        digest = hashlib.sha256()
        for parameter in self._engine.module.parameters():
            with self._deepspeed.zero.GatheredParameters([parameter]):
                digest.update(parameter.detach().view(self._torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def op(self) -> str:
        """The module that the handles in use come from."""
        builders = importlib.import_module("deepspeed.ops.op_builder")
        return str(builders.AsyncIOBuilder().load().aio_handle.__module__)

    def close(self) -> None:
        self._engine.destroy()


class OnItsOwn(Training):
    on_nvmeio = False


class OnNvmeio(Training):
    on_nvmeio = True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
