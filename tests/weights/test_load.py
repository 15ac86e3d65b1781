"""Loading: every Param gets its tensors, nothing is held twice, and a checkpoint that does not fit is refused."""

import dataclasses
import itertools
import logging
import math
import tracemalloc
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from model_files import HIDDEN, LAYERS, hf_tensors, write_folder, write_gguf

from noria.errors import WeightsError
from noria.nn.param import Param, param_bytes
from noria.ops import native
from noria.ops.linear import reference
from noria.runner.pack_weights import MatrixForm
from noria.weights.checkpoint import open_checkpoint
from noria.weights.load import abstract_weights, empty_aligned, load_weights, place_on
from noria.weights.progress import byte_bar

CPU = jax.devices("cpu")[0]


@jax.tree_util.register_dataclass
@dataclass
class Weights:
    embed: Any
    final_norm: Any
    layers: dict[str, Any]


def declare(model_type: str, **changes: tuple[int, ...]) -> Weights:
    """The declaration of the tiny model; changes: other shapes for tensors of a layer."""
    tensors = hf_tensors(model_type)
    layers = {}
    for name, values in tensors.items():
        if name.startswith("model.layers.0."):
            key = name.removeprefix("model.layers.0.")
            shape = (LAYERS, *changes.get(key.split(".")[-2], values.shape))
            axes = ("layers",) + ("x",) * (len(shape) - 1)
            layers[key] = Param(shape, axes, "model.layers.{layer}." + key, dtype="float32" if "norm" in key else None)
    embed = Param(tensors["model.embed_tokens.weight"].shape, ("vocab", "hidden"), "model.embed_tokens.weight")
    return Weights(embed, Param((HIDDEN,), ("hidden",), "model.norm.weight"), layers)


