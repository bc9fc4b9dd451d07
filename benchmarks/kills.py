"""Kills runs at random moments, half of them inside a save, and counts what was lost.

python -m benchmarks.kills [--kills=200]

Runs of one_device, mirrored, device_mesh, and of two processes are killed and started again by the same command,
until each has had its share. After each kill the newest checkpoint is verified, and the steps since then are counted
as lost; each run that comes to its end is compared, to the bit, with one that nothing happened to.
"""

import argparse
import dataclasses
import json
import pathlib
import random
import sys
import tempfile
import time

from benchmarks import page
from trainer import checkpoint
from trainer.config import Config
from trainer.patient import NotCaused, Patient

INTERVAL = 200  # steps between saves
BASE = Config(model="dense", steps=20_000, save_every=str(INTERVAL), log_every=str(INTERVAL), evaluate_every="2000")
RUNS = {
    "one_device": dataclasses.replace(BASE),
    "mirrored": dataclasses.replace(BASE, strategy="mirrored", devices=2, replicas=2),
    "device_mesh": dataclasses.replace(BASE, strategy="device_mesh", devices=2, replicas=2, steps=6_000),
    "two processes": dataclasses.replace(BASE, strategy="multi_worker_mirrored", replicas=2, steps=6_000),
}


@dataclasses.dataclass
class Count:
    """What became of a strategy's kills."""

    kills: int = 0
    in_saves: int = 0
    finished: int = 0
    broken: int = 0  # checkpoints that did not verify, or ends that differed
    most_lost: int = 0  # steps


def main() -> int:
    """Prints a line for each kind of run. Returns the exit code: 1 if anything was lost that should not be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    kills = parser.parse_args().kills
    print(f"{'run':<14} {'kills':>5} {'in saves':>8} {'ends':>5} {'most lost':>9} {'broken':>6}")
    broken, rows = 0, []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, config) in enumerate(RUNS.items()):
            share = kills // len(RUNS)
            count = killed(config, share, pathlib.Path(scratch, str(number)), random.Random(number))
            numbers = f"{count.kills:>5} {count.in_saves:>8} {count.finished:>5} {count.most_lost:>9} {count.broken:>6}"
            print(f"{name:<14} {numbers}", flush=True)
            bad = count.broken + (count.most_lost > INTERVAL)
            broken += bad
            ends = f"{count.finished - count.broken} of {count.finished} ends equal to the bit"
            ours, theirs = f"{ends}, at most {count.most_lost} steps lost", f"{count.kills}, {count.in_saves} in saves"
            rows.append(page.Row(f"{name}, saved every {INTERVAL} steps", "SIGKILLs", ours, theirs, "", bad, 0.0))
    page.record(
        "kills",
        "What is lost by kills at random moments?",
        "Kills are repeated until a run ends, and it is compared with one that nothing happened to",
        rows,
    )
    return int(broken > 0)


def killed(config: Config, kills: int, directory: pathlib.Path, moments: random.Random) -> Count:
    """Kills a run so often, starting it again."""
    directory.mkdir()
    whole = Patient(config, directory / "whole")
    assert whole.finish() == 0, whole.log.read_text()
    count = Count()
    while count.kills < kills:
        patient = Patient(config, directory / f"killed{count.finished}")
        while count.kills < kills and one_kill(patient, count, moments):
            pass
        if patient.finish() or patient.result() != whole.result():
            count.broken += 1
        count.finished += 1
    return count


def one_kill(patient: Patient, count: Count, moments: random.Random) -> bool:
    """Starts the run and kills it; whether it lived until then."""
    before = patient.saved()[-1:]
    patient.start()
    in_save = count.kills % 2 == 0
    try:
        patient.wait_for(lambda: patient.saved()[-1:] > before, "a checkpoint")
        time.sleep(moments.uniform(0, 0.2))
        if in_save:
            patient.wait_for(lambda: any(patient.checkpoints.glob(".0*")), "a save")
            time.sleep(moments.uniform(0, 0.01))
    except NotCaused:
        return False
    patient.kill()
    count.kills += 1
    count.in_saves += in_save
    newest = patient.checkpoints / f"{patient.saved()[-1]:08d}"
    try:
        step = checkpoint.verify(newest)["step"]
    except checkpoint.Damaged as error:
        print(error)
        count.broken += 1
        return True
    lines = (patient.checkpoints.parent / "metrics.jsonl").read_text().splitlines()
    reached = max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)
    count.most_lost = max(count.most_lost, reached - step)
    return True


if __name__ == "__main__":
    sys.exit(main())
