"""The verb train: the whole run on one screen."""

from trainer.assembly import assemble
from trainer.config import Config
from trainer.errors import OK, PREEMPTED
from trainer.monitoring import history, printout
from trainer.monitoring.ledger import OTHERS_DATA, Ledger
from trainer.peers import Peers
from trainer.preemption import until_told
from trainer.run_directory import RunDirectory
from trainer.storage.append import encoded
from trainer.storage.replacing import replace
from trainer.training import Training


def run(config: Config, peers: Peers) -> int:
    """Trains from wherever the run stands to its last step. Returns the exit code."""
    ledger = Ledger(peers.doing)
    with RunDirectory(config, peers.cluster.is_chief) as directory:
        with ledger("build"):
            parts = assemble(config, peers, directory.check_flags())  # where, what
            directory.admit(printout.facts(parts))
            training = Training(parts, directory, ledger)  # since when, how it is going
        pipeline = training.pipeline
        if training.owed:
            training.do_what_is_due()
        blocks = parts.blocks(pipeline, training.step // pipeline.block)
        blocks = until_told(blocks, peers, training.is_told, lambda: ledger(OTHERS_DATA))
        for first in range(training.step // pipeline.block * pipeline.block, parts.steps, pipeline.block):
            if training.ended:
                break
            with ledger("data"):
                block = next(blocks, None)
            if block is None:  # it was told to stop while it waited
                training.save({})
                break
            for end in training.clock.chunks(training.step, first + pipeline.block):
                training.advance(block, training.step - first, end)
                training.do_what_is_due()
                if training.ended:
                    break
        code = _finish(training, directory, ledger)
        parts.strategy.close(code)
        return code


def _finish(training: Training, directory: RunDirectory, ledger: Ledger) -> int:
    """Ends the run or, when it was told to stop, this start of it. Returns the exit code."""
    parts, reporting = training.parts, training.reporting
    final = training.final_metrics()
    if final is None:
        parts.peers.gather(0)  # the chief has saved
        reporting.say(printout.preempted(parts, training.told, training.step))
        training.history.write(training.step, "told to stop")
        reporting.close()
        return PREEMPTED
    training.history.write(training.step, "done")
    whole = history.account(history.read(directory.starts)) if parts.peers.cluster.is_chief else None
    seconds = ledger.table()
    summary = {
        "status": "stopped by a callback" if training.stopped else "done",
        "step": training.step,
        "final": final,
        "best": training.recovery.best,
        "weights_sha256": parts.program.weights_sha256(),
        "seconds": seconds,
        "starts": whole.starts if whole else 0,
        "seconds_of_all_starts": whole.seconds if whole else {},
        "device_hours": whole.device_hours if whole else 0.0,
        "goodput": whole.goodput if whole else 0.0,
        **training.utilization.of(training.step, seconds.get("step", 0.0)),
        "bottleneck": training.health.verdict(seconds).words,
    }
    parts.peers.gather(0)  # nobody leaves while another still computes
    if not parts.peers.cluster.is_chief:
        return OK
    replace(directory.summary, encoded(summary, indent=1))
    reporting.finish(summary)
    reporting.say(printout.ending(parts, directory.path, summary))
    return OK
