"""Seed, save and restore the global random generators of Python, NumPy and torch (of the CPU).

This module never imports torch. If user code imports torch later, torch's generator is seeded at
the end of the import, so that its numbers do not depend on the time of the import. Seeding the
generator object takes 1 µs; `torch.manual_seed`, which also queues seeds for devices, takes 110 µs.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

import numpy as np

States = tuple[Any, Any, Any]
"""The states of the generators; for torch before its import, the planned seed or None."""


def seed_generators(key: int) -> None:
    """Seed the three generators with `key`, a number of 64 bits."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    _seed_torch(key)


def seed_generators_of_worker() -> None:
    """Seed NumPy's and torch's generators from entropy; Python reseeds `random` after a fork."""
    np.random.seed()
    _seed_torch(int.from_bytes(os.urandom(8), "little"))


def generator_states() -> States:
    torch = _torch_generator()
    state = _TORCH_IMPORT.seed if torch is None else torch.get_state()
    return random.getstate(), np.random.get_state(), state


def restore_generators(states: States) -> None:
    """Restore the states; if torch has been imported since, seed or reset its generator."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch, state = _torch_generator(), states[2]
    if isinstance(state, int):
        _seed_torch(state)
    elif torch is None:
        _TORCH_IMPORT.cancel()
    else:
        torch.set_state(type(torch)().get_state() if state is None else state)


def _torch_generator() -> Any:
    """Return torch's CPU generator; None if torch is not imported, or only partly."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _seed_torch(seed: int) -> None:
    torch = _torch_generator()
    if torch is None:
        _TORCH_IMPORT.expect(seed)
    else:
        torch.manual_seed(seed)


class _TorchImport:
    """A finder that seeds torch when it is imported; on `sys.meta_path` while `seed` is set."""

    seed: int | None = None

    def expect(self, seed: int) -> None:
        self.seed = seed
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        self.seed = None
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch with the other finders, and make the loader of torch seed the generator."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec: ModuleSpec | None = finder.find_spec(name, path, target)
                if spec is not None:
                    self._extend(spec.loader)
                    return spec
        return None

    def _extend(self, loader: Any) -> None:
        """Make `loader` seed torch's generator after it has executed torch."""

        def execute_and_seed(module: ModuleType) -> None:
            del loader.exec_module  # remove this function, which hides the method of the class
            loader.exec_module(module)
            torch, seed = _torch_generator(), self.seed
            self.cancel()
            if torch is not None and seed is not None:
                torch.manual_seed(seed)

        if loader is not None:
            loader.exec_module = execute_and_seed


_TORCH_IMPORT: Final = _TorchImport()
