"""What pyproject.toml cannot say: the native libraries, and that one wheel serves every Python."""

import sys
import sysconfig

from setuptools import setup

if not sys.platform.startswith("linux"):
    sys.exit(
        f"nvmeio does not run on {sys.platform}: it needs Linux (kernel AIO and O_DIRECT). "
        "Install it on a Linux machine, in a Linux container or in WSL 2."
    )

# Free-threaded builds have no stable ABI before 3.15; setuptools refuses it there.
one_wheel = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    cffi_modules=[
        f"native_shim/build_shim.py:{library}" for library in ("pump", "protection", "packed")
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if one_wheel else {},
)
