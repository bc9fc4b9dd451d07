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
    if mode is None:
        # Its output's name may stand before a metric's; of "my_accuracy" and "accuracy" the longer one is meant.
        fitting = [each for each in program.objective.metrics.metrics if name.endswith(f"_{each.name}")]
        longest = max((len(each.name) for each in fitting), default=0)
        modes = {_MODES.get(getattr(each, "_direction", "")) for each in fitting if len(each.name) == longest}
        mode = modes.pop() if len(modes) == 1 else None
    if mode is None:
        fix = f"say {name}(mode='max'), or mode='min'"
        raise wrong("is a metric of which Keras does not know whether more is better", fix)
    return name, mode
