"""Learning to decide: recurrent PPO, imitation, and learning from recorded episodes."""
