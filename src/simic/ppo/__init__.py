"""Training a policy: recurrent PPO from rollouts; imitation and implicit Q-learning from recorded episodes."""
