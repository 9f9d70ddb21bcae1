"""`ff ckpt` and `torch.distributed.checkpoint` in a cluster of real processes, as in a directory."""

from __future__ import annotations

import contextlib
import secrets
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.checkpoints.states import save_all, state_of
from tests.support.fs.clusters.local_cluster import LocalCluster
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.checkpoint import describe, open_storage
from fireflyer.checkpoint.dcp import load, save
from fireflyer.cli.main import main

pytestmark = pytest.mark.processes


def test_commands_and_dcp_take_addresses_of_3fs(
    shared_cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = shared_cluster.url(f"/ckpt-{secrets.token_hex(8)}/run")
    save_all(url, [10, 20], disk=None)
    for line in (
        ("ls", url),
        ("pin", f"{url}/step-00000010"),
        ("verify", url),
        ("show", f"{url}/step-00000010"),
        ("export", url, str(tmp_path / "out")),
        ("export", url, f"{url}-model"),
        ("rm", f"{url}/step-00000020"),
        ("import", str(tmp_path / "out"), url, "--step", "30"),
        ("import", f"{url}-model/model.safetensors", url, "--step", "31"),
        ("import", f"{url}-model", url, "--step", "32"),
        ("rm", f"{url}/step-00000031"),
        ("rm", f"{url}/step-00000032"),
    ):
        assert main(["ckpt", *line]) == 0, (line, capsys.readouterr())
    said = capsys.readouterr().out
    assert "step-00000020: whole" in said
    assert [(info.step, info.pinned) for info in describe(url)] == [(30, False), (10, True)]
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w1"], state_of(20).shared["w1"])
    assert main(["ckpt", "rm", f"{url}/step-00000010"]) == 2

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({"w": torch.arange(7.0), "number": 3}, f"{url}/step-00000040")
        found = {"w": torch.zeros(7), "number": 0}
        load(found, url)
        assert torch.equal(torch.as_tensor(found["w"]), torch.arange(7.0))
        assert found["number"] == 3
        with pytest.raises(UsageError, match="exists already"):
            save({"w": torch.zeros(1)}, url, step=40)
        with pytest.raises(NotFound):
            load(found, f"{url}/step-00000099")


def test_a_checkpoint_of_dcps_own_format_that_lies_in_3fs_is_loaded_there_and_imported(
    shared_cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As another program has copied it there."""
    url = shared_cluster.url(f"/dcp-{secrets.token_hex(8)}")
    state = {"w": torch.arange(7.0), "number": 3}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_saver.save(state, storage_writer=FileSystemWriter(tmp_path))
        disk, root, _ = open_storage(url)
        disk.mkdir(root)
        for path in tmp_path.iterdir():
            with contextlib.closing(disk.create(f"{root}/{path.name}")) as file:
                file.pwrite(path.read_bytes(), 0)
                file.fsync()
        assert main(["ckpt", "import", url, f"{url}/ours", "--step", "4"]) == 0, capsys.readouterr()
        for place in (url, f"{url}/ours"):
            found = {"w": torch.zeros(7), "number": 0}
            load(found, place)
            assert torch.equal(torch.as_tensor(found["w"]), torch.arange(7.0))
            assert found["number"] == 3
