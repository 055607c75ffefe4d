"""Pictures from strangers become model inputs, or a reason why not."""

from __future__ import annotations

import io
import select
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fabric.errors import InvalidInput
from fabric.link import NamedTensor
from fabric.messages import ImagePreprocess
from fabric.shared_memory import Arena, memory_address
from roles.frontend.decoding import Decoding
from roles.frontend.events import Preprocessed, PreprocessFailed
from roles.frontend.preprocess import check_signature, preprocess
from roles.runtime.core import Handle
from roles.runtime.payloads import Payloads
from tests.scarcity import no_threads

PLAIN = ImagePreprocess("input", resize=8, crop=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def file_of(picture: Image.Image, kind: str = "PNG") -> NDArray[np.uint8]:
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return np.frombuffer(buffer.getvalue(), dtype=np.uint8)


def test_a_picture_becomes_normalised_channels_first_float32() -> None:
    image = ImagePreprocess("input", 256, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    tensor = preprocess(file_of(Image.new("RGB", (640, 480), (255, 0, 128))), image)
    assert tensor.shape == (3, 224, 224)
    assert tensor.dtype == np.float32
    assert tensor.flags.c_contiguous
    expected = [(1 - 0.485) / 0.229, -0.456 / 0.224, (128 / 255 - 0.406) / 0.225]
    assert tensor[:, 100, 100] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("size", [(32, 16), (16, 32)])
def test_the_shorter_side_is_resized_and_the_centre_is_cropped(size: tuple[int, int]) -> None:
    pixels = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    if size[0] > size[1]:
        pixels[:, 8:24] = 255
    else:
        pixels[8:24] = 255
    tensor = preprocess(file_of(Image.fromarray(pixels)), PLAIN)
    assert tensor.shape == (3, 8, 8)
    assert tensor[:, 1:-1, 1:-1].min() == 1.0


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_any_colour_mode_becomes_three_channels(mode: str) -> None:
    assert preprocess(file_of(Image.new(mode, (9, 9))), PLAIN).shape == (3, 8, 8)


def test_a_picture_smaller_than_the_crop_is_framed_in_black() -> None:
    image = ImagePreprocess("input", resize=4, crop=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    tensor = preprocess(file_of(Image.new("RGB", (4, 4), (255, 255, 255))), image)
    assert tensor.sum() == 3 * 16


@pytest.mark.parametrize(
    "file",
    [
        np.zeros(0, dtype=np.uint8),
        np.frombuffer(b"not a picture at all", dtype=np.uint8),
        file_of(Image.new("RGB", (64, 64), (1, 2, 3)))[:60],
        file_of(Image.effect_noise((64, 64), 50), "JPEG")[:200],
        np.frombuffer(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", dtype=np.uint8),
    ],
    ids=["empty", "text", "cut png", "cut jpeg", "postscript"],
)
def test_what_is_no_whole_picture_is_invalid(file: NDArray[np.uint8]) -> None:
    with pytest.raises(InvalidInput, match="picture"):
        preprocess(file, PLAIN)


@pytest.mark.parametrize("flipped", range(20, 120, 7))
def test_broken_pictures_never_raise_anything_else(flipped: int) -> None:
    file = file_of(Image.effect_noise((16, 16), 50).convert("P")).copy()
    file[flipped] ^= 0xFF
    try:
        preprocess(file, PLAIN)
    except InvalidInput as error:
        assert error.reason.startswith(("the picture", "not a picture"))  # noqa: PT017  either outcome is fine


@pytest.mark.parametrize(("size", "words"), [((8_000, 7_000), "pixels"), ((900, 20), "16 times")])
def test_a_bomb_is_refused_by_its_header(size: tuple[int, int], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        preprocess(file_of(Image.new("1", size)), PLAIN)


@pytest.fixture
def payloads() -> Payloads:
    return Payloads(1 << 30)


@pytest.fixture
def decoding(payloads: Payloads) -> Iterator[Decoding]:
    made = Decoding(payloads, threads=1, jobs_max=2)
    yield made
    made.close()


def kept(payloads: Payloads, file: NDArray[np.uint8]) -> Handle:
    handle = payloads.put([NamedTensor("input", file)])
    assert handle is not None
    return handle


def ended(decoding: Decoding, count: int) -> list[Preprocessed | PreprocessFailed]:
    events: list[Preprocessed | PreprocessFailed] = []
    while len(events) < count:
        assert decoding.has_more or select.select([decoding], [], [], 10.0)[0], "a job has not ended in 10 s"
        events.extend(decoding.take(64, 0.0))
    return events


def test_jobs_run_aside_and_leave_the_tensor_behind_its_handle(
    payloads: Payloads, decoding: Decoding
) -> None:
    handle = kept(payloads, file_of(Image.new("RGB", (20, 20), (255, 255, 255))))
    decoding.start(handle, PLAIN)
    assert ended(decoding, 1) == [Preprocessed(handle)]
    [tensor] = payloads.get(handle)
    assert tensor.array.shape == (3, 8, 8)
    assert not decoding.has_more
    assert not select.select([decoding], [], [], 0)[0]


@pytest.mark.skipif(not memory_address(), reason="this system has no memory to share")
def test_a_picture_that_came_through_shared_memory_is_not_sent_on_from_its_place(
    payloads: Payloads, decoding: Decoding
) -> None:
    """The bytes at the place are the file: a worker would take them for the decoded tensor."""
    arena = Arena(1 << 20)
    file = file_of(Image.new("RGB", (20, 20), (255, 255, 255)))
    place = arena.put(memoryview(file.tobytes()))
    handle = payloads.put([NamedTensor("input", file, place)])
    assert place is not None
    assert handle is not None
    decoding.start(handle, PLAIN)
    assert ended(decoding, 1) == [Preprocessed(handle)]
    [tensor] = payloads.get(handle)
    assert tensor.place is None
    arena.close()


def test_more_jobs_than_allowed_and_broken_ones_fail_with_their_codes(
    payloads: Payloads, decoding: Decoding
) -> None:
    broken = kept(payloads, file_of(Image.new("RGB", (64, 64)))[:60])
    others = [kept(payloads, file_of(Image.new("RGB", (9, 9)))) for _ in range(2)]
    for handle in (broken, *others):
        decoding.start(handle, PLAIN)
    codes = {
        event.payload: event.code if isinstance(event, PreprocessFailed) else "ok"
        for event in ended(decoding, 3)
    }
    assert codes == {broken: "InvalidInput", others[0]: "ok", others[1]: "Overloaded"}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
def test_every_format_has_a_signature_that_is_known(kind: str) -> None:
    assert preprocess(file_of(Image.new("RGB", (9, 9)), kind), PLAIN).shape == (3, 8, 8)
    check_signature(file_of(Image.new("RGB", (9, 9)), kind))


def test_what_is_no_picture_by_its_first_bytes_waits_for_no_thread(payloads: Payloads) -> None:
    """A budget that is too short for decoding is no reason to call a text file a missed deadline."""
    decoding = Decoding(payloads, threads=1, jobs_max=0)
    text = kept(payloads, np.frombuffer(b"hello, I am no picture", dtype=np.uint8))
    decoding.start(text, PLAIN)
    assert decoding.has_more
    [failed] = ended(decoding, 1)
    assert isinstance(failed, PreprocessFailed)
    assert (failed.code, failed.reason.partition(" (")[0]) == (
        "InvalidInput",
        "not a picture of a known format",
    )
    decoding.close()


def test_a_picture_for_which_there_is_no_thread_is_refused_and_the_next_one_is_not(
    payloads: Payloads, decoding: Decoding
) -> None:
    first, second = (kept(payloads, file_of(Image.new("RGB", (9, 9)))) for _ in range(2))
    with no_threads():
        decoding.start(first, PLAIN)
    [failed] = ended(decoding, 1)
    assert isinstance(failed, PreprocessFailed)
    assert (failed.payload, failed.code) == (first, "Overloaded")
    decoding.start(second, PLAIN)
    assert ended(decoding, 1) == [Preprocessed(second)]


def test_a_forgotten_job_ends_without_a_word(payloads: Payloads, decoding: Decoding) -> None:
    forgotten, wanted = (kept(payloads, file_of(Image.new("RGB", (9, 9)))) for _ in range(2))
    decoding.start(forgotten, PLAIN)
    decoding.forget(forgotten)
    payloads.release(forgotten)
    decoding.start(wanted, PLAIN)
    assert ended(decoding, 1) == [Preprocessed(wanted)]
