"""The verb verify: proves on the user's own model that one run gives one curve, or names what breaks it.

Each row of its table is a real run with --exact in a process of its own, from one saved initial state, so
runs inside a backend must end in the same bits.
"""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from trainer import verify_rows
from trainer.cluster import ALONE_FLAG
from trainer.config import Config
from trainer.diff import relative
from trainer.errors import OK, UserError, last_words
from trainer.processes import forks, gpus
from trainer.storage.append import records
from trainer.verify_rows import Row

STEPS = 8
REPLICAS = 4
_WHERE = ("strategy", "backend", "devices", "mesh", "layout")
_SCHEDULING = ("run_dir", "exact", "steps", "epochs", "replicas", "log_every", "evaluate_every", "save_every", "keep")


def run(config: Config) -> int:
    """Prints findings and the table. Returns 0 if the promise holds, else 1."""
    if config.replicas and config.replicas & (config.replicas - 1):
        raise UserError("replicas", config.replicas, "is no power of two, as verify's devices are", "for example 4")
    if config.run_dir and any(config.directory().glob("*")):
        reason = "is not empty: runs that were there would only be continued, and compared with each other as they were"
        raise UserError("run_dir", config.run_dir, reason, "give a new directory, or leave it out")
    with tempfile.TemporaryDirectory(prefix="onecurve-verify-") as scratch:
        runs = Runs(config, pathlib.Path(config.run_dir or scratch))
        print(f"asking model and data alone ({config.model}, {config.dataset})", flush=True)
        probed = runs.probe()
        rows = runs.rows(probed)
        print(runs.where(rows), end="")
        print(f"\n{len(rows)} runs of {runs.steps} steps, each in a process of its own", flush=True)
        runs.start_state()
        with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            try:
                for row in pool.map(runs.run, rows):
                    print(f"  ran {row.name}", flush=True)
            finally:
                runs.end()
        by_name = {row.name: row for row in rows}
        for row in rows:
            runs.judge(row, by_name.get(row.against))
        far = [row for row in rows if not row.bits and row.deviation > row.within]
        if far:
            rows.append(runs.rounding(far, by_name[far[0].against]))
        print(verify_rows.table(rows))
        broken = [f for f in probed["findings"] if f["breaks"]]
        failed = [row for row in rows if row.verdict.startswith("FAIL")]
        for finding in broken:
            print(f"cause: {finding['part']} {finding['problem']}")
        if failed and not broken:
            print(verify_rows.likely_cause(failed))
        held = not failed and not broken
        print("\nOne run, one curve: it holds for this model and data." if held else "\nThe promise is broken.")
        return OK if held else 1


