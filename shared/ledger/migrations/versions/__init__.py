"""One module per migration, named by its number. A released one is never edited."""
