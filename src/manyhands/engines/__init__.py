"""How processes start, talk, agree and stop. `base.py` is the contract; one file per engine."""
