"""What call() may not do: a step is a pure function, from the variables that it is given to their values afterwards."""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import keras.src.random.seed_generator as keras_seeds
import numpy as np
from keras.src import backend as keras_backend
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.trainers.compile_utils import CompileMetrics

from trainer.errors import UserError
from trainer.objective.patched import patched
from trainer.objective.randomness import is_seed
from trainer.objective.trackers import Metrics, trackers

_LOOPS = ("scan", "associative_scan", "map", "while_loop", "fori_loop")  # of keras.ops


class Noted(NamedTuple):
    """What was traced so far did with variables.

    Attributes:
      used: those to be trained that it read. A metric's may be taken out: it may judge by a model that stays as it is.
      changed: those that it assigned to.
      outside: those that are not trained, and no model's or metric's, that it read; known at the end.
      values: what it assigned, by id of the variable, where a step is traced.
    """

    used: list[keras.Variable]
    changed: list[keras.Variable]
    outside: list[keras.Variable]
    values: dict[int, Any]


@contextlib.contextmanager
def pure(flag: str, model: keras.Model, metrics: CompileMetrics | Metrics | None = None) -> Iterator[Noted]:
    """Within it a model, its losses and metrics are traced; afterwards, what a step would lose of them is refused.

    Args:
      flag: which --model it is, for errors.
      model, metrics: those whose variables they may use; perhaps made meanwhile. Of the model, trackers' too.

    Raises:
      UserError: a variable that is none of the model's has changed, such as a metric's, or was used though it is to be
        trained; or random numbers were drawn from what is no layer's seed: of Keras's own, or of Python's or numpy's, a
        compiled step would draw the same for ever; the state of TensorFlow's is in no checkpoint; or they were drawn,
        or a variable changed, in the turns of a loop, which are traced once; or devices of tf.distribute were asked
        for their part.
    """
    add_update, add_loss = keras.StatelessScope.add_update, keras.StatelessScope.add_loss
    get_current_value = keras.StatelessScope.get_current_value
    noted = Noted([], [], [], {})  # for Keras would wrap what is raised inside a layer
    drawn: list[bool] = []
    asked: list[str] = []
    loops: list[tuple[str, Any]] = []  # that what is traced is in, and the scope around each
    repeated: list[str] = []

    def refusing_turns(scope: Any, what: str) -> None:
        if inside := [loop for loop, around in loops if around is scope]:
            repeated.append(f"{what} in a turn of {inside[-1]}")
            raise RuntimeError("a loop's turns are traced once")  # what comes of them is of no use after it

    def adding(scope: Any, loss: Any) -> None:
        refusing_turns(scope, "adds a loss by add_loss()")
        add_loss(scope, loss)

    def noting(scope: Any, update: tuple[Any, Any]) -> None:
        variable, value = update
        refusing_turns(scope, "draws random numbers" if is_seed(variable) else f"changes {variable.path}")
        add_update(scope, update)
        noted.changed.append(variable)
        if isinstance(metrics, Metrics):
            noted.values[id(variable)] = value

    def reading(scope: Any, variable: Any) -> Any:
        (noted.used if variable.trainable else noted.outside).append(variable)
        return get_current_value(scope, variable)

    def asking(name: str) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            asked.append(name)
            raise RuntimeError("a step is one logical replica's")  # what follows would wait for other devices' threads

        return ask

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(keras.StatelessScope, "add_update", noting))
        stack.enter_context(patched(keras.StatelessScope, "add_loss", adding))
        stack.enter_context(patched(keras.StatelessScope, "get_current_value", reading))
        stack.enter_context(unkeyed(lambda: drawn.append(True)))
        if keras.config.backend() == "tensorflow":
            for name in ("merge_call", "all_reduce", "all_gather"):
                stack.enter_context(patched(_context_of_device(), name, asking(name)))
            stack.enter_context(_inlined())
        stack.enter_context(_looping(loops))
        try:
            yield noted
        except Exception:
            if not (asked or repeated):
                raise
    if asked:
        raise UserError(
            "model",
            flag,
            f"calls {asked[0]}() of tf.distribute's replicas in call() or a loss: the curve would depend on the "
            "devices, and here it follows from the logical replicas alone",
            "leave it out: with --replicas=1 all examples of a step are in one call",
        )
    if repeated:
        raise UserError(
            "model",
            flag,
            f"{repeated[0]}, and a loop's turns are traced once: each would draw the same, and what is assigned or "
            "added is lost",
            "draw before the loop, with a dim for its turns, and give each turn its part; what they change, or the "
            "loss, let the loop carry" + (" (an RNN unrolls by unroll=True)" if repeated[0].endswith("rnn") else ""),
        )
    of_metrics = [v for each in (metrics, *(tracker for _, tracker in trackers(model))) if each for v in each.variables]
    known = {id(v) for v in (*model.trainable_variables, *model.non_trainable_variables, *of_metrics)}
    hidden, strays, noted.outside[:] = ([v for v in some if id(v) not in known] for some in noted[:3])
    if drawn or any(map(is_seed, strays)):
        raise UserError(
            "model",
            flag,
            "draws random numbers in call(), a loss or a metric from no layer's seed: they would be the same at each "
            "step, or others after each start",
            "give a layer an attribute, self.seed = keras.random.SeedGenerator(), and draw there by keras.random with "
            "seed=self.seed",
        )
    if strays:
        raise UserError(
            "model",
            flag,
            f"changes {strays[0].path} in call() or a loss, which is no variable of a layer's: what it holds would be "
            "lost",
            "let a metric that it updates be one of Keras's, such as keras.metrics.Mean(), and an attribute of the "
            "model or a layer; other state is for add_weight()",
        )
    if hidden:
        raise UserError(
            "model",
            flag,
            f"uses {hidden[0].path} in call() or a loss, which is no variable of the model's: it would not be trained, "
            "nor saved",
            "make it, or the layer that has it, an attribute of the model or a layer: a Lambda's, or another object's, "
            "is not seen; what is to stay as it is, is made with trainable=False",
        )


