"""Networks and action distributions, built from Gymnasium spaces.

build.py    spaces -> ActorCritic; forward(observations) -> (distribution parameters, values)
heads.py    what the distribution parameters mean: sample, log_prob, entropy, kl, mode
fast.py     the same forward pass and sampling in numpy, for acting on small batches
"""
