"""What the best checkpoint is best in: a metric of the evaluations during a run, of which more or less is better."""

from input_pipeline.dataset import Dataset
from trainer import plugins
from trainer.config import Config
from trainer.errors import UserError
from trainer.program import Program

_MODES = {"up": "max", "down": "min"}  # of what Keras says of its metrics


def judged_by(config: Config, program: Program, dataset: Dataset) -> tuple[str, str]:
    """The metric that --best names, and 'min' or 'max': as --best says, as Keras knows, or as for any loss.

    Raises:
      UserError: evaluations give no such metric, or nobody knows whether more of it is better.
    """

    def wrong(reason: str, fix: str) -> UserError:
        return UserError("best", config.best, reason, fix)

    name, _, arguments = plugins.parse(config.best, "best")
    mode = arguments.pop("mode", None)
    if arguments or mode not in ("min", "max", None):
        raise wrong("takes mode='min' or mode='max', and nothing else", f"say --best={name}")
    loss, *metrics = (f"val_{each}" for each in program.objective.results(program.objective.no_totals()))
    if name == loss:  # the default, which does no harm where nothing is evaluated
        return name, mode or "min"
    if dataset.validation is None:
        raise wrong("is never computed: there are no examples to evaluate on", "give --validation_fraction=0.1")
    if name not in metrics:
        raise wrong("is no metric of this run's evaluations", f"give one of {', '.join([loss, *metrics])}")
    if mode is None and name.endswith("_loss"):
        mode = "min"
    for metric in program.objective.metrics.metrics:
        if mode is None and name.endswith(f"_{metric.name}"):  # perhaps with the name of its output before it
            mode = _MODES.get(getattr(metric, "_direction", ""))
    if mode is None:
        raise wrong("is a metric of which Keras does not know whether more is better", f"say {name}(mode='max')")
    return name, mode
