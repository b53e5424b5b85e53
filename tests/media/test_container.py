"""Files are judged by their bytes: what they are, and whether they end where they say."""

from __future__ import annotations

import io

import pytest

from shardio.media.container import has_media_signature, has_media_suffix, missing_bytes
from shardio.media.image import has_image_signature, has_image_suffix
from tests.media.images_made import saved, smooth
from tests.media_made import scene, write_gif, write_sound, write_video

VIDEO_AND_AUDIO = [
    b"\0\0\0\x20ftypisom",
    b"\0\0\0\x01mdat",
    b"\x1a\x45\xdf\xa3",
    b"RIFF\x10\0\0\0AVI LIST",
    b"RIFF\x10\0\0\0WAVEfmt ",
    b"FLV\x01",
    b"OggS",
    b"ID3\x04",
    b"FORM\0\0\0\0AIFF",
    (b"\x47" + bytes(187)) * 5,
    (bytes(4) + b"\x47" + bytes(187)) * 5,
]
NEITHER = [
    b"",
    b"once upon a time there was a text",
    b"BM",
    b"\0\0\0\x05ftypisom",
    b"FORM\0\0\0\0ILBM",
    b"G" * 3 + bytes(1021),
    bytes(1024),
]
PICTURES = ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF"]


@pytest.mark.parametrize(
    ("head", "is_media", "is_image"),
    [
        *((head, True, False) for head in VIDEO_AND_AUDIO),
        *((head, False, False) for head in NEITHER),
        *((saved(smooth(), kind)[:16], kind == "GIF", True) for kind in PICTURES),
        (b"\0\0\0\x20ftypheic", False, True),
        (b"\0\0\0\x1cftypavif", False, True),
    ],
)
def test_files_known_by_first_bytes(head: bytes, is_media: object, is_image: object) -> None:
    assert (has_media_signature(head), has_image_signature(head)) == (is_media, is_image)


def test_a_suffix_counts_in_either_case_and_typescript_is_no_video() -> None:
    assert has_media_suffix("a/b.MP4") and has_media_suffix("song.flac")
    assert not has_media_suffix("main.ts") and not has_media_suffix("mp4")
    assert has_image_suffix("a/b.JPeG") and has_image_suffix("x.bmp")
    assert not has_image_suffix("a.mp4") and not has_image_suffix("jpg")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    files = [
        write_video(folder / "a.mp4", scene(5)),
        write_video(folder / "b.mkv", scene(5)),
        write_video(folder / "c.avi", scene(5), codec="mpeg4"),
        write_gif(folder / "d.gif", [scene(1)[0][..., 0] % 4], [5]),
        write_sound(folder / "e.wav"),
    ]
    return {path.suffix: path.read_bytes() for path in files}


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".avi", ".gif", ".wav"])
def test_a_whole_file_is_whole_and_cuts_are_seen(whole: dict[str, bytes], suffix: str) -> None:
    content = whole[suffix]
    assert missing_bytes(io.BytesIO(content)) == 0
    for kept in range(64, len(content) - 1, max(1, len(content) // 97)):
        missing = missing_bytes(io.BytesIO(content[:kept]))
        if suffix == ".gif":
            assert missing == 1 or content[:kept].rstrip(b"\0").endswith(b";")
        elif suffix == ".mp4":  # a cut between two boxes is a file without its index
            assert 0 <= missing <= len(content) - kept
        else:
            assert missing == len(content) - kept


def test_a_box_that_is_cut_is_seen_with_a_size_of_32_or_64_bits() -> None:
    ftyp = b"\0\0\0\x0cftypisom"
    assert missing_bytes(io.BytesIO(ftyp + b"\0\0\0\x64mdat" + bytes(50))) == 42
    wide = b"\0\0\0\x01mdat" + (10_000_000_000).to_bytes(8, "big") + bytes(4)
    assert missing_bytes(io.BytesIO(ftyp + wide)) == 10_000_000_000 - 20


@pytest.mark.parametrize(
    "content",
    [
        b"\0\0\0\x0cftypisom" + b"\0\0\0\0mdat" + bytes(50),
        b"\0\0\0\x0cftypisom" + b"\0\0\0\x08free" + bytes(30),
        b"RIFF\0\0\0\0AVI " + bytes(40),
        b"RIFF\xff\xff\xff\xffAVI " + bytes(40),
        b"RIFF\x05\0\0\0AVI x",
        bytes.fromhex("1a45dfa3 80 18538067 01ffffffffffffff") + bytes(9),
        bytes.fromhex("1a45dfa3"),
        b"FLV\x01" + bytes(9),
        b"",
    ],
)
def test_an_open_or_unknown_size_is_no_damage(content: bytes) -> None:
    assert missing_bytes(io.BytesIO(content)) == 0


def test_zeros_after_the_end_of_a_gif_are_no_damage(whole: dict[str, bytes]) -> None:
    assert missing_bytes(io.BytesIO(whole[".gif"] + bytes(3))) == 0
