"""Readers of untrusted files of other systems: no code in them is executed, every value is validated before its use.

Errors are one line that names the file or the field. Shapes are validated before a tensor is read, so that the length
of a file bounds the memory, whatever sizes the file declares.
"""

import argparse
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, for safetensors)
import numpy as np

from t2t_jax.errors import DamagedError, InputError, StopError, on_one_line, shown
from t2t_jax.files import existing_file, read_json
from t2t_jax.interop.optional_packages import need
from t2t_jax.interop.torch_names import State

_MOST_TEXT = 1 << 24  # bytes; parsed, JSON takes some 20 times as much memory
_ZIP = b"PK\x03\x04"  # the first bytes of a zip file, which torch.save writes
_FLOATS = ("F64", "F32", "F16", "BF16")  # names in safetensors

# Upper bounds, far above the sizes of real models.
MOST_LAYERS, MOST_HEADS, MOST_CHANNELS, MOST_POSITIONS, MOST_SYMBOLS = 1000, 1 << 12, 1 << 20, 1 << 16, 1 << 24

Shape = tuple[int | None, ...]  # None: any size
_T = TypeVar("_T")


def json_object(field: str, path: str | Path) -> dict[str, Any]:
    """The object in a JSON file; refuses files that are too long or hold another JSON value."""
    value = read_json(path := text_file(field, path))
    if not isinstance(value, dict):
        raise InputError(f"{field}: {path} holds {shown(value)}; it must hold one JSON object, {{…}}")
    return value


def text_file(field: str, path: str | Path) -> Path:
    """The path of a file that must exist; refuses one that is too long to be parsed."""
    path = existing_file(field, path)
    size = path.stat().st_size
    if size > _MOST_TEXT:
        raise InputError(f"{field}: {path} has {size:,} bytes; at most {_MOST_TEXT:,} are read")
    return path


class Fields:
    """Validating access to the fields of another system's configuration; null means absent."""

    def __init__(self, file: str, values: Mapping[str, Any]):
        self._file, self._values = file, values

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """An integer from `least` to `most`; without a default the field is required."""
        is_valid = lambda value: type(value) is int and least <= value <= most
        return self._checked(name, default, is_valid, f"it must be a whole number from {least} to {most}")

    def fraction(self, name: str, default: float) -> float:
        """A number in [0, 1)."""
        is_valid = lambda value: type(value) in (int, float) and 0 <= value < 1
        return float(self._checked(name, default, is_valid, "it must be a number of at least 0 and below 1"))

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A Boolean."""
        return self._checked(name, default, lambda value: isinstance(value, bool), "it must be true or false")

    def text(self, name: str, default: str) -> str:
        """A printable string; the default if absent or empty."""
        is_valid = lambda value: isinstance(value, str) and value.isprintable()
        return self._checked(name, default, is_valid, "it must be a printable string") or default

    def must_be(self, name: str, wanted: Any, default: Any = None) -> None:
        """Refuses every value but `wanted`, the only one that our model supports."""
        is_plain = lambda value: value is None or isinstance(value, (bool, int, float, str))
        self._checked(name, default, lambda x: is_plain(x) and x == wanted, f"our model has {wanted!r} only")

    def one_of(self, name: str, wanted: Mapping[str, str]) -> str:
        """`wanted[value]` of a field; refuses other values."""
        is_valid = lambda value: isinstance(value, str) and value in wanted
        return wanted[self._checked(name, None, is_valid, f"our model has {', '.join(map(repr, wanted))}")]

    def in_both(self, field: str, take: Callable[[str], _T]) -> _T:
        """`take` of a field, which must be the same for encoder and decoder."""
        encoder, decoder = (take(f"{stack}_{field}") for stack in ("encoder", "decoder"))
        if encoder != decoder:
            raise InputError(f"{self._file}: encoder_{field}={encoder}, decoder_{field}={decoder}; they must be equal")
        return encoder

    def _checked(self, name: str, default: Any, is_valid: Callable[[Any], bool], wanted: str) -> Any:
        """The value of a field, or the default; an InputError says what is `wanted` where that is not valid."""
        given = self._values.get(name)
        value = default if given is None else given
        if not is_valid(value):
            name = name if name.isprintable() and len(name) < 100 else shown(name)
            raise InputError(f"{self._file}: {name} is {'absent' if given is None else shown(given)}; {wanted}")
        return value


def heads(file: str, d_model: int, num_heads: int) -> dict[str, int]:
    """Our fields of the attention heads, d_k = d_v = d_model / h; refuses an h that does not divide d_model."""
    if d_model % num_heads:
        raise InputError(f"{file}: {num_heads} attention heads must divide d_model={d_model}")
    return {"num_heads": num_heads, "d_k": d_model // num_heads, "d_v": d_model // num_heads}


# --- Tensors -----------------------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """A tensor in a file: its shape, and a function that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def read_torch_file(field: str, path: Path) -> Any:
    """Loads a `torch.save` file of tensors, plain values and `argparse.Namespace`; refuses all other classes.

    Tensors are memory-mapped. A zip file whose contents are longer than itself (compressed, a zip bomb) is refused.
    """
    need("torch")
    import torch

    try:
        with path.open("rb") as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
        if is_zip:
            _check_zip(field, path)
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except StopError:
        raise
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise InputError(
            f"{field}: {path} holds {name[1] if name else 'something'}, neither a tensor nor a plain value nor an "
            "argparse.Namespace; nothing in it was run. Save the checkpoint again without it"
        ) from None
    except Exception as error:  # unpickling a damaged file can raise anything
        raise InputError(f"{field}: {path} can't be read as a PyTorch file ({type(error).__name__})") from None


