"""Measurements that the command line prints: verified first, then timed."""
