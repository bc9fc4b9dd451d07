"""docs/performance.md, its tables and plots, and the README's, from what the benchmarks have measured.

python -m benchmarks.page
"""

import datetime
import html
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.paired import Ratio, Side, busy
from trainer.monitoring import host_memory

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "performance"
_RIVALS = ("loop by hand", "fit, tf.data")
_BEGIN, _END = "<!-- scoreboard: written by benchmarks/page.py -->", "<!-- end of the scoreboard -->"
# The comparisons that the README shows, beside all that miss their targets: (name, case, rival).
_SCORES = (
    ("accelerator", "language model", "products of two matrices"),
    ("accelerator", "language model", "loop by hand"),
    ("accelerator", "images", "loop by hand"),
    *((f"step-{name}", "mlp, batch 64", rival) for name in ("jax", "tensorflow") for rival in _RIVALS),
    *(
        (f"step-{name}", "mlp, batch 64, all that a run does, a line of the log each 100 steps", "its steps alone")
        for name in ("jax", "tensorflow")
    ),
    ("scaling-jax", "2 devices on the same cores", "Keras DataParallel"),
    ("scaling-tensorflow", "2 devices on the same cores", "MirroredStrategy, fit"),
    ("data", "shuffled pass, cached in a file", "TFRecord, shuffle 10,000, batch, map"),
    ("data", "time that training does not wait for it, mlp on jax", "the same blocks kept on the device"),
    *(
        (f"exact-{name}", "--exact, transformer, batch 32, 4 devices", "the backend's all-reduce")
        for name in ("jax", "tensorflow")
    ),
    ("save-jax", "100 M parameters and Adam's state, a save each 30 s", "the time between saves"),
    ("kills", "two processes, saved every 200 steps", "SIGKILLs"),
    ("start", "second start, mlp on jax", "import keras"),
    ("start", "killed, one of its 2 processes, mlp on jax: the next first step", "SIGKILL"),
)
_PACKAGES = ("tensorflow", "keras", "jax", "numpy")
_HEAD = """# Performance

Written by `make bench` (programs in `benchmarks/`), each table from the JSON of its name in `docs/performance/`. Both
sides of a comparison do the same work on the same data, which is checked before anything is timed, and take turns. A
ratio is the median of the rounds' ratios; in brackets, that of the fastest rounds, and of processor time. Below 1 is
faster than the rival. A ratio is marked *noisy*, and should not be quoted, if the first two disagree by more than 15 %
or other jobs were running. All sides have the settings of the C library's memory that `make` gives, unless a table says
otherwise (strategies.md, On CPUs).

`python -m benchmarks.accelerator` measures how much of an accelerator training uses; it does not need TensorFlow.
"""


class Row(NamedTuple):
    """One comparison.

    Attributes:
      case: what was done.
      rival: by what else.
      ours, theirs: the measured figures, in words.
      ratio: ours over the rival's, in words; '' where there is none.
      value: the figure that the target is about.
      target: what it should be at most, or at least; None: no target.
      most: whether the target is an upper limit.
      noisy: whether the figure is not to be believed.
    """

    case: str
    rival: str
    ours: str
    theirs: str
    ratio: str
    value: float
    target: float | None = None
    most: bool = True
    noisy: bool = False

    @property
    def held(self) -> str:
        """Whether the target is met, in words."""
        if self.target is None:
            return ""
        good = self.value <= self.target if self.most else self.value >= self.target
        return f"{'≤' if self.most else '≥'} {self.target:.3g}: {'held' if good else 'not held'}"


def compared(
    case: str, rival: str, ours: Side, theirs: Side, found: Ratio, per: float, unit: str, target: float | None
) -> Row:
    """A row of two sides.

    Args:
      case, rival, target: as in Row.
      ours, theirs: the sides.
      found: their ratio.
      per: the times are divided by it, to be in `unit`.
      unit: of the times.
    """

    def words(side: Side) -> str:
        return f"{side.median / per:.3g} {unit} ({side.least / per:.3g})"

    text = f"{found.paired:.2f} ({found.least:.2f}, {found.cpu:.2f})"
    return Row(case, rival, words(ours), words(theirs), text, found.paired, target, True, found.noisy or busy())


