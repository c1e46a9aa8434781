"""Reports as single HTML files: one run, or several runs side by side."""
