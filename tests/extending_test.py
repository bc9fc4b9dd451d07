"""The worked example of docs/extending.md: its very text, run as a user's strategy."""

import re

from tests.running import REPOSITORY, curve, deviation, summary, trainer


def test_a_strategy_of_one_s_own(tmp_path):
    text = (REPOSITORY / "docs" / "extending.md").read_text()
    code = re.search(r"```python\n(# my_strategy.py\n.*?)```", text, re.DOTALL)
    assert code
    (tmp_path / "my_strategy.py").write_text(code[1])
    flags = ("--backend=jax", "--model=dense", "--replicas=4", "--steps=20", "--log_every=1", "--seed=3")
    trainer("--strategy=my_strategy:create", *flags, f"--run_dir={tmp_path / 'own'}", cwd=tmp_path)
    trainer(*flags, f"--run_dir={tmp_path / 'ours'}")
    assert deviation(curve(tmp_path / "ours"), curve(tmp_path / "own")) <= 1e-6
    ours, own = (summary(tmp_path / name)["final"] for name in ("ours", "own"))
    assert own["test_accuracy"] == ours["test_accuracy"]


def test_what_is_no_strategy_is_said(tmp_path):
    (tmp_path / "empty.py").write_text("def create(config):\n    return None\n")
    ran = trainer("--strategy=empty:create", f"--run_dir={tmp_path / 'run'}", cwd=tmp_path, code=2)
    assert "returned a NoneType" in ran.stderr
