"""One run over many machines: stopped in mid-epoch, it goes on with other devices, processes, backends."""

import pytest

from tests.forks import trainer
from tests.running import curve, finished, launch, lines, summary

FLAGS = ("--model=dense", "--global_batch=80", "--replicas=4", "--exact", "--log_every=1", "--evaluate_every=never")
LEGS = {  # where, over how many processes
    "tensorflow": [
        (("--strategy=mirrored", "--devices=4"), 1),
        (("--strategy=multi_worker_mirrored",), 2),
        (("--strategy=mirrored", "--devices=2"), 1),
        (("--strategy=one_device", "--backend=tensorflow"), 1),
    ],
    "jax": [
        (("--strategy=device_mesh", "--devices=4"), 1),
        (("--strategy=device_mesh",), 2),
        (("--strategy=device_mesh", "--devices=2"), 1),
        (("--strategy=one_device", "--backend=jax"), 1),
    ],
}
LEGS["both"] = [*LEGS["tensorflow"][:2], *LEGS["jax"][2:]]
STOPS = (7, 23, 41, 60)  # an epoch has 17.96 steps


@pytest.mark.parametrize(
    "legs", ["both", *(pytest.param(one, marks=pytest.mark.long) for one in ("tensorflow", "jax"))]
)
def test_a_run_goes_from_one_to_another(legs, tmp_path):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    # Backends draw other masks in dropout.
    flags = FLAGS if legs != "both" else (*FLAGS, "--model=dense(dropout=0.0)")
    first = "jax" if legs == "jax" else "tensorflow"
    trainer(f"--backend={first}", *flags, f"--steps={STOPS[-1]}", f"--run_dir={whole}")
    for (where, processes), stop in zip(LEGS[legs], STOPS, strict=True):
        now = (*where, *flags, f"--steps={stop}", f"--run_dir={moved}")
        finished(launch(*now, processes=processes)) if processes > 1 else trainer(*now)
        assert summary(moved)["step"] == stop
    assert [line["ids"] for line in lines(moved)] == [line["ids"] for line in lines(whole)]
    assert "each example exactly once" in trainer("audit", f"--run_dir={moved}").stdout
    if legs == "both":
        assert curve(moved) == pytest.approx(curve(whole), rel=1e-6)
    else:
        assert curve(moved) == curve(whole)
        assert summary(moved)["weights_sha256"] == summary(whole)["weights_sha256"]
