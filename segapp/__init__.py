"""segapp: semantic segmentation that is exact at any GPU split, small in memory, and steerable while it runs."""

__version__ = "0.1.0"
