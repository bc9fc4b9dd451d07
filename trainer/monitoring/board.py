"""What TensorBoard shows of a run, in its own format of files."""

import io
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from PIL import Image
from tensorboard.compat.proto import event_pb2, graph_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.plugins.histogram import metadata as histograms
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.image import metadata as images
from tensorboard.plugins.scalar import metadata as scalars
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.util.tensor_util import make_tensor_proto

from input_pipeline.tfrecord import framed
from trainer.storage.append import Appender

_NAME = "events.out.tfevents."
_SCALAR = scalars.create_summary_metadata("", "")


class Board:
    """Writes one file of events for each start of a run.

    Args:
      directory: TensorBoard's.
      told: the last step that starts before have told of for good; what a killed one wrote beyond, TensorBoard drops.
    """

    def __init__(self, directory: pathlib.Path, told: int) -> None:
        # TensorBoard reads files in the order of their names, and clocks may be set back.
        number = sum(1 for _ in directory.glob(f"{_NAME}*"))
        self._file = Appender(directory / f"{_NAME}{number:010d}")
        self._add(file_version="brain.Event:2")
        self._add(step=told + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A point of each of some curves, by tag."""
        points = [
            summary_pb2.Summary.Value(
                tag=tag, metadata=_SCALAR, tensor=tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, float_val=[value])
            )
            for tag, value in values.items()
        ]
        self._add(step=step, summary=summary_pb2.Summary(value=points))

    def text(self, step: int, tag: str, text: str) -> None:
        """A text in Markdown."""
        self._summary(step, text_pb(tag, _utf8(text)))

    def image(self, step: int, tag: str, pixels: npt.NDArray[np.uint8]) -> None:
        """A picture, uint8 (height, width, 3)."""
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        size = [str(pixels.shape[1]).encode(), str(pixels.shape[0]).encode()]
        self._tensor(step, tag, images.create_summary_metadata("", ""), np.array([*size, file.getvalue()]))

    def histogram(self, step: int, tag: str, values: npt.NDArray[np.floating]) -> None:
        """How values are spread."""
        finite = values[np.isfinite(values)].astype(np.float64)  # else there are no 30 numbers between close ones
        counts, edges = np.histogram(finite, 30)
        buckets = np.stack([edges[:-1], edges[1:], counts], axis=1)
        self._tensor(step, tag, histograms.create_summary_metadata("", ""), buckets)

    def hyperparameters(self, values: Mapping[str, Any], trial: str) -> None:
        """A row of the HParams page."""
        plain = {k: v if isinstance(v, bool | int | float) else _utf8(str(v)) for k, v in values.items()}
        self._summary(0, hparams.hparams_pb(plain, trial_id=_utf8(trial)))

    def graph(self, model: keras.Model) -> None:
        """The layers of a model, for the Graphs page."""
        self._add(graph_def=_graph(model).SerializeToString())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _tensor(self, step: int, tag: str, metadata: Any, values: npt.NDArray[Any]) -> None:
        value = summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(values))
        self._add(step=step, summary=summary_pb2.Summary(value=[value]))

    def _summary(self, step: int, summary: Any) -> None:
        self._add(step=step, summary=summary_pb2.Summary.FromString(summary.SerializeToString()))

    def _add(self, **event: Any) -> None:
        # TensorBoard's own writer adds up checksums in Python: 6 ms for a picture of 50 kB.
        self._file.write(framed(event_pb2.Event(wall_time=time.time(), **event).SerializeToString()))


def _utf8(text: str) -> str:
    """A text without what a path may hold that is none, which protocol buffers don't take."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _graph(model: keras.Model) -> graph_pb2.GraphDef:
    """The layers of a model as a graph for TensorBoard's Graphs page."""
    graph = graph_pb2.GraphDef()
    previous: list[str] = []
    for layer in model.layers:
        node = graph.node.add(name=layer.name, op=type(layer).__name__)
        inbound = [
            parent.operation.name for edge in getattr(layer, "_inbound_nodes", []) for parent in edge.parent_nodes
        ]
        known = {n.name for n in graph.node}
        node.input.extend(dict.fromkeys(p for p in inbound or previous if p in known and p != layer.name))
        previous = [layer.name]
    return graph
