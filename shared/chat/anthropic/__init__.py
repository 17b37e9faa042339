"""Anthropic's messages: requests read (`request`), answers written (`answers`)."""
