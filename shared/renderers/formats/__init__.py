"""Chat formats: one module each, named after the format with `_` for `-`. A module has a function `load(directory)` that
returns the renderer of a checkpoint directory. To add a format, add its module and a test; nothing else names it."""
