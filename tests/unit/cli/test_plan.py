"""`ff plan`: networks, models and published figures on a terminal and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fireflyer.cli import main

NETWORK = """
name = "small"
family = "two-layer"
gbit_per_s = 200
radix = 8

[[nodes]]
kind = "gpu"
count = 32
"""
PRICES = """
currency = "USD"

[electricity_per_kwh]
value = 0.1
source = "tariff"
date = "2024-08"

[switches.switch]
price = [9000, 11000]
watts = 400
source = "offer"
date = "2024-08"

[cables.link]
price = 300
source = "offer"
date = "2024-08"

[cables.endpoint]
price = 200
source = "offer"
date = "2024-08"

[nodes.gpu]
price = 100000
watts = 2500
source = "offer"
date = "2024-08"
gpus = 8
gpu_flops = 220e12
"""


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    text = capsys.readouterr().err.strip()
    assert "\n" not in text
    return text


@pytest.fixture
def network(tmp_path: Path) -> str:
    (tmp_path / "prices.toml").write_text(PRICES)
    (tmp_path / "network.toml").write_text(NETWORK)
    return str(tmp_path / "network.toml")


def test_a_network_in_numbers(capsys: pytest.CaptureFixture[str], network: str) -> None:
    text = said(capsys, "network", network)
    for line in (
        "switches: all 12, leaf 8, spine 4",
        "most switches on a shortest path: 3",
        "unused ports: 0",
        "bisection: links 16, lower bound 16, gigabytes per second 400.0, exact yes",
    ):
        assert line in text
    assert "switches: all 122, leaf 80, spine 40, zone 2" in said(capsys, "network", "fire-flyer-2")


def test_the_links_that_cut_two_vertices_off(capsys: pytest.CaptureFixture[str], network: str) -> None:
    cuts = json.loads(said(capsys, "network", network, "--cut", "gpu0-gpu31", "--cut", "leaf0-leaf7", "--json"))["cuts"]
    assert cuts["gpu0-gpu31"] == {"links": 1, "between": "gpu0-leaf0"}
    spines = ", ".join(f"leaf0-spine{spine}" for spine in range(4))
    assert cuts["leaf0-leaf7"] == {"links": 4, "between": spines}


def test_costs_are_sums_of_the_prices(capsys: pytest.CaptureFixture[str], network: str) -> None:
    prices = str(Path(network).with_name("prices.toml"))
    shown = json.loads(said(capsys, "network", network, "--prices", prices, "--nodes", "--rent", "2", "--json"))["cost"]
    low = 12 * 9000 + 32 * 300 + 32 * 200
    assert shown["network"] == [low, low + 24_000]
    assert shown["purchase"] == [low + 3_200_000, low + 3_224_000]
    assert shown["hours after which owning is cheaper"][0] == pytest.approx(6650, rel=0.02)
    assert shown["kilowatts of switches and cables"] == pytest.approx([4.8, 4.8])
    assert shown["kilowatts of nodes at work"] == pytest.approx([80, 80])
    assert shown["kilowatts of the building"] == pytest.approx([84.8, 84.8])
    assert "GPU hour: " in said(capsys, "network", network, "--prices", prices, "--nodes")


def test_rent_is_a_range_of_the_prices_or_of_an_option(capsys: pytest.CaptureFixture[str], network: str) -> None:
    prices = Path(network).with_name("prices.toml")
    arguments = ("network", network, "--prices", str(prices), "--json")

    def hours(*more: str) -> list[float | None] | str | None:
        cost: dict[str, Any] = json.loads(said(capsys, *arguments, *more))["cost"]
        return cost.get("hours after which owning is cheaper")

    one, other, both, seldom = (hours("--rent", rent) for rent in ("2", "1.5", "1.5-2", "0.001-2"))
    assert isinstance(one, list)
    assert isinstance(other, list)
    assert both == [one[0], other[1]]
    assert seldom == [one[0], None], "with the lowest rent never"
    assert "owning is cheaper: 6,6" in (text := said(capsys, *arguments[:-1], "--rent", "0.001-2"))
    assert " or more" in text
    assert hours("--rent", "0.001") == "never"
    prices.write_text(PRICES + '[rent_per_gpu_hour]\nvalue = [1.5, 2.0]\nsource = "offer"\ndate = "2024-08"\n')
    assert hours() is None, "of switches and cables alone"
    assert hours("--nodes") == both
    assert hours("--nodes", "--rent", "2") == one
    for rent in ("-1", "2-1", "1-", "nan", "1e3", "1-2-3", "inf"):
        assert "write it like 1.2 or 1.0-1.5" in refused(capsys, *arguments, f"--rent={rent}")


@pytest.mark.parametrize("key", ["electricity_per_kwh", "pue", "upkeep_per_year", "rent_per_gpu_hour"])
def test_a_value_without_source_and_date_is_one_line(
    capsys: pytest.CaptureFixture[str], network: str, key: str
) -> None:
    prices = Path(network).with_name("prices.toml")
    prices.write_text(f'currency = "USD"\n{key} = 1.5\n' + PRICES[PRICES.index("[switches") :])
    words = f"line 2: {key}: expected `object`, got `float`; write a table with value, source, date; its keys: "
    assert words in refused(capsys, "network", network, "--prices", str(prices))


def test_gpus_of_a_node_reach_other_planes_over_nvlink(capsys: pytest.CaptureFixture[str], network: str) -> None:
    Path(network).write_text(
        'name = "planes"\nfamily = "multi-plane"\nradix = 8\nplanes = 4\ngbit_per_s = 400\n'
        '[[nodes]]\nkind = "gpu"\ncount = 16\nports = 4\n'
    )
    free = traffic(capsys, network, "--routing", "adaptive")
    fast, slow = (traffic(capsys, network, "--routing", "adaptive", "--nvlink", rate) for rate in ("160", "5"))
    assert (free["transfers"], fast["transfers"]) == (16, 64)
    assert slow["mean share of a link"] < fast["mean share of a link"] <= 1
    lost = ("--routing", "adaptive", "--fail-plane", "1")
    assert traffic(capsys, network, *lost, "--nvlink", "160")["cut off pairs"] == "none"


def test_gpus_of_nodes_are_bounded_as_nodes_are(
    capsys: pytest.CaptureFixture[str], network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(network).write_text(
        'name = "planes"\nfamily = "multi-plane"\nradix = 8\nplanes = 4\ngbit_per_s = 400\n'
        '[[nodes]]\nkind = "gpu"\ncount = 16\nports = 4\n'
    )
    monkeypatch.setattr("fireflyer.planning.network_traffic.MAX_NODES", 63)
    assert traffic(capsys, network)["transfers"] == 16
    said_instead = refused(capsys, "network", network, "--traffic", "permutation", "--nvlink", "160")
    assert "up to 63 GPUs and nodes with one port; planes has 64" in said_instead


def test_mistakes_in_a_network_are_one_line(capsys: pytest.CaptureFixture[str], network: str) -> None:
    path = Path(network)
    assert "use fire-flyer-2, " in refused(capsys, "network", "fire-flyer-3")
    assert "--nodes and --rent need --prices" in refused(capsys, "network", network, "--nodes")
    for change, words in (
        (("radix = 8\n", "radix = 6\n"), "need 11 leaf switches, and spine switches of 6 ports join 6"),
        (("radix = 8\n", ""), "needs radix"),
        (("radix = 8\n", "radix = 8\nplanes = 2\n"), "has no planes; its keys are radix, nodes, uplinks, spread"),
        (("radix = 8\n", "radix = 8\nspeed = 2\n"), "unknown field `speed`"),
        (('"two-layer"', '"torus"'), "family: Invalid enum value 'torus'; use dragonfly, multi-plane, "),
        (("gbit_per_s = 200\n", ""), "gbit_per_s"),
        (
            ("count = 32\n", 'count = 16\n[[nodes]]\nkind = "gpu"\ncount = 16\n'),
            "two groups of nodes have the kind 'gpu'",
        ),
    ):
        path.write_text(NETWORK.replace(*change))
        assert words in refused(capsys, "network", network)


def traffic(capsys: pytest.CaptureFixture[str], network: str, *options: str) -> dict[str, Any]:
    arguments = ("network", network, "--traffic", "permutation", "--size", "1MiB", "--json", *options)
    found: dict[str, Any] = json.loads(said(capsys, *arguments))["traffic"]
    return found


def test_transfers_end_on_links_that_fail(capsys: pytest.CaptureFixture[str], network: str) -> None:
    whole = traffic(capsys, network, "--routing", "adaptive", "--fail-link", "leaf0-spine0@5")
    assert whole["transfers"]["last milliseconds"] == pytest.approx(whole["milliseconds alone on a link"])
    assert whole["cut off"] == 0
    degraded = traffic(capsys, network, "--routing", "adaptive", "--fail-link", "leaf0-spine0")
    assert degraded["transfers"]["last milliseconds"] > whole["transfers"]["last milliseconds"]
    cut = traffic(capsys, network, "--fail-link", "leaf0-gpu0@0.00001")
    assert cut["cut off"] == 2, "from it and to it"
    assert sorted(cut["cut off pairs"].split(", ")) == sorted(
        pair for pair in cut["cut off pairs"].split(", ") if "gpu0" in pair.split(" to ")
    )
    assert "gpu0 to " in cut["cut off pairs"]
    assert cut["transfers"]["count"] == 32
    repaired = traffic(capsys, network, "--fail-link", "leaf0-gpu0@0.00001-2")
    assert (repaired["cut off"], repaired["cut off pairs"]) == (0, "none")
    assert repaired["transfers"]["last milliseconds"] > 2000


def test_a_plane_that_fails_leaves_the_others(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    network = tmp_path / "planes.toml"
    planes = NETWORK.replace('"two-layer"', '"multi-plane"').replace("radix = 8\n", "radix = 8\nplanes = 4\n")
    network.write_text(planes.replace("count = 32", "count = 32\nports = 4"))

    def last_ms(*options: str) -> float:
        found = traffic(capsys, str(network), "--routing", "adaptive", *options)
        assert found["cut off"] == 0
        return float(found["transfers"]["last milliseconds"])

    whole = last_ms("--fail-plane", "0@9")
    assert last_ms("--fail-plane", "0") == pytest.approx(whole * 4 / 3)
    assert last_ms("--fail-plane", "3", "--fail-plane", "1") == pytest.approx(whole * 2)
    half_way_s = whole / 2 / 1000
    assert last_ms("--fail-plane", f"2@{half_way_s:.9f}") == pytest.approx(whole * (1 / 2 + 4 / 6), rel=1e-3)
    options = (option for plane in range(4) for option in ("--fail-plane", str(plane)))
    assert traffic(capsys, str(network), *options)["cut off"] == 32
    assert "there is no plane 4; small has 4" in refused(
        capsys, "network", str(network), "--traffic", "ring", "--fail-plane", "4"
    )


def test_latency_is_of_messages_and_switches_and_a_proxy_adds_to_it(
    capsys: pytest.CaptureFixture[str], network: str
) -> None:
    def last_us(*options: str) -> float:
        found = traffic(capsys, network, "--size", "64B", *options)
        return float(found["transfers"]["last milliseconds"]) * 1000

    assert last_us("--latency", "infiniband") == pytest.approx(3.7, abs=0.02)
    assert last_us("--latency", "roce") == pytest.approx(5.6, abs=0.02)
    assert last_us("--latency", "roce", "--proxy", "2.5") == pytest.approx(8.1, abs=0.02)
    assert last_us("--proxy", "2.5") == pytest.approx(2.5, abs=0.02)
    slower = last_us("--back-pressure", "--latency", "roce", "--proxy", "2.5")
    assert slower == pytest.approx(last_us("--back-pressure", "--latency", "roce") + 2.5)


def test_storage_gives_what_the_links_of_its_nodes_allow(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    network = tmp_path / "network.toml"
    network.write_text(NETWORK.replace("count = 32", "count = 24") + '[[nodes]]\nkind = "storage"\ncount = 8\n')
    reads, writes, single = (
        traffic(capsys, str(network), "--traffic", f"storage-{access}", "--size", "8MiB", *options)
        for access, options in (("reads", ()), ("writes", ()), ("writes", ("--replicas", "1")))
    )
    assert reads["transfers"]["count"] == 24 * 8
    assert writes["transfers"]["count"] == 3 * 24 * 8
    rates = [one["gigabytes per second of all nodes"] for one in (reads, writes, single)]
    assert rates[1] < 200 / 3
    assert rates[1] < rates[2] < 200
    assert rates[0] < 200


def test_a_node_that_is_cut_off_leaves_the_rates_of_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    network = tmp_path / "network.toml"
    network.write_text(NETWORK.replace("count = 32", "count = 24") + '[[nodes]]\nkind = "storage"\ncount = 8\n')

    def rate(access: str, *fail: str) -> tuple[float, str]:
        found = traffic(capsys, str(network), "--traffic", f"storage-{access}", "--size", "8MiB", *fail)
        return found["gigabytes per second of all nodes"], found.get("cut off pairs", "")

    whole, without = rate("reads"), rate("reads", "--fail-link", "leaf0-gpu0")
    assert 0.7 * whole[0] < without[0] < 1.3 * whole[0]
    assert {pair.split(" to ")[1] for pair in without[1].split(", ")} == {"gpu0"}
    assert rate("writes", "--fail-link", "leaf0-gpu0")[0] > 0.7 * rate("writes")[0]
    assert (
        rate("reads", *(option for leaf in range(8) for option in ("--fail-link", f"leaf{leaf}-storage{leaf}")))[0] == 0
    )


def test_training_and_storage_share_links_by_lanes(capsys: pytest.CaptureFixture[str], network: str) -> None:
    with Path(network).open("a") as file:
        file.write('[[nodes]]\nkind = "storage"\ncount = 8\n')
    with Path(network).open() as file:
        smaller = file.read().replace("count = 32", "count = 24")
    Path(network).write_text(smaller)
    equal, training = (traffic(capsys, network, "--lanes", lanes) for lanes in ("1:1", "9:1"))
    assert equal["storage reads"]["count"] == equal["transfers"]["count"] == 24
    assert training["transfers"]["mean milliseconds"] < equal["transfers"]["mean milliseconds"]
    one = traffic(capsys, network, "--lanes", "9:1", "--level-lanes", "0:0")
    assert one["transfers"] == equal["transfers"], "of equal weight on one lane"
    assert traffic(capsys, network, "--lanes", "9:1", "--back-pressure")["model"] == "packets with back-pressure"


def test_a_window_of_one_makes_transfers_of_an_incast_end_one_after_the_other(
    capsys: pytest.CaptureFixture[str], network: str
) -> None:
    all_at_once, one = (
        traffic(capsys, network, "--back-pressure", "--traffic", "incast", "--window", window)["transfers"]
        for window in ("0", "1")
    )
    assert one["last milliseconds"] > all_at_once["last milliseconds"]
    assert one["mean milliseconds"] < 0.7 * all_at_once["mean milliseconds"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--cut", "leaf0"), "write two ends, as in gpu0-gpu9"),
        (("--cut", "leaf0-leaf0"), "both ends are the same"),
        (("--cut", "leaf0-spine99"), "there is no spine99; there are gpu0 to"),
        (("--fail-link", "leaf0-spine0"), "need --traffic PATTERN"),
        (("--nvlink", "100"), "need --traffic PATTERN"),
        (("--traffic", "ring", "--nvlink", "0"), "is not in the range"),
        (
            ("--traffic", "ring", "--nvlink", "100"),
            "and small has no nodes with several ports",
        ),
        (("--traffic", "ring", "--nvlink", "100", "--latency", "roce"), "leave out NVLink"),
        (("--traffic", "ring", "--window", "1"), "a window needs back-pressure"),
        (("--traffic", "ring", "--fail-link", "leaf0-spine0", "--back-pressure"), "do not go together"),
        (("--fail-plane", "0"), "need --traffic PATTERN"),
        (("--latency", "roce"), "need --traffic PATTERN"),
        (("--traffic", "ring", "--fail-plane", "0", "--back-pressure"), "do not go together"),
        (("--traffic", "ring", "--fail-plane", "1"), "there is no plane 1; small has 1"),
        (("--traffic", "ring", "--fail-plane", "leaf0"), "write a number"),
        (("--traffic", "ring", "--fail-plane", "0@1.2.3"), "--fail-plane 0@1.2.3: 1.2.3 is no number of seconds"),
        (("--traffic", "ring", "--fail-plane", "0@2-1"), "a repair comes later"),
        (("--traffic", "ring", "--proxy", "-1"), "is not in the range"),
        (("--traffic", "ring", "--fail-link", "leaf0"), "write two ends"),
        (("--traffic", "ring", "--fail-link", "leaf0-leaf1"), "no link joins leaf0 and leaf1"),
        (("--traffic", "ring", "--fail-link", "leaf0-core0"), "there is no core0; there are gpu0 to gpu31"),
        (("--traffic", "ring", "--fail-link", "leaf0-spine0@1.2.3"), "1.2.3 is no number of seconds"),
        (("--traffic", "ring", "--fail-link", "leaf0-spine0@2-1"), "a repair comes later"),
        (("--traffic", "ring", "--lanes", "3"), "two weights above 0"),
        (("--traffic", "ring", "--level-lanes", "0:0"), "level lanes need the weights of both lanes"),
        (("--traffic", "ring", "--lanes", "1:1", "--level-lanes", "0:2"), "0 or 1, as in 0:0"),
        (("--traffic", "ring", "--lanes", "0:1"), "two weights above 0"),
        (("--traffic", "ring", "--lanes", "1.1.1:1"), "two weights above 0"),
        (("--traffic", "ring", "--lanes", "1:1"), 'nodes of kind "storage"'),
        (("--traffic", "storage-reads"), 'no nodes of kind "storage"'),
        (("--traffic", "storage-reads", "--lanes", "1:1"), "lanes add reads to traffic between nodes"),
        (("--traffic", "ring", "--back-pressure", "--size", "1TiB"), "fewer bytes, or larger packets"),
        (("--traffic", "storage-reads", "--size", "0B"), "transfers of 0 bytes leave nothing to send"),
    ],
)
def test_mistakes_in_traffic_are_one_line(
    capsys: pytest.CaptureFixture[str], network: str, options: tuple[str, ...], words: str
) -> None:
    assert words in refused(capsys, "network", network, *options)


def test_nodes_that_no_way_joins_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    network = tmp_path / "apart.toml"
    apart = NETWORK.replace('"two-layer"', '"zones"').replace("radix = 8\n", "radix = 8\nbetween = 0\n")
    network.write_text(apart.replace("count = 32", "count = 16"))
    advice = "no links join them; give more links between its zones (between)"
    for arguments in (("network", str(network)), ("compare", "v3-two-layer", str(network))):
        assert f"gpu0 cannot reach gpu1: {advice}" in refused(capsys, *arguments)


def test_sizes_without_a_known_unit_are_one_line(capsys: pytest.CaptureFixture[str], network: str) -> None:
    traffic = ("network", network, "--traffic", "ring", "--back-pressure")
    assert "is not understood; write it like 512KiB" in refused(capsys, *traffic, "--size", "5XB")
    for size in ("64", "64.5", "64.", "1e3"):
        assert f"--size {size} has no unit; write it like 512KiB" in refused(capsys, *traffic, "--size", size)
    assert "--cache 200 has no unit" in refused(capsys, "node", "h800", "--experts", "20MiB", "--cache", "200")


def test_networks_beside_each_other(capsys: pytest.CaptureFixture[str], network: str) -> None:
    prices = str(Path(network).with_name("prices.toml"))
    shown = json.loads(said(capsys, "compare", network, "v3-two-layer", "--prices", prices, "--json"))
    assert [(row["endpoints"], row["switches"], row["bisection links"]) for row in shown] == [
        (32, 12, 16),
        (2048, 96, 1024),
    ]
    low = 12 * 9000 + 32 * 300 + 32 * 200
    assert shown[0]["price of an endpoint, USD"] == [low / 32, (low + 24_000) / 32]
    text = said(capsys, "compare", network, "fire-flyer-2")
    assert "no, a bound" in text
    assert "1,680" in text
    assert "use fire-flyer-2, " in refused(capsys, "compare", network, "none.toml")


CLUSTER = """
name = "{name}"
network = "network.toml"
node = "pcie-a100"
failures_per_1000_node_days = 6.5
{prices}

