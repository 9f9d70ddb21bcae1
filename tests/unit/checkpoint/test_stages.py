"""Jobs in which ranks have different tensors: who writes what, and what each gets back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.support.checkpoints.ranks import Ranks
from tests.support.checkpoints.states import listed, state_of

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint import CheckpointManager, State, TrainingLoop, capture, load_into, needed_by, verify
from fireflyer.checkpoint.core.manifest import decode_manifest
from fireflyer.checkpoint.core.safetensors import TensorSpec
from fireflyer.checkpoint.core.shares import HeldSlice, assign
from fireflyer.checkpoint.core.slices import Box, Slice, slice_name
from fireflyer.checkpoint.core.stages import StageList, list_digest, plan_stages, share_of_stage, stages_of
from fireflyer.runtime.store import LocalStore


def spec(name: str, size_bytes: int, dtype: str = "U8") -> TensorSpec:
    return TensorSpec(name, dtype, (size_bytes,))


def of(*specs: TensorSpec, of_rank_0: tuple[str, ...] = ()) -> StageList:
    return StageList(tuple(sorted(specs, key=lambda one: one.name)), of_rank_0)


def shares(lists: list[StageList], stage_of: list[int]) -> list[dict[str, int]]:
    """What each rank writes: names and bytes."""
    planned = plan_stages(lists, stage_of)
    return [
        {one.name: one.size_bytes for one in share_of_stage(rank, lists[stage], planned[stage], [], [])}
        for rank, stage in enumerate(stage_of)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_tensor_is_written_once_by_a_rank_that_has_it(seed: int) -> None:
    rng = random.Random(seed)
    tensors = [spec(f"t{number}", rng.choice([0, 1, 50, 700])) for number in range(40)]
    lists = [of(*(one for one in tensors if rng.random() < 0.6)) for _ in range(rng.randint(1, 5))]
    stage_of = [*range(len(lists)), *(rng.randrange(len(lists)) for _ in range(4))]
    written = shares(lists, stage_of)
    all_names = sorted(name for share in written for name in share)
    assert all_names == sorted({one.name for one in tensors for some in lists if one in some.specs})
    for rank, share in enumerate(written):
        assert share.keys() <= {one.name for one in lists[stage_of[rank]].specs}


def test_the_ranks_of_a_stage_share_it_evenly_and_where_all_have_the_same_it_is_the_plan_without_stages() -> None:
    first = [spec(f"a{number}", 100) for number in range(8)]
    second = [spec(f"b{number}", 100) for number in range(4)]
    written = shares([of(*first), of(*second)], [0, 0, 1, 1])
    assert [sum(share.values()) for share in written] == [400, 400, 200, 200]

    mixed = [spec(f"m{number}", number * 7 % 31) for number in range(50)]
    owners = assign(mixed, 3, frozenset({"m3"}))
    planned = plan_stages([of(*mixed, of_rank_0=("m3",))], [0, 0, 0])[0]
    assert planned.writers == tuple(owners[one.name] for one in of(*mixed).specs)
    assert planned.total_bytes == sum(one.size_bytes for one in mixed)


def test_a_tensor_of_several_stages_goes_to_the_one_with_less_to_write() -> None:
    tied = spec("tied", 300)
    written = shares([of(tied, spec("a", 500)), of(tied, spec("b", 100))], [0, 1])
    assert written == [{"a": 500}, {"b": 100, "tied": 300}]


def test_buffers_in_which_ranks_may_differ_are_the_lowest_rank_s_that_has_them() -> None:
    lists = [of(spec("a", 9)), of(spec("mean", 1), spec("b", 90), of_rank_0=("mean",))]
    written = shares(lists, [0, 1, 1])
    assert "mean" in written[1]


def test_different_tensors_of_one_name_are_refused_and_the_ranks_named() -> None:
    lists = [of(spec("w", 4)), of(spec("x", 1)), of(spec("w", 5))]
    with pytest.raises(UsageError, match=r"'w' is U8 \(4,\) on ranks 0, 1 and U8 \(5,\) on rank 3; .* name them"):
        plan_stages(lists, [0, 0, 1, 2])
    with pytest.raises(UsageError, match=r"U8 \(4,\) on rank 0 and I8 \(4,\) on rank 1"):
        plan_stages([of(spec("w", 4)), of(spec("w", 4, "I8"))], [0, 1])


def sharded(name: str, mesh: tuple[int, ...], rows: int = 8) -> tuple[TensorSpec, dict[int, HeldSlice]]:
    """A tensor of so many rows over the ranks of a mesh, and what each has."""
    each = rows // len(mesh)
    found = {}
    for index, rank in enumerate(mesh):
        box = Box((index * each,), (each,))
        part = Slice(name, (rows,), box.offset, (len(mesh),), ("S(0)",))
        found[rank] = HeldSlice(TensorSpec(slice_name(name, box), "U8", box.shape, part), (rank,))
    return TensorSpec(name, "U8", (rows,), Slice(name, (rows,), (0,), (len(mesh),), ("S(0)",))), found


def test_slices_are_written_by_ranks_that_have_them_also_where_stages_are_sharded_apart() -> None:
    """A tied tensor that two stages have sharded over meshes of their own is stored as the first has it."""
    only, only_held = sharded("only", (2, 3))
    first, first_held = sharded("tied", (0, 1))
    second, second_held = sharded("tied", (2, 3))
    lists = [StageList((first,), (), ((0, 1),), (0,)), StageList((only, second), (), ((2, 3),), (0, 0))]
    planned = plan_stages(lists, [0, 0, 1, 1])
    held = {
        0: [first_held[0]],
        1: [first_held[1]],
        2: [only_held[2], second_held[2]],
        3: [only_held[3], second_held[3]],
    }
    written = {
        rank: [one.name for one in share_of_stage(rank, lists[rank // 2], planned[rank // 2], held[rank], [])]
        for rank in range(4)
    }
    assert written == {0: ["tied[0:4]"], 1: ["tied[4:8]"], 2: ["only[0:4]"], 3: ["only[4:8]"]}


def test_holders_that_have_no_such_tensor_are_left_out() -> None:
    """A mesh that was cut out of one with an axis of stages counts the ranks of all stages."""
    whole, held = sharded("w", (0, 1))
    wide = {rank: each._replace(holders=(rank, rank + 2)) for rank, each in held.items()}
    lists = [StageList((whole,), (), ((0, 1, 2, 3),), (0,)), of(spec("x", 100))]
    planned = plan_stages(lists, [0, 0, 1, 1])
    written = [[one.name for one in share_of_stage(rank, lists[0], planned[0], [wide[rank]], [])] for rank in (0, 1)]
    assert written == [["w[0:4]"], ["w[4:8]"]]


def test_stages_are_numbered_by_their_lowest_ranks() -> None:
    one, other = list_digest(of(spec("a", 1))), list_digest(of(spec("a", 2)))
    assert stages_of([other, one, other, one]) == [0, 1, 0, 1]
    assert list_digest(of(spec("a", 1), of_rank_0=("a",))) != one


# Managers.


def part_of(rank: int, step: int) -> State:
    """Ranks 0 and 1 have one part of the state, rank 2 the other; all have `w4`."""
    shared = dict(state_of(step).shared)
    names = ("w0", "w1", "w4") if rank < 2 else ("w2", "w3", "w4")
    return State({name: shared[name] for name in names}, {}, {"step": step})


def test_the_manifest_has_the_union_and_each_rank_gets_what_it_asks_for(tmp_path: Path) -> None:
    store = LocalStore()
    ranks = Ranks(str(tmp_path), 3, None, store=store)
    ranks.together(lambda ours: ours.reserve(part_of(ours.rank, 1)))
    for step in (10, 20, 30):
        ranks.together(lambda ours, step=step: ours.save(step, part_of(ours.rank, step), blocking=True).result())  # type: ignore[misc]
    ranks.close()
    assert [info.problem for info in verify(str(tmp_path))] == [None, None]
    manifest = decode_manifest((tmp_path / "step-00000030" / "manifest.json").read_bytes())
    assert sorted(tensor.name for shard in manifest.shards for tensor in shard.tensors) == sorted(state_of(30).shared)
    assert not [key for key in store.keys("") if "tensors/" in key or "share/" in key], "lists go with their save"

    again = Ranks(str(tmp_path), 2, None, attempt=1)
    wanted = [("w0", "w3"), ("w3", "w4")]
    found = again.together(lambda ours: ours.restore(wanted=lambda name: name in wanted[ours.rank]))
    for names, restored in zip(wanted, found, strict=True):
        assert restored is not None
        assert sorted(restored.shared) == sorted(names)
        assert all(torch.equal(restored.shared[name], state_of(30).shared[name]) for name in names)
    again.close()


def test_names_are_exchanged_when_they_change_and_else_a_digest_of_each_rank(tmp_path: Path) -> None:
    sent: list[tuple[str, int]] = []

    class Recorded(LocalStore):
        def set(self, key: str, value: bytes) -> None:
            sent.append((key, len(value)))
            super().set(key, value)

    def exchanged(call: str) -> list[str]:
        found = [key.partition("/0/")[2] for key, _ in sent if f"/{call}/" in key and "/part/" not in key]
        return [key for key in found if "tensors" in key or "share" in key]

    ranks = Ranks(str(tmp_path), 2, None, store=Recorded())

    def save(step: int, shared: list[dict[str, torch.Tensor]]) -> None:
        names = ranks.together(lambda ours: ours.save(step, State(shared[ours.rank]), blocking=True).result())
        assert names == [f"step-{step:08d}"] * 2

    same = [{"a": torch.ones(2)}] * 2
    other = [{"a": torch.ones(2)}, {"b": torch.ones(2)}]
    more = [{"a": torch.ones(2)}, {"b": torch.ones(2), "c": torch.ones(2)}]
    for step, shared in enumerate((same, other, other, more, same, other), 1):
        save(step, shared)
    ranks.close()
    with_names = ["tensors/1", "share/0", "share/1"]
    assert [exchanged(str(step)) for step in (1, 3, 5)] == [[], [], []]
    for step in (2, 4, 6):
        assert exchanged(str(step)) == [f"{step}/{name}" for name in with_names]
    assert {size for key, size in sent if "/list/" in key} == {16}


def test_a_name_with_two_shapes_is_an_error_on_every_rank_and_the_next_save_is_whole(tmp_path: Path) -> None:
    ranks = Ranks(str(tmp_path), 3, None)

    def save(ours: CheckpointManager) -> str:
        with pytest.raises(UsageError) as raised:
            ours.save(10, State({"w": torch.zeros(4), "x": torch.zeros(4 + ours.rank // 2)}))
        return str(raised.value)

    errors = ranks.together(save)
    assert {*errors} == {errors[0]}
    assert "'x' is F32 (4,) on ranks 0, 1 and F32 (5,) on rank 2" in errors[0]
    assert listed([path.name for path in tmp_path.iterdir()]) == []
    names = ranks.together(lambda ours: ours.save(20, part_of(ours.rank, 20), blocking=True).result())
    assert names == ["step-00000020"] * 3
    ranks.close()


def test_many_tensors_in_stages(tmp_path: Path) -> None:
    """Lists that are longer than a value of the store."""
    ranks = Ranks(str(tmp_path), 2, None)
    some = torch.zeros(1)

    def state(rank: int) -> State:
        return State({f"layer.{number}.{rank}.with.a.name.that.is.long": some for number in range(30_000)})

    ranks.together(lambda ours: ours.save(1, state(ours.rank), blocking=True).result())
    ranks.close()
    manifest = decode_manifest((tmp_path / "step-00000001" / "manifest.json").read_bytes())
    assert [len(shard.tensors) for shard in manifest.shards] == [30_000, 30_000]


# Models.


def model_of(layers: range, *, seed: int = 0) -> torch.nn.Module:
    """Layers of a whole model, by their names in it."""
    stage = torch.nn.Module()
    for number in layers:
        torch.manual_seed(10 * seed + number)
        stage.add_module(f"layer{number}", torch.nn.Linear(3, 3))
    return stage


def train(stage: torch.nn.Module, step: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    for name, parameter in stage.named_parameters():
        generator = torch.Generator().manual_seed(step + sum(map(ord, name)))
        parameter.grad = torch.rand(parameter.shape, generator=generator)
    optimizer.step()
    return optimizer


def test_state_by_name_is_the_same_however_the_model_is_cut() -> None:
    whole = model_of(range(4))
    expected = capture(whole, train(whole, 1), by_name=True, rng=False)
    assert "optimizer/layer2.weight/exp_avg" in expected.shared
    for layers in (range(2), range(2, 4)):
        stage = model_of(layers)
        state = capture(stage, train(stage, 1), by_name=True, rng=False)
        assert state.values == expected.values
        assert all(torch.equal(expected.shared[name], tensor) for name, tensor in state.shared.items())

        new = model_of(layers, seed=1)
        optimizer = torch.optim.AdamW(new.parameters(), lr=0.5)
        needed = needed_by(new, optimizer)
        load_into({n: t for n, t in expected.shared.items() if needed(n)}, expected.values, new, optimizer)
        loaded = capture(new, optimizer, by_name=True, rng=False).shared
        assert loaded.keys() == state.shared.keys()
        assert all(torch.equal(state.shared[name], tensor) for name, tensor in loaded.items())
        assert optimizer.param_groups[0]["lr"] == 0.1
        with pytest.raises(UsageError, match=r"model has no tensor|no parameter"):
            load_into(expected.shared, expected.values, new, optimizer)


def test_what_has_no_name_cannot_be_stored_by_name() -> None:
    model = model_of(range(1))
    stray = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(UsageError, match="parameter 2 of the optimizer is not in the model"):
        capture(model, torch.optim.AdamW([*model.parameters(), stray]), by_name=True)


def test_a_loop_by_name_refuses_a_checkpoint_by_number(tmp_path: Path) -> None:
    model = model_of(range(1))
    with TrainingLoop(str(tmp_path), model, torch.optim.SGD(model.parameters()), stop_signals=()) as loop:
        for _ in loop.steps(1):
            pass
    with (
        pytest.raises(UsageError, match="by number; resume without by_name"),
        TrainingLoop(str(tmp_path), model, torch.optim.SGD(model.parameters()), stop_signals=(), by_name=True),
    ):
        pass
