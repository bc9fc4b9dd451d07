"""What tests share: data that has to be there, and initial states that several runs start from."""

import os
import pathlib

import pytest

from tests.forks import trainer

# In CI nothing may skip: a missing tool is then a failure.
REQUIRED = os.environ.get("CI") == "true"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the devices of the tests are virtual CPUs, also where there are GPUs
FASHION_MNIST = pathlib.Path("/usr/share/datasets/fashion-mnist")  # Debian's dataset-fashion-mnist


def need(condition: bool, reason: str) -> None:
    """Skips the test where something is missing, and says what; fails in CI."""
    if not condition:
        (pytest.fail if REQUIRED else pytest.skip)(reason)


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All runs of the tests keep JAX's compiled programs in one place: many compile the same ones."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(shared / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


@pytest.fixture(scope="session")
def keras_home(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A KERAS_HOME whose cache holds fashion_mnist."""
    need(FASHION_MNIST.is_dir(), "no fashion_mnist: apt-get install dataset-fashion-mnist")
    home = tmp_path_factory.mktemp("keras")
    (home / "datasets").mkdir()
    (home / "datasets" / "fashion-mnist").symlink_to(FASHION_MNIST)
    return str(home)


@pytest.fixture(scope="session")
def initial_state(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """initial_state(flag, ...) -> a run directory with the state of step 0 under those flags."""
    made: dict[tuple[str, ...], pathlib.Path] = {}

    def make(*flags: str, **env: str) -> pathlib.Path:
        if flags not in made:
            made[flags] = tmp_path_factory.mktemp("initial") / "run"
            trainer("--steps=0", f"--run_dir={made[flags]}", *flags, **env)
        return made[flags]

    return make
