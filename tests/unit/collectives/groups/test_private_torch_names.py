"""The one list of private names of torch, and of libraries above it, that the package uses.

They change without notice. Whoever pins another version sees here which are gone, and who uses them.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest

SOURCES: Final = next(one for one in Path(__file__).resolve().parents if (one / "pyproject.toml").is_file()) / "src"
LIBRARIES: Final = ("torch", "pytorch_lightning", "transformers")

USES: Final = {
    "torch.Tensor._version": "training/fsdp/shadows.py",
    "torch._C.Future": "collectives/torch/work.py training/comm_hooks.py",
    "torch._C.Future._set_unwrap_func": "collectives/torch/work.py",
    "torch._C._autograd._profiler_enabled": "collectives/torch/methods.py",
    "torch._C._autograd._record_function_with_args_enter": "collectives/torch/methods.py",
    "torch._C._autograd._record_function_with_args_exit": "collectives/torch/methods.py",
    "torch._C._current_graph_task_id": "training/reducer.py",
    "torch._C._dynamo.eval_frame._FrameAction.SKIP": "collectives/torch/methods.py",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "collectives/torch/methods.py",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "collectives/torch/methods.py",
    "torch._disable_dynamo": "training/ddp.py",
    "torch._foreach_copy_": "checkpoint/copying.py checkpoint/snapshot.py",
    "torch.autograd.Variable._execution_engine": "training/reducer.py",
    "torch.autograd._unsafe_preserve_version_counter": "training/ddp.py",
    "torch.distributed.ProcessGroup._get_backend": "training/process_groups.py",
    "torch.distributed._DEFAULT_FIRST_BUCKET_BYTES": "training/ddp.py",
    "torch.distributed._shard._utils.narrow_tensor_by_index": "checkpoint/dcp/foreign.py",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "checkpoint/dcp/metadata_pickle.py",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": "checkpoint/dcp/metadata_pickle.py",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": "checkpoint/sharding.py training/process_groups.py",
    "torch.distributed.distributed_c10d.ProcessGroupGloo.Options._timeout": "training/process_groups.py",
    "torch.distributed.distributed_c10d._get_process_group_store": "collectives/torch/store.py",
    "torch.distributed.fsdp.FSDPModule._set_unshard_async_op": "training/fsdp/sharding.py",
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset": "checkpoint/sharding.py",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": (
        "recipes/trainer/stored.py training/experts/renumbering.py"
    ),
    "torch.distributed.utils._to_kwargs": "training/ddp.py",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module": "training/ddp.py",
    # Modes that see every operator have no public place; torch's own counters are made of it.
    "torch.utils._python_dispatch.TorchDispatchMode": "training/recompute.py training/tensor/counting.py",
}
"""Where to find each name, and the modules that use it."""
SET_BY_CONSTRUCTORS: Final = {
    ("pytorch_lightning", "trainer/trainer.py", "_checkpoint_connector"): "integrations/lightning.py"
}
"""Attributes that objects alone have: package, its file that sets them, name."""
NOT_OF_LIBRARIES: Final = {
    ("checkpoint/manager.py", "_owned_store"),
    ("checkpoint/manager.py", "_waits_at_the_end"),
    ("collectives/torch/work.py", "_getframe"),  # of sys
    ("training/reducer.py", "_on_gradient"),
}


def found(path: str) -> bool:
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for name in parts[end:]:
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        return True
    return False


def missing_names(uses: Mapping[str, str]) -> list[str]:
    torch = version("torch")
    return [f"torch {torch} has no {path}, which is used in {users}" for path, users in uses.items() if not found(path)]


def private_names(source: str) -> Iterator[str]:
    """Names with an underscore that a module takes from others, if it imports a library at all."""
    if not any(library in source for library in LIBRARIES):
        return
    tree = ast.parse(source)
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    if not {name.split(".")[0] for name in (*imported, *(node.module or "" for node in froms))} & {*LIBRARIES}:
        return
    for node in froms:
        if (node.module or "").split(".")[0] in LIBRARIES:
            for dotted in (node.module or "", *(name.name for name in node.names)):
                yield from (part for part in dotted.split(".") if is_private(part))
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and is_private(each.attr):
            whose = each.value
            if not (isinstance(whose, ast.Name) and whose.id in ("self", "cls")):
                yield each.attr


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_the_pinned_torch_has_all_private_names_that_are_used() -> None:
    assert not missing_names(USES), "\n".join(missing_names(USES))


@pytest.mark.parametrize(("package", "file", "name"), SET_BY_CONSTRUCTORS)
def test_the_pinned_libraries_set_the_private_attributes_that_are_used(package: str, file: str, name: str) -> None:
    """Read, not run: importing them takes seconds."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / file).read_text(encoding="utf-8")
    users = SET_BY_CONSTRUCTORS[package, file, name]
    assert f"self.{name} = " in text, f"{package} {version(package)} does not set {name}, which is used in {users}"


def test_a_name_that_is_gone_is_told_in_one_line() -> None:
    gone = {"torch._C._no_longer": "training/ddp.py", "torch.no_longer._it": "a.py", "no_library.x": "b.py"}
    expected = [f"torch {version('torch')} has no {path}, which is used in {user}" for path, user in gone.items()]
    assert missing_names(gone | {"torch._C.Future": ""}) == expected


def test_the_list_names_every_private_name_that_the_sources_use_and_no_other() -> None:
    package = SOURCES / "fireflyer"
    used = {
        (str(path.relative_to(package)), name)
        for path in package.rglob("*.py")
        for name in private_names(path.read_text(encoding="utf-8"))
    }
    listed = {
        (user, part)
        for path, users in USES.items()
        for user in users.split()
        for part in path.split(".")
        if is_private(part)
    }
    listed |= {(user, name) for (_, _, name), user in SET_BY_CONSTRUCTORS.items()}
    assert used - NOT_OF_LIBRARIES == listed
    assert used >= NOT_OF_LIBRARIES


def test_the_scan_sees_every_way_to_take_a_private_name() -> None:
    source = (
        "from torch._C import _autograd\nfrom torch.x import y\nimport numpy\nself._a; cls._b; group._c._d; x.__e\n"
    )
    assert sorted(private_names(source)) == ["_C", "_autograd", "_c", "_d"]
    assert list(private_names("import numpy\nnumpy._a\n")) == []
