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
    {"loops", "tinker"},
]

#: Shipped for users' and our own tests; no production module may lean on them.
ONLY_FOR_TESTS = {"testing"}

#: Third-party name -> the modules (or packages) that may import it. Everything else runs and tests on a laptop.
FENCES = {
    "ray": {"cluster"},
    "megatron": {"megatron_backend"},
    "transformer_engine": {"megatron_backend"},
    "sglang": {
        "sglang_backend.answer_parser",
        "sglang_backend.launcher",
        "sglang_backend.cpu_server",
        "sglang_backend.cpu_compat",
        "sglang_backend.cpu_invariance",
        "sglang_backend.cpu_quant",
        "weight_sync",
    },
    "torch": {
        "algorithms",
        "weight_sync",
        "megatron_backend",
        "reward_model",
        "sglang_backend.cpu_server",
        "sglang_backend.cpu_compat",
        "sglang_backend.cpu_invariance",
        "sglang_backend.cpu_quant",
    },
    "aiohttp": {"rollout", "testing", "weight_sync.delta.receiver"},
    "httpx": {"sglang_backend.client"},
    "fastapi": {"tinker"},
    "sqlalchemy": {"tinker.store"},
    "alembic": {"tinker.store"},
    "wandb": {"observability.metrics"},
    "pyarrow": {"rollout.row_files"},
}

#: What stands beside the package; the package never imports it.
OUTSIDE = {"train", "arguments", "setup", "scripts", "tests", "benchmarks"}

