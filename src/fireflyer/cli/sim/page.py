"""Summaries of replays as one HTML file that needs nothing else. Jinja escapes all text; the charts escape theirs."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fireflyer.analytics.html import load_template
from fireflyer.analytics.line_chart import Series, line_chart
from fireflyer.cli.sim.tables import ROWS, waits_text
from fireflyer.cluster.core.replay.summary import Summary

__all__ = ["render_page"]


def render_page(trace: str, nodes: int, summaries: Sequence[Summary]) -> str:
    """A complete HTML document; the same summaries give the same bytes."""
    return load_template("fireflyer.cli.sim", "sim.html.j2").render(
        trace=trace,
        nodes=nodes,
        summaries=summaries,
        rows=[(label.strip(), [value(one) for one in summaries]) for label, value in ROWS],
        waits=waits_text,
        tables=[
            ("Time in the queue by nodes of a task", [one.by_size for one in summaries]),
            ("Time in the queue by priority", [one.by_priority for one in summaries]),
        ],
        # The charts escape every text that they draw.
        charts=[Markup(chart) for chart in _charts(summaries)],  # noqa: S704
    )


def _charts(summaries: Sequence[Summary]) -> list[str]:
    days = [(hour + 0.5) / 24 for hour in range(max(len(one.hours) for one in summaries))]

    def curves(values: Sequence[Sequence[float]]) -> list[Series]:
        return [
            Series(one.policy, tuple(zip(days, curve, strict=False)))
            for one, curve in zip(summaries, values, strict=True)
        ]

    return [
        line_chart(
            curves([[hour.utilisation for hour in one.hours] for one in summaries]),
            name="utilisation",
            title="Utilisation",
            x_label="days",
            y_label="allocated / healthy nodes",
            y_text="{:.0%}".format,
        ),
        line_chart(
            curves([[hour.waiting for hour in one.hours] for one in summaries]),
            name="queue",
            title="Tasks that wait",
            x_label="days",
            y_label="tasks that wait",
            y_least=0.0,
        ),
    ]
