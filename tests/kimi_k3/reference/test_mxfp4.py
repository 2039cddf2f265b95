from __future__ import annotations

import math

import pytest
import torch

from kimi_k3.reference import mxfp4
from kimi_k3.reference.weights import MXFP4Tensor

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_all_codes_and_nibble_order() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(1)
    weight = MXFP4Tensor(codes.view(16, 16), torch.full((16, 1), 127, dtype=torch.uint8))
    out = mxfp4.dequantize(weight, torch.float64)
    for byte in range(256):
        row, column = divmod(byte, 16)
        for position, code in ((2 * column, byte & 15), (2 * column + 1, byte >> 4)):
            expected = math.copysign(VALUES[code & 7], -1.0 if code & 8 else 1.0)
            got = out[row, position].item()
            assert got == expected
            assert math.copysign(1.0, got) == math.copysign(1.0, expected), "code 8 is -0"


def test_pack_is_the_inverse_of_unpack() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    assert torch.equal(mxfp4.pack_codes(mxfp4.unpack_codes(packed)), packed)
    assert mxfp4.pack_codes(torch.tensor([0x3, 0xC], dtype=torch.uint8)).item() == 0xC3


def test_scale_belongs_to_32_consecutive_inputs_and_is_exact_in_bf16() -> None:
    packed = torch.full((1, 32), 0x77, dtype=torch.uint8)  # all 6.0
    weight = MXFP4Tensor(packed, torch.tensor([[112, 122]], dtype=torch.uint8))
    out = mxfp4.dequantize(weight)
    assert out[0, :32].unique().tolist() == [6 * 2.0**-15]
    assert out[0, 32:].unique().tolist() == [6 * 2.0**-5]
    assert torch.equal(out, out.bfloat16().float())


def test_extreme_scales() -> None:
    values = mxfp4.scale_values(torch.tensor([0, 127, 254, 255], dtype=torch.uint8), torch.float64)
    assert values[:3].tolist() == [2.0**-127, 1.0, 2.0**127]
    assert torch.isnan(values[3])


def test_representable_values_survive_quantisation() -> None:
    codes = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    codes[:, ::32] = 7  # the group maximum fixes the scale
    codes[codes == 8] = 0
    weight = MXFP4Tensor(mxfp4.pack_codes(codes), torch.randint(112, 123, (8, 2), dtype=torch.uint8))
    again = mxfp4.quantize(mxfp4.dequantize(weight))
    assert torch.equal(again.packed, weight.packed)
    assert torch.equal(again.scale, weight.scale)


def test_quantisation_rounds_to_nearest_even_code_and_saturates() -> None:
    # amax 7 -> scale 1; ties between neighbouring codes go to the even code; 7 saturates to 6
    row = [7.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, 0.2, 0.3, 4.9, 5.1, -7.0] + [0.0] * 16
    out = mxfp4.dequantize(mxfp4.quantize(torch.tensor([row])))[0, :16].tolist()
    assert out == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.0, -1.0, -4.0, 0.0, 0.5, 4.0, 6.0, -6.0]


def test_quantisation_error_is_bounded_by_half_a_step() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    q = mxfp4.quantize(x)
    error = (mxfp4.dequantize(q) - x).abs().unflatten(-1, (-1, 32))
    amax = x.abs().unflatten(-1, (-1, 32)).amax(-1, keepdim=True)
    assert bool((error <= amax / 4 + 1e-6).all())  # amax < 8 scale units; the widest gap is 2, saturation costs < 2
    assert mxfp4.quantize(torch.zeros(1, 32)).scale.item() == 127


def test_row_length_must_be_a_multiple_of_the_group() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp4.quantize(torch.zeros(1, 40))
