"""OpenAI's chat completions: requests read field by field (`request`), answers written (`answers`)."""
