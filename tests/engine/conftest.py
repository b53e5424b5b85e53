"""Fixtures of the tests of the engine: those of the tests of loaders."""

from tests.loader.conftest import _quick, folder

__all__ = ["_quick", "folder"]
