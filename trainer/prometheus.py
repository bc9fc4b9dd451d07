"""A callback that serves the newest metrics to Prometheus: --callbacks='trainer.prometheus:Endpoint(port=9109)'."""

import http.server
import re
import threading
from typing import Any

import keras
from absl import flags

from trainer.cluster import resolve
from trainer.errors import UserError


class Endpoint(keras.callbacks.Callback):
    """Answers GET /metrics in Prometheus's text format (0.0.4): onecurve_step, onecurve_loss, and so on.

    Args:
      port: of process 0; process k of a cluster takes port + k.
      host: address to listen on; there is no password, so others than loopback need a private network.

    Raises:
      UserError: the port is not to be had.
    """

    def __init__(self, port: int = 9109, host: str = "127.0.0.1") -> None:
        super().__init__()
        self._values: dict[str, float] = {}
        address = (host, port + resolve(flags.FLAGS.cluster).index)
        try:
            self._server = http.server.ThreadingHTTPServer(address, self._handler())
        except OSError as error:
            raise UserError("callbacks", f"{host}:{address[1]}", str(error), "give Endpoint another port") from None
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Takes the metrics of a line of the log, and those of an evaluation that comes with it."""
        self._values = {**self._values, "step": batch + 1, **(logs or {})}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts it. Its means are not taken: what is served of a name is of the newest line of the log."""
        self._values = {**self._values, "epoch": epoch + 1}

    def on_train_end(self, logs: Any = None) -> None:
        """Frees the port."""
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.rstrip("/") == "/metrics"
                text = "".join(_lines(name, value) for name, value in endpoint._values.items()) if found else ""
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments: Any) -> None:
                """Says nothing: the terminal is the run's."""

        return Handler


def _lines(name: str, value: float) -> str:
    metric = "onecurve_" + re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"# TYPE {metric} gauge\n{metric} {float(value)!r}\n"
