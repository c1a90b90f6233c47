"""The faulty kernel: compiled once, a copy for every test."""

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from faults._exit_scripts import PRELUDE
from faults._support import FaultyKernel, finish, start_python

SOURCE = Path(__file__).parents[1] / "fakes" / "faulty_libaio.c"


@pytest.fixture(scope="session")
def faulty_library(tmp_path_factory):
    """fakes/faulty_libaio.c, compiled."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc) to build the faulty libaio with")
    library = tmp_path_factory.mktemp("fakes") / "faulty_libaio.so"
    flags = ("-std=c11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread")
    subprocess.run([compiler, *flags, "-o", library, SOURCE], check=True, timeout=300)
    return library


@pytest.fixture
def faulty(faulty_library, tmp_path):
    """A kernel of this test's own: dlopen gives a copied file its own variables."""
    return FaultyKernel(Path(shutil.copy(faulty_library, tmp_path / "libaio-faulty.so")))


@pytest.fixture
def start_script(faulty_library, tmp_path):
    """Starts a script behind the prelude."""
    started = []

    def start(code, engine="libaio", **options):
        code = PRELUDE + textwrap.dedent(code)
        started.append(start_python(code, engine, faulty_library, tmp_path, **options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def script(start_script):
    """Runs a script behind the prelude, to its end."""
    return lambda code, **options: finish(start_script(code, **options), 300)
