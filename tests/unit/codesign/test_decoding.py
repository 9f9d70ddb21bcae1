"""Limits of decoding beside the figures of the DeepSeek-V3 paper, and beside sums by hand."""

from __future__ import annotations

import json
import random
from importlib.resources import files

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.codesign.decoding import (
    CACHE_FORMATS,
    MACHINES,
    CacheFormat,
    Machine,
    cache_bytes,
    compute_share,
    decode_reads,
    device_layer_seconds,
    exchange_bytes,
    machine_seconds,
    node_limited_dispatch,
    prefill_rate,
    read_experts,
    speculation_gain,
    split_gpus,
    token_seconds,
)
from fireflyer.codesign.model import TokenIndex, count_parameters, shape_from_config

V3, V2, QWEN = (
    shape_from_config(json.loads(files("fireflyer.planning").joinpath("models", f"{name}.json").read_bytes()))
    for name in ("deepseek-v3", "deepseek-v2", "qwen-2.5-72b")
)
EXPERT = 3 * 7168 * 2048


def test_the_exchange_of_32_tokens_and_what_follows_are_the_paper_s() -> None:
    """2.3.2."""
    exchange = exchange_bytes(7000, 9)
    assert round(exchange.seconds(32, 50e9) * 1e6, 2) == 120.96
    assert round(token_seconds(61, exchange.seconds(32, 50e9)) * 1e3, 2) == 14.76
    assert int(1 / token_seconds(61, exchange.seconds(32, 50e9))) == 67
    assert round(exchange.seconds(32, 900e9) * 1e6, 2) == 6.72
    assert round(token_seconds(61, exchange.seconds(32, 900e9)) * 1e3, 2) == 0.82
    assert round(1 / token_seconds(61, exchange.seconds(32, 900e9)), -2) == 1200


def test_overlapped_micro_batches_hide_the_shorter_of_exchange_and_computation() -> None:
    assert token_seconds(10, 3.0, 2.0) == 60
    assert token_seconds(10, 3.0, 5.0) == 100
    assert token_seconds(10, 3.0, 2.0, overlapped=False) == 100
    assert token_seconds(10, 3.0, 3.0, overlapped=False) == 2 * token_seconds(10, 3.0, 3.0), "at best twice as fast"


def test_a_token_costs_the_network_a_copy_for_each_node_and_not_for_each_device() -> None:
    """4.3: 8 t becomes M t; NVLink, 4 times as fast, forwards meanwhile."""
    rates = {"network_bytes_per_s": 40e9, "inside_bytes_per_s": 160e9}
    t = 7168 / 40e9
    assert node_limited_dispatch(8, None, 7168, **rates) == pytest.approx((8 * t, 0))
    for nodes in (8, 4, 3, 2):
        assert node_limited_dispatch(8, nodes, 7168, **rates).longest == pytest.approx(nodes * t)
    assert node_limited_dispatch(8, 1, 7168, **rates).longest == pytest.approx(2 * t), "then NVLink binds"
    assert node_limited_dispatch(2, 4, 7168, **rates).network == pytest.approx(2 * t), "two experts are on two nodes"


def test_help_of_the_network_saves_one_direction_of_each_phase() -> None:
    """Every device receives what the others multicast: only both phases at once gain."""
    plain, helped = exchange_bytes(100, 8), exchange_bytes(100, 8, multicast=True, aggregation=True)
    assert tuple(plain) == (800, 800, 1600, 1600)
    assert tuple(helped) == (100, 800, 1600, 200)
    assert helped.seconds(1, 1.0) == plain.seconds(1, 1.0) == 2400
    assert plain.seconds(1, 1.0, at_once=True) == 2400
    assert helped.seconds(1, 1.0, at_once=True) == 1700


def test_smaller_formats_shorten_the_exchange_by_their_bytes() -> None:
    log_fmt = exchange_bytes(7168, 9, combine_bytes=10 / 8)
    assert log_fmt.seconds(32, 50e9) / exchange_bytes(7168, 9).seconds(32, 50e9) == pytest.approx(2.25 / 3)


def test_sms_that_move_messages_do_not_compute() -> None:
    """4.4: up to 20 of the 132 of an H800."""
    assert compute_share(132, 20) == pytest.approx(0.848, abs=5e-4)
    assert compute_share(132, 0) == 1


def test_one_request_reads_the_parameters_that_it_uses() -> None:
    reads = decode_reads(V3, 1, 4096, weight_bytes=1)
    count = count_parameters(V3)
    assert reads.experts == 58 * 8 * EXPERT
    assert reads.experts + reads.others == count.active - count.embedding
    assert reads.cache == 4096 * 70_272


def test_a_request_reads_the_keys_of_an_index_and_what_it_has_chosen() -> None:
    index = TokenIndex(heads=64, head_dim=128, tokens=2048)
    indexed = msgspec.structs.replace(V3, attention=msgspec.structs.replace(V3.attention, index=index))
    assert decode_reads(indexed, 3, 100_000).cache == 3 * 61 * (2048 * 576 + 100_000 * 128) * 2


def test_a_batch_reads_each_expert_once_whatever_the_tokens_choose() -> None:
    rng = random.Random(0)
    drawn = [len({one for _ in range(32) for one in rng.sample(range(256), 8)}) for _ in range(2000)]
    assert read_experts(256, 8, 32) == pytest.approx(sum(drawn) / len(drawn), rel=5e-3)
    assert read_experts(256, 8, 10_000) == pytest.approx(256)
    one, many = decode_reads(V3, 1, 100), decode_reads(V3, 64, 100)
    assert many.others == one.others
    assert many.cache == 64 * one.cache
    assert 8 * one.experts < many.experts < 64 * one.experts


