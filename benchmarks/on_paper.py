"""Draws docs/images/scaling.svg: what part of 1 to 4,096 devices works on steps that count, by trainer/scaling.py.

python -m benchmarks.on_paper
"""

import pathlib

from trainer import scaling

_PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "images" / "scaling.svg"
_DEVICE = "400TFLOP/s,50000h"  # what it reaches, and how long it lives: docs/scaling.md
_LINKS = {
    "400 GB/s, NVLink": ("400GB/s,5us", "#1f6feb"),
    "45 GB/s, InfiniBand": ("45GB/s,10us", "#d1570a"),
    "1.1 GB/s, Ethernet": ("1.1GB/s,40us", "#1a7f37"),
}
_PARAMETERS, _TOKENS = 1.3e9, 16_384  # of the model; of one device and step
_DEVICES = [2**i for i in range(13)]
_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 300, 50, 14


def main() -> None:
    """Writes the picture, and prints its numbers."""
    drawn = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawn.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{_y(share)}" y2="{_y(share)}" stroke="#ddd"/>')
        drawn.append(f'<text x="{_LEFT - 6}" y="{_y(share) + 4}" text-anchor="end">{share:.0%}</text>')
    for n in _DEVICES[::2]:
        drawn.append(f'<text x="{_x(n)}" y="{_y(0) + 16}" text-anchor="middle">{n:,}</text>')
    drawn.append(f'<text x="{_LEFT + _WIDTH}" y="{_y(0) + 32}" text-anchor="end">devices</text>')
    for i, (name, (link, colour)) in enumerate(_LINKS.items()):
        hardware = scaling.Hardware.parse(f"{link},{_DEVICE}")
        for exact in (False, True):
            shares = [useful(n, hardware, exact) for n in _DEVICES]
            print(f"{name}{', exact' if exact else ''}: {' '.join(f'{share:.1%}' for share in shares)}")
            points = " ".join(f"{_x(n)},{_y(share)}" for n, share in zip(_DEVICES, shares, strict=True))
            dashes = ' stroke-dasharray="5 4"' if exact else ""
            drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        drawn.append(f'<text x="{_LEFT + 70}" y="{_y(0.24) + 15 * i}" style="fill:{colour}">{name}</text>')
    drawn.append(f'<text x="{_LEFT + 70}" y="{_y(0.24) + 45}">dashed: --exact</text>')
    style = "<style>text { font: 12px sans-serif; fill: #59636e }</style>"
    size = f'width="{_LEFT + _WIDTH + 20}" height="{_TOP + _HEIGHT + 40}"'
    _PICTURE.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(drawn)}</svg>\n')


def useful(devices: int, hardware: scaling.Hardware, exact: bool) -> float:
    """Share of the time in arithmetic of steps that count, where each device holds the model and Adam's state."""
    compute = 6 * _PARAMETERS * _TOKENS / hardware.speed  # Kaplan et al. 2020, arXiv:2001.08361
    ways = (scaling.exact,) if exact else (scaling.ring, scaling.tree)
    added = min(way(devices, 4 * _PARAMETERS, hardware) for way in ways)
    return compute / (compute + added) * scaling.saving(devices, 12 * _PARAMETERS, hardware)[1]


def _x(devices: int) -> float:
    return round(_LEFT + _WIDTH * _DEVICES.index(devices) / (len(_DEVICES) - 1), 1)


def _y(share: float) -> float:
    return round(_TOP + _HEIGHT * (1 - share), 1)


if __name__ == "__main__":
    main()
