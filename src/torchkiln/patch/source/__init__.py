"""Forwards with some statements of their source rewritten."""