@contextlib.contextmanager
def unkeyed(note: Callable[[], None]) -> Iterator[None]:
    """Within it, `note` is called when this thread draws random numbers from a state that is no layer's.

    Of Keras's own state, or of Python's or numpy's, a compiled step would draw the same for ever; that of TensorFlow's
    is in no checkpoint.
    """

    def of_keras() -> keras.random.SeedGenerator:  # refused by Keras on JAX alone
        note()
        return keras.random.SeedGenerator()

    def of_tensorflow(seed: int | None) -> tuple[int, int]:
        note()
        return 0, 1

    def of_host(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawing(*args: Any, **kwargs: Any) -> Any:
            note()
            return draw(*args, **kwargs)

        return drawing

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(keras_seeds, "global_seed_generator", of_keras))
        if keras.config.backend() == "tensorflow":  # what its stateful operations ask
            import tensorflow.python.framework.random_seed as tf_seeds

            stack.enter_context(patched(tf_seeds, "get_seed", of_tensorflow))
        for module, generator in ((random, random._inst), (np.random, np.random.mtrand._rand)):
            for name, draw in list(vars(module).items()):
                if getattr(draw, "__self__", None) is generator:
                    stack.enter_context(patched(module, name, of_host(draw)))
        yield


@contextlib.contextmanager
def _looping(loops: list[tuple[str, Any]]) -> Iterator[None]:
    """Within it, `loops` has those of Keras's loops whose turns are being traced, innermost last."""

    def turning(owner: Any, name: str) -> contextlib.AbstractContextManager[Any]:
        loop = getattr(owner, name)

        def within(function: Any) -> Any:
            @functools.wraps(function)
            def turn(*args: Any, **kwargs: Any) -> Any:
                loops.append((name, get_stateless_scope()))
                try:
                    return function(*args, **kwargs)
                finally:
                    loops.pop()

            return turn

        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "rnn" and kwargs.get("unroll"):
                return loop(*args, **kwargs)
            args = tuple(within(each) if callable(each) else each for each in args)
            return loop(*args, **{k: within(each) if callable(each) else each for k, each in kwargs.items()})

        return patched(owner, name, run)

    with contextlib.ExitStack() as stack:
        for name in _LOOPS:
            stack.enter_context(turning(keras_backend.core, name))
        stack.enter_context(turning(keras_backend, "rnn"))
        yield


def numbers(thing: Any) -> dict[str, int | float]:
    """Its attributes that are Python's numbers, by name: a step changes them once, when it is traced."""
    return {name: value for name, value in vars(thing).items() if type(value) in (int, float)}


def _inlined() -> contextlib.AbstractContextManager[Any]:
    """Within it a tf.function is part of what calls it: by itself it would keep one trace's variables for the next."""
    import tensorflow as tf
    from tensorflow.python.autograph.core import ag_ctx
    from tensorflow.python.eager.polymorphic_function.autograph_util import py_func_from_autograph

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        python = function.python_function
        if not function._autograph:
            return python(*args, **kwargs)
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED):  # around it AutoGraph is off
            return py_func_from_autograph(python)(*args, **kwargs)

    return patched(type(tf.function(lambda: None)), "__call__", call)


def _context_of_device() -> type:
    """The class of what tf.distribute tells a device of itself."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    return type(context) if context else tf.distribute.ReplicaContext
