from __future__ import annotations

from pathlib import Path

import pytest

from shardio_tools import cli
from tests.loading import TWO_FIELDS, two_fields, write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("cli") / "set", 3, 1, TWO_FIELDS, two_fields(3))


def test_make_keys_says_what_to_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    assert cli.main(["serve", "--make-keys", str(keys)]) == cli.OK
    assert capsys.readouterr().out.splitlines() == [
        f"created keys: copy {keys}/client to the client, and pass it as keys=",
        f"and serve with --keys {keys}",
    ]
    assert cli.main(["serve", "--make-keys", str(keys), "--client", "b", "--quiet"]) == cli.OK
    assert capsys.readouterr().out == ""
    made = {path.name for path in keys.iterdir()}
    assert made == {"b", "client", "clients", "server.public", "server.secret"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "DATASET is missing"),
        (["nowhere"], "nowhere"),
        (["SET", "--bind", "tcp://0.0.0.0:5555"], "--make-keys DIR"),
        (["SET", "--bind", "5555"], "tcp://host:port"),
        (["SET", "--keys", "nowhere"], "nowhere/clients"),
        (["SET", "--transform", "nowhere:f"], "--transform must be an importable module:function"),
        (["SET", "--transform", "math:pi"], "not a function"),
        (["SET", "--transform", "os.path.join"], "--transform must be an importable module:func"),
        (["SET", "--batch-transform", "math"], "--batch-transform must be"),
        (["SET", "--max-clients", "0"], "max_clients"),
        (["SET", "--client", "b"], "--client needs --make-keys"),
        (["SET", "--make-keys", "k"], "only creates keys: omit DATASET"),
    ],
)
def test_what_cannot_be_served_is_one_line_that_says_why(
    dataset: str, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    given = [dataset if each == "SET" else each for each in arguments]
    assert cli.main(["serve", *given]) == cli.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
