"""FP8 tiles and products beside the oracle, for drawn shapes, magnitudes and values."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fp8_oracle import oracle_product, oracle_quantize

from fireflyer.training.fp8 import TILE, Fp8Config, dequantize, product, quantize

SCALES = st.sampled_from(["fp32", "ue8m0"])
SPECIAL = [0.0, -0.0, 1.0, 448.0, 464.0, 465.0, 2.0**-9, 2.0**-10, 1e-45, 3e38, float("inf"), float("nan")]


@st.composite
def matrices(draw: st.DrawFn, rows: int = 4, columns: int = 140, special: bool = True) -> torch.Tensor:
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.integers(1, rows)), draw(st.integers(1, columns))
    values = generator.standard_normal(shape) * 2.0 ** draw(st.integers(-130, 100))
    values *= 2.0 ** generator.uniform(-draw(st.integers(0, 30)), 0, shape)
    values = values.astype(np.float32)
    for _ in range(draw(st.integers(0, 3)) if special else 0):
        values[draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1))] = draw(st.sampled_from(SPECIAL))
    return torch.from_numpy(values)


@given(matrices(), st.sampled_from([1, TILE]), SCALES)
@settings(max_examples=60)
def test_codes_and_scales_are_those_of_the_oracle(values: torch.Tensor, rows: int, scales: str) -> None:
    config = Fp8Config(scales=scales)  # type: ignore[arg-type]
    found = quantize(values, rows, config)
    codes, of_rows = oracle_quantize(values.numpy(), rows, scales)
    assert np.array_equal(found.scales_of_rows().numpy(), of_rows, equal_nan=True)
    columns = values.shape[1]
    assert np.array_equal(found.codes.float().numpy()[:, :columns], codes[:, :columns], equal_nan=True)
    elements, underflowed, saturated, nonfinite = found.counts.tolist()
    numbers = values.numpy()
    assert elements == numbers.size
    assert underflowed == ((codes[:, :columns] == 0) & (numbers != 0) & np.isfinite(numbers)).sum()
    assert saturated == 0
    assert nonfinite == (~np.isfinite(numbers)).sum()


@given(matrices(special=False), SCALES)
def test_a_value_is_off_by_at_most_a_sixteenth_or_half_the_least_code(values: torch.Tensor, scales: str) -> None:
    quantized = quantize(values, 1, Fp8Config(scales=scales))  # type: ignore[arg-type]
    per_element = quantized.scales.repeat_interleave(TILE, dim=1)[:, : values.shape[1]].double()
    error = (dequantize(quantized, values.shape[1]).double() - values.double()).abs()
    bound = torch.maximum(values.double().abs() / 16, per_element * 2.0**-10)
    assert (error <= bound * (1 + 2.0**-20) + 2.0**-149).all()


@given(matrices(3), matrices(3), st.sampled_from(["fp32", "fp22"]), SCALES)
@settings(max_examples=60)
def test_products_are_those_of_the_oracle(a: torch.Tensor, b: torch.Tensor, accumulation: str, scales: str) -> None:
    columns = min(a.shape[1], b.shape[1])
    a, b = a[:, :columns], b[:, :columns]
    config = Fp8Config(scales=scales)  # type: ignore[arg-type]
    found = product(quantize(a, 1, config), quantize(b, TILE, config), accumulation)  # type: ignore[arg-type]
    with np.errstate(invalid="ignore", over="ignore"):
        left, right = oracle_quantize(a.numpy(), 1, scales), oracle_quantize(b.numpy(), TILE, scales)
        assert np.array_equal(found.numpy(), oracle_product(left, right, accumulation), equal_nan=True)


@given(matrices(6, special=False))
def test_rows_do_not_depend_on_each_other(values: torch.Tensor) -> None:
    together = quantize(values, 1)
    for row in range(values.shape[0]):
        alone = quantize(values[row : row + 1], 1)
        assert torch.equal(alone.scales[0], together.scales[row])
        assert torch.equal(alone.codes[0].view(torch.uint8), together.codes[row].view(torch.uint8))
