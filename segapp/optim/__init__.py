"""What changes the weights in a step: optimizers and the average of the weights, and the learning rate of each step."""
