"""Models: configuration, loading, the fused decode step, and thinking tags."""