def _check_zip(field: str, path: Path) -> None:
    """Refuses a zip file whose members are compressed, longer than the file, or do not match their checksums."""
    with zipfile.ZipFile(path) as file:
        members, size = file.infolist(), path.stat().st_size
        total = sum(member.file_size for member in members)
        if total > size or any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise InputError(f"{field}: {path} is compressed: {total:,} bytes in {size:,}; torch.save never does that")
        damaged = file.testzip()
    if damaged:
        raise DamagedError(f"{field}: {path} is damaged: {shown(damaged)} in it does not match its checksum")


def plain_dict(value: Any) -> dict[str, Any]:
    """The entries with string keys of an unpickled dict or Namespace; none for other values."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    # Not value.items(): pickle can give an OrderedDict an attribute of that name.
    entries = dict.items(value) if isinstance(value, dict) else ()
    return {name: x for name, x in entries if isinstance(name, str)}


def torch_tensors(field: str, state: Any, skipped: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors of a state dict from `read_torch_file`, except those whose names end with one of `skipped`."""
    if not isinstance(state, dict):
        raise InputError(f"{field} holds {shown(state)}; it must hold a state dict, tensors by name")
    named = {_name(field, name): value for name, value in dict.items(state)}
    return {name: _torch_tensor(field, name, x) for name, x in named.items() if not name.endswith(skipped)}


def _torch_tensor(field: str, name: str, value: Any) -> Tensor:
    import torch

    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise InputError(f"{field}: {name} is {shown(value)}; it must be a tensor")
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    is_plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
    if not is_plain or value.dtype not in floats:
        raise InputError(f"{field}: {name} is {_kind(value)}; parameters must be dense float tensors on the CPU")
    return Tensor(tuple(value.shape), lambda: value.detach().float().numpy())


def _kind(tensor: Any) -> str:
    return f"a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device.type}".replace("torch.", "")


def safetensors_tensors(field: str, path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    need("safetensors")
    import safetensors

    try:
        file = safetensors.safe_open(path, framework="numpy")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        kinds = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except Exception as error:  # SafetensorError, OSError or UnicodeError
        reason = on_one_line(error)[:200]
        raise InputError(f"{field}: {path} can't be read as safetensors: {reason}") from None
    for name, (_, dtype) in kinds.items():
        if dtype not in _FLOATS:
            raise InputError(f"{field}: {_name(field, name)} is a tensor of {dtype}; parameters must be floats")
    return {name: Tensor(shape, lambda name=name: file.get_tensor(name)) for name, (shape, _) in kinds.items()}


def _name(field: str, name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable() or len(name) > 200:
        raise InputError(
            f"{field}: {shown(name)} is no name of a parameter, a printable string of up to 200 characters"
        )
    return name


def read_state(field: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape], size: int) -> State:
    """All tensors of a file of `size` bytes, as float32, after checking their names and shapes against `shapes`.

    Refuses infinities and NaN.
    """
    unknown = sorted(tensors.keys() - shapes.keys())
    if unknown:
        raise InputError(f"{field}: our model has no parameter for {', '.join(unknown[:5])}")
    for name, tensor in tensors.items():
        if not _fits(tensor.shape, shapes[name]):
            wanted = str(shapes[name]).replace("None", "any")
            raise InputError(f"{field}: {name} has shape {tensor.shape}; its config requires {wanted}")
    # In float32 the values take up to six times the length of the file: half precision doubles it, and an embedding
    # that is stored once for source, target and softmax triples it. More means expanded (zero-stride) tensors.
    values = sum(math.prod(tensor.shape) for tensor in tensors.values())
    if 4 * values > 8 * size:
        raise InputError(f"{field} declares {values:,} values, but is only {size:,} bytes long")
    return {name: _read(field, name, tensor) for name, tensor in tensors.items()}


def _fits(shape: tuple[int, ...], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(b in (None, a) for a, b in zip(shape, wanted, strict=True))


def _read(field: str, name: str, tensor: Tensor) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):
            value = np.asarray(tensor.read(), np.float32)
    except (RuntimeError, OSError, MemoryError) as error:
        raise InputError(f"{field}: {name} can't be read ({type(error).__name__})") from None
    if not np.isfinite(value).all():
        raise DamagedError(f"{field}: {name} holds infinity or NaN; parameters must be finite in float32")
    return value
