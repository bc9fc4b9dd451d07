"""The verb report: a run on one page of HTML that needs nothing else: what it is, its curves, where its time went."""

import html
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.config import Config
from trainer.errors import OK, UserError
from trainer.monitoring import history
from trainer.monitoring.readable import NOT_METRICS, duration
from trainer.monitoring.verdict import verdict
from trainer.run_directory import RunDirectory
from trainer.storage.append import decoded, records
from trainer.storage.replacing import replace

_WIDTH, _HEIGHT, _MARGIN = 420, 200, 45
_COLOURS = {"": "#1f6feb", "val_": "#d1570a"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em; color: #1f2328 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse } td, th { padding: 2px 12px 2px 0; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums } code { white-space: pre-wrap }
figure { display: inline-block; margin: 0 1em 1em 0 } figcaption { font-weight: 600 }
svg text { font: 11px system-ui, sans-serif; fill: #59636e } .bar { background: #1f6feb; height: 12px }
"""
Point = tuple[int, float]


def run(config: Config) -> int:
    """Writes report.html into the run directory. Returns the exit code."""
    directory = RunDirectory(config)
    definition = directory.definition()
    if definition is None or not directory.metrics.exists():
        raise UserError("run_dir", directory.path, "holds no run", "give the directory of a run")
    lines = records(directory.metrics)
    starts = history.read(directory.starts)
    for number, start in enumerate(starts, 1):
        goes_on = number == len(starts) and directory.is_in_use()
        start["ended"] = start["ended"] or ("goes on" if goes_on else "broke off")
    page = _page(str(directory.path), config, definition, lines, _summary(directory), starts)
    with directory.writing():
        replace(directory.path / "report.html", page)
    print(directory.path / "report.html")
    return OK


def _summary(directory: RunDirectory) -> dict[str, Any]:
    """How the run has ended; a page of a run whose summary a disk has spoilt says so, and shows the rest."""
    if not directory.summary.exists():
        return {}
    try:
        return dict(decoded(directory.summary.read_bytes()))
    except (ValueError, TypeError) as error:
        return {"status": f"{directory.summary.name} is damaged: {error}"}


def _page(
    name: str,
    config: Config,
    definition: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    starts: list[dict[str, Any]],
) -> str:
    whole = history.account(starts)
    parts = [
        f"<h1>{html.escape(name)}</h1>",
        _table(_outcome(summary, starts, whole)),
        "<h2>Curves</h2>",
        *_curves(lines),
        "<h2>Time</h2>",
        _bars(whole.seconds),
        f"<p>Goodput {whole.goodput:.1%}, {whole.device_hours:.3g} device-hours{_cost(config, whole)}. "
        f"Lost by: {html.escape(_lost_by(summary, whole))}.</p>",
        "<h2>Starts</h2>",
        _starts(starts),
        "<h2>What went wrong</h2>",
        _events(lines),
        "<h2>Definition</h2>",
        _table({f"--{k}": v for k, v in definition["flags"].items()}),
        f"<p>Continue with <code>{html.escape(config.command())}</code></p>",
        "<h2>Environment</h2>",
        _table({k: v for k, v in definition.items() if k not in ("flags", "variables")}),
    ]
    title = f"<title>{html.escape(name)}</title>"
    return f'<!doctype html><html lang="en"><meta charset="utf-8">{title}<style>{_STYLE}</style>\n' + "\n".join(parts)


def _lost_by(summary: Mapping[str, Any], whole: history.Account) -> str:
    """By all starts' time; what only a running process can find out is told by the last one."""
    return verdict(whole.seconds).words or summary.get("bottleneck") or "nothing that stands out"


def _cost(config: Config, whole: history.Account) -> str:
    price = config.price_per_device_hour
    return f", at {price:g} each {whole.device_hours * price:.4g}" if price else ""


def _outcome(summary: Mapping[str, Any], starts: Sequence[Mapping[str, Any]], whole: history.Account) -> dict[str, Any]:
    outcome: dict[str, Any] = {"status": summary.get("status", "not at its end")}
    outcome["step"] = summary.get("step", starts[-1]["step"] if starts else 0)
    outcome |= {k: f"{v:.4f}" for k, v in summary.get("final", {}).items()}
    outcome["took"] = duration(sum(whole.seconds.values()))
    outcome["weights"] = summary.get("weights_sha256", "")
    return outcome


def _curves(lines: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    names = {k.removeprefix("val_") for line in lines for k, v in line.items() if isinstance(v, int | float)}
    metrics = sorted(names - NOT_METRICS, key=lambda k: (k != "loss", k))
    for name in [*metrics, "learning_rate", "examples_per_second"]:
        curves = {prefix: [(x["step"], x[prefix + name]) for x in lines if prefix + name in x] for prefix in _COLOURS}
        yield _figure(name, {prefix: points for prefix, points in curves.items() if points})


def _figure(name: str, curves: Mapping[str, Sequence[Point]]) -> str:
    points = [point for curve in curves.values() for point in curve if math.isfinite(point[1])]
    if not points:
        return ""
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))

    def place(point: Point) -> str:
        x = _MARGIN + (point[0] - left) / max(right - left, 1) * (_WIDTH - _MARGIN - 10)
        y = _HEIGHT - 20 - (point[1] - low) / ((high - low) or 1) * (_HEIGHT - 35)
        return f"{x:.1f},{y:.1f}"

    drawn = "".join(
        f'<polyline fill="none" stroke="{_COLOURS[prefix]}" stroke-width="1.5" points="'
        + " ".join(map(place, _seen([point for point in curve if math.isfinite(point[1])])))
        + f'"><title>{html.escape(prefix + name)}</title></polyline>'
        for prefix, curve in curves.items()
    )
    labels = (
        f'<text x="2" y="18">{high:.4g}</text><text x="2" y="{_HEIGHT - 20}">{low:.4g}</text>'
        f'<text x="{_MARGIN}" y="{_HEIGHT - 4}">step {left}</text>'
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 4}" text-anchor="end">step {right}</text>'
    )
    caption = html.escape(name.replace("_", " ")) + (" (orange: validation)" if "val_" in curves else "")
    svg = f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{drawn}{labels}</svg>'
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"


