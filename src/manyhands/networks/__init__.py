"""Networks and action distributions, built from Gymnasium spaces.

encoders.py   observations -> features, and the layers that all networks are made of
build.py      spaces -> ActorCritic; forward(observations) -> (distribution parameters, values)
q.py          spaces -> Q(s, ·), or a policy and Q(s, a): what learns from a replay
own.py        a network of the user's own in their place
heads.py      what the distribution parameters mean: sample, log_prob, entropy, kl, mode
flat.py       the parameters of a network as one tensor
export.py     a policy as one ONNX or TorchScript file
numpy/        the same in numpy, several times as fast on small networks: encoders, forward and
              backward passes (mlp.py), the distributions (distributions.py)
"""