[training]
plan = "plan.toml"
tokens = {tokens}

[checkpoint]
stall_s = 2.0
restart_s = 300.0
"""
PLAN = """
model = "config.json"

[plan]
sequence_tokens = 2048
batch_sequences = 256
pipeline = 4
shard = 8
zero = 1
recompute = "operators"
"""


def test_clusters_beside_each_other(capsys: pytest.CaptureFixture[str], network: str) -> None:
    from importlib.resources import files

    directory = Path(network).parent
    config = files("fireflyer.planning").joinpath("models", "llama-13b.json").read_bytes()
    (directory / "config.json").write_bytes(config)
    (directory / "plan.toml").write_text(PLAN)
    paths = []
    for name, tokens, prices in (("one", 1e11, 'prices = "prices.toml"'), ("two", 2e11, "")):
        paths.append(str(directory / f"{name}.toml"))
        Path(paths[-1]).write_text(CLUSTER.format(name=name, tokens=tokens, prices=prices))
    first, second = json.loads(said(capsys, "compare", *paths, "--json"))
    assert (first["GPUs"], first["nodes of the run"]) == (256, 4)
    assert second["days"] == pytest.approx([2 * days for days in first["days"]])
    assert first["the run, USD"][0] > 0
    assert "the run, USD" not in second
    text = said(capsys, "compare", *paths)
    assert "a million tokens, USD" in text
    assert "a bound" not in text
    assert "a network, and" in refused(capsys, "compare", paths[0], network)
    assert "none.toml' is not a file" in refused(capsys, "compare", paths[0], "none.toml")
    assert "files of clusters name their prices" in refused(capsys, "compare", *paths, "--prices", "prices.toml")


LENGTHS = """
[lengths.copper]
most_metres = 3
price = 50
source = "offer"
date = "2024-08"

