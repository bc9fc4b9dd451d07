"""Models, data, metrics and callbacks of a user's own: trained as compiled, weighed, exported."""

import importlib
import json
import re
import shutil
import textwrap

import keras
import numpy as np
import pytest

from tests.forks import trainer
from tests.running import curve, deviation, finished, launch, lines, summary
from trainer import checkpoint
from trainer.objective.calling import stateless_call
from trainer.serialized import serialized

BACKENDS = ["tensorflow", "jax"]
PROJECT = """
import collections
import sys
import time

import keras
import numpy as np
from input_pipeline import digits
from input_pipeline.source import Arrays


class Circles:
    '''Points in the plane, labelled by whether they lie in a circle.'''

    def __init__(self, examples, seed):
        self.x = np.random.default_rng(seed).uniform(-1, 1, (examples, 2)).astype("float32")

    def __len__(self):
        return len(self.x)

    def read(self, ids):
        x = self.x[ids]
        return {"points": x, "ones": np.ones((len(ids), 1), "float32")}, (np.square(x).sum(1) < 0.5).astype("int32")


class data:
    train, evaluation, class_names = Circles(2000, 0), Circles(501, 1), ["outside", "inside"]


class weighted:
    class Source(Circles):
        def read(self, ids):
            x, y = super().read(ids)
            return x, y, (ids % 2).astype("float32")  # every other example counts

    train, evaluation, classes = Source(2000, 0), Source(501, 1), 2


def net(classes, units=32):
    points, ones = keras.Input((2,), name="points"), keras.Input((1,), name="ones")
    x = keras.layers.Concatenate()([points, keras.ops.square(points), ones])
    x = keras.layers.Dense(units, "relu", kernel_regularizer=keras.regularizers.L2(1e-4))(x)
    return keras.Model({"points": points, "ones": ones}, keras.layers.Dense(classes)(x), name="net")


def forgetful(input_shape, classes):
    keras.backend.clear_session()
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])


def not_forgetful(input_shape, classes):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])


@keras.saving.register_keras_serializable("test")
class Net(keras.Model):
    '''Subclassed, built by its first call, compiled with metrics of its own; takes its inputs apart.'''

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = keras.layers.Dense(16, "tanh"), keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs):
        del inputs["ones"]
        return self.out(self.hidden(keras.ops.square(inputs.pop("points"))))


def loaded(input_shape, classes):
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])
    model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(7)  # as if it had been trained
    model.save("trained.keras")
    return keras.models.load_model("trained.keras")


def masks():
    class Masks:
        def __init__(self, examples, seed):
            self.x = np.random.default_rng(seed).normal(size=(examples, 8, 8, 1)).astype("float32")

        def __len__(self):
            return len(self.x)

        def read(self, ids):
            return self.x[ids], (self.x[ids] > 0.5).astype("uint8"), np.where(ids % 3, 0.25, 0.75).astype("float32")

    return type("Data", (), {"train": Masks(300, 0), "evaluation": Masks(130, 1), "classes": None})


def segmentation():
    hidden = keras.layers.Conv2D(8, 3, padding="same", activation="relu")
    out = keras.layers.Conv2D(1, 1, activation="sigmoid")
    model = keras.Sequential([keras.Input((None, None, 1)), hidden, out])
    metrics = [keras.metrics.BinaryIoU(name="iou"), keras.metrics.Recall(name="recall"), keras.metrics.AUC(name="auc")]
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=metrics)
    return model


class Tokens:
    '''Sequences that end in zeros, and perhaps what each token weighs.'''

    def __init__(self, examples, weighs):
        self.examples, self.weighs = examples, weighs

    def __len__(self):
        return self.examples

    def read(self, ids):
        tokens = np.stack([np.random.default_rng(int(i)).integers(1, 20, 12) for i in ids])
        counts = np.arange(12) < 3 + ids[:, None] % 10
        x = (tokens * counts).astype("int32")
        y = np.where(counts, x * 7 % 19 + 1, 0)
        return (x, y, counts) if self.weighs else (x, y)


def tokens(weighs=False, held=None):
    return {"train": Tokens(300, weighs), "evaluation": Tokens(77, weighs if held is None else held), "classes": 20}


class Surprise(keras.metrics.Mean):
    '''The loss, by elements: weights of examples can't be multiplied, and those of (batch, 1) count wrong.'''

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        weights = keras.ops.ones_like(values) if sample_weight is None else sample_weight
        self.total.assign(self.total + keras.ops.sum(values * weights))
        self.count.assign(self.count + keras.ops.sum(weights))

    def result(self):
        mean = super().result()
        return {"surprise": mean, "perplexity": keras.ops.exp(mean)}


def surprised():
    model = tagger()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=[Surprise()])
    return model


def tagger(mask=False, ignore=None):
    x = keras.Input((12,), dtype="int32")
    hidden = keras.layers.Embedding(20, 8, mask_zero=mask)(x)
    model = keras.Model(x, keras.layers.Dense(20)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignore)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


class Pairs:
    def __init__(self, named):
        self.named, self.x = named, np.random.default_rng(0).normal(size=(300, 5)).astype("float32")

    def __len__(self):
        return len(self.x)

    def read(self, ids):
        zeta, alpha = self.x[ids, :1], 10 + self.x[ids, 1:2]
        return self.x[ids], {"alpha": alpha, "zeta": zeta} if self.named else (zeta, alpha)


def pairs(named):
    return {"train": Pairs(named)}


def two_outputs(named=False, code=False, zeta_loss="zeta"):
    x = keras.Input((5,))
    zeta, alpha = keras.layers.Dense(1, name="zeta")(x), keras.layers.Dense(1, name="alpha")(x)
    outputs = {"zeta": zeta, "alpha": alpha}
    if code:
        outputs["code"] = keras.layers.UnitNormalization(name="code")(x)
    model = keras.Model(x, outputs if named else list(outputs.values()))
    losses = {"alpha": "mse", zeta_loss: "mae"}
    model.compile(keras.optimizers.SGD(0.01), losses, loss_weights={"alpha": 0.1, "zeta": 3}, metrics=losses)
    return model


class Tagged:
    '''A tag of each of six numbers, and their sum; both are weighed, the former by place.'''

    def __init__(self, examples, seed, weighs):
        random = np.random.default_rng(seed)
        self.x = random.normal(size=(examples, 6)).astype("float32")
        labels = {"tags": (self.x > 0).astype("int32"), "total": self.x.sum(1, keepdims=True)}
        weights = {"tags": random.random((examples, 6)) < 0.3, "total": random.random(examples)}
        if weighs == "in order":
            labels, weights = [*labels.values()], [*weights.values()]
        else:
            weights = {name: weights[name] for name in weighs.split()}
        self.y, self.weights = labels, weights

    def __len__(self):
        return len(self.x)

    def read(self, ids):
        return keras.tree.map_structure(lambda array: array[ids], (self.x, self.y, self.weights))


def tagged(weighs="total tags"):
    return {"train": Tagged(500, 0, weighs), "evaluation": Tagged(77, 1, weighs)}


def tagger_and_adder(named=True):
    x = keras.Input((6,))
    tags = keras.layers.Dense(2, name="tags")(keras.layers.Reshape((6, 1))(x))
    total = keras.layers.Dense(1, name="total")(x)
    return compiled_for_both(keras.Model(x, {"total": total, "tags": tags} if named else [tags, total]))


def compiled_for_both(model):
    losses = {"tags": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "total": "mse"}
    metrics = {"tags": ["accuracy"], "total": ["mae"]}
    model.compile(loss=losses, loss_weights={"tags": 3, "total": 0.2}, weighted_metrics=metrics)
    return model


def words(weighs):
    words = np.random.default_rng(0).integers(1, 20, (400, 8)) * (np.arange(8) < 3 + np.arange(400)[:, None] % 6)
    labels = {"first": words[:, 0], "each": words}
    weights = {"each": 1.5 * (words > 0) if weighs == "words" else np.full(words.shape, 1.5)}
    examples = words.astype("int32"), {name: label.astype("int32") for name, label in labels.items()}, weights
    return {"train": examples, "evaluation": keras.tree.map_structure(lambda array: array[:77], examples)}


def of_words(masks):
    x = keras.Input((8,), dtype="int32")
    embedded = keras.layers.Embedding(20, 8, mask_zero=masks)(x)
    first, each = keras.layers.Dense(20, name="first")(embedded[:, 0]), keras.layers.Dense(20, name="each")(embedded)
    model = keras.Model(x, [first, each])
    of_classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", [of_classes, of_classes], weighted_metrics=[["accuracy"], ["accuracy"]])
    return model


def without_labels():
    return np.random.default_rng(0).normal(size=(300, 6)).astype("float32")


def weighed_without_labels():
    return {"train": (without_labels(), None, {"decoded": np.ones(300)})}


def streamed_without_labels():
    import tensorflow as tf

    return {"train": tf.data.Dataset.from_tensor_slices(without_labels()), "evaluation": without_labels()[:77]}


@keras.saving.register_keras_serializable("test")
class Autoencoder(keras.Model):
    '''Draws random numbers in evaluation, too.'''

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encode, self.decode = keras.layers.Dense(3), keras.layers.Dense(6)
        self.seed = keras.random.SeedGenerator(7)

    def call(self, x):
        code = self.encode(x)
        code += 0.1 * keras.random.normal(keras.ops.shape(code), seed=self.seed)
        decoded = self.decode(code)
        self.add_loss(keras.losses.MeanSquaredError()(x, decoded))
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(code)))
        return decoded


def with_useless_labels():
    x = without_labels()
    y = (np.arange(len(x)) % 6).astype("int32")  # which a cross-entropy of the outputs would take
    return {"train": (x, y), "evaluation": (x[:77], y[:77])}


class Autoencoders(Autoencoder):
    def __init__(self, purpose):  # which Keras does not write down
        super().__init__()


def autoencoders():
    return Autoencoders("tests")


def autoencoder(**given):
    model = Autoencoder()
    model.compile("adam", **given)
    return model


class Distilled(keras.Model):
    '''Has a teacher, which is called in training only.'''

    def __init__(self, classes):
        super().__init__()
        make = lambda: keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(classes)])
        self.student, self.teacher = make(), make()
        self.teacher.trainable = False

    def call(self, x, training=False):
        x = keras.ops.cast(x, "float32") / 16
        found = self.student(x)
        if training:
            self.add_loss(keras.ops.mean(keras.ops.square(found - self.teacher(x))))
        return found


def distiller(input_shape, classes):
    def make(name, units):
        layers = keras.layers.Flatten(), keras.layers.Dense(units, "relu", name="hidden"), keras.layers.Dense(classes)
        return keras.Sequential([keras.Input(input_shape), keras.layers.Rescaling(1 / 255), *layers], name=name)

    losses = (
        keras.distillation.LogitsDistillation(loss="mse"),
        keras.distillation.FeatureDistillation(teacher_layer_name="hidden", student_layer_name="hidden"),
    )
    model = keras.distillation.Distiller(make("teacher", 16), make("student", 16), losses)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


class Powered(keras.layers.Layer):
    '''Keeps track of what it adds to the loss.'''

    def __init__(self):
        super().__init__()
        self.seed, self.power = keras.random.SeedGenerator(), keras.metrics.Mean(name="power")

    def call(self, x, training=False):
        power = keras.ops.mean(keras.ops.square(x))
        self.power.update_state(power)
        self.add_loss(0.1 * power)
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seed) if training else x


class Computing(keras.Model):
    def __init__(self, classes):
        super().__init__()
        hidden = keras.layers.Dense(16, "relu", kernel_regularizer="l2")
        self.hidden = keras.Sequential([keras.layers.Flatten(), keras.layers.Rescaling(1 / 255), hidden])
        self.powered, self.two = Powered(), [keras.layers.Dense(classes, name=name) for name in "ab"]
        self.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[["accuracy"], []])

    def call(self, x):
        x = self.powered(self.hidden(x))
        return [layer(x) for layer in self.two]

    def compile(self, optimizer, loss, metrics):  # takes less than Keras's
        super().compile(optimizer, loss, metrics=metrics)


class ComputingItself(Computing):
    def __init__(self, classes):
        super().__init__(classes)
        self.squared = keras.metrics.Mean(name="loss")  # as the run's own

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.squared.update_state(loss**2)
        return loss


class Tied(keras.metrics.Mean):
    '''Of several best classes takes one by lot, as metrics of rankings do.'''

    def __init__(self):
        super().__init__(name="tied")
        self.seed = keras.random.SeedGenerator(1)

    def update_state(self, y, y_pred, sample_weight=None):
        best = keras.ops.equal(y_pred, keras.ops.max(y_pred, axis=-1, keepdims=True))
        lots = [keras.random.uniform(keras.ops.shape(y_pred), seed=seed) for seed in (self.seed, None)]
        found = keras.ops.argmax(keras.ops.where(best, sum(lots), -1.0), axis=-1)
        super().update_state(keras.ops.equal(found, keras.ops.cast(y, found.dtype)), sample_weight)


def undecided(classes):
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(classes, kernel_initializer="zeros")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), loss, metrics=[Tied()])
    return model


class drawn:
    '''Draws by keras.random, as a user's augmentation may; while a step is traced, too.'''

    class Source:
        def __init__(self):
            self.known = np.stack([self.draw(i) for i in range(100)])

        def draw(self, i):
            time.sleep(0.001)
            return keras.ops.convert_to_numpy(keras.random.uniform((8,), seed=i))

        def __len__(self):
            return 1500

        def read(self, ids):
            x = np.stack([self.draw(int(i) % 100) for i in ids])
            if not np.array_equal(x, self.known[ids % 100]):
                raise ValueError("draws something else than before")
            return x, (x.sum(1) > 4).astype("int32")

    train, evaluation, classes = Source(), (np.zeros((1, 8)), np.zeros(1, "int32")), 2


def flat(classes):
    hidden = [keras.layers.Dense(32, "relu") for _ in range(8)]  # takes some time to trace
    return keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(classes)])


def twice():
    data = digits.load()
    train, evaluation = (Arrays(part.arrays[0], (part.arrays[1],) * 2) for part in (data.train, data.evaluation))
    return {"train": train, "evaluation": evaluation, "classes": 10}


def tuned(input_shape, classes):
    layers = [keras.layers.Flatten(), keras.layers.Dense(600, "relu"), keras.layers.Dense(600, "relu", trainable=False)]
    normalized = keras.layers.BatchNormalization()  # which changes its statistics
    return keras.Sequential([keras.Input(input_shape), *layers, normalized, keras.layers.Dense(classes)])


class Judged(keras.metrics.Mean):
    '''By another model, as of images that were made.'''

    def __init__(self):
        super().__init__(name="judged")
        self.judge = keras.Sequential([keras.Input((10,)), keras.layers.Dense(1, kernel_initializer="ones")])

    def update_state(self, y, y_pred, sample_weight=None):
        super().update_state(self.judge(y_pred)[:, 0], sample_weight)


class Weighing(keras.Model):
    '''Learns what its loss weighs (Kendall et al. 2018), and counts what the loss has seen.'''

    def __init__(self, classes):
        super().__init__()
        self.layer = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(classes)])
        self.log_variance = self.add_weight(shape=(), initializer="zeros", name="log_variance")
        self.seen = self.add_weight(shape=(), initializer="zeros", name="seen", trainable=False)

        def weighed(y, y_pred):
            self.seen.assign_add(1.0)
            values = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
            return values * keras.ops.exp(-self.log_variance) + self.log_variance

        def log_variance(y, y_pred):
            return keras.ops.zeros_like(y_pred[:, 0]) + self.log_variance

        def seen(y, y_pred):
            return keras.ops.zeros_like(y_pred[:, 0]) + self.seen

        self.compile(keras.optimizers.SGD(0.01), weighed, metrics=[log_variance, seen, Judged()])

    def call(self, x):
        return self.layer(x)


def sure(classes):
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(classes, activation="softmax")])
    metric = keras.metrics.SparseCategoricalCrossentropy(name="again")
    model.compile(keras.optimizers.SGD(0.001), "sparse_categorical_crossentropy", metrics=[metric])
    return model


class Squared(keras.losses.Loss):
    '''Keras's function of that name would take labels (batch,) with outputs (batch, 1); the - broadcasts them.'''

    def call(self, y, y_pred):
        squares = keras.ops.square(y - y_pred)
        return keras.ops.mean(keras.ops.reshape(squares, (squares.shape[0], -1)), axis=-1)


def squared(broadcast):
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
    if not broadcast:
        model.add(keras.layers.Reshape(()))
    model.compile(loss=Squared())
    return model


class columns:
    x = np.random.default_rng(0).normal(size=(500, 4)).astype("float32")
    train = evaluation = Arrays(x, x[:, :3])


class weightless:
    train = Arrays(columns.x, columns.x[:, :3], np.zeros(500))


def column(units):
    model = keras.Sequential([keras.layers.Dense(units)])
    model.compile(loss="mse")
    return model


def regressed():
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile("adam", "mse", metrics=[keras.metrics.R2Score(num_regressors=2, name="r2")])
    return model


def in_pairs():
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(8), keras.layers.UnitNormalization()])
    model.compile(loss=keras.losses.Circle())
    return model


def cut(threshold):
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
    metrics = [keras.metrics.BinaryAccuracy(threshold=threshold), keras.metrics.AUC(from_logits=not threshold)]
    model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True), metrics=metrics)
    return model


def compiled():
    model = Net(name="compiled")
    model.compile(loss="binary_crossentropy", metrics=["binary_accuracy", keras.metrics.AUC(name="auc")])
    return model


def two_rates(input_shape, classes, rate=0.01):
    layers = keras.layers
    hidden, out = layers.Dense(16, "relu", name="hidden"), layers.Dense(classes, name="out")
    model = keras.Sequential([keras.Input(input_shape), layers.Rescaling(1 / 16), layers.Flatten(), hidden, out])
    adam, sgd = keras.optimizers.Adam(rate), keras.optimizers.SGD(0.1)
    optimizer = keras.optimizers.MultiOptimizer(lambda variable: adam if "hidden" in variable.path else sgd)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class SaysWhatIsImported(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        print("imported tensorflow:", "tensorflow" in sys.modules)


class Rise(keras.optimizers.schedules.LearningRateSchedule):
    '''As those of most tutorials, without a get_config().'''

    def __init__(self, steps):
        self.steps = steps

    def __call__(self, step):
        return 0.001 * keras.ops.minimum(1.0, keras.ops.cast(step + 1, "float32") / self.steps)


def linear(input_shape, classes, factor=None, decays=None, built=False, steps=0):
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])
    sgd = keras.optimizers.SGD(Rise(steps) if steps else 0.001, loss_scale_factor=factor, weight_decay=decays and 9.0)
    if decays:
        sgd.exclude_from_weight_decay(var_names=[decays])
    if built:
        sgd.build(model.trainable_variables)
    model.compile(sgd, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Scale(keras.layers.Layer):
    '''Numbers alone, one of them trained, of one name.'''

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="number")
        self.mean = self.add_weight(shape=(), initializer="zeros", name="number", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x))
        return x * self.scale


def in_8_bits(classes):
    model = net(classes)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dense):
            layer.quantize("float8")
    return model


def scaled(input_shape, classes):
    layers = [keras.layers.Rescaling(1 / 16), keras.layers.Flatten(), Scale(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *layers])


def in_jax(input_shape, classes):
    def make(rng, inputs):
        return {"kernel": np.linspace(-1, 1, inputs.shape[-1] * 8, dtype="float32").reshape(-1, 8)}

    def call(params, inputs):
        return inputs @ params["kernel"]

    layers = [keras.layers.Flatten(), keras.layers.Rescaling(1 / 16), keras.layers.JaxLayer(call, make)]
    return keras.Sequential([keras.Input(input_shape), *layers, keras.layers.Dense(classes)])


class Forgetful(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight((shape[-1],), "ones", name="scale")

    def call(self, x):
        return x * self.scale

    def save_own_variables(self, store):
        pass

    def load_own_variables(self, store):
        pass


def lent(input_shape, classes):
    hidden = keras.layers.Dense(16, "relu", name="hidden")
    layers = [keras.layers.RandomFlip(seed=3), keras.layers.Flatten(), keras.layers.Rescaling(1 / 16), Forgetful()]
    model = keras.Sequential([keras.Input(input_shape), *layers, hidden, keras.layers.Dense(classes)])
    hidden.enable_lora(2)
    return model


class UntilLearnt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = logs["accuracy"] > 0.8


class Freeze(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[-1].trainable = False


class Recompile(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")


PENALTY = keras.Variable(1.0, trainable=False, name="penalty")


def judged(input_shape, classes):
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])
    model.compile("sgd", lambda y, p: PENALTY * keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True))
    return model


class Penalize(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        PENALTY.assign_add(1.0)


def dropping(input_shape, classes):
    layers = [keras.layers.Flatten(), keras.layers.Dropout(0.5, name="drop"), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *layers])


class Faster(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.beta_1 = 0.8


class DropLess(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.get_layer("drop").rate *= 0.9


class Annealed(keras.Model):
    '''Its noise and its loss change with the steps.'''

    def __init__(self, classes):
        super().__init__()
        self.flat, self.dense = keras.layers.Flatten(), keras.layers.Dense(classes)
        self.seed = keras.random.SeedGenerator()

    def call(self, x, training=False):
        logits = self.dense(self.flat(x) / 255)
        if self.optimizer is None:
            return logits
        share = keras.ops.minimum(1.0, keras.ops.cast(self.optimizer.iterations, "float32") / 30)
        self.add_loss(share * keras.ops.mean(keras.ops.square(logits)))
        if training:
            logits += (1 - share) * keras.random.normal(keras.ops.shape(logits), seed=self.seed)
        return logits * (1 + self.optimizer.learning_rate)


def annealed(input_shape, classes):
    model = Annealed(classes)
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Normalized(keras.layers.Layer):
    def __init__(self, graph):
        super().__init__()
        self.dense, self.normalize = keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization()
        self.dropout, self.graph = keras.layers.Dropout(0.2), None
        if graph:
            import tensorflow as tf

            self.graph, self.normalized = tf, tf.function(self.normalized)

    def build(self, shape):
        self.dense.build(shape)
        self.normalize.build((None, 16))

    def normalized(self, x, training):
        x = self.normalize(self.dense(x), training=training)
        if self.graph and self.graph.math.reduce_max(x) > 1e6:  # which AutoGraph makes a branch of
            x = 0.0 * x
        return self.dropout(x, training=training)

    def call(self, x, training=False):
        return self.normalized(x, training)


def normalized(input_shape, classes, graph):
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), Normalized(graph), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *layers])


class Noisy(keras.optimizers.SGD):
    '''Langevin dynamics, nearly.'''

    def __init__(self, rate):
        super().__init__(rate)
        self.seed = keras.random.SeedGenerator()

    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(variable.shape, seed=self.seed)
        super().update_step(gradient + noise, variable, learning_rate)


def shaken(input_shape, classes):
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])
    model.compile(Noisy(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Scales(keras.callbacks.Callback):
    '''Sets all up when training begins, and more at each epoch.'''

    def __init__(self):
        super().__init__()
        self.losses, self.by_epoch, self.parts = [], {}, ()
        self.last, self.seen, self.counts = collections.deque(maxlen=2), set(), np.zeros((2, 2), "float32")

    def on_train_begin(self, logs=None):
        self.model.layers[-1].kernel.assign(0.5 * self.model.layers[-1].kernel)

    def on_epoch_begin(self, epoch, logs=None):
        self.losses.append(-0.1)
        self.parts += (0.01 * epoch,)
        steps = (*self.losses, *self.by_epoch.values(), *self.parts, *self.last, *self.seen, self.counts.sum())
        self.model.layers[-1].bias.assign(self.model.layers[-1].bias - sum(steps))

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(round(logs["loss"], 2))
        self.by_epoch[epoch] = round(logs["accuracy"], 2)
        self.last.append(0.1 * epoch)
        self.seen |= {0.2, 0.3 * epoch}
        self.counts[epoch % 2] += 0.1


class PerBatch(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.001 * batch

    def on_test_end(self, logs=None):
        print(logs)

    def on_batch_end(self, batch, logs=None):
        pass


def quiet():
    return keras.callbacks.LambdaCallback(on_epoch_end=print)


def falling():
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8)


class Uses(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        x, y = digits.load().evaluation.read(np.arange(360))
        found = self.model.evaluate(x, y, 360, verbose=0, return_dict=True)
        assert np.isclose(found["loss"], logs["val_loss"], rtol=1e-5), (found, logs)
        assert np.allclose(self.model.predict(x, 360, verbose=0), self.model(x), rtol=1e-5, atol=1e-5)
        self.model.save_weights("used.weights.h5")
        kept = self.model.get_weights()
        self.model.load_weights("used.weights.h5")
        assert all(map(np.array_equal, kept, self.model.get_weights()))


class Note(keras.callbacks.Callback):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch, logs=None):
        optimizer = self.model.optimizer
        rate, steps = float(optimizer.learning_rate), int(optimizer.iterations)
        open(self.path, "a").write(f"{epoch} {rate:.3g} {steps} {sorted(logs)}\\n")

def pages(more, kinds=4):
    '''What of_pages() takes; or a column more, and no dims of 1.'''
    random = np.random.default_rng(0)
    x = {name: random.normal(size=(512, 1)).astype("float32") for name in ("area", "middle", "zone")}
    x |= {"kind": random.integers(0, kinds, (512, 1)), "page": random.normal(size=(512, 6, 6, 1)).astype("float32")}
    y = (x["zone"][:, 0] > x["area"][:, 0]).astype("int32")
    if more:
        return {"none": None} | {name: column[..., 0] for name, column in x.items()}, y
    del x["middle"]
    return x, y


class Signed(Circles):
    def read(self, ids):
        x, y = super().read(ids)
        return x["points"], {"logits": y}, {"logits": (ids % 3 - 1.0).astype("float32")}  # as advantages are


class signed_data:
    train = Signed(500, 0)


class Twice(keras.Sequential):
    def call(self, x, training=None):
        y = super().call(x, training=training)
        return {"logits": y, "squares": keras.ops.square(y)}


def signed(twice):
    made = (Twice if twice else keras.Sequential)([keras.Input((2,)), keras.layers.Dense(2, name="logits")])
    made.compile("sgd", {"logits": keras.losses.SparseCategoricalCrossentropy(from_logits=True)})
    return made


@keras.saving.register_keras_serializable("test")
class Ignored(keras.layers.Layer):
    def call(self, x, ignored=None):
        return x if ignored is None else x / 0


def of_pages(named):
    layers, shapes = keras.layers, {"zone": (1,), "page": (6, 6, 1), "area": (1,)}
    x = {name: keras.Input(shape, name=name) for name, shape in shapes.items()}
    x |= {"kind": keras.Input((1,), dtype="int32", name="kind"), "none": keras.Input((1,), optional=True, name="none")}
    parts = layers.Conv2D(2, 3)(x["page"]), layers.Embedding(4, 2, name="of_kinds")(x["kind"])
    y = layers.Concatenate()([*map(layers.Flatten(), parts), x["area"], x["zone"]])
    return keras.Model(x if named else list(x.values()), layers.Dense(2)(Ignored()(y, x["none"])))
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "my_project.py").write_text(textwrap.dedent(PROJECT))
    return tmp_path


IN_16_BITS = """
import keras

