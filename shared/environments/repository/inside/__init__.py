"""Programs that run inside the sandbox of a repository, on its interpreter's standard library alone."""
