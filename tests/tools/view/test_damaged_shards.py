"""Each crafted shard of tests/corruption, in a dataset: pages with an error, never a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.testclient import TestClient

from shardio.dataset.manifest import publish
from shardio.maintenance import survey_shard
from shardio.shard.writer import ShardSummary
from tests.corruption.forge import RULES
from tests.corruption.list_crafted import crafted
from tests.tools.view.served import ask, unstarted

pytestmark = pytest.mark.usefixtures("quick_disk")


def dataset_of(folder: Path, content: bytes) -> Path:
    """Publish a crafted shard with the numbers that its header claims."""
    folder.mkdir()
    path = folder / "000000-000.shard"
    path.write_bytes(content)
    survey = survey_shard(path)
    n, id = 3, "0" * 32
    if survey.header is not None:
        n, id = max(1, min(survey.header.n_samples, 1 << 20)), survey.header.id.hex()
    shard = ShardSummary(path.name, n, len(content), id)
    publish(folder, schema=survey.schema or RULES, shards=[shard])
    return folder


async def answers(client: TestClient) -> tuple[dict[str, int], Any, Any]:
    """Return the status of each route, and the statistics and findings once they are complete."""
    fields = [each["name"] for each in json.loads((await ask(client, "/api/dataset"))[2])["fields"]]
    routes = ["/api/rows", "/api/sample/0", "/api/sample/1", "/api/rows?start=1&count=1"]
    for kind in ("thumbnail", "media", "original", "series", "heatmap"):
        routes += [f"/{kind}/{row}/{name}" for name in fields for row in (0, 1)]
    routes += [f"/frame/0/{name}/0" for name in fields]
    statuses = {route: (await ask(client, route))[0] for route in routes}
    statistics = await complete(client, "/api/statistics")
    await ask(client, "/api/verification", post={})
    return statuses, statistics, await complete(client, "/api/verification")


async def complete(client: TestClient, route: str) -> Any:
    """Return the answer of a background job once it has ended."""
    while (found := json.loads((await ask(client, route))[2]))["state"] == "running":
        await anyio.sleep(0.001)
    return found


@pytest.mark.slow
def test_every_crafted_shard_is_shown_with_an_error_and_never_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made").mkdir()
    n_made = n_refused = 0
    for what, content, _, _ in crafted(tmp_path / "made"):
        n_made += 1
        with unstarted(dataset_of(tmp_path / f"{n_made}", content)) as client:
            statuses, statistics, found = anyio.run(answers, client)
        wrong = {r: s for r, s in statuses.items() if s not in (200, 206, 400, 404, 413)}
        assert wrong == {}, what
        assert statistics["state"] in ("done", "failed")
        assert found["n_findings"] > 0, what
        n_refused += any(s == 404 for s in statuses.values())
        assert capsys.readouterr().err == "", what
    assert n_made > 100 and n_refused > n_made // 2
