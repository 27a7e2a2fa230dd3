"""Reinforcement learning of the models that the trainer trains, by its own step."""
