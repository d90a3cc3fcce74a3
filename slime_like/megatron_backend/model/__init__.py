"""The model of one rank: layers, stages, a critic's head."""
