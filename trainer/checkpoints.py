"""The verb checkpoints: what a run has saved, whether it is whole, and how far it moved in between."""

import json
import pathlib
import time
from typing import Any

import numpy as np

from trainer import checkpoint
from trainer.config import Config
from trainer.errors import OK, UserError
from trainer.monitoring.readable import duration, size
from trainer.run_directory import RunDirectory


def run(config: Config) -> int:
    """Prints a line for each checkpoint. Returns the exit code: 1 if one is damaged."""
    directory = RunDirectory(config)
    found = list(checkpoint.newest(directory.checkpoints))[::-1]
    if not found:
        raise UserError("run_dir", directory.path, "holds no checkpoint", "give the directory of a run")
    before: dict[str, np.ndarray] = {}
    best = next((m["best"].get("step") for _, m in reversed(found) if isinstance(m, dict)), None)
    print(f"{'step':>10}  {'age':>8}  {'size':>8}  {'moved by':>9}  verdict")
    for path, manifest in found:
        try:
            age, held = duration(time.time() - path.stat().st_mtime), size(_bytes(path))
            now = checkpoint.arrays(path, manifest) if isinstance(manifest, dict) else {}
        except OSError:
            if path.exists():
                raise
            continue  # a run that goes on has removed it since
        if not isinstance(manifest, dict):
            print(f"{path.name:>10}  {age:>8}  {held:>8}  {'-':>9}  DAMAGED: {manifest}")
            continue
        moved = f"{change(before, now):.1e}" if before else "-"
        print(f"{manifest['step']:>10}  {age:>8}  {held:>8}  {moved:>9}  {_words(manifest, best)}")
        before = now
    for aside in sorted(directory.checkpoints.glob("damaged-*")):
        print(f"set aside: {aside}")
    print("\nmoved by: length of the change of all weights since the one above, over their length")
    return int(not all(isinstance(manifest, dict) for _, manifest in found)) or OK


def change(before: dict[str, np.ndarray], now: dict[str, np.ndarray]) -> float:
    """Length of the difference of the layers' variables, relative to their length."""
    names = [k for k in now if k in before and not k.startswith("optimizer") and now[k].dtype.kind == "f"]
    difference = sum(float(np.sum(np.square(now[k].astype(np.float64) - before[k]))) for k in names)
    length = sum(float(np.sum(np.square(before[k].astype(np.float64)))) for k in names)
    return float(np.sqrt(difference / length)) if length else 0.0


def _bytes(path: pathlib.Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _words(manifest: dict[str, Any], best: int | None) -> str:
    metrics = json.dumps({k: round(v, 4) for k, v in manifest["metrics"].items()}) if manifest["metrics"] else ""
    return " ".join(filter(None, ["whole", "best" if manifest["step"] == best else "", metrics]))
