"""Plans of at most four ranks, each of which is compared step by step with one process."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from tests.support.torch_ranks.processes import run_torch_ranks
from tests.support.trainer.recipes import raw_recipe

from fireflyer.recipes.deepseek.config import PRESETS
from fireflyer.recipes.trainer.core.parsing import recipe_of

__all__ = [
    "DEEPER",
    "DEEPSEEK",
    "KINDS",
    "LIMIT_S",
    "SCHEDULES",
    "STARTS",
    "WIDE_STEPS",
    "check_wide_steps",
    "of_each_rank",
    "write_deeper",
]

Case = tuple[dict[str, Any], dict[str, Any]]
"""Model and plan."""
GPT: Final = {"kind": "gpt", "vocabulary": 256, "layers": 4, "heads": 4, "width": 32}
SHALLOW: Final = {**GPT, "layers": 2}
DEEP: Final = {**GPT, "layers": 8}
DEEPSEEK: Final = {"kind": "deepseek", "preset": "tiny", "vocabulary": 256}
DEEPER: Final = {"kind": "deepseek", "config": "deeper.json"}
"""As `write_deeper` writes it."""
EXPERTS: Final = {"replicate": 2, "expert": 2}
SCHEDULES: Final[dict[str, dict[str, Any]]] = {
    **{name: {"schedule": name} for name in ("gpipe", "1f1b", "zb-h1", "zbv", "dualpipe", "dualpipev")},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
}
STARTS: Final[dict[str, dict[str, Case]]] = {
    "experts on two ranks": {"ep2": (DEEPSEEK, EXPERTS)},
    "two ranks": {
        "dp2": (GPT, {"replicate": 2}),
        **{f"fsdp2, zero {zero}": (GPT, {"shard": 2, "zero": zero}) for zero in (1, 2, 3)},
        **{f"pp2, {name}": (GPT, {"pipeline": 2, **schedule}) for name, schedule in SCHEDULES.items()},
        "tp2": (GPT, {"tensor": 2}),
    },
    "four ranks": {
        "fsdp4": (GPT, {"shard": 4, "zero": 3}),
        "hsdp2x2": (GPT, {"replicate": 2, "shard": 2, "zero": 3}),
        "pp2xdp2": (GPT, {"pipeline": 2, "replicate": 2}),
        "pp2 with zero 1": (GPT, {"pipeline": 2, "shard": 2, "zero": 1}),
        "fsdp2xtp2": (SHALLOW, {"shard": 2, "zero": 3, "tensor": 2}),
    },
    "experts on four ranks": {
        "ep4": (DEEPSEEK, {"replicate": 4, "expert": 4}),
        "ep2xdp2": (DEEPSEEK, {"replicate": 4, "expert": 2}),
        **{f"ep2xpp2, {one}": (DEEPSEEK, {"pipeline": 2, "schedule": one, **EXPERTS}) for one in ("1f1b", "dualpipe")},
        "ep2xpp2, dualpipev": (DEEPER, {"pipeline": 2, "schedule": "dualpipev", **EXPERTS}),
    },
    "experts with zero 1": {
        "ep2 with zero 1": (DEEPSEEK, {"shard": 4, "zero": 1, "expert": 2}),
        "ep4 with zero 1": (DEEPSEEK, {"shard": 4, "zero": 1, "expert": 4}),
        "ep2xpp2, dualpipe with zero 1": (
            DEEPSEEK,
            {"pipeline": 2, "schedule": "dualpipe", "shard": 2, "zero": 1, "expert": 2},
        ),
    },
    "four stages": {f"pp4, {name}": (DEEP, {"pipeline": 4, **schedule}) for name, schedule in SCHEDULES.items()},
    # DTensor keeps what it has planned for an equal mesh, with the groups of that one.
    "tensor ranks and replicas": {"tp2xdp2": (SHALLOW, {"tensor": 2, "replicate": 2})},
}
"""Cases of equally many ranks, which the same processes run one after the other."""
KINDS: Final = ("gradient", "norm", "loss", "parameter")
"""Of differences."""
SEQUENCES: Final = 16
EPSILON: Final = 1e-3
"""Of Adam. With 1e-8 its first steps divide the gradient of an element by itself: the element moves by the learning
rate, however small its gradient is. Rounding is relative to the whole gradient tensor: a small element has a large
relative error, so that 2e-7 in gradients were seen to be 1e-5 in parameters."""
LIMIT_S: Final = 840
WIDE_STEPS: Final = 20


def write_deeper(directory: Path) -> None:
    """The configuration of `DEEPSEEK` with four layers, for four stages."""
    tiny = PRESETS["tiny"]
    shape = msgspec.structs.replace(tiny.shape, layers=4, vocabulary=DEEPSEEK["vocabulary"])
    (directory / DEEPER["config"]).write_text(json.dumps(msgspec.structs.replace(tiny, shape=shape).to_hugging_face()))


def check_wide_steps(name: str) -> None:
    """In FP64 any plan computes the gradients of one process in twenty steps, each from what it has computed itself:
    each gradient tensor, before clipping, over its norm; their norm, the loss, and parameters after the last step."""
    for rank, found in enumerate(of_each_rank(name, WIDE_STEPS, wide=True)):
        print(name, rank, found)
        for kind in KINDS:
            assert found[kind] <= 1e-10, (rank, kind)


def of_each_rank(name: str, steps: int, *, wide: bool = False) -> list[dict[str, Any]]:
    """The largest differences that each rank of a case found, as `plan_steps` gives them. All cases of a start are run
    once, also where one fails, since the others would fail again as late."""
    found = _outcome(next(start for start, cases in STARTS.items() if name in cases), steps, wide=wide)
    if isinstance(found, BaseException):
        raise AssertionError(f"the ranks of this case and others failed: {found}") from found
    ranks = [one[name] for one in found]
    compared, names = (set().union(*(rank[key] for rank in ranks)) for key in ("compared", "parameters"))
    assert compared == names, "the ranks have all parameters"
    differences = [{key: rank[key] for key in (*KINDS, "worst", "content")} for rank in ranks]
    assert all(rank["biases"] for rank in ranks), f"biases of gates are those of the one process: {differences}"
    return differences


@functools.cache
def _outcome(start: str, steps: int, *, wide: bool) -> list[dict[str, Any]] | BaseException:
    try:
        return _run(start, steps, wide=wide)
    except (Exception, pytest.fail.Exception) as error:
        return error


def _run(start: str, steps: int, *, wide: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        write_deeper(Path(directory))
        cases = {name: _tables(case, steps, directory) for name, case in STARTS[start].items()}
        count = recipe_of(raw_recipe(**next(iter(cases.values())))).plan.world_size
        module = "tests.support.torch_ranks.plan_steps"
        ended = run_torch_ranks(module, (0,) * count, cases=cases, wide=wide, limit_s=LIMIT_S)
    assert [one.code for one in ended] == [0] * count, [one.errors[-3000:] for one in ended]
    return [one.result for one in ended]


def _tables(case: Case, steps: int, directory: str) -> dict[str, Any]:
    """Of a recipe, as `raw_recipe` takes them. No more micro-batches than a schedule needs: they cost most."""
    model, plan = case
    if "config" in model:
        model = {**model, "config": f"{directory}/{model['config']}"}
    data, micro_batches = plan.get("replicate", 1) * plan.get("shard", 1), 2 * plan.get("pipeline", 1)
    sizes = {"batch_sequences": SEQUENCES, "micro_batch": SEQUENCES // (data * micro_batches)}
    return {
        "model": model,
        "plan": {"sequence_tokens": 16, **sizes, **plan},
        "optimizer": {"steps": steps, "learning_rate": 1e-3, "warm_up_steps": 0, "max_norm": 0.5, "epsilon": EPSILON},
    }
