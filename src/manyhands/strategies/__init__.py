"""Who acts, who learns, what moves between them: one flat program each.

registry.py              what a strategy is, as data: one row each; loads no torch
context.py, progress.py  what every program is given: one worker's place, and how far the run is
messages.py              what travels between the workers of an asynchronous run
experience.py            where experience comes from: collectors, and a worker's replay
"""
