"""The verb evaluate: loss and metrics of a saved run, each example counted once."""

import pathlib

from trainer import checkpoint
from trainer.assembly import Assembly, assemble
from trainer.config import Config
from trainer.errors import OK, UserError
from trainer.evaluation import evaluate
from trainer.monitoring.readable import words
from trainer.peers import Peers
from trainer.run_directory import RunDirectory
from trainer.storage import saving
from trainer.storage.append import encoded


def run(config: Config, peers: Peers) -> int:
    """Prints the metrics of the run's newest checkpoint, or of the one that --run_dir names. Returns the exit code."""
    parts, path = restore(config, peers)
    dataset, definition = parts.dataset, RunDirectory(config).definition() or {}
    sources = {"val_": dataset.validation, "test_": dataset.evaluation}
    if dataset.validation is dataset.evaluation:
        del sources["val_"]
    if dataset.facts()["train"] != definition["data"]["train"]:  # of other data, nothing was trained on
        sources["train_"] = dataset.train
    results: dict[str, float] = {}
    with parts.program.averaged():
        for prefix, source in sources.items():
            if source is not None:
                results |= evaluate(parts, source, prefix)
    if not results:
        fix = "give another --dataset, or let this one have `evaluation`, too"
        raise UserError("dataset", config.dataset, "has no examples but those that are trained on", fix)
    if peers.cluster.is_chief:
        print(f"{path} on {parts.strategy.description}")
        if "train_" in sources:
            print(f"train_ is of {len(dataset.train):,} examples that the data have to train on: the run had others")
        print(words(results))
        print(encoded({"step": int(path.name), **results}))
    parts.strategy.close(OK)
    return OK


def restore(config: Config, peers: Peers) -> tuple[Assembly, pathlib.Path]:
    """The parts of a saved run with its newest good checkpoint, or the one that --run_dir names, and where that is."""
    directory = RunDirectory(config)  # not entered: reading needs no ownership
    definition = directory.definition()
    if definition is None:
        raise UserError("run_dir", directory.path, "holds no run (no definition.json)", "give the directory of a run")
    parts = assemble(config, peers, int(definition["flags"]["replicas"]), training=False)
    names, others = definition.get("class_names"), parts.dataset.class_names
    if names and others and names != [*others]:
        reason = f"has the classes {', '.join(others)}, and the run was trained on {', '.join(names)}"
        raise UserError("dataset", config.dataset, reason, "give data of the run's classes, a folder for each, say")
    directory.check({"variables": parts.program.signature(), "architecture": parts.program.architecture()})
    # Now: a run that goes on removes old ones.
    found = checkpoint.newest(directory.checkpoints, only=directory.checkpoint)
    good = next(((path, manifest) for path, manifest in found if isinstance(manifest, dict)), None)
    if good is None:
        given = directory.checkpoint or directory.path
        raise UserError(
            "run_dir", given, "holds no good checkpoint", "see python -m trainer checkpoints for those that are"
        )
    path, manifest = good
    peers.agree({"the newest checkpoint": f"{path.name}, digest {checkpoint.digest(manifest)[:12]}"})
    try:
        saving.read(path, parts.program, manifest)
    except checkpoint.Damaged as error:
        fix = "give another checkpoint of the run; or try again, where it goes on, and has removed this one"
        raise UserError("run_dir", path, f"can't be read: {error}", fix) from None
    now = {"flags": parts.config.definition(), "data": parts.dataset.facts()}
    if now == {name: definition[name] for name in now}:  # on other data, the loss is another
        saving.check_probe(parts.program, path, manifest["probe"], parts.probe)
    return parts, path
