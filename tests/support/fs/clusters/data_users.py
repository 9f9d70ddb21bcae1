"""What users do with data in files through fsspec: pandas, pyarrow, DuckDB, checkpoints of torch. `url`: of an empty
directory, as `ff://…/name`; `options`: of the file system."""

from __future__ import annotations

import warnings
from typing import Any

import fsspec
import numpy as np

__all__ = ["with_duckdb", "with_pandas", "with_pyarrow", "with_torch"]

ROWS = 5000


def with_pandas(url: str, options: dict[str, Any]) -> None:
    import pandas as pd

    frame = pd.DataFrame({"key": np.arange(ROWS), "word": [f"w{number % 7}" for number in range(ROWS)]})
    frame.to_parquet(f"{url}/one.parquet", storage_options=options)
    frame.to_csv(f"{url}/one.csv.gz", index=False, storage_options=options)
    assert pd.read_parquet(f"{url}/one.parquet", storage_options=options).equals(frame)
    assert (
        pd.read_parquet(f"{url}/one.parquet", columns=["key"], storage_options=options)["key"].sum()
        == ROWS * (ROWS - 1) // 2
    )
    assert pd.read_csv(f"{url}/one.csv.gz", storage_options=options)["word"].tolist() == frame["word"].tolist()
    frame.to_parquet(f"{url}/parts", partition_cols=["word"], storage_options=options)
    back = pd.read_parquet(f"{url}/parts", filters=[("word", "==", "w3")], storage_options=options)
    assert sorted(back["key"]) == list(range(3, ROWS, 7))


def with_pyarrow(url: str, options: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.dataset
    import pyarrow.fs
    import pyarrow.parquet as parquet

    found, path = fsspec.core.url_to_fs(url, **options)
    files = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(found))
    table = pa.table({"key": np.arange(ROWS), "value": np.linspace(0, 1, ROWS)})
    parquet.write_table(table, f"{path}/table.parquet", filesystem=files, row_group_size=500)
    read = parquet.ParquetFile(f"{path}/table.parquet", filesystem=files, pre_buffer=True)
    assert read.num_row_groups == 10
    assert read.read_row_group(7)["key"][0].as_py() == 3500
    pa.dataset.write_dataset(
        table, f"{path}/set", filesystem=files, format="feather", max_rows_per_file=1000, max_rows_per_group=1000
    )
    dataset = pa.dataset.dataset(f"{path}/set", filesystem=files, format="feather")
    assert len(dataset.files) == 5
    assert dataset.count_rows(filter=pa.dataset.field("key") >= 4000) == 1000
    selector = pa.fs.FileSelector(path, recursive=True)
    assert sum(one.is_file for one in files.get_file_info(selector)) == 6
    files.move(f"{path}/table.parquet", f"{path}/moved.parquet")
    files.copy_file(f"{path}/moved.parquet", f"{path}/copied.parquet")
    assert parquet.read_table(f"{path}/copied.parquet", filesystem=files).equals(table)
    files.delete_dir(f"{path}/set")
    assert files.get_file_info(f"{path}/set").type == pa.fs.FileType.NotFound


def with_duckdb(url: str, options: dict[str, Any]) -> None:
    import duckdb

    found, path = fsspec.core.url_to_fs(url, **options)
    where = f"ff://{path}"
    with duckdb.connect() as database:
        database.register_filesystem(found)
        database.execute(f"COPY (SELECT range AS key, range % 5 AS part FROM range({ROWS})) TO '{where}/all.parquet'")
        (total,) = database.execute(f"SELECT sum(key) FROM '{where}/all.parquet' WHERE part = 2").fetchone() or (None,)
        assert total == sum(range(2, ROWS, 5))
        database.execute(f"COPY (SELECT 1 AS one) TO '{where}/some/1.csv'")
        database.execute(f"COPY (SELECT 2 AS one) TO '{where}/some/2.csv'")
        assert database.execute(f"SELECT sum(one) FROM read_csv('{where}/some/*.csv')").fetchone() == (3,)


def with_torch(url: str, options: dict[str, Any]) -> None:
    import torch
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    weights = torch.arange(100_000, dtype=torch.float32)
    warnings.filterwarnings("ignore", "Detected an existing checkpoint|torch.distributed is disabled")
    for step in (7, 8):  # the second replaces the first
        save({"weights": weights, "step": step}, storage_writer=FsspecWriter(f"{url}/last", **options), no_dist=True)
        back = {"weights": torch.zeros(100_000), "step": 0}
        load(back, storage_reader=FsspecReader(f"{url}/last", **options), no_dist=True)
        found = back["weights"]
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, weights)
        assert back["step"] == step
        weights = torch.ones(100_000)
