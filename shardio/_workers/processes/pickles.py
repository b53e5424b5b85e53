"""What workers and main send each other as pickles, with the memory of larger arrays apart."""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
from typing import Any, Final

import cloudpickle  # type: ignore[import-untyped]  # it has no annotations
import numpy as np

_PROTOCOL: Final = 5


def pickle_apart(
    value: Any, file: io.BytesIO, apart: list[pickle.PickleBuffer], least_bytes: int
) -> None:
    """Append a value's pickle to a file, and to `apart` the memory of its larger arrays, in place.

    Args:
        value: anything; what pickle does not know, cloudpickle may.
        file: is left at its end.
        apart: what `pickle.loads` wants as `buffers`, each one stretch of memory.
        least_bytes: of an array whose memory is not copied into the pickle.

    Raises whatever the value's own parts raise when they are pickled.
    """
    start, n_apart = file.tell(), len(apart)
    reduce = functools.partial(_reduce_array, least_bytes)
    arrays = {np.ndarray: reduce, np.memmap: reduce}
    try:
        pickler = pickle.Pickler(file, _PROTOCOL, buffer_callback=apart.append)
        # Half the time of a method `reducer_override`, which is asked about everything.
        pickler.dispatch_table = {**copyreg.dispatch_table, **arrays}
        pickler.dump(value)
    except Exception:  # noqa: BLE001  # what pickle does not know, cloudpickle may: it has the say
        file.seek(start)
        file.truncate()
        del apart[n_apart:]
        _CloudPickler(file, arrays, apart).dump(value)


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, but for arrays."""

    def __init__(
        self, file: io.BytesIO, arrays: dict[Any, Any], apart: list[pickle.PickleBuffer]
    ) -> None:
        # First: what looks it up, once, is the __init__ of pickle.Pickler.
        self.dispatch_table = {**cloudpickle.Pickler.dispatch_table, **arrays}
        super().__init__(file, _PROTOCOL, apart.append)


def _reduce_array(least_bytes: int, array: Any) -> Any:
    """How an array is made again: of its shape, its dtype and its memory, if no more is to it.

    NumPy's own way pickles all parts of a dtype with every array, which takes twice the time.
    """
    if type(array) is np.memmap:  # of a file nothing but its values can travel
        array = array.view(np.ndarray)
    dtype, flags = array.dtype, array.flags
    if dtype.hasobject or not dtype.itemsize:
        return array.__reduce_ex__(_PROTOCOL)
    if not flags.forc:
        array = np.ascontiguousarray(array)
    is_c = array.flags.c_contiguous
    try:
        if array.nbytes >= least_bytes:
            memory: Any = pickle.PickleBuffer(array)
        else:
            memory = (bytearray if flags.writeable else bytes)((array if is_c else array.T).data)
    except ValueError:  # of datetimes, for one, there are no buffers
        return array.__reduce_ex__(_PROTOCOL)
    args = (array.shape, dtype.str if dtype.isbuiltin == 1 else dtype, memory)
    return np.ndarray, args if is_c else (*args, 0, None, "F")
