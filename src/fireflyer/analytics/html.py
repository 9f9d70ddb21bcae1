"""The report as one HTML file that needs nothing else: no script, no font, no picture from anywhere.

All text goes through Jinja's escaping; only the charts, which escape their own texts, are markup. A content security
policy in the page forbids scripts and fetches, so even markup that slipped through could do nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.resources import files

import jinja2
from markupsafe import Markup

from fireflyer.analytics.charts import loss_chart, time_chart
from fireflyer.analytics.ettr import FORMULA, filled_formula
from fireflyer.analytics.report import JobReport

__all__ = ["load_template", "render_html"]


def load_template(package: str, name: str) -> jinja2.Template:
    """Template `name` in the directory `templates` of a package. It escapes what it is given, and refuses names that it
    was not given."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.from_string(files(package).joinpath(f"templates/{name}").read_text(encoding="utf-8"))


def render_html(report: JobReport) -> str:
    """A complete HTML document; the same report gives the same bytes."""
    return load_template("fireflyer.analytics", "report.html.j2").render(
        report=report,
        job=report.account,
        formula=FORMULA,
        filled=filled_formula(report.ettr.inputs) if report.ettr.inputs else "",
        started=_utc(report.account.started_s),
        # Both charts escape every text that they draw.
        loss_chart=Markup(loss_chart(report.account, report.undisturbed)),  # noqa: S704
        time_chart=Markup(time_chart(report.account, report.parts)),  # noqa: S704
    )


def _utc(started_s: float | None) -> str:
    if started_s is None:
        return ""
    try:
        return datetime.fromtimestamp(started_s, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return ""
