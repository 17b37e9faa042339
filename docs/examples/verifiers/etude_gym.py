"""reasoning-gym's tasks as the environment that `verifiers` ships for them."""

import verifiers as vf
from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv


def load_environment(gym: str = "chain_sum", examples: int = 50, seed: int = 0) -> vf.Environment:
    """Return the environment. `gym`: the name of a task of reasoning-gym."""
    return ReasoningGymEnv(gym, num_train_examples=examples, num_eval_examples=10, seed=seed)
