"""Each mistake of a user gives one error that names the flag, its value, the reason and the fix; exit code 2."""

import json
import re
import shutil
import sys
import textwrap

import pytest

from tests.forks import trainer
from tests.running import summary
from trainer import backend
from trainer.errors import UserError

MISSPELT = ("mlp(units=os.getpid())", "mlp(3)", "mlp(units=1, units=2)", "mlp(units=1)(units=2)", "mlp(**{'units': 1})")
MODULE = """
import keras
import numpy as np
from input_pipeline.source import Arrays

IMAGES = np.zeros((100, 8, 8, 1), np.uint8)
LABELS = np.arange(100).astype(np.int32) % 10


class Empty:
    train = evaluation = Arrays(IMAGES[:0], LABELS[:0])


class Labels:
    train = evaluation = Arrays(IMAGES, LABELS + 5)
    classes = 10


class HeldOut:
    train = Arrays(IMAGES, np.where(np.arange(100) == 99, 77, LABELS))
    classes = 10


class Fractions:
    train = evaluation = Arrays(IMAGES, LABELS / 2)
    classes = 10


class Advantages:
    train = Arrays(IMAGES, LABELS, np.where(np.arange(len(LABELS)) == 5, -1.5, 1))
    classes = 10


class Complex:
    train = evaluation = Arrays(IMAGES * 1j, LABELS)
    classes = 10


class Tokens:
    '''Words by number, of which one is not known.'''

    classes = 10

    class Source:
        def __len__(self):
            return 1000

        def read(self, ids):
            return np.where(ids == 700, -1, ids % 20)[:, None], ids % 10

    def __init__(self, late=False):
        tokens = np.arange(100)[:, None] % 20
        tokens[3] = 20
        self.train = self.Source() if late else Arrays(tokens, LABELS)


class Late:
    classes = 10

    class Source:
        def __len__(self):
            return 1000

        def read(self, ids):
            return np.zeros((len(ids), 8, 8, 1), np.uint8), np.where(ids == 700, 10, 0)

    train = Source()
    evaluation = Arrays(IMAGES, LABELS)


class Larger:
    train, evaluation, classes = Arrays(IMAGES, LABELS), Arrays(IMAGES.repeat(2, 1), LABELS), 10


class Named:
    train = [{"image": image, "label": label} for image, label in zip(IMAGES, LABELS)]


class NotANumber:
    x = np.random.default_rng(0).normal(size=(2048, 8)).astype(np.float32)
    x[77] = np.nan
    train = Arrays(x, np.zeros(len(x), np.int32))
    evaluation = Arrays(np.zeros((10, 8), np.float32), np.zeros(10, np.int32))
    classes = 3


class NoNumberAtTimes(NotANumber):
    train = Arrays(np.nan_to_num(NotANumber.x), np.zeros(len(NotANumber.x), np.int32))

    @staticmethod
    def augment(examples, keys):
        x, y = examples
        return x / (keys % 50 > 0)[:, None].astype("float32"), y


class NotEvaluated:
    train, evaluation, classes = NotANumber.evaluation, NotANumber.train, 3


class Rate(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, how):
        self.how, self.rate = how, 0.1

    def __call__(self, step):
        if self.how == "decided":
            return 0.1 if step < 10 else 0.01
        self.rate *= 0.9
        return self.rate if self.how == "counted" else keras.ops.cast(step, "float32") ** -0.5


def scheduled(input_shape, classes, how):
    model = linear(input_shape, classes)
    model.compile(keras.optimizers.SGD(Rate(how)), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def by_groups(input_shape, classes):
    convolutions = [keras.layers.Conv2D(4, 3), keras.layers.DepthwiseConv2D(3)]
    layers = [*convolutions, keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *layers])


def halved(learning_rate):
    return learning_rate / 2


def decided(learning_rate):
    return Rate("decided")


class Centred(keras.optimizers.Adam):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(g - keras.ops.mean(g), variable) for g, variable in grads_and_vars])


class Noisy(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient + keras.random.normal(variable.shape), variable, learning_rate)


class NoisyAtOnce(keras.optimizers.SGD):
    def __init__(self, rate):
        super().__init__(rate)
        self.seed = keras.random.SeedGenerator()

    def apply(self, grads, trainable_variables=None):
        noisy = [g + keras.random.normal(g.shape, seed=self.seed) for g in grads]
        super().apply(noisy, trainable_variables)


class Counting(keras.optimizers.SGD):
    steps = 0

    def update_step(self, gradient, variable, learning_rate):
        self.steps = self.steps + 1
        super().update_step(gradient, variable, learning_rate / self.steps)


def stepping(input_shape, classes, kind):
    model = linear(input_shape, classes)
    optimizer = {"noisy": Noisy, "noisy at once": NoisyAtOnce, "counting": Counting}[kind](0.1)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def centred(input_shape, classes):
    model = linear(input_shape, classes)
    model.compile(Centred(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def narrow(input_shape, classes):
    keras.config.set_floatx("float16")
    return linear(input_shape, classes)


def in_64_bits(input_shape, classes):
    import jax

    jax.config.update("jax_enable_x64", True)
    return linear(input_shape, classes)


class Gain(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        import tensorflow as tf

        self.gain = tf.Variable(1.0)

    def call(self, x):
        return x * self.gain


def gaining(input_shape, classes):
    return keras.Sequential([keras.Input(input_shape), Gain(), *linear(input_shape, classes).layers])


def hiding(input_shape, classes):
    dense = keras.layers.Dense(classes)
    hidden = keras.layers.Lambda(lambda x: dense(x), output_shape=(classes,))
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes), hidden])


def placed(input_shape, classes):
    with keras.distribution.DataParallel(devices=["cpu:0"]).scope():
        return linear(input_shape, classes)


def mirrored(input_shape, classes):
    import tensorflow as tf

    with tf.distribute.MirroredStrategy().scope():
        return linear(input_shape, classes)


class Fickle(keras.layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(600, 600), trainable=False, name="table")

    def call(self, x, training=False):
        if training and x.shape[0] not in (None, 1):
            self.table.assign(0.9 * self.table)
        return x + keras.ops.mean(self.table)


def colored(classes):
    return keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(classes)])


def fickle(input_shape, classes):
    return keras.Sequential([keras.Input(input_shape), Fickle(name="fickle"), linear(input_shape, classes)])


class Synchronous(keras.layers.Layer):
    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)

    def call(self, x):
        import tensorflow as tf

        return x - tf.distribute.get_replica_context().all_reduce("mean", tf.reduce_mean(x, 0))


def synchronous(input_shape, classes):
    layers = [keras.layers.Flatten(), keras.layers.Dropout(0.1), Synchronous(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *layers])


def lossy(input_shape, classes, how):
    temperature = keras.Variable(1.0, trainable=how == "uses", name="temperature")

    def loss(y, y_pred):
        if how == "draws":
            y_pred = y_pred + keras.random.normal(keras.ops.shape(y_pred))
        if how == "changes":
            temperature.assign_add(1.0)
        return keras.losses.sparse_categorical_crossentropy(y, y_pred * temperature, from_logits=True)

    model = linear(input_shape, classes)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


class Focused(keras.losses.SparseCategoricalCrossentropy):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return super().__call__(y_true, y_pred, sample_weight) ** 2


def focused(input_shape, classes):
    model = linear(input_shape, classes)
    model.compile("adam", Focused(from_logits=True))
    return model


def linear(input_shape, classes):
    layers = [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes, name="out")]
    return keras.Sequential(layers, name="linear")


def steep(input_shape, classes):
    model = linear(input_shape, classes)
    model.compile(keras.optimizers.SGD(1e36), keras.losses.SparseCategoricalCrossentropy(True))
    return model


def logarithm(input_shape, classes):
    logarithms = keras.layers.Lambda(keras.ops.log)
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), logarithms, keras.layers.Dense(classes)])


made = linear((8, 8, 1), 10)


def scalar_loss(input_shape, classes):
    model = linear(input_shape, classes)
    model.compile(loss=lambda y, p: keras.ops.mean(keras.ops.square(p)))
    return model


class Adds(keras.Model):
    # What it adds is no number.

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(10)

    def call(self, x):
        self.add_loss(keras.ops.mean(x, axis=(1, 2, 3)))
        return self.dense(keras.ops.mean(x, axis=(1, 2)))


class Masks:
    train = Arrays(IMAGES, IMAGES)


class White:
    train = Arrays(IMAGES, IMAGES + np.uint8(255))


def segments():
    model = keras.Sequential([keras.layers.Dense(1, "sigmoid")])
    model.compile(loss="binary_crossentropy")
    return model


def dice():
    model = keras.Sequential([keras.layers.Dense(1, "sigmoid")])
    model.compile(loss=keras.losses.Dice())
    return model


def not_flat(classes):
    return keras.Sequential([keras.layers.Dense(classes)])


def metric_not_flat(classes):
    model = not_flat(classes)
    model.compile(loss=lambda y, p: keras.ops.mean(p, axis=(1, 2, 3)), metrics=["binary_crossentropy"])
    return model


def logits(classes):
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(classes)])
    model.compile(loss="sparse_categorical_crossentropy")
    return model


def probabilities(input_shape, classes):
    inner = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(classes, activation="softmax")])
    model = keras.Sequential([keras.Input(input_shape), inner])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class OwnStep(keras.Sequential):
    def train_step(self, *arguments):
        raise RuntimeError("is not called")


def own_step(input_shape, classes):
    return OwnStep(linear(input_shape, classes).layers)


def synchronized(input_shape, classes):
    normalization = keras.layers.BatchNormalization(synchronized=True, name="normalization")
    return keras.Sequential([linear(input_shape, classes), normalization])


def carrying(input_shape, classes):
    recurrent = keras.layers.LSTM(4, stateful=True, name="recurrent")
    return keras.Sequential([keras.Input(input_shape[:2], batch_size=64), recurrent, keras.layers.Dense(classes)])


def attending(input_shape, classes):
    inputs = keras.Input(input_shape)
    x = keras.layers.Reshape((8, 8))(inputs)
    x = keras.layers.MultiHeadAttention(2, 4)(x, x)
    return keras.Model(inputs, keras.layers.Dense(classes)(keras.layers.Flatten()(x)))


def third_argument(input_shape, classes):
    model = linear(input_shape, classes)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"])
    return model


def summed(input_shape, classes):
    model = linear(input_shape, classes)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"))
    return model


def compiled(input_shape, classes, **arguments):
    model = linear(input_shape, classes)
    model.compile(keras.optimizers.SGD(0.1, **arguments), "sparse_categorical_crossentropy")
    return model


def compiled_with(input_shape, classes, loss=None, metrics=None, called=""):
    model = linear(input_shape, classes)
    metrics = [keras.metrics.SparseCategoricalAccuracy(called)] if called else metrics
    model.compile("adam", loss or keras.losses.SparseCategoricalCrossentropy(True), metrics=metrics)
    return model


def single(input_shape, classes, loss="mse", metrics=None, shape=()):
    layers = [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(1), keras.layers.Reshape(shape)]
    model = keras.Sequential(layers)
    model.compile("adam", loss or (lambda y, y_pred: keras.ops.square(y - y_pred)), metrics=metrics)
    return model


def brightened(input_shape, classes):
    layers = [keras.Input(input_shape, dtype="uint8"), keras.layers.RandomBrightness(0.1), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(classes)])


def frozen(input_shape, classes):
    model = linear(input_shape, classes)
    model.trainable = False
    return model


def eager(input_shape, classes):
    model = linear(input_shape, classes)
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    return model


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.seen = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign(keras.ops.maximum(self.seen, keras.ops.max(y_pred)))

    def result(self):
        return self.seen


def of_a_batch(y_true, y_pred):
    return keras.ops.mean(y_pred)


def measured(input_shape, classes, by=Largest):
    model = linear(input_shape, classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy", by()])
    return model


def of_each(y, y_pred):
    return keras.ops.mean(y_pred, -1)


def measured_by_each(input_shape, classes):
    return measured(input_shape, classes, lambda: of_each)


def measured_by_batch(input_shape, classes):
    return measured(input_shape, classes, lambda: of_a_batch)


ACTIVITY = keras.metrics.Mean(name="activity")


class Measuring(keras.Sequential):
    def call(self, x, training=False):
        y = super().call(x, training=training)
        ACTIVITY.update_state(y)
        return y


def measuring(input_shape, classes):
    return Measuring(linear(input_shape, classes).layers)


class Largest(keras.metrics.Mean):
    def update_state(self, values, sample_weight=None):
        self.total.assign(keras.ops.maximum(self.total, keras.ops.max(values)))


class Computing(keras.Sequential):
    def __init__(self, layers, returned, measure):
        super().__init__(layers)
        self.returned, self.measure = returned, measure

    def compute_loss(self, x, y, y_pred, sample_weight):
        values = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        if self.measure:
            self.measure.update_state(values)
        return self.returned(values)


def computing(input_shape, classes, mean=True, measure=None):
    returned = keras.ops.mean if mean else keras.ops.square
    return Computing(linear(input_shape, classes).layers, returned, measure and Largest(name=measure))


class Auxiliary(keras.Sequential):
    def call(self, x, training=False):
        y = super().call(x, training=training)
        return (y, y) if training else y


def auxiliary(input_shape, classes):
    return Auxiliary(linear(input_shape, classes).layers)


SEED = keras.random.SeedGenerator(1)


class Noise(keras.layers.Layer):
    def __init__(self, seed=None):
        super().__init__()
        self.draw = lambda: keras.random.uniform((), seed=seed)
        if seed == "tensorflow":
            import tensorflow as tf

            self.draw = lambda: tf.nn.dropout(tf.ones(()), 0.5)
        if seed == "numpy":
            self.draw = lambda: np.random.uniform()

    def call(self, x, training=False):
        return x + self.draw() if training else x


def noisy(input_shape, classes, seed=None):
    seed = SEED if seed == "own" else seed
    return keras.Sequential([keras.Input(input_shape), Noise(seed), linear(input_shape, classes)])


class Turns(keras.layers.Layer):
    '''Drops out, or normalizes, in the turns of a loop.'''

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x, training=False):
        def turn(carry, row):
            return carry + self.layer(row, training=training), None

        return keras.ops.scan(turn, keras.ops.zeros_like(x[:, 0]), keras.ops.transpose(x, (1, 0, 2)))[0]


class Cell(keras.layers.Layer):
    state_size = 8

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, x, states, training=False):
        hidden = keras.ops.tanh(self.dropout(x, training=training) + states[0])
        return hidden, [hidden]


class Jitted(keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.dense = keras.layers.Dense(units)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        import jax

        self.jitted = getattr(self, "jitted", jax.jit(lambda x: self.dense(x)))
        return self.jitted(x)


class Places(keras.layers.Layer):
    places = None

    def call(self, x):
        if self.places is None:
            self.places = keras.ops.arange(x.shape[-1], dtype="float32")
        return keras.ops.cast(x, "float32") + self.places


def placing(input_shape, classes):
    layers = [keras.Input(input_shape), keras.layers.Flatten(), Places(), keras.layers.Dense(classes)]
    return keras.Sequential(layers)


def jitted(input_shape, classes):
    layers = [keras.layers.Rescaling(1 / 16), keras.layers.Flatten(), Jitted(8), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *layers])


def turning(input_shape, classes, how):
    layer = keras.layers.RNN(Cell())
    if how == "batch-norm":
        layer = Turns(keras.layers.BatchNormalization())
        layer.layer.build((None, 8))
    if how == "scan":
        layer = Turns(keras.layers.Dropout(0.5))
    if how == "penalty":
        layer = Turns(keras.layers.ActivityRegularization(l2=0.1))
    rows = [keras.Input(input_shape), keras.layers.Rescaling(1 / 16), keras.layers.Reshape((8, 8))]
    return keras.Sequential([*rows, layer, keras.layers.Dense(classes)])


def hashing(input_shape, classes):
    layers = [keras.Input(input_shape), keras.layers.Hashing(7), keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential(layers)


def wide(input_shape, classes):
    layers = [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes, dtype="float64")]
    return keras.Sequential(layers)


class Immense(keras.layers.Layer):
    def call(self, x):
        each = keras.ops.sin(x[..., None] * keras.ops.arange(10**9, dtype="float32"))
        return keras.ops.sum(keras.ops.sort(each), -1)

    def compute_output_shape(self, shape):
        return shape


def immense(input_shape, classes):
    layers = [keras.Input(input_shape), keras.layers.Flatten(), Immense(), keras.layers.Dense(classes)]
    return keras.Sequential(layers)


def not_for_xla(input_shape, classes):
    import tensorflow as tf

    class InPython(keras.layers.Layer):
        def call(self, x):
            return tf.ensure_shape(tf.py_function(lambda a: a, [x], x.dtype), x.shape)

    layers = [keras.Input(input_shape), keras.layers.Flatten(), InPython(), keras.layers.Dense(classes)]
    model = keras.Sequential(layers, name="in_python")
    model.compile(jit_compile=True)
    return model


def three(input_shape):
    return linear(input_shape, 3)


class Unknown:
    '''Tells no classes.'''

    train = [(row, label) for row, label in zip(IMAGES, LABELS)]


def two_masks():
    x = keras.Input((8,), dtype="int32")
    hidden = [keras.layers.Embedding(20, 4, mask_zero=zero)(x) for zero in (True, False)]
    model = keras.Model(x, [keras.layers.Dense(20)(each) for each in hidden], name="two")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Twice:
    x = np.arange(8)[None].repeat(100, 0)
    train = [(row, (row, row)) for row in x]


class WeighsTooMuch:
    train = Arrays(np.zeros((100, 8), np.float32), np.zeros(100, np.int32), np.ones((100, 8)))
    classes = 3


def nested(input_shape):
    x = keras.Input(input_shape)
    model = keras.Model(x, {"a": keras.layers.Dense(3)(x), "b": {"c": keras.layers.Dense(3)(x)}})
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def anti_accuracy(y, y_pred):
    return 1 - keras.metrics.sparse_categorical_accuracy(y, y_pred)


def of_two_minds():
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy", anti_accuracy])
    return model


class TrainsAlone:
    train = Arrays(np.zeros((100, 8), np.float32), LABELS % 3)


class WeighsApart:
    train = Arrays(np.zeros((100, 8), np.float32), LABELS, {"wieghts": np.ones(100)})
    classes = 10


class WeighsThreefold:
    train = Arrays(np.zeros((100, 8), np.float32), LABELS, (np.ones(100),) * 3)
    classes = 10


class Wide:
    train = evaluation = Arrays(2**33 + np.arange(800).reshape(100, 8), LABELS)


class Rows:
    train = [{"image": np.zeros(8, np.float32), "label": i % 10} for i in range(100)]


class Words:
    def __len__(self):
        return 100

    def read(self, ids):
        return np.zeros((len(ids), 8), np.float32), np.where(ids % 2, "cat", "dog")


def words():
    return type("Data", (), {"train": Words()})


class Unlabelled:
    train = Arrays(np.zeros((100, 8), np.float32))


class LookUp(keras.Model):
    def __init__(self, classes):
        super().__init__(name="look_up")
        self.table = keras.layers.Embedding(20, 3, name="table")
        self.head = keras.layers.Dense(classes)

    def call(self, tokens, training):
        return self.head(self.table(tokens)[:, 0])


class LookUpMoved(LookUp):
    def __init__(self, classes, by):
        super().__init__(classes)
        self.by = by

    def call(self, tokens, training):
        return super().call(tokens + self.by, training)


def encodes(classes):
    return keras.Sequential([keras.layers.CategoryEncoding(20), keras.layers.Dense(classes)])


def plain():
    return keras.Sequential([keras.layers.Dense(3)])


def not_compiled(input_shape):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(3)], name="not_compiled")


class Branching(keras.layers.Layer):
    def call(self, x):
        return x if keras.ops.mean(x) > 0 else -x


def branching(input_shape, classes):
    return keras.Sequential([keras.Input(input_shape), Branching(), *linear(input_shape, classes).layers])


def raising():
    raise KeyError("a bug of the user's own")


class Leaves(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise SystemExit


class Begins(keras.callbacks.Callback):
    begun = False

    def on_epoch_begin(self, epoch, logs=None):
        Begins.begun = True


class LeftInTraining(Arrays):
    def read(self, ids):
        if Begins.begun:
            raise SystemExit(3)
        return super().read(ids)


class Left:
    train = LeftInTraining(IMAGES, LABELS)
    classes = 10
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "user_project.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "user_script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    (tmp_path / "user_flags.py").write_text("from absl import flags\nflags.DEFINE_integer('seed', 1, 'Mine.')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--strategy=mirored"], ["strategy", "mirored", "one_device"]),
        (["--nosuch=1"], ["nosuch"]),
        (["fly"], ["fly", "train, evaluate, export"]),
        (["--run_dir=gs://bucket/run"], ["--run_dir=gs://bucket/run", "is a URL", "give a path"]),
        (["--log_every=5parsecs"], ["--log_every=5parsecs", "not an interval"]),
        (["--model=mlpp"], ["--model=mlpp", "did you mean 'mlp'"]),
        (["--model=saved/mine.keras"], ["is the file of a saved model", "keras.saving.load_model('saved/mine.keras')"]),
        (["--model=mlp(unit=3)"], ["--model=mlp(unit=3)", "unexpected keyword argument 'unit'", "units"]),
        *((["--model=" + spec], ["--model", "literal values"]) for spec in MISSPELT),
        (["--dataset=digit"], ["--dataset=digit", "did you mean 'digits'"]),
        (["--optimizer=adamx"], ["--optimizer=adamx", "adamw"]),
        (["--optimizer=sgd(speed=1)"], ["--optimizer=sgd(speed=1)", "speed"]),
        (["--optimizer=adam(learning_rate=0.1)"], ["a flag of its own", "--learning_rate=0.1"]),
        (
            ["--model=user_project:by_groups", "--strategy=device_mesh", "--devices=4", "--mesh=data=2,model=2"],
            ["--mesh=data=2,model=2: makes gradients of convolutions by groups", "2 times as large", "--mesh=data=4"],
        ),
        (["--optimizer=user_project:linear"], ["--optimizer=user_project:linear: ", "it is called with learning_rate"]),
        (["--optimizer=user_project:halved"], ["--optimizer=user_project:halved: returned a builtins.float"]),
        (["--schedule=user_project:halved"], ["--schedule=user_project:halved: returned a float"]),
        (["--schedule=user_project:halved(learning_rate=1)"], ["a flag of its own", "give --learning_rate=1"]),
        (["--schedule=user_project:scheduled"], ["--schedule=user_project:scheduled: takes no learning_rate"]),
        (["--schedule=user_project:decided"], ["--schedule=user_project:decided", "Rate can't be compiled"]),
        (
            ["--optimizer=schedulefreeadamw", "--backend=tensorflow"],
            ["mixes up its variables' values on TensorFlow", "--backend=jax"],
        ),
        (["--learning_rate=nan"], ["--learning_rate=nan", "not 0 or more"]),
        (["--dataset=user_project:words"], ["an array has dtype <U3: give numbers", "numpy.unique"]),
        (["--dataset=user_project:Rows", "--cache=."], [". is a directory", "--cache"]),
        (["--schedule=sawtooth"], ["--schedule=sawtooth", "cosine"]),
        (["--best=val_f"], ["--best=val_f: is no metric of this run's evaluations", "val_loss, val_accuracy"]),
        (
            ["--best=val_anti_accuracy", "--model=user_project:of_two_minds"],
            ["--best=val_anti_accuracy", "whether more is better", "mode='min'"],
        ),
        (["--best=val_accuracy(most=1)"], ["--best=val_accuracy(most=1)", "takes mode='min' or mode='max'"]),
        (
            ["--best=val_f", "--dataset=user_project:TrainsAlone", "--model=user_project:plain"],
            ["--best=val_f: is never computed", "--validation_fraction"],
        ),
        (["--callbacks=EarlyStopping(restore_best_weights=True)"], ["restore_best_weights", "the best one is kept"]),
        (["--run_dir=run/checkpoints/00000045"], ["is a checkpoint of the run run", "--initialize_from"]),
        (
            ["--callbacks=EarlyStopping(monitor='val_acc')"],
            ["'val_acc'", "one of accuracy, loss, val_accuracy, val_loss"],
        ),
        (
            ["--model=user_project:measured_by_each", "--callbacks=EarlyStopping(monitor='val_of_each')"],
            ["maximized or minimized", "add mode='max' or mode='min'"],
        ),
        (["--callbacks=ReduceLROnPlateau", "--schedule=cosine"], ["sets the learning rate", "--schedule=constant"]),
        (["--callbacks=SwapEMAWeights"], ["--callbacks=SwapEMAWeights", "moving averages"]),
        (["--callbacks=EarlyStoping"], ["--callbacks=EarlyStoping", "did you mean 'EarlyStopping'"]),
        (["--callbacks=OrbaxCheckpoint(directory='there')"], ["would save beside", "--save_every"]),
        (["--global_batch=65", "--replicas=2"], ["--global_batch=65", "2 logical replicas", "64 or 66"]),
        (["--strategy=mirrored", "--devices=4", "--replicas=6"], ["--replicas=6", "4 devices"]),
        (["--strategy=one_device", "--devices=2"], ["--devices=2", "one_device"]),
        (["--strategy=mirrored", "--backend=jax"], ["--backend=jax", "--strategy=mirrored"]),
        (["--steps=5", "--epochs=1"], ["--steps=5", "--epochs=1"]),
        (["--run_dir=/proc/nowhere"], ["--run_dir=/proc/nowhere", "can't be written"]),
        (["--initialize_from=nowhere"], ["--initialize_from=nowhere", "neither a checkpoint nor"]),
        (["--initialize_from=user_project.py"], ["neither a checkpoint nor", "build() may load a file of Keras's"]),
        (["--dataset=user_project:Empty"], ["--dataset=user_project:Empty", "empty (0 examples)"]),
        (["--dataset=user_project:Larger"], ["evaluate on of", "(16, 8, 1)", "does not take", "resizing"]),
        (
            ["--dataset=user_project:Named"],
            ["several arrays", "and no labels", "no one `input_shape`", "return (x, y)"],
        ),
        (["--dataset=user_project:Labels"], ["label 10 of example", "none of the 10 classes"]),
        (["--dataset=user_project:HeldOut"], ["label 77 of example 99 of 'train' is none of the 10 classes"]),
        (["--dataset=user_project:Late"], ["label 10 of example 700", "none of the 10 classes"]),
        (["--dataset=user_project:Fractions", "--model=user_project:compiled_with"], ["label 0.5 of example 1"]),
        (
            ["--dataset=user_project:White", "--model=user_project:segments"],
            ["label 255 of example 0 of 'train' is not within 0 and 1, as binary_crossentropy takes it (6400 such"],
        ),
        (
            ["--dataset=user_project:Advantages"],
            ["weight -1.5 of example 5 of 'train' is negative", "divided by the sum of the weights", "by output"],
        ),
        (["--dataset=user_project:Complex"], ["complex numbers", "leave out the imaginary parts", "complex64"]),
        (
            ["--dataset=user_project:Tokens", "--model=user_project:LookUp"],
            ["input 20 of example 3 of 'train' is none of the 20 rows", "look_up/table, 0 to 19 (1 such inputs)"],
        ),
        (
            ["--dataset=user_project:Tokens", "--model=user_project:encodes"],
            ["input 20 of example 3 of 'train' is none of the 20 tokens of layer"],
        ),
        (
            ["--dataset=user_project:Tokens(late=True)", "--model=user_project:LookUp"],
            ["input -1 of example 700 of the source is none of the 20 rows"],
        ),
        (["--model=user_project:scheduled(how='decided')"], ["schedule Rate can't be compiled", "ops.where"]),
        (["--model=user_project:scheduled(how='counted')"], ["schedule Rate gives 0.09 and 0.081 when it is asked"]),
        (["--model=user_project:scheduled(how='divided')"], ["schedule Rate gives inf for the first step, whose"]),
        (["--model=user_project:nothing"], ["user_project:nothing", "has no 'nothing'"]),
        (["--model=user_project:scalar_loss"], ["not one value per example"]),
        (
            ["--dataset=user_project:Masks", "--model=user_project:dice"],
            ["'dice' returns shape ()", "create it with axis=(1, 2, 3)"],
        ),
        (["--model=user_project:Adds"], ["adds a loss of shape (64,) by add_loss()", "ops.mean"]),
        (
            ["--model=user_project:not_flat"],
            ["outputs (batch, 8, 8, 10)", "labels (batch,)", "'sparse_categorical_crossentropy'", "Flatten"],
        ),
        (["--model=user_project:logits"], ["gives logits", "takes probabilities", "from_logits=True"]),
        (["--model=user_project:probabilities"], ["gives probabilities", "takes logits", "from_logits=False"]),
        (["--model=user_project:metric_not_flat"], ["outputs (batch, 8, 8, 10)", "a metric", "Flatten"]),
        (["--model=user_project:in_64_bits", "--backend=jax"], ["sets jax_enable_x64", "delete it"]),
        (["--model=user_project:narrow"], ["sets Keras's floatx to float16", "say by --precision"]),
        (["--model=user_flags:build"], ["a flag that there is", "'seed'", "another name"]),
        (["--model=user_script:build"], ["ends the program as it is imported (exit 2)", "__name__ == '__main__'"]),
        (
            ["--model=user_project:gaining", "--backend=tensorflow"],
            ["gain keeps 'gain' in a tf.Variable", "add_weight"],
        ),
        (
            ["--model=user_project:hiding"],
            ["in call() or a loss, which is no variable of the model's", "trainable=False"],
        ),
        (["--model=user_project:focused"], ["has a loss with __call__() of its own", "name it call()"]),
        (["--model=user_project:centred"], ["by Centred with apply_gradients() of its own", "apply(grads, train"]),
        (["--model=user_project:own_step"], ["train_step() of its own (OwnStep)", "add_loss()"]),
        (["--model=user_project:synchronized"], ["normalization", "synchronized=True", "--replicas=1"]),
        (["--model=user_project:carrying"], ["recurrent", "stateful=True", "random order"]),
        (
            ["--model=user_project:two_masks", "--dataset=user_project:Twice"],
            ["two", "different masks", "ignore_class"],
        ),
        (
            ["--dataset=user_project:Rows", "--model=user_project:plain"],
            ["does not take the examples", "return (x, y)", "no labels"],
        ),
        (["--dataset=user_project:WeighsTooMuch"], ["shape (batch,)", "weights are (batch, 8)"]),
        (
            ["--dataset=user_project:WeighsApart", "--model=user_project:plain"],
            ["weights of wieghts", "--model=user_project:plain", "outputs that have labels are", "one by output"],
        ),
        (
            ["--dataset=user_project:WeighsApart", "--model=user_project:nested"],
            ["outputs in a dict of which a value is no array: (batch, 3), (batch, 3)", "one dict of arrays"],
        ),
        (
            ["--dataset=user_project:WeighsThreefold", "--model=user_project:plain"],
            ["3 arrays of weights", "that have labels are dense"],
        ),
        (
            ["--model=user_project:not_compiled", "--dataset=user_project:Unlabelled"],
            ["user_project:not_compiled", "nothing to be trained on", "add_loss()"],
        ),
        (["--model=user_project:three"], ["--model=user_project:three", "3 classes", "--dataset=digits has 10"]),
        (
            ["--model=user_project:three", "--dataset=user_project:Unknown"],
            ["--dataset=user_project:Unknown", "none of the", "3 classes"],
        ),
        (["--dataset=user_project:Wide"], ["integers of 85899", "32 bits", "--backend=tensorflow"]),
        (["--model=user_project:third_argument"], ["loss_weights=['accuracy']", "metrics=[...]"]),
        (["--model=user_project:summed"], ["reduction='sum'", "mean over a step's examples"]),
        (["--model=user_project:measured"], ["metric 'largest'", "no sum over examples"]),
        (["--model=user_project:measured_by_batch"], ["metric 'of_a_batch'", "weight", "one value per example"]),
        (["--model=user_project:noisy"], ["from no layer's seed", "SeedGenerator"]),
        (["--model=user_project:noisy(seed='numpy')"], ["from no layer's seed", "SeedGenerator"]),
        (["--model=user_project:noisy(seed='own')"], ["from no layer's seed", "SeedGenerator"]),
        (["--backend=tensorflow", "--model=user_project:noisy"], ["from no layer's seed", "SeedGenerator"]),
        (["--backend=tensorflow", "--model=user_project:noisy(seed='tensorflow')"], ["from no layer's seed"]),
        (["--model=user_project:placing"], ["keeps a value of JAX's from one trace for another", "by numpy, or anew"]),
        (
            ["--model=user_project:placing", "--backend=tensorflow"],
            ["keeps a tensor from one trace for another: ", "<tf.Tensor", "by numpy, or anew"],
        ),
        (["--model=user_project:jitted"], ["keeps a value of JAX's from one trace for another", "take jax.jit off"]),
        (["--model=user_project:turning(how='scan')"], ["draws random numbers in a turn of scan", "before the loop"]),
        (["--backend=tensorflow", "--model=user_project:turning(how='scan')"], ["numbers in a turn of scan"]),
        (["--model=user_project:turning(how='rnn')"], ["draws random numbers in a turn of rnn", "unroll=True"]),
        (["--model=user_project:turning(how='batch-norm')"], ["changes", "moving_mean in a turn of scan"]),
        (["--model=user_project:turning(how='penalty')"], ["adds a loss by add_loss() in a turn of scan", "carry"]),
        (
            ["--model=user_project:stepping(kind='counting')"],
            ["changes 'steps' of Counting in update_step()", "iterations"],
        ),
        (["--model=user_project:stepping(kind='noisy')"], ["in update_step() of Noisy from no seed", "SeedGenerator"]),
        (
            ["--model=user_project:stepping(kind='noisy at once')"],
            ["NoisyAtOnce, of which apply()", "in update_step()"],
        ),
        (["--model=user_project:frozen"], ["no trainable variables, of 2", "trainable=True"]),
        (["--model=user_project:eager"], ["run_eagerly=True"]),
        (
            ["--model=user_project:auxiliary"],
            ["other outputs in training than in evaluation", "((1, 10), (1, 10)) and (1, 10)"],
        ),
        (
            ["--strategy=mirrored", "--devices=2", "--model=user_project:synchronous"],
            ["all_reduce() of tf.distribute's replicas", "--replicas=1"],
        ),
        (["--model=user_project:lossy(how='draws')"], ["a loss or a metric from no layer's seed", "SeedGenerator"]),
        (
            ["--model=user_project:lossy(how='uses')"],
            ["uses temperature in call() or a loss", "attribute of the model"],
        ),
        (["--model=user_project:lossy(how='changes')"], ["changes temperature in call() or a loss", "add_weight()"]),
        (["--model=user_project:placed"], ["says by keras.distribution", "--strategy, --devices and --layout"]),
        (["--backend=tensorflow", "--model=user_project:mirrored"], ["or tf.distribute what runs where"]),
        (
            ["--model=user_project:fickle"],
            ["fickle/table in some of its calls in training", "the same variables each time"],
        ),
        (["--model=user_project:measuring"], ["changes activity/total in call() or a loss", "attribute of"]),
        (["--model=user_project:computing(mean=False)"], ["compute_loss() returns an array (4,)", "return the mean"]),
        (
            ["--model=user_project:computing(measure='largest')"],
            ["changes largest/total in call() or a loss", "one of Keras's, such as keras.metrics.Mean()"],
        ),
        (
            ["--model=user_project:computing", "--dataset=user_project:WeighsTooMuch"],
            ["a compute_loss() of its own, and examples have weights", "a part of y"],
        ),
        (["--model=user_project:hashing"], ["hashing (Hashing)", "TensorFlow", "the source"]),
        (["--model=user_project:wide"], ["computes in float64", "JAX in 32 bits"]),
        (["--model=user_project:compiled", "--learning_rate=0.1"], ["compiled with SGD", "--optimizer=adam"]),
        (["--model=user_project:compiled", "--learning_rate=0.001"], ["compiled with SGD", "set it in compile()"]),
        (["--model=user_project:compiled", "--schedule=constant"], ["--schedule=constant", "compiled with SGD"]),
        (["--model=user_project:compiled_with(loss='entropy')"], ["a loss that is none", "entropy", "keras.losses"]),
        (["--model=user_project:compiled_with(called='step')"], ["called 'step', as lines of the log", "another name"]),
        (["--model=user_project:compiled_with(called='loss')"], ["called 'loss', as lines of the log", "another name"]),
        (["--model=user_project:compiled_with(metrics=['acuracy'])"], ["metrics that are none", "acuracy"]),
        (["--model=user_project:compiled_with(metrics=['mae'])"], ["labels (batch,)", "a metric does not take"]),
        (["--model=user_project:single(metrics=['poisson'], shape=(1,))"], ["each label with each output"]),
        (["--model=user_project:brightened"], ["random_brightness", "given integers", "Rescaling(1.0)"]),
        (["--model=user_project:single"], ["'mse' returns shape ()", "outputs (batch, 1): Keras's losses"]),
        (
            ["--model=user_project:single(loss=None, metrics=['mae'])"],
            ["a mean over the last axis, which is that of the examples", "outputs (batch, 1): Keras's metrics"],
        ),
        (  # as many outputs as examples that metrics are tried on, at least
            ["--model=user_project:compiled_with(metrics=['mae'])", "--dataset=synthetic(classes=4)"],
            ["outputs (batch, 4) for labels (batch,)", "a metric does not take"],
        ),
        (["--model=user_project:compiled(gradient_accumulation_steps=2)"], ["accumulates gradients", "--replicas"]),
        *(
            (
                [*verb, "--model=user_project:attending", "--precision=mixed_float16"],
                ["no such product", "mixed_bfloat16"],
            )
            for verb in ([], ["explain"])
        ),
        *(
            pytest.param(
                ["--model=user_project:immense", f"--backend={backend}", "--evaluate_every=never", "--steps=1"],
                ["--global_batch=64", "takes more memory than the devices have: ", "more --replicas"],
                marks=[pytest.mark.long] * (backend == "tensorflow"),
            )
            for backend in ("tensorflow", "jax")
        ),
        (["--model=user_project:not_for_xla"], ["user_project:not_for_xla", "XLA", "EagerPyFunc", "jit_compile=False"]),
        (["--model=./user_project.py:linear"], ["is the name of a file", "--model=user_project:linear"]),
        (["--model=user_project.linear"], ["no module of that name; did you mean 'user_project:linear'?"]),
        (
            ["--model=user_project:made"],
            ["is a model, made when its module was imported", "a function that returns one"],
        ),
        (["--data_dir=photographs"], ["--data_dir=photographs: --dataset=digits does not take it", "drop --data_dir"]),
        (["--dataset=images"], ["--data_dir=: --dataset=images needs it", "images(data_dir=...)"]),
        (["--dataset=table", "--data_dir=."], ["--dataset=table: needs 'label'", "table(label=...)"]),
        (["--schedule=cosine(warmup_steps=0.1)"], ["--schedule=cosine(warmup_steps=0.1)", "is a number of steps"]),
        (["evaluate", "--run_dir=nowhere"], ["--run_dir=nowhere", "holds no run"]),
    ],
    ids=lambda v: v[0] if isinstance(v[0], str) and v[0].startswith("--") else None,
)
def test_mistake(flags, said, project):
    given = flags if any("run_dir" in f for f in flags) else [*flags, "--run_dir=run"]
    of_tensorflow = (":not_for_xla", ":synchronized")
    if not (flags[0].endswith(of_tensorflow) or any(f.startswith(("--strategy", "--backend")) for f in flags)):
        given = [*given, "--backend=jax"]
    err = trainer(*given, code=2, cwd=project).stderr
    assert err.count("onecurve: ") == 1 and "Fix: " in err and "Traceback" not in err
    for words in said:
        assert words in err


def test_what_was_refused_is_mended_in_its_directory(project):
    """Before its steps are compiled, or by that, when a first checkpoint is there already; what was trained is kept."""
    flags = ("--backend=jax", "--run_dir=run", "--steps=3")
    for path in ("run", "elsewhere"):
        (project / path).mkdir()
    (project / "run/checkpoints").symlink_to(project / "elsewhere")  # another disk, say
    trainer(*flags, "--initialize_from=nowhere", code=2, cwd=project)
    refused = trainer(*flags, "--model=user_project:jitted", code=2, cwd=project)
    assert [path.name for path in (project / "run/checkpoints").iterdir()] == ["00000000"]
    trainer(*flags, "--model=user_project:jitted", "--seed=1", code=2, cwd=project)
    mended = trainer(*flags, "--model=dense", cwd=project)
    anew = "nothing was trained there yet"
    assert anew not in refused.stdout and mended.stdout.count(anew) == 1 and summary(project / "run")["starts"] == 1
    assert "holds another run" in trainer(*flags, "--model=dense", "--seed=1", code=2, cwd=project).stderr
    assert "is not what the run in" in trainer(*flags, "--model=mlp", code=2, cwd=project).stderr


def test_a_log_without_checkpoints_is_not_replaced(project):
    """They were deleted to make room, or the files are another program's."""
    flags = ("--backend=jax", "--steps=3", "--run_dir=run")
    trainer(*flags, cwd=project)
    shutil.rmtree(project / "run" / "checkpoints")
    paths = [project / "run" / name for name in ("metrics.jsonl", "summary.json")]
    left = [(path, path.read_bytes()) for path in paths]
    for path, content in left:
        said = trainer(*flags, code=2, cwd=project).stderr
        assert f"no checkpoint to continue from, and {path.name}" in said and path.read_bytes() == content
        path.unlink()
    trainer(*flags, cwd=project)
    assert all(path.exists() for path in paths)


