"""scripts/from_gguf.py gives the very model that a GGUF file holds: checked on tiny files of llama.cpp's layout."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import from_gguf
from slime_like.errors import DataError
from tests.helpers.tiny_models import make_tiny_model

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
#: Sizes that blocks of 32 numbers divide, as llama.cpp's quantisations want.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "head_dim": 16}

#: llama.cpp's names of a layer's tensors.
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
OUTER["lm_head.weight"] = "output.weight"


def vocabulary() -> tuple[list[str], list[str]]:
    """Special tokens, the printable bytes as GPT-2 spells them, and one merge."""
    return [*SPECIAL, *(chr(code) for code in range(33, 127)), "Ġ", "ab"], ["a b"]


def llama_cpp_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER[rest.removesuffix('.weight')]}.weight"


def rotary_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp turns neighbours in pairs, HF the two halves of a head: the rows of q and k, in its order."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model, kind: gguf.GGMLQuantizationType) -> dict[str, np.ndarray]:
    """The model as a GGUF file, matrices of layers in the kind. Returns what the file's numbers are, by HF's names."""
    config, numbers = model.config, {}
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(12345.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        stored = rotary_pairs(data, heads) if heads else data
        if data.ndim == 2 and "layers" in name:
            packed = gguf.quants.quantize(stored, kind)
            writer.add_tensor(llama_cpp_name(name), packed, raw_dtype=kind)
            read = gguf.quants.dequantize(packed, kind)
            # the same order of rows, back
            numbers[name] = (
                read.reshape(heads, -1, 2, read.shape[1]).swapaxes(1, 2).reshape(read.shape) if heads else read
            )
        else:
            writer.add_tensor(llama_cpp_name(name), stored)
            numbers[name] = data
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def source(folder: Path, *, tied: bool):
    rope = {"rope_type": "default", "rope_theta": 12345.0}
    vocab_size = len(vocabulary()[0])
    make_tiny_model(str(folder), "llama", tied=tied, vocab_size=vocab_size, rope_parameters=rope, **SIZES)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_computes_what_the_model_in_the_file_does(tmp_path: Path, tied: bool):
    """fp32 in the file, fp32 out: the same logits to the bit as the model that the file was written from."""
    model = source(tmp_path / "source", tied=tied)
    write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType.F32)
    assert from_gguf.main([str(tmp_path / "model.gguf"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.dtype == torch.float32
    tokens = torch.arange(40)[None] % model.config.vocab_size
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, model(tokens).logits)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert (config["tie_word_embeddings"], config["eos_token_id"]) == (tied, 2)


def test_quantised_numbers_are_unpacked_and_rounded_once(tmp_path: Path):
    model = source(tmp_path / "source", tied=True)
    numbers = write_gguf(tmp_path / "model.gguf", model, gguf.GGMLQuantizationType.Q8_0)
    summary = from_gguf.convert(tmp_path / "model.gguf", tmp_path / "out", dtype=torch.bfloat16)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert not np.array_equal(
        numbers["model.layers.0.mlp.up_proj.weight"], model.state_dict()["model.layers.0.mlp.up_proj.weight"]
    )
    for name, data in numbers.items():
        assert torch.equal(weights[name], torch.tensor(data).bfloat16()), name
    assert summary["parameters"] == sum(data.size for data in numbers.values())
    assert (summary["tied"], summary["dtype"], summary["chat_template"]) == (True, "bfloat16", True)


def test_the_tokenizer_comes_along(tmp_path: Path):
    write_gguf(tmp_path / "model.gguf", source(tmp_path / "source", tied=True), gguf.GGMLQuantizationType.F32)
    from_gguf.convert(tmp_path / "model.gguf", tmp_path / "out", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens, _ = vocabulary()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "cab b"}], return_dict=False)
    assert [tokens[one] for one in ids] == ["<|im_start|>", "c", "ab", "Ġ", "b", "<|im_end|>"]
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<|im_end|>", TEMPLATE)


def test_what_cannot_be_converted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    text = tmp_path / "model.bin"
    text.write_bytes(b"PK\x03\x04")
    assert from_gguf.main([str(text), str(tmp_path / "out")]) == 2
    assert "no GGUF file: it starts with b'PK\\x03\\x04'" in capsys.readouterr().err
    assert from_gguf.main([str(tmp_path / "absent.gguf"), str(tmp_path / "out")]) == 2
    writer = gguf.GGUFWriter(str(tmp_path / "strange.gguf"), "no-such-architecture")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(DataError, match=r"strange\.gguf: transformers cannot read it: .*no-such-architecture"):
        from_gguf.convert(tmp_path / "strange.gguf", tmp_path / "out", dtype=torch.bfloat16)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/config.json").write_text("{}")
    with pytest.raises(DataError, match="not empty"):
        from_gguf.convert(tmp_path / "strange.gguf", tmp_path / "full", dtype=torch.bfloat16)
