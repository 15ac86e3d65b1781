"""Safetensors folders: what is read equals what was written, and what is wrong is named."""

import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import hf_tensors, read_all, safetensors_bytes, write_folder

from noria.errors import WeightsError
from noria.weights import base
from noria.weights.checkpoint import open_checkpoint

FLOATS = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_what_was_written(tmp_path, shards):
    tensors = hf_tensors("llama")
    with open_checkpoint(write_folder(tmp_path, tensors, shards)) as checkpoint:
        assert checkpoint.names() == set(tensors)
        assert checkpoint.config == {"model_type": "llama"}
        assert checkpoint.generation_config == {}
        assert not checkpoint.quantized
        for name, values in read_all(checkpoint).items():
            np.testing.assert_array_equal(values, tensors[name])


@pytest.mark.parametrize("stored", FLOATS, ids=str)
@pytest.mark.parametrize("wanted", FLOATS, ids=str)
def test_converts_between_all_float_types(tmp_path, stored, wanted, monkeypatch):
    values = np.random.default_rng(0).standard_normal((257, 33)).astype(stored)
    write_folder(tmp_path, {"w": values})
    monkeypatch.setattr("noria.weights.folder.SLICE_ELEMENTS", 1000)  # several slices, the last one shorter
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.native_dtype == stored.name
        out = np.empty(values.shape, wanted)
        checkpoint.read("w", out)
    np.testing.assert_array_equal(out.view(np.uint8), values.astype(wanted).view(np.uint8))


def test_files_written_by_the_safetensors_package_are_read(tmp_path):
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    tensors = hf_tensors("qwen3")
    write_folder(tmp_path, {})
    safetensors_numpy.save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        for name, values in read_all(checkpoint).items():
            np.testing.assert_array_equal(values, tensors[name])


@pytest.mark.parametrize(
    ("config", "dtype"), [({}, "float32"), ({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "float16"}, "float16")]
)
def test_random_weights_need_nothing_but_a_config(tmp_path, config, dtype):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path, config_only=True) as checkpoint:
        assert checkpoint.config == config
        assert checkpoint.names() == set()
        assert checkpoint.native_dtype == dtype
    with pytest.raises(WeightsError, match=r"has no \*\.safetensors file"):
        open_checkpoint(tmp_path)


def test_a_single_file_of_another_name_will_do(tmp_path):
    write_folder(tmp_path, {"w": np.ones(3, np.float32)})
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == {"w"}


def test_native_dtype_is_that_of_most_parameters(tmp_path):
    tensors = {"big": np.zeros((8, 8), ml_dtypes.bfloat16), "a": np.zeros(5, np.float32), "b": np.zeros(5, np.float32)}
    with open_checkpoint(write_folder(tmp_path, tensors)) as checkpoint:
        assert checkpoint.native_dtype == "bfloat16"


def test_experts_have_one_name_each(tmp_path):
    """Mixtral's names, and the tensors of all experts together that transformers 5 can write."""
    rng = np.random.default_rng(0)
    both, down = (rng.standard_normal(shape, np.float32) for shape in ((2, 6, 4), (2, 4, 3)))
    layer = "model.layers.0."
    expected = {layer + "mlp.gate.weight": np.ones((2, 4), np.float32)}
    for expert in range(2):
        stem = f"{layer}mlp.experts.{expert}."
        expected |= {stem + "gate_proj.weight": both[expert, :3], stem + "up_proj.weight": both[expert, 3:]}
        expected[stem + "down_proj.weight"] = down[expert]
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "mlp": "block_sparse_moe"}
    mixtral = {}
    for name, values in expected.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        mixtral[name] = values
    stacked = {
        layer + "mlp.gate.weight": expected[layer + "mlp.gate.weight"],
        layer + "mlp.experts.gate_up_proj": both,
        layer + "mlp.experts.down_proj": down,
    }
    for number, tensors in enumerate((mixtral, stacked)):
        with open_checkpoint(write_folder(tmp_path / str(number), tensors)) as checkpoint:
            found = read_all(checkpoint)
        assert found.keys() == expected.keys()
        for name, values in found.items():
            np.testing.assert_array_equal(values, expected[name])


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    tensors = {f"model.layers.{layer}.input_layernorm.weight": np.ones(2, np.float32) for layer in (0, 1, 2, 10)}
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    with open_checkpoint(write_folder(tmp_path, tensors, config=config)) as checkpoint:
        assert sorted(checkpoint.names()) == sorted(name for name in tensors if ".1." not in name)


def test_generation_config_is_read(tmp_path):
    write_folder(tmp_path, {"w": np.ones(3, np.float32)})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.generation_config == {"eos_token_id": [1, 2]}


def test_empty_tensors_are_read(tmp_path):
    tensors = {"none": np.empty((0, 4), np.float32), "scalar": np.float32(3).reshape(())}
    with open_checkpoint(write_folder(tmp_path, tensors)) as checkpoint:
        for dtype in FLOATS:
            assert read_all(checkpoint, dtype)["scalar"] == 3


def test_float16_overflow_is_an_error(tmp_path):
    for stored in (np.float32, ml_dtypes.bfloat16):
        checkpoint = open_checkpoint(write_folder(tmp_path, {"w": np.full(4, 1e6, stored)}))
        with checkpoint, pytest.raises(WeightsError, match="w has values beyond the range of float16; use dtype bf"):
            checkpoint.read("w", np.empty(4, np.float16))


