"""Optimizers, the average of the weights, and the learning rate of each step."""
