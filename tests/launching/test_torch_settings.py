"""Tests of the settings of torch that ranks take over from the notebook."""

from __future__ import annotations

import pytest
import torch

from notebook_accel.launching import torch_settings


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="came with torch 2.9")
def test_a_precision_of_products_alone_is_taken_over() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        found = torch_settings.settings()
        assert found == {"cuda_matmul_precision": "tf32"}
        matmul.fp32_precision = "none"
        torch_settings.take_over(found)
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
