"""What a run would cost on other numbers of devices: the formulas beside a simulation, event by event."""

import math

import numpy as np
import pytest

from trainer import scaling
from trainer.errors import UserError
from trainer.scaling import Hardware

NVLINK = "400GB/s,10us,400TFLOP/s"


def simulated(devices: int, state: float, hardware: Hardware, saves: int = 4000) -> float:
    """Share of useful time of a run whose devices fail at random: in steps, in saves and in restarts alike."""
    random = np.random.default_rng(0)
    interval, _ = scaling.saving(devices, state, hardware)
    stall, restart = state / scaling._COPY, scaling._RESTART
    clock, failure = 0.0, random.exponential(hardware.lifetime / devices)

    def undisturbed(seconds: float) -> bool:
        nonlocal clock, failure
        if clock + seconds < failure:
            clock += seconds
            return True
        clock = failure
        failure += random.exponential(hardware.lifetime / devices)
        return False

    for _ in range(saves):
        while not undisturbed(interval + stall):  # all since the last save is done again
            while not undisturbed(restart):
                pass
    return saves * interval / clock


@pytest.mark.parametrize(("devices", "hours"), [(8, 1.0), (256, 100.0), (4096, 100.0), (4096, 50_000.0)])
def test_goodput_is_that_of_a_simulation(devices, hours):
    hardware = Hardware.parse(f"{NVLINK},{hours}h")
    _, goodput = scaling.saving(devices, 40e9, hardware)
    assert simulated(devices, 40e9, hardware) == pytest.approx(goodput, rel=0.03)


def test_no_other_interval_loses_less():
    hardware, state = Hardware.parse(f"{NVLINK},1000h"), 40e9
    interval, best = scaling.saving(512, state, hardware)
    between, stall = hardware.lifetime / 512, state / scaling._COPY
    for other in (interval / 2, interval * 2):
        whole = between * math.exp(scaling._RESTART / between) * math.expm1((other + stall) / between)
        assert other / whole < best


def test_one_store_of_data_limits_many_devices():
    hardware = Hardware.parse(f"{NVLINK},1Mexamples/s")
    rows = {
        int(row[0]): row
        for line in scaling.table(4e13, 1e6, 1000, 0, hardware).splitlines()[1:]
        if (row := line.split())
    }
    assert rows[1][3:5] == ["1", "ms"] and rows[4096][3:5] == ["4.1", "s"]  # beside 100 ms of compute
    assert float(rows[64][-2][:-1]) > 99 and float(rows[4096][-2][:-1]) < 3


@pytest.mark.parametrize(
    "text", ["", "fast", "1GB/s,1us", "1GB/s,1us,1FLOP/s,1us", "1GB/s,1us,1FLOP/s,3days", "0GB/s,1us,1FLOP/s"]
)
def test_what_is_no_hardware(text):
    with pytest.raises(UserError, match="--predict"):
        Hardware.parse(text)
