"""Figures of a process for Prometheus, over HTTP: `GET /metrics`.

    async with serving_metrics("127.0.0.1:9100", collect):      "" as address: nothing is served

It answers whoever can reach it, without a token, so it is off unless an address is given; and it tells counts, nothing
of users or names. `collect` is awaited for each question.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, cast

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.histogram import Histogram
from fireflyer.base.os_errors import translate_os_error
from fireflyer.runtime.address import Address, parse_listen

__all__ = ["HistogramSeries", "Series", "exposition", "serving_metrics"]

_log = logging.getLogger(__name__)
MAX_HEAD_BYTES: Final = 8192
TIMEOUT_S: Final = 10.0
MAX_AT_ONCE: Final = 16
"""Questions; more are turned away."""


class Series(NamedTuple):
    """One name with a value for each set of labels. Names of counters end with `_total`."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    values: Sequence[tuple[Mapping[str, str], float]]

    @classmethod
    def one(cls, name: str, kind: Literal["counter", "gauge"], text: str, value: float) -> Series:
        return cls(name, kind, text, [({}, value)])


class HistogramSeries(NamedTuple):
    name: str
    text: str
    values: Sequence[tuple[Mapping[str, str], Histogram]]


Collect = Callable[[], Awaitable[Sequence[Series | HistogramSeries]]]


def exposition(series: Sequence[Series | HistogramSeries]) -> bytes:
    """In the text format of Prometheus. Raises `UsageError` where its library is not installed."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
        from prometheus_client.registry import Collector
    except ImportError:
        raise UsageError(
            "metrics need the package prometheus-client: pip install prometheus-client, or give no address for metrics"
        ) from None

    class Found(Collector):
        def collect(self) -> Iterator[Metric]:
            for one in series:
                labels = sorted({label for values, _ in one.values for label in values})
                family: Metric
                if isinstance(one, HistogramSeries):
                    family = histogram = HistogramMetricFamily(one.name, one.text, labels=labels)
                    for values, found in one.values:
                        buckets = [
                            ("+Inf" if math.isinf(bound) else str(float(bound)), count)
                            for bound, count in found.cumulative()
                        ]
                        histogram.add_metric([values.get(label, "") for label in labels], buckets, found.sum)
                elif one.kind == "counter":
                    family = counter = CounterMetricFamily(one.name.removesuffix("_total"), one.text, labels=labels)
                    for values, value in one.values:
                        counter.add_metric([values.get(label, "") for label in labels], value)
                else:
                    family = gauge = GaugeMetricFamily(one.name, one.text, labels=labels)
                    for values, value in one.values:
                        gauge.add_metric([values.get(label, "") for label in labels], value)
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Found())
    return generate_latest(registry)


@contextlib.asynccontextmanager
async def serving_metrics(listen: str, collect: Collect) -> AsyncIterator[Address | None]:
    """While the block runs. Gives the address, None where nothing is served. Raises `UsageError`."""
    if not listen:
        yield None
        return
    exposition(())
    host, port = parse_listen(listen)
    asked = _MetricsHandler(collect)
    try:
        server = await asyncio.start_server(asked.answer, host, port, limit=MAX_HEAD_BYTES)
    except OSError as error:
        raise translate_os_error(error, f"listen on {listen} for metrics") from error
    address = Address(host, server.sockets[0].getsockname()[1])
    _log.info("metrics at http://%s/metrics", address)
    try:
        yield address
    finally:
        server.close()
        asked.cancel()
        await server.wait_closed()


class _MetricsHandler:
    def __init__(self, collect: Collect) -> None:
        self._collect = collect
        self._tasks: dict[asyncio.Task[None], None] = {}

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._tasks[task] = None
        try:
            if len(self._tasks) <= MAX_AT_ONCE:
                async with asyncio.timeout(TIMEOUT_S):
                    writer.write(await self._reply(reader))
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            del self._tasks[task]
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] != b"GET":
            return _response(b"405 Method Not Allowed", b"ask with GET\n")
        if words[1].split(b"?")[0] != b"/metrics":
            return _response(b"404 Not Found", b"ask for /metrics\n")
        try:
            return _response(b"200 OK", exposition(await self._collect()))
        except FireflyerError as error:
            return _response(b"503 Service Unavailable", f"{error}\n".encode())


def _response(status: bytes, body: bytes) -> bytes:
    return (
        b"HTTP/1.1 " + status + b"\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nConnection: close\r\n"
        b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )
