"""The documentation: Markdown pages for people, listed in README.md of this folder, and shown by `segapp docs`."""
