"""Package metadata: dependency ranges and extras.

The exact versions of each set of packages are in scripts/requirements/ (sets.toml).
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

CORE = [
    # The weights' receiver relies on limits of its server (silent and pipelining clients) that 3.14 has.
    "aiohttp>=3.14,<4",
    "httpx>=0.28,<0.29",
    "math-verify>=0.8,<1",
    "matplotlib>=3.9,<4",
    "megatron-core>=0.16.1,<0.17",
    "numpy>=2.0,<3",
    "orjson>=3.10,<4",
    "packaging>=24",
    # Megatron's checkpoint writer hangs without psutil, and does not declare it.
    "psutil>=6",
    "pyarrow>=20,<27",
    "ray[default]>=2.50,<3",
    "requests>=2.32,<3",
    "rich>=13,<16",
    "safetensors>=0.5,<1",
    "sglang-router>=0.3.2,<0.4",
    "tenacity>=9,<10",
    "tensorboard>=2.16,<3",
    "torch>=2.9",
    "transformers>=5.0,<6",
    "xxhash>=3.4,<5",
    "zstandard>=0.22,<1",
]

EXTRAS = {
    # What a CPU server imports. scripts/setup.sh installs sglang itself without its (CUDA) dependencies, which pip
    # cannot express here.
    "cpu": [
        "apache-tvm-ffi",
        "compressed-tensors",
        "dill",
        "einops",
        "fastapi",
        "gguf",
        "interegular",
        "ipython",
        "jsonschema",
        "loguru",
        "msgspec",
        "openai>=2,<3",
        "openai-harmony",
        "partial-json-parser",
        "pillow",
        "prometheus_client",
        "pybase64",
        "pydantic>=2,<3",
        "python-dateutil<3",
        "python-multipart",
        "pyzmq",
        "regex",
        "sentencepiece",
        "setproctitle",
        "soundfile",
        "tiktoken",
        "uvicorn",
        "uvloop",
        "xgrammar",
    ],
    # Libraries of environments for --env; exact versions that were tried: scripts/requirements/envs.txt.
    "envs": [
        "fhaviary>=0.37,<0.38",
        "gymnasium>=1.4,<2",
        "reasoning-gym>=0.1.25,<0.2",
        "skyrl-gym>=0.4,<0.5",
        "textarena>=0.7.4,<0.8",
    ],
    # What scripts/run-smollm2.sh needs: a GGUF file is read, a task is asked. The model itself comes by its digest:
    # scripts/requirements/examples.txt.
    "examples": ["accelerate>=1.10,<2", "gguf>=0.17,<1", "reasoning-gym>=0.1.25,<0.2"],
    # Checkers of --rm-type ifbench; exact versions that were tried: scripts/requirements/ifbench.txt.
    "ifbench": ["if-verifiable>=0.1.2,<0.2", "langdetect>=1.0.9,<2"],
    # The Tinker server: its HTTP side, its database (SQLite, PostgreSQL), weights on a disk or elsewhere.
    "tinker": [
        "aiosqlite>=0.22,<0.23",
        "alembic>=1.16,<2",
        "fastapi",
        "fsspec>=2025",
        "prometheus_client",
        "protobuf>=5,<8",
        "psycopg[binary]>=3.2,<4",
        "pydantic>=2,<3",
        "sqlalchemy[asyncio]>=2.1,<2.2",
        "uvicorn",
    ],
    "gpu": ["sglang>=0.5.17,<0.6", "transformer-engine[pytorch]>=2.9,<2.12"],
    "dev": [
        "mypy>=2,<3",
        # What adapters are compared with; it brings accelerate, which else only the examples need.
        "peft>=0.21,<1",
        "pytest>=9,<10",
        "pytest-timeout>=2.4,<3",
        "pytest-xdist>=3.8,<4",
        "pyyaml>=6,<7",
        "ruff>=0.17,<0.18",
        # The client that the Tinker server is tested with; nothing of the package imports it.
        "tinker>=0.38,<0.39",
        "types-requests",
    ],
}

setup(
    name="slime-like",
    version=(ROOT / "slime_like" / "__init__.py")
    .read_text(encoding="utf-8")
    .partition('__version__ = "')[2]
    .partition('"')[0],
    description="Megatron-native RL training: Megatron-core trains, SGLang generates, Ray places.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["slime_like", "slime_like.*"]),
    package_data={"slime_like": ["py.typed"]},
    install_requires=CORE,
    extras_require=EXTRAS,
)
