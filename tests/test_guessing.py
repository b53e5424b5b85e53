"""What a source holds is told from the names of its files, where nobody says it."""

from __future__ import annotations

import pytest

from shardio import Input
from shardio.conversion.guessing import guess_kind


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a/1.jpg", "a/2.PNG", "notes.txt"], "images"),
        (["a/1.jpg", "b/2.gif"], "images"),
        (["a/1.jpg", "b/2.mp4"], "videos"),
        (["1.gif"], "videos"),
        (["unnamed", "notes.txt"], "videos"),
        (["song.wav", "cover.jpg"], "videos"),
    ],
)
def test_pictures_alone_are_images_all_else_is_videos(names: list[str], kind: str) -> None:
    assert guess_kind([Input(name, "", 0, 0) for name in names]) == kind
