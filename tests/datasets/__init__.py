"""Repository problems made of registry packages: rows of the SWE-bench family and Harbor tasks, with their repositories."""
