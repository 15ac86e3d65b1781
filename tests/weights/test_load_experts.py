"""Experts: one weight holds the matrices of all experts of all layers, in whatever form matrices are kept."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from model_files import EXPERT_FFN, EXPERTS, HIDDEN, LAYERS, hf_tensors, write_folder, write_gguf

from noria.errors import WeightsError
from noria.nn.param import Param
from noria.ops import native
from noria.ops.experts.types import ExpertMatrices
from noria.ops.linear import reference
from noria.runner.pack_weights import MatrixForm
from noria.weights.checkpoint import open_checkpoint
from noria.weights.load import abstract_weights, load_weights, place_on

FORMS = [MatrixForm(packed, option) for packed in (False, True) for option in ("auto", "none", "int8")]
STEM = "model.layers.{layer}.mlp."
AXES = ("layers", "expert", "out", "in")


def declaration(first_layer: int = 0) -> dict[str, Param]:
    """Of the layers from first_layer on."""
    layers, options = LAYERS - first_layer, {"matrix": True, "first_layer": first_layer}
    down, up = (layers, EXPERTS, HIDDEN, EXPERT_FFN), (layers, EXPERTS, EXPERT_FFN, HIDDEN)
    return {
        "router": Param((layers, EXPERTS, HIDDEN), AXES[1:], STEM + "gate.weight", exact=True, **options),
        "up": Param(up, AXES, STEM + "experts.{expert}.up_proj.weight", **options),
        "down": Param(down, AXES, STEM + "experts.{expert}.down_proj.weight", **options),
    }


def expert_tensors() -> dict[str, np.ndarray]:
    """Nothing of a layer but its experts, so that nothing else has to be declared."""
    return {name: values for name, values in hf_tensors("qwen3moe").items() if ".mlp." in name or "embed" in name}


def load(path: Path, declared: dict[str, Param], form: MatrixForm) -> tuple[Any, Any]:
    """The weights, and the shapes as they are known without reading."""
    make, abstract = (None, None) if form.is_plain else (form.load, form.abstract)
    with open_checkpoint(path) as checkpoint:
        place = place_on(jax.devices("cpu")[0])
        loaded = load_weights(checkpoint, declared, "float32", place, pack=make)
        return loaded, abstract_weights(checkpoint, declared, "float32", abstract)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", ["folder", "Q8_0"])
@pytest.mark.parametrize("first_layer", [0, 1])
def test_every_matrix_of_every_expert(tmp_path: Path, kind: str, form: MatrixForm, first_layer: int) -> None:
    if form.packed and not native.available():
        pytest.skip(f"the native library is {native.status()}")
    tensors = expert_tensors()
    path = tmp_path / "m.gguf"
    path = write_folder(tmp_path / "m", tensors) if kind == "folder" else write_gguf(path, tensors, "qwen3moe", kind)
    loaded, shapes = load(path, declaration(first_layer), form)
    assert jax.tree.structure(shapes) == jax.tree.structure(loaded)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(loaded), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
    each = ExpertMatrices(loaded["up"], loaded["up"], loaded["down"]).one_by_one()
    for layer in range(LAYERS - first_layer):
        prefix = f"model.layers.{first_layer + layer}.mlp."
        # A router decides between experts that are nearly as good: it is not rounded.
        np.testing.assert_array_equal(reference.unpack(loaded["router"], layer), tensors[prefix + "gate.weight"])
        for expert in range(EXPERTS):
            for weight, name in ((each.up, "up_proj"), (each.down, "down_proj")):
                exact = tensors[f"{prefix}experts.{expert}.{name}.weight"]
                if kind == "Q8_0":
                    packed = quants.quantize(exact, GGMLQuantizationType.Q8_0)
                    exact = quants.dequantize(packed, GGMLQuantizationType.Q8_0)
                step = np.abs(exact).max(axis=1, keepdims=True) / 127 if form.quantization == "int8" else 0
                found = np.asarray(reference.unpack(weight, layer * EXPERTS + expert))
                assert np.all(np.abs(found - exact) <= step * 0.501)


def test_packed_experts_stay_packed(tmp_path: Path) -> None:
    if not native.available():
        pytest.skip(f"the native library is {native.status()}")
    path = write_gguf(tmp_path / "m.gguf", expert_tensors(), "qwen3moe", "Q4_0")
    loaded, _ = load(path, declaration(), MatrixForm(True, "auto"))
    assert loaded["up"].kinds == ("Q4_0",) * LAYERS * EXPERTS
    assert loaded["router"].kinds == ("float32",) * LAYERS


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    tensors = expert_tensors()
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    path = write_folder(tmp_path / "m", tensors)
    with pytest.raises(WeightsError, match=r"no tensor model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight of shape"):
        load(path, declaration(), MatrixForm(False, "auto"))
