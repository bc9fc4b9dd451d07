"""What an optimizer of the user's own draws, such as noise on gradients, follows from its seeds and the step alone.

Keras keeps the states of its seeds among no variables: on JAX the noise of all steps would be one, and on TensorFlow a
start would begin it anew. It is no logical replica's: each device updates its copy of a variable by the same numbers.
"""

import itertools
from typing import Any, NoReturn

import keras
from keras import ops

from trainer.errors import UserError
from trainer.objective.patched import patched
from trainer.objective.purity import numbers, unkeyed
from trainer.objective.randomness import GOLDEN, Generator, drawn_from


def key(
    optimizer: keras.optimizers.Optimizer,
    iterations: keras.Variable,
    seed: int,
    generator: Generator,
    whose: tuple[str, str],
) -> None:
    """Has update_step() draw by keys: of the run's seed and the optimizer's, the variable that it updates, the step.

    Args:
      optimizer: built.
      iterations: the number of the step.
      seed: the run's, or another multiple of GOLDEN after it for each variable of the optimizers before this one.
      generator: what random numbers are made from.
      whose: the flag that the optimizer comes from, and its value, for errors.
    """
    kind, seeds = type(optimizer), [v for v in vars(optimizer).values() if isinstance(v, keras.random.SeedGenerator)]
    fix = "give it self.seed = keras.random.SeedGenerator(), and draw in update_step() by keras.random with that seed"
    if seeds and not kind.apply.__module__.startswith("keras."):
        reason = f"has a seed in {kind.__name__}, of which apply() is its own: it would draw the same at each step"
        raise UserError(*whose, reason, fix)
    if kind.update_step.__module__.startswith("keras."):
        return  # none of Keras's draws
    update = optimizer.update_step

    def refuse() -> NoReturn:
        reason = f"draws random numbers in update_step() of {kind.__name__} from no seed of the optimizer's"
        raise UserError(*whose, f"{reason}: they would be the same at each step, or others on each device", fix)

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        numbered = itertools.count(seed + optimizer._get_variable_index(variable) * GOLDEN)

        def following(of: keras.random.SeedGenerator, ordered: bool = True) -> Any:
            number, step = next(numbered) + (of._initial_seed or 0), ops.cast(iterations.value, of.state.dtype)
            return ops.stack([ops.convert_to_tensor(number % 2**32, of.state.dtype), step])

        before, keyed = numbers(optimizer), patched(keras.random.SeedGenerator, "next", following)
        with keyed, unkeyed(refuse), drawn_from(generator):
            update(gradient, variable, learning_rate)
        if changed := [name for name, value in numbers(optimizer).items() if before.get(name, value) != value]:
            raise UserError(
                *whose,
                f"changes {changed[0]!r} of {kind.__name__} in update_step(), in Python: a compiled step does so once",
                "compute it from self.iterations, or keep it in a variable, made in build() by self.add_variable()",
            )

    optimizer.update_step = update_step
