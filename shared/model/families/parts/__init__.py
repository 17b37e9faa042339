"""What the files of the families share. A folder of its own: every module beside it is a family."""