def declare_matrices(model_type: str) -> Weights:
    """The same as a model declares it: what is multiplied with is a matrix, for which there may be packed weights."""
    declared = declare(model_type)
    is_matrix = {key: "proj" in key and key.endswith("weight") for key in declared.layers}
    layers = {key: dataclasses.replace(param, matrix=is_matrix[key]) for key, param in declared.layers.items()}
    return dataclasses.replace(declared, layers=layers, embed=dataclasses.replace(declared.embed, matrix=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_every_param_is_filled(tmp_path, kind, dtype):
    tensors = hf_tensors("llama")
    path = write_folder(tmp_path, tensors, 2) if kind == "folder" else write_gguf(tmp_path / "m.gguf", tensors)
    seen: list[tuple[int, int]] = []
    declaration = declare("llama")
    with open_checkpoint(path) as checkpoint:
        weights = load_weights(checkpoint, declaration, dtype, place_on(CPU), lambda *at: seen.append(at))
    assert isinstance(weights, Weights)
    np.testing.assert_array_equal(weights.embed, tensors["model.embed_tokens.weight"].astype(dtype))
    for key, array in weights.layers.items():
        expected = np.stack([tensors[f"model.layers.{layer}.{key}"] for layer in range(LAYERS)])
        assert array.dtype == ("float32" if "norm" in key else dtype)
        np.testing.assert_array_equal(array, expected.astype(array.dtype))
    total = param_bytes(declaration, dtype)
    assert seen[-1] == (total, total)
    assert len(seen) == len(tensors)
    assert all(before[0] < after[0] for before, after in itertools.pairwise(seen))


def test_place_gets_each_param_with_its_buffer(tmp_path):
    placed = []

    def place(buffer: np.ndarray, param: Param) -> jax.Array:
        assert buffer.shape == param.shape
        placed.append(param.source)
        return jax.device_put(buffer, CPU)

    declaration = declare("qwen2")
    with open_checkpoint(write_folder(tmp_path, hf_tensors("qwen2"))) as checkpoint:
        load_weights(checkpoint, declaration, "float32", place)
    assert sorted(placed) == sorted(
        p.source for p in [declaration.embed, declaration.final_norm, *declaration.layers.values()]
    )


@pytest.mark.parametrize("shape", [(3, 5), (1,), (0, 4), (1000, 1000)])
def test_buffers_are_taken_over_on_a_cpu(shape):
    buffer = empty_aligned(shape, np.dtype(ml_dtypes.bfloat16))
    assert (buffer.shape, buffer.dtype) == (shape, ml_dtypes.bfloat16)
    buffer[...] = 1
    array = place_on(CPU)(buffer, Param(shape, ("x",) * len(shape), "w"))
    if math.prod(shape):
        assert array.unsafe_buffer_pointer() == buffer.ctypes.data


def test_no_second_copy_is_held(tmp_path):
    shape = (4, 1024, 512)  # 8 MiB in float32
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": np.ones(shape[1:], np.float16) for i in range(4)}
    tensors |= {f"model.layers.{i}.mlp.down_proj.weight": np.ones(shape[1:], np.float16) for i in range(4)}
    names = ("up_proj", "down_proj")
    declaration = [Param(shape, ("layers", "x", "x"), f"model.layers.{{layer}}.mlp.{name}.weight") for name in names]
    write_folder(tmp_path, tensors)
    del tensors
    with open_checkpoint(tmp_path) as checkpoint:
        tracemalloc.start()
        weights = load_weights(checkpoint, declaration, "float32", place_on(CPU))
        current, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    result = sum(array.nbytes for array in weights)
    assert result <= current < result + 500_000
    assert peak < result + 1_000_000


def load(path, declaration):
    with open_checkpoint(path) as checkpoint:
        return load_weights(checkpoint, declaration, "float32", place_on(CPU))


def test_a_missing_tensor_is_named(tmp_path):
    tensors = hf_tensors("llama")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightsError, match=r"no tensor model.layers.1.mlp.up_proj.weight of shape \(96, 64\)"):
        load(write_folder(tmp_path, tensors), declare("llama"))


def test_another_shape_is_named(tmp_path):
    path = write_folder(tmp_path, hf_tensors("llama"))
    with pytest.raises(WeightsError, match=r"k_proj.weight has shape \(64, 64\), but .* config asks for \(32, 64\)"):
        load(path, declare("llama", k_proj=(32, 64)))


@pytest.mark.parametrize("extra", ["q_proj.bias", "q_norm.weight"])
def test_an_unused_bias_or_norm_of_a_layer_is_refused(tmp_path, extra):
    name = f"model.layers.1.self_attn.{extra}"
    path = write_folder(tmp_path, hf_tensors("llama") | {name: np.ones(128, np.float32)})
    with pytest.raises(WeightsError, match=f"has the tensor {name}, which this model does not use"):
        load(path, declare("llama"))


def test_a_layer_too_many_is_refused(tmp_path):
    extra = {"model.layers.2.input_layernorm.weight": np.ones(HIDDEN, np.float32)}
    with pytest.raises(WeightsError, match="has it more layers"):
        load(write_folder(tmp_path, hf_tensors("llama") | extra), declare("llama"))


def test_an_unknown_norm_in_a_gguf_file_is_refused(tmp_path):
    extra = {"blk.0.attn_sub_norm.weight": np.ones(HIDDEN, np.float32)}
    with pytest.raises(WeightsError, match=r"blk.0.attn_sub_norm.weight, which this model does not use"):
        load(write_gguf(tmp_path / "m.gguf", hf_tensors("llama"), raw_tensors=extra), declare("llama"))


def test_other_unused_tensors_are_logged(tmp_path, caplog):
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32),
        "lm_head.weight": np.ones((48, 64), np.float32),
        "vision_tower.layers.0.norm.bias": np.ones(4, np.float32),
    }
    caplog.set_level(logging.DEBUG, logger="noria")
    load(write_folder(tmp_path, hf_tensors("llama") | extra), declare("llama"))
    assert all(name in caplog.text for name in extra)


