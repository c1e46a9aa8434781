"""The pages of the documentation on the screen; imported when one is opened."""