def _seen(curve: Sequence[Point]) -> Iterable[Point]:
    """Of a long curve, what can be seen of it: the lowest and the highest point of each of as many parts as pixels."""
    if len(curve) <= 4 * _WIDTH:
        return curve
    cuts = [len(curve) * i // _WIDTH for i in range(_WIDTH + 1)]
    parts = [curve[begin:end] for begin, end in itertools.pairwise(cuts)]
    ends = [(min(part, key=operator.itemgetter(1)), max(part, key=operator.itemgetter(1))) for part in parts]
    return [point for pair in ends for point in sorted(pair)]


def _bars(seconds: Mapping[str, float]) -> str:
    whole = sum(seconds.values()) or 1.0
    rows = [
        f'<tr><td>{html.escape(name)}<td class="number">{value:.1f} s<td class="number">{value / whole:.1%}'
        f'<td><div class="bar" style="width:{300 * value / whole:.0f}px"></div>'
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    return f"<table>{''.join(rows)}</table>"


def _starts(starts: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f'<tr><td>{number}<td class="number">{start["first_step"]}<td class="number">{start["step"]}'
        f'<td class="number">{duration(sum(start["seconds"].values()))}<td>{html.escape(start["ended"])}'
        f"<td>{html.escape(start['strategy'])}"
        for number, start in enumerate(starts)
    )
    return f"<table><tr><th><th>from step<th>to step<th>took<th>ended<th>where{rows}</table>"


def _events(lines: Sequence[Mapping[str, Any]]) -> str:
    events = [
        f"steps {line['rolled_back_to'] + 1} to {line['step']} were rolled back: {line['why']}"
        for line in lines
        if "rolled_back_to" in line
    ]
    events += [
        f"{x['skipped']} steps up to step {x['step']} were skipped as not finite" for x in lines if x.get("skipped")
    ]
    return "<ul>" + "".join(f"<li>{html.escape(event)}" for event in events) + "</ul>" if events else "<p>Nothing.</p>"


def _table(rows: Mapping[str, Any]) -> str:
    cells = (f"<tr><td>{html.escape(str(k))}<td>{html.escape(str(v))}" for k, v in rows.items())
    return f"<table>{''.join(cells)}</table>"