def test_integer_tensors_may_exist_but_not_be_read(tmp_path):
    tensors = {"w": np.ones(2, np.float32), "position_ids": np.arange(3)}
    with open_checkpoint(write_folder(tmp_path, tensors)) as checkpoint:
        read = np.empty(2, np.float32)
        checkpoint.read("w", read)
        with pytest.raises(WeightsError, match="position_ids has the dtype I64; supported are F32, F16, BF16"):
            checkpoint.read("position_ids", np.empty(3, np.float32))
        with pytest.raises(WeightsError, match="has no tensor v"):
            checkpoint.read("v", np.empty(3, np.float32))
        with pytest.raises(ValueError, match="of shape"):
            checkpoint.read("w", np.empty(3, np.float32))


def test_a_file_cut_while_open_is_an_error(tmp_path):
    with open_checkpoint(write_folder(tmp_path, {"w": np.ones(5000, np.float32)})) as checkpoint:
        with open(tmp_path / "model.safetensors", "r+b") as file:
            file.truncate(4000)
        with pytest.raises(WeightsError, match="is truncated"):
            checkpoint.read("w", np.empty(5000, np.float32))


def assert_refused(path, match):
    with pytest.raises(WeightsError, match=match) as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)


def test_what_is_no_model_is_named(tmp_path):
    assert_refused(tmp_path / "nothing", "no such file or folder")
    (tmp_path / "notes.txt").write_text("hello")
    assert_refused(tmp_path / "notes.txt", "name a folder with config.json")
    assert_refused(tmp_path, "has no config.json; is it the folder of a Hugging Face model")
    (tmp_path / "model.gguf").touch()
    assert_refused(tmp_path, "has no config.json; name the file .*model.gguf instead")


def test_missing_weights_are_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert_refused(tmp_path, "has no .*safetensors file")
    (tmp_path / "pytorch_model.bin").touch()
    assert_refused(tmp_path, "pytorch_model.bin.*convert them to safetensors")
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors_bytes({name: np.ones(1, np.float32)}))
    assert_refused(tmp_path, "several safetensors files but no model.safetensors.index.json")


def test_a_broken_index_is_named(tmp_path):
    write_folder(tmp_path, hf_tensors("llama"), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    (tmp_path / "model-00002-of-00002.safetensors").rename(tmp_path / "away")
    assert_refused(tmp_path, "lacks the shard model-00002-of-00002.safetensors")
    (tmp_path / "away").rename(tmp_path / "model-00002-of-00002.safetensors")
    for bad in ("../secret", "x" * 5000, "", "..", 7, None):
        index.write_text(json.dumps({"weight_map": good["weight_map"] | {"w": bad}}))
        assert_refused(tmp_path, "no file of the folder|lacks the shard")
    index.write_text(json.dumps({"weight_map": good["weight_map"] | {"w": "model-00001-of-00002.safetensors"}}))
    assert_refused(tmp_path, "has no tensor w, but")
    index.write_text("{}")
    assert_refused(tmp_path, "has no weight_map")


def test_quantized_folders_are_refused(tmp_path):
    write_folder(tmp_path, {"w": np.ones(1, np.float32)}, config={"quantization_config": {"quant_method": "awq"}})
    assert_refused(tmp_path, "quantized with awq, which is not supported")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_malformed_json_is_named(tmp_path, name, content):
    write_folder(tmp_path, {"w": np.ones(1, np.float32)})
    (tmp_path / name).write_bytes(content)
    assert_refused(tmp_path, f"{name} is not a JSON object")


def test_every_truncation_is_refused(tmp_path):
    write_folder(tmp_path, {"w": np.ones((2, 3), np.float32), "v": np.ones(3, np.float16)})
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert_refused(tmp_path, "truncated|not a safetensors file")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "BF16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {}, optional={"dtype": json_values, "shape": json_values, "data_offsets": json_values | st.just([0, 8])}
)


@settings(max_examples=50)
@given(header=st.dictionaries(st.text(max_size=3), entries | json_values, max_size=3), data=st.binary(max_size=64))
def test_any_header_opens_or_is_refused(tmp_path_factory, header, data):
    text = json.dumps(header).encode()
    _open_and_read(tmp_path_factory.mktemp("any"), len(text).to_bytes(8, "little") + text + data)


@given(data=st.data())
def test_any_damage_opens_or_is_refused(tmp_path_factory, data):
    whole = bytearray(safetensors_bytes({"w": np.ones((2, 3), np.float32), "v": np.ones(3, np.float16)}))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    _open_and_read(tmp_path_factory.mktemp("damage"), bytes(whole))


def _open_and_read(folder, content):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    try:
        with open_checkpoint(folder) as checkpoint:
            for name in checkpoint.names():
                if math.prod(checkpoint.shape(name)) < 1_000_000:
                    checkpoint.read(name, np.empty(checkpoint.shape(name), np.float16))
    except WeightsError as error:
        assert "\n" not in str(error)  # noqa: PT017, both outcomes are fine


def test_blob_of_a_missing_file(tmp_path):
    with pytest.raises(WeightsError, match="no such file"):
        base.Blob(tmp_path / "none")
    with pytest.raises(WeightsError, match="cannot read"):
        base.Blob(tmp_path)
