"""Where transitions rest: rings, priorities, shards, frames."""
