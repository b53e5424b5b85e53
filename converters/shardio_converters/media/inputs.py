"""Which files a converter of videos or of sound takes for its own."""

from __future__ import annotations

import errno

from shardio import Input, MediaError
from shardio.media import HEAD_BYTES, has_media_signature, has_media_suffix


def is_media(source: Input) -> bool:
    """Whether the file is one that should hold video or sound, by its bytes or its suffix.

    Raises:
        MediaError: it cannot be read, so nobody knows.
    """
    try:
        with open(source.path, "rb") as file:
            return has_media_signature(file.read(HEAD_BYTES)) or has_media_suffix(source.name)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP) and not has_media_suffix(source.name):
            return False  # a link to nowhere: there is nothing to be read
        raise MediaError(f"{source.path}: cannot be read: {error.strerror}") from error
