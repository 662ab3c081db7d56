"""What the fields of `config.machine` are on each kind of device, where the config leaves them to it."""

from typing import NamedTuple

import pytest

from configs import base_ende
from t2t_jax.training.device_defaults import fused_attention, peak_tflops


class Device(NamedTuple):
    device_kind: str
    compute_capability: str = "9.0"


H100 = Device("NVIDIA H100 80GB HBM3")


def config_with(**changes):
    config = base_ende.get_config()
    config.train.dtype = "bfloat16"
    config.update_from_flattened_dict({field.replace("__", "."): value for field, value in changes.items()})
    return config


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        (H100, {}, True),
        (Device("NVIDIA A100-SXM4-80GB", "8.0"), {}, True),
        (Device("Tesla T4", "7.5"), {}, False),
        (Device("AMD Instinct MI300X", "gfx942"), {}, False),
        (Device("NVIDIA B200", "10.0"), {}, True),
        (H100, {"train__dtype": "float32"}, False),
        (H100, {"model__d_k": 32}, False),
        (H100, {"model__d_k": 12, "model__d_v": 12}, False),
        (H100, {"model__d_k": 256, "model__d_v": 256}, False),
        (H100, {"model__attention_dropout": 0.1}, False),
        (H100, {"model__attention": "variant"}, False),
        (H100, {"machine__model_parallel": 2}, False),
        (H100, {"machine__fused_attention": False}, False),
        (H100, {"machine__fused_attention": True, "train__dtype": "float32"}, True),
    ],
)
def test_attention_is_fused_where_a_gpu_has_a_kernel_for_it_or_as_the_config_says(device, changes, expected):
    assert fused_attention(config_with(**changes), device) is expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--xla_gpu_deterministic_ops=true", False),
        ("--xla_dump_to=/tmp --xla_gpu_deterministic_ops", False),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false", True),
        ("--xla_gpu_deterministic_ops=false", True),
        ("--xla_gpu_exclude_nondeterministic_ops=true", False),
        ("--xla_gpu_deterministic_ops=false --xla_gpu_exclude_nondeterministic_ops", False),
    ],
)
def test_deterministic_operations_take_xlas_attention(monkeypatch, flags, expected):
    """XLA cannot compile cuDNN's with them."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert fused_attention(config_with(), H100) is expected


def test_devices_without_a_compute_capability_do_not_fuse():
    for kind in ("cpu", "TPU v4"):
        device = type("Device", (), {"device_kind": kind})()
        assert fused_attention(config_with(), device) is False


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", {}, 989),
        ("NVIDIA H100 PCIe", {}, 756),
        ("NVIDIA A100-SXM4-40GB", {}, 312),
        ("NVIDIA L4", {}, 121),
        ("NVIDIA L40S", {}, 362),
        ("NVIDIA L40", {}, 0),
        ("TPU v5 lite", {}, 197),
        ("TPU v5", {}, 459),
        ("TPU v5p", {}, 459),
        ("TPU v7", {}, 0),
        ("cpu", {}, 0),
        ("NVIDIA H100 80GB HBM3", {"train__dtype": "float32"}, 0),
        ("NVIDIA H100 80GB HBM3", {"machine__peak_tflops": 500.0}, 500),
        ("cpu", {"machine__peak_tflops": 0.5, "train__dtype": "float32"}, 0.5),
    ],
)
def test_the_peak_rate_is_that_of_the_longest_matching_name_in_bfloat16(kind, changes, expected):
    assert peak_tflops(config_with(**changes), Device(kind)) == expected
