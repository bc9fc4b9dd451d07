"""Recipes: the first line of each says how long it takes and what comes of it, and a run of it holds that."""

import re
import resource

import pytest

from tests.running import REPOSITORY, summary, trainer

FIRST_LINE = re.compile(
    r"# python -m trainer --flagfile=launch/recipes/(?P<name>\w+)\.flags: "
    r"(?P<time>[\d.]+) (?P<unit>seconds|minutes) on 2 cores; (?P<metric>\w+) (?P<value>[\d.]+)(, .*)?"
)
RECIPES = {
    path.stem: FIRST_LINE.fullmatch(path.open().readline().strip())
    for path in REPOSITORY.glob("launch/recipes/*.flags")
}


def seconds_of(said):
    return float(said["time"]) * {"seconds": 1, "minutes": 60}[said["unit"]]


def core_seconds():
    """Those of what this process has started and awaited: other work on the machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if said and seconds_of(said) > 10 else ())
        for name, said in sorted(RECIPES.items())
    ],
)
def test_a_recipe_keeps_its_word(name, tmp_path, keras_home):
    said = RECIPES[name]
    assert said and said["name"] == name, f"{name}.flags does not begin with {FIRST_LINE.pattern}"
    seconds = seconds_of(said)
    before = core_seconds()
    flags = (f"--flagfile=launch/recipes/{name}.flags", f"--run_dir={tmp_path / 'run'}")
    trainer(*flags, timeout=10 * seconds + 60, KERAS_HOME=keras_home)  # other tests run beside
    # Of two cores. Some processors do half as much arithmetic, or less where another process has the core's other half.
    assert core_seconds() - before <= 2 * (4 * seconds + 20)
    # Another kind of processor rounds otherwise, and another release of Python has other sources to read.
    assert summary(tmp_path / "run")["final"][said["metric"]] == pytest.approx(float(said["value"]), rel=0.02)
