"""Weights come from the files of Hugging Face and go to them: names, experts, prediction modules, FP8."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.recipes.deepseek import PRESETS, DeepseekConfig, DeepseekModel, LocalDispatch, Yarn
from fireflyer.recipes.deepseek.weights import dequantise, load_weights, read_config, save_weights

TINY = PRESETS["tiny"]
LAST = TINY.shape.layers
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_weights(DeepseekModel(TINY), str(directory))
    return directory


def changed(saved: Path, target: Path, change: Callable[[Tensors], object]) -> str:
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return str(target)


def test_what_was_written_is_read(saved: Path) -> None:
    model = DeepseekModel(replace(TINY, seed=5))
    load_weights(model, str(saved))
    for (name, one), wanted in zip(model.named_parameters(), DeepseekModel(TINY).parameters(), strict=True):
        assert torch.equal(one, wanted), name


def test_the_names_are_those_of_the_published_model(saved: Path) -> None:
    names = set(load_file(saved / "model.safetensors"))
    for wanted in (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        f"model.layers.{LAST}.enorm.weight",
        f"model.layers.{LAST}.hnorm.weight",
        f"model.layers.{LAST}.eh_proj.weight",
        f"model.layers.{LAST}.self_attn.o_proj.weight",
        f"model.layers.{LAST}.mlp.experts.0.gate_proj.weight",
        f"model.layers.{LAST}.shared_head.norm.weight",
        f"model.layers.{LAST}.shared_head.head.weight",
        f"model.layers.{LAST}.embed_tokens.weight",
    ):
        assert wanted in names
    assert not [name for name in names if "mtp" in name or "block" in name]


def test_a_part_of_the_experts_reads_its_part(saved: Path) -> None:
    part = DeepseekModel(replace(TINY, seed=5), experts=range(2, 5), dispatcher=LocalDispatch(8))
    load_weights(part, str(saved))
    whole = DeepseekModel(TINY).get_parameter("layers.1.mlp.experts.up_proj")
    assert torch.equal(part.get_parameter("layers.1.mlp.experts.up_proj"), whole[2:5])
    with pytest.raises(UsageError, match="gather the others"):
        save_weights(part, str(saved))


@pytest.mark.parametrize("written_hidden_first", [False, True])
def test_both_orders_of_the_projection_are_read_and_written(tmp_path: Path, written_hidden_first: bool) -> None:
    model = DeepseekModel(TINY)
    save_weights(model, str(tmp_path), stored_hidden_first=written_hidden_first)
    assert read_config(str(tmp_path)).mtp_hidden_first is written_hidden_first
    other = DeepseekModel(replace(TINY, seed=5))
    load_weights(other, str(tmp_path), stored_hidden_first=written_hidden_first)
    assert torch.equal(other.get_parameter("mtp.0.eh_proj.weight"), model.get_parameter("mtp.0.eh_proj.weight"))
    same_order = DeepseekModel(read_config(str(tmp_path)))
    load_weights(same_order, str(tmp_path))
    tokens = torch.arange(10).reshape(1, 10)
    ours, theirs = (one.losses(tokens[:, :-1], tokens[:, 1:]).mtp[0].item() for one in (model, same_order))
    assert ours == pytest.approx(theirs, rel=1e-6)


def in_fp8(tensors: Tensors, name: str) -> torch.Tensor:
    """Replaces a matrix by one in FP8 with factors of blocks, and returns what it stands for."""
    matrix = tensors.pop(name)
    rows, columns = (-(-size // 128) for size in matrix.shape)
    factors = torch.empty(rows, columns)
    stored = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    wanted = torch.empty(matrix.shape)
    for i in range(rows):
        for j in range(columns):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            factors[i, j] = matrix[block].abs().max() / 448
            stored[block] = (matrix[block] / factors[i, j]).to(torch.float8_e4m3fn)
            wanted[block] = stored[block].float() * factors[i, j]
    tensors[name], tensors[name + "_scale_inv"] = stored, factors
    return wanted


def test_matrices_in_fp8_are_multiplied_by_the_factors_of_their_blocks(saved: Path, tmp_path: Path) -> None:
    wide = {"weight": torch.randn(300, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 200)}
    wanted = in_fp8(wide, "weight")
    assert torch.equal(dequantise(wide["weight"], wide["weight_scale_inv"]), wanted)
    names = ("model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.0.self_attn.o_proj.weight")
    matrices: Tensors = {}
    directory = changed(saved, tmp_path, lambda tensors: matrices.update({n: in_fp8(tensors, n) for n in names}))
    model = DeepseekModel(TINY)
    load_weights(model, directory)
    expert, other = (matrices[name] for name in names)
    assert torch.equal(model.get_parameter("layers.1.mlp.experts.down_proj")[3], expert)
    assert torch.equal(model.get_parameter("layers.0.self_attn.o_proj.weight"), other)


def test_factors_that_do_not_fit_are_refused(saved: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    directory = changed(saved, tmp_path, lambda tensors: (in_fp8(tensors, name), tensors.pop(name + "_scale_inv")))
    with pytest.raises(NotFound, match=re.escape(f"{name!r} is in FP8 and has no factors")):
        load_weights(DeepseekModel(TINY), directory)
    with pytest.raises(UsageError, match=re.escape("(1, 1) factors for a matrix of (300, 200) in FP8")):
        dequantise(torch.zeros(300, 200, dtype=torch.float8_e4m3fn), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), NotFound, "no tensor 'model.norm.weight'"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(3, 4)}), UsageError, "'lm_head.weight' has shape (3, 4)"),
        (
            lambda t: t[f"model.layers.{LAST}.embed_tokens.weight"].add_(1),
            UsageError,
            f"'model.layers.{LAST}.embed_tokens.weight' differs from that of the main model",
        ),
    ],
    ids=["missing", "shape", "not shared"],
)
def test_files_that_do_not_fit_are_refused(
    saved: Path, tmp_path: Path, change: Callable[[Tensors], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        load_weights(DeepseekModel(TINY), changed(saved, tmp_path, change))


def test_broken_files_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=re.escape("no *.safetensors files")):
        load_weights(DeepseekModel(TINY), str(tmp_path))
    whole = (saved / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(DataCorruption, match=r"model\.safetensors is no whole safetensors file"):
        load_weights(DeepseekModel(TINY), str(tmp_path))
    for name in ("a.safetensors", "model.safetensors"):
        (tmp_path / name).write_bytes(whole)
    with pytest.raises(DataCorruption, match="is in another file of the directory, too"):
        load_weights(DeepseekModel(TINY), str(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, yarn=Yarn(factor=40, original_context=64, mscale=1.0, mscale_all_dim=0.7), rope_theta=5e5),
        replace(TINY, mtp_hidden_first=True, renormalised=False, routed_scaling=1.25, rope_interleaved=False),
        replace(TINY, shape=replace(TINY.shape, experts=None, dense_layers=0)),
    ],
    ids=["tiny", "yarn", "flags", "dense"],
)
def test_a_config_is_read_as_it_was_written(config: DeepseekConfig) -> None:
    written = json.loads(json.dumps(config.to_hugging_face()))
    read = DeepseekConfig.from_hugging_face(written)
    if config.shape.experts is None:
        read = replace(read, shape=replace(read.shape, dense_layers=0))
    assert read == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rotary positions of type 'llama3'"),
        ({"rope_scaling": 4}, "'rope_scaling' is 4; an object is needed"),
        ({"rope_scaling": {"type": "yarn"}}, "'original_max_position_embeddings'"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' is -1; a number above 0 is needed"),
        ({"model_type": "deepseek_v2"}, "does not have model_type 'deepseek_v2'"),
    ],
)
def test_a_config_of_another_model_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        DeepseekConfig.from_hugging_face(TINY.to_hugging_face() | change)


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_config(str(tmp_path))
    for text, message in (("[1]", "no JSON object"), ("{", "no JSON"), (" " * (1 << 21), "larger than")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=message):
            read_config(str(tmp_path))
