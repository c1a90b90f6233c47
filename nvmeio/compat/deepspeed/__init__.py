"""DeepSpeed's I/O interface (DeepNVMe, 0.19.8) on nvmeio: the same calls, another engine.

Code written for DeepSpeed changes its import line, ``from nvmeio.compat.deepspeed import
AsyncIOBuilder``; DeepSpeed itself and whatever imports it are left alone and told to use nvmeio by
`install`, or from outside by ``nvmeio deepspeed -- python train.py``.

Reading order: `handles` (the verbs, and page-locked memory), `installing` (the builders, and into
DeepSpeed), `startup` (into a whole process tree). docs/deepspeed.md has a table of the intended
differences.
"""

from nvmeio.compat.deepspeed.handles import aio_handle as aio_handle
from nvmeio.compat.deepspeed.handles import aio_read as aio_read
from nvmeio.compat.deepspeed.handles import aio_write as aio_write
from nvmeio.compat.deepspeed.handles import cast_to_byte_tensor as cast_to_byte_tensor
from nvmeio.compat.deepspeed.handles import deepspeed_memcpy as deepspeed_memcpy
from nvmeio.compat.deepspeed.handles import gds_handle as gds_handle
from nvmeio.compat.deepspeed.handles import pin_handle as pin_handle
from nvmeio.compat.deepspeed.installing import AsyncIOBuilder as AsyncIOBuilder
from nvmeio.compat.deepspeed.installing import GDSBuilder as GDSBuilder
from nvmeio.compat.deepspeed.installing import PinMemoryBuilder as PinMemoryBuilder
from nvmeio.compat.deepspeed.installing import UtilsBuilder as UtilsBuilder
from nvmeio.compat.deepspeed.installing import install as install
from nvmeio.compat.deepspeed.installing import installed as installed

__all__ = [
    "AsyncIOBuilder",
    "GDSBuilder",
    "PinMemoryBuilder",
    "UtilsBuilder",
    "aio_handle",
    "aio_read",
    "aio_write",
    "cast_to_byte_tensor",
    "deepspeed_memcpy",
    "gds_handle",
    "install",
    "installed",
    "pin_handle",
]