def record(name: str, question: str, conditions: str, rows: Sequence[Row]) -> None:
    """Prints the rows, keeps them as NAME.json and NAME.svg, and writes the page anew."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = {"question": question, "conditions": conditions, "machine": machine(), "rows": [r._asdict() for r in rows]}
    (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    show(question, conditions, rows)
    write()


def show(question: str, conditions: str, rows: Sequence[Row]) -> None:
    """Prints the rows."""
    print("\n".join([question, f"{conditions}; {machine()}", *map(line, rows)]))


def line(row: Row) -> str:
    """A row in a line."""
    noisy = "  noisy" if row.noisy else ""
    return f"  {row.case:<40} {row.ours:>24}  {row.rival:<34} {row.theirs:>24}  {row.ratio}  {row.held}{noisy}"


def machine() -> str:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    as_make = os.environ.get("GLIBC_TUNABLES") == host_memory.TUNABLES
    memory = "" if as_make else ", not the memory that make asks for"
    load = os.getloadavg()[0]
    today = datetime.date.today()
    return f"{os.cpu_count()} cores of {model}, {', '.join(versions)}{memory}, load {load:.1f}, {today}"


def write() -> None:
    """Writes docs/performance.md and the plots from all JSON files."""
    parts = [_HEAD]
    for path in sorted(FOLDER.glob("*.json")):
        kept = json.loads(path.read_text())
        rows = [Row(**row) for row in kept["rows"]]
        parts.append(f"## {kept['question']}\n\n{kept['conditions']}; {kept['machine']}.\n")
        parts.append("| case | Onecurve | rival | the rival's | ratio | target |\n|---|---|---|---|---|---|")
        parts += [_line(row) for row in rows]
        parts.append("")
        if any(row.ratio for row in rows):
            path.with_suffix(".svg").write_text(_plot(rows))
            parts.append(f"![ratios](performance/{path.stem}.svg)\n")
    FOLDER.with_suffix(".md").write_text("\n".join(parts))
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(_BEGIN)
    readme.write_text("\n".join((f"{before}{_BEGIN}", *_scoreboard(), f"{_END}{rest.partition(_END)[2]}")))


def _scoreboard() -> list[str]:
    """The README's lines: the comparisons that it shows, and all that miss their targets."""
    lines = ["| measured | Onecurve | beside | the other's | ratio | target |", "|---|---|---|---|---|---|"]
    for path in sorted(FOLDER.glob("*.json")):
        kept = json.loads(path.read_text())
        backend = path.stem.rpartition("-")[2] if "-" in path.stem else ""
        backend = "jax, a GPU" if path.stem == "accelerator" else backend
        for row in (Row(**row) for row in kept["rows"]):
            if (path.stem, row.case, row.rival) in _SCORES or row.held.endswith("not held"):
                name = row.case + (f" ({backend})" if backend else "")
                lines.append(_line(row._replace(case=name)))
    return lines


def _line(row: Row) -> str:
    noisy = " *noisy*" if row.noisy else ""
    return f"| {row.case} | {row.ours} | {row.rival} | {row.theirs} | {row.ratio}{noisy} | {row.held} |"


def _plot(rows: Sequence[Row]) -> str:
    """Bars of the ratios; a line at 1, and a mark at each target."""
    bars = [row for row in rows if row.ratio]
    left, width, height = 330, 380, 22
    most = max(1.2, *(min(4.0, row.value) for row in bars), *(row.target or 0 for row in bars))

    def x(value: float) -> float:
        return left + width * min(value, most) / most

    drawn: list[str] = []
    for i, row in enumerate(bars):
        y = i * height + 4
        name = html.escape(f"{row.case} / {row.rival}")
        drawn.append(f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{name}</text>')
        drawn.append(f'<rect x="{left}" y="{y}" width="{x(row.value) - left:.0f}" height="14" fill="#1f6feb"/>')
        drawn.append(f'<text x="{x(row.value) + 4:.0f}" y="{y + 12}">{row.value:.2f}</text>')
        if row.target is not None:
            drawn.append(f'<rect x="{x(row.target):.0f}" y="{y - 2}" width="2" height="18" fill="#d1570a"/>')
    bottom = len(bars) * height + 6
    drawn.append(f'<line x1="{x(1):.0f}" x2="{x(1):.0f}" y1="0" y2="{bottom}" stroke="#888" stroke-dasharray="3"/>')
    style = "<style>text { font: 11px sans-serif; fill: #59636e }</style>"
    size = f'width="{left + width + 60}" height="{bottom}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(drawn)}</svg>\n'


if __name__ == "__main__":
    write()
