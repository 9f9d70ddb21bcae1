"""The schema of a dashboard of Grafana, as far as ours uses it. A field that is not here, or has another form, is
refused.

Written from Grafana's documentation of the dashboard JSON model (fields, grid of 24 columns, uid of 8 to 40 characters)
and of panels, data sources and variables. Grafana itself ignores what it does not know, so a misspelt field is silent
there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec

__all__ = ["Dashboard", "Panel", "faults_of", "parsed"]

COLUMNS: Final = 24
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=400)]
_Time = Annotated[str, msgspec.Meta(pattern=r"^now(-[0-9]+[smhdwMy])?$")]
_VARIABLE: Final = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_OF_GRAFANA: Final = re.compile(r"__(rate_)?interval|__range")
"""Variables that it sets itself."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class DataSource(_Strict, frozen=True, kw_only=True):
    type: Literal["prometheus"]
    uid: Annotated[str, msgspec.Meta(pattern=r"^\$\{\w+\}$")]
    """A variable: what another site has called its Prometheus is not known here."""


class GridPos(_Strict, frozen=True, kw_only=True):
    h: Annotated[int, msgspec.Meta(ge=1, le=60)]
    w: Annotated[int, msgspec.Meta(ge=1, le=COLUMNS)]
    x: Annotated[int, msgspec.Meta(ge=0, lt=COLUMNS)]
    y: Annotated[int, msgspec.Meta(ge=0)]


class Target(_Strict, frozen=True, kw_only=True):
    ref_id: Annotated[str, msgspec.Meta(pattern=r"^[A-Z]{1,2}$")]
    datasource: DataSource
    expr: _Text
    legend_format: str


class Stacking(_Strict, frozen=True, kw_only=True):
    mode: Literal["none", "normal", "percent"]


class Custom(_Strict, frozen=True, kw_only=True):
    fill_opacity: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    stacking: Stacking | None = None


class Defaults(_Strict, frozen=True, kw_only=True):
    unit: Literal["short", "s", "percentunit", "celsius", "bytes", "Bps", "none"]
    min: float | None = None
    custom: Custom | None = None
    """Of a time series."""


class FieldConfig(_Strict, frozen=True, kw_only=True):
    defaults: Defaults
    overrides: tuple[()]


class Panel(_Strict, frozen=True, kw_only=True):
    id: Annotated[int, msgspec.Meta(ge=1)]
    type: Literal["row", "stat", "timeseries", "table", "bargauge", "gauge"]
    title: _Text
    grid_pos: GridPos
    description: str = ""
    datasource: DataSource | None = None
    field_config: FieldConfig | None = None
    targets: tuple[Target, ...] = ()
    collapsed: bool = False
    panels: tuple[()] = ()
    """Of a row that is collapsed; an open one has those that follow it."""


class Variable(_Strict, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^\w+$")]
    label: _Text
    type: Literal["datasource"]
    query: Literal["prometheus"]


class Templating(_Strict, frozen=True, kw_only=True):
    list: tuple[Variable, ...]


class Annotations(_Strict, frozen=True, kw_only=True):
    list: tuple[()]


class TimeRange(_Strict, frozen=True, kw_only=True):
    from_: _Time = msgspec.field(name="from")
    to: _Time


class Dashboard(_Strict, frozen=True, kw_only=True):
    title: _Text
    uid: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{8,40}$")]
    schema_version: Annotated[int, msgspec.Meta(ge=36, le=42)]
    """36 brought data sources as objects."""
    version: Annotated[int, msgspec.Meta(ge=0)]
    tags: tuple[_Text, ...]
    timezone: Literal["browser", "utc", ""]
    editable: bool
    refresh: Annotated[str, msgspec.Meta(pattern=r"^([0-9]+[smhd])?$")]
    time: TimeRange
    templating: Templating
    annotations: Annotations
    panels: Annotated[tuple[Panel, ...], msgspec.Meta(min_length=1)]


def parsed(text: str) -> Dashboard:
    """Raises `msgspec.ValidationError`, which names the place."""
    return msgspec.json.decode(text, type=Dashboard)


def faults_of(dashboard: Dashboard) -> Iterator[str]:
    """What no field says alone: numbers and places that are taken twice, and names of what there is not."""
    known = {one.name for one in dashboard.templating.list}
    numbers: set[int] = set()
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard.panels:
        at, name = panel.grid_pos, panel.title
        if panel.id in numbers:
            yield f"{name}: number {panel.id} is of another panel"
        numbers.add(panel.id)
        if at.x + at.w > COLUMNS:
            yield f"{name}: beyond the {COLUMNS} columns"
        for place in ((x, y) for x in range(at.x, at.x + at.w) for y in range(at.y, at.y + at.h)):
            if taken.setdefault(place, name) != name:
                yield f"{name}: lies on {taken[place]}"
                break
        yield from _of_queries(panel, known)


def _of_queries(panel: Panel, known: set[str]) -> Iterator[str]:
    if panel.type == "row":
        if panel.targets or panel.datasource is not None or panel.field_config is not None:
            yield f"{panel.title}: a row asks nothing"
        return
    if panel.datasource is None or panel.field_config is None or not panel.targets:
        yield f"{panel.title}: no data source, no unit or no query"
        return
    if panel.type != "timeseries" and panel.field_config.defaults.custom is not None:
        yield f"{panel.title}: only a time series is drawn with `custom`"
    references = [target.ref_id for target in panel.targets]
    if len(set(references)) < len(references):
        yield f"{panel.title}: two queries have one letter"
    for text in (panel.datasource.uid, *(part for one in panel.targets for part in (one.datasource.uid, one.expr))):
        for found in _VARIABLE.finditer(text):
            name = found[1] or found[2]
            if name not in known and not _OF_GRAFANA.fullmatch(name):
                yield f"{panel.title}: there is no variable {name}"