def test_the_environment_contradicts(project):
    err = trainer("--strategy=mirrored", "--run_dir=run", code=2, cwd=project, KERAS_BACKEND="jax").stderr
    assert "--strategy=mirrored" in err and "KERAS_BACKEND=jax" in err


@pytest.mark.parametrize("setting", ["JAX_ENABLE_X64=1", "JAX_PLATFORMS=nonsense"])
def test_the_environment_keeps_jax_from_running(setting, project):
    name, _, value = setting.partition("=")
    err = trainer("--backend=jax", "--run_dir=run", code=2, cwd=project, **{name: value}).stderr
    assert setting in err and f"unset {name}" in err and "Traceback" not in err


def test_a_backend_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # as if it could not be found
    with pytest.raises(UserError, match="--backend=tensorflow: is not installed"):
        backend.prepare("tensorflow")


def test_the_directory_of_another_run(project):
    flags = ("--backend=jax", "--run_dir=run")
    trainer(*flags, "--steps=3", cwd=project)
    before = sorted(p.name for p in (project / "run" / "checkpoints").iterdir())
    err = trainer(*flags, "--steps=3", "--seed=1", code=2, cwd=project).stderr
    assert "--seed: 0 there, 1 now" in err
    err = trainer(*flags, "--steps=3", "--model=mlp(units=128)", code=2, cwd=project).stderr
    differ = "mlp/dense_0/kernel: [[64, 256], 'float32'] there, [[64, 128], 'float32'] now"
    assert differ in err
    err = trainer("evaluate", "--run_dir=run", "--model=mlp(units=128)", code=2, cwd=project).stderr
    assert differ in err and "Traceback" not in err
    assert sorted(p.name for p in (project / "run" / "checkpoints").iterdir()) == before
    trainer(*flags, "--steps=5", cwd=project)  # nothing was lost: the run goes on


