"""The documentation: Markdown pages, listed in README.md of this folder and shown by `segapp docs`."""
