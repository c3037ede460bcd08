"""Models: configuration, loading, the fused step, thinking tags."""
