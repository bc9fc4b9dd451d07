"""Whether the devices' copies of the variables are still one: a fault of memory or of a computation parts them."""

from trainer.assembly import Assembly
from trainer.errors import DIVERGED, UserError
from trainer.recovery import Recovery


def compare(parts: Assembly, step: int, recovery: Recovery) -> None:
    """Compares them over all processes, before they are saved.

    Raises:
      UserError: a device's variables are not those of the first, or a process has begun with others.
    """
    gathered = parts.peers.gather(parts.strategy.checksums())
    others = [str(p) for p, of_process in enumerate(gathered) if of_process[:1] != gathered[0][:1]]
    if others and not step and all(len(set(of_process)) == 1 for of_process in gathered):
        raise UserError(
            "model",
            parts.config.model,
            f"begins with other variables in process {', '.join(others)} than in process 0",
            "have build() draw them by Keras's initializers, which --seed seeds, and read the same files everywhere",
        )
    numbers = [number for of_process in gathered for number in of_process]
    names = [f"device {d} of process {p}" for p, of_process in enumerate(gathered) for d in range(len(of_process))]
    differing = [name for name, number in zip(names, numbers, strict=True) if number != numbers[0]]
    if differing:
        theirs = "see whether a callback of yours assigns the same in each process, or " * bool(parts.config.callbacks)
        raise UserError(
            "strategy",
            parts.config.strategy,
            f"after step {step} the variables on {', '.join(differing)} are not those on {names[0]}, though all were "
            f"given the same; {recovery.last_good}",
            f"the same command goes on from there; if it comes again, {theirs}test that machine's memory and devices",
            DIVERGED,
        )
