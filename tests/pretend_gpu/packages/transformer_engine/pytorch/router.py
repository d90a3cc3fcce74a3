"""Fused routers, which Megatron calls with --moe-router-fusion."""


def _not_here(*_, **__):
    raise NotImplementedError("fused routers are not pretended")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = _not_here