@pytest.mark.parametrize(
    ("backend", "flags", "fault"),
    [
        (
            "tensorflow",
            ["--model=user_project:linear", "--optimizer=sgd", "--learning_rate=1e36"],
            ["--learning_rate=1e+36: the loss", "Fix: lower --learning_rate, clip"],
        ),
        (
            "jax",
            ["--model=user_project:steep"],
            ["--model=user_project:steep: the loss", "Fix: lower the learning rate in comp"],
        ),
        (
            "jax",
            ["--model=user_project:logarithm"],
            ["--model=user_project:logarithm: the loss", "): no update was made yet;", "Fix: look at what the model"],
        ),
        (
            "jax",
            ["--dataset=user_project:NotANumber", "--model=user_project:linear", "--seed=3"],
            [
                "--dataset=user_project:NotANumber: the loss",
                "): the input of example 77 is not finite;",
                "Fix: mend it",
            ],
        ),
        (
            "jax",
            ["--dataset=user_project:NoNumberAtTimes", "--model=user_project:linear"],
            [" is not finite, as the dataset's `augment` makes it;", "Fix: mend that function"],
        ),
    ],
)
def test_a_loss_that_is_not_a_number(backend, flags, fault, project):
    err = trainer(
        *flags,
        f"--backend={backend}",
        "--save_every=1",
        "--log_every=1000",
        "--keep=100",
        "--run_dir=run",
        code=2,
        cwd=project,
    ).stderr
    assert "the loss or a gradient was not finite at step" in err and "is kept" in err
    assert all(words in err for words in fault), err
    step = int(err.partition("not finite at step ")[2].split(" ")[0])
    kept = [int(p.name) for p in (project / "run" / "checkpoints").iterdir()]
    assert max(kept) == step - 1


