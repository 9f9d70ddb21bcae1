"""The cluster of `ff demo --whole` and `ff soak` can be watched on its web page while it runs, as the recipes say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.support.patience import allowed_s

from fireflyer.recipes.testbed.cluster import running_cluster
from fireflyer.recipes.testbed.plan import ClusterPlan

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_line_that_is_said_leads_to_a_page_that_shows_the_nodes(tmp_path: Path, browser: Browser) -> None:
    plan = ClusterPlan(nodes=2, storage_nodes=2)
    with running_cluster(plan, str(tmp_path / "platform"), lambda _: None) as cluster:
        said = re.fullmatch(r"watch it: (\S+) \(log in with the token in (\S+)\)", cluster.watch_line)
        assert said is not None
        token = json.loads(Path(said[2]).read_bytes())["token"]
        context = browser.new_context()
        page = context.new_page()
        page.goto(said[1])
        page.get_by_label("Your token").fill(token)
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Tasks")).to_be_visible(timeout=1000 * allowed_s(20))
        page.goto(f"{said[1]}/#/nodes")
        for node in ("agent-1", "agent-2"):
            expect(page.get_by_text(node, exact=True).first).to_be_visible(timeout=1000 * allowed_s(20))
        context.close()
