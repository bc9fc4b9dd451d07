"""Several processes: the one-device bits, no hang when one dies, and restarts that carry the run to its end."""

import json
import re

import pytest

from launch.local import free_ports
from tests.running import finished, launch, start, summary, trainer
from trainer.cluster import expand_nodes

STRATEGY = {"tensorflow": "multi_worker_mirrored", "jax": "device_mesh"}
FLAGS = ("--replicas=4", "--global_batch=80", "--exact", "--log_every=5", "--evaluate_every=never")


@pytest.mark.parametrize("backend", STRATEGY)
@pytest.mark.parametrize(
    "model", ["dense", pytest.param("convnet", marks=pytest.mark.long), pytest.param("mlp", marks=pytest.mark.long)]
)
def test_processes_don_t_show_in_the_bits(backend, model, tmp_path):
    """Two processes, on JAX of two devices each. Uneven data, and the evaluation's rest."""
    flags = (*FLAGS, f"--model={model}", "--steps=25")
    trainer(f"--backend={backend}", *flags, f"--run_dir={tmp_path / 'one'}")
    where = (f"--strategy={STRATEGY[backend]}", f"--devices={2 if backend == 'tensorflow' else 4}")
    out = finished(launch(*where, *flags, f"--run_dir={tmp_path / 'two'}"))
    assert summary(tmp_path / "two")["weights_sha256"] == summary(tmp_path / "one")["weights_sha256"]
    assert summary(tmp_path / "two")["final"] == summary(tmp_path / "one")["final"]
    assert not re.search(r"\[1\].* loss ", out)  # one process speaks


@pytest.mark.long
@pytest.mark.parametrize("backend", STRATEGY)
def test_four_processes(backend, tmp_path):
    flags = (*FLAGS, "--model=dense", "--steps=25")
    trainer(f"--backend={backend}", *flags, f"--run_dir={tmp_path / 'one'}")
    finished(launch(f"--strategy={STRATEGY[backend]}", *flags, f"--run_dir={tmp_path / 'four'}", processes=4))
    assert summary(tmp_path / "four")["weights_sha256"] == summary(tmp_path / "one")["weights_sha256"]


@pytest.mark.parametrize("backend", STRATEGY)
@pytest.mark.parametrize(
    ("different", "named"), [("--learning_rate=0.01", "--learning_rate"), ("--dataset=synthetic", "--dataset")]
)
def test_processes_that_differ_are_told(backend, different, named, tmp_path):
    """Both end with the user's exit code, naming process and key, before anything is trained."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    processes = []
    for index in range(2):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        flags = [f"--strategy={STRATEGY[backend]}", f"--run_dir={tmp_path / 'run'}", *([different] if index else [])]
        processes.append(start(*flags, TF_CONFIG=json.dumps(task)))
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2, err
        assert f"process 1 differs from process 0 in {named}" in err
    assert not (tmp_path / "run" / "definition.json").exists()


TASK = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "is no JSON"),
        ("{}", "no 'cluster' and 'task'"),
        ({"cluster": {"worker": []}, "task": TASK}, "names no process"),
        ({"cluster": {"worker": ["a:1", "a:1"]}, "task": TASK}, "names a:1 twice"),
        ({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}, "index 2 is not in 0 to 1"),
        ({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}, "integer 'index'"),
        ({"cluster": {"worker": ["a:1", "b"]}, "task": TASK}, "'b' is not host:port"),
        ({"cluster": {"worker": ["a:1", "localhost:1"]}, "task": TASK}, "mixes localhost:1"),
        ({"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": TASK}, "has jobs ps"),
        ({"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": TASK}, "runs in one process"),
    ],
)
def test_a_wrong_cluster_is_named(config, reason, tmp_path):
    text = config if isinstance(config, str) else json.dumps(config)
    ran = trainer(f"--run_dir={tmp_path / 'run'}", code=2, TF_CONFIG=text)
    assert re.search(re.escape(reason), ran.stderr), ran.stderr
    assert "Traceback" not in ran.stderr


def test_many_processes_need_a_cluster(tmp_path):
    ran = trainer("--strategy=multi_worker_mirrored", f"--run_dir={tmp_path / 'run'}", code=2)
    assert "launch.local" in ran.stderr


def test_slurm_s_node_lists():
    assert expand_nodes("n[1-3,07],gpu-a,h[9-10]x[1-2]") == [
        *("n1", "n2", "n3", "n07", "gpu-a", "h9x1", "h9x2", "h10x1", "h10x2"),
    ]
