"""The demonstration's report as one HTML file that needs nothing else: no script, no font, no picture from anywhere.

All text goes through Jinja's escaping; only the charts, which escape their own texts, are markup.
"""

from __future__ import annotations

from markupsafe import Markup

from fireflyer.analytics.charts import nice_ticks
from fireflyer.analytics.ettr import FORMULA
from fireflyer.analytics.html import load_template
from fireflyer.base.units import SECOND
from fireflyer.recipes.whole.pictures import chart
from fireflyer.recipes.whole.report import WholeReport
from fireflyer.recipes.whole.timeline import LEGEND

__all__ = ["render_whole"]


def render_whole(report: WholeReport) -> str:
    """A complete HTML document; the same report gives the same bytes."""
    end_ns = max(1, report.end_ns)
    used = {span.kind for lane in report.lanes for span in lane.spans}
    # The charts escape every text that they draw.
    losses = [
        (
            one,
            Markup(  # noqa: S704 - see above
                chart(
                    one.curves,
                    name=f"loss-{number}",
                    title=f"Loss of {one.task}",
                    x_label="step",
                    y_label="loss",
                    marks=one.marks,
                )
            ),
        )
        for number, one in enumerate(report.losses)
    ]
    throughput = chart(
        report.throughput,
        name="throughput",
        title="Throughput of the file system",
        x_label="seconds",
        y_label="MiB/s",
        marks=report.throughput_marks,
        bands=report.throughput_bands,
        y_least=0.0,
    )
    return load_template("fireflyer.recipes.whole", "whole.html.j2").render(
        report=report,
        formula=FORMULA,
        legend=[(kind, text) for kind, text in LEGEND if kind in used],
        ticks=[tick for tick in nice_ticks(0, end_ns / SECOND, 5) if tick <= end_ns / SECOND],
        percent=lambda ns: f"{100 * ns / end_ns:.3f}",
        second=SECOND,
        losses=losses,
        throughput=Markup(throughput),  # noqa: S704 - as above
    )
