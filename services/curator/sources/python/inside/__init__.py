"""What runs inside of the sandbox in which a source tries its candidates."""
