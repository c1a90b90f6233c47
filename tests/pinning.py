"""Memory that the kernel pins for somebody else: buffers registered with an io_uring."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import pytest
import torch
from support import spin_until

from nvmeio._memory import system

# Source: man 2 io_uring_setup, man 2 io_uring_register; numbers of Linux on all 64-bit machines.
_SETUP, _REGISTER = 425, 427
_REGISTER_BUFFERS = 0
_PARAMS_BYTES = 120

_libc = ctypes.CDLL(None, use_errno=True)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@contextlib.contextmanager
def pinned(tensor: torch.Tensor) -> Iterator[None]:
    """Pin a tensor's memory while the body runs; skips the test where io_uring is forbidden."""
    params = ctypes.create_string_buffer(_PARAMS_BYTES)
    fd = _libc.syscall(ctypes.c_long(_SETUP), 1, params)
    if fd < 0:
        pytest.skip(f"io_uring: {os.strerror(ctypes.get_errno())}")
    try:
        vector = _Iovec(tensor.data_ptr(), tensor.nbytes)
        register = ctypes.c_long(_REGISTER)
        if _libc.syscall(register, fd, _REGISTER_BUFFERS, ctypes.byref(vector), 1) < 0:
            pytest.skip(f"pinning memory: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        os.close(fd)
        spin_until(lambda: not system.pinned_bytes())  # the kernel ends a ring behind its close
