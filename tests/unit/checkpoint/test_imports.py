"""Models that were downloaded in several files: all of one is imported, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.checkpoints.states import newest

from fireflyer.base.errors import DataCorruption, NotFound
from fireflyer.checkpoint.importing import import_checkpoint

FILES = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = "model.safetensors.index.json"
WEIGHTS = dict(zip("abc", FILES, strict=True))


def download(directory: Path, names: list[str] = FILES, index: Any = None) -> Path:
    """One tensor in each file."""
    directory.mkdir()
    for tensor, file in zip("abc", names, strict=False):
        save_file({tensor: torch.full((2,), float(ord(tensor)))}, directory / file)
    if index is not None:
        (directory / INDEX).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    return directory


def imported(source: Path, directory: Path) -> list[str]:
    import_checkpoint(str(source), directory, step=1, prefix="model/")
    return sorted(newest(directory).shared)


ALL = [f"model/{name}" for name in "abc"]


def test_a_whole_download_is_imported_with_an_index_and_without(tmp_path: Path) -> None:
    assert imported(download(tmp_path / "with", index={"weight_map": WEIGHTS}), tmp_path / "1") == ALL
    assert imported(download(tmp_path / "without"), tmp_path / "2") == ALL
    ours = [f"shard-0000{number}-of-00003.safetensors" for number in (0, 1, 2)]
    assert imported(download(tmp_path / "ours", ours), tmp_path / "3") == ALL
    assert imported(download(tmp_path / "free", ["x.safetensors", "y.safetensors"]), tmp_path / "4") == ALL[:2]


@pytest.mark.parametrize("index", [None, {"weight_map": WEIGHTS}], ids=["without an index", "with one"])
@pytest.mark.parametrize("missing", FILES)
def test_a_download_that_lacks_a_file_is_refused_by_its_name(tmp_path: Path, missing: str, index: Any) -> None:
    source = download(tmp_path / "hf", index=index)
    (source / missing).unlink()
    with pytest.raises(NotFound, match=f"has no '{missing}', which belongs to the files there; download"):
        imported(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_lies_beside_the_files_of_an_index_is_left_out(tmp_path: Path) -> None:
    source = download(tmp_path / "hf", index={"metadata": {"total_size": 24}, "weight_map": WEIGHTS})
    save_file({name: torch.zeros(2) for name in "abcd"}, source / "consolidated.safetensors")
    assert imported(source, tmp_path / "new") == ALL
    assert newest(tmp_path / "new").shared["model/b"].tolist() == [98.0, 98.0]


def test_a_tensor_that_the_index_names_and_no_file_has_is_missed(tmp_path: Path) -> None:
    source = download(tmp_path / "hf", index={"weight_map": {**WEIGHTS, "lm_head": FILES[2]}})
    with pytest.raises(DataCorruption, match=f"has no tensor 'lm_head', which should be in '{FILES[2]}'"):
        imported(source, tmp_path / "new")


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "..", "", ".hidden.safetensors", "a/b", INDEX]
)
def test_an_index_names_no_file_outside_of_its_directory(tmp_path: Path, file: str) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "secret.safetensors")
    source = download(tmp_path / "hf", index={"weight_map": {**WEIGHTS, "a": file}})
    save_file({"a": torch.zeros(2)}, source / ".hidden.safetensors")
    with pytest.raises(NotFound, match="which belongs to the files there"):
        imported(source, tmp_path / "new")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (b"{not json", "is not readable"),
        (b"\xff", "is not readable"),
        (b'{"weight_map":{}}', "names no tensors"),
        (b'{"weight_map":{"a":5}}', "is not readable"),
        (b'{"weight_map":' + b"[" * 100_000, "is not readable"),
        (b" " * 2000, "has 2000 bytes, above 1000"),
    ],
)
def test_an_index_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: bytes, said: str
) -> None:
    if "above" in said:
        monkeypatch.setattr("fireflyer.checkpoint.importing._MAX_INDEX_BYTES", 1000)
    with pytest.raises(DataCorruption, match=said):
        imported(download(tmp_path / "hf", index=index), tmp_path / "new")


def test_a_name_that_claims_endless_files_takes_no_time(tmp_path: Path) -> None:
    source = download(tmp_path / "hf", ["m-0000000001-of-9999999999.safetensors"])
    with pytest.raises(NotFound, match=r"has no 'm-0000000002-of-9999999999.safetensors'"):
        imported(source, tmp_path / "new")
