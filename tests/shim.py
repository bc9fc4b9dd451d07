"""Builds tests/shim.c, which stands between a program and the system."""

import functools
import pathlib
import shutil
import subprocess
import tempfile

from tests.conftest import need
from tests.running import REPOSITORY


@functools.cache
def shim() -> str:
    """The path of the library, for LD_PRELOAD; skips the test where there is no compiler."""
    need(bool(shutil.which("cc")), "no C compiler: apt-get install gcc libc6-dev")
    built = pathlib.Path(tempfile.mkdtemp(), "shim.so")
    source = REPOSITORY / "tests" / "shim.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True)
    return str(built)
