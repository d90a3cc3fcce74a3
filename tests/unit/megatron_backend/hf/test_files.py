import json

import pytest
import torch
from safetensors.torch import save_file

from slime_like.errors import CheckpointError
from slime_like.megatron_backend.hf.files import HfReader, finish_folder, save_stage


@pytest.fixture
def folder(tmp_path):
    save_file({"a": torch.arange(12.0).reshape(4, 3)}, tmp_path / "model.safetensors")
    return str(tmp_path)


def test_reads_rows_and_columns(folder):
    reader = HfReader(folder)
    assert reader.names == {"a"}
    assert reader.read("a", shape=(4, 3), dim=0, start=1, stop=3).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert reader.read("a", shape=(4, 3), dim=1, start=2, stop=3).tolist() == [[2], [5], [8], [11]]
    assert reader.read("a", shape=(4, 3)).shape == (4, 3)


def test_missing_tensor_is_named(folder):
    with pytest.raises(CheckpointError, match="'b'"):
        HfReader(folder).read("b", shape=(1,))


def test_other_shape_names_file_and_tensor(folder):
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'a' has shape \[4, 3\].*\[4, 4\]"):
        HfReader(folder).read("a", shape=(4, 4))


def test_torn_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        HfReader(str(tmp_path))


def test_index_that_points_nowhere(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        HfReader(str(tmp_path)).read("a", shape=(1,))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no index"):
        HfReader(str(tmp_path))


def test_folder_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match="no weights"):
        HfReader(str(tmp_path))


def test_sharded_folder_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr("slime_like.megatron_backend.hf.files.SHARD_BYTES", 100)
    template, out = tmp_path / "template", tmp_path / "out"
    template.mkdir()
    out.mkdir()
    (template / "config.json").write_text('{"dtype": "bfloat16"}')
    (template / "tokenizer.json").write_text("{}")
    (template / "model.safetensors").write_bytes(b"old weights")
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}  # 40 bytes each: two to a file
    file_of, total_bytes = save_stage(tensors.items(), str(out), "model-stage00")
    assert total_bytes == 200
    assert len(set(file_of.values())) == 3
    finish_folder(str(out), template=str(template), file_of=file_of, total_bytes=total_bytes, dtype=torch.float32)
    reader = HfReader(str(out))
    assert all(torch.equal(reader.read(name, shape=(10,)), tensor) for name, tensor in tensors.items())
    assert json.loads((out / "config.json").read_text()) == {"dtype": "float32"}
    assert (out / "tokenizer.json").is_file()
    assert not (out / "model.safetensors").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_named_with_its_place(tmp_path, dtype, value):
    weight = torch.randn(40, 30).to(dtype)
    weight[17, 4] = weight[31, 29] = value
    save_file({"a": weight, "b": torch.ones(2)}, tmp_path / "model.safetensors")
    reader = HfReader(str(tmp_path))
    named = rf"model.safetensors: of tensor 'a' 2 of 1200 numbers are NaN or infinite \(first {value} at \[17, 4\]\)"
    with pytest.raises(CheckpointError, match=named):
        reader.read("a", shape=(40, 30))
    with pytest.raises(CheckpointError, match=r"1 of 300 numbers .*\[1, 29\]"):
        reader.read("a", shape=(40, 30), dim=0, start=30, stop=40)
    assert reader.read("a", shape=(40, 30), dim=0, start=0, stop=10).shape == (10, 30)  # none of it is bad
    assert reader.read("b", shape=(2,)).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_weight_that_is_no_float_is_named(tmp_path, dtype):
    save_file({"a": torch.ones(4).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor 'a' is of the data type .*; weights are read as F64, F32"):
        HfReader(str(tmp_path)).read("a", shape=(4,))


@pytest.mark.parametrize("part", ["../x.safetensors", "/etc/passwd", 3, None, "x.bin", ""])
def test_an_index_names_files_of_its_folder_only(tmp_path, part):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": part}}))
    with pytest.raises(CheckpointError, match="'a' is in .*, which is no .safetensors file of the folder"):
        HfReader(str(tmp_path))
