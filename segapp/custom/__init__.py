"""Custom components: user code that a config names, `package.module:factory` or `./file.py:factory`. No torch."""