def build(input_shape, classes):
    layers = keras.layers
    return keras.Sequential([keras.Input(input_shape), layers.Rescaling(1 / 16), layers.Flatten(),
        layers.Dense(32, "silu"), layers.RMSNormalization(), layers.Dense(classes)])
"""


def test_a_model_in_16_bits_is_exported(tmp_path):
    """A SavedModel's graph rounds elsewhere than the model that is called."""
    (tmp_path / "narrow.py").write_text(IN_16_BITS)
    flags = ("--model=narrow:build", "--precision=mixed_bfloat16", "--steps=100", "--evaluate_every=never")
    trainer(*flags, "--run_dir=run", cwd=tmp_path)
    assert "agrees with the model" in trainer("export", "--run_dir=run", cwd=tmp_path).stdout


def test_evaluate_and_export(project):
    """Anywhere, whatever the layout; and of the averages that the optimizer keeps."""
    averages = "--optimizer=adam(use_ema=True, ema_momentum=0.9)"
    flags = ("--dataset=my_project:data", "--model=my_project:net", "--run_dir=run", "--epochs=5", averages)
    trainer("--strategy=device_mesh", "--devices=2", "--layout=fsdp", *flags, cwd=project)
    final = summary(project / "run")["final"]
    assert final["test_accuracy"] > 0.9
    for elsewhere in ((), ("--strategy=mirrored", "--devices=3"), ("--backend=tensorflow",)):
        out = trainer("evaluate", "--run_dir=run", *elsewhere, cwd=project).stdout
        found = json.loads(out.splitlines()[-1])
        assert found["test_accuracy"] == pytest.approx(final["test_accuracy"], abs=1e-7)
        assert found["test_loss"] == pytest.approx(final["test_loss"], rel=1e-5)
    earlier = sorted((project / "run" / "checkpoints").glob("0*"))[-2]
    out = trainer("evaluate", f"--run_dir={earlier}", cwd=project).stdout
    assert json.loads(out.splitlines()[-1])["step"] == int(earlier.name) < summary(project / "run")["step"]
    export = project / "run" / "export"
    for name in ("saved_model", "classes.txt", "mine"):  # of an earlier one, and what somebody has made of it
        (export / name).mkdir(parents=True)
    out = trainer("export", "--run_dir=run", cwd=project).stdout
    assert "agrees with the model" in out and "model.keras" in out
    assert {path.name for path in export.iterdir()} == {"saved_model", "classes.txt", "mine", "model.keras"}
    assert (export / "classes.txt").read_text() == "outside\ninside\n"
    exported = keras.saving.load_model(export / "model.keras", compile=False).get_weights()
    arrays = checkpoint.arrays(*_saved(project / "run"))
    for kept in ("optimizer/", "layers/"):
        of_these = [value for name, value in arrays.items() if name.startswith(kept)]
        found = [any(np.array_equal(weights, value) for value in of_these) for weights in exported]
        assert all(found) if kept == "optimizer/" else not any(found)
    assert (export / "saved_model" / "saved_model.pb").exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_counters_count_exactly(backend, tmp_path):
    """Integers that float32 can't hold, and unsigned ones beyond their largest: two replicas, twenty steps."""
    flags = ("--model=tests.counting", "--replicas=2", "--steps=20", f"--run_dir={tmp_path}")
    trainer(f"--backend={backend}", *flags)
    arrays = checkpoint.arrays(*_saved(tmp_path))
    counters = [int(array) for name, array in sorted(arrays.items()) if "counter" in name]
    assert counters == [2**25 + 21, 14, -60]