def test_nothing_is_read_before_the_check(tmp_path):
    declaration = dataclasses.replace(declare("llama"), final_norm=Param((HIDDEN,), ("hidden",), "model.other.weight"))
    seen: list[int] = []
    with open_checkpoint(write_folder(tmp_path, hf_tensors("llama"))) as checkpoint:  # noqa: SIM117
        with pytest.raises(WeightsError, match=r"model.other.weight"):
            load_weights(checkpoint, declaration, "float32", place_on(CPU), lambda done, _: seen.append(done))
    assert seen == []


def test_the_bar_is_silent_unless_stderr_is_a_terminal(capfd, monkeypatch):
    with byte_bar("loading") as progress:
        progress(1, 2)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats any stream as a terminal
    with byte_bar("loading") as progress:
        progress(500, 1000)
    out, err = capfd.readouterr()
    assert out == ""
    assert "loading" in err
    assert "0.5/1.0 kB" in err


FORMS = [MatrixForm(packed, option) for packed in (False, True) for option in ("auto", "none", "int8")]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", ["folder", "F32", "Q8_0", "Q4_1"])
def test_shapes_can_be_known_without_reading(tmp_path, monkeypatch, kind: str, form: MatrixForm):
    if form.packed and not native.available():
        pytest.skip(f"the native library is {native.status()}")
    tensors = hf_tensors("llama")
    if kind == "folder":
        path = write_folder(tmp_path / "m", tensors)
    else:
        path = write_gguf(tmp_path / "m.gguf", tensors, kind=kind)
    declaration = declare_matrices("llama")
    make, abstract = (None, None) if form.is_plain else (form.load, form.abstract)
    with open_checkpoint(path) as checkpoint:
        loaded = load_weights(checkpoint, declaration, "bfloat16", place_on(CPU), pack=make)
        monkeypatch.setattr(type(checkpoint), "read", None)
        monkeypatch.setattr(type(checkpoint), "read_blocks", None)
        shapes = abstract_weights(checkpoint, declaration, "bfloat16", abstract)
    assert jax.tree.structure(shapes) == jax.tree.structure(loaded)  # the kinds of packed weights are part of it
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(loaded)):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
    weight = shapes.layers["mlp.up_proj.weight"]
    if form.packed:
        kept = kind if kind[0] == "Q" else "bfloat16"
        assert {*weight.kinds} == {{"auto": kept, "none": "bfloat16", "int8": "int8"}[form.quantization]}
    else:
        assert weight.data.dtype == ("int8" if form.quantization == "int8" else "bfloat16")


def test_8_bit_weights_are_the_same_on_every_back_end(tmp_path):
    """And within half a step of the values."""
    if not native.available():
        pytest.skip(f"the native library is {native.status()}")
    declaration, tensors = declare_matrices("llama"), hf_tensors("llama")
    with open_checkpoint(write_folder(tmp_path / "m", tensors)) as checkpoint:
        load = lambda form: load_weights(checkpoint, declaration, "float32", place_on(CPU), pack=form.load)
        dense, packed = (load(MatrixForm(packed, "int8")).layers["mlp.up_proj.weight"] for packed in (False, True))
    for layer in range(dense.layers):
        values = np.asarray(reference.unpack(dense, layer))
        np.testing.assert_array_equal(values, reference.unpack(packed, layer))
        exact = tensors[f"model.layers.{layer}.mlp.up_proj.weight"].astype(np.float32)
        step = np.abs(exact).max(axis=1, keepdims=True) / 127
        assert np.all(np.abs(values - exact) <= step * 0.501)


def test_shapes_of_a_checkpoint_that_does_not_fit(tmp_path):
    with open_checkpoint(write_folder(tmp_path / "m", hf_tensors("llama"))) as checkpoint:
        declaration = declare("llama", up_proj=(1, 2))
        with pytest.raises(WeightsError, match=r"up_proj\.weight has shape"):
            abstract_weights(checkpoint, declaration, "float32")
