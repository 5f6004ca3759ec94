"""Placeholder: filled by the first module of the package."""
