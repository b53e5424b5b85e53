"""Windows of tokens made the plain way: all documents laid end to end, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio.samples.packing import Pack

Window = dict[str, npt.NDArray[Any]]


def naive_windows(
    documents: Sequence[npt.NDArray[Any]], pack: Pack, name: str = "tokens"
) -> list[Window]:
    """Return every window of one stream, with all fields that `pack` asks for."""
    tokens: list[int] = []
    owners: list[int] = []
    for k, document in enumerate(documents):
        found = document.tolist() + ([] if pack.eot is None else [pack.eot])
        tokens += found
        owners += [k] * len(found)
    windows = []
    for start in range(0, max(0, len(tokens) - pack.targets), pack.length):
        is_whole = start + pack.reach <= len(tokens)
        if is_whole or pack.rest == "pad":
            dtype = documents[0].dtype
            windows.append(_window(tokens, owners, start, pack, name, dtype))
    return windows


def _window(
    tokens: list[int], owners: list[int], start: int, pack: Pack, name: str, dtype: Any
) -> Window:
    n, is_apart, has_targets = pack.length, pack.apart, pack.targets
    here: dict[str, list[int]] = {name: []}
    lists = {key: here.setdefault(f"{name}_{key}", []) for key in ("targets", "segments")}
    lists |= {key: here.setdefault(f"{name}_{key}", []) for key in ("positions", "mask")}
    segment, position = 0, 0
    for i in range(start, start + n):
        is_there, has_next = i < len(tokens), i + 1 < len(tokens)
        is_new = i == start or (is_there and owners[i] != owners[i - 1])
        segment, position = segment + is_new, 0 if is_new else position + 1
        here[name].append(tokens[i] if is_there else pack.pad)
        lists["targets"].append(tokens[i + 1] if has_next else pack.pad)
        lists["segments"].append(segment if is_there else 0)
        lists["positions"].append(position if is_there else 0)
        counts = is_there and (has_next or not has_targets)
        if counts and has_targets and is_apart:
            counts = owners[i] == owners[i + 1]
        lists["mask"].append(counts)
    kinds = {name: dtype, f"{name}_targets": dtype, f"{name}_mask": np.bool_}
    return {
        key: np.array(values, kinds.get(key, np.int32))
        for key, values in here.items()
        if (has_targets or not key.endswith("_targets"))
        and (is_apart or not key.endswith(("_segments", "_positions")))
        and (pack.has_mask or not key.endswith("_mask"))
    }