def _saved(run_dir):
    newest = sorted((run_dir / "checkpoints").glob("0*"))[-1]
    return newest, checkpoint.verify(newest)


@pytest.mark.long
def test_layers_that_save_something_else_than_their_variables(project):
    """LoRA's are merged when Keras saves them, and a class may save what it pleases: still a run goes on to the bit."""
    flags = ("--backend=jax", "--model=my_project:lent", "--precision=bfloat16")
    trainer(*flags, "--steps=20", "--run_dir=whole", cwd=project)
    for steps in (10, 20):
        trainer(*flags, f"--steps={steps}", "--run_dir=cut", cwd=project)
    digests = {summary(project / name)["weights_sha256"] for name in ("whole", "cut")}
    assert len(digests) == 1
    out = trainer("export", "--run_dir=cut", cwd=project).stdout
    assert "/saved_model\n" in out and "no model.keras" in out and "classes of your own (Forgetful)" in out


def test_own_compiled_model_and_weights(project):
    """A subclassed model's own loss and metrics, example weights, 2,000 examples in batches of 48."""
    runs = []
    for strategy in (["--backend=tensorflow"], ["--strategy=mirrored", "--devices=2"]):
        runs.append(project / f"run{len(runs)}")
        ran = trainer(
            *strategy,
            "--dataset=my_project:weighted",
            "--model=my_project:compiled",
            "--replicas=2",
            "--global_batch=48",
            "--steps=80",
            "--log_every=1",
            f"--run_dir={runs[-1]}",
            cwd=project,
        )
        assert "float32; adam, learning rate 0.001" in ran.stdout  # compile() was given none
    assert deviation(curve(runs[0]), curve(runs[1])) <= 1e-5
    final = summary(runs[0])["final"]
    assert {"test_binary_accuracy", "test_auc", "auc"} <= final.keys()
    # 250 of the 501 evaluation examples have weight 1: the accuracy is a share of those.
    assert (final["test_binary_accuracy"] * 250) == pytest.approx(round(final["test_binary_accuracy"] * 250), abs=1e-3)
    # On either backend in the order of compile(), which is not that of the names.
    found = json.loads(
        trainer("evaluate", "--backend=jax", f"--run_dir={runs[0]}", cwd=project).stdout.splitlines()[-1]
    )
    for names in (final, found):
        assert [name for name in names if name.startswith("test_")] == ["test_loss", "test_binary_accuracy", "test_auc"]


