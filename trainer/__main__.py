"""python -m trainer [verb] --flag=value ...: verb and flags -> Config -> backend -> the verb's run(config).

train: starts a run, or continues it; the default
evaluate RUN, export RUN: its metrics on the test set; a SavedModel and a .keras file
checkpoints RUN, audit RUN, report RUN: what was saved; which examples were used; all of it on one page
diff RUN RUN: the first step at which two runs part, and what differed first
explain: what a run would hold, move and compute on each device, without running it
probe, verify, drill: what in a model could break the one curve; whether it does; whether a run survives faults
doctor: which process of which cluster this is, and whether its environment is in order
input: how fast the data arrive, next to what this machine can do
"""

import contextlib
import dataclasses
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags

from trainer import backend, console, run_directory
from trainer.cluster import ALONE, resolve
from trainer.command_line import WHERE, define_flags, from_flags, parse
from trainer.config import Config
from trainer.errors import OK, UserError, as_raised, out_of_memory
from trainer.peers import Peers
from trainer.preemption import SIGNALS, leave_when_told
from trainer.processes import agreement, discovery, forks, gpus
from trainer.processes.leaving import leave

TOGETHER = ("train", "evaluate")  # these are done by all processes of a cluster; others by process 0,
EACH = ("doctor", "input")  # or, as they tell of a machine, by each alone
# These only read what runs have left, or start runs: at once, and where no backend is installed.
WITHOUT_KERAS = ("verify", "doctor", "checkpoints", "diff", "drill", "report")
INTERRUPTED = 128 + signal.SIGINT  # as a shell has it
COMPARING = ("probe", "export")  # with what is computed otherwise: of other examples, by another graph


def main(argv: Sequence[str]) -> int:
    """Runs a verb. Returns the exit code."""
    config = from_flags()
    cluster = resolve(config.cluster)  # what is wrong with it is said before anything heavy is imported
    verb = argv[1]
    if verb not in TOGETHER + EACH:
        if not cluster.is_chief:
            told = f"process {cluster.index} of {cluster.size}, as {cluster.source} says: process 0 does {verb!r}"
            print(f"onecurve: {told}", file=sys.stderr)
            return OK
        cluster = ALONE
    forks.keep_apart(SIGNALS)
    if verb == "train":
        leave_when_told()
    elif verb not in TOGETHER:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: its files go, and runs it started
    if verb != "doctor":  # which tells what is wrong with these
        cluster = discovery.discover(cluster, config.patience)
        os.environ |= gpus.own(cluster, os.environ)
    if verb == "export":
        # A SavedModel is TensorFlow's format, and a checkpoint restores on either backend.
        anywhere = {name: getattr(Config, name) for name in WHERE}
        config = dataclasses.replace(config, **anywhere | {"backend": "tensorflow"})
    if verb in ("evaluate", "probe") and cluster is ALONE:
        config = backend.without_others(config)
    if verb == "explain":
        config = backend.without_accelerators(config)
    chosen = backend.choose(config)
    if verb in COMPARING:
        os.environ |= backend.in_full()
    if verb not in WITHOUT_KERAS:
        backend.prepare(chosen, config.exact)
    if verb in TOGETHER:
        backend.keep_compiled(run_directory.split(config.directory())[0])
    if verb == "diff":
        if len(argv) != 4:
            raise UserError("diff", " ".join(argv[2:]), "compares two runs", "python -m trainer diff RUN_A RUN_B")
        return int(_module(verb).run(*argv[2:]))
    if verb not in TOGETHER:
        with _told_of_memory(config):
            return int(_module(verb).run(config))
    backend.check_cluster(config, cluster)
    backend.go_past_proxies(cluster)
    if config.strategy == "parameter_server":
        if not cluster.is_chief:
            return int(_module("strategies.presence").serve(cluster, config.patience))
        cluster = ALONE  # as far as the run is concerned: its strategy knows the others
    with Peers(cluster, config.patience) as peers, _told_of_memory(config):
        peers.agree(agreement.facts(config))
        return int(_module(verb).run(config, peers))


@contextlib.contextmanager
def _told_of_memory(config: Config) -> Iterator[None]:
    """Tells the commonest of a backend's errors as a mistake in flags, for which there is a choice of others."""
    try:
        yield
    except Exception as error:
        if not (words := out_of_memory(error)):
            raise
        raise UserError(
            "global_batch",
            config.global_batch,
            f"with this model takes more memory than the devices have: {words}",
            "give more --replicas (a device computes their shares of a batch one after another), a smaller "
            "--global_batch, --precision=mixed_bfloat16 or --remat; over several devices --layout=zero1 or fsdp. What "
            "takes how much: python -m trainer explain with these flags",
        ) from error


def _module(verb: str) -> Any:
    """A verb's module, and with it the frameworks that it needs."""
    gc.disable()  # nothing that they make of themselves is garbage: a tenth of the time goes into looking for it
    with backend.quiet(), backend.alone():
        module = importlib.import_module(f"trainer.{verb}")
    gc.freeze()
    gc.enable()
    return module


def _guarded(function: Callable[[Sequence[str]], Any], argv: Sequence[str]) -> Any:
    """Calls a function of the command line; tells a user's mistake as such, and leaves with its exit code."""
    try:
        return function(argv)
    except UserError as error:
        print(f"onecurve: {error}", file=sys.stderr)
        leave(error.exit_code)


def _run(argv: Sequence[str]) -> None:
    try:
        leave(_guarded(main, argv))
    except KeyboardInterrupt:
        print("\nonecurve: stopped", file=sys.stderr)
        leave(INTERRUPTED)
    except SystemExit as exit_:  # by code of the user's: what is left of the run is not to pass for done
        traceback.print_exception(exit_)
        words = "left by sys.exit(); let an error end a run, or in a callback self.model.stop_training = True"
        print(f"onecurve: {words}", file=sys.stderr)
        leave(exit_.code if isinstance(exit_.code, int) and exit_.code else 1)
    except Exception as error:
        traceback.print_exception(as_raised(error))
        leave(1)


if __name__ == "__main__":
    console.make_lossy()
    define_flags()
    flags.adopt_module_key_flags(sys.modules["trainer.command_line"])  # --help lists them
    app.run(_run, flags_parser=lambda argv: _guarded(parse, argv))
