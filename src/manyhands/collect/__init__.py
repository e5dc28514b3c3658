"""From environments to rollouts, unrolls and episodes: who steps them, with which noise."""
