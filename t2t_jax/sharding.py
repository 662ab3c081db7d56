"""§5.2: the devices of a run, and how its arrays are laid out over them. Nothing else knows about devices."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA = "data"


def make_mesh(devices: list[jax.Device] | None = None) -> Mesh:
    """All devices in one row: each holds the whole model and a share of every batch."""
    return Mesh(np.array(jax.devices() if devices is None else devices), (DATA,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device: parameters and optimiser state."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """The first axis divided over the devices: batches."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def put_rows(arrays: dict[str, np.ndarray], mesh: Mesh, multiple: int = 1) -> dict[str, jax.Array]:
    """Arrays with equal numbers of rows, put on the devices in equal shares.

    Rows of zeros, which are padding everywhere in this code, are added up to the next multiple of
    `multiple` × the number of devices.
    """
    step = mesh.devices.size * multiple
    rows = next(iter(arrays.values())).shape[0]
    added = -rows % step
    padded = {name: np.pad(x, ((0, added),) + ((0, 0),) * (x.ndim - 1)) for name, x in arrays.items()}
    return jax.device_put(padded, by_rows(mesh))
