"""The version of memplan: written into every plan, read by the build."""

__version__ = "0.1.0"
