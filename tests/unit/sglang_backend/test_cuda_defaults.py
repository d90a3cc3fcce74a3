"""SGLang's attention where its FlashAttention 3 was left out of the install."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from slime_like.sglang_backend.cuda_defaults import attention_default, card_capability, kernels_folder
from slime_like.sglang_backend.launcher import EngineSpec, _cuda_defaults, _server_argv

FLASHINFER = {"attention_backend": "flashinfer"}


def install_kernels(site: Path, *, with_fa3: bool) -> Path:
    """A site folder with the files that an installed sglang-kernel has (0.4.5), empty."""
    folder = site / "sgl_kernel"
    (folder / "sm90").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('no driver here')")
    (folder / "sm90" / "common_ops.abi3.so").touch()
    if with_fa3:
        (folder / "flash_ops.abi3.so").touch()
    return folder


def fake_nvidia_smi(folder: Path, answer: str) -> None:
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{answer}'\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("with_fa3", "capability", "expected"),
    [
        (False, 9, FLASHINFER),
        (False, None, FLASHINFER),
        (False, 10, {}),  # Blackwell: SGLang never chooses fa3 there, and has better than flashinfer
        (False, 8, {}),
        (True, 9, {}),
        (True, None, {}),
    ],
)
def test_flashinfer_where_fa3_would_be_chosen_and_is_not_there(tmp_path, with_fa3, capability, expected):
    assert attention_default(str(install_kernels(tmp_path, with_fa3=with_fa3)), capability) == expected


def test_without_kernels_there_is_nothing_to_choose():
    assert attention_default(None, 9) == {}


@pytest.mark.parametrize(("answer", "capability"), [("9.0", 9), ("10.0\n10.0", 10), ("[N/A]", None)])
def test_the_driver_tells_the_card(tmp_path, monkeypatch, answer, capability):
    fake_nvidia_smi(tmp_path / "bin", answer)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert card_capability() == capability


def test_without_a_driver_the_card_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert card_capability() is None


@pytest.fixture
def hopper_without_fa3(tmp_path, monkeypatch):
    """A site folder and a PATH of such a host; the kernels' package is looked up, never imported."""
    folder = install_kernels(tmp_path / "site", with_fa3=False)
    fake_nvidia_smi(tmp_path / "bin", "9.0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    _cuda_defaults.cache_clear()
    assert kernels_folder() == str(folder)
    yield
    _cuda_defaults.cache_clear()


def test_the_command_line_has_it_and_the_users_flag_wins(hopper_without_fa3):
    def attention(**flags) -> list[str]:
        engine = EngineSpec(index=0, model_path="/models/m", log_path="/nowhere", extra_flags=flags)
        return [word for word in _server_argv(engine, port=1, cuda=True) if "attention-backend" in word]

    assert attention() == ["--attention-backend=flashinfer"]
    assert attention(attention_backend="triton") == ["--attention-backend=triton"]
    assert attention(decode_attention_backend="triton") == [
        "--attention-backend=flashinfer",
        "--decode-attention-backend=triton",
    ]