@pytest.mark.parametrize(
    ("where", "by"),
    [(("--backend=jax",), -1), (("--strategy=mirrored", "--devices=2"), -1), (("--backend=tensorflow",), 7)],
)
def test_a_number_that_the_model_computes_and_that_has_no_row(where, by, project):
    """Keras takes -1 for the last row; nobody sees it before the model has computed it."""
    model = f"--model=user_project:LookUpMoved(by={by})"
    err = trainer("--dataset=user_project:Tokens", model, "--steps=20", *where, code=2, cwd=project).stderr
    assert f"{model}: the loss or a gradient was not finite at step" in err
    assert re.search(rf"{-1 if by < 0 else '2[0-9]'} is none of the 20 rows of layer look_up/table, 0 to 19", err), err


def test_an_evaluation_that_is_not_a_number_is_not_the_best(project):
    flags = ("--dataset=user_project:NotEvaluated", "--model=user_project:linear", "--run_dir=run", "--steps=30")
    trainer(*flags, "--backend=jax", "--evaluate_every=10", cwd=project)
    summary = json.loads((project / "run" / "summary.json").read_text())
    assert summary["final"]["val_loss"] is None and summary["best"] == {}


def test_a_bug_in_the_user_s_module_keeps_its_traceback(project):
    err = trainer("--backend=jax", "--dataset=user_project:raising", "--run_dir=run", code=1, cwd=project).stderr
    assert "a bug of the user's own" in err and "Traceback" in err
    # Keras raises JAX's errors anew, and fails at some: what and where it was would be lost.
    err = trainer("--backend=jax", "--model=user_project:branching", "--run_dir=run", code=1, cwd=project).stderr
    assert "return x if keras.ops.mean(x) > 0 else -x" in err and "TracerBoolConversionError: Attempted" in err


@pytest.mark.parametrize("backend", ("tensorflow", "jax"))
def test_who_leaves_by_sys_exit_has_not_done_the_run(backend, project):
    """Which exit code 0 would say."""
    data = ("--dataset=user_project:Left", "--callbacks=user_project:Begins")
    for flags, code in ((["--callbacks=user_project:Leaves"], 1), (data, 3)):
        run = f"--run_dir={project / str(code)}"
        err = trainer(f"--backend={backend}", "--model=user_project:linear", *flags, run, code=code, cwd=project).stderr
        assert "Traceback" in err and "SystemExit" in err and "onecurve: left by sys.exit()" in err
