"""The layout's rules, as data. test_architecture.py enforces them; a reader learns the design from them."""

#: A module imports its own package and strictly lower layers. A lazy import counts.
LAYERS = [
    {"errors"},
    {"utils"},
    {"config", "records"},
    {"observability", "algorithms", "planning"},
    {"sglang_backend"},
    {"weight_sync"},
    {"megatron_backend", "rollout", "reward_model"},
    {"cluster", "testing"},
    {"job"},
    {"loops", "api_server"},
]

#: Shipped for users' and our own tests; no production module may lean on them.
ONLY_FOR_TESTS = {"testing"}

#: Third-party name -> the modules (or packages) that may import it. Everything else runs and tests on a laptop.
FENCES = {
    "ray": {"cluster"},
    "megatron": {"megatron_backend"},
    "transformer_engine": {"megatron_backend"},
    "sglang": {"sglang_backend.launcher", "sglang_backend.cpu_server", "sglang_backend.cpu_compat", "weight_sync"},
    "torch": {"algorithms", "weight_sync", "megatron_backend", "reward_model", "sglang_backend.cpu_server", "sglang_backend.cpu_compat"},
    "fastapi": {"api_server"},
    "sqlalchemy": {"api_server.store"},
    "wandb": {"observability.metrics"},
}

#: What stands beside the package; the package never imports it.
OUTSIDE = {"train", "arguments", "setup", "scripts", "tests", "benchmarks"}

#: Everything that may lie at the top of the repository, dot-files and tool configuration aside.
TOP_LEVEL = {"train.py", "arguments.py", "setup.py", "pyproject.toml", "slime_like", "scripts", "models", "tests", "docs", "benchmarks", "README.md", "LICENSE"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8  # self and cls do not count
MAX_LINES_OF = {"train.py": 100, "arguments.py": 200}

#: Never imported by `--help` or `--plan`: they answer at once.
HEAVY = ("torch", "ray", "megatron", "sglang", "transformers")
MAX_PLAN_SECONDS = 1.5
