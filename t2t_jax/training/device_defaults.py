"""§5.2: what `config.machine` leaves to the devices: fused attention or not, and the peak rate that MFU refers to."""

import os
import re

import jax
from ml_collections import ConfigDict

from t2t_jax.model.attention import cudnn_supports, needed_by_fused

# Peak TFLOP/s of dense bfloat16 products, by the makers' data sheets. The key is the beginning of JAX's `device_kind`.
_PEAK_TFLOPS = {
    "NVIDIA A100": 312.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    "TPU v4": 275.0,
    "TPU v5": 459.0,  # v5p, under either name
    "TPU v5p": 459.0,
    "TPU v5 lite": 197.0,  # v5e
    "TPU v6 lite": 918.0,  # v6e
}


def fused_attention(config: ConfigDict, device: jax.Device) -> bool:
    """`machine.fused_attention`; where that is None, whether cuDNN has a kernel for this model on this device."""
    if (given := config.machine.fused_attention) is not None:
        return given
    return (
        _compute_capability(device) >= 8
        and why_not_fused(config) is None
        and cudnn_supports(config.train.dtype, config.model.d_k)
    )


def why_not_fused(config: ConfigDict) -> str | None:
    """What excludes fused attention on any device, as an error says it; None: nothing."""
    if (parallel := config.machine.model_parallel) > 1:
        return (
            f"machine.model_parallel={parallel} needs machine.fused_attention=False: the fused kernel computes all "
            "heads on one device"
        )
    for field, computed in needed_by_fused(config.model.d_k).items():
        if (value := config.model[field]) != computed:
            return (
                f"machine.fused_attention=True needs model.{field}={computed}, which is all that the fused kernel "
                f"computes; got {value}. Change it, or set machine.fused_attention=False"
            )
    if deterministic_operations():
        return (
            "machine.fused_attention=True has no deterministic operations: set it to False, or take "
            "--xla_gpu_deterministic_ops and --xla_gpu_exclude_nondeterministic_ops out of XLA_FLAGS"
        )
    return None


def deterministic_operations() -> bool:
    """Whether XLA_FLAGS asks for them; with them XLA fails to compile cuDNN's attention (jax 0.11.2, on an H200).

    XLA has two flags for them, and takes either.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    names = "deterministic_ops", "exclude_nondeterministic_ops"
    given = (re.findall(rf"--xla_gpu_{name}(?:=(\S+))?(?:\s|$)", flags) for name in names)
    return any(values and values[-1].lower() in ("", "true", "1") for values in given)


def peak_tflops(config: ConfigDict, device: jax.Device) -> float:
    """`machine.peak_tflops`; where that is 0, the device's rate for bfloat16; 0 if it is unknown or not for float32."""
    if config.machine.peak_tflops or config.train.dtype != "bfloat16":
        return config.machine.peak_tflops
    names = [name for name in _PEAK_TFLOPS if re.match(rf"{name}\b", device.device_kind)]
    return _PEAK_TFLOPS[max(names, key=len)] if names else 0.0


def _compute_capability(device: jax.Device) -> float:
    """NVIDIA's version number of a GPU's architecture, 8.0 for an A100; 0 for other devices."""
    version = getattr(device, "compute_capability", "")
    return float(version) if re.fullmatch(r"\d+\.\d+", version) else 0.0
