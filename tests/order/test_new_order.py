"""A new order is one module and one entry of the registry.

`test_sampling` runs it with workers, ranks and resumed states, and tests/storage/remote over an
object store, beside those of shardio.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import ShardLoader
from shardio.errors import InvalidArgument
from shardio.order import FullShuffle, Order
from shardio.order.sampling import ORDERS
from tests.loading import TWO_FIELDS, samples, two_fields, write_dataset
from tests.order.strided import Strided

pytestmark = pytest.mark.usefixtures("quick_disk")

N = 60
OPTIONS: Any = {"output": "numpy", "num_workers": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("strided") / "set"
    write_dataset(path, N, 6, TWO_FIELDS, two_fields(N))
    return path


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "strided", Strided)


def test_every_order_has_the_name_it_is_registered_by() -> None:
    assert ORDERS[True] is FullShuffle
    assert {name: order.name for name, order in ORDERS.items() if name is not True} == {
        name: name for name in ORDERS if name is not True
    }


def test_an_unknown_order_is_refused_with_the_names_of_all(folder: Path) -> None:
    known = "True, False, 'full', 'blocks', 'shards', 'strided'"
    wrong: list[Any] = ["stride", 1, None, np.True_]
    for unknown in wrong:
        with pytest.raises(InvalidArgument, match=f"shuffle must be one of {known}; found"):
            ShardLoader(folder, 4, shuffle=unknown, **OPTIONS)


def test_an_order_that_does_not_mix_is_refused_for_a_mixture() -> None:
    class Anything(Order):
        name = "anything"

    Anything.check(samples(3))
    with pytest.raises(InvalidArgument, match="'anything' is for the samples of one dataset"):
        Anything.check(samples(3, is_mixture=True))