@pytest.mark.long
def test_doubts_are_told_before_the_run(project):
    """A loss may mix the examples of a replica or compare one output with all labels, a metric cut logits at 0.5."""
    mixes, cuts = "loss  'squared' mixes the examples", "metrics  'binary_accuracy', 'auc' would be right for prob"
    broadcast = "loss  'mse' broadcasts labels (batch, 3) and outputs (batch, 1)"
    in_pairs = "loss  'circle' mixes the examples"
    for dataset, model, told in (
        ("digits", "squared(broadcast=True)", mixes),
        ("digits", "squared(broadcast=False)", None),
        ("digits", "cut(threshold=0.5)", cuts),
        ("digits", "cut(threshold=0)", None),
        ("my_project:weighted", "compiled", None),
        ("my_project:columns", "column(units=1)", broadcast),
        ("my_project:columns", "column(units=3)", None),
        ("digits", "in_pairs", in_pairs),
    ):
        flags = ("explain", "--backend=jax", f"--dataset={dataset}", f"--model=my_project:{model}")
        out = trainer(*flags, cwd=project).stdout
        assert [doubt for doubt in (mixes, cuts, broadcast, in_pairs) if doubt in out] == ([told] if told else []), out
        assert ("labels (batch,) and outputs (batch, 1) were broadcast" in out) == (told == mixes)


def test_examples_that_weigh_nothing_are_told(project):
    flags = ("--backend=jax", "--dataset=my_project:weightless", "--model=my_project:column(units=3)", "--steps=5")
    assert "nothing was trained up to step 5" in trainer(*flags, cwd=project).stdout


def test_a_model_that_is_sure_and_wrong(project):
    """Keras takes the logits of a softmax on TensorFlow alone, and clips on JAX: a loss of 198 would be 14 there."""
    curves = []
    for where in (
        ["--backend=tensorflow"],
        ["--backend=jax"],
        ["--strategy=device_mesh", "--devices=2", "--layout=fsdp"],
    ):
        run = project / str(len(curves))
        flags = (*where, "--model=my_project:sure", "--replicas=2", "--steps=10", "--log_every=1", f"--run_dir={run}")
        trainer(*flags, cwd=project)
        curves.append(curve(run))
        assert [line["again"] for line in lines(run)] == pytest.approx(curves[-1], rel=1e-5)
    assert curves[0][0] > 100
    assert max(deviation(curves[0], each) for each in curves) <= 1e-5


