"""Memory that is asked for and not used costs nothing."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from noria.ops import native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native library {native.status()}")


def resident() -> int:
    """Bytes of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_pages_come_with_the_first_write():
    native.uninitialized(jax.ShapeDtypeStruct((8,), jnp.int32))  # what is loaded with the first call
    before, size = resident(), 256 * 2**20
    array = native.uninitialized(jax.ShapeDtypeStruct((size // 4,), jnp.float32))
    array.block_until_ready()
    assert resident() - before < size / 10
    write = jax.jit(lambda array: array.at[:1000].set(1.0), donate_argnums=0)
    array = write(array)
    assert float(jnp.sum(array[:1000])) == 1000
    assert resident() - before < size / 2  # it is still the same memory


def test_shapes_and_structure_are_kept():
    shapes = {"a": jax.ShapeDtypeStruct((2, 3), jnp.uint8), "b": jax.ShapeDtypeStruct((4,), jnp.bfloat16), "c": None}
    arrays = native.uninitialized(shapes)
    assert arrays["c"] is None
    assert (arrays["a"].shape, arrays["a"].dtype) == ((2, 3), jnp.uint8)
    assert (arrays["b"].shape, arrays["b"].dtype) == ((4,), jnp.bfloat16)
