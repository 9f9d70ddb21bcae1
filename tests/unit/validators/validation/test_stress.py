"""Validators on this machine, briefly; and that each finds a result that is wrong."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fireflyer.base.health_event import HealthEvent
from fireflyer.cli import main
from fireflyer.validators.core.validation.records import NodeRecord
from fireflyer.validators.stress import processor, run, storage
from fireflyer.validators.stress.record_file import append_record, read_records


def test_a_node_has_the_name_that_slurm_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7.example.org")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    assert run.record_of([], "m", 1).node == "gpu-7.example.org"
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-7")
    assert run.record_of([], "m", 1).node == "gpu-7"


def test_products_are_right_and_measured() -> None:
    found = processor.multiply(0, threads=2)
    assert not found.faults
    assert found.figures["cpu_gemm_flop_per_s"] > 0


def test_one_wrong_product_is_found() -> None:
    products = iter(range(1000))

    def disturb(product: NDArray[np.float64]) -> None:
        product[3, 5] += next(products) == 1

    (fault,) = processor.multiply(0, threads=2, disturb=disturb).faults
    assert (fault.severity, fault.cause) == ("high", "wrong_result")
    assert "1 of 2 products" in fault.words


def test_a_computation_that_is_repeated_has_the_same_result_on_every_machine() -> None:
    found = processor.repeat_computation(0)
    assert found.digests == {"repeated_cpu": processor.repeat_computation(0).digests["repeated_cpu"]}
    assert found.digests["repeated_cpu"].startswith("470cf34e61eb66be")


def test_one_wrong_bit_in_a_repetition_is_found() -> None:
    calls = iter(range(1000))

    def disturb(words: NDArray[np.uint64]) -> None:
        words[7] ^= np.uint64(next(calls) == 11)

    found = processor.repeat_computation(0.2, disturb=disturb)
    (fault,) = found.faults
    assert fault.cause == "corruption"


def test_bandwidth_and_sums() -> None:
    assert processor.memory_bandwidth(0, array_bytes=1 << 20, threads=2).figures["memory_bytes_per_s"] > 0
    found = processor.allreduce_in_memory(0, array_bytes=1 << 16, ranks=3)
    assert not found.faults
    assert found.figures["allreduce_bytes_per_s"] > 0


def test_storage(tmp_path: Path) -> None:
    found = storage.stress_storage(str(tmp_path), 1, file_bytes=8 << 20)
    assert not found.faults
    assert set(found.figures) == {"storage_write_bytes_per_s", "storage_read_bytes_per_s"}
    assert list(tmp_path.iterdir()) == []
    assert "no such file" in storage.stress_storage(str(tmp_path / "nothing"), 1).could_not_run


def test_storage_that_gives_back_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = storage._pattern
    calls = iter(range(1000))
    monkeypatch.setattr(storage, "_pattern", lambda block: patterns(block) + np.uint64(next(calls) == 3))
    (fault,) = storage.stress_storage(str(tmp_path), 60, file_bytes=8 << 20).faults
    assert fault.cause == "wrong_block"


def test_the_command_compares_with_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Peers that no disk can equal, and that had another result."""
    peers = tmp_path / "peers.jsonl"
    for number in range(5):
        figures = {"storage_write_bytes_per_s": 1e15}
        digests = {"repeated_cpu": "another"}
        record = NodeRecord(node=f"n{number}", model="m", seen_ns=1, figures=figures, digests=digests)
        append_record(str(peers), record)
    options = ("--only", "storage", "--only", "repeated", "--time", "1s", "--directory", str(tmp_path), "--model", "m")
    record_file = tmp_path / "records.jsonl"
    assert main(["validate", *options, "--peers", str(peers), "--record", str(record_file), "--json"]) == 2
    events = [msgspec.json.decode(line, type=HealthEvent) for line in capsys.readouterr().out.splitlines()]
    assert [(event.check, event.severity, event.cause) for event in events] == [
        ("storage", "low", "storage_write_bytes_per_s"),
        ("repeated", "high", "corruption"),
    ]
    assert "below the median of 5 peers" in events[0].words
    assert events[0].words.endswith("; 2 of 2 measurements are too low")
    (mine,) = read_records(str(record_file))
    assert mine.model == "m"
    assert not [name for name in mine.figures if not name.startswith("storage_")]


def test_a_validator_without_its_device_could_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = run.validate(["gpu_gemm"], run.Load(1.0, "/tmp", None))
    assert found.could_not_run
    assert main(["validate", "--only", "gpu_heat"]) == 3
    assert "no validator 'gpu_heat'; validators are links, cpu_stress" in capsys.readouterr().err


def test_pairs_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--pairs", "a,b,c,d"]) == 0
    assert capsys.readouterr().out.splitlines() == ["round 1: a-d b-c", "round 2: a-c b-d", "round 3: a-b c-d"]
