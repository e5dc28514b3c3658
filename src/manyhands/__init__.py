"""manyhands: run a reinforcement-learning job on everything you have."""