#: Everything that may lie at the top of the repository, dot-files and tool configuration aside.
TOP_LEVEL = {
    "train.py",
    "arguments.py",
    "setup.py",
    "pyproject.toml",
    "slime_like",
    "scripts",
    "models",
    "tests",
    "docs",
    "benchmarks",
    "README.md",
    "LICENSE",
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8  # self and cls do not count
MAX_LINES_OF = {"train.py": 100, "arguments.py": 200}

#: Every module with logic has tests/unit/<package>/test_<file>.py, but for these: what needs ranks, engines or Ray is
#: tested with them. Module (or package) -> the files below tests/ that cover it; each imports or names it.
TESTED_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "config.checkpoint_rules": ("unit/job/test_resume.py",),
    "config.asynchrony": ("unit/config/test_async_rules.py",),
    "config.data": ("unit/config/test_rollout.py",),
    "config.engine": ("unit/config/test_placement.py",),
    "config.evaluation": ("unit/config/test_rollout.py",),
    "config.loss": ("unit/config/test_loss.py",),
    "config.observability": ("unit/job/test_resolve.py",),
    "config.optimizer": ("unit/config/test_checkpoint.py",),
    "config.reward": ("unit/config/test_rollout.py",),
    "config.adapter_rules": ("unit/config/test_lora.py",),
    "config.lora_targets": ("unit/config/test_lora.py",),
    "config.rules": ("unit/config/test_run.py",),
    "tinker.assemble": ("e2e/test_tinker.py",),
    "tinker.backends.seat": ("unit/tinker/backends/test_engines.py", "contract/test_tinker_engines.py"),
    "tinker.backends.start": ("e2e/test_tinker.py",),
    "tinker.server": ("unit/tinker/test_options.py", "e2e/test_tinker.py"),
    "tinker.errors": ("unit/tinker/test_records.py",),
    "tinker.execution.entries": ("unit/tinker/execution/test_call_book.py",),
    "tinker.execution.registry": ("unit/tinker/execution/test_sweeper.py",),
    "tinker.execution.verbs": ("unit/tinker/execution/test_sweeper.py",),
    "tinker.store.__main__": ("unit/tinker/store/test_database.py",),
    "tinker.store.checkpoints": ("unit/tinker/execution/test_sweeper.py",),
    "tinker.store.migrations": ("unit/tinker/store/test_database.py",),
    "tinker.store.requests": ("unit/tinker/test_service.py",),
    "tinker.store.sweeping": ("unit/tinker/execution/test_sweeper.py",),
    "tinker.api.app": ("unit/tinker/api/test_gate.py", "unit/tinker/api/test_isolation.py"),
    "tinker.api.bodies": ("unit/tinker/api/wire/test_requests.py",),
    "tinker.api.chat_bodies": ("unit/tinker/api/routes/test_openai.py",),
    "tinker.api.context": ("unit/tinker/api/test_sdk.py",),
    "tinker.api.external": ("unit/tinker/api/test_sdk.py",),
    "tinker.api.identity": ("unit/tinker/api/test_gate.py",),
    "tinker.api.links": ("unit/tinker/api/routes/test_downloads.py",),
    "tinker.api.observed": ("unit/tinker/api/routes/test_page.py",),
    "tinker.api.routes": ("unit/tinker/api/test_sdk.py",),
    "tinker.api.settings": ("unit/tinker/api/test_sdk.py",),
    "tinker.api.skipped": ("unit/tinker/api/test_sdk.py",),
    "tinker.store.clients": ("unit/tinker/api/test_isolation.py",),
    "tinker.store.key_rows": ("unit/tinker/api/test_gate.py",),
    "tinker.store.listings": ("unit/tinker/api/test_sdk.py",),
    "tinker.store.tenant_rows": ("unit/tinker/execution/test_tenant_terms.py",),
    "tinker.store.rows": ("unit/tinker/api/test_isolation.py",),
    "config.fake_quantisation": ("unit/config/test_quantisation.py",),
    "config.quantisation_rules": ("unit/config/test_quantisation.py",),
    "config.sync": ("unit/config/test_placement.py",),
    "config.tree": ("unit/config/test_run.py",),
    "cluster.engine_actor": ("e2e/test_config_file.py",),
    "cluster.engine_guests": ("contract/test_engine_guests.py", "e2e/test_engine_guests.py"),
    "cluster.fleet_router": ("contract/test_fleet_router.py",),
    "cluster.receivers": ("unit/config/test_delta.py",),
    "cluster.reward_group": ("multiprocess/test_reward_group.py",),
    "job.command_line": ("unit/config/test_arguments.py",),
    "job.build": ("e2e/test_placements.py",),
    "job.parts": ("unit/loops/test_sync_loop_lost_trainer.py",),
    "megatron_backend.step.advantages": ("multiprocess/test_algorithms.py",),
    "megatron_backend.checkpoint.agreement": ("multiprocess/test_async_save.py",),
    "megatron_backend.checkpoint.async_save": ("multiprocess/test_async_save.py",),
    "megatron_backend.checkpoint.state": ("multiprocess/test_async_save.py", "multiprocess/test_checkpoint.py"),
    "megatron_backend.compat.experts": ("multiprocess/test_experts.py",),
    "megatron_backend.convert": ("multiprocess/test_convert.py",),
    "megatron_backend.step.critic": ("multiprocess/test_critic.py",),
    "megatron_backend.step.forward": ("multiprocess/test_forward.py",),
    "megatron_backend.hf.eight_bits": ("unit/megatron_backend/hf/test_files.py",),
    "megatron_backend.hf.names_and_shards": (
        "multiprocess/test_interleaved.py",
        "unit/megatron_backend/hf/test_tables.py",
    ),
    "megatron_backend.hf.stages": ("multiprocess/test_own_card.py",),
    "megatron_backend.hf.save": ("multiprocess/test_checkpoint.py",),
    "megatron_backend.lora.build": ("multiprocess/test_lora.py",),
    "megatron_backend.lora.gains": ("unit/megatron_backend/lora/test_segments.py",),
    "megatron_backend.lora.state": ("multiprocess/test_lora.py",),
    "megatron_backend.lora.tenant_files": ("multiprocess/test_tenants.py",),
    "megatron_backend.lora.tenant_gradients": ("multiprocess/test_tenants.py",),
    "megatron_backend.lora.tenant_runner": ("multiprocess/test_tenants.py",),
    "megatron_backend.lora.tenant_verbs": ("multiprocess/test_tenants.py",),
    "megatron_backend.lora.tenants": ("multiprocess/test_tenants.py",),
    "observability.doctor.__main__": ("unit/observability/doctor/test_command.py",),
    "planning.memory.adapters": ("multiprocess/test_lora.py",),
    "megatron_backend.initialize": ("multiprocess/test_checkpoint.py",),
    "megatron_backend.model.attention": ("pretend_gpu/test_attention.py",),
    "megatron_backend.model.fake_quantised": ("multiprocess/test_fake_quantised.py",),
    "megatron_backend.model.layer_spec": ("multiprocess/test_plan_memory.py",),
    "megatron_backend.model.provider": (
        "multiprocess/test_plan_memory.py",
        "unit/megatron_backend/compat/test_megatron.py",
    ),
    "megatron_backend.publish": ("multiprocess/test_publish.py",),
    "megatron_backend.shared_parameters": ("multiprocess/test_shared_parameters.py",),
    "megatron_backend.step.routing_replay": ("multiprocess/test_routing_replay.py",),
    "megatron_backend.step.several_targets": ("multiprocess/test_tenants.py",),
    "megatron_backend.step.runner": ("multiprocess/test_algorithms.py",),
    "megatron_backend.verbs": ("multiprocess/test_verbs.py",),
    "megatron_backend.worker": (
        "multiprocess/test_training.py",
        "multiprocess/test_verbs.py",
        "multiprocess/test_parity.py",
    ),
    "planning.simulate.drawing": ("unit/planning/simulate/test_command.py",),
    "planning.simulate.generation": ("unit/planning/simulate/test_flow.py",),
    "planning.simulate.outcome": ("unit/planning/simulate/test_command.py",),
    "planning.simulate.table": ("unit/planning/simulate/test_command.py",),
    "reward_model.inputs": ("unit/reward_model/test_model.py",),
    "rollout.group_pool": ("unit/rollout/test_group_flow.py",),
    "rollout.rewards.worker": ("unit/rollout/rewards/test_pool.py",),
    "config.serving": ("unit/rollout/serve/test_player.py",),
    "rollout.serve": ("unit/rollout/serve/test_player.py", "unit/rollout/serve/test_server.py"),
    "rollout.check_data": ("unit/rollout/test_data_source.py", "unit/rollout/test_user_data.py"),
    "rollout.service": ("unit/rollout/test_manager.py",),
    "rollout.agents.adapters": ("unit/rollout/agents/test_adapters.py",),
    "rollout.agents.episode_metrics": ("unit/rollout/agents/test_episode.py",),
    "rollout.agents.turn_nodes": ("unit/rollout/agents/test_tree.py",),
    "rollout.agents.invariants": ("unit/rollout/agents/test_tree.py",),
    "rollout.agents.stage": ("unit/rollout/agents/test_episode.py",),
    "config.agents": ("unit/rollout/agents/test_episode.py",),
    "sglang_backend.adapter_client": ("unit/weight_sync/test_session.py", "e2e/test_lora.py"),
    "sglang_backend.answer_parser": ("unit/rollout/agents/test_answers.py",),
    "sglang_backend.cpu_compat": ("contract/test_engine_server_args.py",),
    "sglang_backend.cpu_server": ("e2e/test_external.py",),
    "sglang_backend.router_server": ("contract/test_engine_router.py",),
    "weight_sync.in_engine.devices": ("pretend_gpu/test_weight_sync.py",),
    "weight_sync.in_engine.groups": ("unit/weight_sync/transports/test_broadcast.py",),
    "weight_sync.in_engine.intake": ("unit/weight_sync/transports/test_ipc.py",),
    "weight_sync.ranks": ("multiprocess/test_ranks.py",),
    "weight_sync.delta.receiver_client": ("unit/weight_sync/delta/test_receiver.py", "contract/test_delta_engine.py"),
}

#: Names that say what was done, not what the thing is; refused in these folders and at the top.
VAGUE_NAMES = {"found", "told", "made"}
NAMED_FOLDERS = ("slime_like", "scripts", "benchmarks", "tests")

#: Never imported by `--help` or `--plan`: they answer at once.
HEAVY = ("torch", "ray", "megatron", "sglang", "transformers")
MAX_PLAN_SECONDS = 1.5  # of a processor
