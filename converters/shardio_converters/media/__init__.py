"""Sound, pictures and videos: their files as they are, or their pixels."""