@pytest.mark.long
def test_segmentation(project):
    """Metrics of pixels, under weights of examples: the padding of an evaluation's last batch counts for nothing."""
    flags = ("--dataset=my_project:masks", "--model=my_project:segmentation", "--steps=40", "--replicas=2")
    trainer("--strategy=mirrored", "--devices=2", *flags, f"--run_dir={project / 'run'}", cwd=project)
    found = [summary(project / "run")["final"]]
    assert found[0]["test_iou"] > 0.5
    for where in (
        ["--backend=tensorflow"],
        ["--backend=jax"],
        ["--strategy=device_mesh", "--devices=2", "--global_batch=50"],
    ):
        ran = trainer("evaluate", f"--run_dir={project / 'run'}", *where, cwd=project)
        assert "Warning" not in ran.stderr
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    for each in found[1:]:
        assert {"test_iou", "test_loss"} <= each.keys()
        assert all(each[name] == pytest.approx(found[0][name], rel=1e-4) for name in each.keys() & found[0].keys())


def test_places_are_weighed_by_the_source_the_model_s_mask_or_the_loss(project):
    """It is one curve, on either backend and two devices; an evaluation is of 77 examples in batches of 64."""
    found = []
    mesh = ["--strategy=device_mesh", "--devices=2", "--layout=zero1"]
    for where, dataset, model in (
        (["--backend=jax"], "tokens", "tagger(mask=True)"),
        (["--backend=jax"], "tokens", "tagger(ignore=0)"),
        (["--strategy=mirrored", "--devices=2"], "tokens", "tagger(mask=True)"),
        (mesh, "tokens(weighs=True)", "tagger"),
    ):
        run = project / str(len(found))
        flags = (f"--dataset=my_project:{dataset}", f"--model=my_project:{model}")
        trainer(*where, *flags, "--replicas=2", "--steps=10", "--log_every=1", f"--run_dir={run}", cwd=project)
        final = summary(run)["final"]
        if "ignore" in model:  # which metrics don't know of
            final = {name: value for name, value in final.items() if "accuracy" not in name}
        found.append(final | dict(enumerate(curve(run))))
    for each in found:
        assert all(value == pytest.approx(found[0][name], rel=1e-5) for name, value in each.items())
    run, flags = project / "all", ("--dataset=my_project:tokens", "--model=my_project:tagger")
    trainer("--backend=jax", *flags, "--replicas=2", "--steps=10", "--log_every=1", f"--run_dir={run}", cwd=project)
    assert deviation([found[0][step] for step in range(10)], curve(run)) > 1e-3  # padding, where it counts, shows


@pytest.mark.long
def test_a_metric_of_elements_is_weighed_as_the_loss_is(project):
    """Whether examples or places in them have weights: of the former are those of a padded evaluation."""
    for i, weights in enumerate(("weighs=True", "weighs=True, held=False", "held=True")):
        flags = (f"--dataset=my_project:tokens({weights})", "--model=my_project:surprised", "--steps=5")
        trainer("--backend=jax", *flags, f"--run_dir={project / str(i)}", cwd=project)
        final = summary(project / str(i))["final"]
        assert final["surprise"] == pytest.approx(final["loss"], rel=1e-5)
        assert final["val_surprise"] == pytest.approx(final["val_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("dataset", "model"),
    [
        ("my_project:streamed_without_labels", "my_project:Autoencoder"),
        ("digits", "my_project:Distilled"),
        ("digits", "my_project:distiller"),
    ],
)
def test_losses_of_call_s_own(dataset, model, project):
    """Without labels they are all that there is; a part that training alone calls is built, too."""
    flags = (f"--dataset={dataset}", f"--model={model}", "--replicas=2", "--steps=30", "--log_every=1")
    wheres = ["--strategy=mirrored", "--devices=2"], ["--backend=jax"]
    runs = [project / str(i) for i in range(len(wheres))]
    for where, run in zip(wheres, runs, strict=True):
        trainer(*flags, *where, f"--run_dir={run}", cwd=project)
    curves = [curve(run) for run in runs]
    assert max(deviation(curves[0], other) for other in curves) <= 1e-5
    assert curves[0][-1] < curves[0][0]


def test_a_loss_of_call_s_counts_once_however_often_a_step_was_traced():
    """Keras knows the losses of a layer by the ids of tensors, also of those that are gone."""

    class Adding(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x))
            return x

    model = keras.Sequential([keras.Input((4,)), Adding(), Adding(), Adding()])
    counted = [len(stateless_call(model, [], [], np.ones((2, 4)), True, return_losses=True)[2]) for _ in range(300)]
    assert counted == [3] * 300


