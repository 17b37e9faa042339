"""`etude study scaling`: the same policy after several amounts of continued pretraining, each through the same SFT and RL."""