def test_a_device_of_a_group_reads_a_layer_its_expert_and_the_caches_of_its_tokens() -> None:
    alone = device_layer_seconds(V3, 32, 0, 3.35e12)
    with_two = device_layer_seconds(V3, 32, 0, 3.35e12, experts_held=2)
    with_cache = device_layer_seconds(V3, 32, 4096, 3.35e12)
    assert with_two - alone == pytest.approx(EXPERT / 3.35e12)
    assert with_cache - alone == pytest.approx(32 * 4096 * 1152 / 3.35e12)


def test_cache_formats_have_their_bits_and_scales() -> None:
    assert cache_bytes(V3, 1, CACHE_FORMATS["bf16"]) == 70_272
    assert cache_bytes(V3, 1, CACHE_FORMATS["fp8"]) == 61 * 576 * (1 + 4 / 128)
    assert cache_bytes(V3, 1, CACHE_FORMATS["int4"]) == 61 * 576 * (4 + 0.5) / 8
    assert CacheFormat(2, 32, 32).value_bytes == 3 / 8


def test_personal_computers_reach_what_the_paper_says_they_do() -> None:
    """2.2.2: nearly 20 tokens per second of DeepSeek-V2, or twice that; one digit of a dense model of 70B."""
    ryzen, spark, m4, server = MACHINES
    for machine in (ryzen, spark):
        seconds = machine_seconds(machine, V2, 4096, weight_bytes=0.5)
        assert seconds is not None
        assert 20 < 1 / seconds < 30
        dense = machine_seconds(machine, QWEN, 4096, weight_bytes=0.5)
        assert dense is not None
        assert 1 / dense < 10
    fast = machine_seconds(m4, V2, 4096, weight_bytes=0.5)
    assert fast is not None
    assert 1 / fast > 40
    offloaded = machine_seconds(server, V3, 4096, weight_bytes=0.5)
    assert offloaded is not None
    assert 20 < 1 / offloaded < 50


def test_routed_experts_lie_in_host_memory_and_the_rest_on_the_gpu() -> None:
    server = MACHINES[-1]
    reads = decode_reads(V3, 1, 4096, weight_bytes=0.5)
    expected = reads.experts / server.host_bytes_per_s + (reads.others + reads.cache) / server.bytes_per_s
    assert machine_seconds(server, V3, 4096, weight_bytes=0.5) == expected
    assert machine_seconds(server, QWEN, 4096, weight_bytes=0.5) is None, "a dense model does not fit beside 24 GB"
    assert machine_seconds(server, V3, 4096, weight_bytes=2) is None, "the experts are larger than host memory"
    bare = Machine(name="GPU", bytes_per_s=1e12, memory_bytes=10**10, source="")
    assert machine_seconds(bare, V3, 4096, weight_bytes=0.5) is None


def test_a_model_with_an_index_of_tokens_holds_the_whole_cache_although_a_token_reads_little_of_it() -> None:
    index = TokenIndex(heads=64, head_dim=128, tokens=2048)
    indexed = msgspec.structs.replace(V3, attention=msgspec.structs.replace(V3.attention, index=index))
    server, tokens = MACHINES[-1], 262_144
    assert decode_reads(indexed, 1, tokens).cache < 5e9
    assert machine_seconds(server, indexed, 4096, weight_bytes=0.5) is not None
    assert machine_seconds(server, indexed, tokens, weight_bytes=0.5) is None, "22.5 GB of it, and weights, on 24 GB"


def test_predictions_that_are_accepted_make_decoding_faster() -> None:
    """2.3.3: 80 to 90 % of the second token, 1.8 times the tokens per second."""
    assert speculation_gain(0.8) == 1.8
    low, high = (speculation_gain(acceptance, module_cost=1 / 61) for acceptance in (0.8, 0.9))
    assert low < 1.8 < high
    assert speculation_gain(0.5, 2) == 1.75
    assert speculation_gain(1.0, 3) == 4
    assert speculation_gain(0.0, 1, module_cost=0.1) < 1


def test_pools_are_as_large_as_their_share_of_the_work() -> None:
    split = split_gpus(V3, 4000, 1000, prefill_per_s=4000, decode_per_s=500, cache=CACHE_FORMATS["bf16"])
    assert split.prefill_share == pytest.approx(1 / 3)
    assert split.requests_per_s == pytest.approx(1 / 3)
    assert split.cache_bytes == 4000 * 70_272
    assert split.cache_bytes_per_s == pytest.approx(4000 * 70_272), "a prompt a second"
    assert prefill_rate(V3, 4096, 400e12) == pytest.approx(4804, rel=1e-3)


def test_figures_that_cannot_be_are_refused() -> None:
    for make in (
        lambda: exchange_bytes(7168, 0.5),
        lambda: token_seconds(0, 1.0),
        lambda: compute_share(132, 132),
        lambda: node_limited_dispatch(8, 0, 1, network_bytes_per_s=1, inside_bytes_per_s=1),
        lambda: decode_reads(V3, 0, 1),
        lambda: speculation_gain(1.5),
        lambda: prefill_rate(V3, 4096, 0),
        lambda: split_gpus(V3, 1, 0, prefill_per_s=1, decode_per_s=1, cache=CACHE_FORMATS["bf16"]),
    ):
        with pytest.raises(UsageError, match=r"use|give|leave"):
            make()
