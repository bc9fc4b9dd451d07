"""The house stands: imports go down a floor only, the flags are these, files stay readable."""

import ast
import pathlib

from absl import flags

from launch import local
from tests.running import REPOSITORY
from trainer.command_line import define_flags, from_flags
from trainer.config import Config

# By floor; a module's is that of its package, where it has none of its own.
FLOORS = {"input_pipeline.cgroups": 0, "input_pipeline": 1} | {
    f"trainer.{name}": floor
    for floor, names in enumerate(
        (
            """
            backend clock cluster command_line config console errors later layouts monitoring.history
            monitoring.host_memory monitoring.ledger monitoring.readable monitoring.verdict peers plugins policy
            preemption processes run_directory scaling storage.append storage.lock storage.replacing storage.synced
            storage.writer tree
            """,
            "loading",
            """
            best callbacks checkpoint constants guard models monitoring.board objective optimizers perturbation program
            prometheus recovery reporting schedules serialized step storage sums
            """,
            "assembly copies strategies",
            """
            audit checkpoints diff doctor drill evaluate evaluation explain export faults input monitoring patient
            probe report train training validation verify verify_rows
            """,
            "__main__",
        )
    )
    for name in names.split()
}
PACKAGES = {"numpy": 1, "tensorflow": 1, "keras": 2, "tensorboard": 2, "jax": 3}
FLAGS = [
    "backend",
    "best",
    "cache",
    "callbacks",
    "cluster",
    "data_dir",
    "dataset",
    "device_memory",
    "devices",
    "epochs",
    "evaluate_every",
    "exact",
    "global_batch",
    "hang_after",
    "initialize_from",
    "keep",
    "keep_every",
    "layout",
    "learning_rate",
    "log_every",
    "mesh",
    "model",
    "on_nan",
    "optimizer",
    "precision",
    "predict",
    "prefetch",
    "price_per_device_hour",
    "profile_steps",
    "remat",
    "replicas",
    "run_dir",
    "save_every",
    "schedule",
    "seed",
    "steps",
    "strategy",
    "validation_fraction",
]


def floor(module: str) -> int | None:
    while module:
        if module in FLOORS:
            return FLOORS[module]
        module = module.rpartition(".")[0]
    return None


def modules() -> list[tuple[str, pathlib.Path]]:
    paths = [p for d in ("trainer", "input_pipeline") for p in sorted((REPOSITORY / d).rglob("*.py"))]
    return [(".".join(p.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"), p) for p in paths]


def test_imports_go_down():
    seen = 0
    for module, path in modules():
        if module == "trainer":
            continue
        here = floor(module)
        assert here is not None, f"{module} has no floor"
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                there = floor(name)
                if there is None:
                    there = PACKAGES.get(name.partition(".")[0])
                seen += there is not None
                assert there is None or there <= here, f"{module} (floor {here}) imports {name} (floor {there})"
    assert seen > 80


def test_input_pipeline_knows_nothing_of_the_trainer():
    for module, path in modules():
        if module.startswith("input_pipeline"):
            assert "trainer" not in {n.partition(".")[0] for n in _imported(path)}, module


def _imported(path: pathlib.Path) -> set[str]:
    tree = ast.walk(ast.parse(path.read_text()))
    return {n.module or "" for n in tree if isinstance(n, ast.ImportFrom)}


def test_flags_are_these():
    values = flags.FlagValues()
    define_flags(values)
    assert sorted(FLAGS) == sorted(name for name in values if name in Config.__dataclass_fields__)
    assert len(FLAGS) <= 38
    for name in FLAGS:
        assert values[name].help


def test_flags_round_trip(tmp_path):
    values = flags.FlagValues()
    define_flags(values)
    given = ["--model=my.mod:build(name='a b', units=3)", "--callbacks=A(x=1)", "--callbacks=B", "--epochs=2.5"]
    values(["program", *given])
    config = from_flags(values)
    file = tmp_path / "run.flags"
    file.write_text("".join(f"{line}\n" for line in config.to_flags()))
    again = flags.FlagValues()
    define_flags(again)
    again(["program", f"--flagfile={file}"])
    assert from_flags(again) == config


def test_no_file_is_long():
    limits = {"trainer.config": 300}  # a field a flag
    for module, path in modules():
        length = len(path.read_text().splitlines())
        assert length <= limits.get(module, 250), f"{module} has {length} lines"
    body = next(
        node
        for node in ast.parse((REPOSITORY / "trainer" / "train.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "run"
    )
    assert body.end_lineno and body.end_lineno - body.lineno < 30


def test_malloc_is_asked_the_same_everywhere():
    asked = local.MALLOC["GLIBC_TUNABLES"]
    assert f"{asked}\n" in (REPOSITORY / "Makefile").read_text()
    assert f"export GLIBC_TUNABLES={asked}\n" in (REPOSITORY / "docs" / "strategies.md").read_text()
