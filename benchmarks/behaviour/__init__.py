"""Measures how a reward changes the demo's policy: a behaviour term that is added in mid-run, and the length penalty."""