class Runs:
    """Starts runs of the user's flags on other strategies, and reads what they left.

    Args:
      config: the user's flags.
      directory: where the runs lie.
    """

    def __init__(self, config: Config, directory: pathlib.Path) -> None:
        self._config, self._directory = config, directory
        self.steps = config.steps if config.steps > 0 else STEPS
        self.replicas = config.replicas or REPLICAS
        given = [line for line in config.to_flags() if line[2:].partition("=")[0] not in (*_WHERE, *_SCHEDULING)]
        self._flags = [line for line in given if not line.startswith("--initialize_from=")]
        self._start = config.initialize_from or str(directory / "start")
        self._there = verify_rows.accelerators()
        self._first = config.backend or next(iter(self._there))
        self._running: set[subprocess.Popen[str]] = set()

    def probe(self) -> dict[str, Any]:
        """What model and data say when each is asked alone."""
        process = self._trainer("probe", f"--backend={self._first}")
        if process.returncode not in (0, 1) or not process.stdout.strip():
            raise self._mistake(process)
        *findings, last = process.stdout.strip().splitlines()
        print("\n".join(findings))
        try:
            return dict(json.loads(last))
        except json.JSONDecodeError:
            raise self._mistake(process) from None

    def _mistake(self, process: "subprocess.CompletedProcess[str]") -> UserError:
        said = last_words(process.stderr or process.stdout).removeprefix(f"--model={self._config.model}: ")
        return UserError("model", self._config.model, said, "mend it; python -m trainer with these flags says more")

    def rows(self, probed: dict[str, Any]) -> list[Row]:
        """The table's rows, not yet run."""
        batch_statistics = any(not f["breaks"] for f in probed["findings"])
        optimizer = self._config.optimizer.partition("(")[0]
        return verify_rows.rows(self.replicas, self._there, not (probed["random"] or batch_statistics), optimizer)

    def where(self, rows: Sequence[Row]) -> str:
        """What the table can't be asked for here, in lines; '' if it is whole."""
        lines = [
            f"{name} is not installed: its rows are left out"
            for name in verify_rows.BACKENDS
            if name not in self._there
        ]
        lines += [
            f"{backend} finds {self._there[backend]} of the accelerators that rows ask for: virtual CPUs stand in for "
            "them, and rows of the accelerators are compared with each other"
            for backend in sorted({row.backend for row in rows if row.on_cpu})
        ]
        return "".join(f"{line}\n" for line in lines)

    def start_state(self) -> None:
        """Saves the state that all runs start from."""
        if self._start == str(self._directory / "start"):
            place = ("--strategy=one_device", f"--backend={self._first}")
            process = self._trainer(*place, "--steps=0", f"--run_dir={self._start}")
            if process.returncode:
                raise self._mistake(process)

    def run(self, row: Row) -> Row:
        """Runs a row and reads its curve."""
        path = self._path(row)
        process = self._trainer(
            *row.flags(),
            "--exact",
            f"--replicas={row.replicas}",
            f"--steps={self.steps}",
            f"--initialize_from={self._start}",
            "--log_every=1",
            "--evaluate_every=never",
            "--save_every=1",
            f"--keep={self.steps + 1}",
            f"--run_dir={path}",
            processes=row.processes,
            on_cpu=row.on_cpu,
        )
        if process.returncode:
            said = last_words(process.stderr or process.stdout)
            row.verdict = f"FAIL: ends with exit code {process.returncode}: {said}"
            return row
        row.losses = [line["loss"] for line in records(path / "metrics.jsonl")]
        row.sha256 = json.loads((path / "summary.json").read_text())["weights_sha256"]
        return row

    def judge(self, row: Row, reference: Row | None) -> None:
        """Fills in how far a row is from its reference, and what that means."""
        if row.verdict:
            return
        if reference is None:
            row.verdict = "ok: the reference"
        elif not reference.losses:
            row.verdict = "FAIL: its reference did not run"
        else:
            row.apart = [relative(a, b) for a, b in zip(reference.losses, row.losses, strict=True)]
            if row.perturbation:
                row.verdict = "ok: what rounding alone comes to"
            elif row.bits:
                equal = row.sha256 == reference.sha256 and not row.deviation
                row.verdict = (
                    "ok: the same bits" if equal else f"FAIL: other bits; {self._first_difference(row, reference)}"
                )
            else:
                held = row.deviation <= row.within
                row.verdict = f"{'ok: within' if held else 'FAIL: not within'} {row.within:g}"

    def rounding(self, far: Sequence[Row], reference: Row) -> Row:
        """The reference once more, its weights perturbed, by which those that went too far are judged again."""
        print("  curves part: once more with weights perturbed in their last bits", flush=True)
        perturbed = self.run(verify_rows.perturbed(reference, far[0].within))
        self.judge(perturbed, reference)
        verify_rows.judge_by(perturbed, far)
        return perturbed

    def _first_difference(self, row: Row, reference: Row) -> str:
        """The first step and the first variables whose values differ, by the checkpoints' digests."""
        for step in range(1, self.steps + 1):
            manifests = [self._manifest(r, step) for r in (reference, row)]
            if None in manifests:
                continue
            one, two = (m["variables"] for m in manifests if m)
            differing = [path for path in one if one[path] != two.get(path)]
            if differing:
                own = [path for path in differing if not path.startswith("optimizer/")]
                rest = f" and {len(own) - 1} more" if len(own) > 1 else ""
                return f"other bits, first in {(own or differing)[0]}{rest}, at step {step}"
        return "another loss, but not other weights: look at the loss"

    def _manifest(self, row: Row, step: int) -> dict[str, Any] | None:
        found = (json.loads(p.read_text()) for p in (self._path(row) / "checkpoints").glob("*/manifest.json"))
        return next((manifest for manifest in found if manifest["step"] == step), None)

    def _path(self, row: Row) -> pathlib.Path:
        return self._directory / row.name.replace(",", "").replace(" ", "-")

    def _trainer(self, *arguments: str, processes: int = 1, on_cpu: bool = False) -> "subprocess.CompletedProcess[str]":
        program, place = ["trainer"], [ALONE_FLAG]
        if processes > 1:
            program, place = ["launch.local", f"--processes={processes}", "--"], []
        command = [sys.executable, "-m", *program, *arguments, *place, *self._flags]
        environment = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
        if on_cpu:
            environment |= gpus.NONE
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=forks.end_with_parent,
        ) as process:
            self._running.add(process)
            try:
                out, err = process.communicate()
                return subprocess.CompletedProcess(command, process.returncode, out, err)
            finally:
                self._running.discard(process)
                process.kill()

    def end(self) -> None:
        """Ends what is running."""
        for process in list(self._running):
            process.kill()
