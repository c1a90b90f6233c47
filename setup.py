"""What pyproject.toml cannot say: the compiled shim, and that one wheel serves every Python."""

from setuptools import setup

setup(
    cffi_modules=["native_shim/build_shim.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
