"""The verb drill: does the user's own run survive? Causes real faults, and compares the end with an undisturbed run.

Each row starts the run anew in a directory of its own, causes its fault, gives the same command again as often as need
be, and asks for the very weights and the very log of the run that nothing happened to. GPUs take deterministic
algorithms for it: of others, no two runs have the same bits, whatever happens to them.
"""

import dataclasses
import os
import pathlib
import tempfile

from trainer import backend, verify_rows
from trainer.config import Config
from trainer.errors import OK, UserError
from trainer.faults import FAULTS
from trainer.patient import NotCaused, Patient

FAILED = 1
STEPS, SAVES = 120, 12  # of a run in the drill, unless --steps says otherwise


def run(config: Config) -> int:
    """Prints a table of faults and what came of them. Returns the exit code."""
    if config.strategy == "parameter_server":
        reason = "is asynchronous: no two of its runs end alike, so there is nothing to compare one with"
        raise UserError("strategy", config.strategy, reason, "drill the model under another one")
    steps = config.steps if config.steps > 0 else STEPS
    every = max(1, steps // SAVES)
    if any(verify_rows.accelerators().values()):
        os.environ |= backend.deterministic()
        print("every start takes deterministic algorithms on this machine's accelerators, as with --exact")
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        config = dataclasses.replace(
            config, steps=steps, epochs=0.0, save_every=str(every), log_every=str(every), keep=max(3, config.keep)
        )
        print(f"{steps} steps, saved every {every}: {' '.join(config.to_flags())}\n", flush=True)
        whole = Patient(config, directory / "undisturbed")
        try:
            code = whole.finish()
        finally:
            whole.kill()
        if code:
            print(whole.log.read_text()[-2000:])
            raise UserError("drill", "", f"the undisturbed run ended with {code}", "mend that first")
        hash_, log = whole.result()
        print(f"{'fault':<42} {'what was done':<52} {'starts':>6}  {'weights':<12}  verdict")
        print(f"{'none':<42} {'':<52} {whole.starts:>6}  {hash_[:12]}  the reference")
        failed = 0
        for name, fault in FAULTS.items():
            patient = Patient(config, directory / name.replace(" ", "-"))
            verdict, done, found = "ok", "", "-"
            try:
                done = fault(patient)
                code = patient.finish()
                found, found_log = patient.result() if not code else ("-", [])
                if code:
                    verdict = f"FAILED: ended with {code}: {patient.last_words()}"
                elif found != hash_:
                    verdict = "FAILED: other weights"
                elif found_log != log:
                    verdict = "FAILED: another log"
            except NotCaused as error:
                verdict = f"not caused: {error}"
            finally:
                patient.kill()
            failed += verdict.startswith("FAILED")
            print(f"{name:<42} {done:<52} {patient.starts:>6}  {found[:12]:<12}  {verdict}", flush=True)
    print(f"\n{failed} of {len(FAULTS)} failed" if failed else "\nNothing was lost.")
    return FAILED if failed else OK
