"""Networks and action distributions, built from Gymnasium spaces.

build.py    spaces -> ActorCritic; forward(observations) -> (distribution parameters, values)
heads.py    what the distribution parameters mean: sample, log_prob, entropy, kl, mode
numpy/      the same in numpy, several times as fast on small networks: forward and backward passes
            (mlp.py), the distributions (distributions.py)
"""
