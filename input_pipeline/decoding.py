"""Images of one shape from files that cameras, people and other programs have made."""

import pathlib
import struct
from typing import IO

import numpy as np
import numpy.typing as npt
from PIL import Image

from input_pipeline.source import DataError

_MOST_PIXELS = 64_000_000  # of one image: a small file may declare more than memory holds
_ORIENTATION = 0x0112  # the tag by which a camera notes how it was held, and what turns the image upright then:
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decoded(file: str | pathlib.Path | IO[bytes], shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """An image, upright, its middle cut out and resized.

    Args:
      file: JPEG, PNG, or whatever else Pillow reads.
      shape: (height, width, channels); 1 channel is gray, 3 are red, green and blue.

    Returns:
      uint8, of the shape.

    Raises:
      DataError: it can't be decoded, or declares more pixels than memory holds.
      OSError: it can't be read.
    """
    try:
        return _decoded(file, *shape)
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(str(error)) from error


def _decoded(file: str | pathlib.Path | IO[bytes], height: int, width: int, channels: int) -> npt.NDArray[np.uint8]:
    mode = "RGB" if channels == 3 else "L"
    with Image.open(file) as image:
        if image.width * image.height > _MOST_PIXELS:
            raise ValueError(f"declares {image.width} x {image.height} pixels, and {_MOST_PIXELS:,} are the most")
        longer = max(width, height)
        image.draft(mode, (longer, longer))  # JPEG decodes to near that size
        turn = _TURNS.get(_orientation(image))
        upright = image if turn is None else image.transpose(turn)
        scale = min(upright.width / width, upright.height / height)
        left, top = (upright.width - width * scale) / 2, (upright.height - height * scale) / 2
        box = (left, top, left + width * scale, top + height * scale)
        resized = _shallow(upright).convert(mode).resize((width, height), Image.Resampling.BILINEAR, box)
    return np.asarray(resized).reshape(height, width, channels)


def _shallow(image: Image.Image) -> Image.Image:
    """With 8 bits of 16 a pixel, of which convert() would make 255 beyond 255.

    Raises:
      ValueError: its numbers are others, and nobody knows which of them is white.
    """
    if image.mode[0] not in "IF":
        return image
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() > 2**16 - 1:
        found = f"has pixels from {pixels.min():g} to {pixels.max():g}, and an image has integers of 8 or 16 bits"
        raise ValueError(f"{found}: save it as such, or read it by a source of your own")
    return Image.fromarray((pixels >> 8).astype(np.uint8))


def _orientation(image: Image.Image) -> int:
    """From 1, upright, to 8; 1 where nothing is noted, or what can't be read: that is no damage of the picture."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except (OSError, ValueError, TypeError, KeyError, SyntaxError, struct.error):
        return 1
