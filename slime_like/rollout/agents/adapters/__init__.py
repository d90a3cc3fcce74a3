"""Libraries of environments as environments of ours. Each is imported only when its name stands in --env."""
