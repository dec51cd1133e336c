"""Modules that compute a formula of an op."""
