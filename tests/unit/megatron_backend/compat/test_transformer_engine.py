"""transformer-engine that is missing, broken or there, on a host that says it has CUDA."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from slime_like.config.parallel import ParallelConfig
from slime_like.errors import ConfigError
from slime_like.megatron_backend.compat import transformer_engine as compat
from slime_like.megatron_backend.model.layer_spec import CausalAttention, block_spec
from slime_like.megatron_backend.model.provider import transformer_config
from tests.helpers.parallel_sizes import parallel_sizes
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config

#: As TE fails when CUDA's libraries are not where it looks for them: no ImportError.
BROKEN = 'import ctypes\nctypes.CDLL("libcudart.so.of.another.host")\n'
BACKENDS = ("auto", "flash", "fused", "unfused", "local")


def write_package(folder: Path, source: str) -> None:
    package = folder / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text(source)
    (package / "__init__.py").touch()


def forget() -> None:
    compat.why_not.cache_clear()
    compat._note.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.fixture
def cuda_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A host with CUDA as far as torch says; calling it installs a transformer-engine of that source."""
    forget()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.syspath_prepend(tmp_path)

    def install(source: str) -> None:
        write_package(tmp_path, source)
        importlib.invalidate_caches()

    yield install
    forget()


def test_it_is_used_where_it_can_be_imported_but_not_with_local(cuda_host):
    cuda_host("")
    assert compat.why_not() is None
    assert {name for name in BACKENDS if compat.uses_transformer_engine(name)} == set(BACKENDS) - {"local"}


def test_a_broken_one_is_not_used_and_its_error_is_said_once(cuda_host, caplog):
    cuda_host(BROKEN)
    with caplog.at_level(logging.WARNING):
        assert [compat.uses_transformer_engine(name) for name in ("auto", "local", "auto")] == [False] * 3
    (warning,) = caplog.messages
    assert "cannot be imported: OSError: libcudart.so.of.another.host" in warning


@pytest.mark.parametrize("name", ["flash", "fused", "unfused"])
def test_asked_for_by_name_a_broken_one_is_an_error_with_its_words(cuda_host, name):
    cuda_host(BROKEN)
    with pytest.raises(ConfigError) as caught:
        compat.uses_transformer_engine(name)
    assert f"--attention-backend {name} asks for transformer-engine" in str(caught.value)
    assert "OSError: libcudart.so.of.another.host" in str(caught.value)
    assert "--attention-backend auto" in str(caught.value)


def test_asked_for_by_name_a_missing_one_is_an_error_too(cuda_host):
    with pytest.raises(ConfigError, match="it is not installed"):
        compat.uses_transformer_engine("flash")
    assert not compat.uses_transformer_engine("auto")


def test_without_cuda_the_flag_is_only_noted():
    forget()
    assert not any(compat.uses_transformer_engine(name) for name in BACKENDS)


def test_local_makes_layers_of_ours_beside_a_working_one(cuda_host, tmp_path):
    cuda_host("")
    model = make_config(make_tiny_model(str(tmp_path / "model"), "qwen3")).model
    local = dataclasses.replace(model, attention_backend="local")
    with parallel_sizes():
        spec = block_spec(transformer_config(local, ParallelConfig(), bf16=False)).layer_specs[0]
    assert spec.submodules.self_attention.submodules.core_attention is CausalAttention


@pytest.mark.slow
def test_megatron_can_be_imported_beside_a_broken_one(tmp_path: Path):
    write_package(tmp_path, BROKEN)
    code = (
        f"import sys, torch; sys.path.insert(0, {str(tmp_path)!r}); torch.cuda.is_available = lambda: True\n"
        "import slime_like.megatron_backend\n"
        "import megatron.core.extensions.transformer_engine as its\n"
        "print(its.HAVE_TE)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr[-2000:]
