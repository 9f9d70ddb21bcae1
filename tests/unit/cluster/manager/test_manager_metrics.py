"""What a manager tells of itself where another one leads."""

from __future__ import annotations

from typing import Any, cast

from tests.support.loops import on_loop
from tests.support.platform.desk import CLUSTER

from fireflyer.cluster.core.platform.messages import Settings
from fireflyer.cluster.core.platform.store.retention import HistoryKeep
from fireflyer.cluster.manager.changes import Changes
from fireflyer.cluster.manager.history import History
from fireflyer.cluster.manager.metrics import manager_series
from fireflyer.cluster.manager.platform import Platform
from fireflyer.cluster.manager.web.measured import MeasuredApp, RequestFigures
from fireflyer.kvstore import MemoryEngine
from fireflyer.runtime.metrics import exposition


@on_loop
async def test_a_manager_that_does_not_lead_tells_nothing_of_the_cluster() -> None:
    settings = Settings(holder="m0", address="m0:1", cluster=CLUSTER)
    nobody = cast("Any", None)
    changes = Changes()
    platform = Platform(settings, MemoryEngine(), nobody, changes, nobody)
    history = History("", platform, MemoryEngine(), HistoryKeep())
    text = exposition(manager_series(platform, changes, RequestFigures(), history)).decode()
    assert "fireflyer_platform_leader 0.0" in text
    assert "fireflyer_platform_tasks" not in text
    assert "fireflyer_platform_runs" not in text


@on_loop
async def test_methods_and_paths_that_anybody_can_invent_make_no_new_series() -> None:
    figures = RequestFigures()

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 405, "headers": []})

    async def drop(_: Any) -> None:
        pass

    for number in range(50):
        scope = {"type": "http", "method": f"M{number}", "path": f"/{number}"}
        await MeasuredApp(cast("Any", app), figures)(cast("Any", scope), cast("Any", None), drop)
    assert figures.answered == {("other", "other", 405): 50}
    assert list(figures.times_s) == ["other"]
