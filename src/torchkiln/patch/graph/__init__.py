"""Forwards with chains of calls fused in their graph."""