[lengths.fibre]
most_metres = 500
price = [1000, 2000]
watts = 10
source = "offer"
date = "2024-08"
"""


def test_cables_by_length_in_all_answers(capsys: pytest.CaptureFixture[str], network: str) -> None:
    """32 links of nodes are copper; of 32 between switches from 1 to 9 m a quarter is."""
    from importlib.resources import files

    directory = Path(network).parent
    (directory / "prices.toml").write_text(PRICES + LENGTHS)
    (directory / "network.toml").write_text(NETWORK + "\n[metres]\nendpoint = 1\nlink = [1, 9]\n")
    (directory / "config.json").write_bytes(
        files("fireflyer.planning").joinpath("models", "llama-13b.json").read_bytes()
    )
    (directory / "plan.toml").write_text(PLAN)
    cluster, page = directory / "one.toml", directory / "page.html"
    cluster.write_text(CLUSTER.format(name="one", tokens=1e11, prices='prices = "prices.toml"'))
    prices = ("--prices", str(directory / "prices.toml"))
    cost = json.loads(said(capsys, "network", network, *prices, "--json"))["cost"]["cables by length"]
    assert cost == {
        "copper": {"links": 40, "price of one": [50, 50], "price": [2000, 2000], "watts": [0, 0]},
        "fibre": {"links": 24, "price of one": [1000, 2000], "price": [24_000, 48_000], "watts": [240, 240]},
        "all cables": {"links": 64, "price": [26_000, 50_000], "watts": [240, 240]},
    }
    text = said(capsys, "network", network, *prices)
    assert "    fibre: links 24, price of one 1,000 to 2,000, price 24,000 to 48,000, watts 240\n" in text
    for arguments in ((network, *prices), (str(cluster),)):
        (row,) = json.loads(said(capsys, "compare", *arguments, "--json"))
        assert (row["fibre: links"], row["all cables: price, USD"]) == (24, [26_000, 50_000])
        assert "fibre: watts" in said(capsys, "compare", *arguments)
    answer = json.loads(said(capsys, "cluster", str(cluster), "--most-transfers", "0", "--json"))
    assert [(one["length"], one["links"]) for one in answer["cost"]["cables"]["by_length"]] == [
        ("copper", 40),
        ("fibre", 24),
    ]
    assert answer["cost"]["cables"]["price"] == [26_000, 50_000]
    text = said(capsys, "cluster", str(cluster), "--most-transfers", "0", "--html", str(page))
    for words in (text, page.read_text()):
        assert "ables by length" in words
        assert "links 24, price of one 1,000 to 2,000, price 24,000 to 48,000, watts 240" in words


def test_what_a_model_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from importlib.resources import files

    config = tmp_path / "config.json"
    config.write_bytes(files("fireflyer.planning").joinpath("models", "deepseek-v3.json").read_bytes())
    text = said(capsys, "model", str(config))
    for line in ("parameters: 671,026,404,352", "KV cache bytes of a token: 70,272", "causal: 249,811,304,448"):
        assert line in text
    shown = json.loads(said(capsys, "model", str(config), "--json", "--bandwidth", "1000"))
    embedding = 129_280 * 7168  # of which a token reads one row
    assert shown["most tokens per second of one request at 1000 GB/s, fp8"] == pytest.approx(
        1e12 / (37_552_282_624 - embedding + 4096 * 70_272)
    )
    assert shown["most tokens per second on one DGX Spark, 4 bits"] == "does not fit into its memory"
    assert shown["KV cache bytes of 4096 tokens, int4 with scales"] == 61 * 576 * 4096 * 4.5 / 8
    wire = {
        codec: shown[f"bytes of a token on the wire, {codec}"] for codec in ("bf16", "fp8", "fp8_ue8m0", "logfmt10")
    }
    assert wire == {"bf16": 14_336, "fp8": 7392, "fp8_ue8m0": 7224, "logfmt10": 9184}
    assert shown["bytes of a checkpoint: bf16 weights, fp32 master and two moments"] == 14 * 671_026_404_352
    limit = "most tokens per second of a request, two overlapped micro-batches, limited by the exchange"
    assert shown[limit] == pytest.approx(66.2, abs=0.05), "the paper's 67 with a hidden size of 7168"
    assert not any("prefill" in name for name in shown)
    apart = ("--json", "--bandwidth", "3350", "--gpu-tflops", "400")
    free, lent = (json.loads(said(capsys, "model", str(config), *apart, *more)) for more in ((), ("--lent-sms", "20")))
    prompt = "prompt tokens per second of a GPU"
    assert free[prompt] == pytest.approx(400e12 * 3 / 249.811e9, rel=1e-4)
    assert lent[prompt] == pytest.approx(free[prompt] * 112 / 132)
    assert lent["share of SMs that compute during prefill"] == pytest.approx(112 / 132)
    assert lent["share of GPUs for prefill"] > free["share of GPUs for prefill"]
    config.write_text("[]")
    assert "is no JSON object" in refused(capsys, "model", str(config))
    assert "is not a file" in refused(capsys, "model", str(tmp_path / "none.json"))


def test_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert "v3-table-3" in said(capsys, "figure")
    text = said(capsys, "figure", "ff-figure-9")
    assert "does not follow" in text
    assert "-9.36%" in text
    shown = json.loads(said(capsys, "figure", "all", "--json"))
    assert {figure["name"] for figure in shown} >= {"ff-table-2", "v3-table-4"}
    assert "lists their names" in refused(capsys, "figure", "v3-table-9")
    assert "use ff-table-2, v3-table-2" in refused(capsys, "figure", "table-2")


def test_prices_of_a_published_table_are_inputs(capsys: pytest.CaptureFixture[str], network: str) -> None:
    prices = str(Path(network).with_name("prices.toml"))
    text = said(capsys, "figure", "v3-table-3")
    assert "depends on prices" in " ".join(text.split())
    (figure,) = json.loads(said(capsys, "figure", "v3-table-3", "--prices", prices, "--json"))
    cost = {row["what"]: row for row in figure["rows"]}["FT2: cost"]
    low = (96 * 9000 + 2048 * 300 + 2048 * 200) / 1e6
    assert (cost["verdict"], cost["depends_on"]) == ("does not follow", "prices")
    assert cost["computed_bounds"] == pytest.approx([low, low + 96 * 2000 / 1e6])
    assert "to" in said(capsys, "figure", "v3-table-3", "--prices", prices)
    Path(prices).write_text(PRICES.replace("USD", "EUR"))
    assert "give prices in USD" in refused(capsys, "figure", "v3-table-3", "--prices", prices)


def test_what_limits_a_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = json.loads(said(capsys, "node", "pcie-a100", "--peer", "9.663676", "--json"))
    limits = [shown[f"HFReduce, limit by {part}, GB/s"] for part in ("host memory", "NICs", "host bridges")]
    assert [round(limit, 1) for limit in limits] == [13.3, 12.5, 9.4]
    assert shown["HFReduce, what binds"] == "host bridges"
    assert shown["HFReduce, GB/s as flows over all links"] == pytest.approx(min(limits))
    assert shown["HFReduce with NVLink pairs, GB/s as flows over all links"] == pytest.approx(12.5)
    assert "cache" not in str(shown)
    slow = json.loads(said(capsys, "node", "pcie-a100", "--between-sockets", "5", "--json"))
    assert slow["HFReduce, GB/s as flows over all links"] < 9
    assert "is not in the range" in refused(capsys, "node", "pcie-a100", "--between-sockets", "0")

    sizes = ("--experts", "10MiB", "--cache", "100MiB")
    text = said(capsys, "node", "h800", *sizes)
    assert "milliseconds of experts, preferred" in text
    assert "give both" in refused(capsys, "node", "pcie-a100", "--experts", "1MiB")
    assert "use h800, pcie-a100 or a TOML file" in refused(capsys, "node", str(tmp_path / "none.toml"))
    assert "do not divide over 3 sockets" in refused(capsys, "node", "pcie-a100", "--sockets", "3")


def test_buffers_and_ordering_of_a_node_are_told_by_its_file_or_by_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from importlib.resources import files

    path = tmp_path / "node.toml"
    text = files("fireflyer.codesign.parallel").joinpath("nodes", "pcie-a100.toml").read_text()
    places = (
        'gpu_buffers = "far"\nnetwork_buffers = "far"\nbetween_sockets_bytes_per_s = 10e9\nrelaxed_ordering = true\n'
    )
    path.write_text(places + text)
    options = ("--gpu-buffers", "far", "--network-buffers", "far", "--between-sockets", "10", "--relaxed-ordering")
    shown = json.loads(said(capsys, "node", str(path), "--json"))
    assert shown == json.loads(said(capsys, "node", "pcie-a100", *options, "--json"))
    assert shown["HFReduce, GB/s as flows over all links"] == pytest.approx(10 / 9.5)
    assert shown["HFReduce, link that is full first"] == "socket1 to socket0"
    assert shown["PCIe writes between devices"] == "relaxed, as fast as PCIe"
    near = json.loads(said(capsys, "node", str(path), "--gpu-buffers", "near", "--ordered", "--json"))
    assert near["buffers of GPUs"] == "near"
    assert near["ring of 16 GPUs, GB/s as flows"] == pytest.approx(4.988, abs=1e-3)
    assert 'gpu_buffers is "far", and' in refused(capsys, "node", str(path), "--sockets", "1")


def test_pcie_switches_of_a_node_are_told_by_its_file_or_by_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from importlib.resources import files

    path = tmp_path / "node.toml"
    text = files("fireflyer.codesign.parallel").joinpath("nodes", "pcie-a100.toml").read_text()
    path.write_text("switch_gpus = 2\nswitch_bytes_per_s = 16e9\nswitch_nics = true\n" + text)
    options = ("--switch-gpus", "2", "--switch-uplink", "16", "--switch-nics")
    shown = json.loads(said(capsys, "node", str(path), "--json"))
    assert shown == json.loads(said(capsys, "node", "pcie-a100", *options, "--json"))
    assert shown["PCIe switches"] == "4 with 2 GPUs each, 16 GB/s to the host bridge in each direction"
    assert shown["NICs"] == "behind PCIe switches"
    allowed = "HFReduce, limit by PCIe switches, GB/s"
    assert shown[allowed] == pytest.approx(16 / 4), "2 GPUs, and 2 arrays of the one NIC"
    assert shown["HFReduce, link that is full first"].startswith("switch0 to bridge0")
    above = json.loads(said(capsys, "node", str(path), "--root-nics", "--json"))
    assert above[allowed] == pytest.approx(16 / 2)
    without = json.loads(said(capsys, "node", str(path), "--switch-gpus", "0", "--json"))
    assert without == json.loads(said(capsys, "node", "pcie-a100", "--json"))
    assert "give switch_gpus" in refused(capsys, "node", "pcie-a100", "--switch-uplink", "16")
    assert "do not divide into PCIe switches of 4" in refused(
        capsys, "node", "pcie-a100", "--switch-gpus", "4", "--switch-uplink", "16"
    )


@pytest.mark.parametrize("number", ["inf", "nan", "0", "-1", "1e999"])
@pytest.mark.parametrize("option", ["--network", "--bandwidth", "--gpu-tflops"])
def test_rates_of_a_model_are_finite_numbers(capsys: pytest.CaptureFixture[str], option: str, number: str) -> None:
    said = refused(capsys, "model", "config.json", option, number)
    assert "finite number" in said or "is not in the range" in said
