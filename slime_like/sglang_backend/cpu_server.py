"""`python -m slime_like.sglang_backend.cpu_server <SGLang server arguments>`: SGLang's own server where there is no
CUDA, up in half the time.

Nearly all of SGLang's start-up is imports, paid in each of its three processes. Here the parent imports everything once
and forks (safe without CUDA, and before any thread is started), and only the model files that the checkpoint needs are
imported.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import threading

from slime_like.sglang_backend import cpu_compat, cpu_quant

# At module level: should sglang ever spawn a child, it imports this module again, and needs the stand-ins too.
cpu_compat.install()


def model_modules(models_folder: str, architectures: list[str]) -> set[str]:
    """Names of the files in sglang/srt/models that define these architectures; empty if one is not found."""
    files = {}
    for file_name in os.listdir(models_folder):
        if file_name.endswith(".py"):
            with open(os.path.join(models_folder, file_name), encoding="utf-8") as file:
                text = file.read()
            for architecture in architectures:
                if re.search(rf"^class {re.escape(architecture)}\b", text, re.MULTILINE):
                    files[architecture] = file_name[:-3]
    return set(files.values()) if len(files) == len(architectures) else set()


def import_only_needed_models(model_path: str) -> None:
    """Tell sglang's registry to leave out every model file but those of this checkpoint.

    All are imported when in doubt.
    """
    config_path = os.path.join(model_path, "config.json")
    spec = importlib.util.find_spec("sglang")
    if (
        not os.path.isfile(config_path)
        or spec is None
        or spec.origin is None
        or "SGLANG_DISABLED_MODEL_ARCHS" in os.environ
    ):
        return
    with open(config_path) as file:
        architectures = json.load(file).get("architectures") or []
    folder = os.path.join(os.path.dirname(spec.origin), "srt", "models")
    needed = model_modules(folder, architectures)
    if needed:
        others = (name[:-3] for name in sorted(os.listdir(folder)) if name.endswith(".py"))
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(
            name for name in others if name not in needed and name != "registry"
        )


def fork_children_after_imports() -> None:
    """Import what the children need, and make sglang fork them.

    Raises RuntimeError if an import has started a thread.
    """
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force=True)
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    gc.collect()
    gc.freeze()  # so that a child's collector does not touch, and thereby copy, the shared pages
    if threading.active_count() != 1:
        raise RuntimeError(f"forking is unsafe: threads are running after the imports: {threading.enumerate()}")


def main(argv: list[str]) -> None:
    """Serve until ended."""
    # The model path is on the command line in either spelling that the launcher may use.
    for position, text in enumerate(argv):
        name, _, value = text.partition("=")
        if name == "--model-path":
            model_path = value or argv[position + 1]
            if os.path.isabs(model_path) and not os.path.exists(model_path):  # else it may be a hub's name
                raise OSError(f"{model_path}: no such folder or file")
            import_only_needed_models(model_path)
    if "--enable-lora" in argv:
        cpu_compat.keep_adapters_pageable()
    if "--enable-deterministic-inference" in argv:
        cpu_compat.take_seeds()
    quantization = cpu_quant.asked_for(argv)
    if quantization is not None and cpu_compat.kernels_are_absent():
        argv = [*argv, *cpu_quant.arguments_for(quantization)]
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(argv)
    # reads the checkpoint's configuration: a bad one ends here, before the slow imports
    cpu_compat.resolve(server_args)
    fork_children_after_imports()
    if quantization is not None:
        cpu_quant.install()
    cpu_compat.keep_host_memory_pageable()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
