"""Recognising pictures by their first bytes or their names."""

from __future__ import annotations

import pytest

from shardio.media import has_image_signature, has_image_suffix, has_media_signature
from tests.media.images_made import saved, smooth


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF"])
def test_pictures_are_known_by_their_first_bytes(kind: str) -> None:
    head = saved(smooth(), kind)[:16]
    assert has_image_signature(head)
    assert has_media_signature(head) == (kind == "GIF")


@pytest.mark.parametrize(
    "head", [b"", b"notes", b"RIFF\0\0\0\0WAVE", b"\0\0\0\x18ftypisom", b"\x1a\x45\xdf\xa3", b"BM"]
)
def test_other_files_are_not(head: bytes) -> None:
    assert not has_image_signature(head)


def test_a_suffix_is_known_in_any_case() -> None:
    assert has_image_suffix("a/b.JPeG") and has_image_suffix("x.bmp")
    assert not has_image_suffix("a.mp4") and not has_image_suffix("jpg")