def test_a_compute_loss_of_its_own_is_the_loss(project):
    """One that gives what Keras's gives makes the same curve; what it and layers keep track of, is told."""
    finals = []
    for i, (where, model) in enumerate(
        (
            (["--backend=jax"], "Computing"),
            (["--strategy=device_mesh", "--devices=2"], "ComputingItself"),
            (["--strategy=mirrored", "--devices=2"], "ComputingItself"),
        )
    ):
        flags = ("--dataset=my_project:twice", f"--model=my_project:{model}", "--replicas=2", "--global_batch=60")
        out = trainer(*where, *flags, "--steps=20", f"--run_dir={project / str(i)}", cwd=project).stdout
        assert ("loss  what the model's compute_loss() returns" in out) == (i > 0)
        finals.append(summary(project / str(i))["final"])
    plain, *own = (pytest.approx(final, rel=1e-5) for final in finals)
    assert finals[1] == own[1]
    assert {name: finals[1][name] for name in finals[0]} == plain and finals[0]["val_power"] > 0
    assert finals[1]["val_computing_itself_loss"] == pytest.approx(finals[1]["val_loss"] ** 2, rel=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_source_draws_as_ever_while_a_step_is_traced(backend, project):
    """What Keras does otherwise in a step is not for the threads that read."""
    flags = ("--dataset=my_project:drawn", "--model=my_project:flat", "--epochs=1", f"--backend={backend}")
    trainer(*flags, "--run_dir=run", cwd=project)


def test_a_loss_uses_the_model_s_variables(project):
    """As in fit(): those to be trained are, and what it changes of the others stays."""
    found = []
    for i, where in enumerate((["--strategy=mirrored", "--devices=2"], ["--backend=jax"])):
        run = project / str(i)
        flags = ("--model=my_project:Weighing", "--replicas=2", "--steps=10", "--log_every=1", f"--run_dir={run}")
        trainer(*where, *flags, cwd=project)
        found.append(summary(run)["final"] | dict(enumerate(curve(run))))
    assert all(value == pytest.approx(found[1][name], rel=1e-5) for name, value in found[0].items())
    assert found[0]["val_seen"] == 11 and abs(found[0]["val_log_variance"]) > 0.01


def test_what_is_not_trained_is_not_moved(project):
    """Such as a frozen backbone: it would be added up over the devices at each step."""
    out = trainer("explain", "--model=my_project:tuned", "--strategy=device_mesh", "--devices=2", cwd=project).stdout
    moved = re.search(r"all-reduce a step, ([\d.]+) kB", out)
    assert moved and float(moved[1]) < 4 * (65 * 600 + 4 * 600 + 601 * 10 + 100) / 1000  # of 1,440 kB more
    curves = []
    for where in (["--backend=jax"], ["--strategy=mirrored", "--devices=2"]):
        run, shared = project / where[0], ("--model=my_project:tuned", "--replicas=2", "--steps=5", "--log_every=1")
        trainer(*where, *shared, "--optimizer=sgd", f"--run_dir={run}", cwd=project)
        curves.append(curve(run))
    assert deviation(*curves) <= 1e-5


def test_an_optimizer_s_noise_follows_from_the_step(project):
    """Whatever the devices, the backend and the starts."""
    curves = []
    for i, (where, ends) in enumerate(((["--strategy=mirrored", "--devices=2"], [10]), (["--backend=jax"], [4, 10]))):
        flags = (*where, "--model=my_project:shaken", "--replicas=2", "--log_every=1", f"--run_dir={project / str(i)}")
        for steps in ends:
            trainer(*flags, f"--steps={steps}", cwd=project)
        curves.append(curve(project / str(i)))
    assert deviation(*curves) <= 1e-5


@pytest.mark.long
def test_a_file_that_keras_can_t_load_on_tensorflow(tmp_path):
    """Of a recurrent network in bfloat16, of which TensorFlow draws no orthogonal matrix; the SavedModel is there."""
    flags = ("--backend=jax", "--model=tests.drawn_flags_test:recurrent", "--precision=bfloat16", "--steps=2")
    trainer(*flags, f"--run_dir={tmp_path}")
    out = trainer("export", f"--run_dir={tmp_path}").stdout
    assert "/saved_model\n" in out and "no model.keras: Keras can't load it again on TensorFlow: Value for attr" in out


@pytest.mark.long
def test_a_model_compiled_without_a_loss_has_its_own_alone(project):
    """As in fit(): labels are for its metrics."""
    finals = []
    for dataset, model in (
        ("without_labels", "autoencoders"),
        ("with_useless_labels", "autoencoder"),
        ("with_useless_labels", "autoencoder(metrics=['accuracy'])"),
    ):
        flags = (f"--dataset=my_project:{dataset}", f"--model=my_project:{model}", "--steps=10")
        ran = trainer("--backend=jax", *flags, f"--run_dir={project / str(len(finals))}", cwd=project)
        assert ("loss  what call() adds by add_loss()" in ran.stdout) == bool(finals)
        finals.append(summary(project / str(len(finals)))["final"])
    assert finals[0]["loss"] == finals[1]["loss"] == finals[2]["loss"]
    assert ["accuracy" in final for final in finals] == [False, False, True]
    for i, why_not in enumerate((["Autoencoders was created by passing", "(Autoencoders) need @keras"], [])):
        out = trainer("export", f"--run_dir={project / str(i)}", cwd=project).stdout
        assert "agrees with the model" in out and ("no model.keras" in out) == bool(why_not)
        assert all(words in out for words in why_not)


def test_a_metric_may_draw(project):
    """By the key of the step and replica, whatever the backend and the devices."""
    found = []
    for i, where in enumerate((["--strategy=mirrored", "--devices=2"], ["--backend=jax"])):
        run = project / str(i)
        flags = ("--model=my_project:undecided", "--replicas=2", "--steps=8", "--log_every=2", f"--run_dir={run}")
        trainer(*where, *flags, cwd=project)
        found.append([line["tied"] for line in lines(run)] + [summary(run)["final"]["test_tied"]])
    assert found[0] == found[1] and len(set(found[0])) == 5
    assert all(0.02 < value < 0.25 for value in found[0])


def test_a_metric_that_looks_at_its_numbers(project):
    """How many examples there were decides what R2Score of several regressors computes: no compiled program can."""
    flags = ("--dataset=my_project:columns", "--model=my_project:regressed", "--steps=40", "--run_dir=run")
    trainer("--backend=jax", *flags, cwd=project)
    ran = trainer("evaluate", "--run_dir=run", "--backend=tensorflow", cwd=project)
    again = json.loads(ran.stdout.splitlines()[-1])["test_r2"]
    assert summary(project / "run")["final"]["test_r2"] == pytest.approx(again, rel=1e-5)


def test_a_metric_of_elements_of_one_s_own(project):
    """An evaluation of 77 examples in batches of 64: its padding counts nowhere. The metric has two results."""
    flags = ("--backend=jax", "--dataset=my_project:tokens", "--model=my_project:surprised", "--steps=10")
    trainer(*flags, "--run_dir=run", cwd=project)
    final = summary(project / "run")["final"]
    assert final["test_surprise"] == pytest.approx(final["test_loss"], rel=1e-5)
    assert final["surprise"] == pytest.approx(final["loss"], rel=1e-5)
    assert final["val_perplexity"] == pytest.approx(np.exp(final["val_loss"]), rel=1e-5)


def test_a_build_that_clears_keras_s_session(project):
    """By a habit of notebooks: the precision stays, and the devices and names of variables, and it runs everywhere."""
    wheres = ["--strategy=device_mesh", "--layout=fsdp", "--precision=mixed_bfloat16"], ["--strategy=mirrored"]
    for where in wheres:
        said, digests = [], []
        for model in ("forgetful", "not_forgetful"):
            flags = (*where, "--devices=2", f"--model=my_project:{model}", "--steps=3", f"--run_dir={project / model}")
            said += re.findall("memory.*", trainer(*flags, cwd=project).stdout)
            digests.append(summary(project / model)["weights_sha256"])
            shutil.rmtree(project / model)
        assert len(said) == 2 and len(set(said)) == len(set(digests)) == 1


def test_a_lambda_is_known_by_what_it_computes():
    """Not by its file and line: a run goes on from another directory, or with a comment more above."""

    def known(text, file="model.py"):
        return serialized(keras.layers.Lambda(eval(compile(text, file, "eval")), name="named"))

    text = "lambda x: x / 255 if 'a' in {'a', 'b'} else (lambda y: y)(x)"
    assert known(text) == known("\n\n" + text, "/elsewhere/model.py")
    assert len({known(text), known(text.replace("255", "254")), known(text.replace("/", "*")), known("len")}) == 4


@pytest.mark.long
def test_what_keras_overwrites_with_its_gradient(project):
    """The scales of float8: what replicas give them is neither added up nor weighed, sharded or not."""
    model = ("--dataset=my_project:weighted", "--model=my_project:in_8_bits")
    assert "is overwritten at each step" in trainer("probe", "--backend=jax", *model, cwd=project).stdout
    optimizer = "--optimizer=adam(use_ema=True)"  # of scales, it keeps no averages
    flags, scales, curves = (*model, optimizer, "--replicas=4", "--steps=20", "--log_every=1"), [], []
    wheres = ("--backend=jax",), ("--backend=tensorflow",), ("--strategy=device_mesh", "--devices=2", "--layout=fsdp")
    for i, where in enumerate(wheres):
        trainer(*flags, *where, f"--run_dir={i}", cwd=project)
        curves.append(curve(project / str(i)))
        saved = sorted(checkpoint.arrays(*_saved(project / str(i))).items())
        of_layers = [value for name, value in saved if name.startswith("layers/")]
        scales.append([value for value in of_layers if not value.shape])
        largest = [np.abs(kernel).max() for kernel in of_layers if kernel.ndim == 2]
        assert np.allclose(scales[-1][1::3], np.divide(largest, 448), rtol=0.05)  # of the kernels of a step before
        assert np.allclose(scales[-1], scales[0], rtol=1e-3)
    assert max(deviation(curves[0], each) for each in curves) <= 2e-3  # a number has 3 bits, and rounds by a 16th


@pytest.mark.long
def test_a_layer_written_in_jax(project):
    """On TensorFlow too, which loses sight of how many examples come out of it."""
    for backend in BACKENDS:
        flags = ("--model=my_project:in_jax", "--steps=10", "--log_every=1", f"--run_dir={backend}")
        trainer(f"--backend={backend}", *flags, cwd=project)
    assert deviation(*(curve(project / backend) for backend in BACKENDS)) <= 1e-4


def test_labels_find_their_outputs(project):
    """By name, in whatever order; by place, where neither has names; else it is not guessed. Outputs may have none."""
    flags, found = ("--backend=jax", "--steps=5", "--log_every=1"), []
    for labels, outputs in (
        (True, "named=True"),
        (True, "named=False"),
        (False, "named=False"),
        (True, "named=True, code=True"),
        (True, "named=False, code=True"),
    ):
        where = f"--dataset=my_project:pairs(named={labels})", f"--model=my_project:two_outputs({outputs})"
        run = project / str(len(found))
        trainer(*flags, *where, f"--run_dir={run}", cwd=project)
        found.append(np.array([[line["loss"], line["alpha_mse"], line["zeta_mae"]] for line in lines(run)]))
        assert np.allclose(found[-1], found[0], rtol=1e-5)
    assert np.allclose(found[0][:, 0], found[0][:, 1:] @ [0.1, 3], rtol=1e-5)
    for labels, outputs, words in (
        (False, "named=True", ["outputs alpha, zeta", "labels without names"]),
        (False, "named=True, code=True", ["has 3 outputs", "2 labels", "a dict of labels by output"]),
        (True, "named=True, code=True, zeta_loss='zetta'", ["loss of zetta", "outputs are alpha, code, zeta"]),
    ):
        where = f"--dataset=my_project:pairs(named={labels})", f"--model=my_project:two_outputs({outputs})"
        said = trainer(*flags, *where, "--run_dir=other", cwd=project, code=2).stderr
        assert all(word in said for word in words), said
    said = trainer("evaluate", "--run_dir=0", cwd=project, code=2).stderr
    assert "has no examples but those that are trained on" in said


def test_outputs_of_a_sequential_model(project):
    """Its last layer's name is its output's; of a call() of its own, outputs are what that returns."""
    for backend, twice in (("jax", False), ("jax", True), ("tensorflow", True)):
        flags = ("--dataset=my_project:signed_data", f"--model=my_project:signed({twice=})", "--steps=3")
        trainer(f"--backend={backend}", *flags, "--log_every=1", f"--run_dir={backend}{twice}", cwd=project)
    assert deviation(curve(project / "jaxFalse"), curve(project / "jaxTrue")) <= 1e-5
    assert deviation(curve(project / "jaxFalse"), curve(project / "tensorflowTrue")) <= 1e-5


@pytest.mark.long
def test_columns_find_their_inputs(project):
    """By name, though there are more than a model needs or fewer, and with or without a last dim of 1, as by fit()."""
    flags, curves = ("--replicas=2", "--steps=10", "--log_every=1"), []
    for where, more, named in (
        ("--backend=jax", False, True),
        ("--backend=jax", True, True),
        ("--backend=jax", True, False),
        ("--backend=tensorflow", True, True),
    ):
        what = f"--dataset=my_project:pages(more={more})", f"--model=my_project:of_pages(named={named})"
        trainer(where, *flags, *what, f"--run_dir={len(curves)}", cwd=project)
        curves.append(curve(project / str(len(curves))))
    assert max(deviation(curves[0], each) for each in curves) <= 1e-5
    out = trainer("export", "--run_dir=1", cwd=project).stdout
    assert "agrees with the model" in out and "no model.keras" not in out
    assert "nothing found" in trainer("probe", *what, cwd=project).stdout
    what = "--dataset=my_project:pages(more=True, kinds=5)", "--model=my_project:of_pages(named=True)"
    assert "input 4 of example" in trainer(*flags, *what, "--run_dir=other", cwd=project, code=2).stderr


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
@pytest.mark.long
def test_outputs_are_weighed_apart(project, monkeypatch):
    """As fit() takes weights by output: they multiply its loss, in a mean over all examples, and weigh its metrics."""
    monkeypatch.syspath_prepend(project)
    my_project = importlib.import_module("my_project")
    for weighs, named in (("total tags", True), ("tags", False), ("in order", False)):
        flags = (f"--dataset=my_project:tagged(weighs={weighs!r})", f"--model=my_project:tagger_and_adder({named=})")
        wheres, curves = [["--backend=jax"]], []
        if weighs == "total tags":
            wheres += [["--strategy=device_mesh", "--devices=2"], ["--strategy=mirrored", "--devices=2"]]
        for where in wheres:
            run = project / f"{weighs} {named} {len(curves)}"
            trainer(*flags, *where, "--replicas=2", "--steps=20", "--log_every=1", f"--run_dir={run}", cwd=project)
            curves.append(curve(run))
        assert max(deviation(curves[0], other) for other in curves) <= 1e-5
        model = my_project.tagger_and_adder(named)
        model.load_weights(_saved(run)[0] / checkpoint.WEIGHTS)
        outputs = {name: model.get_layer(name).output for name in ("tags", "total")}
        model = my_project.compiled_for_both(keras.Model(model.inputs, outputs))  # fit() asks for all names everywhere
        examples = my_project.tagged()["evaluation"]
        if weighs == "tags":
            examples.weights["total"] = np.ones(77)
        found = model.evaluate(examples.x, examples.y, 77, 0, examples.weights, return_dict=True)
        final = summary(run)["final"]
        for name in ("loss", "tags_loss", "total_loss", "tags_accuracy", "total_mae"):
            assert final[f"test_{name}"] == pytest.approx(found[name], rel=1e-5)
    flags = ("--dataset=my_project:weighed_without_labels", "--model=my_project:Autoencoder", "--run_dir=other")
    said = trainer("--backend=jax", *flags, cwd=project, code=2).stderr
    assert "is given weights of decoded, and no output has a loss that they could weigh" in said


@pytest.mark.long
def test_the_mask_of_an_output_that_is_weighed_apart_is_part_of_its_weights(project):
    """The other outputs need none, or another."""
    finals = []
    for backend, weighs, masks in (("jax", "words", False), ("jax", "all", True), ("tensorflow", "all", True)):
        flags = (f"--dataset=my_project:words({weighs=})", f"--model=my_project:of_words({masks=})", "--replicas=2")
        run = f"--run_dir={len(finals)}"
        trainer(f"--backend={backend}", *flags, "--steps=20", run, cwd=project)
        finals.append(summary(project / str(len(finals)))["final"])
    assert all(final == pytest.approx(finals[0], rel=1e-5) for final in finals)
    assert finals[0]["test_loss"] == pytest.approx(finals[0]["test_first_loss"] + finals[0]["test_each_loss"], rel=1e-5)


def test_the_optimizer_of_a_compiled_model(project):
    """It is the run's, even if it is two: on either backend, on two devices; with another one it is another run."""
    flags = ("--model=my_project:two_rates", "--replicas=2", "--log_every=4", "--evaluate_every=never")
    wheres = (["--backend=tensorflow"], ["--backend=jax"], ["--strategy=mirrored", "--devices=2"])
    runs = [project / f"run{i}" for i in range(len(wheres))]
    for where, run in zip(wheres, runs, strict=True):
        out = trainer(*flags, *where, "--steps=40", f"--run_dir={run}", cwd=project).stdout
        assert "Adam(" in out and "+ SGD(" in out and "learning rate 0.01 (constant + constant)" in out
    assert max(deviation(curve(runs[0]), curve(run)) for run in runs) <= 1e-5
    assert summary(runs[0])["final"]["loss"] < 1
    out = trainer("--backend=jax", "--model=my_project:loaded", "--steps=10", "--run_dir=loaded", cwd=project).stdout
    assert "SGD(" in out and "learning rate 0.05" in out
    out = trainer("evaluate", "--run_dir=loaded", cwd=project).stdout
    assert json.loads(out.splitlines()[-1])["step"] == 10  # as the optimizer counts: not from where it was left off
    flags = (*flags, "--backend=jax")
    trainer(*flags, "--steps=20", f"--run_dir={project / 'cut'}", cwd=project)
    changed = [*flags, "--model=my_project:two_rates(rate=0.02)", "--steps=40", f"--run_dir={project / 'cut'}"]
    said = trainer(*changed, cwd=project, code=2).stderr
    assert "learning_rate: 0.01" in said and "0.02" in said
    trainer(*flags, "--steps=40", f"--run_dir={project / 'cut'}", cwd=project)
    assert summary(project / "cut")["weights_sha256"] == summary(runs[1])["weights_sha256"]
    scaled = project / "scaled"
    trainer(*flags, "--precision=mixed_float16", "--steps=40", f"--run_dir={scaled}", cwd=project)
    assert deviation(curve(runs[1]), curve(scaled)) <= 0.02
    reducing = (
        *flags,
        "--callbacks=ReduceLROnPlateau(monitor='loss')",
        "--steps=40",
        f"--run_dir={project / 'reduced'}",
    )
    said = trainer(*reducing, "--precision=mixed_float16", cwd=project, code=2).stderr
    assert "does not find those of a MultiOptimizer" in said
    trainer(*reducing, cwd=project)
    for factor in (None, 1024.0):  # it scales the loss, and the gradients back
        model = f"--model=my_project:linear(factor={factor})"
        trainer("--backend=jax", model, "--steps=10", f"--run_dir={project / str(factor)}", cwd=project)
    assert curve(project / "None") == curve(project / "1024.0")
    for steps, code, words in ((5, 0, "(Rise(steps=5))"), (6, 2, "Rise(steps=5)")):
        model = f"--model=my_project:linear({steps=})"
        flags = (model, "--steps=10", "--run_dir=rising", "--callbacks=my_project:SaysWhatIsImported")
        done = trainer("--backend=jax", *flags, cwd=project, code=code)
        assert words in done.stdout + done.stderr
        assert code or "imported tensorflow: False" in done.stdout
    for decays, built in (("kernel", False), ("kernel", True), ("no kernel", True)):
        model = f"--model=my_project:linear({decays=}, {built=})"
        trainer("--backend=jax", model, "--steps=10", f"--run_dir={project / decays}{built}", cwd=project)
    assert curve(project / "kernelFalse") == curve(project / "kernelTrue") != curve(project / "no kernelTrue")


@pytest.mark.parametrize("where", [("--backend=jax",), ("--strategy=mirrored", "--devices=2")])
def test_keras_callbacks(where, project):
    trainer(
        *where,
        "--dataset=my_project:data",
        "--model=my_project:net",
        "--epochs=30",
        "--learning_rate=0.02",
        "--validation_fraction=0.2",
        "--callbacks=ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0.5)",
        "--callbacks=EarlyStopping(monitor='val_accuracy', patience=4, min_delta=0.5)",
        "--callbacks=my_project:Note(path='notes.txt')",
        "--run_dir=run",
        cwd=project,
    )
    logged = lines(project / "run")
    rates = [line["learning_rate"] for line in logged]
    assert rates[0] == pytest.approx(0.02) and rates[-1] < 0.011
    assert summary(project / "run")["status"] == "stopped by a callback"
    assert logged[-1]["step"] < 30 * 25
    notes = (project / "notes.txt").read_text().splitlines()
    assert notes[0] == "0 0.02 25 ['accuracy', 'learning_rate', 'loss', 'val_accuracy', 'val_loss']"
    assert len(notes) == sum("val_loss" in line for line in logged)


@pytest.mark.parametrize(
    "where",
    [
        ("--strategy=device_mesh", "--devices=2", "--layout=fsdp"),
        pytest.param(("--strategy=mirrored", "--devices=2"), marks=pytest.mark.long),
    ],
)
def test_a_callback_can_use_the_model(where, project):
    """It is as it stands after the epoch, and the run goes on with it as if nobody had looked."""
    flags = (*where, "--epochs=3")
    trainer(*flags, "--callbacks=my_project:Uses", "--run_dir=used", cwd=project)
    trainer(*flags, "--run_dir=left_alone", cwd=project)
    assert summary(project / "used")["weights_sha256"] == summary(project / "left_alone")["weights_sha256"]


def test_what_callbacks_set_at_a_beginning_is_not_set_anew_at_each_start(project):
    """on_train_begin() and on_epoch_begin() are called then, so that callbacks are ready; variables stay as saved."""
    flags = ("--backend=jax", "--dataset=my_project:data", "--model=my_project:net")
    flags += ("--callbacks=my_project:falling", "--callbacks=my_project:Scales")
    trainer(*flags, "--steps=70", "--run_dir=whole", cwd=project)
    for steps in (10, 40, 70):
        trainer(*flags, f"--steps={steps}", "--run_dir=cut", cwd=project)
    assert summary(project / "cut")["weights_sha256"] == summary(project / "whole")["weights_sha256"]
    assert lines(project / "whole")[-1]["learning_rate"] == pytest.approx(1e-3 * 0.8**3)  # in the third epoch


@pytest.mark.long
def test_numbers_alone_in_bfloat16(project):
    """Of no dims, TensorFlow gives numpy none."""
    flags = ("--model=my_project:scaled", "--precision=bfloat16", "--replicas=2", "--learning_rate=0.02")
    trainer(*flags, "--strategy=mirrored", "--devices=2", "--steps=20", "--run_dir=whole", cwd=project)
    for steps in (10, 20):
        trainer(*flags, f"--steps={steps}", "--run_dir=cut", cwd=project)
    assert summary(project / "cut")["weights_sha256"] == summary(project / "whole")["weights_sha256"]


def test_a_run_that_a_callback_has_stopped_goes_on_with_another(project):
    """What callbacks remember is what has changed of them, and no argument of the start before."""
    flags = ("--backend=jax", "--dataset=my_project:data", "--model=my_project:net", "--epochs=12", "--run_dir=run")
    stops = "--callbacks=EarlyStopping(patience={}, min_delta=9.0)"
    ends = []
    for patience in (1, 1, 3):  # the same command is done; one with more patience goes on, and counts from where it was
        out = trainer(*flags, stops.format(patience), cwd=project).stdout
        assert ("callbacks have changed" in out) == (patience == 3)
        ends.append(summary(project / "run")["step"])
    assert ends == [63, 63, 125]  # of epochs of 31.25 steps the first is the best, the second the end, then the fourth
    trainer(*flags, cwd=project)
    assert summary(project / "run")["status"] == "done"


@pytest.mark.parametrize(
    ("model", "callback", "changed", "fix"),
    [
        ("net", "Freeze", "which of the model's variables are trained", "--initialize_from"),
        ("net", "Recompile", "the model's optimizer, or its schedule", "--initialize_from"),
        ("dropping", "DropLess", "rate of drop from 0.5 to 0.45, no variable", "self.rate = self.add_"),
        ("dropping", "Faster", "beta_1 of adam from 0.9 to 0.8, no variable", "the learning rate is one"),
        ("judged", "Penalize", "penalty, which call() or a loss uses, and no layer has", "attribute of the model"),
    ],
)
def test_a_callback_that_changes_what_is_compiled_is_refused(model, callback, changed, fix, project):
    """Such as a frozen layer: under fit(), too, it would do nothing until the model is compiled anew."""
    flags = ("--backend=jax", f"--model=my_project:{model}", "--steps=40", "--run_dir=run")
    flags += ("--dataset=my_project:data",) * (model == "net")
    said = trainer(*flags, f"--callbacks=my_project:{callback}", cwd=project, code=2).stderr
    assert f"changed {changed}" in said and fix in said


def test_a_model_may_use_the_count_of_steps_and_the_learning_rate(project):
    """As they are at each step, on either backend and in evaluations, and after a restart."""
    flags = ("--model=my_project:annealed", "--replicas=2", "--log_every=5", "--evaluate_every=20")
    runs = {
        "tensorflow": [("--strategy=mirrored", "--devices=2", "--steps=40")],
        "whole": [("--strategy=device_mesh", "--devices=2", "--steps=40")],
        "cut": [("--strategy=device_mesh", f"--steps={steps}") for steps in (25, 40)],
    }
    for run, starts in runs.items():
        for where in starts:
            trainer(*flags, *where, f"--run_dir={run}", cwd=project)
    assert summary(project / "cut")["weights_sha256"] == summary(project / "whole")["weights_sha256"]
    assert deviation(curve(project / "tensorflow"), curve(project / "whole")) <= 1e-5
    final = [summary(project / run)["final"]["val_loss"] for run in ("tensorflow", "whole")]
    assert final[0] == pytest.approx(final[1], rel=1e-5)


@pytest.mark.parametrize("where", [(), ("--strategy=mirrored", "--devices=2")])
def test_a_layer_may_call_what_is_a_tf_function(where, project):
    """It has variables, a batch-norm's statistics and dropout, in training and in evaluations."""
    flags = (*where, "--replicas=2", "--steps=20", "--log_every=5", "--evaluate_every=10")
    for graph in (True, False):
        trainer(*flags, f"--model=my_project:normalized({graph=})", f"--run_dir={graph}", cwd=project)
    assert lines(project / "True")[-1]["val_loss"] == lines(project / "False")[-1]["val_loss"]
    assert curve(project / "True") == curve(project / "False")


def test_what_a_run_does_not_call_of_a_callback_is_told(project):
    flags = ("--backend=jax", "--steps=4", "--callbacks=my_project:PerBatch", "--callbacks=my_project:quiet")
    for every, also in (
        ("2epoch", "; told of a batch's end with each line of the log (--log_every=2epoch; 1"),
        ("1", ""),
    ):
        out = trainer(*flags, f"--log_every={every}", f"--run_dir={every}", cwd=project).stdout
        assert f"my_project:PerBatch: a run does not call on_train_batch_begin, on_test_end{also}" in out
        assert "my_project:quiet:" not in out


def test_a_callback_stops_a_run_within_an_epoch(project):
    flags = ("--backend=jax", "--dataset=my_project:data", "--model=my_project:net", "--learning_rate=0.02")
    where = ("--log_every=1", "--callbacks=my_project:UntilLearnt", "--run_dir=run")
    trainer(*flags, *where, cwd=project)
    logged = [line for line in lines(project / "run") if "loss" in line]
    said = summary(project / "run")
    assert logged[-1]["accuracy"] > 0.8 >= logged[-2]["accuracy"] and logged[-1]["step"] < 32
    assert said["status"] == "stopped by a callback" and said["best"]["step"] == said["step"] == logged[-1]["step"]
    assert said["final"]["val_loss"] == said["best"]["val_loss"]


RECORDER = """
import json

import keras


class Recorder(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        with open("epochs.jsonl", "a") as file:
            file.write(json.dumps({"epoch": epoch, **logs}) + "\\n")
"""


def test_what_callbacks_are_told_of_an_epoch_is_of_all_its_steps(tmp_path):
    """However often a line of the log is due, and wherever the run was ended and made longer."""
    (tmp_path / "recorder.py").write_text(RECORDER)
    flags = ("--backend=jax", "--global_batch=479", "--callbacks=recorder:Recorder", "--evaluate_every=6")  # 3 an epoch
    trainer(*flags, "--log_every=1", "--steps=12", "--run_dir=whole", cwd=tmp_path)
    steps = curve(tmp_path / "whole")
    whole = [json.loads(line) for line in (tmp_path / "epochs.jsonl").read_text().splitlines()]
    assert [each["epoch"] for each in whole] == [0, 1, 2, 3]
    for i, each in enumerate(whole):
        assert each["loss"] == pytest.approx(np.mean(steps[3 * i : 3 * i + 3]), rel=1e-6)
    assert "val_loss" not in whole[0] and whole[3]["val_loss"] != whole[2]["val_loss"] == whole[1]["val_loss"]
    (tmp_path / "epochs.jsonl").unlink()
    for end in (4, 5, 12):
        trainer(*flags, "--log_every=2", f"--steps={end}", "--run_dir=parts", cwd=tmp_path)
    parts = [json.loads(line) for line in (tmp_path / "epochs.jsonl").read_text().splitlines()]
    assert [each["epoch"] for each in parts] == [0, 1, 2, 3]
    for told, of_parts in zip(whole, parts, strict=True):
        for name in ("loss", "accuracy"):
            assert of_parts[name] == pytest.approx(told[name], rel=1e-6)


@pytest.mark.long
def test_what_keras_s_callbacks_tell_is_told_once(tmp_path):
    """By one process of several, and after a checkpoint was lost: each epoch once, and none that was told before."""
    table, board = tmp_path / "epochs.csv", tmp_path / "board"
    flags = (f"--callbacks=CSVLogger(filename={str(table)!r})", f"--callbacks=TensorBoard(log_dir={str(board)!r})")
    flags += ("--strategy=device_mesh", "--replicas=2", f"--run_dir={tmp_path / 'run'}")
    finished(launch(*flags, "--steps=100"))
    assert len(list((board / "train").iterdir())) == 1
    told = table.read_text().splitlines()
    assert [line.partition(",")[0] for line in told] == ["epoch", "0", "1", "2", "3"]
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-2:]
    for path in newest:  # of the end, and of the fourth epoch's
        shutil.rmtree(path)
    trainer(*flags, "--devices=2", "--steps=120")
    again = table.read_text().splitlines()
    assert again[:5] == told and [line.partition(",")[0] for line in again[5:]] == ["4"]
