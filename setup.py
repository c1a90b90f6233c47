"""What pyproject.toml cannot say: the compiled shim, and that one wheel serves every Python."""

import sysconfig

from setuptools import setup

# Free-threaded builds have no stable ABI before 3.15; setuptools refuses it there.
one_wheel = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    cffi_modules=["native_shim/build_shim.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if one_wheel else {},
)
