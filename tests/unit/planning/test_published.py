"""Each published number that follows is computed with the rounding of the paper; what does not follow is said to."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel import load_node
from fireflyer.planning import (
    Amount,
    Price,
    PriceList,
    PublishedRow,
    fitted_prices,
    hfreduce_limits,
    host_memory_operations,
    published_figures,
    ring_pcie_bandwidth,
)
from fireflyer.planning.published.figure import row
from fireflyer.planning.published.networks import topologies

NODE, PRICES = load_node("pcie-a100"), fitted_prices()
DO_NOT_FOLLOW = {
    ("ff-table-3", "core switches that the 10,000 need"),
    ("ff-table-3", "ports of a zone that 1,250 GPU nodes and 180 storage servers need"),
    ("ff-hfreduce", "host bridge of two GPUs, measured"),
    ("ff-figure-9", "LLaMa-13B, parallel efficiency 64 to 512 GPUs"),
    ("ff-storage", "capacity with two replicas, over"),
    ("ff-table-3", "saved of the network's costs"),
    ("v3-table-1", "llama-3.1-405b, multiple of deepseek-v3"),
    ("v3-table-2", "qwen-2.5-72b, counted as the others"),
    ("v3-table-2", "llama-3.1-405b, counted as the others"),
    ("v3-table-3", "DF: cost"),
    ("v3-table-3", "DF: cost of an endpoint"),
    ("v3-decoding", "tokens per second with 7,168 instead of 7,000"),
    ("v3-lanes", "the same less the coding"),
    ("v3-formats", "saved by FP8 dispatch with its scales"),
}


@cache  # not at import, where each worker would compute them
def rows() -> list[tuple[str, PublishedRow]]:
    return [(figure.name, one) for figure in published_figures() for one in figure.rows]


def test_all_rows_follow_but_those_that_are_known_not_to() -> None:
    found = {(name, one.what) for name, one in rows() if one.verdict == "does not follow"}
    assert found == DO_NOT_FOLLOW


def test_inputs_are_what_only_the_authors_could_measure() -> None:
    assert {(name, one.what) for name, one in rows() if one.verdict == "input"} == {
        ("ff-table-2", "TF32 GEMM of ours"),
        ("ff-table-2", "TF32 GEMM of DGX"),
        ("ff-table-2", "FP16 GEMM of ours"),
        ("ff-table-2", "FP16 GEMM of DGX"),
        ("ff-table-2", "node relative price"),
        ("v3-lanes", "memory for them, approximately"),
        ("v3-table-5", "NVLink"),
    }


def priced(switch: float | tuple[float, float], link: float | tuple[float, float], endpoint: float) -> PriceList:
    def one(price: float | tuple[float, float]) -> Price:
        return Price(price=price, source="offer", date="2024-08")

    return PriceList(
        currency="USD", switches={"switch": one(switch)}, cables={"link": one(link), "endpoint": one(endpoint)}
    )


def costs(prices: PriceList) -> dict[str, PublishedRow]:
    return {one.what: one for one in topologies(prices).rows if one.depends_on}


def test_costs_of_table_3_depend_on_prices_that_are_inputs() -> None:
    shipped = costs(PRICES)
    assert set(shipped) == {
        f"{name}: cost{of}" for name in ("FT2", "MPFT", "FT3", "SF", "DF") for of in ("", " of an endpoint")
    }
    assert {one.depends_on for _, one in rows()} == {"", "prices"}
    assert shipped["FT2: cost"].computed == pytest.approx((96 * 40 + 2048 * 1.85 + 2048 * 0.665) / 1000)
    other = costs(priced(60_000, 1227, 350))
    for what in ("FT2: cost", "MPFT: cost", "FT3: cost", "SF: cost"):
        assert other[what].verdict == "follows", "prices are not determined by the table"
        assert other[what].computed != pytest.approx(shipped[what].computed)
    assert costs(priced(20_000, 1850, 665))["FT2: cost"].verdict == "does not follow"


def test_ranges_of_prices_are_ranges_of_costs() -> None:
    ranged = costs(priced((20_000, 60_000), (0, 2000), 665))["SF: cost"]
    low, high = (1568 * 20 + 32_928 * 0.665) / 1000, (1568 * 60 + 32_928 * 2.665) / 1000
    assert ranged.computed_bounds == pytest.approx((low, high))
    assert ranged.computed == pytest.approx((low + high) / 2)
    assert ranged.verdict == "follows", "146 lies between"
    assert costs(priced((20_000, 21_000), (0, 1), 0))["SF: cost"].verdict == "does not follow"
    assert costs(PRICES)["SF: cost"].computed_bounds is None
    assert row("x", 1.2, Amount(1.0, 1.1), "", step=0.1).verdict == "does not follow"


def test_prices_of_table_3_that_lack_something_are_one_line() -> None:
    with pytest.raises(UsageError, match="costs are in USD, and the prices in EUR"):
        topologies(msgspec.structs.replace(PRICES, currency="EUR"))
    with pytest.raises(UsageError, match=r"no switches.leaf, nor switches.switch"):
        topologies(msgspec.structs.replace(PRICES, switches={}))
    without = {name: price for name, price in PRICES.cables.items() if name != "endpoint"}
    with pytest.raises(UsageError, match=r"no cables.gpu-leaf, nor node-leaf nor endpoint"):
        topologies(msgspec.structs.replace(PRICES, cables=without))


def test_names_and_rows_are_unique() -> None:
    assert len(rows()) == len({(name, one.what) for name, one in rows()})
    assert len({name for name, _ in rows()}) == 17


@pytest.mark.parametrize(
    ("computed", "printed", "verdict"),
    [
        (1.24, "rounded", "follows"),
        (1.26, "rounded", "does not follow"),
        (1.29, "cut", "follows"),
        (1.19, "cut", "does not follow"),
        (7.0, "at least", "follows"),
        (1.1, "at least", "does not follow"),
        (None, "rounded", "input"),
    ],
)
def test_what_a_printed_digit_allows(computed: float | None, printed: str, verdict: str) -> None:
    assert row("x", 1.2, computed, "", step=0.1, printed=printed).verdict == verdict  # type: ignore[arg-type]


def test_limits_of_hfreduce_are_those_of_the_paper() -> None:
    assert host_memory_operations(8) == 24
    assert host_memory_operations(8, copied_back_by_dma=True) == 30
    assert host_memory_operations(8, pairs=True) == 16
    plain, paired = hfreduce_limits(NODE), hfreduce_limits(NODE, pairs=True)
    assert plain[:3] == pytest.approx((320e9 / 24, 12.5e9, 37.5e9 / 4))
    assert plain.binding == "bridge"
    assert paired[:3] == pytest.approx((20e9, 12.5e9, 18.75e9))
    assert (paired.binding, paired.bandwidth) == ("nic", 12.5e9)
    assert hfreduce_limits(NODE, copied_back_by_dma=True).host_memory == pytest.approx(320e9 / 30)
    assert ring_pcie_bandwidth(9 * 2**30, 16) == pytest.approx(4.99e9, rel=1e-3)
