"""From a picture's file to a model's input, the way vision models are trained: resize, centre crop, normalise.

Same arithmetic as torchvision's transforms on pictures (bilinear with antialiasing, shorter side first), with
Pillow and numpy alone. Files come from strangers: the formats are few, and a picture is measured by its header
before a pixel of it is decoded.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from fabric.errors import Internal, InvalidInput
from fabric.link import Tensor
from fabric.messages import ImagePreprocess

if TYPE_CHECKING:
    from PIL import Image

FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
SIGNATURES: Final = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"BM", b"GIF8")
PIXELS_MAX: Final = 50_000_000  # 150 MB decoded; the largest phone cameras in use save 50 megapixels
ASPECT_MAX: Final = 16  # the longer side after resizing, in shorter sides

# What decoders raise on broken files, by reading Pillow's plugins.
_BROKEN = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
)


def check_signature(file: Tensor) -> None:
    """Raises InvalidInput where the first bytes are of no format above: in microseconds, without Pillow."""
    if not file[:8].tobytes().startswith(SIGNATURES):
        raise InvalidInput(f"not a picture of a known format ({', '.join(FORMATS)})")


def preprocess(file: NDArray[np.uint8], image: ImagePreprocess) -> NDArray[np.float32]:
    """Decode a picture's file (1-D bytes) into float32 [3, crop, crop].

    Raises InvalidInput where it is no picture, broken, or too large; Internal where Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415  only frontends that get pictures need it
    except ImportError as error:
        raise Internal("this frontend cannot decode pictures: Pillow is not installed") from error
    try:
        with Image.open(io.BytesIO(file.tobytes()), formats=FORMATS) as picture:
            _check_size(*picture.size)
            pixels = _crop(_resize(picture.convert("RGB"), image.resize), image.crop)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidInput(f"the picture is too large: {error}") from error
    except UnidentifiedImageError as error:
        raise InvalidInput(f"not a picture of a known format ({', '.join(FORMATS)})") from error
    except _BROKEN as error:
        raise InvalidInput(f"the picture cannot be decoded: {error}") from error
    scaled = np.asarray(pixels, dtype=np.float32) / np.float32(255)
    mean, std = np.array(image.mean, dtype=np.float32), np.array(image.std, dtype=np.float32)
    normalised = (scaled - mean) / std
    return np.ascontiguousarray(normalised.transpose(2, 0, 1))


def _check_size(width: int, height: int) -> None:
    if width * height > PIXELS_MAX:
        raise InvalidInput(f"the picture has {width} x {height} pixels, at most {PIXELS_MAX} are decoded")
    if max(width, height) > ASPECT_MAX * min(width, height):
        raise InvalidInput(
            f"the picture is {width} x {height}: one side is over {ASPECT_MAX} times the other"
        )


def _resize(picture: Image.Image, shorter: int) -> Image.Image:
    from PIL import Image  # noqa: PLC0415  as above

    width, height = picture.size
    if width <= height:
        size = (shorter, int(shorter * height / width))
    else:
        size = (int(shorter * width / height), shorter)
    return picture.resize(size, Image.Resampling.BILINEAR)


def _crop(picture: Image.Image, side: int) -> Image.Image:
    """The centre; where the picture is smaller than `side`, black around it."""
    left, top = (round((length - side) / 2) for length in picture.size)
    return picture.crop((left, top, left + side, top + side))
