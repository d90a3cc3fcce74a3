"""Files of HF folders; slime_like.megatron_backend.hf.eight_bits, too."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.make_quantised_checkpoint import make_quantised
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.hf.files import HfReader, finish_folder, save_stage

NAME = "model.layers.0.self_attn.q_proj.weight"


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float8_e5m2])
def test_a_weight_that_is_no_float_is_named(tmp_path, dtype):
    save_file({"a": torch.ones(4).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor 'a' is of the data type .*; weights are read as F64, F32"):
        HfReader(str(tmp_path)).read("a", shape=(4,))


@pytest.mark.parametrize("part", ["../x.safetensors", "/etc/passwd", 3, None, "x.bin", ""])
def test_an_index_names_files_of_its_folder_only(tmp_path, part):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": part}}))
    with pytest.raises(CheckpointError, match="'a' is in .*, which is no .safetensors file of the folder"):
        HfReader(str(tmp_path))


def eight_bit_folder(path, form, *, shape=(200, 300)):
    """A folder with one projection, and a norm, in one of the public formats; and the plain projection."""
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    (path / "plain").mkdir()
    save_file({NAME: plain, "model.norm.weight": torch.ones(4)}, path / "plain" / "model.safetensors")
    (path / "plain" / "config.json").write_text('{"dtype": "bfloat16"}')
    assert make_quantised(path / "plain", path / form, form) == 1
    return path / form, plain


def by_loops(folder, block):
    """float64 of every number, its own scale looked up one by one."""
    stored = load_file(folder / "model.safetensors")
    scale = next(tensor for name, tensor in stored.items() if "_scale" in name).double()
    factors = scale.reshape(1, 1).tolist() if block is None else scale.tolist()
    high, wide = block or stored[NAME].shape
    numbers = stored[NAME].double().tolist()
    return torch.tensor(
        [
            [number * factors[row // high][column // wide] for column, number in enumerate(line)]
            for row, line in enumerate(numbers)
        ],
        dtype=torch.float64,
    )


@pytest.mark.parametrize(("form", "block"), [("fp8", (128, 128)), ("int8", (1, 300)), ("fp8-tensor", None)])
def test_eight_bits_are_read_as_what_they_stand_for(tmp_path, form, block):
    folder, plain = eight_bit_folder(tmp_path, form)
    truth, reader = by_loops(folder, block), HfReader(str(folder))
    assert reader.names == {NAME, "model.norm.weight"}
    assert reader.dtype() == "float32"  # the norm's
    whole = reader.read(NAME, shape=(200, 300))
    assert whole.dtype == torch.float32 and (whole - truth).abs().max() < 1e-6
    assert (whole - plain).abs().max() < plain.abs().max() / (16 if "fp8" in form else 250)
    for start, stop in ((0, 100), (100, 200), (130, 131)):  # parts need not begin where a block does
        assert torch.equal(reader.read(NAME, shape=(200, 300), dim=0, start=start, stop=stop), whole[start:stop])
        assert torch.equal(reader.read(NAME, shape=(200, 300), dim=1, start=start, stop=stop), whole[:, start:stop])


def without(folder, *names, **changes):
    """Leave tensors out, or change them."""
    tensors = {key: tensor for key, tensor in load_file(folder / "model.safetensors").items() if key not in names}
    save_file(tensors | changes, folder / "model.safetensors")
    return HfReader(str(folder))


def test_eight_bits_that_say_too_little(tmp_path):
    folder, _ = eight_bit_folder(tmp_path, "fp8")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["weight_block_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weight_scale_inv'.*weight_block_size is None"):
        HfReader(str(folder)).read(NAME, shape=(200, 300))
    short = without(folder, **{NAME + "_scale_inv": torch.ones(1, 2)})
    config["quantization_config"]["weight_block_size"] = [128, 128]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"has shape \[1, 2\]; for a weight of \[200, 300\] it is \[2, 3\]"):
        short.read(NAME, shape=(200, 300))
    with pytest.raises(CheckpointError, match=r"q_proj.weight' is F8_E4M3 of shape \[200, 300\] with no scale"):
        without(folder, NAME + "_scale_inv").read(NAME, shape=(200, 300))
    with pytest.raises(
        CheckpointError, match=r"'model.norm.weight' is F32 of shape \[4\] with model.norm.weight_scale"
    ):
        without(folder, **{"model.norm.weight_scale": torch.ones(1)}).read("model.norm.weight", shape=(4,))


def test_an_export_says_nothing_of_eight_bits(tmp_path):
    template, _ = eight_bit_folder(tmp_path, "int8")
    assert "quantization_config" in json.loads((template / "config.json").read_text())
    (tmp_path / "out").mkdir()
    finish_folder(str(tmp_path / "out"), template=str(template), file_of={}, total_bytes=0, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "bfloat16"}
